"""Check of FP32 tables whose rows are cast to 16 bits after the lookup."""

from __future__ import annotations

import math

from jaxmp._audit._auditor import Auditor
from jaxmp._audit._checks import WARNING, Check
from jaxmp._audit._dataflow import From
from jaxmp._audit._expressions import expression_of, narrowed
from jaxmp._audit._labels import Fact
from jaxmp._audit._program import LAYOUT, OpOccurrence, dtype_of, named
from jaxmp._core._dtypes import FLOAT32, is_16bit
from jaxmp._core._jaxprs import FORWARD
from jaxmp._report._units import bytes_text

WIDE_GATHER = Check(
    id="wide_gather",
    severity=WARNING,
    explanation="More rows of an FP32 table are looked up than it has, and they are cast to 16 bits"
    " afterwards. To cast the table first moves fewer bytes.",
    fix="x = table.astype(jnp.bfloat16)[tokens]",
)


class Rows(Fact):
    """Label of the rows that were looked up in an FP32 parameter."""

    survives = LAYOUT | named("select_n")

    def __init__(self, op: OpOccurrence) -> None:
        self.op = op


@WIDE_GATHER.on_operation("gather")
def label_rows(op: OpOccurrence, audit: Auditor) -> Rows | None:
    """Labels rows of an FP32 argument."""
    table = op.equation.invars[0]
    is_argument = any(isinstance(label, From) for label in audit.flow.of(table))
    is_lookup = dtype_of(table) == FLOAT32 and is_argument and op.location.differentiated
    return Rows(op) if is_lookup and op.location.phase == FORWARD else None


@WIDE_GATHER.on_operation("convert_element_type")
def check_cast(op: OpOccurrence, audit: Auditor) -> None:
    """Reports looked-up rows that are cast to 16 bits, if to cast the table moves fewer bytes."""
    (operand,), (result,) = op.equation.invars, op.equation.outvars
    dtype = dtype_of(result)
    if not is_16bit(dtype):
        return
    for label in audit.flow.of(operand):
        if not isinstance(label, Rows):
            continue
        table = label.op.equation.invars[0].aval
        # The lookup reads and writes FP32 or 16 bits; the cast reads FP32 and writes 16 bits.
        after = 14 * math.prod(result.aval.shape)
        before = 6 * math.prod(table.shape) + 4 * math.prod(result.aval.shape)
        if before < after:
            message = (
                f"the lookup moves {bytes_text(after)} in FP32 and casts the rows to {dtype.name};"
                f" to cast the table first moves {bytes_text(before)}."
            )
            code = narrowed(expression_of(label.op, audit.findings), 0, dtype.name)
            if not audit.findings.is_own_call(label.op.equation):
                code = f"dtype=jnp.{dtype.name}"
            code = code or f"x = table.astype(jnp.{dtype.name})[tokens]"
            fix = f"Cast the table before the lookup:\n    {code}"
            audit.add(WIDE_GATHER, label.op, message, fix)
