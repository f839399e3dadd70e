"""Checks of float16: values beyond its range, and gradients that a loss scale multiplies."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from jaxmp import _core, _programs
from jaxmp._tools.audit import _auditor, _check_ops, _checks, _dataflow, _origins, _rows
from jaxmp._tools.audit._dataflow import GRADIENT, From, constant, is_argument, powers_of
from jaxmp._tools.audit._labels import ConditionalFinding, Logits
from jaxmp._tools.fixes._rewrite import scaled, with_finite_numbers

FLOAT16_RANGE = _checks.Check(
    id="float16_range",
    explanation="A value leaves the range of float16: an epsilon below 3e-8 is 0 before a division,"
    " logarithm or root; a finite constant beyond 65504 is infinite; squares that are summed"
    " overflow from 256 on; attention multiplies queries and keys before it scales them; values are"
    " cast from bfloat16 to float16 and back; integer sums are cast before they are scaled; or the"
    " gradient of a product of weights is rounded.",
    fix="x = x.astype(jnp.float32)",
    includes_optimizer=True,
)

_LARGEST = 65504
# The factor of head size 8; smaller ones scale the logits of attention.
_ATTENTION_SCALE = 8**-0.5


class LostEpsilon(ConditionalFinding):
    """Label of a float16 value to which an epsilon was added that is 0 in float16."""

    check, survives = FLOAT16_RANGE, _checks.LAYOUT | _core.named("sqrt")


class Square(ConditionalFinding):
    """Label of the square of a float16 value."""

    check, survives = FLOAT16_RANGE, _checks.LAYOUT | _core.named("mul div")


class UnscaledLogits(ConditionalFinding):
    """Label of float16 logits that were scaled after their matmul."""

    check, survives = FLOAT16_RANGE, _checks.LAYOUT | _core.named("sub add select_n max")


class OtherFormat(ConditionalFinding):
    """Label of a value that was cast from one 16-bit format to the other."""

    check = FLOAT16_RANGE


# ---------------------------------------------------------------------------
# Constants
# ---------------------------------------------------------------------------


@FLOAT16_RANGE.on_operation("add", "add_any", "max", passes=_checks.NOT_BACKWARD)
def label_epsilon(op: _checks.OpOccurrence) -> LostEpsilon | None:
    """Labels the sum with, or the maximum of, a value and a constant 0."""
    is_zero = any(constant(var, op) == 0 for var in _float16_operands(op))
    message = f"the constant of this {op.name} is 0 in float16, whose least number is 6e-8"
    fix = "Add the constant in FP32:\n    x = x.astype(jnp.float32)"
    return LostEpsilon(op, message, fix) if is_zero else None


@FLOAT16_RANGE.on_operation("div", "log", "rsqrt", "sqrt", "pow", passes=_checks.NOT_BACKWARD)
def report_epsilon(op: _checks.OpOccurrence) -> None:
    """Reports an epsilon of 0 where 0 has no finite result."""
    divisor = op.operands[-1:] if op.name == "div" else op.operands[:1]
    for label in op.labels(LostEpsilon, *divisor):
        fix = _origins.fix_operation(op, "float16", _origins.SUMS, label.op) or label.fix
        label.fix = fix.replace("Compute", f"At {op.where}, compute")
    op.audit.report(LostEpsilon, divisor, f", and the {op.name} at {op.where} is not finite for 0")


@FLOAT16_RANGE.on_operation(
    "convert_element_type", "add", "sub", "mul", passes=_checks.NOT_BACKWARD
)
def check_constant(op: _checks.OpOccurrence) -> None:
    """Reports a finite constant that is infinite in float16."""
    is_cast = op.name == "convert_element_type"
    for value in (constant(var, op) for var in _float16_operands(op)):
        # A cast reads the constant as it was written; an infinite one is intended.
        if value is not None and abs(value) > _LARGEST and not (is_cast and math.isinf(value)):
            limit = "min" if value < 0 else "max"
            message = "a constant beyond 65504 is infinite in float16: rows that are masked"
            fix = f"Use jnp.finfo(logits.dtype).{limit} in place of the constant {value:g}."
            code = with_finite_numbers(op.expression, "float16")
            fix = f"Use the largest finite number of the dtype:\n    {code}" if code else fix
            op.add(FLOAT16_RANGE, f"{message} everywhere become NaN.", fix)


def _float16_operands(op: _checks.OpOccurrence) -> list[_programs.Atom]:
    """Returns the operands of an operation with a float16 result."""
    return op.operands if op.dtype == _core.FLOAT16 else []


@FLOAT16_RANGE.on_operation("convert_element_type", passes=_checks.NOT_BACKWARD)
def check_formats(op: _checks.OpOccurrence) -> OtherFormat | None:
    """Reports values that are cast from one 16-bit format to the other and back."""
    (operand,), dtype = op.operands, op.dtype
    source = _checks.half_of([op.body.source_of(operand, _checks.CASTS)])
    if source is None or not _core.is_16bit(dtype):
        return None
    op.audit.report(OtherFormat, [operand], f", and back at {op.where}")
    if source == dtype:
        return None
    loss = "beyond 65504 it is inf" if dtype == _core.FLOAT16 else "it loses 3 bits of precision"
    fix = f"Keep one 16-bit format: remove .astype(jnp.{dtype.name}) at {op.where}."
    return OtherFormat(op, f"a {source.name} value is cast to {dtype.name}, where {loss}", fix)


@FLOAT16_RANGE.on_operation("convert_element_type", passes=_checks.ALL_PASSES)
def check_integer_sums(op: _checks.OpOccurrence) -> None:
    """Reports sums of an integer matmul that are cast to float16 before they are scaled."""
    maker = op.made_by(op.operands[0], _checks.LAYOUT)
    if op.dtype != _core.FLOAT16 or maker is None or maker.name not in _programs.MATMULS:
        return
    matmul = _programs.matmul_of(maker.equation)
    if matmul.is_integer and np.bool_ not in (matmul.lhs, matmul.rhs):
        terms = matmul.flops // max(1, 2 * op.result.aval.size)
        largest = terms * jnp.iinfo(matmul.lhs).max * jnp.iinfo(matmul.rhs).max
        message = (
            f"integer sums of up to {largest:,} are cast to float16: beyond 65504 they are inf."
        )
        fix = (
            "Cast the sums to FP32, multiply them by their scales, and cast the result to float16;"
            " or keep a layer that quantizes its operands itself in FP32, by a rule."
        )
        if largest > _LARGEST:
            op.add(FLOAT16_RANGE, message, fix)


@FLOAT16_RANGE.on_operation("convert_element_type", passes=[_programs.BACKWARD])
def check_product_of_weights(op: _checks.OpOccurrence) -> None:
    """Reports the FP32 gradient of a product of weights, which is rounded for two matmuls."""
    maker = op.body.maker_through(op.operands[0], _checks.LAYOUT)
    has_matmul = lambda equations: _dataflow.contains(equations, _programs.MATMULS)
    if op.rounded != _core.FLOAT16 or maker is None or not has_matmul([maker]):
        return
    is_read = has_matmul(_check_ops.reads(op.equation, op.body))
    dtypes = map(_checks.dtype_of, (*maker.invars[:2], *maker.outvars))
    if is_read and [*dtypes] == [_core.FLOAT16, _core.FLOAT16, _core.FLOAT32]:
        message = "the gradient of a product of weights is rounded to float16: sums beyond 65504"
        fix = "Multiply the FP32 parameters, or the activations by one weight after the other, y ="
        fix += " (x @ a) @ b:\n    with jaxmp.full_precision():"
        fix += "\n        w = (a @ b).astype(jnp.float16)"
        op.add(FLOAT16_RANGE, f"{message} are inf.", fix, severity=_checks.WARNING)


# ---------------------------------------------------------------------------
# Squares and logits
# ---------------------------------------------------------------------------


@FLOAT16_RANGE.on_operation("mul", "square", "integer_pow", passes=_checks.NOT_BACKWARD)
def label_square(op: _checks.OpOccurrence) -> Square | None:
    """Labels the square of a float16 value."""
    return _square(op) if _float16_operands(op) and _check_ops.is_square(op.equation) else None


def _square(op: _checks.OpOccurrence) -> Square:
    message = "squares of float16 are inf from 256 on, and 0 below 2e-4"
    return Square(op, message, _origins.fix_expression("Square in FP32", op) or FLOAT16_RANGE.fix)


@FLOAT16_RANGE.on_operation("reduce_sum", "dot_general", passes=_checks.NOT_BACKWARD)
def collect_sums(op: _checks.OpOccurrence) -> None:
    """Collects sums of squares, as for a norm, and inner products of a vector with itself."""
    squares = op.labels(Square)
    if op.name == "dot_general":
        first, second = (op.body.source_of(var, _checks.LAYOUT) for var in op.operands)
        is_square = first is second and _programs.is_inner_product(op.equation)
        squares = [_square(op)] if is_square and _float16_operands(op) else []
    op.audit.collected[FLOAT16_RANGE] += [(square, op) for square in squares]


@FLOAT16_RANGE.on(_checks.PROGRAM)
def report_sums(audit: _auditor.Auditor) -> None:
    """Reports summed squares, unless they are the statistics of a norm that is reported."""
    norms = {f.op.line for f in audit.findings if f.check is _check_ops.NORM_16BIT}
    for square, op in audit.collected[FLOAT16_RANGE]:
        if op.line not in norms:
            square.report(f"; they are summed at {op.where}")


@FLOAT16_RANGE.on_operation("mul", "div")
def label_logits(op: _checks.OpOccurrence) -> UnscaledLogits | None:
    """Labels logits of queries and keys that are scaled after their matmul in float16."""
    logits, scalar = op.operands
    value = constant(scalar, op)
    if not value or abs(value if op.name == "mul" else 1 / value) > _ATTENTION_SCALE:
        return None
    for label in op.labels(Logits, logits):
        if not label.normalized and _is_of_activations(label):
            message = "queries and keys are multiplied in float16, and the logits are scaled later"
            sign = "*" if op.name == "mul" else "/"
            fix = f"Scale the queries before the matmul, instead of the logits at {op.where}"
            code = scaled(label.op.expression, sign, float(f"{value:.6g}"), op.expression)
            fix = f"{fix}:\n    {code}" if code else f"{fix}, by {sign} {value:.6g}."
            return UnscaledLogits(label.op, message, fix)
    return None


@FLOAT16_RANGE.on_operation("exp", "exp2")
def report_logits(op: _checks.OpOccurrence) -> None:
    """Reports logits of a softmax that may overflow before they are scaled."""
    op.report(UnscaledLogits, ": sums beyond 65504 are inf")


def _is_of_activations(logits: Logits) -> bool:
    op = logits.op
    has_weight = any(is_argument(op.audit.flow.of(var)) for var in op.operands[:2])
    return op.dtype == _core.FLOAT16 and not has_weight


SCALED_GRADIENTS = _checks.Check(
    id="scaled_gradients",
    explanation="Gradients are clipped, measured or added to the state while they are multiplied by"
    " the loss scale, or they are divided by it twice, or in float16, which has no numbers below"
    " 6e-8.",
    fix="grads = jax.tree.map(lambda g: g / scale, grads)",
    includes_optimizer=True,
)

_FIX = (
    "Divide the gradients by the loss scale first, and remove a division that follows:\n"
    f"    {SCALED_GRADIENTS.fix}"
)
# Smaller constants may be weights of the terms of a loss.
_LEAST_SCALE = 128
_DIVISION = "gradients are divided by the loss scale in float16: quotients below 6e-8 become zero."
_FIX_DIVISION = (
    "Divide FP32 gradients, and return the quotients in FP32:\n"
    "    grads = jax.tree.map(lambda g: g.astype(jnp.float32) / scale, grads)"
)


class _Event(NamedTuple):
    """Use of gradients that is wrong if argument `number` is a loss scale."""

    number: int
    op: _checks.OpOccurrence
    message: str
    fix: str = _FIX


def _of_gradient(var: _programs.Atom, audit: _auditor.Auditor) -> dict[int, float | None]:
    labels = audit.flow.of(var)
    return powers_of(labels) if GRADIENT in labels else {}


class _Constant(float):
    """Constant by which a loss is multiplied."""


@SCALED_GRADIENTS.on_operation("mul", "div", passes=[_programs.BACKWARD])
def collect_constants(op: _checks.OpOccurrence) -> None:
    """Collects the loss scales that are constants."""
    for var in op.operands:
        value = constant(var, op) if _dataflow.is_scale(op, var, op.audit.flow.of) else None
        scale = 1 / value if value and op.name == "div" else value or 0
        op.audit.collected[_Constant] += [scale] * (scale >= _LEAST_SCALE)


@SCALED_GRADIENTS.on_operation("mul", "div", passes=_checks.NOT_BACKWARD)
def check_division(op: _checks.OpOccurrence) -> None:
    """Collects the scalars by which gradients are divided, and divisions of unscaled gradients."""
    divided = -1 if op.name == "mul" else 1
    pairs = [op.operands, op.operands[::-1]][: 2 if op.name == "mul" else 1]
    for var, other in pairs:
        if GRADIENT in op.audit.flow.of(other) or GRADIENT not in op.audit.flow.of(var):
            continue
        powers = powers_of(op.audit.flow.of(other))
        for number in (n for n, power in powers.items() if power == divided):
            op.audit.collected[_dataflow.Power].append(number)
            if _of_gradient(var, op.audit).get(number, 0) == 0:
                message = "gradients are divided by the loss scale a second time."
                fix = f"Remove the second division by the loss scale, at {op.where}."
                op.audit.collected[_Event].append(_Event(number, op, message, fix))
            elif _is_float16(op):
                op.audit.collected[_Event].append(_Event(number, op, _DIVISION, _FIX_DIVISION))
        scales = [scale**divided for scale in op.audit.collected[_Constant]]
        with np.errstate(over="ignore"):
            is_scale = constant(other, op) in np.asarray(scales, op.dtype).tolist()
        if is_scale and _is_float16(op):
            op.add(SCALED_GRADIENTS, _DIVISION, _FIX_DIVISION)


def _is_float16(op: _checks.OpOccurrence) -> bool:
    """Returns True for a result in float16, and for one that is cast to it wherever it is read."""
    readers = [each.outvars[0] for each in op.body.readers(op.result)]
    return op.dtype == _core.FLOAT16 or {_checks.dtype_of(x) for x in readers} == {_core.FLOAT16}


@SCALED_GRADIENTS.on_operation(
    *("lt", "le", "gt", "ge", "min", "max", "clamp", "add", "sub"), passes=_checks.NOT_BACKWARD
)
def check_use(op: _checks.OpOccurrence) -> None:
    """Collects limits of scaled gradients or of their norm, and sums with arguments."""
    is_sum = op.name in ("add", "sub")
    message = "gradients are clipped while they are multiplied by the loss scale."
    if is_sum:
        message = "the state is updated with gradients that are multiplied by the loss scale."
    for var in op.operands:
        others = [x for x in op.operands if x is not var]
        for number, power in _of_gradient(var, op.audit).items():
            is_other = all(_is_other(x, number, is_sum, op.audit) for x in others)
            if (power or 0) > 0 or (power and not is_sum):
                op.audit.collected[_Event] += [_Event(number, op, message)] * is_other


def _is_other(var: _programs.Atom, number: int, is_sum: bool, audit: _auditor.Auditor) -> bool:
    """Returns True for a summand from the state, and for a limit without the loss scale."""
    labels = audit.flow.of(var)
    if number in powers_of(labels):
        return False
    if is_sum:
        return any(isinstance(label, From) for label in labels)
    value = abs(float(var.val)) if _programs.is_literal(var) and np.ndim(var.val) == 0 else 1
    return 1e-3 < value < math.inf


@SCALED_GRADIENTS.on(_checks.PROGRAM)
def check_scales(audit: _auditor.Auditor) -> Iterable[_rows.Finding]:
    """Reports the collected events of loss scales, and results that depend on one."""
    scales = set(powers_of(audit.flow.of_all(var for _, var in audit.traced.dynamic_scales())))
    rows = [numbers for _, numbers in audit.float16_scales]
    if not scales and (all(rows) or audit.flow.has_scale):
        scales = scales.union(*rows)
    scales = scales.union(audit.collected[_dataflow.Power]) & audit.flow.scaled_by
    events = [event for event in audit.collected[_Event] if event.number in scales]
    for event in events:
        event.op.add(SCALED_GRADIENTS, event.message, event.fix)
    for (path, _), var in zip(audit.traced.results, audit.results, strict=False):
        powers = _of_gradient(var, audit)
        is_state = bool(audit.flow.labels(From, var))
        is_norm = var.aval.size == 1 and not is_state and any(powers.get(n) for n in scales)
        maker = audit.maker_of(var) if is_norm and not events else None
        # The gradient of a bias with one element is not a norm.
        if maker is not None and not maker.is_backward:
            message = f"result{jtu.keystr(path)} is computed from gradients that are multiplied by"
            yield SCALED_GRADIENTS.finding(f"{message} the loss scale.", _FIX, maker)
