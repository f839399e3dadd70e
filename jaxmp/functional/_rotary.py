"""Rotary position embeddings, with angles in 64-bit fixed point."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.typing import ArrayLike

from jaxmp._core._dtypes import FLOAT32, FLOAT64, floating_array, is_16bit, wide_dtype
from jaxmp.errors import JaxmpError


def rotary_embedding(
    x: ArrayLike,
    positions: ArrayLike,
    *,
    base: float = 10000.0,
    scaling: float = 1.0,
    frequencies: Sequence[float] | None = None,
    interleaved: bool = False,
    rotary_dim: int | None = None,
) -> jax.Array:
    """Rotates pairs of features by angles proportional to the position.

    Rotary embedding of Su et al. 2021 (arXiv:2104.09864): pair i of H / 2 is rotated by
    `position * base ** (-2 i / H) / scaling` radians. In bfloat16, positions above 256 are not
    all distinct, and an angle of 1000 has steps of 4, more than half a turn. In FP32, the angle of
    position 2**17 has an error of up to 0.004, twice the rounding error of a bfloat16 result. This
    function multiplies integer positions by turns per position in 64-bit fixed point, where whole
    turns overflow and are dropped. The angle is accurate to 4e-7 at every int32 position, including
    negative ones. Sine, cosine and rotation are in FP32; the result is rounded once.

    Args:
      x: queries or keys, `[..., T, N, H]`, floating, 16 bits or more.
      positions: `[T]` or `[..., T]`, or any shape that broadcasts to the dimensions of x before N.
        Integers; or float32 for positions between integers, whose product with the frequency is
        then in FP32. 16-bit positions raise an error.
      base: base of the geometric series of wavelengths. A number, not an array, like the following
        arguments.
      scaling: number by which positions are divided (position interpolation, arXiv:2306.15595).
      frequencies: radians per position of each pair, instead of `base` and `scaling`; for Llama 3,
        YaRN and other series.
      interleaved: pairs are features (2 i, 2 i + 1), as in GPT-J and the paper; otherwise
        (i, i + H / 2), as in GPT-NeoX and Llama.
      rotary_dim: number of leading features to rotate, which is H above; None: all.

    Returns:
      `[..., T, N, H]` in the dtype of x.

    Raises:
      JaxmpError: if dtypes, shapes or numbers do not fit.

    Example:
      >>> q = jnp.ones((1, 3, 1, 2), jnp.bfloat16)
      >>> positions = jnp.array([0, 1, 2**17])
      >>> jaxmp.functional.rotary_embedding(q, positions)[0, :, 0]
      Array([[1, 1],
             [-0.300781, 1.38281],
             [1.03906, -0.957031]], dtype=bfloat16)
    """
    x, positions = floating_array(x, "x"), _positions(positions)
    if x.ndim < 3:
        raise JaxmpError(
            f"x has shape {list(x.shape)}, and must be [..., T, N, H]. With one head: "
            "x[..., None, :]."
        )
    size = _rotary_dim(rotary_dim, x)
    radians = _frequencies(size, base, scaling, frequencies)
    try:
        fits = np.broadcast_shapes(positions.shape, x.shape[:-2]) == x.shape[:-2]
    except ValueError:
        fits = False
    if not fits:
        raise JaxmpError(
            f"positions have shape {list(positions.shape)}, and x of shape {list(x.shape)} has "
            f"positions of shape {list(x.shape[:-2])}, [..., T]. Give the last dimensions of that, "
            f"for example jnp.arange({x.shape[-3]})."
        )
    wide = wide_dtype(x.dtype)
    angles = _angles(positions, radians, wide)
    missing = x.ndim - 2 - positions.ndim
    # [..., T] -> [..., T, 1, H / 2], with as many dimensions as x.
    angles = angles.reshape(*(1,) * missing, *positions.shape, 1, size // 2)
    cos, sin = jnp.cos(angles).astype(wide), jnp.sin(angles).astype(wide)

    turned = x[..., :size].astype(wide)
    pairs = (*x.shape[:-1], size // 2, 2) if interleaved else (*x.shape[:-1], 2, size // 2)
    axis = -1 if interleaved else -2
    first, second = (jnp.squeeze(half, axis) for half in jnp.split(turned.reshape(pairs), 2, axis))
    out = jnp.stack([first * cos - second * sin, first * sin + second * cos], axis)
    out = out.reshape(*x.shape[:-1], size).astype(x.dtype)
    return out if size == x.shape[-1] else jnp.concatenate([out, x[..., size:]], axis=-1)


def _angles(positions: jax.Array, radians: np.ndarray, wide: np.dtype) -> jax.Array:
    """Returns the angles, `[..., H / 2]`; modulo whole turns if positions are integers."""
    if jnp.issubdtype(positions.dtype, jnp.integer) and wide == FLOAT32:
        turns = _turns(positions.astype(jnp.int32), radians / (2 * math.pi))
        return turns.astype(FLOAT32) * np.float32(2 * math.pi / 2**32)
    exact = FLOAT64 if FLOAT64 in (wide, positions.dtype) else FLOAT32
    rates = radians.astype(exact).reshape((1,) * positions.ndim + radians.shape)
    return positions.astype(exact)[..., None] * rates


def _turns(positions: jax.Array, rates: np.ndarray) -> jax.Array:
    """Computes `positions * rates` modulo 1, in units of 2**-32, as int32 `[..., H / 2]`.

    A rate has 64 bits after the binary point, in two 32-bit words. The result is the first word of
    the product after the binary point. The bits before it are whole turns, which overflow and are
    dropped in 32-bit arithmetic.
    """
    fixed_point = [int(math.ldexp(rate, 64)) % 2**64 for rate in rates]
    shape = (1,) * positions.ndim + rates.shape
    high = np.array([value >> 32 for value in fixed_point], np.uint32).reshape(shape)
    low = np.array([value % 2**32 for value in fixed_point], np.uint32).reshape(shape)
    positions = positions[..., None]
    signed = lax.bitcast_convert_type(positions, jnp.uint32)
    carried = _high_word(signed, low)
    # As uint32, a negative position is too large by 2**32.
    carried -= jnp.where(positions < 0, low, np.zeros_like(low))
    return lax.bitcast_convert_type(signed * high + carried, jnp.int32)


def _high_word(a: jax.Array, b: np.ndarray) -> jax.Array:
    """Returns the upper half of the 64-bit product of uint32, minus up to 2 ignored carries."""
    upper, lower, sixteen = a >> 16, a & 0xFFFF, np.uint32(16)
    b_upper, b_lower = b >> sixteen, b & np.uint32(0xFFFF)
    return upper * b_upper + ((upper * b_lower) >> 16) + ((lower * b_upper) >> 16)


def _positions(positions: ArrayLike) -> jax.Array:
    array = jnp.asarray(positions)
    if jnp.issubdtype(array.dtype, jnp.integer) or array.dtype in (FLOAT32, FLOAT64):
        return array
    why = f"{array.dtype} cannot represent them"
    if is_16bit(array.dtype):
        exact = 256 if array.dtype != np.float16 else 2048
        why = f"{array.dtype} cannot represent all integers above {exact}"
    raise JaxmpError(
        f"positions are {array.dtype} of shape {list(array.shape)}: {why}. Use uncast integers, "
        f"such as jnp.arange({array.shape[-1] if array.ndim else 1}), which is int32."
    )


def _rotary_dim(size: int | None, x: jax.Array) -> int:
    if size is None:
        size = x.shape[-1]
    elif isinstance(size, bool) or not isinstance(size, (int, np.integer)):
        raise JaxmpError(f"rotary_dim={size!r} is not an integer, such as rotary_dim=64.")
    if size % 2 or not 0 < size <= x.shape[-1]:
        raise JaxmpError(
            f"rotary_dim={size} of x {list(x.shape)}: features are rotated in pairs, so it must be "
            f"even, from 2 to {x.shape[-1]}; for example "
            f"rotary_dim={max(x.shape[-1] // 2 * 2, 2)}."
        )
    return int(size)


def _frequencies(
    size: int, base: float, scaling: float, frequencies: ArrayLike | Sequence[float] | None
) -> np.ndarray:
    """Returns the radians per position of each pair, float64 `[H / 2]`."""
    number = functools.partial(_number, least=0.0)
    if frequencies is None:
        exponents = np.arange(0, size, 2, dtype=np.float64) / size
        return number(base, "base") ** -exponents / number(scaling, "scaling")
    if (base, scaling) != (10000.0, 1.0):
        raise JaxmpError(
            f"frequencies replace base and scaling, but base={base!r} and scaling={scaling!r} were "
            "passed as well. Leave them out."
        )
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(frequencies)):
        raise JaxmpError(
            "frequencies are traced values, but must be known when the program is traced: pass a "
            "NumPy array."
        )
    array = np.asarray(frequencies, np.float64)
    if array.shape != (size // 2,) or not np.isfinite(array).all():
        raise JaxmpError(
            f"frequencies have shape {list(array.shape)}; {size} features have {size // 2} pairs, "
            f"and each has one finite number of radians per position: shape [{size // 2}]."
        )
    return array


def _number(value: Any, name: str, least: float) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not (number > least and math.isfinite(number)):
        raise JaxmpError(
            f"{name}={value!r} must be a number above {least:g}, known when the program is traced; "
            f"for example {name}={10000.0 if name == 'base' else 1.0}."
        )
    return number
