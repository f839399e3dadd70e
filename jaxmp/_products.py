"""Products of 16-bit operands whose result is kept in a wider dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.custom_derivatives import SymbolicZero


def wide_product(
    product: Callable[..., jax.Array], lhs: jax.Array, rhs: jax.Array, dtype: Any
) -> jax.Array:
    """A bilinear product that emits the accumulator's dtype and differentiates in the operands'.

    `preferred_element_type` alone would meet an FP32 cotangent in the backward pass with a
    16-bit operand, and run both backward products in FP32. Here the cotangent is rounded to the
    operands' dtype first, as it is when the forward product emits 16 bits.

    Args:
      product: such as `lax.dot_general` with all but its operands bound; it takes
        `preferred_element_type`.
      lhs, rhs: operands of one floating dtype.
      dtype: the dtype of the result.

    Returns:
      The product in `dtype`.

    Example:
      >>> x = jnp.ones((2, 3), jnp.bfloat16)
      >>> wide_product(jnp.matmul, x, x.T, jnp.float32).dtype
      dtype('float32')
    """

    @jax.custom_jvp
    def multiply(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        return product(lhs, rhs, preferred_element_type=dtype)

    def multiply_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
        lhs, rhs = primals
        d_lhs, d_rhs = tangents
        # Not `multiply`: a remat policy that saves products must see the primitive.
        out = product(lhs, rhs, preferred_element_type=dtype)
        terms = [] if isinstance(d_lhs, SymbolicZero) else [product(d_lhs, rhs)]
        terms += [] if isinstance(d_rhs, SymbolicZero) else [product(lhs, d_rhs)]
        if not terms:
            return out, lax.full_like(out, 0)
        return out, lax.convert_element_type(sum(terms[1:], start=terms[0]), dtype)

    multiply.defjvp(multiply_jvp, symbolic_zeros=True)
    return multiply(lhs, rhs)
