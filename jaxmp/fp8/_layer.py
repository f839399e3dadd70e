"""Linear layers whose operands the Pallas kernel quantizes to two copies."""

from __future__ import annotations

import math
from typing import Any

import jax

from jaxmp.fp8._call import Call
from jaxmp.fp8._cast_transpose import explain_fallback
from jaxmp.fp8._copies import Source
from jaxmp.fp8._dims import Dims
from jaxmp.fp8._known_dot import known_product
from jaxmp.fp8._known_scales import formats
from jaxmp.fp8._state import OPERANDS, State

# Evaluates Pallas kernels on any device, for tests.
INTERPRET = False

_MATRICES = Dims(((1,), (0,)), ((), ()), (2, 2))


def explain_kernels(call: Call, lhs: jax.Array, rhs: jax.Array, is_known: bool) -> str:
    """Returns the reason why a linear layer does not use the Pallas kernel, or "" if it does.

    Args:
      call: the dot.
      lhs, rhs: operands.
      is_known: result of `are_known`; False on explicit mesh axes.
    """
    if len(formats(call.scaling)) < len(OPERANDS):
        return "an operand has two formats, or a dot does not use FP8"
    if not is_known:
        return "jaxmp.value_and_grad does not update the state, or arrays are on several devices"
    if not is_matrix_product(call):
        return "the dot is not a product of two matrices"
    return explain_fallback(*to_matrices(call, lhs, rhs), interpret=INTERPRET)


def is_matrix_product(call: Call) -> bool:
    """Returns True if a dot is a product of matrices, after reshapes of its operands."""
    dims = call.dims
    count = len(dims.contract[0])
    free = dims.ndims[0] - count
    return (
        call.kernel == 1
        and not dims.batch[0]
        and dims.contract[0] == tuple(range(free, dims.ndims[0]))
        and dims.contract[1] == tuple(range(count))
    )


def to_matrices(call: Call, lhs: jax.Array, rhs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Reshapes input and kernel to `[rows, k]` and `[k, n]`."""
    k = math.prod(rhs.shape[: len(call.dims.contract[1])])
    return lhs.reshape(-1, k), rhs.reshape(k, -1)


def of_matrices(call: Call) -> Call:
    """Returns the dot of the results of `to_matrices`."""
    return call._replace(dims=_MATRICES)


def pallas_source() -> Source:
    """Returns the source of a stored tensor."""
    return Source(INTERPRET)


def linear(call: Call, lhs: jax.Array, rhs: jax.Array, state: State) -> jax.Array:
    """Computes a dot whose operands the Pallas kernel quantizes; see `explain_kernels`."""
    matrices = to_matrices(call, lhs, rhs)
    y: Any = known_product(of_matrices(call), pallas_source(), *matrices, state)
    count = len(call.dims.contract[1])
    return y.reshape(*lhs.shape[: lhs.ndim - count], *rhs.shape[count:])
