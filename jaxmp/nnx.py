"""Flax NNX: a policy per module path; gradients, optimizer and steps in mixed precision."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax
from flax import linen, nnx

from jaxmp import _gradients, _nnx_calls, _trees, optim
from jaxmp._attention._flax import Stated
from jaxmp._dtypes import short_name
from jaxmp._loss_scale import NoLossScale
from jaxmp._nnx_calls import AttentionFunction
from jaxmp._nnx_calls import OverwriteWithGradient as OverwriteWithGradient
from jaxmp._recipe_data import as_policy_map
from jaxmp._rules import Explanation, PolicyMap, Rule, check_module_dtypes
from jaxmp._trees import Path
from jaxmp.errors import CompositionError, RuleError
from jaxmp.optim import _find, _master, _skip
from jaxmp.optim._apply import apply_update

__all__ = [
    "CompiledStep",
    "Optimizer",
    "OverwriteWithGradient",
    "apply_policy",
    "compile_step",
    "explain",
    "module_paths",
    "value_and_grad",
]

M = TypeVar("M", bound=nnx.Module)

# ---------------------------------------------------------------------------
# Policies
# ---------------------------------------------------------------------------


def apply_policy(model: M, policies: Any) -> M:
    """The same model, computing as `policies` say; the model that was given is untouched.

    The result shares its Variables with `model`: training one trains the other. A parameter that a
    rule stores in another dtype gets a Variable of its own, which keeps the value and the dtype of
    the original until `Optimizer`, or `recipe.cast_params`, casts it. Delayed scaling gives layers
    in FP8 a state of their own, of type `OverwriteWithGradient`, which `model` does not get.

    Args:
      model: a `flax.nnx.Module`; if it has policies already, these replace them. A submodule that
        was given policies of its own before keeps them.
      policies: a recipe's name, a policy string, a `Policy`, a `PolicyMap` or a `Recipe`. Paths are
        those of `nnx.iter_modules(model)`: attribute names and list indices, joined by `/`.

    Returns:
      A model whose modules are instances of subclasses of their classes.

    Raises:
      CompositionError: if `model` is not an NNX module, or contains a Linen module without a
        policy or an `nnx.bridge.Module`, which creates its layers while it runs.
      PolicyError: if a policy names a float8 dtype, or cannot be understood.
      RuleError: if a required rule matches nothing, or a module that is reached by several paths
        would need several policies.

    Example:
      >>> model = apply_policy(nnx.Linear(3, 4, rngs=nnx.Rngs(0)), "p=f32,c=bf16,o=bf16")
      >>> model(jnp.ones((2, 3))).dtype, model.kernel[...].dtype
      (dtype(bfloat16), dtype('float32'))
    """
    _check_model(model, "apply_policy")
    policies = as_policy_map(policies)
    check_module_dtypes(policies)
    places = _places(model)
    paths = _paths(places)
    policies.check_required(paths)
    _check_shared(places, policies)
    copy = nnx.clone(model, variables=False)
    for place in _places(copy):
        if not place.inner:
            _nnx_calls.unbind(place.module)
    bound = [place for place in _places(copy) if not place.inner]
    _store_apart(bound, policies)
    for place in bound:
        path = _deciding_path(place, policies, paths)
        _nnx_calls.bind(place.module, policies, path, _ancestors(path, paths))
    return copy


def attention_fn(
    *,
    implementation: str = "auto",
    is_causal: bool = False,
    local_window_size: int | tuple[int, int] | None = None,
    padding_mask: bool = False,
) -> Callable[..., jax.Array]:
    """`jaxmp.dot_product_attention` for `flax.nnx.MultiHeadAttention(attention_fn=…)`.

    A policy in 16 bits puts it there by itself. Put it there yourself to state what a mask only
    shows: cuDNN's fused kernel skips what causality and lengths hide, and reads a mask as an array.

    Args:
      implementation: as in `dot_product_attention`; "auto" leaves it to the policy.
      is_causal: position t sees positions 0 to t. Leave the causal mask out.
      local_window_size: `(left, right)`, or one number for both.
      padding_mask: the layer's mask hides what stands behind the end of each sequence, and nothing
        else but what is stated here; it is handed on as lengths.

    Returns:
      A function; the same one for the same arguments.

    Raises:
      AttentionError: if `implementation` is unknown; when it is called, what
        `dot_product_attention` raises, or for `sow_weights` or `precision`, which need all weights,
        with an implementation that never holds them.

    Example:
      >>> layer = flax.nnx.MultiHeadAttention(
      ...     2, 8, rngs=flax.nnx.Rngs(0), decode=False,
      ...     attention_fn=jaxmp.nnx.attention_fn(is_causal=True),
      ... )
      >>> layer(jnp.ones((1, 4, 8))).shape
      (1, 4, 8)
    """
    return AttentionFunction(Stated(implementation, is_causal, local_window_size, padding_mask))


def module_paths(model: nnx.Module) -> dict[str, type | None]:
    """Every path that a rule can name in a model.

    Args:
      model: an NNX module, with or without policies.

    Returns:
      Module path -> the module's class, `''` being the model itself; `path:name` -> None for every
      parameter. A module that is reached by several paths stands under each.

    Example:
      >>> list(module_paths(nnx.Linear(3, 4, rngs=nnx.Rngs(0))))
      ['', ':bias', ':kernel']
    """
    _check_model(model, "module_paths")
    return _paths(_places(model))


def explain(model: nnx.Module, policies: Any) -> Explanation:
    """Which rule decides for each module of a model, and which rules decide nothing.

    Args:
      model: an NNX module.
      policies: as in `apply_policy`.

    Returns:
      A row for every module, and for every parameter that a `path:name` rule decides.

    Raises:
      RuleError: if a required rule matches nothing.

    Example:
      >>> model = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
      >>> explain(model, "p=f32,c=bf16,o=f32").rows[0].policy
      Policy('p=f32,c=bf16,o=f32')
    """
    _check_model(model, "explain")
    policies, paths = as_policy_map(policies), _paths(_places(model))
    policies.check_required(paths)
    return policies.explain_modules(paths)


class _Place(NamedTuple):
    """A module of a model and all the paths that lead to it."""

    module: nnx.Module
    paths: list[Path]
    # A model with policies of its own, or a part of one.
    inner: bool
    params: list[tuple[str, Any]]


def _places(model: Any) -> list[_Place]:
    """The modules of a model, the root first, each once."""
    found: dict[int, _Place] = {}
    root = _nnx_calls.bound_of(model)

    def visit(module: Any, path: Path, open_ids: frozenset[int], inner: bool) -> None:
        bound = _nnx_calls.bound_of(module)
        inner = inner or (bound is not None and (root is None or bound.policies != root.policies))
        place = found.get(id(module))
        if place is None:
            place = found[id(module)] = _Place(module, [], inner, [])
        first = not place.paths
        place.paths.append(path)
        for names, leaf in _members(module):
            if isinstance(leaf, nnx.Module):
                if id(leaf) not in open_ids:
                    visit(leaf, path + names, open_ids | {id(leaf)}, inner)
            elif first and isinstance(leaf, nnx.Param):
                place.params.append(("/".join(names), leaf))
        if first and not inner and isinstance(module, (nnx.bridge.ToNNX, nnx.bridge.Module)):
            _check_bridge(module, path)

    visit(model, (), frozenset({id(model)}), inner=False)
    return list(found.values())


def _check_bridge(module: Any, path: Path) -> None:
    """Refuses modules whose layers NNX policies do not reach."""
    if isinstance(module, nnx.bridge.Module):
        raise CompositionError(
            f"The {type(module).__name__} at {'/'.join(path)!r} is an nnx.bridge.Module, which "
            "creates its layers while it runs, so that policies cannot be applied to them "
            "beforehand. Apply them to the whole function: "
            "jaxmp.autocast(model.apply, policies)."
        )
    inside = module.to_nnx__module
    if isinstance(inside, linen.Module) and not hasattr(type(inside), "_jaxmp_class"):
        raise CompositionError(
            f"The ToNNX at {'/'.join(path)!r} holds a Linen {type(inside).__name__}, which NNX "
            "policies do not reach. Give it its policies before the bridge: "
            f"nnx.bridge.ToNNX(jaxmp.linen.apply_policy({type(inside).__name__}(...), policies), "
            "rngs=rngs)."
        )


def _members(module: Any) -> list[tuple[Path, Any]]:
    """Modules and Variables right below a module, within lists and dicts too, by path."""
    return [
        ((name, *_trees.path_names(key_path)), leaf)
        for name, value in sorted(vars(module).items())
        if not name.startswith("_pytree__")
        for key_path, leaf in jax.tree.leaves_with_path(value, is_leaf=_is_member)
        if _is_member(leaf)
    ]


def _is_member(value: Any) -> bool:
    return isinstance(value, (nnx.Module, nnx.Variable))


def _paths(places: list[_Place]) -> dict[str, type | None]:
    paths: dict[str, type | None] = {}
    for place in places:
        for path in place.paths:
            paths["/".join(path)] = _nnx_calls.author_class(place.module)
    for place in places:
        for path in place.paths:
            owner = "/".join(path)
            paths |= {_param_path(owner, name): None for name, _ in place.params}
    return paths


def _param_path(owner: str, name: str) -> str:
    """A parameter in a list or dict: `layers/0` of module `a` is `a/layers:0`, as in its state."""
    return _trees.parameter_path((*filter(None, owner.split("/")), *name.split("/")))


def _ancestors(path: Path, paths: dict[str, type | None]) -> tuple[type, ...]:
    """Classes of the modules above `path`, the nearest first."""
    above = ("/".join(path[:length]) for length in range(len(path) - 1, -1, -1))
    return tuple(cls for name in above if (cls := paths.get(name)) is not None)


def _check_shared(places: list[_Place], policies: PolicyMap) -> None:
    """Refuses one module, or one parameter, under two policies."""
    paths = _paths(places)
    owners: dict[int, list[Path]] = {}
    for place in places:
        if not place.inner:
            cls = _nnx_calls.author_class(place.module)
            resolved = {
                "/".join(path): policies.resolve("/".join(path), cls, _ancestors(path, paths))
                for path in place.paths
            }
            _check_one(f"The {cls.__name__}", resolved, "c=f32")
            # Equal policies are followed in two ways where a rule of one path names the output.
            rules = {
                "/".join(path): _output_rule(place, path, policies, paths) for path in place.paths
            }
            required = [rule for rule in rules.values() if rule is not None and rule.required]
            if required:
                output = f"o={short_name(required[0].output_dtype)}"
                handed_on = {
                    path: output if rule else "the compute dtype" for path, rule in rules.items()
                }
                _check_one(f"The {cls.__name__}", handed_on, output)
        for _, param in place.params:
            owners.setdefault(id(param), [])
    for place in places:
        for name, param in place.params:
            owners[id(param)] += [(*path, *name.split("/")) for path in place.paths]
    for names in owners.values():
        stored = {_trees.parameter_path(path): policies.storage_dtype(path, None) for path in names}
        if len(set(stored.values())) > 1:
            _check_one("The parameter", stored, "p=f32")


def _output_rule(
    place: _Place, path: Path, policies: PolicyMap, paths: dict[str, type | None]
) -> Rule | None:
    """The rule that names the output dtype of a module reached by `path`, if one does."""
    cls = _nnx_calls.author_class(place.module)
    rule = policies.deciding_rule("/".join(path), cls, _ancestors(path, paths))
    return None if rule is None or rule.output_dtype is None else rule


def _deciding_path(place: _Place, policies: PolicyMap, paths: dict[str, type | None]) -> Path:
    """The path whose policy a module follows.

    Of several the first for which no rule names an output dtype: an optional rule about `lm_head`
    must not widen what an embedding hands on that is tied to it. Else they agree.
    """
    plain = (path for path in place.paths if _output_rule(place, path, policies, paths) is None)
    return next(plain, place.paths[0])


def _check_one(what: str, resolved: dict[str, Any], fix: str) -> None:
    if len(set(resolved.values())) < 2:
        return
    listed = ", ".join(f"{path!r}: {value}" for path, value in resolved.items())
    first = next(iter(resolved))
    raise RuleError(
        f"{what} that several paths lead to would need several policies ({listed}). It is one "
        f"object and can have only one: give all its paths the same rule, such as "
        f"Rule('re:{'|'.join(map(re.escape, resolved))}', {fix!r}), or leave {first!r} out."
    )


def _store_apart(places: list[_Place], policies: PolicyMap) -> None:
    """Gives each parameter that is to be stored in another dtype a Variable of its own."""
    own: dict[int, Any] = {}
    for place in places:
        for name, param in place.params:
            path = (*place.paths[0], *name.split("/"))
            value = param.get_raw_value()
            dtype = policies.storage_dtype(path, _trees.dtype_of(value))
            if _trees.is_castable(value) and value.dtype != dtype:
                own.setdefault(id(param), param.copy())
    if not own:
        return
    for place in places:
        for name, value in list(vars(place.module).items()):
            if not name.startswith("_pytree__"):
                _replace_members(place.module, name, value, own)


def _replace_members(module: Any, name: str, value: Any, own: dict[int, Any]) -> None:
    leaves = [leaf for leaf in jax.tree.leaves(value, is_leaf=_is_member) if id(leaf) in own]
    if leaves:
        replaced = jax.tree.map(lambda leaf: own.get(id(leaf), leaf), value, is_leaf=_is_member)
        vars(module)[name] = replaced


# What each function of this module and its twin in `jaxmp.linen` are called with.
_CALLS = {
    "apply_policy": ("model, policies", "model, policies"),
    "explain": ("model, policies", "model, policies, *args"),
    "module_paths": ("model", "model, *args"),
}


def _check_model(model: Any, function: str) -> None:
    here, linen_call = _CALLS[function]
    if isinstance(model, type) and issubclass(model, nnx.Module):
        instance = f"{model.__name__}(..., rngs=nnx.Rngs(0))"
        raise CompositionError(
            f"{function} was given the class {model.__name__}, not a model. Give an instance: "
            f"{function}({here.replace('model', instance)})."
        )
    if not isinstance(model, nnx.Module):
        kind = model if isinstance(model, type) else type(model)
        fix = "Give a flax.nnx.Module"
        if issubclass(kind, linen.Module):
            fix = f"Use jaxmp.linen.{function}({linen_call})"
        elif callable(model) and function == "apply_policy":
            fix = "For a plain JAX function use jaxmp.autocast(fn, policies)"
        raise CompositionError(
            f"{function} was given a {kind.__module__}.{kind.__qualname__}, which is not a "
            f"flax.nnx.Module. {fix}."
        )


# ---------------------------------------------------------------------------
# Gradients
# ---------------------------------------------------------------------------


def value_and_grad(
    fn: Callable[..., Any],
    loss_scale: Any = None,
    has_aux: bool = False,
    *,
    wrt: Any = nnx.Param,
    batch_argnums: int | tuple[int, ...] = 1,
    rng_argnums: int | tuple[int, ...] | None = None,
    **options: Any,
) -> Callable[..., Any]:
    """`jaxmp.value_and_grad` for a function whose first argument is an NNX module.

    What the forward pass writes into the module (batch statistics, RNG counts) is written back, one
    microbatch after the other. What it sows (`nnx.Intermediate`) is not: return it as auxiliary
    data. The state of delayed scaling (`OverwriteWithGradient`) is differentiated too, whatever
    `wrt` says.

    Args:
      fn: `fn(model, *args)` returns a scalar loss, or what `jaxmp.value_and_grad` allows.
      loss_scale: a jaxmp or jmp loss scale, a number, or None.
      has_aux: whether `fn` returns auxiliary data beside the loss.
      wrt: a filter of the Variables to differentiate.
      batch_argnums: arguments to split into microbatches; the model is argument 0.
      rng_argnums: arguments that hold PRNG keys, folded with the microbatch's index.
      **options: `weighted`, `microbatches`, `axis_name`, `accumulate_dtype`, `reduce_dtype`.

    Returns:
      A function of the same arguments that returns `(loss, grads)`, or `((loss, aux), grads)`;
      `grads` is an `nnx.State` like that of `wrt`, in float32 for 16-bit parameters. New values of
      `OverwriteWithGradient`, where the model has any, stand among them: `Optimizer.update` assigns
      them, `nnx.state(grads, nnx.Param)` leaves them out, and without an `Optimizer` it is
      `nnx.update(model, nnx.state(grads, OverwriteWithGradient))` that assigns them.

    Example:
      >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
      >>> loss, grads = value_and_grad(lambda m, x: m(x).sum())(model, jnp.ones((4, 2)))
      >>> float(grads["bias"][...][0])
      4.0
    """

    def value_and_grad_fn(model: Any, *args: Any, **kwargs: Any) -> Any:
        filters = _trained(wrt), OverwriteWithGradient, nnx.Intermediate, ...
        graphdef, *states = nnx.split(model, *filters)
        params, overwritten, sown, rest = map(nnx.as_pure, states)
        held = bool(jax.tree.leaves(overwritten))

        def pure(variables: Any, rest: Any, *args: Any) -> Any:
            params, overwritten = _trees.split_overwritten(variables) if held else (variables, {})
            merged = nnx.merge(graphdef, params, overwritten, sown, rest)
            out = fn(merged, *args, **kwargs)
            loss, aux = _gradients.unpair(out) if has_aux else (out, None)
            return loss, (nnx.as_pure(nnx.state(merged, _written(wrt))), aux)

        run = _gradients.value_and_grad(
            pure,
            loss_scale=loss_scale,
            mutable_argnum=1,
            batch_argnums=_behind_rest(batch_argnums),
            rng_argnums=_behind_rest(rng_argnums),
            **options,
        )
        variables = {_trees.PARAMS: params, _trees.OVERWRITE: overwritten} if held else params
        (loss, (rest, aux)), grads = run(variables, rest, *args)
        nnx.update(model, rest)
        found = _trees.split_overwritten(grads) if held else (grads,)
        grads = nnx.merge_state(*map(_in_variables, states, found))
        return ((loss, aux) if has_aux else loss), grads

    return value_and_grad_fn


def _trained(wrt: Any) -> Any:
    """State that is overwritten by its gradient is no parameter, whatever a filter says."""
    return nnx.All(wrt, nnx.Not(OverwriteWithGradient))


def _written(wrt: Any) -> Any:
    """What a forward pass may write, and an optimizer does not."""
    return nnx.Not(nnx.Any(wrt, OverwriteWithGradient, nnx.Intermediate))


def _in_variables(like: Any, values: Any) -> Any:
    return jax.tree.structure(like).unflatten(jax.tree.leaves(values))


def _behind_rest(argnums: Any) -> tuple[int, ...]:
    """The pure function takes the module's other Variables as argument 1."""
    return tuple(n + 1 if n >= 0 else n for n in _gradients.as_tuple(argnums))


