"""Check of results that leave a model in 16 bits and are compared with other values."""

from __future__ import annotations

from jaxmp._audit._auditor import Auditor
from jaxmp._audit._checks import WARNING, Check
from jaxmp._audit._labels import ConditionalFinding, Logits, WideValue
from jaxmp._audit._program import OpOccurrence, dtype_of
from jaxmp._core._dtypes import FLOAT32, is_16bit
from jaxmp._core._jaxprs import FORWARD, Atom, is_literal, module_paths_of

ROUNDED_OUTPUT = Check(
    id="rounded_output",
    severity=WARNING,
    explanation="A model rounds the result of a matmul to 16 bits and returns it, and the loss"
    " subtracts it from other values: a return of 300 has steps of 2 in bfloat16, which the"
    " difference inherits.",
    fix="jaxmp.Rule('head', 'o=f32')",
)

# Distance between numbers around 300.
_STEPS = {"bfloat16": "2", "float16": "0.25"}


class RoundedOutput(ConditionalFinding, WideValue):
    """Label of a matmul's result that was rounded to 16 bits and cast to FP32.

    It is harmful if an operation outside of the model subtracts it from another value.
    """

    check = ROUNDED_OUTPUT


@ROUNDED_OUTPUT.on_operation("convert_element_type")
def label_output(op: OpOccurrence, audit: Auditor) -> RoundedOutput | None:
    """Labels a 16-bit result that is cast to FP32."""
    (operand,), (result,) = op.equation.invars, op.equation.outvars
    source = dtype_of(operand)
    is_cast = dtype_of(result) == FLOAT32 and source is not None and is_16bit(source)
    if not is_cast or op.location.phase != FORWARD:
        return None
    labels = audit.flow.of(operand)
    matmul = next((x.op for x in labels if isinstance(x, Logits) and not x.normalized), None)
    if matmul is None:
        return None
    path = module_paths_of(matmul.location.names)[0]
    fix = f"Return the FP32 sums of this layer:\n    jaxmp.Rule({path!r}, 'o=f32')"
    if not path:
        fix = "Return FP32 sums:\n    jnp.matmul(x, w, preferred_element_type=jnp.float32)"
    message = f"the result of the matmul is rounded to {source.name}"
    return RoundedOutput(matmul, message, fix)


@ROUNDED_OUTPUT.on_operation("sub")
def check_difference(op: OpOccurrence, audit: Auditor) -> None:
    """Reports a rounded result that is subtracted outside of the model that returned it."""
    if op.location.phase != FORWARD:
        return
    lhs, rhs = op.equation.invars
    for var, other in ((lhs, rhs), (rhs, lhs)):
        for label in audit.flow.of(var):
            if isinstance(label, RoundedOutput) and not is_literal(other):
                inside = label.op.location.names[:1]
                is_inside = bool(inside) and op.location.names[:1] == inside
                if not is_inside and not _shares(other, label, op, audit):
                    _report(label, op, audit)


def _report(label: RoundedOutput, op: OpOccurrence, audit: Auditor) -> None:
    dtype = label.message.rpartition(" ")[2]
    harm = (
        f", leaves the model, and is subtracted at {audit.findings.where(op)}: a value of 300 has"
        f" steps of {_STEPS[dtype]}"
    )
    label.report(harm, audit.findings)


def _shares(var: Atom, label: RoundedOutput, op: OpOccurrence, audit: Auditor) -> bool:
    """Returns True for a value that is computed from the same result, such as its mean."""
    waiting, seen = [var], set()
    while waiting:
        current = waiting.pop()
        if is_literal(current) or current in seen:
            continue
        seen.add(current)
        if label in audit.flow.of(current):
            return True
        maker = op.body.maker(current)
        waiting += () if maker is None else maker.invars
    return False
