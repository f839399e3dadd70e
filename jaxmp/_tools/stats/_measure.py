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


class RoundingSums(NamedTuple):
    """Sums over the finite elements of a tensor, of which `Rounding` is made.

    Attributes:
      zeros: uint32 number of elements that are zero afterwards, or were not finite.
      overflow: uint32 number of elements that exceed the range.
      noise: float32 sum of the squared errors, each divided by `TensorStats.unit`.
    """

    zeros: _core.Array
    overflow: _core.Array
    noise: _core.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TensorStats:
    """Statistics of a tensor. Those in a loop have one more axis, of the length of the loop.

    The arrays are what one pass over the tensor can sum; shares are computed when they are read.

    Attributes:
      amax: largest magnitude of the finite elements.
      power: sum of the squares of the finite elements, each divided by `unit`.
      exponents: counts of elements by the 8 exponent bits of their FP32 value (rows), and by its
        fraction (columns): zero, smaller, or at least that with which float16 rounds up.
      sums: format -> sums of a rounding to it. FP8 formats have the scale of `amax`.
    """

    amax: _core.Array
    power: _core.Array
    exponents: _core.Array
    sums: dict[str, RoundingSums]

    @property
    def size(self) -> _core.Array:
        """Number of elements."""
        return self.exponents.sum((-2, -1))

    @property
    def zeros(self) -> _core.Array:
        """Number of elements that are zero."""
        return self.exponents[..., 0, POWERS]

    @property
    def finite(self) -> _core.Array:
        """Number of elements that are finite."""
        return self.exponents[..., :255, :].sum((-2, -1))

    @property
    def nonzero(self) -> _core.Array:
        """Number of elements that are finite and not zero."""
        return self.finite - self.zeros

    @property
    def zero(self) -> _core.Array:
        """Share of the elements that are zero."""
        return _share(self.zeros, self.size)

    @property
    def nonfinite(self) -> _core.Array:
        """Share of the elements that are infinite or NaN."""
        return _share(self.size - self.finite, self.size)

    @property
    def unit(self) -> _core.Array:
        """Power of two below `amax`, with which squares of small numbers do not underflow."""
        return jnp.ldexp(np.float32(1), jnp.clip(jnp.frexp(self.amax)[1] - 1, -126, 126))

    @property
    def rms(self) -> _core.Array:
        """Root mean square of the finite elements."""
        return jnp.sqrt(self.power / jnp.maximum(self.finite, 1)) * self.unit

    @property
    def formats(self) -> dict[str, Rounding]:
        """Format -> losses of a rounding to it."""
        return {
            name: Rounding(
                _share(x.zeros - (self.size - self.nonzero), self.nonzero),
                _share(x.overflow, self.nonzero),
                jnp.where(x.noise == 0, np.inf, 10 * jnp.log10(self.power / x.noise)),
            )
            for name, x in self.sums.items()
        }


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
    exponent = lax.bitwise_and(amax_bits, np.uint32(_EXPONENT))
    exponent = lax.clamp(np.uint32(1 << 23), exponent, np.uint32(253 << 23))
    # Reciprocal of `TensorStats.unit`.
    inverse = lax.bitcast_convert_type(lax.sub(np.uint32(254 << 23), exponent), _core.FLOAT32)
    sums = {}
    for name in FORMATS:
        scale = np.float32(1)
        if _core.is_fp8(name):
            scale = _operands.compute_scale(amax, name, power_of_two=True)
        sums[name] = _sums(lax.mul(x, scale), name, lax.div(inverse, scale))
    if factor is not None:
        factor = lax.broadcast_in_dim(factor, x.shape, range(factor.ndim))
        sums[ACTUAL] = _sums(lax.div(x, factor), str(np.dtype(dtype)), lax.mul(inverse, factor))
    leaves, structure = jax.tree.flatten((_square(lax.mul(x, inverse)), sums))
    # One reduction reads the tensor once, and is compiled several times faster than one for each.
    zeros = _programs.vary_as_here([np.zeros((), leaf.dtype) for leaf in leaves])
    add = functools.partial(jax.tree.map, lax.add)
    power, sums = structure.unflatten(lax.reduce(leaves, zeros, add, range(x.ndim)))
    return TensorStats(amax, power, counts, sums)


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


def _share(count: _core.Array, size: _core.Array) -> _core.Array:
    return jnp.asarray(count, _core.FLOAT32) / jnp.maximum(jnp.asarray(size, _core.FLOAT32), 1)


def _square(x: _core.Array) -> _core.Array:
    return lax.mul(x, x)


def clipped(x: _core.Array, dtype: Any) -> _core.Array:
    """Returns numbers beyond the range of a format as its largest one."""
    largest = np.float32(jnp.finfo(dtype).max)
    return lax.clamp(-largest, x, largest)


def _sums(x: _core.Array, name: str, unit: _core.Array) -> RoundingSums:
    """Returns what each element of a finite, scaled tensor adds to the sums.

    Args:
      x: the tensor.
      name: the format.
      unit: factor that makes its errors multiples of `TensorStats.unit`.
    """
    bits, (zero, last) = _bits(x), map(np.uint32, _range_of(name))
    as_count = lambda flags: lax.convert_element_type(flags, jnp.uint32)
    error = lax.sub(_programs.rounded_to(clipped(x, name), name), x)
    return RoundingSums(
        zeros=as_count(lax.le(bits, zero)),
        overflow=as_count(lax.gt(bits, last)),
        noise=_square(lax.mul(error, unit)),
    )
