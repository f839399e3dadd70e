"""Finds the values of a jaxpr that only FP32 operations consume; they are not rounded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxmp._core._jaxprs import is_literal

# Arithmetic on two operands, which rounds its result to the dtype of the result.
ARITHMETIC = frozenset(("add", "add_any", "sub", "mul", "div", "rem", "atan2"))
# Operations of the category "follow" that round their result; all others are exact.
_BOUNDED = frozenset(("tanh", "atan", "erf", "erfc", "logistic", "sqrt", "cbrt"))


def _made_in_fp32(jaxpr: Any, kinds: list[str]) -> set[Any]:
    """Returns the variables of arrays that are FP32 because an FP32 operation computes them.

    They are the results of FP32 operations and, transitively, of "widest" and "follow" operations
    with such an operand. Scalars are left out, since they do not promote arrays.
    """
    made: set[Any] = set()
    for equation, kind in zip(jaxpr.eqns, kinds, strict=True):
        follows = kind in ("widest", "follow") and any(
            var in made for var in equation.invars if not is_literal(var)
        )
        if kind == "fp32" or follows:
            made.update(v for v in equation.outvars if getattr(v.aval, "ndim", 0))
    return made


class Readers:
    """Consumers of the variables of one jaxpr.

    Args:
      jaxpr: without its constants.
      category: equation -> its category in the op table.
    """

    def __init__(self, jaxpr: Any, category: Callable[[Any], str]) -> None:
        kinds = list(map(category, jaxpr.eqns))
        wide = _made_in_fp32(jaxpr, kinds)
        # Variables with a consumer that is not an FP32 operation; the jaxpr's results are consumed
        # by the caller.
        self.also: set[Any] = {var for var in jaxpr.outvars if not is_literal(var)}
        # As `also`, but arithmetic and data movement whose results end in FP32 operations alone
        # count as FP32 operations.
        self.also_later = set(self.also)
        # Variables with any consumer.
        self.read: set[Any] = set(self.also)
        for equation, kind in zip(reversed(jaxpr.eqns), reversed(kinds), strict=True):
            operands = [var for var in equation.invars if not is_literal(var)]
            later = kind == "fp32" or (
                kind in ("widest", "follow")
                and equation.primitive.name not in _BOUNDED
                and all(map(self.only_fp32_later, equation.outvars))
            )
            # "widest" casts its other operands to FP32 if one is FP32.
            later = later or (kind == "widest" and any(var in wide for var in operands))
            self.read.update(operands)
            if kind != "fp32":
                self.also.update(operands)
            if not later:
                self.also_later.update(operands)

    def only_fp32(self, var: Any) -> bool:
        """Returns True for variables whose consumers are all FP32 operations."""
        return var in self.read and var not in self.also

    def only_fp32_later(self, var: Any) -> bool:
        """Returns True for variables that reach only FP32 operations.

        The path there may contain arithmetic and data movement.
        """
        return var in self.read and var not in self.also_later
