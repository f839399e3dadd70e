"""Checks of uniform random numbers in 16 bits: outcomes and orders that are drawn with them.

A function of a probability and of constants is followed, too, for its logarithm.
"""

from __future__ import annotations

import ast
import dataclasses
import math
from typing import Any

import numpy as np

from jaxmp import _core, _programs
from jaxmp._tools.audit import _checks, _labels, _origins
from jaxmp._tools.audit._check_losses import LOG_OF_ROUNDED, Probability
from jaxmp._tools.audit._dataflow import constant

RANDOM_16BIT = _checks.Check(
    id="random_16bit",
    explanation="A uniform random number with 128 (bfloat16) or 1,024 (float16) values, or a"
    " rounded one, is compared with a constant or rounded to an integer, and the probability of an"
    " outcome is wrong by a quarter or more; or it is sorted, and two keys are probably equal. A"
    " warning if the constant is not known; a note if it is 1.",
    fix="is_kept = jax.random.uniform(key, x.shape) < 0.999",
)

# `jax.random.uniform` draws multiples of 2**-7 or 2**-10, so that a probability of n such steps is
# wrong by up to 1/n. The documentation of `jax.random.bernoulli` has the same limit for float32.
_NOTABLE = 0.25
# The exact probability is that of as many equal parts of the interval.
_PARTS = 2**14
_COMPARISONS = {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}
_ROUNDINGS = {"floor": np.floor, "ceil": np.ceil, "round": np.rint}
_ARITHMETIC = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}
_EXACT = {"neg": np.negative, "abs": np.abs, "max": np.maximum, "min": np.minimum}
_EXACT["clamp"] = lambda low, x, high: np.clip(x, low, high)
_FUNCTIONS: dict[str, Any] = {"convert_element_type": np.positive} | _EXACT | _ARITHMETIC
_FUNCTIONS |= _ROUNDINGS | _COMPARISONS


@dataclasses.dataclass(eq=False)
class Draw(_labels.Fact):
    """Label of a function of a uniform random number and of constants.

    op: draws it, or rounds it to 16 bits. In FP32, it is not reported.
    """

    op: _checks.OpOccurrence
    # The values that it may have, equally probable, and those of a real number; None if unknown.
    values: tuple[np.ndarray, np.ndarray] | None = None
    survives = _checks.LAYOUT.union(_core.named("slice gather")) - _FUNCTIONS.keys()

    def report(self, op: _checks.OpOccurrence, message: str, severity: str = "") -> None:
        """Reports an operation that reads it."""
        if not _core.is_16bit(self.op.dtype):
            return
        step = f"{2 / _checks.stagnation(self.op.dtype):.2g}"
        draw, fix = f"is a multiple of {step}", _origins.fix_operation(self.op)
        if self.op.name == "convert_element_type":
            draw, fix = f"was rounded at {self.op.where}", _origins.fix_cast(self.op)
        message = f"a uniform random number in {self.op.dtype.name} {draw}{message}."
        op.add(RANDOM_16BIT, message, fix, severity=severity)


@RANDOM_16BIT.on_operation("bitcast_convert_type")
def label_draw(op: _checks.OpOccurrence) -> Draw | None:
    """Labels random bits that become the mantissa of a number from 1 to 2."""
    maker, is_16bit = op.body.maker(op.operands[0]), _core.is_16bit(op.dtype)
    is_float = is_16bit or op.dtype == _core.FLOAT32
    if not is_float or maker is None or maker.primitive.name != "or":
        return None
    exponent, steps = op.audit.known.value(maker.invars[1]), _checks.stagnation(op.dtype) // 2
    unit, exact = np.ones((), op.dtype), 1 + (np.arange(_PARTS) + 0.5) / _PARTS
    values = (1 + np.arange(steps) / steps).astype(op.dtype) if is_16bit else exact
    is_uniform = exponent is not None and np.array_equal(exponent, unit.view(exponent.dtype))
    return Draw(op, (values, exact)) if is_uniform else None


