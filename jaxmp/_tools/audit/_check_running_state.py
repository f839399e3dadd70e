"""Checks of state that is updated in 16 bits, over the steps of a loop and of a program."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import jax.tree_util as jtu
from jax.extend.core import JaxprEqn

from jaxmp._core._dtypes import FLOAT32, FLOATS_16BIT, is_16bit
from jaxmp._programs._analysis import Body, Forward
from jaxmp._programs._constructs import LOOPS, Inner, loop_of
from jaxmp._programs._interpreter import Frame
from jaxmp._programs._jaxprs import FORWARD, Atom, Equation, is_literal
from jaxmp._programs._operations import name_of
from jaxmp._tools.audit._auditor import Auditor
from jaxmp._tools.audit._check_ops import ACCUMULATOR_16BIT, fix_carry
from jaxmp._tools.audit._check_state import MISSING_MASTER, step_of
from jaxmp._tools.audit._dataflow import PLUS, From, Update
from jaxmp._tools.audit._labels import ConditionalFinding, Fact
from jaxmp._tools.audit._program import FLOATS, LAYOUT, OpOccurrence, dtype_of, half_of, named
from jaxmp._tools.audit._rows import Finding
from jaxmp._tools.audit._trace import Traced

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


@ACCUMULATOR_16BIT.on_result(*LOOPS)
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
            args = [carried.get(var) for var in loop.jaxpr.invars]
            linear = _Linearity().frame(loop.jaxpr, args).values.get(result)
            if linear and linear.addition is not None and linear.is_scaled:
                _report_recurrence(op, carry, linear, loop, audit)


class _Linearity(Forward):
    """Facts of values in a loop: `None` without a carry, `False` if they are not linear in it."""

    def equation(self, equation: JaxprEqn, operands: list[Any], frame: Frame) -> list[Any]:
        is_read = any(operand is not None for operand in operands)
        return [_linear_after(equation, operands) if is_read else None] * len(equation.outvars)


def _linear_after(equation: Equation, facts: list[Any]) -> _Linear | Literal[False]:
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


def _report_recurrence(
    op: OpOccurrence, carry: Atom, linear: _Linear, loop: Inner, audit: Auditor
) -> None:
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
    inner = op._replace(equation=linear.addition, body=Body(loop.jaxpr), outer=op)
    fix = "Start from zeros in FP32, and cast the results after the loop:\n"
    fix += f"    carry = jnp.zeros(shape, jnp.float32)\n    results = results.astype(jnp.{dtype})"
    fix = fix_carry(op, carry, inner, audit) or fix
    audit.add(ACCUMULATOR_16BIT, inner, f"{message} away.", fix)


_CHANGES = named("mul div add sub max min clamp")


@ACCUMULATOR_16BIT.on_program
def check_running_state(audit: Auditor, traced: Traced) -> Iterator[Finding]:
    """Reports sums, counters, statistics and other averages that a step updates in 16 bits."""
    step = step_of(audit, traced)
    # The keys of the results below the position in a tuple.
    returned = {jtu.keystr(path[n:]) for path, _ in traced.results for n in (0, 1) if path[n:]}
    rows: dict[tuple[object, str], dict[int, Update]] = {}
    for number, update in step.state_16bit(returned).items():
        key = audit.findings.line_of(update.op), update.factor
        rows.setdefault(key, {})[number] = update
    for (_, factor), updates in rows.items():
        number, update = next(iter(updates.items()))
        text = "are updated in 16 bits: changes below {least} of a value are rounded away"
        if factor == PLUS:
            text = "are sums in 16 bits: a sum of ones stops at {limit}"
        literals = [abs(float(x.val)) for x in update.op.equation.invars if is_literal(x)]
        wide = "int32" if factor == PLUS and 1 in literals else "float32"
        yield from step.findings(ACCUMULATOR_16BIT, updates, text, step.fix(number, update, wide))


# ---------------------------------------------------------------------------
# Copies of masters
# ---------------------------------------------------------------------------


class Copy(Fact):
    """Label of the 16-bit copy of an FP32 argument that the step updates with gradients."""

    survives = LAYOUT | named("select_n sharding_constraint")

    def __init__(self, number: int, op: OpOccurrence) -> None:
        self.number, self.op = number, op


class ChangedCopy(ConditionalFinding):
    """Label of a 16-bit copy that was changed after its master was rounded."""

    check = MISSING_MASTER
    survives = Copy.survives | _CHANGES


@MISSING_MASTER.on_result("convert_element_type")
def label_copy(op: OpOccurrence, audit: Auditor) -> None:
    """Labels the cast of an updated FP32 argument to 16 bits."""
    (operand,), (result,) = op.equation.invars, op.equation.outvars
    if dtype_of(operand) == FLOAT32 and is_16bit(dtype_of(result)):
        for label in audit.flow.labels(Update, operand):
            if label.has_gradient and operand.aval.size > 1:
                audit.flow.mark(result, Copy(label.number, op))


@MISSING_MASTER.on_operation(*_CHANGES)
def label_change(op: OpOccurrence, audit: Auditor) -> ChangedCopy | None:
    """Labels the result of an operation on a copy."""
    labels = audit.flow.of_all(op.equation.invars)
    copies = [x for x in labels if isinstance(x, Copy)]
    # A sum with another argument is an average.
    numbers = {x.number for x in labels if isinstance(x, (Copy, From))}
    dtype = half_of(op.equation.outvars)
    if not copies or len(numbers) > 1 or dtype is None or op.location.differentiated:
        return None
    message = f"copies of parameters are changed in {dtype.name} after the FP32 masters are cast"
    fix = f"Change the FP32 masters instead, before {audit.findings.where(copies[0].op)}:\n"
    fix += "    master = jax.tree.map(change, master)"
    return ChangedCopy(op, message, fix)


@MISSING_MASTER.on_program
def report_changes(audit: Auditor, traced: Traced) -> None:
    """Reports changed copies that the step returns in place of its 16-bit parameters."""
    shapes = {(v.aval.shape, dtype_of(v)) for v in traced.variables if v.aval.size > 1}

    def is_average(var: Atom) -> bool:
        sums = [x for x in audit.flow.of(var) if isinstance(x, (From, Update))]
        return any(is_16bit(dtype_of(traced.variables[x.number])) for x in sums)

    outs = [v for v in traced.jaxpr.outvars if (v.aval.shape, dtype_of(v)) in shapes]
    results = [v for v in outs if is_literal(v) or not is_average(v)]
    audit.report(ChangedCopy, results, ", so that the masters do not have the change")
