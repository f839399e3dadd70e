"""Check of loops whose carry is a linear recurrence in 16 bits, such as a decayed sum."""

from __future__ import annotations

from typing import NamedTuple

from jax.extend.core import Jaxpr

from jaxmp._audit._auditor import Auditor
from jaxmp._audit._check_ops import ACCUMULATOR_16BIT, fix_carry
from jaxmp._audit._program import FLOATS, LAYOUT, Body, OpOccurrence, dtype_of, named
from jaxmp._core._compat import scan_counts
from jaxmp._core._dtypes import FLOATS_16BIT
from jaxmp._core._jaxprs import FORWARD, Atom, Equation, inners, is_literal

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
    jaxpr = inners(op.equation)[-1].jaxpr
    if op.name == "scan":
        consts, carried = scan_counts(op.equation.params)
    else:
        consts, carried = op.equation.params["body_nconsts"], len(op.equation.outvars)
    carries = [v for v in jaxpr.invars[consts : consts + carried] if dtype_of(v) in FLOATS]
    results = dict(zip(jaxpr.invars[consts:], jaxpr.outvars[:carried], strict=False))
    for carry in carries if op.location.phase == FORWARD else ():
        if dtype_of(carry) in FLOATS_16BIT and not is_literal(results[carry]):
            linear = _linear_in(carry, carries, jaxpr).get(results[carry])
            if linear is not None and linear.addition is not None and linear.is_scaled:
                _report(op, carry, linear, audit)


def _linear_in(carry: Atom, carries: list[Atom], jaxpr: Jaxpr) -> dict[Atom, _Linear | None]:
    """Returns the values that depend on carries; None for those that are not linear in `carry`."""
    values: dict[Atom, _Linear | None] = dict.fromkeys(carries) | {carry: _Linear()}
    for equation in jaxpr.eqns:
        if any(not is_literal(var) and var in values for var in equation.invars):
            values.update(dict.fromkeys(equation.outvars, _after(equation, values)))
    return values


def _after(equation: Equation, values: dict[Atom, _Linear | None]) -> _Linear | None:
    name, operands = equation.primitive.name, equation.invars
    if name in ("jit", "pjit") and equation.params.get("name") == "_where":
        name = "select_n"
    rows = [values.get(var) for var in operands if not is_literal(var) and var in values]
    if any(row is None for row in rows):
        return None
    linear = max((row for row in rows if row is not None), key=lambda row: row.addition is not None)
    is_first = not is_literal(operands[0]) and operands[0] in values
    if name in _KEEPS:
        return None if name == "select_n" and is_first else linear
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
    return None


def _report(op: OpOccurrence, carry: Atom, linear: _Linear, audit: Auditor) -> None:
    dtype = dtype_of(carry).name
    length, factor = op.equation.params.get("length"), linear.factor
    terms = length or 2**31
    if factor is not None and abs(factor) < 1:
        terms = min(terms, 1 / (1 - abs(factor)))
    if terms < _FEW_TERMS:
        return
    steps = "" if length is None else f" of {length:,} steps"
    decay = "" if factor is None else f" with the factor {factor:.4g}"
    message = f"a loop{steps} updates a decayed sum{decay} in {dtype}: small summands are rounded"
    assert linear.addition is not None
    body = Body(inners(op.equation)[-1].jaxpr)
    enclosing = (op.equation, *op.enclosing)
    inner = op._replace(equation=linear.addition, body=body, enclosing=enclosing)
    fix = fix_carry(op, carry, inner, audit)
    if not fix:
        fix = "Start from zeros in FP32, and cast the results after the loop:\n"
        fix += (
            f"    carry = jnp.zeros(shape, jnp.float32)\n    results = results.astype(jnp.{dtype})"
        )
    audit.add(ACCUMULATOR_16BIT, inner, f"{message} away.", fix)
