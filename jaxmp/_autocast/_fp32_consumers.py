"""Finds the values of a jaxpr that only FP32 operations consume; they are not rounded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Var

from jaxmp._core._jaxprs import array_aval, is_literal

# Arithmetic on two operands, which rounds its result to the dtype of the result.
ARITHMETIC = frozenset(("add", "add_any", "sub", "mul", "div", "rem", "atan2"))
# Operations of the category "follow" that round their result; all others are exact.
_BOUNDED = frozenset(("tanh", "atan", "erf", "erfc", "logistic", "sqrt", "cbrt"))


def _is_identity(equation: JaxprEqn) -> bool:
    """Returns True for a conversion to the recorded dtype, as `jnp.mean` contains."""
    is_conversion = equation.primitive.name == "convert_element_type"
    return is_conversion and array_aval(equation.invars[0]).dtype == equation.params["new_dtype"]


def _made_in_fp32(jaxpr: Jaxpr, kinds: list[str]) -> set[Any]:
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


class Consumers:
    """Consumers of the variables of one jaxpr.

    Args:
      jaxpr: without its constants.
      category: equation -> its category in the op table.
    """

    def __init__(self, jaxpr: Jaxpr, category: Callable[[JaxprEqn], str]) -> None:
        kinds = ["follow" if _is_identity(e) else category(e) for e in jaxpr.eqns]
        wide = _made_in_fp32(jaxpr, kinds)
        # Variables with a consumer that is not an FP32 operation; the jaxpr's results are consumed
        # by the caller.
        self._non_fp32: set[Any] = {var for var in jaxpr.outvars if not is_literal(var)}
        # As `_non_fp32`, but arithmetic and data movement count as FP32 operations if their results
        # reach only FP32 operations.
        self._later_non_fp32 = set(self._non_fp32)
        # Variables with any consumer.
        self._consumed: set[Any] = set(self._non_fp32)
        for equation, kind in zip(reversed(jaxpr.eqns), reversed(kinds), strict=True):
            operands = [var for var in equation.invars if not is_literal(var)]
            later = kind == "fp32" or (
                kind in ("widest", "follow")
                and equation.primitive.name not in _BOUNDED
                and all(map(self.leads_to_fp32_only, equation.outvars))
            )
            # "widest" casts its other operands to FP32 if one is FP32.
            later = later or (kind == "widest" and any(var in wide for var in operands))
            self._consumed.update(operands)
            if kind != "fp32":
                self._non_fp32.update(operands)
            if not later:
                self._later_non_fp32.update(operands)

    def is_fp32_only(self, var: Var) -> bool:
        """Returns True for variables whose consumers are all FP32 operations."""
        return var in self._consumed and var not in self._non_fp32

    def leads_to_fp32_only(self, var: Var) -> bool:
        """Returns True for variables that reach only FP32 operations.

        The path there may contain arithmetic and data movement.
        """
        return var in self._consumed and var not in self._later_non_fp32
