"""Checks of integers: counts and positions in 16 bits, sums of int8 in int8, and sorted keys."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxmp._audit._auditor import Auditor
from jaxmp._audit._checks import ERROR, Check
from jaxmp._audit._labels import ConditionalFinding, Fact
from jaxmp._audit._program import LAYOUT, OpOccurrence, dtype_of, half_of, named
from jaxmp._core._dtypes import FLOAT32, is_16bit
from jaxmp._core._jaxprs import BACKWARD, FORWARD, Atom

ROUNDED_INTEGER = Check(
    id="rounded_integer",
    severity=ERROR,
    explanation="Counts, positions, steps or indices are rounded to 16 bits, where the integers"
    " beyond 256 (bfloat16) or 2048 (float16) are not distinct.",
    fix="positions = jnp.arange(length, dtype=jnp.float32)",
)
SORT_16BIT = Check(
    id="sort_16bit",
    severity=ERROR,
    explanation="FP32 keys are rounded to 16 bits and then sorted, so that different keys compare"
    " as equal.",
    fix="order = jnp.argsort(x)",
)
INT_OVERFLOW = Check(
    id="int_overflow",
    severity=ERROR,
    explanation="A matmul of 8-bit or 16-bit integers sums in the same dtype, which wraps around.",
    fix="jnp.matmul(x, w, preferred_element_type=jnp.int32)",
)

_MOVES = LAYOUT | named("slice dynamic_slice gather rev concatenate select_n neg")


class Whole(NamedTuple):
    """Bound of the absolute value of an array of integers, of any dtype."""

    bound: float
    text: str


class Integers(Fact):
    """Label of integers up to a bound."""

    survives = _MOVES

    def __init__(self, whole: Whole) -> None:
        self.whole = whole


# Label of an integer scalar of the state, such as the number of a step.
STEPS = Integers(Whole(math.inf, "steps or counts"))


class RoundedKeys(ConditionalFinding):
    """Label of FP32 values that were rounded to 16 bits."""

    check = SORT_16BIT
    survives = _MOVES


class RoundedIndex(ConditionalFinding):
    """Label of integers that were computed in 16 bits."""

    check = ROUNDED_INTEGER
    survives = _MOVES | named("add sub max min clamp")

    @property
    def limit(self) -> int:
        """The integer up to which indices are distinct."""
        return _limit(dtype_of(self.op.equation.invars[0]))


# ---------------------------------------------------------------------------
# Counts and positions
# ---------------------------------------------------------------------------


@ROUNDED_INTEGER.on_operation("convert_element_type")
def check_conversion(op: OpOccurrence, audit: Auditor) -> Integers | RoundedIndex | None:
    """Reports integers that are rounded, and labels integers in other dtypes."""
    (operand,), (result,) = op.equation.invars, op.equation.outvars
    source, target = np.dtype(dtype_of(operand)), np.dtype(dtype_of(result))
    if op.location.phase != FORWARD:
        return None
    if is_16bit(source) and target.kind == "i":
        limit = _limit(source)
        message = f"indices are computed in {source.name}, where they are distinct up to {limit:,}"
        fix = "Compute the indices in FP32:\n    x = x.astype(jnp.float32)"
        return RoundedIndex(op, message, fix)
    whole = _whole(operand, audit)
    if whole is None:
        return None
    if is_16bit(target) and whole.bound > _limit(target):
        _report(op, whole, target, audit)
        return None
    return Integers(whole)


@ROUNDED_INTEGER.on_operation("iota")
def check_positions(op: OpOccurrence, audit: Auditor) -> None:
    """Reports positions that are made in 16 bits."""
    dtype, params = np.dtype(dtype_of(op.equation.outvars[0])), op.equation.params
    bound = params["shape"][params["dimension"]] - 1
    if is_16bit(dtype) and bound > _limit(dtype):
        _report(op, Whole(bound, "positions"), dtype, audit)


@ROUNDED_INTEGER.on_operation("reduce_sum", "cumsum", "add", "mul")
def check_counts(op: OpOccurrence, audit: Auditor) -> Integers | None:
    """Labels sums and products of integers, and reports sums in 16 bits."""
    if op.location.phase != FORWARD:
        return None
    wholes = [_whole(var, audit) for var in op.equation.invars]
    bounds = [whole.bound for whole in wholes if whole is not None]
    if len(bounds) < len(wholes):
        return None
    bound = math.prod(bounds) if op.name == "mul" else sum(bounds)
    if op.name in ("reduce_sum", "cumsum"):
        bound *= _terms(op)
    dtype = np.dtype(dtype_of(op.equation.outvars[0]))
    whole = Whole(bound, "counts")
    if op.name == "cumsum" and is_16bit(dtype) and bound > _limit(dtype):
        _report(op, whole, dtype, audit)
        return None
    return Integers(whole)


@ROUNDED_INTEGER.on_operation("gather", "dynamic_slice")
def report_index(op: OpOccurrence, audit: Auditor) -> None:
    """Reports indices computed in 16 bits into an axis that is longer than their precision."""
    array, *indices = op.equation.invars
    longest = max(array.aval.shape, default=0)
    for label in audit.flow.of_all(indices):
        if isinstance(label, RoundedIndex) and longest > _limit(
            dtype_of(label.op.equation.invars[0])
        ):
            harm = f", and select from {longest:,} elements at {audit.findings.where(op)}"
            label.report(harm, audit.findings)


def _terms(op: OpOccurrence) -> int:
    shape, params = op.equation.invars[0].aval.shape, op.equation.params
    axes = params["axes"] if op.name == "reduce_sum" else (params["axis"],)
    return math.prod(shape[axis] for axis in axes)


def _whole(var: Atom, audit: Auditor) -> Whole | None:
    """Returns the bound of integers; None for other values and unknown bounds."""
    for label in audit.flow.of(var):
        if isinstance(label, Integers):
            return label.whole
    dtype = np.dtype(dtype_of(var))
    if dtype.kind == "b":
        return Whole(1, "counts")
    if dtype.itemsize == 1 and dtype.kind in "iu":
        return Whole(np.iinfo(dtype).max, "integers")
    if dtype.kind not in "iu" or var.aval.size > 2**24:
        return None
    value = audit.known.value(var)
    return None if value is None or not value.size else Whole(float(abs(value).max()), "positions")


def _limit(dtype: np.dtype) -> int:
    """Returns the integer up to which all integers are numbers of a dtype."""
    return 2 ** (jnp.finfo(dtype).nmant + 1)


def _report(op: OpOccurrence, whole: Whole, dtype: np.dtype, audit: Auditor) -> None:
    limit = _limit(dtype)
    up_to = "" if math.isinf(whole.bound) else f" up to {whole.bound:,.0f}"
    message = f"{whole.text}{up_to} are rounded to {dtype.name}: {limit + 1:,} becomes {limit:,}."
    fix = "Compute with FP32 positions and counts, and cast the results:\n"
    fix += (
        "    jnp.arange(length, dtype=jnp.float32)"
        if op.name == "iota"
        else "    x.astype(jnp.float32)"
    )
    audit.add(ROUNDED_INTEGER, op, message, fix)


# ---------------------------------------------------------------------------
# Sorted keys
# ---------------------------------------------------------------------------


@SORT_16BIT.on_operation("convert_element_type")
def label_keys(op: OpOccurrence, audit: Auditor) -> RoundedKeys | None:
    """Labels FP32 values that are rounded to 16 bits, unless they were 16 bits before."""
    (operand,), (result,) = op.equation.invars, op.equation.outvars
    if (
        op.location.phase != FORWARD
        or dtype_of(operand) != FLOAT32
        or not is_16bit(dtype_of(result))
    ):
        return None
    maker = op.body.maker_through(operand, LAYOUT - {"convert_element_type"})
    if (
        maker is not None
        and half_of(maker.invars)
        and maker.primitive.name == "convert_element_type"
    ):
        return None
    dtype, where = dtype_of(result).name, audit.findings.where(op)
    message = f"FP32 keys are rounded to {dtype} at {where}, so that many are equal"
    fix = f"Sort the FP32 keys: remove .astype(jnp.{dtype}) at {where}."
    return RoundedKeys(op, message, fix)


@SORT_16BIT.on_operation("sort", "top_k", "approx_top_k")
def check_keys(op: OpOccurrence, audit: Auditor) -> None:
    """Reports a sort of rounded keys."""
    if op.location.phase != BACKWARD:
        keys = op.equation.invars[: op.equation.params.get("num_keys", 1)]
        audit.report(RoundedKeys, keys, f", and they are sorted at {audit.findings.where(op)}")


# ---------------------------------------------------------------------------
# Matmuls
# ---------------------------------------------------------------------------


@INT_OVERFLOW.on_operation("dot_general", "conv_general_dilated", "ragged_dot_general")
def check_integer_matmul(op: OpOccurrence, audit: Auditor) -> None:
    """Reports a matmul whose sums exceed the integers of its result."""
    dtypes = [np.dtype(dtype_of(var)) for var in (*op.equation.invars[:2], *op.equation.outvars)]
    if any(dtype.kind not in "iu" or dtype.itemsize > 2 for dtype in dtypes):
        return
    lhs, rhs, result = (dtype.name for dtype in dtypes)
    largest = np.iinfo(dtypes[2]).max
    message = f"{op.name} of {lhs} and {rhs} sums in {result}: sums beyond {largest:,} wrap around."
    audit.add(INT_OVERFLOW, op, message, INT_OVERFLOW.fix)
