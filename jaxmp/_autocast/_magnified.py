"""Finds the values of a jaxpr whose rounding to 16 bits a later operation magnifies.

A sigmoid of 9 is 1 in bfloat16, and `log(1 - q)` of it is infinite. A Gram matrix with entries that
are rounded has negative eigenvalues, and its Cholesky factor is NaN. autocast computes such values
in FP32.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from jax.extend.core import Jaxpr, JaxprEqn

from jaxmp._core._jaxprs import inners, is_literal


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


class Magnified:
    """Effects of rounding the variables of one jaxpr.

    Args:
      jaxpr: without its constants.
      category: equation -> its category in the op table.
      results: the effects of the results; () if they are all bounded.
      inside: (jaxpr, effects of its results) -> the effects inside it.
    """

    def __init__(
        self,
        jaxpr: Jaxpr,
        category: Callable[[JaxprEqn], str],
        results: Effects,
        inside: Callable[[Jaxpr, Effects], Magnified],
    ) -> None:
        self._category, self._inside = category, inside
        self._effects: dict[Any, Effect] = {}
        self._raise(jaxpr.outvars, results)
        for equation in reversed(jaxpr.eqns):
            for inner in inners(equation):
                effects = inside(inner.jaxpr, self.of(inner.results)).of(inner.jaxpr.invars)
                self._raise(inner.operands, effects)
            self._raise(equation.invars, self._operands(equation))

    def of(self, variables: Sequence[Any]) -> Effects:
        """Returns the effect of each variable; that of a literal or of None is bounded."""
        known = (var is not None and not is_literal(var) for var in variables)
        return tuple(
            self._effects.get(var, Effect.BOUNDED) if is_known else Effect.BOUNDED
            for var, is_known in zip(variables, known, strict=True)
        )

    def _raise(self, variables: Sequence[Any], effects: Effects) -> None:
        for var, effect in zip(variables, effects, strict=False):
            if effect and var is not None and not is_literal(var):
                self._effects[var] = max(effect, self._effects.get(var, effect))

    def _operands(self, equation: JaxprEqn) -> Effects:
        """Returns the effects of the operands of an equation without regard to inner jaxprs."""
        name, count = equation.primitive.name, len(equation.invars)
        if name in _SOLVERS:
            return (Effect.SOLVED,) * count
        category = self._category(equation)
        effect = max(self.of(equation.outvars), default=Effect.BOUNDED)
        passes = (
            category in ("widest", "follow") and name not in _FLAT
        ) or name in _POWERS_AND_SUMS
        is_elementwise = category in ("widest", "follow", "fp32")
        if not (passes or (is_elementwise and effect is Effect.SOLVED)):
            effect = Effect.BOUNDED
        if name in _UNARY or (name == "integer_pow" and equation.params["y"] < 0):
            effect = max(effect, Effect.MAGNIFIED)
        if name == "div":
            return (effect, max(effect, Effect.MAGNIFIED))
        return (effect,) * count
