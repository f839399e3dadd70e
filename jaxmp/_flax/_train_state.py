"""TrainState for Flax Linen: parameters, optimizer state and step in one pytree."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import serialization, struct
from jax.core import Tracer

from jaxmp import _core
from jaxmp._core import Array, PyTree
from jaxmp._gradients import _loss_scale, _value_and_grad
from jaxmp.errors import JaxmpError
from jaxmp.fp8 import _overwritten
from jaxmp.optim import _apply, _assign, _find, _layout, _master
from jaxmp.optim._moments import MomentState


class TrainState(struct.PyTreeNode):
    """Replacement of `flax.training.train_state.TrainState` for mixed precision.

    Every leaf is an array, so the state passes through `jit`, donation, `scan` and checkpoints
    unchanged. Subclass it to add fields (batch statistics, averages), as with Flax's.

    Attributes:
      step: int32 scalar; the number of applied updates, without skipped steps.
      apply_fn: usually `model.apply` (static).
      params: parameters in their storage dtypes; or a dict of collections with `params` and
        `_overwrite_with_gradient`.
      tx: the optax transformation (static).
      opt_state: the state of `tx`, including masters, loss scale and skip counters if it has any.

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

    step: Array
    apply_fn: Callable[..., Any] = struct.field(pytree_node=False)
    params: PyTree = struct.field(pytree_node=True)
    tx: optax.GradientTransformation = struct.field(pytree_node=False)
    opt_state: PyTree = struct.field(pytree_node=True)

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        own: Any = cls
        own.replace = _replace  # Flax sets its own function on each class.

    @classmethod
    def create(
        cls,
        *,
        apply_fn: Callable[..., PyTree],
        params: PyTree,
        tx: optax.GradientTransformation,
        **kwargs: PyTree,
    ) -> Self:
        """Creates the state of step 0.

        Masters are copied from `params` before these are cast to their storage dtypes. Every array
        in the state is new, so donating the state does not delete the arrays in `params`.

        Args:
          apply_fn: usually `model.apply`.
          params: the parameters that `init` returned, in FP32; or the dict of `params` and
            `_overwrite_with_gradient`. Shapes (`jax.ShapeDtypeStruct`, as from `jax.eval_shape`)
            create an abstract state, for shardings and for restoring checkpoints.
          tx: an optax transformation, such as `recipe.optimizer(inner)`.
          **kwargs: fields of a subclass.

        Returns:
          The state.

        Raises:
          CompositionError: if a transformation around `recipe.optimizer` would break it silently.
          JaxmpError: for an argument that is not a field.
          RuleError: if a required rule that sets `param_dtype` by path matches no parameter.
        """
        for name in kwargs.keys() - cls.__dataclass_fields__.keys():
            raise JaxmpError(_no_field(cls, name))
        _master.check_inner(tx)
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(params)):
            made = jax.eval_shape(functools.partial(_make, tx), params)
            placed = lambda leaf, like: leaf.update(sharding=getattr(like, "sharding", None))
            made["params"] = jax.tree.map(placed, made["params"], params)
            kwargs = jax.tree.map(_abstract, kwargs)
        else:
            made = _make(tx, params)
            kwargs = _core.owned(kwargs, kwargs)
        policies = getattr(type(getattr(apply_fn, "__self__", None)), "_jaxmp_policies", None)
        _assign.warn_without_masters(_overwritten.split(params)[0], made["opt_state"], policies)
        return cls(apply_fn=apply_fn, tx=tx, **made, **kwargs)

    @property
    def loss_scale(self) -> _loss_scale.LossScale:
        """The loss scale in the optimizer state; `NoLossScale()` if it has none."""
        return _find.own_loss_scale(self.opt_state)

    def value_and_grad(
        self,
        fn: Callable[..., PyTree],
        argnums: int | Sequence[int] = 0,
        has_aux: bool = False,
        **options: Any,
    ) -> Callable[..., PyTree]:
        """Returns `jaxmp.value_and_grad` of `fn(params, *args)` with this state's loss scale.

        Args:
          fn: a function whose first argument is the parameters.
          argnums: the arguments to differentiate; the parameters are argument 0.
          has_aux: `fn` returns auxiliary data together with the loss.
          **options: the keyword arguments of `jaxmp.value_and_grad`; argument numbers count the
            parameters as 0. The optimizer decides the loss scale, the dtypes of sums and
            `axis_name`: with `recipe.optimizer(inner, axis_name="data")`, loss and gradients are
            averaged over that axis by this function, and only once. For gradients that must not
            be averaged, such as those of parameters that are split over the devices, use
            `jaxmp.value_and_grad(fn, loss_scale=state.loss_scale)(state.params, *args)`.

        Returns:
          A function of `*args`, the arguments of `fn` after the parameters.

        Example:
          `loss, grads = state.value_and_grad(loss_fn)(batch)`
        """
        options = _find.gradient_options(self.opt_state, options)
        run = _value_and_grad.value_and_grad(fn, argnums, has_aux, **options)

        def value_and_grad_fn(*args: PyTree, **kwargs: PyTree) -> PyTree:
            if args and args[0] is self.params:
                _check_signature(fn, (self.params, *args), kwargs)
            return run(self.params, *args, **kwargs)

        return value_and_grad_fn

    def apply_gradients(
        self, *, grads: PyTree, extra_args: Mapping[str, object] | None = None, **mutables: PyTree
    ) -> Self:
        """Applies one optimizer step, or skips it.

        If the gradients are finite, parameters, masters, optimizer state and every field named in
        `mutables` take their new values, and `step` increases by 1. Otherwise all of them keep
        their old values bit for bit, and only the loss scale, the skip counters and typed PRNG keys
        in the mutables change. `replace(batch_stats=...)` takes the finite elements of any step.

        Args:
          grads: unscaled gradients, as `value_and_grad` returns them; a tree like `params`.
          extra_args: further arguments of the optimizer's `update`, which some transformations of
            optax accept: `{"value": loss}` for `optax.polyak_sgd` and
            `optax.contrib.reduce_on_plateau`; `{"value": loss, "grad": grads, "value_fn": fn}` for
            line searches such as that of `optax.lbfgs`. Losses and gradients are unscaled, and a
            loss is called with FP32 parameters and differentiated as by `value_and_grad`.
          **mutables: new values of other fields, such as `batch_stats=...`.

        Returns:
          The next state.

        Raises:
          JaxmpError: if a mutable is not a field, or its new value has another structure.
        """
        self._check_mutables(mutables)
        params, old_overwritten = _overwritten.split(self.params)
        grads, overwritten = _overwritten.split(grads)
        new_params, opt_state, applied = _apply.apply_update(
            self.tx, grads, self.opt_state, params, **(extra_args or {})
        )
        if applied is not None:
            mutables = _core.select(applied, mutables, {n: getattr(self, n) for n in mutables})
            overwritten = _overwritten.select(applied, overwritten, old_overwritten)
        increment = jnp.ones((), jnp.int32) if applied is None else applied.astype(jnp.int32)
        new = self.replace(
            step=jnp.asarray(self.step, jnp.int32) + increment,
            params=_overwritten.join(new_params, overwritten, self.params),
            opt_state=opt_state,
            **mutables,
        )
        return _core.warn_if_dropped(new, "state = state.apply_gradients(grads=grads)")

    def _check_mutables(self, mutables: dict[str, Any]) -> None:
        for name, value in mutables.items():
            if name in ("step", "params", "opt_state", "tx", "apply_fn"):
                raise JaxmpError(
                    f"apply_gradients computes {name}. Set it with state.replace({name}=...)."
                )
            if name not in self.__dataclass_fields__:
                raise JaxmpError(_no_field(type(self), name))
            if not _core.are_alike(value, getattr(self, name)):
                raise JaxmpError(
                    f"apply_gradients(..., {name}=...) has another structure, or other shapes or "
                    f"dtypes, than the state's {name}, so a skipped step could not restore it. "
                    f"Create {name} with its full structure: TrainState.create(..., {name}=...), "
                    "and cast the values that the step computes to its dtypes. If it is stacked, "
                    f"pass {name} through the microbatches: value_and_grad(..., mutable_argnum=2)."
                )


