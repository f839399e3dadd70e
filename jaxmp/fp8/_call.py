"""Static arguments of an FP8 dot, and parts that the implementations of the dot share."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple, NoReturn

import jax
from jax import lax

from jaxmp._core._typing import DTypeLike
from jaxmp.errors import CompositionError
from jaxmp.fp8._checkpoint import named_result
from jaxmp.fp8._dims import Dims
from jaxmp.fp8._scaling import GEMMS, Scaling
from jaxmp.fp8._shardings import Shardings


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


def shield(call: Call, out: jax.Array, kernel_shape: tuple[int, ...]) -> jax.Array:
    """Names the result of a forward dot, behind a barrier if an activation may follow.

    XLA for GPUs replaces a matmul and a tanh GELU whose input is used again by one cuBLAS call,
    which it does not support in FP8 (RET_CHECK failure !has_aux_output, JAX 0.12). Layers with more
    outputs than inputs are those in front of activations. The others do not have the barrier, so
    that XLA can add a residual as part of the matmul.
    """
    sizes = [kernel_shape[axis] for axis in call.dims.contract[call.kernel]]
    others = [kernel_shape[axis] for axis in call.dims.free(call.kernel)]
    if math.prod(others) > math.prod(sizes):
        out = lax.optimization_barrier(out)
    return named_result(out, batched=bool(call.dims.batch[0]))


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
