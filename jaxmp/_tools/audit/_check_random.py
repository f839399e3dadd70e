"""Checks of uniform random numbers in 16 bits: outcomes and orders that are drawn with them."""

from __future__ import annotations

import ast
import dataclasses
import math
from typing import Any

import numpy as np

from jaxmp import _core, _programs
from jaxmp._tools.audit import _checks, _labels, _origins
from jaxmp._tools.audit._check_float16 import constant

RANDOM_16BIT = _checks.Check(
    id="random_16bit",
    explanation="A uniform random number with 128 (bfloat16) or 1,024 (float16) values is compared"
    " with a constant or rounded to an integer, and the probability of an outcome is wrong by a"
    " quarter or more; or it is sorted, and two keys are probably equal. A warning if the constant"
    " is not known, or if it is 1, to which it may have been rounded.",
    fix="is_kept = jax.random.uniform(key, x.shape) < 0.999",
)

# `jax.random.uniform` draws multiples of 2**-7 or 2**-10, so that a probability of n such steps is
# wrong by up to 1/n. The documentation of `jax.random.bernoulli` has the same limit for float32.
_NOTABLE = 0.25
# The exact probability is that of as many equal parts of the interval.
_PARTS = 2**16
_COMPARISONS = {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}
_ROUNDINGS = {"floor": np.floor, "ceil": np.ceil, "round": np.rint}
_ARITHMETIC = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}
_EXACT = {"neg": np.negative, "abs": np.abs, "max": np.maximum, "min": np.minimum}
_FUNCTIONS: dict[str, Any] = {"convert_element_type": np.positive} | _EXACT | _ARITHMETIC
_FUNCTIONS |= _ROUNDINGS | _COMPARISONS


@dataclasses.dataclass(eq=False)
class Draw(_labels.Fact):
    """Label of a function of a 16-bit uniform random number and of constants."""

    op: _checks.OpOccurrence
    # The values that it may have, equally probable, and those of a real number; None if unknown.
    values: tuple[np.ndarray, np.ndarray] | None = None
    survives = _checks.LAYOUT.union(_core.named("slice gather")) - _FUNCTIONS.keys()

    def report(self, op: _checks.OpOccurrence, message: str, severity: str = "") -> None:
        """Reports an operation that reads it."""
        step = f"{2 / _checks.stagnation(self.op.dtype):.2g}"
        draw = f"a uniform random number in {self.op.dtype.name} is a multiple of {step}"
        fix = _origins.fix_operation(self.op)
        op.add(RANDOM_16BIT, f"{draw}{message}.", fix, severity=severity)


@RANDOM_16BIT.on_operation("bitcast_convert_type")
def label_draw(op: _checks.OpOccurrence) -> Draw | None:
    """Labels random bits that become the mantissa of a number from 1 to 2."""
    maker = op.body.maker(op.operands[0])
    if not _core.is_16bit(op.dtype) or maker is None or maker.primitive.name != "or":
        return None
    exponent, steps = op.audit.known.value(maker.invars[1]), _checks.stagnation(op.dtype) // 2
    values = (1 + np.arange(steps) / steps).astype(op.dtype)
    is_uniform = exponent is not None and np.array_equal(exponent, values[0].view(np.uint16))
    return Draw(op, (values, 1 + (np.arange(_PARTS) + 0.5) / _PARTS)) if is_uniform else None


@RANDOM_16BIT.on_operation(*_FUNCTIONS)
def follow_draw(op: _checks.OpOccurrence) -> Draw | None:
    """Labels a function of a random number and of constants, and checks its outcomes."""
    draws = op.labels(Draw)
    if len(draws) != 1 or draws[0].values is None:
        return Draw(draws[0].op) if draws else None
    (draw,), is_float = draws, op.dtype in _checks.FLOATS
    known = [each for each in (_values(var, op) for var in op.operands) if each is not None]
    if len(known) < len(op.operands):
        if op.name in _COMPARISONS:
            draw.report(op, ", and so is the probability with which it is compared", "warning")
        return Draw(draw.op)
    is_cut = op.name == "convert_element_type" and not is_float
    with np.errstate(all="ignore"):
        function = np.trunc if is_cut else _FUNCTIONS[op.name]
        low, exact = (function(*each) for each in zip(*known, strict=True))
    if is_float and op.name not in _ROUNDINGS:
        return Draw(draw.op, (low.astype(op.dtype), exact))
    outcomes, counts = np.unique(exact, return_counts=True)
    ratios = np.mean(low[:, None] == outcomes, axis=0) * _PARTS / counts
    worst = np.argmax(np.abs(ratios - 1))
    # A probability close to 1 is rounded to 1, but none is rounded to 0.
    ends = known if op.name in _COMPARISONS else [(low, exact)]
    if len(outcomes) == 1 and all(np.any(values) for values, _ in ends):
        text = f": this {op.name} has one outcome, as of a probability that is rounded to 1"
        draw.report(op, text, "warning")
    elif abs(ratios[worst] - 1) >= _NOTABLE:
        right = counts[worst] / _PARTS
        text = f"the probability {right * ratios[worst]:.2g} instead of {right:.2g}"
        draw.report(op, f": an outcome of this {op.name} has {text}")
    return Draw(draw.op)


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
    written = [n.value for n in ast.walk(op.expression.node) if isinstance(n, ast.Constant)]
    floats = (x for x in written if isinstance(x, float) and low == np.asarray(x, low.dtype))
    return low, next(floats, value)
