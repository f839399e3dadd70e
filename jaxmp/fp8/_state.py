"""The state of delayed scaling: what earlier steps saw, as a flat dict of float32 arrays.

Every leaf is combined by max, over microbatches, devices and the uses of a shared layer: so the
maximum that a scale comes from is kept, and not the scale, of which the least would be right.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from jaxmp import _compat
from jaxmp._dtypes import FLOAT32
from jaxmp._trees import leaves_with_path
from jaxmp.errors import JaxmpError, MissingDependencyError, missing_dependency
from jaxmp.fp8._quantize import compute_scale
from jaxmp.fp8._recipes import DelayedScaling, as_recipe

State = dict[str, jax.Array]

OPERANDS = ("input", "kernel", "output_grad")
AGE = "age"
USES = "uses"
# What its leaves are called among the variables of a layer of Flax.
PREFIX = "fp8_"
# The leaves of one layer's state.
NAMES = (AGE, USES, *(f"{x}_{leaf}" for x in OPERANDS for leaf in ("amax", "amax_history")))


def init_state(recipe: Any = "delayed") -> State:
    """The state of one linear layer before its first step.

    For each operand X of "input", "kernel" and "output_grad": `X_amax`, a scalar, the maximum that
    the scale in force comes from, 0 before the first step; `X_amax_history`, `[amax_history_len]`,
    the newest first. And two scalars: `age`, the steps since scales were last set, and `uses`, how
    often the layer ran in the last step where JAX added up the gradients of all its runs.

    Args:
      recipe: a `DelayedScaling`, or "delayed".

    Returns:
      A dict of float32 arrays.

    Raises:
      JaxmpError: if the recipe has no state.

    Example:
      >>> {name: leaf.shape for name, leaf in init_state().items() if "input" in name}
      {'input_amax': (), 'input_amax_history': (1024,)}
    """
    recipe = as_recipe(recipe)
    if not isinstance(recipe, DelayedScaling):
        raise JaxmpError(
            f"{type(recipe).__name__} has no state; only fp8.DelayedScaling has: leave `state` out."
        )
    state = {AGE: jnp.zeros((), FLOAT32), USES: jnp.zeros((), FLOAT32)}
    for operand in OPERANDS:
        state[f"{operand}_amax"] = jnp.zeros((), FLOAT32)
        state[f"{operand}_amax_history"] = jnp.zeros((recipe.amax_history_len,), FLOAT32)
    return state


def check_state(recipe: DelayedScaling, state: Any) -> None:
    """Refuses what `init_state` of this recipe could not have made.

    Raises:
      JaxmpError: naming the first leaf that differs.
    """
    wanted = _shapes(recipe)
    fix = "Make it with fp8.init_state(recipe)."
    if not isinstance(state, Mapping) or set(state) != set(wanted):
        keys = sorted(state) if isinstance(state, Mapping) else type(state).__name__
        raise JaxmpError(
            f"The state of DelayedScaling has the keys {sorted(wanted)}, not {keys}. {fix}"
        )
    for name, shape in wanted.items():
        given = state[name]
        if not hasattr(given, "dtype"):
            raise JaxmpError(f"state[{name!r}] is {type(given).__name__}, no array. {fix}")
        if given.shape != shape or not (given.dtype == FLOAT32 or _is_max(given)):
            raise JaxmpError(
                f"state[{name!r}] has shape {given.shape} and dtype {given.dtype}; with "
                f"amax_history_len={recipe.amax_history_len} it must have shape {shape} and "
                f"dtype float32. {fix}"
            )


@functools.cache
def _shapes(recipe: DelayedScaling) -> dict[str, tuple[int, ...]]:
    """Those of `init_state`, which are asked for at each layer."""
    state = jax.eval_shape(lambda: init_state(recipe))
    return {name: leaf.shape for name, leaf in state.items()}


# ---------------------------------------------------------------------------
# Combined by max
# ---------------------------------------------------------------------------


# Flax's dtype of numbers whose sum is their maximum.
_MAX = "fp8_meta32"


def _is_max(leaf: Any) -> bool:
    return getattr(leaf.dtype, "name", "") == _MAX


def as_max(state: Any) -> Any:
    """A state whose gradients JAX combines by max, where it would add up others.

    A layer that is used twice, or in each round of a `lax.scan`, has a gradient from each use, and
    JAX adds them up. Convert the state before it is differentiated, outside of the function, and
    its gradient back with `as_float`: `as_float(jax.grad(fn, allow_int=True)(as_max(state)))`.

    Args:
      state: any pytree of float32 arrays.

    Returns:
      The same tree in Flax's dtype `fm32`, which `fp8.dot_general` takes too.

    Raises:
      MissingDependencyError: if Flax is not installed.

    Example:
      >>> as_float(as_max({"amax": jnp.ones(())}))["amax"].dtype
      dtype('float32')
    """
    try:
        fm32 = importlib.import_module("flax.linen.fp8_ops").fm32
    except ModuleNotFoundError:
        raise missing_dependency("flax", "FP8 state that is combined by max", "flax") from None
    return jax.tree.map(lambda leaf: lax.convert_element_type(leaf, fm32), state)


def as_float(state: Any) -> Any:
    """Undoes `as_max`; all else is handed through.

    Raises:
      TypeError: inside of `shard_map(..., check_vma=False)`, where JAX would reduce such numbers
        over devices, which it cannot lower.
    """

    def convert(leaf: Any) -> Any:
        if not (hasattr(leaf, "dtype") and _is_max(leaf)):
            return leaf
        _check_reducible(leaf)
        return lax.convert_element_type(leaf, FLOAT32)

    return jax.tree.map(convert, state)


def _check_reducible(leaf: Any) -> None:
    if _is_max(leaf) and _is_unchecked():
        raise TypeError(f"shard_map(..., check_vma=False) does not reduce {_MAX}")


def _is_unchecked() -> bool:
    """Whether this is traced inside of `shard_map(..., check_vma=False)`."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return bool(manual) and not _compat.varying_axes(lax.axis_index(manual[0]))


