"""Flax NNX: a policy per module path; gradients, optimizer and steps in mixed precision."""

from __future__ import annotations

import dataclasses
import functools
import re
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax
from flax import linen, nnx
from jax.core import Tracer

from jaxmp import _gradients
from jaxmp._attention._arguments import check_implementation
from jaxmp._attention._explained import mask_rows
from jaxmp._attention._layer import Stated
from jaxmp._audit._share import low_precision_share
from jaxmp._core import _compat, _trees
from jaxmp._core._dtypes import short_name
from jaxmp._core._trees import Path
from jaxmp._flax import _nnx_subclass
from jaxmp._flax._nnx_gradients import Gradient, Write, continued, undo
from jaxmp._flax._nnx_subclass import AttentionFunction
from jaxmp._flax._nnx_subclass import OverwriteWithGradient as OverwriteWithGradient
from jaxmp._loss_scale import DynamicLossScale
from jaxmp._policies._explanation import PolicyExplanation
from jaxmp._policies._required import check_module_dtypes, check_required, explain_modules
from jaxmp._policies._resolve import PolicyMap, ResolvedPolicy, resolve_policy, storage_dtype
from jaxmp._recipe_files._load import as_policy_map
from jaxmp.errors import CompositionError, JaxmpError, RecipeWarning, RuleError
from jaxmp.optim import _find, _master
from jaxmp.optim._apply import apply_update
from jaxmp.optim._find import check_composition

