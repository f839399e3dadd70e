"""Scales, and casts to FP8 that saturate finite values and keep non-finite values visible."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmp._core._dtypes import FLOAT32, FLOAT64, FLOATS_16BIT
from jaxmp._core._typing import ArrayLike, DTypeLike
from jaxmp.errors import JaxmpError
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
    amax = jnp.asarray(amax, FLOAT32)
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

    Example:
      >>> quantize(jnp.array([1.0, 1000.0, jnp.inf]), 2.0, "e4m3fn").tolist()
      [2.0, 448.0, nan]
    """
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
