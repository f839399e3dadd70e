"""MX matmuls: 32 elements along the contracted axes share one power-of-two scale."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap

from jaxmp import _core
from jaxmp._core import DTypeLike, _compat
from jaxmp.errors import CompositionError
from jaxmp.fp8._dims import Dims
from jaxmp.fp8._operands import jitted_by_role
from jaxmp.fp8._scaling import MX_BLOCK, MXScaling, Scaling

# E8M0 stores exponents plus 127. Its 0 means 2**-127, which is subnormal in FP32, so the smallest
# value used here is 1. 255 is NaN.
_BIAS, _LEAST, _NAN = 127, 1, 255
_MANTISSA_BITS = 23
_MANTISSA = 2**_MANTISSA_BITS - 1


class MXOperand(NamedTuple):
    """Operand in an MX block format."""

    # FP8, in the shape of the operand.
    values: jax.Array
    # uint8 exponents in E8M0, of shape [batch, rows, blocks].
    exponents: jax.Array


def check_mx_device(scaling: MXScaling) -> None:
    """Raises on accelerators without MX matmuls, unless the scaling sets `emulate=True`.

    Raises:
      CompositionError: with the GPU and its compute capability, or the type of the device.
    """
    target = _compat.target()
    device = f"a {target.upper()}"
    if target in ("cpu", "gpu"):
        device = _core.unsupported_gpu(_core.MX_MATMULS)
    if device and not scaling.emulate:
        first = _core.capability_text(_core.MX_MATMULS)
        raise CompositionError(
            f"MXScaling requires MX matmuls, which begin with compute capability {first} "
            f"(Blackwell), and the program is compiled for {device}: it would multiply in 16 bits, "
            "without a gain in speed. Use fp8.CurrentScaling() or fp8.RowwiseScaling(); to study "
            "its rounding, fp8.MXScaling(emulate=True)."
        )


def is_native(scaling: Scaling) -> bool:
    """Returns True if the GPU's MX matmul is used. Assumes that `check_device` has passed."""
    return not scaling.emulate and _compat.target() == "gpu"


# ---------------------------------------------------------------------------
# Rows of blocks
# ---------------------------------------------------------------------------


def _order(dims: Dims, side: int) -> tuple[int, ...]:
    """Returns the axes of an operand in the order batch, free, contracted."""
    return (*dims.batch[side], *dims.free(side), *dims.contract[side])


def _rows(x: jax.Array, dims: Dims, side: int) -> jax.Array:
    """Reshapes an operand to `[batch, rows, K]`, with K zero-padded to whole blocks."""
    sizes = lambda axes: math.prod(x.shape[axis] for axis in axes)
    axes = dims.batch[side], dims.free(side), dims.contract[side]
    rows = jnp.transpose(x, _order(dims, side)).reshape(tuple(map(sizes, axes)))
    return jnp.pad(rows, ((0, 0), (0, 0), (0, -rows.shape[-1] % MX_BLOCK)))


def _unrows(rows: jax.Array, shape: tuple[int, ...], dims: Dims, side: int) -> jax.Array:
    """Inverts `_rows` for an operand of the given `shape`."""
    order = _order(dims, side)
    k = math.prod(shape[axis] for axis in dims.contract[side])
    moved = rows[..., :k].reshape(tuple(shape[axis] for axis in order))
    return jnp.transpose(moved, tuple(int(axis) for axis in np.argsort(order)))


