"""Products of which an operand is the result of a factorization or a solve: `x @ inv(w)`.

The error of `x @ inv(w)` is that of rounding `x` or the inverse, times the condition number of `w`.
"""

from __future__ import annotations

from typing import Any

from jaxmp import _core
from jaxmp._core import _compat, named
from jaxmp._programs._analysis import Forward, primitives
from jaxmp._programs._constructs import CONSTRUCTS
from jaxmp._programs._distances import SAME
from jaxmp._programs._interpreter import Frame
from jaxmp._programs._jaxprs import array_aval
from jaxmp._programs._locations import call_stack
from jaxmp._programs._matmuls import MATMULS

SOLVERS = named(
    "cholesky cholesky_update custom_linear_solve eig eigh geqp3 geqrf hessenberg"
    " householder_product lu ormqr qr schur svd triangular_solve tridiagonal"
    " tridiagonal_solve"
)
# Factorizations whose first result is an orthogonal matrix, the Q of QR.
_ORTHOGONAL = named("householder_product qr")
# Facts: the value does not depend on an argument; it is computed from the results of factorizations
# and solves, and constants, alone; or it is a product of such, `p @ inv(w)`, perhaps transposed,
# whose product with `x` has the error of `p @ (inv(w) @ x)`.
_CONSTANT, _SOLUTION, _GAIN = "constant", "solution", "gain"


class _Solutions(Forward):
    """Fact of each value: one of these, the call stack of the matmul that made it, or None."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[Any] = set()

    def constant(self, array: Any) -> str:
        return _CONSTANT

    def equation(self, equation: _compat.JaxprEqn, operands: list[Any], frame: Frame) -> list[Any]:
        name, count = equation.primitive.name, len(equation.outvars)
        if name in CONSTRUCTS:
            return self.enter(equation, operands, frame)
        pairs = zip(equation.invars, operands, strict=True)
        pairs = [(var, fact) for var, fact in pairs if _core.is_float(var.aval)]
        facts = {fact for _, fact in pairs} - {_CONSTANT}
        stack = call_stack(equation) if name in MATMULS else None
        if stack and facts & {_SOLUTION, _GAIN}:
            # With what another matmul computed for it: `inv(x.T @ x) @ (x.T @ y)`.
            self.found |= {stack, *facts}
        result = _GAIN if stack and _SOLUTION in facts else stack if facts else _CONSTANT
        if name in SOLVERS or facts == {_SOLUTION}:
            result = _SOLUTION
        elif facts and name not in MATMULS:
            # A bias or a mean has another size, and the sum still counts as the matmul's result.
            size = array_aval(equation.outvars[0]).size
            own = {fact for var, fact in pairs if fact or array_aval(var).size == size}
            # An innovation, `y - c @ x`, has the rounding error of its matmul.
            own -= {_CONSTANT, *({None} if name == "sub" else ())}
            own -= set() if name in SAME else {_GAIN}
            result = own.pop() if len(own) == 1 else None
        dtypes = {_core.dtype_of(var.aval) for var in equation.outvars}
        is_rounded = not dtypes.isdisjoint(_core.FLOATS_16BIT)
        results = [None if is_rounded else result] * count
        if name in _ORTHOGONAL:
            # Its condition number is 1, so that a product with it magnifies no rounding error.
            results[0] = None
        return results


def products_of_solutions(jaxpr: _compat.AnyJaxpr) -> set[Any]:
    """Returns the call stacks of the products, which are also those of their gradients."""
    solutions = _Solutions()
    if not SOLVERS.isdisjoint(primitives(jaxpr)):
        solutions.run(jaxpr, [None] * len(_compat.jaxpr_body(jaxpr)[0].invars))
    return solutions.found - {None, (), _SOLUTION, _GAIN}
