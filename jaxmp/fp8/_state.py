"""States of FP8 layers: amaxes that earlier steps have measured, as flat dicts of float32 arrays.

Every leaf is combined by max over microbatches, devices and the uses of a shared layer. The state
therefore stores the amax rather than the scale: amaxes combine by max, scales would require min.
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

from jaxmp import _core
from jaxmp._core import PyTree, _compat
from jaxmp.errors import CompositionError, JaxmpError
from jaxmp.fp8._scaling import DelayedScaling, ScalingLike, as_scaling

State = dict[str, jax.Array]

OPERANDS = ("input", "kernel", "output_grad")
AGE = "age"
USES = "uses"
# Size of `X_amax` in an active state.
ACTIVE_SIZE = 3
# Prefix of the leaves among the variables of a Flax layer.
PREFIX = "fp8_"
# The leaves of one layer's state.
NAMES = (AGE, USES, *(f"{x}_{leaf}" for x in OPERANDS for leaf in ("amax", "amax_history")))


def init_state(scaling: ScalingLike = "delayed") -> State:
    """Returns the state of one linear layer before its first step.

    For each operand X of "input", "kernel" and "output_grad", the state of `DelayedScaling` has
    `X_amax`, a scalar: the amax from which the active scale is computed, 0 before the first step;
    and `X_amax_history` of shape `[amax_history_len]`, with the newest entry first. It also has two
    scalars: `age`, the number of steps since the scales were last updated, and `uses`, the number
    of times that the layer ran in the last step if JAX summed the gradients of all runs.

    Args:
      scaling: a scaling with a state, or "delayed".

    Returns:
      A dict of float32 arrays.

    Raises:
      JaxmpError: if the scaling has no state.

    Example:
      >>> {name: leaf.shape for name, leaf in init_state().items() if "input" in name}
      {'input_amax': (), 'input_amax_history': (1024,)}
    """
    scaling = as_scaling(scaling)
    if not isinstance(scaling, DelayedScaling):
        raise JaxmpError(
            f"{type(scaling).__name__} has no state. Leave `state` out, or use "
            "fp8.DelayedScaling()."
        )
    return {name: jnp.zeros(_shape(name, scaling), _core.FLOAT32) for name in NAMES}


def check_layer_state(scaling: DelayedScaling, state: object) -> None:
    """Checks that a state has the keys, shapes and dtypes of `init_state(scaling)`.

    Raises:
      JaxmpError: with the keys, or the first leaf that differs.
    """
    if not isinstance(state, Mapping) or set(state) != set(NAMES):
        keys = sorted(state) if isinstance(state, Mapping) else type(state).__name__
        raise JaxmpError(
            f"The state of {type(scaling).__name__} has the keys {sorted(NAMES)}, not {keys}. "
            "Make it with fp8.init_state(scaling)."
        )
    for name in () if is_active(state) else NAMES:
        leaf, shape = state[name], _shape(name, scaling)
        dtype = getattr(leaf, "dtype", type(leaf).__name__)
        if np.shape(leaf) != shape or not (dtype == _core.FLOAT32 or _is_max(leaf)):
            raise JaxmpError(
                f"state[{name!r}] has shape {np.shape(leaf)} and dtype {dtype}; with "
                f"amax_history_len={scaling.amax_history_len} it must have shape {shape} and dtype "
                "float32. Make it with fp8.init_state(scaling)."
            )


def is_active(state: Mapping[str, Any]) -> bool:
    """Returns True for the active state of a layer, which `begin_step` creates."""
    ranks = (getattr(state[name], "ndim", 0) for name in (f"{OPERANDS[0]}_amax_history", AGE))
    return next(ranks) == next(ranks) + 2


def _shape(name: str, scaling: DelayedScaling) -> tuple[int, ...]:
    """Returns the shape of a leaf in `init_state(scaling)`."""
    return (scaling.amax_history_len,) if name.endswith("_history") else ()


# ---------------------------------------------------------------------------
# Max-accumulation
# ---------------------------------------------------------------------------


# Name of Flax's dtype `fm32`, whose addition is the maximum.
_MAX = "fp8_meta32"


def _is_max(leaf: object) -> bool:
    """Returns True for an array in `fm32`; see `to_fm32`."""
    return getattr(getattr(leaf, "dtype", None), "name", "") == _MAX


def to_fm32(state: PyTree) -> PyTree:
    """Converts a state to a dtype whose gradients JAX combines by max instead of summing them.

    A layer that runs twice, or in each iteration of a `lax.scan`, has one gradient per use, and JAX
    sums them. Convert the state before differentiation, outside of the differentiated function, and
    its gradient back with `to_float32`: `to_float32(jax.grad(fn, allow_int=True)(to_fm32(state)))`.

    Args:
      state: any pytree of float32 arrays.

    Returns:
      The same tree in Flax's dtype `fm32`, which `fp8.dot_general` also accepts.

    Raises:
      MissingDependencyError: if Flax is not installed.

    Example:
      >>> to_float32(to_fm32({"amax": jnp.ones(())}))["amax"].dtype
      dtype('float32')
    """
    try:
        fm32 = importlib.import_module("flax.linen.fp8_ops").fm32
    except ModuleNotFoundError:
        raise _core.missing_dependency(
            "flax", "FP8 state that is combined by max", "flax"
        ) from None
    return jax.tree.map(lambda leaf: lax.convert_element_type(leaf, fm32), state)


def to_float32(state: PyTree) -> PyTree:
    """Converts `fm32` leaves back to float32 and returns all other leaves unchanged.

    A function that computes with the state itself, or passes it to a function mapped by
    `shard_map(..., check_vma=False)`, must convert it first. JAX then sums the gradients of several
    uses of a layer.

    Raises:
      CompositionError: inside `shard_map(..., check_vma=False)`, where JAX would reduce `fm32` over
        devices, which it cannot lower.

    Example:
      >>> to_float32({"scale": jnp.ones(2), "step": 3})["scale"].dtype
      dtype('float32')
    """

    def convert(leaf: PyTree) -> Any:
        if not _is_max(leaf):
            return leaf
        check_reducible(leaf)
        return _convert_to_float32(leaf)

    return jax.tree.map(convert, state)


# JAX cannot transpose the conversion (jax 0.12), so that the gradient has its own rule.
@jax.custom_vjp
def _convert_to_float32(leaf: jax.Array) -> jax.Array:
    return lax.convert_element_type(leaf, _core.FLOAT32)


_convert_to_float32.defvjp(
    lambda leaf: (_convert_to_float32(leaf), None), lambda _, cotangent: (to_fm32(cotangent),)
)


def check_reducible(leaf: jax.Array) -> None:
    """Checks that JAX can combine the gradients of a state over devices.

    Raises:
      CompositionError: as in `to_float32`.
    """
    if _is_max(leaf) and _compat.is_in_unchecked_shard_map():
        raise CompositionError(
            "DelayedScaling: the state of an FP8 layer is read inside shard_map(..., "
            "check_vma=False), where JAX cannot combine states over devices by max. Use "
            "check_vma=True, or take gradients inside of the mapped function. To sum the amaxes "
            "over devices instead, convert the state in front of the mapped function: "
            "mapped(jaxmp.fp8.to_float32(variables), x)."
        )


# ---------------------------------------------------------------------------
# One step
# ---------------------------------------------------------------------------


def before_step(state: State | None) -> State | None:
    """Returns `settled(state)` for a state in float32 or `fm32`; None without a state.

    Raises:
      CompositionError: as in `to_float32`.
    """
    if state is None:
        return None
    check_reducible(state[AGE])
    return settled(state)


# Jitted, so that all layers share one trace and, in StableHLO, one function.
@jax.jit
def settled(state: State) -> State:
    """Converts a state to float32, and undoes the summation if JAX summed several runs of a layer.

    The arrays of several layers may be stacked on their first axes. All leaves are divided by the
    number of runs, except the newest entries of the histories. Their sum is not smaller than the
    largest of them, and a scale that is somewhat too small only loses range at the small end.
    An active state is not summed.
    """
    state = to_float32(state)
    if is_active(state):
        return state
    uses = jnp.maximum(state[USES], np.float32(1))
    divided = {name: leaf / uses for name, leaf in state.items() if leaf.ndim == uses.ndim}
    for operand in OPERANDS:
        name = f"{operand}_amax_history"
        is_newest = lax.broadcasted_iota(np.int32, state[name].shape, uses.ndim) == 0
        divided[name] = jnp.where(is_newest, state[name], state[name] / uses[..., None])
    return divided


@jax.custom_vjp
def rest(result: jax.Array, state: State) -> jax.Array:
    """Returns the result of a layer that does not run in FP8 in this step, and resets its state.

    The gradient of the state is that of `init_state`, except that `uses` is 1. The next step in FP8
    then takes its scales from the tensors themselves.
    """
    check_reducible(state[AGE])
    return result


def _rest_bwd(state: State, gradient: jax.Array) -> tuple[jax.Array, State]:
    values = {
        name: jnp.full(leaf.shape, name == USES, _core.FLOAT32) for name, leaf in state.items()
    }
    new = {name: lax.convert_element_type(values[name], state[name].dtype) for name in values}
    return gradient, new


rest.defvjp(lambda result, state: (rest(result, state), state), _rest_bwd)


class OperandState(NamedTuple):
    """State of one operand, with the age of the layer's state."""

    age: jax.Array
    amax: jax.Array
    amax_history: jax.Array


