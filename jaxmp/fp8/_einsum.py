"""`jnp.einsum` of an input and a kernel, which is one FP8 dot and a transposition."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from opt_einsum.parser import parse_einsum_input

from jaxmp._core import DTypeLike
from jaxmp.errors import JaxmpError
from jaxmp.fp8._dims import before_transpose
from jaxmp.fp8._dot_general import dot_general
from jaxmp.fp8._operands import as_floats
from jaxmp.fp8._scaling import ScalingLike


def einsum(scaling: ScalingLike = None) -> Callable[..., jax.Array]:
    """Creates a replacement of a two-operand `jnp.einsum` that quantizes its operands to FP8.

    Args:
      scaling: FP8 scaling, as in `fp8.dot_general`.

    Returns:
      `product(equation, x, kernel, precision=None, preferred_element_type=None, *,
      out_sharding=None, state=None)`, where `x` is the input. Each label of an operand must also
      appear in the other operand or in the result, and at most once in each operand.

    Raises:
      RecipeError: if `scaling` is not an FP8 scaling.
      JaxmpError: by the returned function, if a single dot cannot compute the equation, or as in
        `dot_general`.

    Example:
      >>> x, w = jnp.ones((2, 8, 16), jnp.bfloat16), jnp.ones((16, 4, 32), jnp.bfloat16)
      >>> einsum("current")("btd,dnh->bnth", x, w).shape
      (2, 4, 8, 32)
    """
    product = dot_general(scaling)

    def fp8_einsum(
        equation: str,
        x: jax.Array,
        kernel: jax.Array,
        precision: lax.PrecisionLike = None,
        preferred_element_type: DTypeLike | None = None,
        *,
        out_sharding: NamedSharding | PartitionSpec | None = None,
        state: Mapping[str, jax.Array] | None = None,
    ) -> jax.Array:
        if not isinstance(equation, str):
            raise _refused(equation, "it is not a string")
        x, kernel = as_floats(x, "x", "fp8.einsum"), as_floats(kernel, "kernel", "fp8.einsum")
        plan = plan_einsum(equation, x.ndim, kernel.ndim)
        if isinstance(out_sharding, (NamedSharding, PartitionSpec)):
            out_sharding = before_transpose(out_sharding, plan.order)
        result = product(
            x,
            kernel,
            plan.numbers,
            precision,
            preferred_element_type,
            out_sharding=out_sharding,
            state=state,
        )
        return lax.transpose(result, plan.order)

    return fp8_einsum


class EinsumDot(NamedTuple):
    """Dimension numbers and output permutation that implement an einsum equation."""

    numbers: Any
    order: tuple[int, ...]


def plan_einsum(equation: str, x_ndim: int, kernel_ndim: int) -> EinsumDot:
    """Converts an einsum equation of two operands to a dot and a permutation of its result.

    Args:
      equation: einsum equation, with or without "->".
      x_ndim, kernel_ndim: ranks of the operands.

    Raises:
      JaxmpError: if a single dot of the two operands cannot compute the equation.
    """
    ranks = (x_ndim, kernel_ndim)
    try:
        inputs, result, _ = parse_einsum_input((equation, *(np.empty((1,) * n) for n in ranks)))
    except ValueError as error:
        raise _refused(equation, str(error).rstrip(".")) from None
    x, kernel = inputs.split(",")
    for term, ndim in ((x, x_ndim), (kernel, kernel_ndim)):
        if len(term) != ndim or (term and not term.isalpha()):
            raise _refused(equation, f"{term!r} does not name the axes of an array of rank {ndim}")
        if len(set(term)) < ndim:
            raise _refused(equation, f"{term!r} has a label twice")
    for term, other in ((x, kernel), (kernel, x)):
        if any(label not in other and label not in result for label in term):
            raise _refused(equation, "an operand alone is summed over; sum before the product")
    batch = [label for label in x if label in kernel and label in result]
    contract = [label for label in x if label in kernel and label not in result]
    where = lambda labels: tuple(tuple(map(term.index, labels)) for term in (x, kernel))
    numbers = where(contract), where(batch)
    used = {*batch, *contract}
    made = batch + [label for label in x + kernel if label not in used]
    return EinsumDot(numbers, tuple(made.index(label) for label in result))


def _refused(equation: object, problem: str) -> JaxmpError:
    return JaxmpError(
        f"fp8.einsum({equation!r}, ...): {problem}. It takes one product of an input and a kernel; "
        'for example fp8.einsum("current")("btd,df->btf", x, kernel).'
    )
