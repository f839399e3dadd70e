"""Finds the values of a jaxpr whose rounding to 16 bits a later operation magnifies.

A sigmoid of 9 is 1 in bfloat16, and `log(1 - q)` of it is infinite. A Gram matrix with entries that
are rounded has negative eigenvalues, and its Cholesky factor is NaN. autocast computes such values
in FP32.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from jax.extend.core import JaxprEqn

from jaxmp._core._compat import jaxpr_body
from jaxmp._core._programs._analysis import Backward
from jaxmp._core._programs._interpreter import Frame, Place
from jaxmp._core._programs._operations import exponent_of


class Effect(enum.IntEnum):
    """Effect of the rounding of a value on the results of a program."""

    BOUNDED = 0
    # A logarithm, a root or a quotient follows, which is infinite at 0 or at 1.
    MAGNIFIED = 1
    # A factorization or a solve follows, whose error is that of the matrix times its condition.
    SOLVED = 2


# Effects of the results of a jaxpr, or of the operands of an equation.
Effects: TypeAlias = tuple[Effect, ...]

_UNARY = frozenset(
    (
        *("log", "log1p", "log2", "sqrt", "rsqrt", "cbrt"),
        *("erf_inv", "acos", "asin", "acosh", "atanh"),
    )
)
_SOLVERS = frozenset(
    (
        *("cholesky", "cholesky_update", "custom_linear_solve", "eig", "eigh", "geqp3", "geqrf"),
        *("hessenberg", "householder_product", "lu", "ormqr", "qr", "schur", "svd"),
        *("triangular_solve", "tridiagonal", "tridiagonal_solve"),
    )
)
# FP32 operations whose results are 0 or 1 because their operands were rounded to it.
_POWERS_AND_SUMS = frozenset(("integer_pow", "square", "reduce_sum", "cumsum"))
# Operations whose results are accurate if their operands were rounded, but not if they are.
_FLAT = frozenset(("tanh", "atan", "erf", "erfc", "logistic"))


class Magnified(Backward):
    """Effects of rounding the variables of jaxprs, given those of their results.

    Args:
      category: equation -> its category in the op table.
    """

    nothing = Effect.BOUNDED

    def join(self, first: Any, second: Any) -> Any:
        return max(first, second)

    def __init__(self, category: Callable[[JaxprEqn], str]) -> None:
        self._category = category
        # (id of a jaxpr, effects of its results) -> (the jaxpr, the effects inside it).
        self._known: dict[Any, tuple[Any, dict[Any, Effect]]] = {}

    def facts(
        self, jaxpr: Any, results: Sequence[Any], place: Place | None = None, state: Any = None
    ) -> dict[Any, Effect]:
        """Returns variable -> effect for one jaxpr; results that are () are all bounded."""
        body, _ = jaxpr_body(jaxpr)
        results = tuple(results) or (Effect.BOUNDED,) * len(body.outvars)
        key = id(body), results
        if key not in self._known:
            self._known[key] = body, super().facts(body, results)
        return self._known[key][1]

    def equation(self, equation: JaxprEqn, results: list[Any], frame: Frame) -> list[Any]:
        inside = self.enter(equation, results, frame)
        return list(map(max, inside, self._operands(equation, results)))

    def _operands(self, equation: JaxprEqn, results: list[Effect]) -> Effects:
        """Returns the effects of the operands of an equation without regard to inner jaxprs."""
        name, count = equation.primitive.name, len(equation.invars)
        if name in _SOLVERS:
            return (Effect.SOLVED,) * count
        category = self._category(equation)
        effect = max(results, default=Effect.BOUNDED)
        passes = (
            category in ("widest", "follow") and name not in _FLAT
        ) or name in _POWERS_AND_SUMS
        is_elementwise = category in ("widest", "follow", "fp32")
        if not (passes or (is_elementwise and effect is Effect.SOLVED)):
            effect = Effect.BOUNDED
        if name in _UNARY or exponent_of(equation) < 0:
            effect = max(effect, Effect.MAGNIFIED)
        if name == "div":
            return (effect, max(effect, Effect.MAGNIFIED))
        return (effect,) * count
