"""Checks of matmuls in FP8: where the policies require it, and in compiled programs."""

from __future__ import annotations

import math
from collections.abc import Iterator

from jaxmp._audit._auditor import Auditor
from jaxmp._audit._check_hlo import CompiledProgram, finding
from jaxmp._audit._checks import ERROR, WARNING, Check
from jaxmp._audit._program import OpOccurrence
from jaxmp._audit._rows import Finding
from jaxmp._core._dtypes import is_16bit
from jaxmp._core._jaxprs import FORWARD, QUANTIZE
from jaxmp._core._matmuls import Matmul
from jaxmp._core._programs._operations import dot_of, name_of
from jaxmp.fp8._explain import explain_exclusion
from jaxmp.fp8._scaling import CurrentScaling

NOT_FP8 = Check(
    id="not_fp8",
    severity=WARNING,
    explanation="A linear layer multiplies in 16 bits where the policies require FP8, because its"
    " dimensions are not multiples of 16, because it is too narrow for a gain, or because FP8 is"
    " not applied to it.",
    fix="jaxmp.Rule('**/head', 'matmul=default')",
)
FP8_FALLBACK = Check(
    id="fp8_fallback",
    severity=ERROR,
    explanation="Operands are rounded to FP8 but multiplied in a wider dtype. FP8 matmuls require"
    " an H100 or a later GPU.",
    fix="y = jax.lax.dot_general(x_fp8, w_fp8, dimension_numbers)",
    needs_target="yes",
)


@NOT_FP8.on_matmul
def check_layers(op: OpOccurrence, matmul: Matmul, flops: int, audit: Auditor) -> None:
    """Reports a linear layer in 16 bits for which the policies require FP8."""
    operands = op.equation.invars[:2]
    if op.name != "dot_general" or op.location.phase != FORWARD:
        return
    (_, contracted), (_, batch), *_ = dot_of(op.equation)
    # Batched matmuls belong to attention or to stacked kernels, not to linear layers.
    if batch or not (is_16bit(matmul.lhs) and is_16bit(matmul.rhs)):
        return
    if audit.context.policies is None or not audit.context.requires_fp8(op.location):
        return
    shape = operands[1].aval.shape
    inputs = math.prod(shape[axis] for axis in contracted)
    sizes = inputs, math.prod(shape) // max(inputs, 1)
    scaling = audit.context.policies.fp8 or CurrentScaling()
    reason = explain_exclusion(*sizes, scaling, audit.context.target) if all(sizes) else ""
    message = f"{op.name} of {matmul.lhs.name}, but the policies require FP8: "
    message += reason or "the matmul is not that of a Flax layer, or the layer sets its own"
    module = "/".join(op.location.names[-1:]) or "module"
    fix = "Exclude the module by a rule:\n"
    fix += f"    jaxmp.Rule('**/{module}', 'matmul=default')"
    if "narrow" in reason or "min_width" in reason:
        toml = "    [fp8]\n    min_width = 0"
        fix = f"Use FP8 for narrow layers, too, in the recipe file:\n{toml}\n{fix}"
    audit.add(NOT_FP8, op, f"{message}.", fix, flops=flops)


# A note and not a warning, because there is nothing to correct.
_ONE_SCALE = (
    "FP8 matmuls have one scale for a tensor, so that results can depend on the other examples of"
    " the batch and on later tokens; with fp8.RowwiseScaling(), each row has a separate scale"
)


@NOT_FP8.on_operation("jit")
def note_scales(op: OpOccurrence, audit: Auditor) -> None:
    """Notes once in a program that tensors are quantized with one scale."""
    is_quantization = name_of(op.equation).startswith(QUANTIZE)
    if is_quantization and any(var.aval.shape == () for var in op.equation.outvars):
        audit.notes[_ONE_SCALE] = None


@FP8_FALLBACK.on_compiled
def check_fallback(program: CompiledProgram, audit: Auditor) -> Iterator[Finding]:
    """Reports matmuls of FP8 values in a wider dtype."""
    del audit
    for row in program.rows.gemms:
        line = row.module, row.phase, row.file, row.line
        dtype = row.was_fp8 or program.fp8.get(line, "")
        is_fp8 = row.lhs.startswith("float8") and row.rhs.startswith("float8")
        if dtype and not is_fp8:
            message = f"operands are rounded to {dtype} and multiplied in {row.lhs} x {row.rhs}."
            yield finding(FP8_FALLBACK, row, message)
