"""Checks of the operand dtypes and sizes of matmuls and convolutions."""

from __future__ import annotations

import ast
import math
from typing import NamedTuple

import jax.numpy as jnp

from jaxmp._audit._auditor import Auditor
from jaxmp._audit._check_promotions import promotion_fix
from jaxmp._audit._checks import ERROR, WARNING, Check
from jaxmp._audit._expressions import expression_of, narrowed
from jaxmp._audit._labels import WAS_16_BITS, FloatInput, RoundedInput
from jaxmp._audit._pending import PendingFinding
from jaxmp._audit._program import FLOATS, OpOccurrence, dtype_of, is_internal_matmul, named
from jaxmp._audit._trace import Traced
from jaxmp._core._dtypes import CASTABLE, FLOAT32, FLOAT64, is_16bit
from jaxmp._core._jaxprs import FORWARD
from jaxmp._core._locations import FULL_PRECISION, call_site
from jaxmp._core._matmuls import Matmul, multiple_of, padded
from jaxmp._core._programs._operations import arithmetic_of
from jaxmp._report._units import bytes_text

FP32_MATMUL = Check(
    id="fp32_matmul",
    severity=ERROR,
    explanation="A matmul or convolution reads FP32 where the policies require 16 bits. Without"
    " policies: it reads FP32 that was cast up from 16 bits.",
    fix="model = jaxmp.load_recipe('bf16').wrap(model)\nfn = jaxmp.autocast(fn, 'bf16')",
)
OFF_POLICY_MATMUL = Check(
    id="off_policy_matmul",
    severity=ERROR,
    explanation="A matmul or convolution reads a 16-bit dtype that the policies do not allow for"
    " its module.",
    fix="model = jaxmp.load_recipe('bf16').wrap(model)",
)
MIXED_OPERANDS = Check(
    id="mixed_operands",
    severity=ERROR,
    explanation="The operands of a matmul or convolution have two dtypes, so it runs in the wider"
    " one.",
    fix="y = y.astype(x.dtype)",
)
MISALIGNED_MATMUL = Check(
    id="misaligned_matmul",
    severity=ERROR,
    explanation="A dimension of a matmul is not a multiple of 16 bytes (8 elements in 16 bits, 4 in"
    " FP32, 16 in FP8). A warning if padding costs more than a quarter, or if the matmul has less"
    " than 1 % of all FLOPs.",
    fix="width = -(-width // 8) * 8",
)

# Primitives between a user's cast and the matmul that reads it.
_MOVES = named("reshape broadcast_in_dim squeeze expand_dims transpose mul div")


# ---------------------------------------------------------------------------
# Dtypes
# ---------------------------------------------------------------------------


@MIXED_OPERANDS.on_matmul
def check_operands(op: OpOccurrence, matmul: Matmul, flops: int, audit: Auditor) -> None:
    """Reports operands of two dtypes."""
    dtypes = matmul.lhs, matmul.rhs
    if dtypes[0] == dtypes[1] or is_internal_matmul(op, matmul) or not FLOATS & set(dtypes):
        return
    narrow, wide = sorted(dtypes, key=lambda dtype: dtype.itemsize)
    message = f"{op.name} of {dtypes[0].name} and {dtypes[1].name} runs in {wide.name}."
    index = dtypes.index(wide)
    code = narrowed(expression_of(op, audit.findings), index, narrow.name)
    fix = f"Cast the wide operand:\n    {code or f'y = y.astype(jnp.{narrow.name})'}"
    if op.location.phase != FORWARD:
        # The cotangent of a matmul with a wider preferred_element_type is wide. Its FP32 result is
        # worth keeping, for a log-softmax in particular.
        fix = "Keep the FP32 result, and let autocast multiply its gradient in 16 bits:\n"
        fix += f"    {audit.context.loss_code}"
    elif code:
        # The gradients of this matmul are as wide.
        key = op.location.names, audit.findings.line_of(op)
        audit.promotion_fixes.setdefault(key, fix)
    fix = promotion_fix(op, audit) or fix
    _add(MIXED_OPERANDS, op, message, fix, flops, audit)


