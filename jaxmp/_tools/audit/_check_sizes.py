"""Check of the widths of matmuls."""

from __future__ import annotations

import math
from typing import NamedTuple

from jaxmp._core import _dtypes
from jaxmp._programs import _matmuls, _uses
from jaxmp._tools.audit._auditor import Auditor
from jaxmp._tools.audit._checks import NOTE, Check, OpOccurrence

MISALIGNED_MATMUL = Check(
    id="misaligned_matmul",
    severity=NOTE,
    explanation="A dimension of a matmul is not a multiple of 16 bytes (8 elements in 16 bits, 4 in"
    " FP32, 16 in FP8). An error if the padding of larger dimensions costs a quarter of all FLOPs.",
    fix="width = -(-width // 8) * 8",
)


@MISALIGNED_MATMUL.on_matmul
def check_sizes(op: OpOccurrence, matmul: _matmuls.Matmul, flops: int, audit: Auditor) -> None:
    """Reports innermost dimensions that are not multiples of 16 bytes."""
    # A step that does not follow its policies yet is padded for their dtype.
    allowed = audit.context.allowed_dtypes(op.location)
    dtype = min((matmul.lhs, *allowed), key=lambda dtype: dtype.itemsize)
    multiple = _matmuls.multiple_of(dtype) if matmul.lhs != _dtypes.FLOAT64 else 1
    sizes = {role: size for role, size in matmul.widths.items() if size % multiple}
    if not sizes:
        return
    paddings = {role: _matmuls.padded(size, multiple) for role, size in sizes.items()}
    text = ", ".join(f"{role} = {size} (pad to {paddings[role]})" for role, size in sizes.items())
    cost = math.prod(paddings[role] / size for role, size in sizes.items()) - 1
    plural = "is not a multiple" if len(sizes) == 1 else "are not multiples"
    message = f"{text} {plural} of {multiple}; padding costs {cost:.1%}."
    classes = _classes_of(op, audit)
    if [*sizes.values()] == [classes]:
        fix = _fix_classes(classes, *paddings.values())
    else:
        fix = "Round the width up, unless it is one of the data, such as a number of channels:"
        fix += "".join(f"\n    width = {n}" for n in sorted(set(paddings.values())))
    finding = audit.add(MISALIGNED_MATMUL, op, message, fix, flops=flops)
    if classes:
        audit.collected[_Classes].append(_Classes(audit.findings.line_of(op), classes))
    # Smaller sizes, such as three channels or one output, are those of the data, as are classes.
    is_data = lambda n: n < multiple or _Classes(finding.line, n) in audit.collected[_Classes]
    waste = math.prod(paddings[role] / n for role, n in sizes.items() if not is_data(n)) - 1
    finding.add_harm(round(waste * flops))


class _Classes(NamedTuple):
    """Line of a matmul of logits, and the number of classes."""

    line: tuple[str, int]
    classes: int


def _classes_of(op: OpOccurrence, audit: Auditor) -> int:
    """Returns the number of classes of a matmul of logits; 0 for other matmuls."""
    result = op.result
    is_head = bool(audit.use_of(result) & (_uses.Use.SOFTMAX | _uses.Use.ORDER))
    return result.aval.shape[-1] if is_head and op.is_forward else 0


def _fix_classes(classes: int, width: int) -> str:
    """Returns the fix of a head whose number of classes is not aligned."""
    masked = f"jnp.where(jnp.arange({width}) < {classes}, logits, jnp.finfo(logits.dtype).min)"
    return (
        f"{classes} is the number of classes, and may stay as it is. To align it, compute {width}"
        f" logits, and mask those without a class:\n    logits = {masked}"
    )
