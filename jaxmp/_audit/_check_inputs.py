"""Check of arguments, such as time steps, that are rounded before a sine or cosine."""

from __future__ import annotations

from jaxmp._audit._auditor import Auditor
from jaxmp._audit._checks import ERROR, Check
from jaxmp._audit._expressions import fix_operation
from jaxmp._audit._labels import RoundedInput
from jaxmp._audit._program import OpOccurrence
from jaxmp._core._jaxprs import FORWARD, module_paths_of

ROUNDED_INPUT = Check(
    id="rounded_input",
    severity=ERROR,
    explanation="An FP32 argument is rounded to 16 bits before its sine or cosine is computed: a"
    " time step of 257 becomes 256 in bfloat16.",
    fix="jaxmp.Rule('', keep_inputs=['t'])",
)


@ROUNDED_INPUT.on_operation("sin", "cos", "tan")
def check_rounding(op: OpOccurrence, audit: Auditor) -> None:
    """Reports a periodic function of an argument that was rounded to 16 bits."""
    for label in _rounded(op, audit) if op.location.phase == FORWARD else ():
        source, dtype = label.input, label.dtype
        example = "257 becomes 256" if dtype == "bfloat16" else "2049 becomes 2048"
        message = f"argument {source.location} is rounded to {dtype} before {op.name}: {example}."
        fix = _keep_input(source.name, dtype, op) or fix_operation(op, audit.findings, dtype)
        audit.add(ROUNDED_INPUT, op, message, fix)


def is_rounded(op: OpOccurrence, audit: Auditor) -> bool:
    """Returns True if an argument was rounded to 16 bits before a periodic function."""
    return op.name in ("sin", "cos", "tan") and bool(_rounded(op, audit))


def _rounded(op: OpOccurrence, audit: Auditor) -> list[RoundedInput]:
    labels = audit.flow.of(op.equation.invars[0])
    return [label for label in labels if isinstance(label, RoundedInput)]


def _keep_input(name: str, dtype: str, op: OpOccurrence) -> str:
    """Returns the rules that keep an argument in FP32 where a module computes its sine.

    Returns:
      "" outside of modules, where no policy casts the argument.
    """
    if not op.location.names:
        return ""
    path = module_paths_of(op.location.names)[0]
    parts = []
    if name != "NAME":
        keep = f"    Rule('', keep_inputs=[{name!r}])"
        parts.append(f"Keep the argument by a rule with its name in the model's __call__:\n{keep}")
    if path:
        start = "Also compute" if parts else "Compute"
        parts.append(f"{start} this module in FP32:\n    Rule({path!r}, 'c=f32,o={dtype}')")
    return "\n".join(parts)
