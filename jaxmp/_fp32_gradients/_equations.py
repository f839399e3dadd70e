"""Properties of equations and jaxprs."""

from __future__ import annotations

from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn

from jaxmp._core._dtypes import is_fp8
from jaxmp._core._jaxprs import equations, sub_jaxprs
from jaxmp._core._programs._analysis import Forward, primitives
from jaxmp._core._programs._constructs import CALLS, LOOPS, REMATS
from jaxmp._core._programs._interpreter import Frame
from jaxmp._core._programs._operations import new_dtype_of


class _Forwarded(Forward):
    """For each variable, the index of the argument that it is; None if it is computed."""

    def equation(self, equation: JaxprEqn, operands: list[Any], frame: Frame) -> list[Any]:
        if equation.primitive.name in CALLS | REMATS:
            return self.enter(equation, operands, frame)
        return self.bound(equation, operands)


def forwarded(jaxpr: Jaxpr) -> list[int | None]:
    """Returns for each result the index of the argument that it is; None if it is computed."""
    return _Forwarded().run(jaxpr, range(len(jaxpr.invars)))


def quantizes(equation: JaxprEqn) -> bool:
    """Returns True if a function casts to FP8."""
    return any(
        inner.primitive.name == "convert_element_type" and is_fp8(new_dtype_of(inner))
        for jaxpr in sub_jaxprs(equation)
        for inner in equations(jaxpr)
    )


def loops(equation: JaxprEqn) -> bool:
    """Returns True if a function contains a loop."""
    return any(not LOOPS.isdisjoint(primitives(jaxpr)) for jaxpr in sub_jaxprs(equation))
