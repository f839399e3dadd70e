"""Properties of matmul equations."""

from __future__ import annotations

import math
from collections.abc import Sequence

from jax.extend.core import JaxprEqn

from jaxmp._autocast._magnified import Effect
from jaxmp._autocast._values import Priority, Value, is_castable_aval
from jaxmp._core._dtypes import is_16bit
from jaxmp._core._jaxprs import array_aval
from jaxmp._core._matmuls import is_outer_product
from jaxmp._core._programs._operations import arithmetic_of, dot_of


def is_matmul(equation: JaxprEqn) -> bool:
    """Returns True for a `dot_general` of castable operands that contracts a dimension."""
    return (
        equation.primitive.name == "dot_general"
        and not is_outer_product(equation)
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

    A matmul of two computed operands, such as that of attention, is not a layer. Of two arguments,
    a vector is the input.
    """
    kernel = kernel_of(values)
    computed = [value.priority >= Priority.NARROW for value in values]
    if computed[kernel] or not is_matmul(equation):
        return None
    dot = dot_of(equation)
    used = {*dot.contracted[kernel], *dot.batch[kernel]}
    free = [n for axis, n in enumerate(values[kernel].array.shape) if axis not in used]
    return math.prod(free) if free or any(computed) else None


def why_as_recorded(equation: JaxprEqn, effect: Effect) -> str:
    """Returns why a matmul keeps the dtypes in which it was recorded, or "" if it does not.

    Args:
      equation: a matmul.
      effect: the effect of the rounding of its result.
    """
    if is_16bit(array_aval(equation.invars[0]).dtype):
        return ""
    options = arithmetic_of(equation)
    if options is not None and options.is_highest:
        return "its author asked for precision=HIGHEST"
    return "a factorization or a solve reads its result" if effect is Effect.SOLVED else ""
