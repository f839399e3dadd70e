"""Check of implicit promotions: JAX widens a 16-bit array because another operand is wider."""

from __future__ import annotations

import math
from types import CodeType

import numpy as np

from jaxmp._audit._auditor import Auditor
from jaxmp._audit._checks import ERROR, WARNING, Check
from jaxmp._audit._dataflow import GRADIENT
from jaxmp._audit._expressions import expression_of, narrowed, with_operand
from jaxmp._audit._labels import GATED, STREAM, ConditionalFinding, WideValue
from jaxmp._audit._pending import PendingFindings
from jaxmp._audit._program import OpOccurrence, dtype_of, is_internal_matmul, named
from jaxmp._audit._trace import Traced
from jaxmp._core._dtypes import FLOAT32, FLOAT64, is_16bit
from jaxmp._core._jaxprs import AUTOCAST, FORWARD, Atom, Equation, is_literal
from jaxmp._core._locations import call_site
from jaxmp._core._matmuls import Matmul
from jaxmp._core._programs._analysis import Body
from jaxmp._core._programs._operations import loop_of

IMPLICIT_PROMOTION = Check(
    id="implicit_promotion",
    severity=ERROR,
    explanation="A 16-bit array and an FP32 (or float64) array meet in an operation without an"
    " explicit cast, and the wide result is read by a matmul, promotes other 16-bit arrays, or is"
    " returned. A warning for a residual stream that is FP32 from the start.",
    fix="y = y.astype(x.dtype)",
)

_BINARY = named("add sub mul div max min pow rem atan2 select_n concatenate")
_BROADCASTS = named("broadcast_in_dim reshape")


class Promotion(ConditionalFinding, WideValue):
    """Label of the wide result of an implicit promotion.

    It is harmful if an FP32 matmul reads it, if it promotes another 16-bit array, or if the program
    returns it. A value that is cast back before that was promoted on purpose or at no cost.
    """

    check = IMPLICIT_PROMOTION


@IMPLICIT_PROMOTION.on_result("convert_element_type")
def check_promotion(op: OpOccurrence, audit: Auditor) -> None:
    """Labels a cast to a wider dtype that JAX inserted because the other operand is wider.

    JAX casts and computes in one call, at one line of the source. A cast that the user wrote is a
    call of its own, and casts by autocast have a name scope.
    """
    if AUTOCAST in str(op.equation.source_info.name_stack) or op.location.phase != FORWARD:
        return
    (operand,), (result,) = op.equation.invars, op.equation.outvars
    source, target = dtype_of(operand), dtype_of(result)
    if not _is_wider(source, target) or math.prod(operand.aval.shape) <= 1:
        return
    allowed = audit.context.allowed_dtypes(op.location)
    is_fp32_module = bool(allowed) and not any(is_16bit(dtype) for dtype in allowed)
    if GRADIENT in audit.flow.of(operand) or is_fp32_module:
        return
    size = math.prod(op.body.source_of(operand, _BROADCASTS).aval.shape)
    for reader in op.body.readers(result):
        # Promoting a small array, such as a bias beside an FP32 activation, costs nothing.
        if reader.primitive.name in _BINARY and 2 * size >= reader.outvars[0].aval.size:
            others = _wide_operands(reader, result, op)
            if others:
                _label_promotion(op, reader, others, audit)


@IMPLICIT_PROMOTION.on_matmul
def report_matmul(op: OpOccurrence, matmul: Matmul, flops: int, audit: Auditor) -> None:
    """Reports promotions that make a matmul wide; their fix is that of the matmul, too."""
    is_wide = bool({FLOAT32, FLOAT64} & {matmul.lhs, matmul.rhs})
    if not is_wide or op.location.phase != FORWARD or is_internal_matmul(op, matmul):
        return
    harm = f", and the matmul at {audit.findings.where(op)} ({op.name}) reads it"
    for label in audit.flow.of_all(op.equation.invars[:2]):
        if isinstance(label, Promotion):
            label.report(harm, audit.findings, flops)
            key = op.location.names, audit.findings.line_of(op)
            fix = f"{label.fix}\nThis is the promotion at {audit.findings.where(label.op)}."
            audit.promotion_fixes.setdefault(key, fix)


@IMPLICIT_PROMOTION.on_program
def report_results(audit: Auditor, traced: Traced) -> None:
    """Reports promotions of values that the program returns."""
    audit.report(Promotion, traced.jaxpr.outvars, ", and the program returns the wide result")


def promotion_fix(op: OpOccurrence, audit: Auditor) -> str:
    """Returns the fix of the promotion that makes a matmul or its gradient wide, or ""."""
    return audit.promotion_fixes.get((op.location.names, audit.findings.line_of(op)), "")


def _is_wider(source: np.dtype, target: np.dtype) -> bool:
    return (is_16bit(source) and target == FLOAT32) or (
        target == FLOAT64 and (is_16bit(source) or source == FLOAT32)
    )


