"""Scales, and casts to FP8 that saturate finite values and keep non-finite values visible."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmp._core._dtypes import FLOAT32, FLOAT64, FLOATS_16BIT, canonical_dtype, is_fp8
from jaxmp._core._typing import ArrayLike, DTypeLike
from jaxmp.errors import JaxmpError, RecipeError
from jaxmp.fp8._scaling import fp8_dtype

_LARGEST = float(np.finfo(np.float32).max)
_SMALLEST = float(np.finfo(np.float32).tiny)
# Bits of an FP32 infinity, which are also the mask of the exponent.
_EXPONENT = 0x7F800000

_FLOATS = FLOATS_16BIT | {FLOAT32, FLOAT64}


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
    if array.dtype not in _FLOATS:
        raise JaxmpError(
            f"{caller}: {name} is {array.dtype}, and must be float16, bfloat16, float32 or "
            f"float64, which it quantizes by itself: for example {name}.astype(jnp.bfloat16)."
        )
    return array


def _check_scale(scale: ArrayLike, name: str, shape: tuple[int, ...], caller: str) -> None:
    """Raises if `scale` does not broadcast to an array of `shape`."""
    actual = jnp.shape(scale)
    wide = len(actual) > len(shape)
    if wide or any(n not in (1, size) for n, size in zip(actual[::-1], shape[::-1], strict=False)):
        raise JaxmpError(
            f"{caller}: scale has shape {actual}, which does not broadcast to {name}'s {shape}. "
            "Give a scalar, or size 1 on the axes that share a scale: "
            f"fp8.compute_scale(jnp.abs({name}).max(axis=-1, keepdims=True), 'e4m3fn')."
        )


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
      margin: the scale is divided by `2**margin`, an integer from 0 to 64.
      power_of_two: round the scale down to a power of two.

    Returns:
      float32 scale of the shape of `amax`, positive and finite for every `amax`.

    Raises:
      PolicyError: if `dtype` is not an FP8 format.
      RecipeError: if `margin` is not an integer from 0 to 64.
      JaxmpError: if `amax` is not an array of floats.

    Example:
      >>> compute_scale(jnp.array([2.0, 0.0, jnp.inf]), "e4m3fn").tolist()
      [224.0, 1.0, 1.0]
    """
    limit = float(jnp.finfo(fp8_dtype(dtype)).max)
    if isinstance(margin, bool) or not isinstance(margin, int) or not 0 <= margin <= 64:
        raise RecipeError(
            f"margin={margin!r} must be an integer from 0 to 64; for example "
            "compute_scale(amax, 'e4m3fn', margin=1)."
        )
    amax = as_floats(float(amax) if isinstance(amax, int) else amax, "amax", "fp8.compute_scale")
    amax = lax.convert_element_type(amax, FLOAT32)
    # Compare the bits: processors that flush subnormals treat a subnormal amax as zero.
    bits = lax.bitcast_convert_type(amax, jnp.uint32)
    usable = (bits != 0) & (bits < np.uint32(_EXPONENT))
    scale = lax.full_like(amax, limit * 2.0**-margin) / amax
    scale = lax.clamp(np.float32(_SMALLEST), scale, np.float32(_LARGEST))
    if power_of_two:
        scale = lax.bitcast_convert_type(
            lax.bitcast_convert_type(scale, jnp.uint32) & np.uint32(_EXPONENT), FLOAT32
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
      JaxmpError: if `x` is not an array of floats, or `scale` does not broadcast to it.

    Example:
      >>> quantize(jnp.array([1.0, 1000.0, jnp.inf]), 2.0, "e4m3fn").tolist()
      [2.0, 448.0, nan]
    """
    x = as_floats(x, "x", "fp8.quantize")
    _check_scale(scale, "x", x.shape, "fp8.quantize")
    return quantize_finite(x, scale, dtype)


def quantize_finite(x: jax.Array, scale: jax.typing.ArrayLike, dtype: DTypeLike) -> jax.Array:
    """Quantizes as `quantize` does, without checks of the arguments."""
    dtype = fp8_dtype(dtype)
    limit = float(jnp.finfo(dtype).max)
    wide = FLOAT64 if x.dtype == FLOAT64 else FLOAT32
    x = lax.convert_element_type(x, wide)
    scaled = x * jnp.broadcast_to(lax.convert_element_type(jnp.asarray(scale), wide), x.shape)
    clipped = lax.clamp(np.array(-limit, wide), scaled, np.array(limit, wide))
    # The product with 0 is NaN for non-finite elements, and has the sign of all others. JAX would
    # compute the constants of a selection outside of a scan, which would read them as an array.
    # `scaled` may overflow with a stale scale, and should saturate.
    return lax.convert_element_type(clipped + x * np.zeros((), wide), dtype)


def dequantize(q: jax.Array, scale: jax.typing.ArrayLike, dtype: DTypeLike = FLOAT32) -> jax.Array:
    """Computes `q / scale` in FP32, and casts the result to `dtype`.

    Args:
      q: FP8 array of any shape.
      scale: broadcastable to `q`.
      dtype: dtype of the result.

    Returns:
      Array of the shape of `q` in `dtype`.

    Raises:
      PolicyError: if `dtype` is not a float dtype.
      JaxmpError: if `q` is not FP8, or `scale` does not broadcast to it.

    Example:
      >>> dequantize(quantize(jnp.array([0.5]), 4.0, "e4m3fn"), 4.0).tolist()
      [0.5]
    """
    q, dtype = jnp.asarray(q), canonical_dtype(dtype)
    if not is_fp8(q.dtype):
        raise JaxmpError(
            f"fp8.dequantize: q is {q.dtype}, and must be FP8, as fp8.quantize(x, scale, "
            "'e4m3fn') gives it."
        )
    _check_scale(scale, "q", q.shape, "fp8.dequantize")
    # Without the barrier, XLA would remove a cast to FP8 and back, and with it the rounding.
    wide = lax.convert_element_type(lax.optimization_barrier(q), FLOAT32)
    scale = jnp.broadcast_to(lax.convert_element_type(jnp.asarray(scale), FLOAT32), q.shape)
    return lax.convert_element_type(wide / scale, dtype)


class QuantizationStats(NamedTuple):
    """Losses of a cast of a tensor to FP8; all fields are float32 scalars."""

    # Fraction of the finite elements that exceed the largest value of the format and saturate.
    saturated: jax.Array
    # Fraction of the finite elements that are not zero and become zero.
    underflowed: jax.Array
    # Fraction of the finite elements that become subnormal numbers, which have less precision.
    subnormal: jax.Array
    # Fraction of all elements that are finite.
    finite: jax.Array
    # Largest magnitude of the finite elements, before scaling.
    amax: jax.Array


def quantization_stats(
    x: jax.Array, scale: jax.typing.ArrayLike, dtype: DTypeLike
) -> QuantizationStats:
    """Measures how many elements of `x` saturate, underflow or lose precision in FP8.

    Args:
      x: array of any shape and float dtype.
      scale: broadcastable to `x`.
      dtype: the FP8 format, as a name or dtype.

    Returns:
      The statistics. Fractions are 0 if `x` has no finite elements. Elements that exceed the range
      only because the scale was rounded to FP32 do not count as saturated.

    Raises:
      PolicyError: if `dtype` is not an FP8 format.
      JaxmpError: if `x` is not an array of floats, or `scale` does not broadcast to it.

    Example:
      >>> x = jnp.array([1.0, 1000.0, 1e-9, 0.0])
      >>> stats = quantization_stats(x, 1.0, "e4m3fn")
      >>> float(stats.saturated), float(stats.underflowed)
      (0.25, 0.25)
      >>> float(stats.subnormal), float(stats.finite), float(stats.amax)
      (0.0, 1.0, 1000.0)
    """
    x, dtype = as_floats(x, "x", "fp8.quantization_stats"), fp8_dtype(dtype)
    _check_scale(scale, "x", x.shape, "fp8.quantization_stats")
    x = jnp.asarray(x)
    scaled = lax.convert_element_type(x, FLOAT32) * jnp.broadcast_to(
        lax.convert_element_type(jnp.asarray(scale), FLOAT32), x.shape
    )
    return stats_of(x, scaled, dtype)


def stats_of(x: jax.Array, scaled: jax.Array, dtype: DTypeLike) -> QuantizationStats:
    """Computes `quantization_stats` of a tensor that is already scaled.

    Args:
      x: array of any shape and float dtype.
      scaled: the elements of `x` times their scales, in any shape. Elements that are not finite
        here are left out of the fractions of finite elements.
      dtype: the FP8 format.
    """
    scaled = jnp.abs(lax.convert_element_type(scaled, FLOAT32))
    # Non-finite elements count in `finite` only.
    known = lax.is_finite(scaled)
    size = np.float32(max(x.size, 1))
    count = jnp.sum(known, dtype=FLOAT32)
    fraction = lambda flags: jnp.sum(flags & known, dtype=FLOAT32) / jnp.maximum(count, 1.0)
    info = jnp.finfo(dtype)
    limit = np.float32(info.max)
    q = lax.convert_element_type(
        lax.optimization_barrier(lax.convert_element_type(jnp.minimum(scaled, limit), dtype)),
        FLOAT32,
    )
    zero, normal = np.float32(0), np.float32(info.smallest_normal)
    wide = jnp.abs(lax.convert_element_type(x, FLOAT32))
    inside = lax.is_finite(wide)
    return QuantizationStats(
        # The scale is rounded to FP32, so the scaled amax may exceed the limit slightly.
        saturated=fraction(scaled > limit * np.float32(1 + 2.0**-20)),
        underflowed=fraction((q == zero) & (scaled != zero)),
        subnormal=fraction((q > zero) & (q < normal)),
        finite=jnp.sum(inside, dtype=FLOAT32) / size,
        amax=jnp.max(lax.select(inside, wide, lax.full_like(wide, 0)), initial=0),
    )
