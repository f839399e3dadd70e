"""Check of results that leave a model in 16 bits and are compared with other values."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jaxmp._audit._auditor import Auditor
from jaxmp._audit._checks import WARNING, Check
from jaxmp._audit._expressions import expression_of, with_accumulator
from jaxmp._audit._labels import ConditionalFinding, Logits, WideValue
from jaxmp._audit._program import LAYOUT, OpOccurrence, dtype_of, named
from jaxmp._core._dtypes import FLOAT32
from jaxmp._core._jaxprs import FORWARD, Atom, is_literal, module_paths_of

ROUNDED_OUTPUT = Check(
    id="rounded_output",
    severity=WARNING,
    explanation="A model rounds the result of a matmul to 16 bits and returns it, and the loss"
    " subtracts it from other values: a return of 300 has steps of 2 in bfloat16, which the"
    " difference inherits.",
    fix="jaxmp.Rule('head', 'o=f32')",
)

# Dtype -> the distance between its numbers from 256 to 512.
_STEPS = {np.dtype(jnp.bfloat16): 2, np.dtype(jnp.float16): 0.25}


class RoundedOutput(ConditionalFinding, WideValue):
    """Label of a matmul's result that was rounded to 16 bits and cast to FP32.

    It is harmful if an operation outside of the model subtracts it from another value.
    """

    check = ROUNDED_OUTPUT
    survives = LAYOUT | named("slice gather dynamic_slice select_n split concatenate mul div add")


@ROUNDED_OUTPUT.on_operation("convert_element_type")
def label_output(op: OpOccurrence, audit: Auditor) -> RoundedOutput | None:
    """Labels a 16-bit result that is cast to FP32."""
    source, labels = dtype_of(op.equation.invars[0]), audit.flow.of(op.equation.invars[0])
    matmul = next((x.op for x in labels if isinstance(x, Logits) and not x.normalized), None)
    is_cast = source in _STEPS and dtype_of(op.equation.outvars[0]) == FLOAT32
    if matmul is None or not is_cast or op.location.phase != FORWARD:
        return None
    names, context = matmul.location.names, audit.context
    path = module_paths_of(names)[0]
    fix = f"Return the FP32 sums of this layer:\n    jaxmp.Rule({path!r}, 'o=f32')"
    # The rule does not help where a policy returns FP32 already, but does not reach the layer.
    has_rule = context.policies is not None and context.resolve(names).wide_output is not None
    if not path or has_rule:
        code = with_accumulator(expression_of(matmul, audit.findings), "float32")
        code = code or "jnp.matmul(x, w, preferred_element_type=jnp.float32)"
        fix = f"Return FP32 sums:\n    {code}"
    message = f"the result is rounded to {source.name}, with steps of {_STEPS[source]} around 300"
    return RoundedOutput(matmul, message, fix)


@ROUNDED_OUTPUT.on_operation("sub")
def check_difference(op: OpOccurrence, audit: Auditor) -> None:
    """Reports a rounded result that is subtracted outside of the model that returned it."""
    lhs, rhs = op.equation.invars
    for var, other in ((lhs, rhs), (rhs, lhs)):
        labels = [label for label in audit.flow.of(var) if isinstance(label, RoundedOutput)]
        for label in labels if op.location.phase == FORWARD else ():
            root = label.op.location.names[:1]
            is_inside = bool(root) and op.location.names[:1] == root
            is_constant = is_literal(other) or audit.known.value(other) is not None
            if not (is_constant or is_inside or _depends(other, label, op, audit)):
                harm = f"; it leaves the model and is subtracted at {audit.findings.where(op)}"
                label.report(harm, audit.findings)


def _depends(var: Atom, label: RoundedOutput, op: OpOccurrence, audit: Auditor) -> bool:
    """Returns True for a value that is computed from the same result, such as its mean."""
    labels = audit.flow.of_all(op.body.sources([var]))
    made = (x.op.equation for x in labels if isinstance(x, (RoundedOutput, Logits)))
    return any(equation is label.op.equation for equation in made)