# What the forward pass overwrote, until `update` knows whether the step is skipped. Not a field:
# between the two calls the optimizer must flatten as it did before.
_overwritten: weakref.WeakKeyDictionary[Optimizer, Any] = weakref.WeakKeyDictionary()


class Optimizer(nnx.Optimizer):
    """A drop-in for `flax.nnx.Optimizer` that is right in mixed precision.

    Masters are taken from the model's parameters as they are; then the parameters are cast to their
    storage dtypes. A step whose gradients are not finite changes nothing but the loss scale and the
    counters; `step` counts the others.

    Args:
      model: an NNX module; its parameters are cast in place.
      tx: an optax transformation; `recipe.optimizer(inner)` makes one.
      wrt: a filter of the Variables to update.

    Raises:
      CompositionError: if something around `mixed_precision` would break it silently.

    Example:
      >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
      >>> tx = jaxmp.load_recipe("bf16_params").optimizer(optax.sgd(0.1))
      >>> optimizer = Optimizer(model, tx)
      >>> model.kernel[...].dtype
      dtype(bfloat16)
    """

    def __init__(
        self, model: Any, tx: optax.GradientTransformation, *, wrt: Any = nnx.Param
    ) -> None:
        params = nnx.as_pure(nnx.state(model, _trained(wrt)))
        optim.check_composition(jax.eval_shape(tx.init, params))
        super().__init__(model, tx, wrt=_trained(wrt))
        self.wrt = wrt
        nnx.update(model, _master.store(params, self._pure_state()))

    def _pure_state(self) -> Any:
        return nnx.as_pure(self.opt_state)

    @property
    def loss_scale(self) -> Any:
        """The loss scale in the optimizer state; `NoLossScale()` if the optimizer keeps none."""
        if not _find.find(self._pure_state(), _skip.SkipNonfiniteState):
            return NoLossScale()
        return _find.get_loss_scale(self._pure_state())

    def value_and_grad(self, fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """`value_and_grad` of `fn(model, *args)` at the loss scale of this optimizer.

        What the forward pass overwrites in the model is kept until `update`, which restores it if
        the step is skipped; RNG state moves on. Call both in one `nnx.jit`, or both outside: what
        is kept does not cross the boundary of a compiled function.

        Args:
          fn: as in `jaxmp.nnx.value_and_grad`.
          **options: those of `jaxmp.nnx.value_and_grad`.

        Returns:
          A function of `(model, *args)`.
        """
        for _, node in _find.find(self._pure_state(), _skip.SkipNonfiniteState):
            options.setdefault("accumulate_dtype", node.settings.accumulate_dtype)
            options.setdefault("reduce_dtype", node.settings.reduce_dtype)
        if "loss_scale" not in options:
            options["loss_scale"] = self.loss_scale
        run = value_and_grad(fn, wrt=self.wrt, **options)

        def value_and_grad_fn(model: Any, *args: Any, **kwargs: Any) -> Any:
            before = nnx.as_pure(nnx.state(model, self._restorable))
            out = run(model, *args, **kwargs)
            # Gradients may be added up over several calls: the first state is the one to restore.
            _overwritten.setdefault(self, before)
            return out

        return value_and_grad_fn

    @property
    def _restorable(self) -> Any:
        return nnx.All(_written(self.wrt), nnx.Not(nnx.RngState))

    def update(self, model: Any, grads: Any, /, **extra_args: Any) -> Any:
        """One optimizer step on `model`, or none at all.

        What is overwritten by its gradient (`OverwriteWithGradient`) is assigned, where it stands
        among `grads`, and is no part of the step.

        Args:
          model: the module that this optimizer was made for.
          grads: unscaled gradients, as `value_and_grad` returns them.
          **extra_args: handed to the optax transformation.

        Returns:
          None: the update that counts is the assignment from the masters.
        """
        params = nnx.as_pure(nnx.state(model, _trained(self.wrt)))
        overwritten = nnx.as_pure(nnx.state(grads, OverwriteWithGradient))
        grads = nnx.as_pure(nnx.state(grads, _trained(self.wrt)))
        new_params, opt_state, applied = apply_update(
            self.tx, grads, self._pure_state(), params, **nnx.as_pure(extra_args)
        )
        nnx.update(model, new_params)
        nnx.update(self.opt_state, nnx.state(opt_state))
        if applied is not None and jax.tree.leaves(overwritten):
            old = nnx.as_pure(nnx.state(model, OverwriteWithGradient))
            overwritten = _trees.select(applied, overwritten, old)
        nnx.update(model, overwritten)
        before = _overwritten.pop(self, None)
        if applied is None:
            self.step[...] += 1
            return
        self.step[...] += applied.astype(self.step[...].dtype)
        if before is not None:
            after = nnx.as_pure(nnx.state(model, self._restorable))
            nnx.update(model, _trees.select(applied, after, before))


# ---------------------------------------------------------------------------
# Compiled steps
# ---------------------------------------------------------------------------


class CompiledStep:
    """What `compile_step` returns: call it as the step, without the nodes.

    Used in a `with` block it writes its state back at the end.
    """

    def __init__(
        self, fn: Callable[..., Any], nodes: tuple[Any, ...], donate: bool, options: dict[str, Any]
    ) -> None:
        self._fn, self._nodes = fn, nodes
        self.read_back()
        donated = {"donate_argnums": 0} if donate else {}
        self._jitted = jax.jit(self._pure, **donated, **options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One step from where the last one ended."""
        out, self._leaves = self._jitted(self._leaves, args, kwargs)
        return out

    def _pure(self, leaves: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        nodes = nnx.merge(self._graphdef, self._structure.unflatten(leaves))
        out = self._fn(*nodes, *args, **kwargs)
        graphdef, state = nnx.split(nodes)
        new_leaves, structure = jax.tree.flatten(nnx.as_pure(state))
        if structure != self._structure or graphdef != self._graphdef:
            raise CompositionError(
                f"{getattr(self._fn, '__name__', 'The step')} adds, removes or changes attributes "
                "of its nodes, such as a sown nnx.Intermediate or a Python counter; compile_step "
                "carries arrays only. Return such values from the step, or use nnx.jit(step)."
            )
        return out, tuple(new_leaves)

    def write_back(self) -> tuple[Any, ...]:
        """Puts the present state into the nodes, which are as they were at the start until then.

        Returns:
          The nodes.
        """
        nnx.update(self._nodes, self._structure.unflatten(self._leaves))
        return self._nodes

    def read_back(self) -> None:
        """Takes the nodes as they are now, after a change made outside of the step."""
        self._graphdef, state = nnx.split(self._nodes)
        leaves, self._structure = jax.tree.flatten(nnx.as_pure(state))
        self._leaves = _unaliased(leaves)

    def __enter__(self) -> CompiledStep:
        return self

    def __exit__(self, *_: Any) -> None:
        self.write_back()


def _unaliased(leaves: list[Any]) -> tuple[Any, ...]:
    """Copies of arrays that stand there twice: a buffer can be donated once."""
    seen: set[int] = set()
    out = []
    for leaf in leaves:
        out.append(jnp.copy(leaf) if id(leaf) in seen else leaf)
        seen.add(id(leaf))
    return tuple(out)


def compile_step(
    fn: Callable[..., Any], *nodes: Any, donate: bool = True, **options: Any
) -> CompiledStep:
    """Compiles a training step of NNX objects so that a call costs what a call on arrays costs.

    `nnx.jit` takes the objects apart and puts them together again at every call. Here that is done
    once, and their arrays go from one call to the next as a flat tuple. Make it once: each new one
    is compiled anew.

    Args:
      fn: `fn(*nodes, *args, **kwargs)` changes the nodes in place and returns what it likes.
      *nodes: NNX objects, such as a model and its `Optimizer`.
      donate: let the compiled step reuse the memory of the old state; the arrays of the nodes are
        gone then until `write_back`.
      **options: handed to `jax.jit`; `args` and `kwargs` are arguments 1 and 2, each one pytree.

    Returns:
      A function of `(*args, **kwargs)`. The nodes themselves follow at `write_back()`, or at the
      end of `with compile_step(...) as step:`.

    Raises:
      CompositionError: at the first call, if `fn` changes more of the nodes than arrays.

    Example:
      >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
      >>> optimizer = Optimizer(model, optax.sgd(0.1))
      >>> def train(model, optimizer, x):
      ...     loss, grads = value_and_grad(lambda m, x: m(x).sum())(model, x)
      ...     optimizer.update(model, grads)
      ...     return loss
      >>> with compile_step(train, model, optimizer) as step:
      ...     losses = [float(step(jnp.ones((4, 2)))) for _ in range(3)]
      >>> int(optimizer.step[...]), losses[2] < losses[0]
      (3, True)
    """
    return CompiledStep(fn, nodes, donate, options)