# ---------------------------------------------------------------------------
# The states of many layers
# ---------------------------------------------------------------------------


def layer_states(tree: Any) -> list[dict[str, int]]:
    """Where in `jax.tree.leaves(tree)` the states of layers stand: leaf name -> index.

    Their names have a prefix where they stand among a layer's other variables.
    """
    places: dict[Any, dict[str, int]] = {}
    for index, (path, _) in enumerate(leaves_with_path(tree)):
        if path:
            prefix = PREFIX if path[-1].startswith(PREFIX) else ""
            place = places.setdefault((path[:-1], prefix), {})
            place[path[-1].removeprefix(prefix)] = index
    return [
        {name: place[name] for name in NAMES} for place in places.values() if place.keys() >= _SET
    ]


_SET = frozenset(NAMES)


def combined_by_max(tree: Any) -> Any:
    """`as_max` of all states of layers in a collection, where JAX can compute with it.

    Not outside of a trace, where JAX adds no such numbers up; nor inside of
    `shard_map(..., check_vma=False)`; nor without Flax.

    Returns:
      A tree of the same structure; `tree` itself where nothing was converted.
    """
    leaves, structure = jax.tree.flatten(tree)
    states = layer_states(tree)
    indices = [index for state in states for index in state.values()]
    arrays = [leaves[index] for index in indices]
    if not all(isinstance(leaf, Tracer) and leaf.dtype == FLOAT32 for leaf in arrays):
        return tree
    if not arrays or _is_unchecked():
        return tree
    try:
        converted = as_max(arrays)
    except MissingDependencyError:
        return tree
    for index, leaf in zip(indices, converted, strict=True):
        leaves[index] = leaf
    return structure.unflatten(leaves)


def is_refusal(error: Exception) -> bool:
    """Whether JAX refused to do something with numbers that are combined by max."""
    return _MAX in str(error)


def kept_where_unused(new: Any, old: Any) -> Any:
    """Gradients of a collection, and the old states of layers that did not run.

    Args:
      new: a collection, in float32 or combined by max; states whose `uses` is not positive were
        not used: their gradient is what JAX takes for zero.
      old: the collection before the step.
    """
    leaves, structure = jax.tree.flatten(new)
    before = jax.tree.leaves(old)
    for places in layer_states(new):
        kept = _kept_where_unused(*({n: t[i] for n, i in places.items()} for t in (leaves, before)))
        for name, index in places.items():
            leaves[index] = kept[name]
    return structure.unflatten(leaves)


