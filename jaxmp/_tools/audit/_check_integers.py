"""Checks of integers and arguments that are rounded to 16 bits, of sorted keys and of int8 sums."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
import numpy as np

from jaxmp import _core, _programs
from jaxmp._tools.audit import _auditor, _check_ops, _checks, _dataflow, _labels, _origins, _rows

ROUNDED_INPUT = _checks.Check(
    id="rounded_input",
    explanation="An argument, frequency or table is rounded to 16 bits before its sine, cosine,"
    " complex exponential, arccos, arctanh, fraction, small difference, or a root, logarithm or"
    " arccosh of 1 - x or 1 - x**2 is computed: a time step of 257 becomes 256 in bfloat16.",
    fix="angles = t.astype(jnp.float32)[:, None] * frequencies",
)


@ROUNDED_INPUT.on_operation(*_checks.PERIODIC, "exp")
def check_rounding(op: _checks.OpOccurrence) -> None:
    """Reports a periodic function, such as a complex exponential, of a rounded argument."""
    operands = _phases(op) if op.name == "exp" else op.operands[:1]
    labels = op.audit.flow.labels
    values = labels(RoundedValue, *operands)
    by_policy = [v for v in values if not v.op.is_own_call and not _origins.is_in_flax(v.op)]
    rules = {value: _check_ops.keep_parameter(value.op) for value in by_policy}
    for label in () if any(rules.values()) else labels(_labels.RoundedInput, *operands):
        source, dtype = label.input, label.dtype
        example = "257 becomes 256" if dtype == "bfloat16" else "2049 becomes 2048"
        message = f"argument {source.location} is rounded to {dtype} before {op.name}: {example}."
        fix = _origins.fix_rounding(label.product or op) or _origins.fix_operation(op, dtype)
        rounded = [value.fix for value in values]
        fix = fix if op.location.names or label.product or not rounded else rounded[0]
        # The FP32 sine of coordinates near 1 is off by no more than they are.
        is_wide = label.product is not None and _checks.half_of(operands) is None
        op.add(ROUNDED_INPUT, message, fix, severity=_rows.WARNING if is_wide else "")
        return
    for value in values:
        value.remedy = rules.get(value) or value.remedy
        value.report(f", and its {op.name} is computed at {op.where}")


@ROUNDED_INPUT.on_operation("sub")
def check_difference(op: _checks.OpOccurrence) -> None:
    """Reports small differences of a rounded argument: of points or times, or a fraction."""
    values, floor = op.operands, op.made_by(op.operands[1], _checks.LAYOUT)
    is_fraction = floor is not None and floor.name == "floor"
    others = floor.operands if floor is not None and is_fraction else values[1:]
    is_small = is_fraction or _programs.Use.MAGNIFIED in op.use
    for label in op.labels(_labels.RoundedInput, values[0]) if is_small else ():
        if label in op.labels(_labels.RoundedInput, *others) and values[0] is not values[1]:
            message = f"argument {label.input.location} is rounded to {label.dtype} before a small"
            message += " difference of its elements or a fraction."
            op.add(ROUNDED_INPUT, message, _origins.fix_rounding(op) or _origins.fix_operation(op))


def _phases(op: _checks.OpOccurrence) -> list[_programs.Atom]:
    """Returns the real arrays that the phase of a complex exponential is a multiple of."""
    if not jnp.issubdtype(op.dtype, jnp.complexfloating):
        return []
    makers = list(_check_ops.made_of(op.operands[0], op.body, _PHASES))
    phases = [e.invars[1] for e in makers if e.primitive.name == "complex"]
    factors = [v for e in makers if e.primitive.name == "mul" for v in e.invars]
    casts = [op.made_by(v, _checks.LAYOUT - _checks.CASTS) for v in factors]
    return phases + [cast.operands[0] for cast in casts if cast and cast.name in _checks.CASTS]


_PHASES = _checks.LAYOUT | _core.named("add sub mul neg complex")


@ROUNDED_INPUT.on_operation("dot_general")
def label_product(op: _checks.OpOccurrence) -> None:
    """Labels the angles of rounded coordinates, which are multiplied by frequencies."""
    if _programs.Use.ANGLE not in _programs.exact_uses(op.equation, op.use):
        return
    angles = [dataclasses.replace(x, product=op) for x in op.labels(_labels.RoundedInput)]
    if angles or op.labels(_labels.FloatInput):
        values = op.labels(RoundedValue)
        angles += [dataclasses.replace(x, severity=_rows.WARNING) for x in values]
        for label in angles:
            op.mark(label)


class RoundedValue(_labels.ConditionalFinding):
    """Label of an array that was rounded from FP32 to 16 bits, and only shifted or scaled since."""

    check, survives = ROUNDED_INPUT, _labels.RoundedInput.survives


@dataclasses.dataclass(frozen=True)
class _Complement(_labels.Fact):
    """Label of 1 minus a rounded array, or minus the squares of its elements."""

    value: RoundedValue
    survives = _labels.FloatInput.survives | _core.named("mul div add sub max")


_SQUARES = _checks.LAYOUT | _core.named("mul square integer_pow reduce_sum")


@ROUNDED_INPUT.on_operation("convert_element_type")
def label_value(op: _checks.OpOccurrence) -> RoundedValue | None:
    """Labels an FP32 table, which was not 16 bits before, that is rounded."""
    (operand,), dtype = op.operands, op.rounded
    was_16_bits = _labels.WAS_16_BITS in op.audit.flow.of(operand)
    if dtype is None or was_16_bits or operand.aval.size == 1:
        return None
    message = f"an FP32 array is rounded to {dtype.name}"
    return RoundedValue(op, message, lambda: _origins.fix_cast(op))


@ROUNDED_INPUT.on_operation("sub")
def label_complement(op: _checks.OpOccurrence) -> None:
    """Labels 1 minus a rounded array, or minus the squares of its elements."""
    minuend, var = op.operands
    if _dataflow.number_of(minuend) == 1:
        makers = _check_ops.made_of(var, op.body, _SQUARES)
        operands = [v for e in makers if e.primitive.name in _SQUARES for v in e.invars]
        for label in op.labels(RoundedValue, var, *operands):
            op.mark(_Complement(label))


@ROUNDED_INPUT.on_operation("sqrt", "rsqrt", "log", "pow", "acosh")
def check_complement(op: _checks.OpOccurrence) -> None:
    """Reports a root or logarithm of 1 minus a rounded array, which cancels near 1."""
    for label in op.labels(_Complement):
        label.value.report(f", so that 1 minus it cancels before the {op.name} at {op.where}")


@ROUNDED_INPUT.on_operation("acos", "asin", "atanh")
def check_angle(op: _checks.OpOccurrence) -> None:
    """Reports functions that are steep near 1 of a rounded array."""
    op.report(RoundedValue, f", and the {op.name} at {op.where} magnifies the rounding near 1")


ROUNDED_INTEGER = _checks.Check(
    id="rounded_integer",
    explanation="Counts, positions, steps or indices are rounded to 16 bits or computed in them,"
    " where the integers beyond 256 (bfloat16) or 2048 (float16) are not distinct.",
    fix="positions = jnp.arange(length, dtype=jnp.float32)",
)
SORT_16BIT = _checks.Check(
    id="sort_16bit",
    explanation="FP32 keys are rounded to 16 bits and then sorted, so that different keys compare"
    " as equal.",
    fix="order = jnp.argsort(x)",
)
INT_OVERFLOW = _checks.Check(
    id="int_overflow",
    explanation="A matmul of 8-bit or 16-bit integers sums in the same dtype, which wraps around.",
    fix="jnp.matmul(x, w, preferred_element_type=jnp.int32)",
)

_MOVES = _checks.LAYOUT | _core.named("slice dynamic_slice gather rev concatenate select_n neg")


@dataclasses.dataclass(frozen=True)
class Integers(_labels.Fact):
    """Label of integers of any dtype, and the bound of their absolute values."""

    bound: float
    text: str
    survives = _MOVES


# Label of an integer scalar of the state, such as the number of a step.
STEPS = Integers(math.inf, "steps or counts")


class RoundedIndex(_labels.ConditionalFinding):
    """Label of integers that were made of 16-bit numbers."""

    check = ROUNDED_INTEGER
    survives = _MOVES | _core.named("add sub min max clamp jit pjit")


class RoundedKeys(_labels.ConditionalFinding):
    """Label of FP32 values that were rounded to 16 bits."""

    check = SORT_16BIT
    survives = _MOVES


# ---------------------------------------------------------------------------
# Counts and positions
# ---------------------------------------------------------------------------


@ROUNDED_INTEGER.on_operation("convert_element_type", "iota", "reduce_sum", "cumsum", "add", "mul")
def check_integers(op: _checks.OpOccurrence) -> Integers | None:
    """Labels integers, and reports those that are rounded to 16 bits."""
    integers, dtype = _integers_after(op), op.dtype
    if integers is None or not _core.is_16bit(dtype):
        return integers
    limit = _checks.stagnation(dtype)
    value = None if op.name != "convert_element_type" else op.audit.known.value(op.operands[0])
    # Powers of two, such as the frequencies of an encoding, are exact.
    is_exact = value is not None and (value.astype(dtype).astype(value.dtype) == value).all()
    if is_exact or integers.bound <= limit:
        return integers
    up_to = "" if math.isinf(integers.bound) else f" up to {integers.bound:,.0f}"
    text = f"{integers.text}{up_to} are rounded to {dtype.name}"
    sentence = "Compute with FP32 positions and counts, and cast the results"
    fix = _origins.fix_expression(sentence, op)
    op.add(ROUNDED_INTEGER, f"{text}: {limit + 1:,} becomes {limit:,}.", fix)
    return None


@ROUNDED_INTEGER.on_operation("convert_element_type")
def label_index(op: _checks.OpOccurrence) -> RoundedIndex | None:
    """Labels integers that were computed in 16 bits, as `jnp.quantile` does."""
    (operand,) = op.operands
    dtype = _checks.half_of([operand])
    if dtype is None or op.dtype.kind not in "iu":
        return None
    limit = _checks.stagnation(dtype)
    message = f"indices are computed in {dtype.name}: {limit + 1:,} becomes {limit:,}"
    fix = _origins.fix_origins(op) if op.is_own_call else ""
    fix = fix or _origins.fix_expression("Compute the indices in FP32", op)
    return RoundedIndex(op, message, fix or ROUNDED_INTEGER.fix)


@ROUNDED_INTEGER.on_operation("gather", "dynamic_slice")
def check_index(op: _checks.OpOccurrence) -> None:
    """Reports indices from 16 bits into an array that has more elements than they can number."""
    for label in op.labels(RoundedIndex, *op.operands[1:]):
        limit = _checks.stagnation(_checks.dtype_of(label.op.operands[0]))
        if max(op.operands[0].aval.shape, default=0) > limit:
            label.report(f"; they are read at {op.where}")


def _integers_after(op: _checks.OpOccurrence) -> Integers | None:
    if op.name == "iota":
        return Integers(_programs.iota_length(op.equation) - 1, "positions")
    each = [_integers(var, op.audit) for var in op.operands]
    bounds = [integers.bound for integers in each if integers is not None]
    is_count = op.name == "reduce_sum" and _check_ops.counts_largest(op)
    if len(bounds) < len(each) or is_count:
        return None
    if op.name == "convert_element_type":
        return each[0]
    bound, result = math.prod(bounds) if op.name == "mul" else sum(bounds), op.result.aval
    if op.name == "reduce_sum":
        bound *= op.operands[0].aval.size / max(result.size, 1)
    if op.name == "cumsum":
        bound *= result.shape[_programs.axes_of(op.equation)[0]]
    return Integers(bound, "counts")


def _integers(var: _programs.Atom, audit: _auditor.Auditor) -> Integers | None:
    """Returns the bound of integers; None for other values and unknown bounds."""
    labels = audit.flow.labels(Integers, var)
    dtype = np.dtype(_checks.dtype_of(var))
    if labels or dtype.kind not in "biu":
        return max(labels, key=lambda integers: integers.bound, default=None)
    if dtype.itemsize == 1:
        return Integers(1 if dtype.kind == "b" else np.iinfo(dtype).max, "counts")
    value = audit.known.value(var) if 0 < var.aval.size <= 2**24 else None
    return None if value is None else Integers(float(abs(value).max()), "positions")


# ---------------------------------------------------------------------------
# Sorted keys
# ---------------------------------------------------------------------------


@SORT_16BIT.on_operation("convert_element_type")
def label_keys(op: _checks.OpOccurrence) -> RoundedKeys | None:
    """Labels FP32 values that are rounded to 16 bits, unless they were 16 bits before."""
    (operand,), dtype = op.operands, op.rounded
    # `jnp.quantile` and `jnp.median` write a scalar NaN into their 16-bit keys.
    if dtype is None or operand.aval.size <= 1:
        return None
    before = op.made_by(operand, _checks.LAYOUT - {"convert_element_type"})
    if before and before.name == "convert_element_type" and _checks.half_of(before.operands):
        return None
    message = f"FP32 keys are rounded to {dtype.name} at {op.where}, so that many are equal"
    return RoundedKeys(op, message, lambda: _origins.fix_cast(op))


@SORT_16BIT.on_operation("sort", "top_k", "approx_top_k", passes=_checks.NOT_BACKWARD)
def check_keys(op: _checks.OpOccurrence) -> None:
    """Reports a sort of rounded keys."""
    keys = op.operands[: _programs.count_of_keys(op.equation)]
    op.audit.report(RoundedKeys, keys, f", and they are sorted at {op.where}")


# ---------------------------------------------------------------------------
# Matmuls
# ---------------------------------------------------------------------------


@INT_OVERFLOW.on_operation(*_programs.MATMULS, passes=_checks.ALL_PASSES)
def check_integer_matmul(op: _checks.OpOccurrence) -> None:
    """Reports a matmul whose sums exceed the integers of its result."""
    dtypes = [np.dtype(_checks.dtype_of(var)) for var in (*op.operands[:2], *op.equation.outvars)]
    if all(dtype.kind in "iu" and dtype.itemsize <= 2 for dtype in dtypes):
        lhs, rhs, result = (dtype.name for dtype in dtypes)
        largest = np.iinfo(dtypes[2]).max
        message = f"{op.name} of {lhs} and {rhs}: sums beyond {largest:,} wrap around in {result}."
        op.add(INT_OVERFLOW, message, _origins.fix_sums("Sum in int32", op, "int32"))