def of_operand(state: Mapping[str, Any], operand: str) -> OperandState:
    """Selects the part of a state that "input", "kernel" or "output_grad" requires.

    Passing fewer arrays reduces the cost of tracing.
    """
    return OperandState(state[AGE], state[f"{operand}_amax"], state[f"{operand}_amax_history"])


def known_amax(scaling: DelayedScaling, state: OperandState) -> jax.Array:
    """Returns the amax of earlier steps from which the scale of this step is computed, or 0.

    Args:
      scaling: the scaling.
      state: the operand's state before the step, or its active state.
    """
    stored, history = state.amax, state.amax_history
    if history.ndim > 1:  # an active state
        stored, largest, newest = (state.amax[index] for index in range(3))
        recent = largest if scaling.amax_compute == "max" else newest
    else:
        recent = jnp.max(history) if scaling.amax_compute == "max" else history[0]
    due = (state.age >= np.float32(1)) | (stored == np.float32(0))
    return lax.select(due, recent, stored)


@functools.partial(jax.jit, static_argnames="scaling")
def next_state(
    scaling: DelayedScaling,
    state: Mapping[str, Any],
    seen: Mapping[str, tuple[jax.Array, jax.Array]],
    like: jax.Array,
) -> State:
    """Returns the state after a step.

    Args:
      scaling: the scaling.
      state: the state before the step, in float32.
      seen: for each operand, the active amax and the amax measured in this step. If the state is
        active, the active amax may be 0 instead of the measured one.
      like: a leaf of the state that the caller passed.

    Returns:
      The next state, in the dtype of `like`. It contains no non-finite amax.
    """
    first = lax.full_like(state[AGE], 1)
    new = {AGE: first, USES: first}
    for operand in OPERANDS:
        (amax, latest), history = seen[operand], state[f"{operand}_amax_history"]
        if history.ndim > 1:
            new[f"{operand}_amax"], new[f"{operand}_amax_history"] = _gradient_of_active(
                scaling, amax, latest
            )
            continue
        grown = jnp.concatenate([latest[None], history[:-1]])
        new[f"{operand}_amax"] = jnp.where(lax.is_finite(amax), amax, np.float32(0))
        new[f"{operand}_amax_history"] = jnp.where(lax.is_finite(latest), grown, history)
    return {name: lax.convert_element_type(leaf, like.dtype) for name, leaf in new.items()}


def _gradient_of_active(
    scaling: DelayedScaling, amax: jax.Array, partials: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the gradients of an operand's `amax` and `amax_history` in an active state.

    The gradient of `amax` is 0 if the active amax is that of this step, -1 if there is none.
    """
    if not scaling.calibrate:
        amax = lax.select(amax > np.float32(0), amax, lax.full_like(amax, -1))
    return jnp.broadcast_to(amax, (ACTIVE_SIZE,)), partials[:, None]
