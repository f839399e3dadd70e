"""Activations with the results of `jax.nn` that save only their inputs for the backward pass."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxmp import _core
from jaxmp.errors import JaxmpError

__all__ = ["gelu", "silu", "swiglu"]


def gelu(x: ArrayLike, *, approximate: bool = True) -> jax.Array:
    """Applies the Gaussian error linear unit, and saves only its input for the backward pass.

    The result is that of `jax.nn.gelu` (Hendrycks and Gimpel 2016, arXiv:1606.08415). Its backward
    pass computes the derivative from x, for the tanh approximation in FP32 and without overflow.
    With `jax.nn.gelu`, XLA stores the derivative in the forward pass. Compiled for an H200, three
    MLP blocks of widths 2048 and 8192 in bfloat16 with 4,096 tokens move 1,812 instead of 2,416 MB
    outside of the matmuls, because cuBLAS then computes the GELU as part of the matmul in front of
    it (`python benchmarks/fp8_program.py`).

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
    x = _core.floating_array(x, "x")
    if not approximate:
        # The barrier of `prevent_cse` keeps XLA from computing the derivative in the forward pass.
        return jax.checkpoint(lambda x: jax.nn.gelu(x, approximate=False))(x)
    return jax.checkpoint(_tanh_gelu, prevent_cse=False)(x)


@jax.custom_jvp
def _tanh_gelu(x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x)


@_tanh_gelu.defjvp
def _tanh_gelu_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    (x,), (tangent,) = primals, tangents
    with jax.numpy_dtype_promotion("standard"):
        wide = jnp.promote_types(x.dtype, jnp.float32)
    # In FP8, XLA would store a product in FP32 as it is.
    slope = _tanh_gelu_slope(x.astype(wide)).astype(x.dtype)
    return _tanh_gelu(x), slope * tangent


def _tanh_gelu_slope(x: jax.Array) -> jax.Array:
    """Returns the derivative of the tanh approximation, without a tanh.

    GELU is x * sigmoid(v) with v = sqrt(8/pi) * (x + 0.044715 * x**3). XLA replaces equal
    operations of both passes by one of them, and stores its result for the backward pass. It does
    not know that tanh(v / 2) is 2 * sigmoid(v) - 1, so that it has nothing to store. A barrier has
    the same effect, but in a block with `jax.checkpoint` it would also keep XLA from computing the
    slope in the kernel that recomputes the GELU.
    """
    # Outside of this interval the slope is 0 or 1 in FP64.
    x = jnp.clip(x, -40, 40)
    scale = math.sqrt(8 / math.pi)
    square = x * x
    gate = jax.nn.sigmoid(x * (scale + scale * 0.044715 * square))
    return gate + x * gate * (1 - gate) * (scale + scale * 3 * 0.044715 * square)


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
    return jax.checkpoint(jax.nn.silu, prevent_cse=False)(_core.floating_array(x, "x"))


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
    gate, up = _core.floating_array(gate, "gate"), _core.floating_array(up, "up")
    if (gate.shape, gate.dtype) != (up.shape, up.dtype):
        raise JaxmpError(
            f"gate is {gate.dtype} of shape {list(gate.shape)}, and up is {up.dtype} of shape "
            f"{list(up.shape)}. Both must have the same shape and dtype, as in "
            "gate, up = jnp.split(hidden, 2, axis=-1)."
        )
    return jax.checkpoint(_swiglu, prevent_cse=False)(gate, up)


def _swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.silu(gate) * up