def mx_quantized(
    x: jax.Array, scaling: MXScaling, dtype: DTypeLike, dims: Dims, side: int
) -> MXOperand:
    """Quantizes operand `side` of a dot in blocks along its contracted axes."""
    rows = lax.convert_element_type(_rows(x, dims, side), _core.FLOAT32)
    blocks = rows.reshape(*rows.shape[:2], rows.shape[2] // MX_BLOCK, MX_BLOCK)
    exponents = _exponents(jnp.max(jnp.abs(blocks), axis=-1), scaling, dtype)
    # Multiply by the reciprocal of the scale, which is also a power of two: scales of finite blocks
    # are between 2**-126 and 2**120.
    scaled = blocks * jnp.broadcast_to(_power(2 * _BIAS - exponents)[..., None], blocks.shape)
    limit = np.float32(jnp.finfo(dtype).max)
    values = lax.convert_element_type(lax.clamp(-limit, scaled, limit), dtype)
    return MXOperand(
        _unrows(values.reshape(rows.shape), x.shape, dims, side),
        lax.convert_element_type(exponents, jnp.uint8),
    )


MX_QUANTIZED = jitted_by_role(mx_quantized, "scaling", "dtype", "dims", "side")


def _exponents(amax: jax.Array, scaling: MXScaling, dtype: DTypeLike) -> jax.Array:
    """Returns the biased int32 exponents of the scales for blocks with the maxima `amax`."""
    limit = int(np.asarray(jnp.finfo(dtype).max, np.float32).view(np.int32))
    bits = lax.bitcast_convert_type(amax, jnp.int32)
    if scaling.rounding == "up":
        # A mantissa above that of the format's largest value carries into the exponent. This uses
        # integers, because XLA may replace a division by a product with a rounded reciprocal.
        bits = bits + np.int32(_MANTISSA - (limit & _MANTISSA))
    largest = (limit >> _MANTISSA_BITS) - _BIAS
    biased = (bits >> np.int32(_MANTISSA_BITS)) - np.int32(largest)
    biased = jnp.maximum(biased, np.int32(_LEAST))
    biased = lax.select(amax == np.float32(0), lax.full_like(biased, _BIAS), biased)
    return lax.select(lax.is_finite(amax), biased, lax.full_like(biased, _NAN))


def _power(biased: jax.Array) -> jax.Array:
    """Returns float32 `2 ** (biased - 127)`; NaN for 255 and for its opposite, 254 - 255 = -1."""
    biased = lax.convert_element_type(biased, jnp.int32)
    power = lax.bitcast_convert_type(biased << np.int32(_MANTISSA_BITS), _core.FLOAT32)
    number = (biased >= np.int32(0)) & (biased < np.int32(_NAN))
    return lax.select(number, power, lax.full_like(power, jnp.nan))


# ---------------------------------------------------------------------------
# Dots
# ---------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames=("dims", "out_dtype", "native", "wide"))
def mx_multiply(
    lhs: MXOperand,
    rhs: MXOperand,
    dims: Dims,
    out_dtype: DTypeLike,
    *,
    native: bool,
    wide: DTypeLike,
) -> jax.Array:
    """Multiplies two MX operands. Jitted, so that layers of the same shape share one function.

    Args:
      lhs, rhs: operands in blocks along the axes that `dims` contracts.
      dims: dimension numbers of the dot.
      out_dtype: dtype of the result.
      native: use `jax.nn.scaled_matmul`; otherwise, dequantize to `wide` and multiply.
      wide: a dtype that represents the dequantized operands.
    """
    operands = [_rows(each.values, dims, side) for side, each in enumerate((lhs, rhs))]
    exponents = lhs.exponents, rhs.exponents
    if native:
        scales = (lax.bitcast_convert_type(each, jnp.float8_e8m0fnu) for each in exponents)
        # The kernel supports results in bfloat16, float16 and float32.
        narrow = out_dtype if out_dtype in (jnp.bfloat16, jnp.float16) else _core.FLOAT32
        product = _scaled_matmul(narrow)(*operands, *scales)
    else:
        left, right = (
            _dequantized(each, exponent, wide)
            for each, exponent in zip(operands, exponents, strict=True)
        )
        numbers = (((2,), (2,)), ((0,), (0,)))
        product = lax.dot_general(left, right, numbers, preferred_element_type=out_dtype)
    batch = [lhs.values.shape[axis] for axis in dims.batch[0]]
    free = [
        each.values.shape[axis] for side, each in enumerate((lhs, rhs)) for axis in dims.free(side)
    ]
    return lax.convert_element_type(product.reshape(*batch, *free), out_dtype)


def _dequantized(values: jax.Array, exponents: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Multiplies values by their scales; exact inside of the range of `dtype` and FP32."""
    # Without the barrier, XLA would remove a cast to FP8 and back, and with it the rounding.
    numbers = lax.convert_element_type(lax.optimization_barrier(values), _core.FLOAT32)
    blocks = numbers.reshape(*exponents.shape, MX_BLOCK)
    scaled = blocks * jnp.broadcast_to(_power(exponents)[..., None], blocks.shape)
    return lax.convert_element_type(scaled.reshape(values.shape), dtype)


# One function object for each dtype, so that JAX finds its earlier trace.
@functools.cache
def _scaled_matmul(dtype: DTypeLike) -> Callable[..., jax.Array]:
    """Returns `jax.nn.scaled_matmul` with support for `vmap` over some of its operands.

    JAX 0.10 maps it only if all operands are mapped.
    """

    @custom_vmap
    def multiply(
        lhs: jax.Array, rhs: jax.Array, lhs_scales: jax.Array, rhs_scales: jax.Array
    ) -> jax.Array:
        return jax.nn.scaled_matmul(lhs, rhs, lhs_scales, rhs_scales, preferred_element_type=dtype)

    @multiply.def_vmap
    def _(axis_size: int, in_batched: list[bool], *operands: jax.Array) -> tuple[jax.Array, bool]:
        whole = [
            x if mapped else jnp.broadcast_to(x, (axis_size, *x.shape))
            for x, mapped in zip(operands, in_batched, strict=True)
        ]
        batch = whole[0].shape[:2]
        flat = _scaled_matmul(dtype)(*[x.reshape(-1, *x.shape[2:]) for x in whole])
        return flat.reshape(*batch, *flat.shape[1:]), True

    return multiply
