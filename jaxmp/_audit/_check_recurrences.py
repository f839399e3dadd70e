"""Check of loops whose carry is a linear recurrence in 16 bits, such as a decayed sum."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from jax.extend.core import JaxprEqn

from jaxmp._audit._auditor import Auditor
from jaxmp._audit._check_ops import ACCUMULATOR_16BIT, fix_carry
from jaxmp._audit._program import FLOATS, LAYOUT, OpOccurrence, dtype_of, named
from jaxmp._core._dtypes import FLOATS_16BIT
from jaxmp._core._jaxprs import FORWARD, Atom, Equation, is_literal
from jaxmp._core._programs._analysis import Body, Forward
from jaxmp._core._programs._interpreter import Frame
from jaxmp._core._programs._operations import Loop, loop_of, name_of

_KEEPS = LAYOUT | named("neg select_n")
_SUMS = named("add add_any sub")
# Sums of fewer terms lose less than three bits.
_FEW_TERMS = 8


class _Linear(NamedTuple):
    """Value `factor * carry + increment`, where neither depends on a carry of the loop."""

    # None if it is not a constant.
    factor: float | None = 1.0
    is_scaled: bool = False
    # The last sum of the carry and an increment.
    addition: Equation | None = None


@ACCUMULATOR_16BIT.on_result("scan", "while")
def check_recurrence(op: OpOccurrence, audit: Auditor) -> None:
    """Reports a 16-bit carry that is scaled and added to in each step.

    The gates of an LSTM or GRU depend on a carry, and a residual stream adds a function of the
    carry; both are not linear recurrences. A sum without a factor is a running sum, which
    `reduction_16bit` reports.
    """
    loop = loop_of(op.equation)
    assert loop is not None
    carries = [var for var in loop.incoming if dtype_of(var) in FLOATS]
    pairs = zip(loop.incoming, loop.outgoing, strict=True)
    for carry, result in pairs if op.location.phase == FORWARD else ():
        if dtype_of(carry) in FLOATS_16BIT and not is_literal(result):
            carried = {var: False for var in carries} | {carry: _Linear()}
            args = [carried.get(var) for var in loop.body.invars]
            linear = _Linearity().facts(loop.body, args).get(result)
            if linear and linear.addition is not None and linear.is_scaled:
                _report(op, carry, linear, loop, audit)


class _Linearity(Forward):
    """Facts of values in a loop: `None` without a carry, `False` if they are not linear in it."""

    def equation(self, equation: JaxprEqn, operands: list[Any], frame: Frame) -> list[Any]:
        is_read = any(operand is not None for operand in operands)
        return [_after(equation, operands) if is_read else None] * len(equation.outvars)


def _after(equation: Equation, facts: list[Any]) -> _Linear | Literal[False]:
    name, operands = equation.primitive.name, equation.invars
    name = "select_n" if name_of(equation) == "_where" else name
    rows = [fact for fact in facts if fact is not None]
    if not all(rows):
        return False
    linear: _Linear = max(rows, key=lambda row: row.addition is not None)
    is_first = facts[0] is not None
    if name in _KEEPS:
        return False if name == "select_n" and is_first else linear
    if name in _SUMS:
        is_scaled = len(rows) > 1 or linear.is_scaled
        return _Linear(linear.factor if len(rows) == 1 else None, is_scaled, equation)
    if len(rows) == 1 and (name == "mul" or (name == "div" and is_first)):
        other = operands[1] if is_first else operands[0]
        constant = float(other.val) if is_literal(other) and other.aval.size == 1 else None
        if constant is None or linear.factor is None or not constant:
            return linear._replace(factor=None, is_scaled=True)
        factor = linear.factor * (constant if name == "mul" else 1 / constant)
        return linear._replace(factor=factor, is_scaled=True)
    return False


def _report(op: OpOccurrence, carry: Atom, linear: _Linear, loop: Loop, audit: Auditor) -> None:
    dtype, length, factor = dtype_of(carry).name, loop.length, linear.factor
    terms = length or 2**31
    if factor is not None and abs(factor) < 1:
        terms = min(terms, 1 / (1 - abs(factor)))
    if terms < _FEW_TERMS:
        return
    steps = "" if length is None else f" of {length:,} steps"
    decay = "" if factor is None else f" with the factor {factor:.4g}"
    message = f"a loop{steps} updates a decayed sum{decay} in {dtype}: small summands are rounded"
    assert linear.addition is not None
    inner = op._replace(equation=linear.addition, body=Body(loop.body), outer=op)
    fix = "Start from zeros in FP32, and cast the results after the loop:\n"
    fix += f"    carry = jnp.zeros(shape, jnp.float32)\n    results = results.astype(jnp.{dtype})"
    fix = fix_carry(op, carry, inner, audit) or fix
    audit.add(ACCUMULATOR_16BIT, inner, f"{message} away.", fix)