# Arguments of other classes that belong to the optimizer here.
_OF_OPTIMIZER: dict[str, str] = {
    "recipe": "recipe.optimizer(tx)",
    "loss_scale": "recipe.replace(loss_scale=loss_scale).optimizer(tx)",
    "dynamic_scale": "recipe.replace(loss_scale=dynamic_scale).optimizer(tx)",
}


def _no_field(cls: type[TrainState], name: str) -> str:
    """Returns the message about an argument that is not a field of a class of states."""
    fix = f"Add it in a subclass: class State(jaxmp.TrainState): {name}: Any"
    if name in _OF_OPTIMIZER:
        fix = f"It is part of the optimizer: TrainState.create(..., tx={_OF_OPTIMIZER[name]})."
    return f"{cls.__name__} has no field {name!r}. {fix}"


def _check_signature(fn: Callable[..., PyTree], args: tuple[Any, ...], kwargs: Any) -> None:
    """Refuses the parameters as an argument, if the function has no place for them."""
    try:
        inspect.signature(fn).bind(*args, **kwargs)
    except TypeError as error:
        raise JaxmpError(
            "The parameters were passed to the function of state.value_and_grad(loss_fn), which "
            f"passes those of the state by itself ({error}). Leave them out: "
            "state.value_and_grad(loss_fn)(batch)."
        ) from None
    except ValueError:
        pass  # a function without a signature