@jax.jit
def _kept_where_unused(new: State, old: State) -> State:
    new = as_float(new)
    used = new[USES] > np.float32(0)

    def select(leaf: jax.Array, before: jax.Array) -> jax.Array:
        # Of layers that are stacked on another axis than the first, all or none.
        each = used if leaf.shape[: used.ndim] == used.shape else jnp.any(used)
        each = jnp.broadcast_to(
            each.reshape(each.shape + (1,) * (leaf.ndim - each.ndim)), leaf.shape
        )
        return lax.select(each, leaf, before)

    return {name: select(leaf, old[name]) for name, leaf in new.items()}


# ---------------------------------------------------------------------------
# One step
# ---------------------------------------------------------------------------


# Jitted, so that all layers share the trace and, in StableHLO, one function.


def before_step(state: Mapping[str, Any]) -> State:
    """`settled`, of a state that may be one whose gradients are combined by max.

    Raises:
      TypeError: as `as_float`.
    """
    _check_reducible(state[AGE])
    return settled(state)


@jax.jit
def settled(state: Mapping[str, Any]) -> State:
    """A state in float32, as one run of the layer would have left it if JAX added up several.

    All is divided by their number but the newest maxima, whose sum is kept: it is no less than the
    largest of them, and scales that are a little too small lose nothing but headroom.
    """
    state = {name: lax.convert_element_type(leaf, FLOAT32) for name, leaf in state.items()}
    uses = jnp.maximum(state[USES], np.float32(1))
    found = {name: leaf / uses for name, leaf in state.items()}
    for operand in OPERANDS:
        name = f"{operand}_amax_history"
        found[name] = found[name].at[0].set(state[name][0])
    return found


class OperandState(NamedTuple):
    """What a state says of one operand."""

    age: jax.Array
    amax: jax.Array
    amax_history: jax.Array


def of_operand(state: Mapping[str, Any], operand: str) -> OperandState:
    """The part of a state that "input", "kernel" or "output_grad" needs.

    The rest does not go along: what is traced costs by the number of arrays.
    """
    return OperandState(state[AGE], state[f"{operand}_amax"], state[f"{operand}_amax_history"])


def amax_in_force(recipe: DelayedScaling, state: OperandState, measured: jax.Array) -> jax.Array:
    """The maximum that the scale of this step comes from.

    Args:
      recipe: the settings.
      state: before this step.
      measured: the tensor's own maximum, for where there is no earlier one.

    Returns:
      A float32 scalar.
    """
    held, history = state.amax, state.amax_history
    recent = jnp.max(history) if recipe.amax_compute == "max" else history[0]
    due = (state.age >= np.float32(recipe.interval)) | (held == np.float32(0))
    known = lax.select(due, recent, held)
    # A selection, not a branch: the maximum is taken at every step, for the history, and on a GPU
    # a branch for each tensor would cost more than the wait.
    return lax.select(known > np.float32(0), known, measured) if recipe.calibrate else known


def next_state(
    recipe: DelayedScaling,
    state: Mapping[str, Any],
    seen: Mapping[str, tuple[jax.Array, jax.Array]],
    like: jax.Array,
) -> State:
    """The state after a step.

    Args:
      recipe: the settings.
      state: before the step, in float32.
      seen: for each operand the maximum in force, and its own maximum in this step.
      like: a leaf of the state as it was given.

    Returns:
      A state in which nothing that is not finite has entered, in the dtype of `like`.
    """
    histories = {operand: state[f"{operand}_amax_history"] for operand in OPERANDS}
    return _next_state(recipe, state[AGE], histories, seen, like)


