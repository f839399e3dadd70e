"""Statistics of one tensor, as a small program that is traced once for each shape and dtype."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

from jaxmp import _core, _programs
from jaxmp.fp8 import _operands

FORMATS = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
# Key of the format and the scale with which a program quantizes a tensor itself.
ACTUAL = "actual"
# Bits of an FP32 infinity, which are also the mask of the exponent.
_EXPONENT, _MAGNITUDE, _FRACTION = 0x7F800000, 0x7FFFFFFF, 0x007FFFFF
# Fraction bits from which a number of float16's largest exponent rounds to infinity: 65520 is
# 2**15 times 1.9995.
_ROUNDS_UP = 0x007FF000
# Columns of `TensorStats.exponents`.
POWERS, OTHERS, LAST = 0, 1, 2


class Rounding(NamedTuple):
    """Losses of a rounding to a format; all fields are float32 scalars.

    Attributes:
      underflow: share of the elements that become zero, of those that are finite and not zero.
      overflow: share of the same elements that exceed the range of the format.
      snr: signal-to-noise ratio in decibels; elements beyond the range saturate. Infinite without
        an error.
    """

    underflow: _core.Array
    overflow: _core.Array
    snr: _core.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TensorStats:
    """Statistics of a tensor. Those in a loop have one more axis, of the length of the loop.

    Attributes:
      amax: largest magnitude of the finite elements.
      rms: root mean square of the finite elements.
      zero: share of the elements that are zero.
      nonfinite: share of the elements that are infinite or NaN.
      exponents: counts of elements by the 8 exponent bits of their FP32 value (rows), and by its
        fraction (columns): zero, smaller, or at least that with which float16 rounds up.
      formats: format -> losses of a rounding to it. FP8 formats have the scale of `amax`.
    """

    amax: _core.Array
    rms: _core.Array
    zero: _core.Array
    nonfinite: _core.Array
    exponents: _core.Array
    formats: dict[str, Rounding]


# Read for each tensor and format.
@functools.cache
def _range_of(name: str) -> tuple[int, int]:
    """Returns the FP32 bits that round to 0 at most, and those that round to a finite number."""
    info = ml_dtypes.finfo(name)
    zero, largest = np.float32(float(info.smallest_subnormal) / 2), float(info.max)
    below = float(np.nextafter(info.max, info.dtype.type(0)))
    # A number halfway between two others rounds to the one with an even fraction.
    tie = np.float32(largest + (largest - below) / 2)
    with np.errstate(over="ignore"):
        is_finite = np.isfinite(float(tie.astype(info.dtype)))
    return int(zero.view(np.uint32)), int(tie.view(np.uint32)) - (not is_finite)


@functools.partial(jax.jit, static_argnames="dtype")
def measure_tensor(
    x: _core.Array, factor: _core.Array | None = None, dtype: _core.DTypeLike | None = None
) -> TensorStats:
    """Measures a tensor.

    Args:
      x: array of any shape and float dtype. FP64 is rounded to FP32.
      factor: reciprocal of the scale with which the program quantizes `x`, a scalar or
        broadcastable to `x`.
      dtype: the FP8 format of that quantization.
    """
    x, factor = _programs.vary_as_here((lax.convert_element_type(x, _core.FLOAT32), factor))
    bits = _bits(x)
    counts = _exponents(bits)
    is_finite = lax.lt(bits, np.uint32(_EXPONENT))
    bits, x = (lax.select(is_finite, each, lax.full_like(each, 0)) for each in (bits, x))
    amax_bits = lax.reduce_max(bits, range(x.ndim))
    amax = lax.bitcast_convert_type(amax_bits, _core.FLOAT32)
    # Squares of small gradients underflow in FP32: `unit` is the power of two below `amax`.
    exponent = lax.bitwise_and(amax_bits, np.uint32(_EXPONENT))
    exponent = lax.clamp(np.uint32(1 << 23), exponent, np.uint32(253 << 23))
    unit = lax.bitcast_convert_type(exponent, _core.FLOAT32)
    inverse = lax.bitcast_convert_type(lax.sub(np.uint32(254 << 23), exponent), _core.FLOAT32)
    size, unscaled = np.uint32(x.size), np.float32(1)
    nonfinite, zero = _count(lax.bitwise_not(is_finite)), counts[0, POWERS]
    # The count of zeros in `x`. LLVM may test bits for zero by a comparison of floats, for which
    # subnormal numbers are zero on some processors; a histogram is exact.
    zeros = lax.add(zero, nonfinite)
    formats = {}
    for name in FORMATS:
        is_fp8 = _core.is_fp8(name)
        scaled = lax.mul(x, _operands.compute_scale(amax, name, power_of_two=True)) if is_fp8 else x
        formats[name] = _rounding(scaled, name, zeros, unscaled if is_fp8 else inverse)
    if factor is not None:
        scaled = lax.div(x, lax.broadcast_in_dim(factor, x.shape, range(factor.ndim)))
        formats[ACTUAL] = _rounding(scaled, str(np.dtype(dtype)), zeros, unscaled)
    mean = lax.div(_power(lax.mul(x, inverse)), _at_least_1(lax.sub(size, nonfinite)))
    rms = lax.mul(lax.sqrt(mean), unit)
    return TensorStats(amax, rms, _share(zero, size), _share(nonfinite, size), counts, formats)


def _bits(x: _core.Array) -> _core.Array:
    """Returns the bits of magnitudes: processors that flush subnormals compare them as zero."""
    return lax.bitwise_and(lax.bitcast_convert_type(x, jnp.uint32), np.uint32(_MAGNITUDE))


def _exponents(bits: _core.Array) -> _core.Array:
    bits = lax.reshape(_core.flattened(bits), (bits.size, 1))
    fraction = lax.bitwise_and(bits, np.uint32(_FRACTION))
    as_int = lambda x: lax.convert_element_type(x, jnp.int32)
    is_other, is_last = lax.gt(fraction, np.uint32(0)), lax.ge(fraction, np.uint32(_ROUNDS_UP))
    row = as_int(lax.shift_right_logical(bits, np.uint32(23)))
    index = lax.add(lax.mul(row, np.int32(3)), lax.add(as_int(is_other), as_int(is_last)))
    numbers = lax.ScatterDimensionNumbers((), (0,), (0,))
    none = _programs.vary_as_here(lax.full((256 * 3,), 0, jnp.uint32))
    each = lax.full_like(lax.squeeze(bits, (1,)), 1)
    return lax.reshape(lax.scatter_add(none, index, each, numbers), (256, 3))


def _count(flags: _core.Array) -> _core.Array:
    return lax.reduce_sum(lax.convert_element_type(flags, jnp.uint32), range(flags.ndim))


def _at_least_1(count: Any) -> _core.Array:
    return lax.convert_element_type(lax.max(count, np.uint32(1)), _core.FLOAT32)


def _share(count: _core.Array, size: Any) -> _core.Array:
    return lax.div(lax.convert_element_type(count, _core.FLOAT32), _at_least_1(size))


def _power(x: _core.Array) -> _core.Array:
    return lax.reduce_sum(lax.mul(x, x), range(x.ndim))


def clipped(x: _core.Array, dtype: Any) -> _core.Array:
    """Returns numbers beyond the range of a format as its largest one."""
    largest = np.float32(jnp.finfo(dtype).max)
    return lax.clamp(-largest, x, largest)


def _rounding(x: _core.Array, name: str, zeros: _core.Array, inverse: Any) -> Rounding:
    """Returns the losses of a rounding; squares times `inverse**2` do not underflow."""
    bits, (zero, last) = _bits(x), _range_of(name)
    underflow = lax.sub(_count(lax.le(bits, np.uint32(zero))), zeros)
    overflow = _count(lax.gt(bits, np.uint32(last)))
    count = lax.sub(np.uint32(x.size), zeros)
    error = lax.sub(_programs.rounded_to(clipped(x, name), name), x)
    signal, noise = (_power(lax.mul(each, inverse)) for each in (x, error))
    snr = lax.mul(lax.log(lax.div(signal, noise)), np.float32(10 / np.log(10)))
    snr = lax.select(lax.eq(noise, np.float32(0)), lax.full_like(snr, np.inf), snr)
    return Rounding(_share(underflow, count), _share(overflow, count), snr)