def _label_promotion(
    op: OpOccurrence, reader: Equation, others: list[Atom], audit: Auditor
) -> None:
    (operand,), (result,) = op.equation.invars, op.equation.outvars
    source, target = dtype_of(operand).name, dtype_of(result).name
    here = op._replace(equation=reader)
    message = f"{source} {_symbol(reader)} {target} is computed in {target}"
    earlier = [label for label in audit.flow.of_all(others) if isinstance(label, Promotion)]
    if earlier:
        harm = f", and the result promotes another {source} array at {audit.findings.where(here)}"
        # Parts of one expression, such as `mean + noise * std`, are one promotion.
        own_line = _own_line(here, audit.findings)
        for promotion in earlier:
            if not own_line or _own_line(promotion.op, audit.findings) != own_line:
                promotion.report(harm, audit.findings)
    elif any(_is_gated(var, reader, op, audit) for var in others):
        audit.flow.mark(result, GATED)
    elif any(_is_stream(var, operand, op, audit) for var in others):
        audit.flow.mark(result, STREAM)
        index = next(n for n, var in enumerate(reader.invars) if var is not result)
        code = narrowed(expression_of(here, audit.findings), index, source)
        fix = f"Cast the stream at its start:\n    {code or f'x = x.astype(jnp.{source})'}"
        message = f"{message}: the residual stream or loop carry is {target} from its start."
        audit.add(IMPLICIT_PROMOTION, here, message, fix, severity=WARNING)
    else:
        fix = _fix_promotion(here, result, others, source, audit.findings)
        audit.flow.mark(result, Promotion(here, message, fix))


def _own_line(op: OpOccurrence, findings: PendingFindings) -> tuple[str, int] | None:
    """Returns the line of an operation that the user's own code calls; None for a library's."""
    return findings.line_of(op) if findings.is_own_call(op.equation) else None


def _fix_promotion(
    op: OpOccurrence, upcast: Atom, others: list[Atom], source: str, findings: PendingFindings
) -> str:
    if not findings.is_own_call(op.equation):
        return (
            f"Set dtype=jnp.{source} in the layer, or cast its result:\n"
            f"    y = y.astype(jnp.{source})"
        )
    literals = [var for var in others if is_literal(var)]
    index = next(n for n, var in enumerate(op.equation.invars) if var is not upcast)
    if literals:
        number = str(float(literals[0].val))
        return (
            "Replace the array or NumPy number by a Python number, which does not promote:\n"
            f"    {with_operand(expression_of(op, findings), index, number) or number}"
        )
    code = narrowed(expression_of(op, findings), index, source)
    return f"Cast the wide operand:\n    {code or f'y = y.astype(jnp.{source})'}"


# ---------------------------------------------------------------------------
# Residual streams and carries
# ---------------------------------------------------------------------------


def _is_stream(var: Atom, operand: Atom, op: OpOccurrence, audit: Auditor) -> bool:
    """Returns True for a wide value, such as a residual stream, that `operand` is added to."""
    if STREAM in audit.flow.of(var) or _is_carry(var, op):
        return True
    is_other = operand is not var and not is_literal(var)
    return is_other and var in op.body.sources([operand])


def _is_gated(var: Atom, reader: Equation, op: OpOccurrence, audit: Auditor) -> bool:
    """Returns True for the FP32 state of a recurrence, such as an LSTM's, times a 16-bit gate."""
    is_product = reader.primitive.name == "mul" and _is_carry(var, op)
    return is_product or GATED in audit.flow.of(var)


def _is_carry(var: Atom, op: OpOccurrence) -> bool:
    """Returns True for a carry of the enclosing loop."""
    loop = None if op.outer is None or is_literal(var) else loop_of(op.outer.equation)
    return loop is not None and any(var is each for each in loop.incoming)


# ---------------------------------------------------------------------------
# Operands
# ---------------------------------------------------------------------------


def _symbol(equation: Equation) -> str:
    return {"add": "+", "sub": "-", "mul": "*", "div": "/"}.get(equation.primitive.name, "and")


def _wide_operands(reader: Equation, upcast: Atom, op: OpOccurrence) -> list[Atom]:
    """Returns the wide operands because of which JAX promotes `upcast`, before broadcasts."""
    call = call_site(op.equation)
    if call != call_site(reader) or not (call or _is_where(op)):
        return []
    wide = dtype_of(upcast)
    others = [var for var in reader.invars if var is not upcast and dtype_of(var) == wide]
    if any(_is_of_call(var, call, op.body) for var in others):
        return []
    return [op.body.source_of(var, _BROADCASTS) for var in others]


def _is_where(op: OpOccurrence) -> bool:
    """Returns True inside of `jnp.where`, whose only casts are promotions."""
    return op.caller == "_where"


def _is_of_call(var: Atom, call: tuple[CodeType, int] | None, body: Body) -> bool:
    """Returns True if the same call made an operand: then the call widens on purpose."""
    maker = body.maker_through(var, _BROADCASTS)
    return maker is not None and call is not None and call_site(maker) == call
