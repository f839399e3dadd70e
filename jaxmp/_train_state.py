"""TrainState for Flax Linen: parameters, optimizer state and step in one pytree."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import serialization, struct

from jaxmp import _gradients, _overwritten
from jaxmp._core import _trees
from jaxmp._loss_scale import DynamicLossScale, NoLossScale, StaticLossScale
from jaxmp._policies._required import check_required
from jaxmp.errors import JaxmpError
from jaxmp.optim import _find, _master, _skip
from jaxmp.optim._apply import apply_update
from jaxmp.optim._gradient_dtypes import GradientDtypesState


class TrainState(struct.PyTreeNode):
    """A drop-in for `flax.training.train_state.TrainState` that is right in mixed precision.

    Every leaf is an array, so it survives `jit`, donation, `scan` and checkpoints. Subclass it to
    hold more (batch statistics, averages), as with Flax's.

    Attributes:
      step: int32 scalar; counts the updates that were applied, skipped steps not among them.
      apply_fn: usually `model.apply` (static).
      params: parameters in their storage dtypes; or a dict of collections with `params` and
        `_overwrite_with_gradient`.
      tx: the optax transformation (static).
      opt_state: its state, with masters, loss scale and counters where it has them.

    Example:
      >>> recipe = jaxmp.load_recipe("bf16_params")
      >>> state = TrainState.create(
      ...     apply_fn=lambda params, x: x @ params["w"],
      ...     params={"w": jnp.ones((3, 1))},
      ...     tx=recipe.optimizer(optax.sgd(0.1)),
      ... )
      >>> state.params["w"].dtype
      dtype(bfloat16)
    """

    step: Any
    apply_fn: Callable[..., Any] = struct.field(pytree_node=False)
    params: Any = struct.field(pytree_node=True)
    tx: optax.GradientTransformation = struct.field(pytree_node=False)
    opt_state: Any = struct.field(pytree_node=True)

    @classmethod
    def create(
        cls,
        *,
        apply_fn: Callable[..., Any],
        params: Any,
        tx: optax.GradientTransformation,
        **kwargs: Any,
    ) -> Self:
        """Makes the state of step 0.

        Masters are taken from `params` as they are; then `params` are cast to their storage
        dtypes. Every array in the state is a new one, so a donated state cannot take the arrays
        that were given here with it.

        Args:
          apply_fn: usually `model.apply`.
          params: the parameters `init` returned, in FP32; or the dict of `params` and
            `_overwrite_with_gradient`. Shapes (`jax.ShapeDtypeStruct`, as `jax.eval_shape` returns
            them) make a state of shapes, for shardings and for restoring checkpoints.
          tx: an optax transformation; `recipe.optimizer(inner)` makes one.
          **kwargs: fields of a subclass.

        Raises:
          CompositionError: if something around `mixed_precision` would break it silently.
          RuleError: if a required rule that sets `param_dtype` by path matches no parameter.
        """
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(params)):
            made = jax.eval_shape(functools.partial(_make, tx), params)
            made["params"] = jax.tree.map(_placed_as, made["params"], params)
            kwargs = jax.tree.map(_abstract, kwargs)
        else:
            made = _make(tx, params)
            kwargs = jax.tree.map(_fresh_array, kwargs)
        return cls(apply_fn=apply_fn, tx=tx, **made, **kwargs)

    @property
    def loss_scale(self) -> Any:
        """The loss scale in the optimizer state; `NoLossScale()` if the optimizer keeps none."""
        return _find.shared_loss_scale(self.opt_state)

    def value_and_grad(
        self,
        fn: Callable[..., Any],
        argnums: int | Sequence[int] = 0,
        has_aux: bool = False,
        **options: Any,
    ) -> Callable[..., Any]:
        """`jaxmp.value_and_grad` of `fn(params, *args)` at this state's parameters and loss scale.

        Args:
          fn: takes the parameters first.
          argnums: which arguments to differentiate; the parameters are argument 0.
          has_aux: `fn` returns auxiliary data beside the loss.
          **options: the keyword arguments of `jaxmp.value_and_grad`; argument numbers count the
            parameters as 0. The optimizer decides the loss scale, the dtypes of sums and
            `axis_name`: with `recipe.optimizer(inner, axis_name="data")`, loss and gradients are
            averaged over that axis once, here. For gradients that must not be averaged, as those
            of parameters of which each device holds a part, use
            `jaxmp.value_and_grad(fn, loss_scale=state.loss_scale)(state.params, *args)`.

        Returns:
          A function of `*args`, the arguments of `fn` after the parameters.

        Example:
          `loss, grads = state.value_and_grad(loss_fn)(batch)`
        """
        options = _find.gradient_options(self.opt_state, options)
        run = _gradients.value_and_grad(fn, argnums, has_aux, **options)
        return lambda *args, **kwargs: run(self.params, *args, **kwargs)

    def apply_gradients(
        self, *, grads: Any, extra_args: Mapping[str, Any] | None = None, **mutables: Any
    ) -> Self:
        """One optimizer step, or none at all.

        If the gradients are finite, parameters, masters, optimizer state and every field named in
        `mutables` take their new values and `step` counts on. If not, all of them keep their old
        values, bit for bit, and only the loss scale and the counters move (typed PRNG keys among
        the mutables move on too).

        Args:
          grads: unscaled gradients, as `value_and_grad` returns them; a tree like `params`.
          extra_args: further arguments of the optimizer's `update`, which some transformations of
            optax take: `{"value": loss}` for `optax.polyak_sgd` and
            `optax.contrib.reduce_on_plateau`; `{"value": loss, "grad": grads, "value_fn": fn}` for
            line searches such as that of `optax.lbfgs`. Losses and gradients are unscaled, and a
            function of the parameters is called with the FP32 ones.
          **mutables: new values of other fields, such as `batch_stats=...`.

        Returns:
          The next state.

        Raises:
          JaxmpError: if a mutable is no field, or its new value has another structure.
        """
        self._check_mutables(mutables)
        params, old_overwritten = _overwritten.split(self.params)
        grads, overwritten = _overwritten.split(grads)
        new_params, opt_state, applied = apply_update(
            self.tx, grads, self.opt_state, params, **(extra_args or {})
        )
        if applied is not None:
            old = {name: getattr(self, name) for name in mutables}
            mutables = _trees.select(applied, mutables, old)
            overwritten = _trees.select(applied, overwritten, old_overwritten)
        one = jnp.ones((), jnp.int32) if applied is None else applied.astype(jnp.int32)
        return self.replace(
            step=jnp.asarray(self.step, jnp.int32) + one,
            params=_overwritten.join(new_params, overwritten, self.params),
            opt_state=opt_state,
            **mutables,
        )

    def _check_mutables(self, mutables: dict[str, Any]) -> None:
        for name, value in mutables.items():
            if name in ("step", "params", "opt_state", "tx", "apply_fn"):
                raise JaxmpError(
                    f"apply_gradients computes {name} itself; set it by state.replace({name}=...)."
                )
            if name not in self.__dataclass_fields__:
                raise JaxmpError(
                    f"{type(self).__name__} has no field {name!r}. Add it in a subclass: "
                    f"class State(jaxmp.TrainState): {name}: Any"
                )
            if _described(value) != _described(getattr(self, name)):
                raise JaxmpError(
                    f"apply_gradients(..., {name}=...) has another structure, or other shapes or "
                    f"dtypes, than the state's {name}, so a skipped step could not restore it. "
                    f"Give {name} its full structure from the start: TrainState.create(..., "
                    f"{name}=...), and cast what the step computes to the dtypes it has there."
                )


def _make(tx: optax.GradientTransformation, params: Any) -> dict[str, Any]:
    """Step, stored parameters and optimizer state of step 0."""
    trainable, overwritten = _overwritten.split(params)
    trainable = jax.tree.map(_strong, trainable)
    _find.check_composition(jax.eval_shape(tx.init, trainable))
    opt_state = tx.init(trainable)
    _find.shared_loss_scale(opt_state)
    _check_rules(opt_state, trainable)
    stored = jax.tree.map(_fresh, _master.store(trainable, opt_state), trainable)
    fix = (
        "state = state.replace(params=recipe.cast_params(state.params)). If another part of the "
        "optimizer trains them, put all parts inside: recipe.optimizer(optax.partition({...}, "
        "labels))."
    )
    _master.warn_of_wide(stored, opt_state, fix, stacklevel=3)
    return {
        "step": jnp.zeros((), jnp.int32),
        "params": _overwritten.join(stored, jax.tree.map(jnp.array, overwritten), params),
        "opt_state": _trees.owned(opt_state, params, stored),
    }


def _abstract(leaf: Any) -> Any:
    """The shape and dtype of an array; other leaves as they are."""
    if not isinstance(leaf, (jax.Array, np.ndarray)):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None))


def _placed_as(leaf: Any, like: Any) -> Any:
    """A shape with the sharding of the parameter that it was made from."""
    sharding = getattr(like, "sharding", None)
    return leaf if sharding is None else leaf.update(sharding=sharding)


def _described(tree: Any) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(jnp.shape(x), getattr(x, "dtype", type(x))) for x in leaves]


def _strong(leaf: Any) -> Any:
    """Arrays made from Python numbers are weakly typed, and step 2 would be traced anew."""
    if isinstance(leaf, float):
        return jnp.asarray(leaf, jnp.float32)
    weak = getattr(leaf, "weak_type", False)
    return jnp.asarray(leaf, dtype=leaf.dtype) if weak else leaf


def _fresh_array(leaf: Any) -> Any:
    return jnp.array(leaf, copy=True) if isinstance(leaf, jax.Array) else leaf


def _fresh(new: Any, given: Any) -> Any:
    return jnp.array(new, copy=True) if new is given else new


def _check_rules(opt_state: Any, params: Any) -> None:
    """Refuses required rules that set `param_dtype` by path and match no parameter."""
    paths = set()
    for names, _ in _trees.leaves_with_path(params):
        inside = _trees.rule_names(params, names)
        paths.add(_trees.parameter_path(inside))
        paths.update("/".join(inside[:i]) for i in range(len(inside)))
    for node in _master.master_states(opt_state):
        policies = node.layout.policies
        if policies is not None:
            rules = [
                r for r in policies.rules if r.param_dtype is not None and r.module_type is None
            ]
            check_required(policies, sorted(paths), rules)


# ---------------------------------------------------------------------------
# flax.serialization: states are written as dicts of their fields
# ---------------------------------------------------------------------------


def _register(cls: type, fields: tuple[str, ...], replace: Callable[..., Any]) -> None:
    def to_state_dict(node: Any) -> dict[str, Any]:
        return {name: serialization.to_state_dict(getattr(node, name)) for name in fields}

    def from_state_dict(node: Any, state: dict[str, Any]) -> Any:
        return replace(
            node,
            **{
                name: serialization.from_state_dict(getattr(node, name), state[name], name=name)
                for name in fields
            },
        )

    serialization.register_serialization_state(cls, to_state_dict, from_state_dict)


for _cls in (_skip.SkipStats, _skip.SkipNonfiniteState, GradientDtypesState):
    _leaves = tuple(f.name for f in dataclasses.fields(_cls) if not f.metadata.get("static"))
    _register(_cls, _leaves, dataclasses.replace)
for _cls in (NoLossScale, StaticLossScale, DynamicLossScale):
    _register(_cls, _cls.LEAVES, lambda node, **leaves: node.with_leaves(**leaves))


def _masters_to_state_dict(node: _master.MasterParamsState) -> dict[str, Any]:
    """Returns the fields under the names that they have in tree paths."""
    children, _ = node.tree_flatten_with_keys()
    return {key.name: serialization.to_state_dict(child) for key, child in children}


def _masters_from_state_dict(
    node: _master.MasterParamsState, state: dict[str, Any]
) -> _master.MasterParamsState:
    if node.layout.key not in state:
        stored = next((key for key in state if key.endswith("_masters")), "unknown masters")
        raise JaxmpError(
            f"The state dict was written with {stored}, and the state to restore has "
            f"{node.layout.key}. Restore under the recipe that wrote it, or convert the masters: "
            "jaxmp.checkpoint.Checkpointer(directory).restore(state, migrate=True)."
        )
    children, layout = node.tree_flatten_with_keys()
    return _master.MasterParamsState.tree_unflatten(
        layout,
        [
            serialization.from_state_dict(child, state[key.name], name=key.name)
            for key, child in children
        ],
    )


serialization.register_serialization_state(
    _master.MasterParamsState, _masters_to_state_dict, _masters_from_state_dict
)