def _replace(self: TrainState, **updates: Any) -> TrainState:
    """Returns a new state with other values of the named fields.

    New values of `params` become the masters: exactly, if they are in FP32, and by their value, if
    they are in 16 bits. Moments and all other parts of the optimizer state stay as they are, unless
    `opt_state` is also replaced. Elements of batch statistics that are not finite are left out.
    """
    new, old = updates.get(_core.BATCH_STATS), getattr(self, _core.BATCH_STATS, ())
    if "opt_state" not in updates and _core.are_alike(new, old):
        updates[_core.BATCH_STATS] = _core.keep_finite(new, old)
    if "params" in updates and "opt_state" not in updates:
        old, _ = _overwritten.split(self.params)
        new, overwritten = _overwritten.split(updates["params"])
        if _shapes(old) == _shapes(new):
            new = jax.tree.map(_beside, jax.tree.map(_strong, new), old)
            if any(n.layout.master == "packed" for n in _layout.master_states(self.opt_state)):
                full = _find.replace_by_masters(old, self.opt_state)
                new = jax.tree.map(_with_value, new, old, full)
            new, updates["opt_state"] = _assign.set_master_params(new, self.opt_state)
            updates["params"] = _overwritten.join(new, overwritten, updates["params"])
    return dataclasses.replace(self, **updates)


TrainState.replace = _replace


def _shapes(tree: PyTree) -> PyTree:
    """Returns a tree of shapes; leaves that are not arrays differ from all others."""
    is_array = lambda leaf: isinstance(leaf, (jax.Array, np.ndarray))
    return jax.tree.map(lambda leaf: leaf.shape if is_array(leaf) else object(), tree)


def _beside(leaf: Array, old: Array) -> Array:
    """Places an array as the one that it replaces, unless the caller placed it."""
    is_free = not isinstance(leaf, Tracer) and not _master.is_committed(leaf)
    takes_place = is_free and _master.is_committed(old)
    return jax.device_put(leaf, old.sharding) if takes_place else leaf


def _with_value(leaf: Array, old: Array, master: Array) -> Array:
    """Returns a new parameter with a packed master in FP32, because a remainder fits any value."""
    if master is old or leaf.dtype != old.dtype:
        return leaf
    return _master.placed_as(_master.follow(_master.placed_as(leaf, old), old, master), leaf)


