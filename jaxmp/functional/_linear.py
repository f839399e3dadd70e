"""Linear layers whose parameters have gradients in FP32."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from jaxmp._core._dtypes import floating_array, wide_dtype
from jaxmp.errors import JaxmpError


def linear(x: ArrayLike, kernel: ArrayLike, bias: ArrayLike | None = None) -> jax.Array:
    """Computes `x @ kernel + bias` in the dtype of x, and gradients of parameters in their dtype.

    A 16-bit copy of an FP32 kernel has a gradient in 16 bits, which JAX then converts to FP32. Here
    the matmul of the kernel's gradient emits FP32, as its hardware accumulates it, and no kernel
    converts it. Compiled for an H200, three MLP blocks of widths 2048 and 8192 in bfloat16 with
    4,096 tokens move 1,208 MB outside of the matmuls with this function and `gelu`, instead of
    1,812 MB with `gelu` alone (`python benchmarks/fp8_program.py`).

    Use it where gradients are accumulated, over microbatches or in an optimizer's program of its
    own. If the optimizer reads the gradient in the same program, 16 bits take fewer bytes: XLA
    converts them in the optimizer's kernel, which reads 2 instead of 4 bytes of each.

    Args:
      x: `[..., K]`, floating, 16 bits or more.
      kernel: `[K, N]`, of any floating dtype; it is cast to the dtype of x.
      bias: `[N]`, of any floating dtype; it is cast to the dtype of x. None: 0.

    Returns:
      `[..., N]` in the dtype of x. It has reverse-mode derivatives only.

    Raises:
      JaxmpError: if dtypes or shapes do not fit.

    Example:
      >>> x, kernel = jnp.ones((2, 3), jnp.bfloat16), jnp.ones((3, 4))
      >>> jaxmp.functional.linear(x, kernel).dtype
      dtype(bfloat16)
      >>> jax.grad(lambda kernel: jaxmp.functional.linear(x, kernel).sum())(kernel).dtype
      dtype('float32')
    """
    x, kernel = floating_array(x, "x"), floating_array(kernel, "kernel")
    if x.ndim == 0 or kernel.ndim != 2 or x.shape[-1] != kernel.shape[0]:
        raise JaxmpError(
            f"x has shape {list(x.shape)}, and kernel has shape {list(kernel.shape)}. x must be "
            "[..., K] and kernel [K, N]; for example kernel.T if it is [N, K]."
        )
    if bias is None:
        return _linear(x, kernel, None)
    bias = floating_array(bias, "bias")
    if bias.shape != kernel.shape[1:]:
        raise JaxmpError(
            f"bias has shape {list(bias.shape)}, and kernel has shape {list(kernel.shape)}. Give "
            f"one bias an output: bias.reshape({kernel.shape[1]})."
        )
    return _linear(x, kernel, bias)


@jax.custom_vjp
def _linear(x: jax.Array, kernel: jax.Array, bias: jax.Array | None) -> Any:
    return _linear_forward(x, kernel, bias)[0]


def _linear_forward(x: jax.Array, kernel: jax.Array, bias: jax.Array | None) -> Any:
    narrow = kernel.astype(x.dtype)
    out = x @ narrow
    if bias is not None:
        out += bias.astype(x.dtype).reshape(*(1,) * (x.ndim - 1), -1)
    # Arrays of size 0 hold the dtypes of the parameters.
    dtypes = [None if array is None else jnp.empty(0, array.dtype) for array in (kernel, bias)]
    return out, (x, narrow, *dtypes)


def _linear_backward(saved: tuple[Any, ...], d_out: jax.Array) -> Any:
    x, narrow, of_kernel, of_bias = saved
    rows = tuple(range(x.ndim - 1))
    wide = functools.partial(lax.dot_general, preferred_element_type=wide_dtype(x.dtype))
    d_kernel = wide(x, d_out, ((rows, rows), ((), ()))).astype(of_kernel.dtype)
    d_bias = None
    if of_bias is not None:
        d_bias = d_out.astype(wide_dtype(x.dtype)).sum(rows).astype(of_bias.dtype)
    return d_out @ narrow.T, d_kernel, d_bias


_linear.defvjp(_linear_forward, _linear_backward)