__all__ = [
    "CompiledStep",
    "Optimizer",
    "OverwriteWithGradient",
    "apply_policy",
    "attention_fn",
    "compile_step",
    "explain",
    "grad",
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
    check_required(policies, paths)
    _check_shared(places, policies, paths)
    copy = nnx.clone(model, variables=False)
    for place in _places(copy):
        if not place.inner:
            _nnx_subclass.unbind(place.module)
    bound = [place for place in _places(copy) if not place.inner]
    _store_apart(bound, policies)
    for place in bound:
        path = _deciding_path(place, policies, paths)
        _nnx_subclass.bind(place.module, policies, path, _ancestors(path, paths))
    return copy


@_nnx_subclass.binds_assigned
def _bind_assigned(owner: Any, name: str, value: Any) -> Any:
    """Returns what a wrapped module is assigned, its modules under the policies of the model.

    As in `apply_policy` they are copies that share their Variables with the originals, which may
    belong to another model. Modules that have policies already are assigned as they are.
    """
    bound = _nnx_subclass.bound_of(owner)
    assert bound is not None
    above = dict(zip(_prefixes(bound.path), (bound.cls, *bound.ancestors), strict=False))
    copies: dict[int, Any] = {}
    value = _copy_unbound(value, copies)
    if not copies:
        return value
    places: dict[int, _Place] = {}
    for key_path, leaf in jax.tree.leaves_with_path(value, is_leaf=_is_member):
        if isinstance(leaf, nnx.Module) and _nnx_subclass.bound_of(leaf) is None:
            for place in _places(leaf, (*bound.path, name, *_trees.path_names(key_path))):
                known = places.setdefault(id(place.module), place._replace(paths=[]))
                known.paths.extend(place.paths)
    new = [place for place in places.values() if not place.inner]
    paths = {**above, **_paths(list(places.values()))}
    _check_shared(new, bound.policies, paths)
    for place in new:
        path = _deciding_path(place, bound.policies, paths)
        _nnx_subclass.bind(place.module, bound.policies, path, _ancestors(path, paths))
    return value


def _prefixes(path: Path) -> list[str]:
    """The paths of a module and of the modules above it, the nearest first."""
    return ["/".join(path[:length]) for length in range(len(path), -1, -1)]


def _copy_unbound(value: Any, copies: dict[int, Any]) -> Any:
    """`value` with copies of its modules that have no policies; they share their Variables."""

    def copy(leaf: Any) -> Any:
        if not isinstance(leaf, nnx.Module) or _nnx_subclass.bound_of(leaf) is not None:
            return leaf
        if id(leaf) not in copies:
            new = copies[id(leaf)] = object.__new__(type(leaf))
            for name, attribute in vars(leaf).items():
                is_flax = name.startswith("_pytree__")
                vars(new)[name] = attribute if is_flax else _copy_unbound(attribute, copies)
        return copies[id(leaf)]

    return jax.tree.map(copy, value, is_leaf=_is_member)


def attention_fn(
    *,
    implementation: str | None = None,
    is_causal: bool = False,
    local_window_size: int | tuple[int, int] | None = None,
    padding_mask: bool = False,
) -> Callable[..., jax.Array]:
    """`jaxmp.dot_product_attention` for `flax.nnx.MultiHeadAttention(attention_fn=…)`.

    A policy in 16 bits puts it there by itself. Put it there yourself to state what a mask only
    shows: cuDNN's fused kernel skips what causality and lengths hide, and reads a mask as an array.

    Args:
      implementation: as in `dot_product_attention`; None or "auto" leaves it to the policy.
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
    asked = check_implementation(implementation)
    return AttentionFunction(Stated(asked, is_causal, local_window_size, padding_mask))


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


def explain(model: nnx.Module, policies: Any, *args: Any, **kwargs: Any) -> PolicyExplanation:
    """Which rule decides for each module of a model, and which rules decide nothing.

    Args:
      model: an NNX module.
      policies: as in `apply_policy`.
      *args, **kwargs: what the model is called with; arrays may be `jax.ShapeDtypeStruct`. If there
        are any, the model is traced, the share of the matmul FLOPs that run in 16 bits or fewer is
        reported, and declared attention masks are compared with those that follow from the arrays.

    Returns:
      A row for every module, and for every parameter that a `path:name` rule decides; with
      arguments, a row in `masks` for every attention layer whose mask is declared.

    Raises:
      RuleError: if a required rule matches nothing.
      AttentionError: if a mask contradicts its declaration.

    Example:
      >>> model = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
      >>> explain(model, "p=f32,c=bf16,o=f32").rows[0].policy
      Policy('p=f32,c=bf16,o=f32')
    """
    _check_model(model, "explain")
    policies, paths = as_policy_map(policies), _paths(_places(model))
    check_required(policies, paths)
    explanation = explain_modules(policies, paths)
    if not args and not kwargs:
        return explanation
    with warnings.catch_warnings():
        # The share itself is reported.
        warnings.simplefilter("ignore", RecipeWarning)
        share = low_precision_share(_called, apply_policy(model, policies), args, kwargs)
    definition, state = nnx.split(apply_policy(model, policies))
    # Parameters have no part in a mask: their values are not copied.
    state = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)

    def call(state: Any, args: Any, kwargs: Any) -> Any:
        return nnx.merge(definition, state)(*args, **kwargs)

    masks = mask_rows(call, policies, state, args, kwargs)
    return dataclasses.replace(explanation, low_precision_share=share, masks=masks)


def _called(model: Any, args: Any, kwargs: Any) -> Any:
    return model(*args, **kwargs)


class _Place(NamedTuple):
    """A module of a model and all the paths that lead to it."""

    module: nnx.Module
    paths: list[Path]
    # A model with policies of its own, or a part of one.
    inner: bool
    params: list[tuple[str, Any]]


def _places(model: Any, path: Path = ()) -> list[_Place]:
    """The modules of a model at `path`, the root first, each once."""
    found: dict[int, _Place] = {}
    root = _nnx_subclass.bound_of(model)

    def visit(module: Any, path: Path, open_ids: frozenset[int], inner: bool) -> None:
        bound = _nnx_subclass.bound_of(module)
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

    visit(model, path, frozenset({id(model)}), inner=False)
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
            paths["/".join(path)] = _nnx_subclass.author_class(place.module)
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


def _check_shared(places: list[_Place], policies: PolicyMap, paths: dict[str, type | None]) -> None:
    """Refuses one module, or one parameter, under two policies."""
    owners: dict[int, list[Path]] = {}
    for place in places:
        if not place.inner:
            cls = _nnx_subclass.author_class(place.module)
            resolved = {
                "/".join(path): _resolve(place, path, policies, paths) for path in place.paths
            }
            by_path = {path: each.policy for path, each in resolved.items()}
            _check_one(f"The {cls.__name__}", by_path, "c=f32")
            # Modules with equal policies differ if the rule of one path names an output dtype.
            outputs = {
                path: each.rule if each.rule_names_output else None
                for path, each in resolved.items()
            }
            required = [rule for rule in outputs.values() if rule is not None and rule.required]
            if required:
                output = f"o={short_name(required[0].output_dtype)}"
                named = {
                    path: output if rule else "the compute dtype" for path, rule in outputs.items()
                }
                _check_one(f"The {cls.__name__}", named, output)
        for _, param in place.params:
            owners.setdefault(id(param), [])
    for place in places:
        for name, param in place.params:
            owners[id(param)] += [(*path, *name.split("/")) for path in place.paths]
    for names in owners.values():
        stored = {_trees.parameter_path(path): storage_dtype(policies, path) for path in names}
        if len(set(stored.values())) > 1:
            _check_one("The parameter", stored, "p=f32")


def _resolve(
    place: _Place, path: Path, policies: PolicyMap, paths: dict[str, type | None]
) -> ResolvedPolicy:
    """Resolves the policy of a module that is reached by `path`."""
    cls = _nnx_subclass.author_class(place.module)
    return resolve_policy(policies, path, cls, _ancestors(path, paths))


def _deciding_path(place: _Place, policies: PolicyMap, paths: dict[str, type | None]) -> Path:
    """The path whose policy a module follows.

    Of several the first for which no rule names an output dtype: an optional rule about `lm_head`
    must not widen what an embedding hands on that is tied to it. Else they agree.
    """
    plain = (
        path for path in place.paths if not _resolve(place, path, policies, paths).rule_names_output
    )
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
            dtype = storage_dtype(policies, path)
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
    fn: Callable[..., Any] | None = None,
    argnums: int | nnx.DiffState | Sequence[int | nnx.DiffState] = 0,
    has_aux: bool = False,
    *,
    loss_scale: Any = None,
    wrt: Any = nnx.Param,
    **options: Any,
) -> Callable[..., Any]:
    """Like `flax.nnx.value_and_grad`, for 16-bit computations: returns loss and gradients in FP32.

    Flax objects (modules, `nnx.Rngs`, metrics, Variables) can be in any argument, also inside
    lists, tuples and dicts. What `fn` writes into them (batch statistics, RNG counts, metrics,
    sown values) is written to the objects that were passed, as in `flax.nnx.value_and_grad`.

    Args:
      fn: returns a scalar loss, or what `jaxmp.value_and_grad` allows. Without it, this is a
        decorator: `@value_and_grad(has_aux=True)`.
      argnums: which arguments to differentiate: numbers, or `nnx.DiffState(number, filter)`.
      has_aux: `fn` returns `(loss, aux)`; `aux` can contain Flax objects.
      loss_scale: a jaxmp or jmp loss scale, a number, or None.
      wrt: a filter of the Variables to differentiate. The state of delayed scaling
        (`OverwriteWithGradient`) is differentiated in any case.
      **options: `weighted`, `microbatches`, `batch_argnums`, `rng_argnums`, `axis_name`,
        `interleave`, `accumulate_dtype` and `reduce_dtype` of `jaxmp.value_and_grad`. Each
        microbatch gets the state of all Flax objects as the one before left it, RNG counts
        included, but the parameters as they were; sown values are stacked, as auxiliary data is.

    Returns:
      A function of the same arguments that returns `(loss, grads)`, or `((loss, aux), grads)`.
      `grads` is a tuple if `argnums` is one. It has an `nnx.State` in the place of each module, in
      float32 for 16-bit parameters. New values of `OverwriteWithGradient`, where the model has any,
      are among them: `Optimizer.update` assigns them, `nnx.state(grads, nnx.Param)` leaves them
      out. Without an `Optimizer`, assign them by
      `nnx.update(model, nnx.state(grads, OverwriteWithGradient))`.

    Raises:
      JaxmpError: if `fn` is a method of a module, a Variable is in an argument to differentiate and
        in another one too, or an argument is refused by `jaxmp.value_and_grad`.

    Example:
      >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
      >>> loss, grads = value_and_grad(lambda m, x: m(x).sum())(model, jnp.ones((4, 2)))
      >>> float(grads["bias"][...][0])
      4.0
    """
    if fn is None:
        return functools.partial(
            value_and_grad,
            argnums=argnums,
            has_aux=has_aux,
            loss_scale=loss_scale,
            wrt=wrt,
            **options,
        )
    gradient = Gradient(fn, argnums, has_aux, _trained(wrt))
    options = {"loss_scale": loss_scale, **options}
    _gradients.value_and_grad(fn, **options)  # refuses options that are wrong before the first call

    @functools.wraps(fn, updated=())
    def value_and_grad_fn(*args: Any, **kwargs: Any) -> Any:
        out, _ = gradient(args, kwargs, options)
        return out

    return value_and_grad_fn


def grad(
    fn: Callable[..., Any] | None = None,
    argnums: int | nnx.DiffState | Sequence[int | nnx.DiffState] = 0,
    has_aux: bool = False,
    **options: Any,
) -> Callable[..., Any]:
    """Like `flax.nnx.grad`, for 16-bit computations: `value_and_grad` without the value.

    Args:
      fn: as in `value_and_grad`.
      argnums: which arguments to differentiate, as in `value_and_grad`.
      has_aux: `fn` returns `(loss, aux)`.
      **options: the keyword arguments of `value_and_grad`, `loss_scale` among them.

    Returns:
      A function that returns the gradients, or `(grads, aux)` with `has_aux`.

    Example:
      >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
      >>> grads = grad(lambda m, x: m(x).sum(), loss_scale=8.0)(model, jnp.ones((4, 2)))
      >>> float(grads["bias"][...][0])
      4.0
    """
    if fn is None:
        return functools.partial(grad, argnums=argnums, has_aux=has_aux, **options)
    run = value_and_grad(fn, argnums, has_aux, **options)

    @functools.wraps(fn, updated=())
    def grad_fn(*args: Any, **kwargs: Any) -> Any:
        value, grads = run(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return grad_fn


def _trained(wrt: Any) -> Any:
    """State that is overwritten by its gradient is not a parameter, whatever a filter selects."""
    return nnx.All(wrt, nnx.Not(OverwriteWithGradient))


# Writes of the last call of each optimizer's `value_and_grad`, until `update` decides about them.
# Not a field: between the two calls the optimizer must flatten as it did before.
_pending: weakref.WeakKeyDictionary[Optimizer, list[Write]] = weakref.WeakKeyDictionary()
# All optimizers, those inside of compiled functions among them.
_optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()


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
        check_composition(jax.eval_shape(tx.init, params))
        super().__init__(model, tx, wrt=_trained(wrt))
        self.wrt = wrt
        nnx.update(model, _master.store(params, self._pure_state()))

    if not TYPE_CHECKING:
        # Flax makes the copies of an optimizer that compiled functions work on by setting
        # attributes, so this setter is called for each of them.
        @property
        def tx(self) -> optax.GradientTransformation:
            """The optax transformation."""
            return vars(self)["tx"]

        @tx.setter
        def tx(self, value: optax.GradientTransformation) -> None:
            vars(self)["tx"] = value
            _optimizers.add(self)

    def _pure_state(self) -> Any:
        return nnx.as_pure(self.opt_state)

    @property
    def loss_scale(self) -> Any:
        """The loss scale in the optimizer state; `NoLossScale()` if the optimizer keeps none."""
        return _find.shared_loss_scale(self._pure_state())

    def value_and_grad(
        self,
        fn: Callable[..., Any] | None = None,
        argnums: int | nnx.DiffState | Sequence[int | nnx.DiffState] = 0,
        has_aux: bool = False,
        **options: Any,
    ) -> Callable[..., Any]:
        """`jaxmp.nnx.value_and_grad` of `fn` at the loss scale that this optimizer has at the call.

        What the forward pass writes into Flax objects is kept until `update`, which restores it if
        the step is skipped; RNG state moves on. Call both in one `nnx.jit`, or both outside: what
        is kept does not cross the boundary of a compiled function.

        Args:
          fn: as in `jaxmp.nnx.value_and_grad`.
          argnums: which arguments to differentiate, as in `jaxmp.nnx.value_and_grad`.
          has_aux: `fn` returns `(loss, aux)`.
          **options: those of `jaxmp.nnx.value_and_grad`; `wrt` is the optimizer's own.

        Returns:
          A function of the arguments of `fn`. It can be made once, before the loop; in a compiled
          function it then reads the loss scale of the optimizer that is passed to that function.

        Raises:
          JaxmpError: when it is called in a compiled function that the optimizer is not passed to,
            so that its dynamic loss scale would be a constant there.
        """
        if fn is None:
            return functools.partial(
                self.value_and_grad, argnums=argnums, has_aux=has_aux, **options
            )
        gradient = Gradient(fn, argnums, has_aux, _trained(self.wrt))
        _gradients.value_and_grad(fn, **options)  # refuses wrong options before the first call

        @functools.wraps(fn, updated=())
        def value_and_grad_fn(*args: Any, **kwargs: Any) -> Any:
            optimizer = self._present()
            out, writes = gradient(args, kwargs, optimizer._gradient_options(options))
            optimizer._remember(writes)
            return out

        return value_and_grad_fn

    def _gradient_options(self, options: dict[str, Any]) -> dict[str, Any]:
        if "loss_scale" not in options:
            options = {**options, "loss_scale": self._readable_loss_scale()}
        return _find.gradient_options(self._pure_state(), options)

    def _readable_loss_scale(self) -> Any:
        scale = self.loss_scale
        constant = not isinstance(scale.scale_value, Tracer)
        if isinstance(scale, DynamicLossScale) and constant and not self._is_present():
            raise JaxmpError(
                "optimizer.value_and_grad is called in a compiled function that the optimizer is "
                "not an argument of: its loss scale would never change there. Pass the optimizer: "
                "nnx.jit(lambda model, optimizer, batch: optimizer.value_and_grad(loss_fn)(model, "
                "batch))."
            )
        return scale

    def _is_present(self) -> bool:
        """Whether this optimizer can be updated here: not in a function compiled around it."""
        return _compat.can_update(self.step)

    def _present(self) -> Optimizer:
        """This optimizer; in a compiled function, the copy of it that was passed there."""
        if self._is_present():
            return self
        mine = self._signature()
        copies = [
            other
            for other in list(_optimizers)
            if {"step", "opt_state", "wrt"} <= vars(other).keys()
            and other._is_present()
            and other._signature() == mine
        ]
        if len(copies) > 1:
            raise JaxmpError(
                "optimizer.value_and_grad was called before this compiled function, to which "
                f"{len(copies)} optimizers like it are passed, so it is not known whose loss scale "
                "to read. Call it inside, on the optimizer that is passed: "
                "loss, grads = optimizer.value_and_grad(loss_fn)(model, batch)."
            )
        return copies[0] if copies else self

    def _signature(self) -> Any:
        leaves, structure = jax.tree.flatten(self._pure_state())
        return self.tx, self.wrt, structure, [(x.shape, x.dtype) for x in leaves]

    def _warn_of_wide(self, model: Any) -> None:
        """Warns of frozen parameters in FP32; after other optimizers have cast theirs."""
        if self.wrt is nnx.Param:
            return
        frozen = nnx.as_pure(nnx.state(model, nnx.All(nnx.Param, nnx.Not(self.wrt))))
        fix = "nnx.update(model, recipe.cast_params(nnx.state(model, nnx.Param)))"
        _master.warn_of_wide(frozen, self._pure_state(), fix, stacklevel=3)

    def _remember(self, writes: list[Write]) -> None:
        """Keeps what a call wrote, in the place of what an earlier call wrote."""
        earlier = {write.slot: write for write in _pending.pop(self, ())}
        # What is written where the optimizer cannot be updated is out of reach of `update`.
        if self._is_present():
            _pending[self] = [
                continued(write, earlier[write.slot]) if write.slot in earlier else write
                for write in writes
                if write.is_restorable
            ]

    def update(self, model: Any, grads: Any, /, **extra_args: Any) -> Any:
        """One optimizer step on `model`, or none at all.

        A skipped step restores what the last call of this optimizer's `value_and_grad` wrote, and
        nothing that another optimizer or another call wrote. What is overwritten by its gradient
        (`OverwriteWithGradient`) is assigned, where it is among `grads`, and not optimized.

        Args:
          model: the module that this optimizer was made for.
          grads: unscaled gradients, as `value_and_grad` returns them.
          **extra_args: passed to the optax transformation.

        Returns:
          None: the update that counts is the assignment from the masters.
        """
        self._warn_of_wide(model)
        params = nnx.as_pure(nnx.state(model, _trained(self.wrt)))
        overwritten = nnx.as_pure(nnx.state(grads, OverwriteWithGradient))
        grads = nnx.as_pure(nnx.state(grads, _trained(self.wrt)))
        new_params, opt_state, applied = apply_update(
            self.tx, grads, self._pure_state(), params, **nnx.as_pure(extra_args)
        )
        writes = _pending.pop(self, [])
        if applied is not None and writes:
            others = [write for pending in list(_pending.values()) for write in pending]
            for write in writes:
                undo(write, others, applied)
            # Parameters that the forward pass itself wrote, as nnx.SpectralNorm does.
            restored = nnx.as_pure(nnx.state(model, _trained(self.wrt)))
            new_params = jax.tree.map(
                lambda new, old, undone: (
                    new if undone is old else _trees.select_leaf(applied, new, undone)
                ),
                new_params,
                params,
                restored,
            )
        nnx.update(model, new_params)
        nnx.update(self.opt_state, nnx.state(opt_state))
        if applied is not None and jax.tree.leaves(overwritten):
            old = nnx.as_pure(nnx.state(model, OverwriteWithGradient))
            overwritten = _trees.select(applied, overwritten, old)
        nnx.update(model, overwritten)
        self.step[...] += 1 if applied is None else applied.astype(self.step[...].dtype)


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
