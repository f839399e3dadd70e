"""Properties of matmul equations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax import lax
from jax.extend.core import JaxprEqn

from jaxmp._autocast._values import is_castable_aval


def is_matmul(equation: JaxprEqn) -> bool:
    """Returns True for a `dot_general` of castable operands that contracts a dimension."""
    return (
        equation.primitive.name == "dot_general"
        and bool(equation.params["dimension_numbers"][0][0])
        and all(is_castable_aval(var.aval) for var in equation.invars)
    )


def requests_highest(params: Mapping[str, Any]) -> bool:
    """Returns True if the parameters of a matmul contain `precision=HIGHEST` for an operand."""
    precision = params.get("precision")
    precision = precision if isinstance(precision, tuple) else (precision,)
    return lax.Precision.HIGHEST in precision
