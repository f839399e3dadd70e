"""Properties of matmul equations."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jax import lax
from jax.extend.core import JaxprEqn

from jaxmp._autocast._values import Priority, Value, is_castable_aval


def is_matmul(equation: JaxprEqn) -> bool:
    """Returns True for a `dot_general` of castable operands that contracts a dimension."""
    return (
        equation.primitive.name == "dot_general"
        and bool(equation.params["dimension_numbers"][0][0])
        and all(is_castable_aval(var.aval) for var in equation.invars)
    )


def kernel_of(values: Sequence[Value]) -> int:
    """Returns 0 or 1, the operand of a matmul that is treated as the kernel of a layer.

    It is the only operand that no matmul, FP32 operation or cast has computed, or the second one.
    """
    computed = [value.priority >= Priority.NARROW for value in values]
    return 0 if computed == [False, True] else 1


def outputs_of(equation: JaxprEqn, values: Sequence[Value]) -> int | None:
    """Returns the number of outputs of a linear layer; None for other operations.

    A matmul of two computed operands, such as that of attention, is not a layer. A kernel that is
    not computed, times an argument that is a vector, is one of matrix and vector.
    """
    is_layer = any(value.priority < Priority.NARROW for value in values)
    if not is_layer or not is_matmul(equation):
        return None
    contract, batch = equation.params["dimension_numbers"]
    shapes = [value.array.shape for value in values]
    free = [
        [size for axis, size in enumerate(shape) if axis not in (*contract[n], *batch[n])]
        for n, shape in enumerate(shapes)
    ]
    kernel = kernel_of(values)
    is_vector = not free[kernel] and values[1 - kernel].priority < Priority.NARROW
    return math.prod(free[1 - kernel] if is_vector else free[kernel])


def requests_highest(params: Mapping[str, Any]) -> bool:
    """Returns True if the parameters of a matmul contain `precision=HIGHEST` for an operand."""
    precision = params.get("precision")
    precision = precision if isinstance(precision, tuple) else (precision,)
    return lax.Precision.HIGHEST in precision