def _make(tx: optax.GradientTransformation, params: PyTree) -> dict[str, Any]:
    """Returns the step, the stored parameters and the optimizer state of step 0."""
    trainable, overwritten = _overwritten.split(params)
    trainable = jax.tree.map(_strong, trainable)
    _find.check_composition(jax.eval_shape(tx.init, trainable), trainable)
    opt_state = tx.init(trainable)
    _assign.check_master_rules(opt_state, trainable)
    stored = _core.owned(_assign.store(trainable, opt_state), params)
    fix = (
        "state = state.replace(params=recipe.cast_params(state.params)). If another part of the "
        "optimizer trains them, put all parts inside: recipe.optimizer(optax.partition({...}, "
        "labels))."
    )
    _assign.warn_of_wide(stored, opt_state, fix)
    return {
        "step": jnp.zeros((), jnp.int32),
        "params": _overwritten.join(stored, jax.tree.map(jnp.array, overwritten), params),
        "opt_state": _core.owned(opt_state, params, stored),
    }


def _abstract(leaf: object) -> object:
    """Returns the shape and dtype of an array; other leaves unchanged."""
    if not isinstance(leaf, (jax.Array, np.ndarray)):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None))


def _strong(leaf: PyTree) -> PyTree:
    """Copies NumPy arrays, and weakly typed ones of Python numbers, which would retrace step 2."""
    if isinstance(leaf, float):
        return jnp.asarray(leaf, jnp.float32)
    if _core.is_castable(leaf):  # also NumPy's float64
        leaf = _core.cast(leaf, _core.dtype_of(leaf))
    is_new = getattr(leaf, "weak_type", False) or isinstance(leaf, (np.ndarray, np.generic))
    return jnp.array(leaf, dtype=leaf.dtype) if is_new else leaf


# ---------------------------------------------------------------------------
# flax.serialization writes each state as a dict of its parts, by their names in tree paths
# ---------------------------------------------------------------------------


def _parts(state: PyTree) -> tuple[dict[str, PyTree], Any]:
    """Returns the parts of a state by name, and its treedef."""
    flat, treedef = jax.tree.flatten_with_path(state, is_leaf=lambda part: part is not state)
    return {"/".join(_core.path_names(path)) or "inner_state": part for path, part in flat}, treedef


def _to_state_dict(state: PyTree) -> dict[str, PyTree]:
    return {name: serialization.to_state_dict(part) for name, part in _parts(state)[0].items()}


def _from_state_dict(state: PyTree, stored: Mapping[str, PyTree]) -> PyTree:
    """Restores a state, whose arrays keep the dtypes that they had when they were written.

    Raises:
      JaxmpError: if the parts or dtypes of the stored state are others.
    """
    parts, treedef = _parts(state)
    _check_stored(state, set(parts), set(stored))
    restored = [serialization.from_state_dict(parts[name], stored[name], name) for name in parts]
    new = jax.tree.unflatten(treedef, restored)
    _check_stored(state, *map(_described, (state, new)))
    return new


def _described(state: PyTree) -> set[str]:
    leaves = _core.leaves_with_path(state)
    return {f"{'/'.join(names)} ({_core.dtype_of(leaf)})" for names, leaf in leaves}


def _check_stored(state: PyTree, own: set[str], stored: set[str]) -> None:
    if own != stored:
        raise JaxmpError(
            f"Another recipe wrote this {type(state).__name__}: it has {sorted(stored - own)[:3]}, "
            f"and the state to restore has {sorted(own - stored)[:3]}. Restore into a state of the "
            "recipe that wrote it, or convert the file:\n    "
            "jaxmp.checkpoint.Checkpointer(file).restore(state, recipe=recipe, migrate=True)"
        )


for _cls in (*_find.STATES, MomentState):
    serialization.register_serialization_state(_cls, _to_state_dict, _from_state_dict)