@FP32_MATMUL.on_matmul
def check_fp32(op: OpOccurrence, matmul: Matmul, flops: int, audit: Auditor) -> None:
    """Reports FP32 operands where 16 bits are required, or where they were 16 bits before."""
    if not (matmul.lhs == matmul.rhs == FLOAT32) or is_internal_matmul(op, matmul):
        return
    allowed = audit.context.allowed_dtypes(op.location)
    if not allowed:
        _check_upcast(op, flops, audit)
    elif FLOAT32 not in allowed:
        _report_fp32(op, min(dtype.name for dtype in allowed), flops, audit)


@OFF_POLICY_MATMUL.on_matmul
def check_policy(op: OpOccurrence, matmul: Matmul, flops: int, audit: Auditor) -> None:
    """Reports a 16-bit dtype that the policies do not allow."""
    dtype, allowed = matmul.lhs, audit.context.allowed_dtypes(op.location)
    if dtype != matmul.rhs or dtype == FLOAT32 or dtype not in CASTABLE:
        return
    if not allowed or dtype in allowed or is_internal_matmul(op, matmul):
        return
    names = " or ".join(sorted(dtype.name for dtype in allowed))
    message = f"{op.name} of {dtype.name}, but the policies require {names}."
    fix = f"Remove casts by hand, and apply the policies:\n    {_policy_code(op, audit)}"
    audit.add(OFF_POLICY_MATMUL, op, message, fix, flops=flops)


@FP32_MATMUL.on_program
def suggest_autocast(audit: Auditor, traced: Traced) -> None:
    """Replaces the fix where the model is wrapped already, and wrapping does not reach a matmul."""
    del traced
    rows = audit.matmuls
    if any(names and is_16bit(jnp.dtype(lhs)) for names, _, lhs, _ in rows):
        for finding in audit.findings:
            if finding.check in (FP32_MATMUL, OFF_POLICY_MATMUL):
                context = audit.context
                finding.fix = finding.fix.replace(context.wrap_code, context.autocast_code)


class _Moved(NamedTuple):
    """Bytes that a matmul reads and writes, and its finding."""

    size: int
    finding: PendingFinding | None = None


@FP32_MATMUL.on_matmul
def collect_bytes(op: OpOccurrence, matmul: Matmul, flops: int, audit: Auditor) -> None:
    """Collects the bytes of all matmuls."""
    del matmul, flops
    audit.collected[_Moved].append(_Moved(_bytes(op)))


@FP32_MATMUL.on_program
def report_bytes(audit: Auditor, traced: Traced) -> None:
    """Adds the share of bytes to the messages about matmuls that leave 16 bits."""
    del traced
    rows = audit.collected[_Moved]
    total = sum(row.size for row in rows if row.finding is None)
    for finding in {id(row.finding): row.finding for row in rows if row.finding}.values():
        size = sum(row.size for row in rows if row.finding is finding)
        share = f"{bytes_text(size)}, {size / total:.0%} of the bytes of all matmuls"
        finding.message = f"{finding.message.removesuffix('.')}; it moves {share}."


def _add(
    check: Check,
    op: OpOccurrence,
    message: str,
    fix: str,
    flops: int,
    audit: Auditor,
    severity: str = "",
) -> None:
    finding = audit.add(check, op, message, fix, severity=severity, flops=flops)
    audit.collected[_Moved].append(_Moved(_bytes(op), finding))


def _bytes(op: OpOccurrence) -> int:
    avals = [var.aval for var in (*op.equation.invars[:2], *op.equation.outvars)]
    return op.times * sum(math.prod(aval.shape) * aval.dtype.itemsize for aval in avals)


def _check_upcast(op: OpOccurrence, flops: int, audit: Auditor) -> None:
    if FULL_PRECISION in op.location.names:
        return
    if WAS_16_BITS in audit.flow.of_all(op.equation.invars[:2]):
        message = f"{op.name} of float32, and an operand was cast up from 16 bits."
        fix = promotion_fix(op, audit) or _fix_cast(op, audit) or _policy_code(op, audit)
        _add(FP32_MATMUL, op, message, fix, flops, audit)