@RANDOM_16BIT.on_operation(*_FUNCTIONS)
def follow_draw(op: _checks.OpOccurrence) -> Draw | None:
    """Labels a function of a random number and of constants, and checks its outcomes."""
    draws, is_float = op.labels(Draw), op.dtype in _checks.FLOATS
    if not draws:
        return None
    draw = next((x for x in draws if _core.is_16bit(x.op.dtype)), draws[0])
    if op.rounded is not None:
        draw = Draw(op, draw.values)
        op.mark(Probability(op, "bitcast_convert_type", (0.0, 1.0)))  # It may become 1.
    known = [each for each in (_values(var, op) for var in op.operands) if each is not None]
    if len(known) < len(op.operands) or len(draws) > 1:
        # `mode="high"` of `bernoulli` takes the lower bits from the same draw.
        has_more = len(draws) > 1 and all(each.op is draw.op for each in draws)
        if op.name in _COMPARISONS and draw.values is not None and not has_more:
            draw.report(op, ", and so is the probability with which it is compared", "warning")
        return Draw(draw.op)
    is_cut = op.name == "convert_element_type" and not is_float
    with np.errstate(all="ignore"):
        function = np.trunc if is_cut else _FUNCTIONS[op.name]
        low, exact = (function(*each) for each in zip(*known, strict=True))
    if is_float and op.name not in _ROUNDINGS:
        return Draw(draw.op, (low.astype(op.dtype), exact))
    is_sign = op.name in _COMPARISONS and not all(np.any(values) for values, _ in known)
    if is_sign or not _core.is_16bit(draw.op.dtype):
        return Draw(draw.op)
    outcomes = np.unique([*low, *exact])
    each = [(np.searchsorted(np.sort(x), outcomes, "right"), len(x)) for x in (low, exact)]
    (counts, right) = (np.diff(ends, prepend=0) * (_PARTS / size) for ends, size in each)
    # The probability of an outcome is known up to half a part.
    least = np.maximum(right, 0.5)
    worst = np.argmax(np.abs(counts - right) / least)
    # A probability close to 1 is rounded to 1, but none is rounded to 0.
    ends = known if op.name in _COMPARISONS else [(low, exact)]
    if len(outcomes) == 1 and all(np.max(values) > 0.5 for values, _ in ends):
        text = f": this {op.name} has one outcome, as of a probability that is 1 or rounded to 1"
        draw.report(op, text, _checks.NOTE)
    elif abs(counts[worst] - right[worst]) >= max(_NOTABLE * least[worst], 1.5):
        text = f"{counts[worst] / _PARTS:.2g} instead of {right[worst] / _PARTS:.2g}"
        draw.report(op, f": an outcome of this {op.name} has the probability {text}")
    return Draw(draw.op)


@LOG_OF_ROUNDED.on_operation(*_FUNCTIONS.keys() - _ROUNDINGS.keys(), passes=_checks.NOT_BACKWARD)
def follow_probability(op: _checks.OpOccurrence) -> Probability | None:
    """Labels a function of a probability and of constants, with its values at the ends."""
    for label in op.labels(Probability)[:1] if op.dtype in _checks.FLOATS else ():
        ends = lambda var: next((x.ends for x in op.labels(Probability, var)), constant(var, op))
        rows = list(map(ends, op.operands))
        with np.errstate(all="ignore"):
            new = label.ends if None in rows else tuple(_FUNCTIONS[op.name](*rows))
        return dataclasses.replace(label, ends=new)
    return None


@RANDOM_16BIT.on_operation("sort", "top_k")
def check_keys(op: _checks.OpOccurrence) -> None:
    """Reports keys of which more probably than not two are equal: the first one then wins."""
    size = op.operands[0].aval.shape[[*_programs.axes_of(op.equation), -1][0]]
    for draw in op.labels(Draw, op.operands[0]):
        values = () if draw.values is None else np.unique(draw.values[0])
        is_only_key = _programs.count_of_keys(op.equation) == 1
        if is_only_key and size * (size - 1) / 2 > math.log(2) * len(values) > 0:
            draw.report(op, f": of the {size:,} that are sorted, several are equal")


def _values(var: _programs.Atom, op: _checks.OpOccurrence) -> tuple[Any, Any] | None:
    """Returns the values of a draw, or a constant in 16 bits and as it is written in the code."""
    for draw in op.labels(Draw, var):
        return draw.values
    value = constant(var, op)
    if value is None:
        return None
    low = np.asarray(value, _checks.dtype_of(var))
    if not _core.is_16bit(low.dtype):
        return low, value
    written = [n.value for n in ast.walk(op.expression.node) if isinstance(n, ast.Constant)]
    floats = (x for x in written if isinstance(x, float) and low == np.asarray(x, low.dtype))
    return low, next(floats, value)
