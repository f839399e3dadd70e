"""Static arguments of an FP8 dot, and parts that the implementations of the dot share."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxmp._core._typing import DTypeLike
from jaxmp.errors import CompositionError
from jaxmp.fp8._dims import Dims
from jaxmp.fp8._scaling import GEMMS, Scaling
from jaxmp.fp8._shardings import Shardings

# Name of the quantized operands (one byte per element) for a rematerialization policy such as
# `jax.checkpoint_policies.save_only_these_names`.
CHECKPOINT_NAME = "jaxmp_fp8"


class Call(NamedTuple):
    """Static arguments of one FP8 dot."""

    scaling: Scaling
    dims: Dims
    # 0 or 1: the operand that is the kernel. The other one is the input.
    kernel: int
    dtypes: tuple[Any, Any]
    out_dtype: DTypeLike
    precision: Any
    # Those of the operands and of the result, on explicit mesh axes.
    shardings: Shardings

    def role(self, side: int) -> str:
        return "kernel" if side == self.kernel else "input"

    def gemm_of_gradient(self, side: int) -> str:
        """Returns the name of the dot that computes the gradient of operand `side`."""
        return "wgrad" if side == self.kernel else "dgrad"

    def format(self, gemm: str, role: str) -> Any:
        formats = self.scaling.formats(gemm)
        return None if formats is None else formats[GEMMS[gemm].index(role)]


def named(x: jax.Array) -> jax.Array:
    """Names an array so that a policy of `jax.checkpoint` can save it."""
    return checkpoint_name(x, CHECKPOINT_NAME)


def named_values(values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Names FP8 values; returns them for the backward pass and for the forward dot.

    The bytes are named, and bitcast back in a separate equation for each pass: `jax.checkpoint`
    applies `lax.reduce_precision` to saved values that the forward pass also reads, which turns
    E4M3 values from 248 up into NaN.
    """
    saved = named(lax.bitcast_convert_type(values, jnp.uint8))
    back = lambda: lax.bitcast_convert_type(saved, values.dtype)
    return back(), back()


def shield(call: Call, out: jax.Array, kernel_shape: tuple[int, ...]) -> jax.Array:
    """Returns the result of a forward dot, behind a barrier if an activation may follow.

    XLA for GPUs replaces a matmul and a tanh GELU whose input is used again by one cuBLAS call,
    which it does not support in FP8 (RET_CHECK failure !has_aux_output, JAX 0.12). Layers with more
    outputs than inputs are those in front of activations. The others do not have the barrier, so
    that XLA can add a residual as part of the matmul.
    """
    sizes = [kernel_shape[axis] for axis in call.dims.contract[call.kernel]]
    others = [kernel_shape[axis] for axis in call.dims.free(call.kernel)]
    return lax.optimization_barrier(out) if math.prod(others) > math.prod(sizes) else out


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def differentiated_once(scaling: str, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Returns arrays of which only the first derivative may be taken.

    First-order reverse mode never passes tangents through a forward or backward pass. A tangent
    implies a second derivative, which raises an error.
    """
    del scaling
    return arrays


@differentiated_once.defjvp
def _refuse(scaling: str, primals: object, tangents: object) -> NoReturn:
    """Raises, because JAX would differentiate rounding and amax, or treat them as constants."""
    del primals, tangents
    raise CompositionError(
        f"fp8.dot_general ({scaling}) has no second derivative: what quantizes "
        "gradients cannot be differentiated. For gradients of gradients (penalties, Hessians) use "
        'a policy without matmul = "fp8", such as the recipe "bf16".'
    )
