"""One operand of one product, quantised as a recipe says."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap

from jaxmp import _compat
from jaxmp._dtypes import FLOAT32
from jaxmp.fp8._quantize import compute_scale, dequantize, quantize, saturate
from jaxmp.fp8._recipes import BlockScaling, DelayedScaling, RowwiseScaling, Scaling
from jaxmp.fp8._state import OperandState, amax_in_force

# The maximum that the scale comes from, and the tensor's own; float32 scalars.
Seen = tuple[jax.Array, jax.Array]


class Operand(NamedTuple):
    """Numbers to multiply, and what the product is to be multiplied with afterwards."""

    # FP8; or the operand's own dtype, in a product without FP8 and in emulated block scaling.
    values: jax.Array
    # float32: a scalar, or of size 1 on the axes that are summed over; NaN where a number was not
    # finite. None: values as they are.
    factor: jax.Array | None


def amax(x: jax.Array, axes: tuple[int, ...] | None = None) -> jax.Array:
    """Largest magnitude in float32: of all numbers, or along `axes`, which stay with size 1."""
    largest = jnp.max(jnp.abs(x), axis=axes, keepdims=axes is not None, initial=0)
    return lax.convert_element_type(largest, FLOAT32)


@functools.cache
def _state_amax(kept: int) -> Any:
    """`amax` of all axes but the first `kept`, as it goes into a state.

    Under `vmap` it is one number for all examples that share the state, and one for each where
    each has a state of its own.
    """

    @custom_vmap
    def measure(x: jax.Array, age: jax.Array) -> jax.Array:
        del age
        return amax(x, tuple(range(kept, x.ndim))).reshape(x.shape[:kept])

    @measure.def_vmap
    def _(axis_size: int, in_batched: list[bool], x: jax.Array, age: jax.Array) -> Any:
        x_batched, has_state = in_batched
        if not has_state:
            return _state_amax(kept)(jnp.moveaxis(x, 0, kept), age), False
        if not x_batched:
            x = jnp.broadcast_to(x, (axis_size, *x.shape))
        return _state_amax(kept + 1)(x, age), True

    return measure


# The names of jitted functions that quantise: this, and what the operand is to its layer.
QUANTIZE = "jaxmp_fp8_quantize_"
ROLES = ("input", "kernel", "output_grad")


def jitted_by_role(fn: Callable[..., Any], *static: str) -> dict[str, Callable[..., Any]]:
    """`fn` jitted, once for each role that an operand may have: `with_stats` knows them by name.

    Jitted, so that layers of one shape share the trace and, in StableHLO, one function.
    """

    def named(role: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return fn(*args, **kwargs)

        call.__name__ = call.__qualname__ = QUANTIZE + role
        return jax.jit(call, static_argnames=static)

    return {role: named(role) for role in ROLES}


def _quantize(
    x: jax.Array,
    in_force: jax.Array | None,
    measured: jax.Array | None,
    recipe: Scaling,
    dtype: Any,
    axes: tuple[int, ...] | None,
) -> tuple[jax.Array, jax.Array]:
    """FP8 numbers and their factor; both maxima are those of `x` itself if they are None."""
    if in_force is None or measured is None:
        in_force = measured = amax(x, axes)
    scale = compute_scale(in_force, dtype, recipe.margin, recipe.power_of_two)
    # Of FP32's largest numbers the reciprocal would be subnormal, and perhaps flushed to zero.
    factor = lax.full_like(scale, 1) / jnp.minimum(scale, np.float32(2.0**126))
    # What is not finite poisons the factor, which costs nothing; looking at each number again
    # would be a pass of its own where XLA transposes.
    poison = lax.full_like(factor, jnp.nan)
    return saturate(x, scale, dtype), lax.select(lax.is_finite(measured), factor, poison)


_QUANTIZE = jitted_by_role(_quantize, "recipe", "dtype", "axes")


def _observe(x: jax.Array, state: OperandState, recipe: DelayedScaling) -> Seen:
    measured = _state_amax(0)(x, state.age)
    # Inside `shard_map`, of the devices that share the state.
    axes = _compat.varying_axes(measured) - _compat.varying_axes(state)
    if axes:
        measured = _compat.largest(measured, tuple(sorted(axes, key=str)))
    return amax_in_force(recipe, state, measured), measured


def _observe_and_quantize(
    x: jax.Array, state: OperandState, recipe: DelayedScaling, dtype: Any
) -> tuple[tuple[jax.Array, jax.Array], Seen]:
    seen = _observe(x, state, recipe)
    return _quantize(x, *seen, recipe, dtype, None), seen


_OBSERVE = jax.jit(_observe, static_argnames="recipe")
_OBSERVE_AND_QUANTIZE = jitted_by_role(_observe_and_quantize, "recipe", "dtype")


def observed(
    recipe: DelayedScaling, dtype: Any, x: jax.Array, state: OperandState, role: str
) -> tuple[Operand, Seen]:
    """One operand, scaled by what a state says of it.

    Args:
      recipe: the settings.
      dtype: the FP8 format; None: no FP8 in this product, and `x` as it is.
      x: the operand, any shape, in high precision.
      state: before this step.
      role: "input", "kernel" or "output_grad".

    Returns:
      It, and what was seen of it, also for other products and the next state.
    """
    if dtype is None:
        return Operand(x, None), _OBSERVE(x, state, recipe)
    found, seen = _OBSERVE_AND_QUANTIZE[role](x, state, recipe=recipe, dtype=dtype)
    return Operand(*found), seen


def quantized(
    recipe: Scaling,
    dtype: Any,
    x: jax.Array,
    *,
    axes: tuple[int, ...],
    seen: tuple[Any, Any],
    role: str,
    other_axes: tuple[int, ...],
) -> Operand:
    """One operand for one product.

    Args:
      recipe: which scales.
      dtype: the FP8 format; None: no FP8 in this product.
      x: the operand, any shape, in high precision.
      axes: those that the product sums over.
      seen: for delayed scaling, what `observed` gave; else two None.
      role: "input", "kernel", whose blocks are square, or "output_grad".
      other_axes: those that the product does not sum over, batch axes left out.
    """
    if dtype is None:
        return Operand(x, None)
    if isinstance(recipe, BlockScaling):
        sides = axes[-1:] + (other_axes[-1:] if role == "kernel" else ())
        sides = tuple(sorted(sides))
        return Operand(_ROUND_BLOCKS[role](x, recipe=recipe, dtype=dtype, sides=sides), None)
    along = axes if isinstance(recipe, RowwiseScaling) else None
    return Operand(*_QUANTIZE[role](x, *seen, recipe=recipe, dtype=dtype, axes=along))


def _round_blocks(
    x: jax.Array, recipe: BlockScaling, dtype: Any, sides: tuple[int, ...]
) -> jax.Array:
    """`x` rounded to FP8 with a scale per block, in its own dtype."""
    size = recipe.block
    blocks = {axis: -(-x.shape[axis] // size) for axis in sides}
    padding = [(0, blocks[a] * size - n if a in blocks else 0) for a, n in enumerate(x.shape)]
    padded = jnp.pad(x, padding)
    split, inner = [], []
    for axis, n in enumerate(padded.shape):
        if axis in blocks:
            inner.append(len(split) + 1)
            split += [blocks[axis], size]
        else:
            split.append(n)
    tiles = padded.reshape(split)
    scale = compute_scale(amax(tiles, tuple(inner)), dtype, recipe.margin, recipe.power_of_two)
    rounded = dequantize(quantize(tiles, scale, dtype), scale, x.dtype)
    return lax.slice(rounded.reshape(padded.shape), (0,) * x.ndim, x.shape)


_ROUND_BLOCKS = jitted_by_role(_round_blocks, "recipe", "dtype", "sides")


def multiply(
    lhs: Operand,
    rhs: Operand,
    dims: Any,
    out_dtype: Any,
    *,
    precision: Any,
    accurate: bool,
) -> jax.Array:
    """The product of two operands, scales undone.

    Args:
      lhs: left operand.
      rhs: right operand; both have a factor, or neither.
      dims: a `Dims`.
      out_dtype: of the result.
      precision: of a product without FP8.
      accurate: whether FP8 products are added up in FP32 all along.
    """
    if lhs.factor is None or rhs.factor is None:
        return lax.dot_general(
            lhs.values,
            rhs.values,
            dims.numbers,
            precision=precision,
            preferred_element_type=out_dtype,
        )
    # XLA asks cuBLAS for fast accumulation where the precision is DEFAULT. A product of two FP8
    # numbers is beyond float16's range, not beyond bfloat16's.
    narrow = out_dtype == jnp.bfloat16
    product = lax.dot_general(
        lhs.values,
        rhs.values,
        dims.numbers,
        precision=lax.Precision.HIGHEST if accurate else lax.Precision.DEFAULT,
        preferred_element_type=out_dtype if narrow else FLOAT32,
    )
    if lhs.factor.ndim == rhs.factor.ndim == 0:
        # A scalar in the product's own dtype goes into the call of cuBLAS, in FP32: on the program
        # compiled for an H200 no pass over the result is left of it.
        factor = lax.convert_element_type(lhs.factor * rhs.factor, product.dtype)
        product = product * jnp.broadcast_to(factor, product.shape)
    else:
        product = lax.convert_element_type(product, FLOAT32)
        for side, factor in enumerate((lhs.factor, rhs.factor)):
            product = product * jnp.broadcast_to(dims.spread(factor, side), product.shape)
    return lax.convert_element_type(product, out_dtype)
