"""Which values of a jaxpr FP32 operations alone read: those are not rounded on the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxmp._jaxprs import is_literal

# Arithmetic of several operands: its result is rounded to its dtype.
ARITHMETIC = frozenset(("add", "add_any", "sub", "mul", "div", "rem", "atan2"))
# These follow what reaches them, and round; what else follows is exact.
_BOUNDED = frozenset(("tanh", "atan", "erf", "erfc", "logistic", "sqrt", "cbrt"))


def _made_in_fp32(jaxpr: Any, kinds: list[str]) -> set[Any]:
    """Arrays that FP32 operations of a jaxpr make, and what follows from them."""
    made: set[Any] = set()
    for equation, kind in zip(jaxpr.eqns, kinds, strict=True):
        follows = kind in ("widest", "follow") and any(
            var in made for var in equation.invars if not is_literal(var)
        )
        if kind == "fp32" or follows:
            made.update(v for v in equation.outvars if getattr(v.aval, "ndim", 0))
    return made


class Readers:
    """What of one jaxpr is read by FP32 operations alone."""

    def __init__(self, jaxpr: Any, category: Callable[[Any], str]) -> None:
        kinds = list(map(category, jaxpr.eqns))
        wide = _made_in_fp32(jaxpr, kinds)
        # Variables that something else reads; those that anything does.
        self.also: set[Any] = {var for var in jaxpr.outvars if not is_literal(var)}
        # The same where arithmetic and moves are what their own readers are.
        self.also_later = set(self.also)
        self.read: set[Any] = set(self.also)
        for equation, kind in zip(reversed(jaxpr.eqns), reversed(kinds), strict=True):
            operands = [var for var in equation.invars if not is_literal(var)]
            later = kind == "fp32" or (
                kind in ("widest", "follow")
                and equation.primitive.name not in _BOUNDED
                and all(map(self.only_fp32_later, equation.outvars))
            )
            # An operand that was made in FP32 lifts the others.
            later = later or (kind == "widest" and any(var in wide for var in operands))
            self.read.update(operands)
            if kind != "fp32":
                self.also.update(operands)
            if not later:
                self.also_later.update(operands)

    def only_fp32(self, var: Any) -> bool:
        """Whether a variable is an operand of FP32 operations, and of no other."""
        return var in self.read and var not in self.also

    def only_fp32_later(self, var: Any) -> bool:
        """Whether it ends in FP32 operations alone, whatever lies between."""
        return var in self.read and var not in self.also_later
