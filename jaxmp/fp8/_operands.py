"""Quantization of one operand of a dot.

Casts to FP8 saturate finite values and keep non-finite values visible.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap

from jaxmp import _core, _programs
from jaxmp._core import ArrayLike, DTypeLike, _compat
from jaxmp.errors import JaxmpError
from jaxmp.fp8._checkpoint import named_amax
from jaxmp.fp8._scaling import DelayedScaling, Scaling, fp8_dtype
from jaxmp.fp8._state import OPERANDS, OperandState, known_amax

_LARGEST = float(np.finfo(np.float32).max)
_SMALLEST = float(np.finfo(np.float32).tiny)
# Bits of an FP32 infinity, which are also the mask of the exponent.
_EXPONENT = 0x7F800000


def as_floats(x: ArrayLike, name: str, caller: str) -> jax.Array:
    """Returns `x` as an array of a float dtype other than FP8.

    Raises:
      JaxmpError: with the public function, the argument, and its type or dtype.
    """
    try:
        array = jnp.asarray(x)
    except (TypeError, ValueError):
        raise JaxmpError(
            f"{caller}: {name} is {type(x).__name__} ({str(x)[:40]}), not an array of numbers."
        ) from None
    if not _core.is_float(array):
        raise JaxmpError(
            f"{caller}: {name} is {array.dtype}, and must be float16, bfloat16, float32 or "
            f"float64, which it quantizes by itself: for example {name}.astype(jnp.bfloat16)."
        )
    return array


def compute_scale(
    amax: jax.typing.ArrayLike, dtype: DTypeLike, margin: int = 0, power_of_two: bool = False
) -> jax.Array:
    """Computes the scale that maps `[-amax, amax]` onto the range of an FP8 format.

    In plain Python, where `limit` is the largest finite value of `dtype`:

        if amax == 0 or amax is not finite:  scale = 1
        else:  scale = clamp(limit / 2**margin / amax, 2**-126, FP32's largest number)
               if power_of_two:  scale = 2 ** floor(log2(scale))

    Args:
      amax: largest magnitude of a tensor: a number, or an array of any shape and float dtype.
      dtype: the FP8 format, as a name or dtype.
      margin: the scale is divided by `2**margin`.
      power_of_two: round the scale down to a power of two.

    Returns:
      float32 scale of the shape of `amax`, positive and finite for every `amax`.

    Raises:
      PolicyError: if `dtype` is not an FP8 format.

    Example:
      >>> compute_scale(jnp.array([2.0, 0.0, jnp.inf]), "e4m3fn").tolist()
      [224.0, 1.0, 1.0]
    """
    limit = float(jnp.finfo(fp8_dtype(dtype)).max)
    amax = jnp.asarray(amax, _core.FLOAT32)
    # Compare the bits: processors that flush subnormals treat a subnormal amax as zero.
    bits = lax.bitcast_convert_type(amax, jnp.uint32)
    usable = (bits != 0) & (bits < np.uint32(_EXPONENT))
    scale = lax.full_like(amax, limit * 2.0**-margin) / amax
    scale = lax.clamp(np.float32(_SMALLEST), scale, np.float32(_LARGEST))
    if power_of_two:
        scale = lax.bitcast_convert_type(
            lax.bitcast_convert_type(scale, jnp.uint32) & np.uint32(_EXPONENT), _core.FLOAT32
        )
    return lax.select(usable, scale, lax.full_like(scale, 1.0))


def quantize(x: jax.Array, scale: jax.typing.ArrayLike, dtype: DTypeLike) -> jax.Array:
    """Casts `x * scale` to FP8, rounding to nearest with ties to even.

    Finite values beyond the range of the format saturate. Infinities and NaN become NaN, so that a
    dot with them is NaN and the training step can be skipped. Clipping alone would hide infinities.

    Args:
      x: array of any shape and float dtype. It is scaled in FP32, float64 in float64.
      scale: positive and broadcastable to `x`, as returned by `compute_scale`.
      dtype: the FP8 format, as a name or dtype.

    Returns:
      Array of the shape of `x` in `dtype`; `x` is approximately this array divided by `scale`.

    Raises:
      PolicyError: if `dtype` is not an FP8 format.

    Example:
      >>> quantize(jnp.array([1.0, 1000.0, jnp.inf]), 2.0, "e4m3fn").tolist()
      [2.0, 448.0, nan]
    """
    dtype = fp8_dtype(dtype)
    limit = float(jnp.finfo(dtype).max)
    wide = _core.wide_dtype(x.dtype)
    x = lax.convert_element_type(x, wide)
    scaled = x * jnp.broadcast_to(lax.convert_element_type(jnp.asarray(scale), wide), x.shape)
    clipped = lax.clamp(np.array(-limit, wide), scaled, np.array(limit, wide))
    # The product with -0 is NaN for non-finite elements, and otherwise a zero whose subtraction
    # changes no sign. XLA would merge an array of 0 with one that the program stores, such as the
    # first value of a sum in a loop, and each layer would read it. JAX would compute the constants
    # of a selection outside of a scan, which would read them as an array.
    # `scaled` may overflow with a stale scale, and should saturate.
    return lax.convert_element_type(clipped - x * np.array(-0.0, wide), dtype)


# The active amax, from which the scale is computed, a float32 scalar; and the measured one, or the
# partial maxima if the state is active.
Seen = tuple[jax.Array, jax.Array]


class Operand(NamedTuple):
    """Operand of a dot, and the factor that undoes its scale in the result."""

    # FP8. In dots without FP8, the operand's dtype.
    values: jax.Array
    # float32: a scalar, or an array with size 1 on the contracted axes; NaN if an element was not
    # finite. None: the values are not scaled.
    factor: jax.Array | None


def amax(x: jax.Array, axes: tuple[int, ...] | None = None) -> jax.Array:
    """Returns the largest magnitude in float32: of all elements, or over `axes`, kept as size 1.

    It is NaN if an element is NaN. XLA for CPUs drops NaN from the maximum of matrices (JAX 0.10 to
    0.12), so that the bits are compared, which order like the magnitudes, with NaN as the largest.
    """
    wide = lax.abs(lax.convert_element_type(x, _core.FLOAT32))
    bits = lax.bitcast_convert_type(wide, jnp.int32)
    # `jnp.max` takes several times as long to trace. The maximum with 0 is for empty arrays.
    reduced = range(x.ndim) if axes is None else [axis % x.ndim for axis in axes]
    largest = lax.max(lax.reduce_max(bits, tuple(reduced)), np.int32(0))
    if axes is not None:
        largest = lax.expand_dims(largest, reduced)
    return lax.bitcast_convert_type(largest, _core.FLOAT32)


# One function object for the same sizes, so that JAX finds its earlier trace.
@functools.cache
def _state_maxima(leading: int, count: int) -> Any:
    """Returns a function of a tensor and the age of its state that measures the tensor.

    It computes `count` partial maxima over all axes but the first `leading`. Under `vmap`, examples
    that share a state share them. If each example has a separate state, it also has separate
    maxima.
    """

    @custom_vmap
    def measure(x: jax.Array, age: jax.Array) -> jax.Array:
        del age
        return partial_maxima(x, leading, count)

    @measure.def_vmap
    def _(axis_size: int, in_batched: list[bool], x: jax.Array, age: jax.Array) -> Any:
        x_batched, has_state = in_batched
        if not has_state:
            return _state_maxima(leading, count)(jnp.moveaxis(x, 0, leading), age), False
        if not x_batched:
            x = jnp.broadcast_to(x, (axis_size, *x.shape))
        return _state_maxima(leading + 1, count)(x, age), True

    return measure


def partial_maxima(x: jax.Array, leading: int, count: int) -> jax.Array:
    """Computes magnitudes of which the largest is the amax of `x`.

    Args:
      x: array of any shape.
      leading: number of first axes that are not reduced.
      count: size of the result.

    Returns:
      float32, the first `leading` axes of `x` and an axis of size `count`. Each element is the
      largest magnitude of a contiguous part of `x`, or 0.
    """
    stack, own = x.shape[:leading], x.shape[leading:]
    row, size = (own[-1] if own else 1), math.prod(own)
    if count == 1:
        return amax(x, tuple(range(leading, x.ndim))).reshape(*stack, 1)
    if not size:
        return jnp.zeros((*stack, count), _core.FLOAT32)
    rows = size // row
    if not isinstance(rows, int):
        parts = 1  # a symbolic dimension, as in `jax.export`
    else:
        parts = math.gcd(rows, count) if rows > count else rows * math.gcd(row, count // rows)
    maxima = amax(x.reshape(*stack, parts, size // parts), (leading + 1,)).reshape(*stack, parts)
    return lax.pad(maxima, np.float32(0), [*[(0, 0, 0)] * leading, (0, count - parts, 0)])


AMAX = jax.jit(amax)


def jitted_by_role(fn: Callable[..., Any], *static: str) -> dict[str, Callable[..., Any]]:
    """Jits `fn` once per operand role, under a name from which `with_stats` reads the role.

    Jitted, so that layers of the same shape share one trace and, in StableHLO, one function.
    """

    def named(role: str) -> Callable[..., Any]:
        def call(*args: object, **kwargs: object) -> Any:
            return fn(*args, **kwargs)

        call.__name__ = call.__qualname__ = _programs.QUANTIZE + role
        return jax.jit(call, static_argnames=static)

    return {role: named(role) for role in OPERANDS}


def _quantize(
    x: jax.Array,
    in_force: jax.Array | None,
    measured: jax.Array | None,
    scaling: Scaling,
    dtype: DTypeLike,
    axes: tuple[int, ...] | None,
) -> tuple[jax.Array, jax.Array]:
    """Quantizes `x`; returns its FP8 values and their factor.

    If an amax is None, the active and the measured amax are those of `x`.
    """
    if in_force is None or measured is None:
        in_force = measured = amax(x, axes)
    scale = compute_scale(in_force, dtype, scaling.margin, scaling.power_of_two)
    # The reciprocal of a scale above 2**126 would be subnormal and might be flushed to zero.
    factor = lax.div(lax.full_like(scale, 1), lax.min(scale, lax.full_like(scale, 2.0**126)))
    values = quantize(x, scale, dtype)
    if _compat.target() == "gpu" and x.dtype == _core.FLOAT32:
        # XLA would lay an FP32 kernel out as the transposed copy that cuBLAS reads, in a slow pass
        # over FP32, and transpose the copy again for the other matmul.
        values = _compat.row_major(values)
    return values, factor


QUANTIZE = jitted_by_role(_quantize, "scaling", "dtype", "axes")


def _measured(x: jax.Array, state: OperandState, count: int) -> jax.Array:
    """Returns partial maxima of `x`, over all examples and devices that share the state."""
    maxima = _state_maxima(0, count)(x, state.age)
    axes = _compat.varying_axes(maxima) - _compat.varying_axes(state)
    return _compat.largest(maxima, tuple(sorted(axes, key=str)))


def _observe(x: jax.Array, state: OperandState, scaling: DelayedScaling) -> Seen:
    """Returns the active amax, which is that of `x` if there is no earlier one, and the new one."""
    known, history = known_amax(scaling, state), state.amax_history
    is_active, is_known = history.ndim > 1, known > np.float32(0)
    whole = lambda: named_amax(_measured(x, state, 1).reshape(()))
    if is_active and history.shape[0] > 1:
        partials = _measured(x, state, history.shape[0])
        # With a branch, only the first step reads the tensor once more. The other steps measure it
        # in the kernel that quantizes it.
        active = lax.cond(is_known, lambda: known, whole) if scaling.calibrate else known
        return active, partials
    measured = whole()
    active = lax.select(is_known, known, measured) if scaling.calibrate else known
    return active, measured[None] if is_active else measured


def _observe_and_quantize(
    x: jax.Array,
    state: OperandState,
    scaling: DelayedScaling,
    dtype: DTypeLike,
) -> tuple[tuple[jax.Array, jax.Array], Seen]:
    seen = _observe(x, state, scaling)
    values, factor = _quantize(x, *seen, scaling, dtype, None)
    if seen[1].size > 1 or not scaling.calibrate:
        # XLA for GPUs computes either the amax or a transposed copy in the kernel that quantizes.
        # With the barrier, it is the amax, and the copy is made of one byte per element.
        values = lax.optimization_barrier(values)
    return (values, factor), seen


OBSERVE = jax.jit(_observe, static_argnames="scaling")
OBSERVE_AND_QUANTIZE = jitted_by_role(_observe_and_quantize, "scaling", "dtype")
