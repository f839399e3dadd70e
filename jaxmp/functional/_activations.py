"""Activations that save only their inputs for the backward pass."""

from __future__ import annotations

import functools

import jax
from jax.typing import ArrayLike

from jaxmp._core._dtypes import floating_array
from jaxmp.errors import JaxmpError


def gelu(x: ArrayLike, *, approximate: bool = True) -> jax.Array:
    """Applies the Gaussian error linear unit, and saves only its input for the backward pass.

    The result is that of `jax.nn.gelu` (Hendrycks and Gimpel 2016, arXiv:1606.08415). Its backward
    pass computes the derivative again from x. With `jax.nn.gelu`, XLA stores the derivative in the
    forward pass. Compiled for an H200, three MLP blocks of widths 2048 and 8192 in bfloat16 with
    4,096 tokens move 1,812 instead of 2,416 MB outside of the matmuls, because cuBLAS then computes
    the GELU as part of the matmul in front of it (`python benchmarks/fp8_program.py`).

    Args:
      x: any shape, floating, 16 bits or more.
      approximate: the tanh approximation, the default of JAX and Flax; False: the error function.

    Returns:
      Array of the shape and dtype of x.

    Raises:
      JaxmpError: if x is not floating.

    Example:
      >>> jaxmp.functional.gelu(jnp.array([-1.0, 0.0, 2.0], jnp.bfloat16))
      Array([-0.158203, 0, 1.95312], dtype=bfloat16)
    """
    x = floating_array(x, "x")
    # The barrier of `prevent_cse` keeps XLA from computing the derivative in the forward pass.
    return jax.checkpoint(functools.partial(jax.nn.gelu, approximate=approximate))(x)


def silu(x: ArrayLike) -> jax.Array:
    """Applies `x * sigmoid(x)`, and saves only its input for the backward pass.

    The result is that of `jax.nn.silu`, also called swish. `jax.nn.silu` in a scan over layers also
    stores the sigmoid of each layer.

    Args:
      x: any shape, floating, 16 bits or more.

    Returns:
      Array of the shape and dtype of x.

    Raises:
      JaxmpError: if x is not floating.

    Example:
      >>> jaxmp.functional.silu(jnp.array([0.0, 2.0]))
      Array([0.      , 1.761594], dtype=float32)
    """
    return jax.checkpoint(jax.nn.silu, prevent_cse=False)(floating_array(x, "x"))


def swiglu(gate: ArrayLike, up: ArrayLike) -> jax.Array:
    """Computes `silu(gate) * up`, and saves only the two operands for the backward pass.

    This is the gated activation of Shazeer 2020 (arXiv:2002.05202) in the MLPs of Llama, where
    `gate` and `up` are the results of two linear layers.

    Args:
      gate: any shape, floating, 16 bits or more.
      up: shape and dtype of `gate`.

    Returns:
      Array of that shape and dtype.

    Raises:
      JaxmpError: if an operand is not floating, or their shapes or dtypes differ.

    Example:
      >>> gate, up = jnp.array([0.0, 2.0]), jnp.array([3.0, 3.0])
      >>> jaxmp.functional.swiglu(gate, up)
      Array([0.       , 5.2847824], dtype=float32)
    """
    gate, up = floating_array(gate, "gate"), floating_array(up, "up")
    if (gate.shape, gate.dtype) != (up.shape, up.dtype):
        raise JaxmpError(
            f"gate is {gate.dtype} of shape {list(gate.shape)}, and up is {up.dtype} of shape "
            f"{list(up.shape)}. Both must have the same shape and dtype, as in "
            "gate, up = jnp.split(hidden, 2, axis=-1)."
        )
    return jax.checkpoint(_swiglu, prevent_cse=False)(gate, up)


def _swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.silu(gate) * up
