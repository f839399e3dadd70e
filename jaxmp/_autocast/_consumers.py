"""Finds the values that only FP32 operations consume, which autocast does not round to 16 bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from jax.extend.core import Jaxpr, JaxprEqn, Var

from jaxmp._programs._analysis import Backward, Forward
from jaxmp._programs._interpreter import Frame
from jaxmp._programs._jaxprs import array_aval, is_literal
from jaxmp._programs._operations import new_dtype_of

# Arithmetic on two operands, which rounds its result to the dtype of the result.
ARITHMETIC = frozenset(("add", "add_any", "sub", "mul", "div", "rem", "atan2"))
# Operations of the category "follow" that round their result; all others are exact.
BOUNDED = frozenset(("tanh", "atan", "erf", "erfc", "logistic", "sqrt", "cbrt"))


def is_identity(equation: JaxprEqn) -> bool:
    """Returns True for a conversion to the recorded dtype, as `jnp.mean` contains."""
    is_conversion = equation.primitive.name == "convert_element_type"
    return is_conversion and array_aval(equation.invars[0]).dtype == new_dtype_of(equation)


class _MadeInFp32(Forward):
    """For each variable, True for an array that is FP32 because an FP32 operation computes it.

    They are the results of FP32 operations and, transitively, of "widest" and "follow" operations
    with such an operand. Scalars are left out, since they do not promote arrays.
    """

    nothing = False

    def __init__(self, category: Callable[[JaxprEqn], str]) -> None:
        super().__init__()
        self._category = category
        self.kinds: list[str] = []

    def equation(self, equation: JaxprEqn, operands: list[Any], frame: Frame) -> list[Any]:
        kind = "follow" if is_identity(equation) else self._category(equation)
        self.kinds.append(kind)
        is_made = kind == "fp32" or (kind in ("widest", "follow") and any(operands))
        return [is_made and getattr(v.aval, "ndim", 0) > 0 for v in equation.outvars]


class _Read(NamedTuple):
    """Consumers of a variable.

    otherwise: True if an operation reads it that is not an FP32 operation, or the caller.
    otherwise_later: the same, but arithmetic and data movement count as FP32 operations if their
      results reach only FP32 operations.
    """

    otherwise: bool
    otherwise_later: bool


class Consumers(Backward):
    """Consumers of the variables of one jaxpr.

    Args:
      jaxpr: without its constants.
      category: equation -> its category in the op table.
    """

    def __init__(self, jaxpr: Jaxpr, category: Callable[[JaxprEqn], str]) -> None:
        made = _MadeInFp32(category)
        self._wide = made.facts(jaxpr, [False] * len(jaxpr.invars))
        self._kinds = made.kinds
        self._read = self.facts(jaxpr, [_Read(True, True)] * len(jaxpr.outvars))

    def join(self, first: _Read, second: _Read) -> _Read:
        return _Read(*map(any, zip(first, second, strict=True)))

    def equation(self, equation: JaxprEqn, results: list[Any], frame: Frame) -> list[Any]:
        kind = self._kinds[frame.index]
        later = kind == "fp32" or (
            kind in ("widest", "follow")
            and equation.primitive.name not in BOUNDED
            and all(read is not None and not read.otherwise_later for read in results)
        )
        # "widest" casts its other operands to FP32 if one is FP32.
        operands = (var for var in equation.invars if not is_literal(var))
        later = later or (kind == "widest" and any(self._wide[var] for var in operands))
        return [_Read(kind != "fp32", not later)] * len(equation.invars)

    def is_fp32_only(self, var: Var) -> bool:
        """Returns True for variables whose consumers are all FP32 operations."""
        read = self._read.get(var)
        return read is not None and not read.otherwise

    def leads_to_fp32_only(self, var: Var) -> bool:
        """Returns True for variables that reach only FP32 operations.

        The path there may contain arithmetic and data movement.
        """
        read = self._read.get(var)
        return read is not None and not read.otherwise_later
