"""Properties of equations and jaxprs."""

from __future__ import annotations

from jax.extend.core import Jaxpr, JaxprEqn, Var

from jaxmp._core._compat import jaxpr_body
from jaxmp._core._dtypes import is_fp8
from jaxmp._core._jaxprs import equations, sub_jaxprs
from jaxmp._core._programs._constructs import CALLS, LOOPS, REMATS, call_of


def forwarded(jaxpr: Jaxpr) -> list[int | None]:
    """Returns for each result the index of the argument that it is; None if it is computed."""
    arguments: dict[Var, int] = {var: index for index, var in enumerate(jaxpr.invars)}
    for equation in jaxpr.eqns:
        if equation.primitive.name in CALLS | REMATS:
            inner, _ = jaxpr_body(call_of(equation).jaxpr)
            for var, index in zip(equation.outvars, forwarded(inner), strict=True):
                operand = None if index is None else equation.invars[index]
                if isinstance(operand, Var) and operand in arguments:
                    arguments[var] = arguments[operand]
    return [arguments.get(var) if isinstance(var, Var) else None for var in jaxpr.outvars]


def quantizes(equation: JaxprEqn) -> bool:
    """Returns True if a function casts to FP8."""
    return any(
        inner.primitive.name == "convert_element_type" and is_fp8(inner.params["new_dtype"])
        for jaxpr in sub_jaxprs(equation)
        for inner in equations(jaxpr)
    )


def loops(equation: JaxprEqn) -> bool:
    """Returns True if a function contains a loop."""
    return any(
        inner.primitive.name in LOOPS
        for jaxpr in sub_jaxprs(equation)
        for inner in equations(jaxpr)
    )
