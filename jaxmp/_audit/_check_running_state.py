"""Checks of state that a step updates in 16 bits, and of changes that the FP32 masters miss."""

from __future__ import annotations

from collections.abc import Iterator

import jax.tree_util as jtu

from jaxmp._audit._auditor import Auditor
from jaxmp._audit._check_ops import ACCUMULATOR_16BIT
from jaxmp._audit._check_state import MISSING_MASTER, step_of
from jaxmp._audit._dataflow import PLUS, From, Update
from jaxmp._audit._labels import ConditionalFinding, Fact
from jaxmp._audit._program import LAYOUT, OpOccurrence, dtype_of, half_of, named
from jaxmp._audit._rows import Finding
from jaxmp._audit._trace import Traced
from jaxmp._core._dtypes import FLOAT32, is_16bit
from jaxmp._core._jaxprs import Atom, is_literal

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
        for label in audit.flow.of(operand):
            if isinstance(label, Update) and label.has_gradient and operand.aval.size > 1:
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
    shapes = {(v.aval.shape, dtype_of(v)) for v in traced.variables.values() if v.aval.size > 1}
    arguments = traced.jaxpr.invars

    def is_average(var: Atom) -> bool:
        sums = [x for x in audit.flow.of(var) if isinstance(x, (From, Update))]
        return any(is_16bit(dtype_of(arguments[x.number])) for x in sums)

    outs = [v for v in traced.jaxpr.outvars if (v.aval.shape, dtype_of(v)) in shapes]
    results = [v for v in outs if is_literal(v) or not is_average(v)]
    audit.report(ChangedCopy, results, ", so that the masters do not have the change")