def _report_fp32(op: OpOccurrence, required: str, flops: int, audit: Auditor) -> None:
    options = arithmetic_of(op.equation)
    is_highest = options is not None and options.is_highest
    message = f"{op.name} of float32, but the policies require {required}"
    message += "; the code sets precision=HIGHEST." if is_highest else "."
    fix = promotion_fix(op, audit) or _fix_cast(op, audit)
    if op.location.names and not promotion_fix(op, audit):
        module = op.location.names[-1].partition(".")[0]
        fix = fix or f"Apply the policies:\n    {_policy_code(op, audit)}"
        fix += f"\nOr keep the module in FP32 by a rule:\n    jaxmp.Rule('**/{module}', 'c=f32')"
    severity = WARNING if is_highest else ERROR
    fix = fix or _policy_code(op, audit)
    _add(FP32_MATMUL, op, message, fix, flops, audit, severity)


def _policy_code(op: OpOccurrence, audit: Auditor) -> str:
    """Returns code that applies the policies to a matmul.

    If no matmul of a module is in low precision, the model is not wrapped. Otherwise the layer
    casts its operands itself, or the matmul is outside of layers, and only autocast reaches it.
    """
    return audit.context.wrap_code if op.location.names else audit.context.autocast_code


def _fix_cast(op: OpOccurrence, audit: Auditor) -> str:
    """Returns a fix of the user's own cast to FP32 that an operand comes from; "" without one."""
    for var in op.equation.invars[:2]:
        maker = op.body.maker_through(var, _MOVES)
        if maker is None or maker.primitive.name != "convert_element_type":
            continue
        source = dtype_of(maker.invars[0])
        if not is_16bit(source) or not audit.findings.is_own_call(maker):
            continue
        if call_site(maker) == call_site(op.equation):
            return f"Cast the other operand:\n    w = w.astype(jnp.{source.name})"
        cast = op._replace(equation=maker)
        expression = expression_of(cast, audit.findings)
        if isinstance(expression, ast.Call) and isinstance(expression.func, ast.Attribute):
            code, array = ast.unparse(expression), ast.unparse(expression.func.value)
            where = audit.findings.where(cast)
            return f"At {where}, replace {code} by:\n    {array}.astype(jnp.{source.name})"
    return ""


# ---------------------------------------------------------------------------
# Sizes
# ---------------------------------------------------------------------------


@MISALIGNED_MATMUL.on_matmul
def check_sizes(op: OpOccurrence, matmul: Matmul, flops: int, audit: Auditor) -> None:
    """Reports innermost dimensions that are not multiples of 16 bytes."""
    multiple = multiple_of(matmul.lhs) if matmul.lhs != FLOAT64 else 1
    sizes = {role: size for role, size in matmul.widths.items() if size % multiple}
    if not sizes:
        return
    paddings = {role: padded(size, multiple) for role, size in sizes.items()}
    text = ", ".join(f"{role} = {size} (pad to {paddings[role]})" for role, size in sizes.items())
    cost = max(paddings[role] / size for role, size in sizes.items()) - 1
    is_worthwhile = any(paddings[role] <= 1.25 * size for role, size in sizes.items())
    plural = "is not a multiple" if len(sizes) == 1 else "are not multiples"
    message = f"{text} {plural} of {multiple}; padding costs {cost:.1%}."
    widths = sorted(set(paddings.values()))
    fix = _fix_weight(op, sizes, multiple, audit)
    fix = fix or "Round the width of the layer up:" + "".join(f"\n    width = {n}" for n in widths)
    severity = ERROR if is_worthwhile else WARNING
    audit.add(MISALIGNED_MATMUL, op, message, fix, severity=severity, flops=flops)


def _fix_weight(op: OpOccurrence, sizes: dict[str, int], multiple: int, audit: Auditor) -> str:
    """Returns the shape of the argument from which a matmul outside of modules reads its weight."""
    for var in op.equation.invars[:2] if not op.location.names else ():
        for label in audit.flow.of(var):
            source = label.input if isinstance(label, RoundedInput) else label
            shape = var.aval.shape
            if isinstance(source, FloatInput) and set(shape) & set(sizes.values()):
                new = tuple(padded(n, multiple) if n in sizes.values() else n for n in shape)
                text = f"Make the argument {source.location} with another shape than {shape}:"
                return f"{text}\n    {new}"
    return ""
