"""Matmuls of 16-bit operands with a result in a wider dtype, and weakly typed results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.custom_derivatives import SymbolicZero

from jaxmp._core import _compat, _dtypes
from jaxmp._core._typing import DTypeLike

# Name of jitted functions that convert 16-bit operands to FP32 and multiply them, where a compiler
# has no matmul with 16-bit operands and an FP32 result. Audits count them as 16-bit matmuls.
WIDENED_MATMUL = "jaxmp_widened_matmul"


def wide_product(
    product: Callable[..., jax.Array],
    lhs: jax.Array,
    rhs: jax.Array,
    dtype: DTypeLike,
    *sizes: jax.Array,
) -> jax.Array:
    """Computes a matmul with a wide result whose backward matmuls run in the operands' dtype.

    With `preferred_element_type` alone, the backward pass would multiply an FP32 cotangent with a
    16-bit operand and run both backward matmuls in FP32. This function rounds the cotangent to the
    dtype of the operands first, as JAX does for a matmul with a 16-bit result.

    Args:
      product: a bilinear function of two operands with the argument `preferred_element_type`, such
        as `lax.dot_general` with all its other arguments bound.
      lhs, rhs: operands of one floating dtype.
      dtype: the dtype of the result.
      sizes: further operands of `product`, which have no gradient, such as sizes of groups.

    Returns:
      The result in `dtype`.

    Example:
      >>> x = jnp.ones((2, 3), jnp.bfloat16)
      >>> wide_product(jnp.matmul, x, x.T, jnp.float32).dtype
      dtype('float32')
    """

    def multiply(lhs: jax.Array, *others: jax.Array) -> jax.Array:
        # XLA's CPU compiler folds transposes into the matmul, and has no kernel for the result.
        barrier = lax.optimization_barrier if _compat.target() == "cpu" else lambda array: array
        return barrier(product(barrier(lhs), *others, preferred_element_type=dtype))

    def multiply_jvp(
        primals: tuple[jax.Array, ...], tangents: tuple[jax.Array | SymbolicZero, ...]
    ) -> tuple[jax.Array, jax.Array]:
        lhs, rhs, *sizes = primals
        d_lhs, d_rhs, *_ = tangents
        # Not a call of the `custom_jvp`: a remat policy that saves matmuls must see the primitive.
        out = multiply(lhs, rhs, *sizes)
        terms = [] if isinstance(d_lhs, SymbolicZero) else [product(d_lhs, rhs, *sizes)]
        terms += [] if isinstance(d_rhs, SymbolicZero) else [product(lhs, d_rhs, *sizes)]
        return out, lax.convert_element_type(sum(terms[1:], start=terms[0]), dtype)

    differentiable = jax.custom_jvp(multiply)
    differentiable.defjvp(multiply_jvp, symbolic_zeros=True)
    return differentiable(lhs, rhs, *sizes)


def widened_product(product: Callable[..., jax.Array], *operands: jax.Array) -> jax.Array:
    """Computes the FP32 product of 16-bit operands that are converted to FP32 first.

    XLA's CPU compiler refuses some matmuls of 16-bit operands with an FP32 result ("Unsupported
    element type for DotThunk") and converts the operands to FP32 in all others.
    """

    def multiply(*operands: jax.Array) -> jax.Array:
        # A scan would convert an operand that all steps read in front of its loop.
        operands = lax.optimization_barrier(operands)
        wide = [o.astype(_dtypes.FLOAT32) if _dtypes.is_16bit(o.dtype) else o for o in operands]
        return product(*wide, preferred_element_type=_dtypes.FLOAT32)

    multiply.__name__ = WIDENED_MATMUL
    return jax.jit(multiply)(*operands)


# ---------------------------------------------------------------------------
# Weakly typed results
# ---------------------------------------------------------------------------


def weakly_typed(value: Any) -> Any:
    """Returns an FP32 array that, as a Python number, takes the dtype of another operand.

    Under `jax_enable_x64` the array is returned unchanged: JAX would promote it to float64 in an
    operation with a Python number.

    Example:
      >>> (weakly_typed(jnp.ones(3)) + jnp.ones(3, jnp.bfloat16)).dtype
      dtype(bfloat16)
    """
    is_kept = not isinstance(value, jax.Array) or jax.config.jax_enable_x64  # pyright: ignore
    return value if is_kept else as_weak(value)


def as_weak(array: jax.Array) -> jax.Array:
    """Returns an array with a weak type, and otherwise the same."""
    params = {"new_dtype": array.dtype, "weak_type": True, "sharding": None}
    return lax.convert_element_type_p.bind(array, **params)


def strongly_typed(value: Any) -> Any:
    """Returns a weakly typed FP32 array as one that promotes 16-bit operands; others unchanged."""
    is_weak = isinstance(value, jax.Array) and getattr(value, "weak_type", False)
    is_wide = is_weak and value.dtype == _dtypes.FLOAT32
    return lax.convert_element_type(value, _dtypes.FLOAT32) if is_wide else value
