"""Finds the values of a jaxpr that autocast does not round to 16 bits.

Only FP32 operations consume them, or a later operation magnifies the rounding. A sigmoid of 9 is 1
in bfloat16, and `log(1 - q)` of it is infinite. A Gram matrix with entries that are rounded has
negative eigenvalues, and its Cholesky factor is NaN.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

from jaxmp._core._compat import Jaxpr, JaxprEqn, Var, jaxpr_body
from jaxmp._programs._analysis import Backward, Forward
from jaxmp._programs._interpreter import Frame, Place
from jaxmp._programs._jaxprs import array_aval, is_literal
from jaxmp._programs._operations import exponent_of, new_dtype_of

# Arithmetic on two operands, which rounds its result to the dtype of the result.
ARITHMETIC = frozenset(("add", "add_any", "sub", "mul", "div", "rem", "atan2"))
# Operations of the category "follow" that round their result; all others are exact.
_BOUNDED = frozenset(("tanh", "atan", "erf", "erfc", "logistic", "sqrt", "cbrt"))


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
        self._wide = made.frame(jaxpr, [False] * len(jaxpr.invars)).values
        self._kinds = made.kinds
        self._read = self.facts(jaxpr, [_Read(True, True)] * len(jaxpr.outvars))

    def join(self, first: _Read, second: _Read) -> _Read:
        return _Read(*map(any, zip(first, second, strict=True)))

    def equation(self, equation: JaxprEqn, results: list[Any], frame: Frame) -> list[Any]:
        kind = self._kinds[frame.index]
        later = kind == "fp32" or (
            kind in ("widest", "follow")
            and equation.primitive.name not in _BOUNDED
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


# ---------------------------------------------------------------------------
# Values whose rounding a later operation magnifies
# ---------------------------------------------------------------------------


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