@functools.partial(jax.jit, static_argnames="recipe")
def _next_state(
    recipe: DelayedScaling, age: jax.Array, histories: State, seen: Any, like: jax.Array
) -> State:
    one = np.float32(1)
    new = {AGE: lax.select(age >= np.float32(recipe.interval), lax.full_like(age, 1), age + one)}
    new[USES] = lax.full_like(age, 1)
    for operand in OPERANDS:
        (amax, latest), history = seen[operand], histories[operand]
        grown = jnp.concatenate([latest[None], history[:-1]])
        new[f"{operand}_amax"] = jnp.where(lax.is_finite(amax), amax, np.float32(0))
        new[f"{operand}_amax_history"] = jnp.where(lax.is_finite(latest), grown, history)
    return {name: lax.convert_element_type(leaf, like.dtype) for name, leaf in new.items()}


# ---------------------------------------------------------------------------
# Flax's own collections
# ---------------------------------------------------------------------------


def from_flax(collection: Mapping[str, Any], recipe: Any = None) -> State:
    """The state of one layer out of the `_overwrite_with_gradient` collection of Flax's FP8 ops.

    Args:
      collection: of one `Fp8DirectDotGeneralOp` or `Fp8Einsum`: `X_scale` `(1,)` and
        `X_amax_history` `(length,)` for each operand X.
      recipe: a `DelayedScaling` with that length; None: one that fits.

    Returns:
      A state; the scales of the next step are those that Flax would use.

    Raises:
      JaxmpError: if the collection is of another kind, or the length is not the recipe's.

    Example:
      >>> to_flax(from_flax(to_flax(init_state())))["kernel_scale"].tolist()
      [1.0]
    """
    wanted = {f"{x}_{leaf}" for x in OPERANDS for leaf in ("scale", "amax_history")}
    if not isinstance(collection, Mapping) or set(collection) != wanted:
        keys = sorted(collection) if isinstance(collection, Mapping) else collection
        raise JaxmpError(
            f"A layer of Flax's FP8 collection has the keys {sorted(wanted)}, not {keys}. Give the "
            "inner dict of one layer: variables['_overwrite_with_gradient']['Dense_0']"
            "['Fp8DirectDotGeneralOp_0']."
        )
    length = jnp.shape(collection["input_amax_history"])[-1]
    recipe = DelayedScaling(amax_history_len=length) if recipe is None else as_recipe(recipe)
    state = init_state(recipe)
    for operand in OPERANDS:
        history = jnp.asarray(collection[f"{operand}_amax_history"], FLOAT32)
        state[f"{operand}_amax_history"] = _reordered(history)
    check_state(recipe, state)
    known = jnp.stack([jnp.max(state[f"{operand}_amax_history"]) for operand in OPERANDS])
    # Their scales are recomputed at each step, from the history.
    state[AGE] = jnp.where(jnp.max(known) > np.float32(0), np.float32(recipe.interval), state[AGE])
    for operand, amax in zip(OPERANDS, known, strict=True):
        state[f"{operand}_amax"] = amax
    return state


def to_flax(state: Mapping[str, Any]) -> dict[str, jax.Array]:
    """The `_overwrite_with_gradient` collection of one of Flax's FP8 ops, out of a state.

    Args:
      state: as `init_state` makes it.

    Returns:
      `X_scale` `(1,)`, the reciprocal of this library's, for the formats that Flax uses (E4M3 for
      inputs and kernels, E5M2 for gradients), and `X_amax_history` in Flax's order.

    Raises:
      JaxmpError: if `state` is not the state of one layer.

    Example:
      >>> sorted(to_flax(init_state()))[:2]
      ['input_amax_history', 'input_scale']
    """
    formats = {"input": "e4m3fn", "kernel": "e4m3fn", "output_grad": "e5m2"}
    history = state.get("input_amax_history") if isinstance(state, Mapping) else None
    check_state(DelayedScaling(amax_history_len=max(1, getattr(history, "size", 1))), state)
    state = settled(state)
    collection = {}
    for operand, dtype in formats.items():
        history = jnp.asarray(state[f"{operand}_amax_history"])
        scale = compute_scale(jnp.asarray(state[f"{operand}_amax"]), dtype)
        collection[f"{operand}_scale"] = (1 / scale)[None]
        collection[f"{operand}_amax_history"] = _reordered(history)
    return collection


def _reordered(history: jax.Array) -> jax.Array:
    """Newest first to Flax's order and back.

    Flax rotates to the left and writes to entry 0: the rest stands with the oldest first.
    """
    return jnp.concatenate([history[:1], history[:0:-1]])
