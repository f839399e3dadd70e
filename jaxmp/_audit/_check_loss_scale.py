"""Check of gradients that depend on a loss scale where they should not.

The gradient of a loss that was multiplied by a scale is proportional to the scale until it is
divided by it. The labels of this file record that power of the scale for each value.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import jax.tree_util as jtu
import numpy as np

from jaxmp._audit._auditor import Auditor
from jaxmp._audit._checks import ERROR, Check
from jaxmp._audit._dataflow import GRADIENT, From
from jaxmp._audit._program import OpOccurrence
from jaxmp._audit._rows import Finding
from jaxmp._audit._scale_powers import powers_of
from jaxmp._audit._trace import Traced
from jaxmp._core._jaxprs import BACKWARD, Atom, is_literal

SCALED_GRADIENTS = Check(
    id="scaled_gradients",
    severity=ERROR,
    explanation="Gradients are clipped, measured or added to the state while they are multiplied by"
    " the loss scale, or they are divided by it twice.",
    fix="grads = jax.tree.map(lambda g: g / scale, grads)",
    includes_optimizer=True,
)


_FIX = (
    "Divide the gradients by the loss scale first, and remove a division that follows:\n"
    f"    {SCALED_GRADIENTS.fix}"
)


class _Event(NamedTuple):
    """Use of gradients that is wrong if argument `number` is a loss scale."""

    number: int
    op: OpOccurrence
    message: str
    fix: str = _FIX


class _Divisor(NamedTuple):
    """Scalar argument by which gradients are divided."""

    number: int


def _of_gradient(var: Atom, audit: Auditor) -> dict[int, float | None]:
    labels = audit.flow.of(var)
    return powers_of(labels) if GRADIENT in labels else {}


@SCALED_GRADIENTS.on_operation("mul", "div")
def check_division(op: OpOccurrence, audit: Auditor) -> None:
    """Collects the scalars by which gradients are divided, and divisions of unscaled gradients."""
    divided = -1 if op.name == "mul" else 1
    pairs = [op.equation.invars, op.equation.invars[::-1]][: 2 if op.name == "mul" else 1]
    for var, other in pairs if op.location.phase != BACKWARD else ():
        if GRADIENT in audit.flow.of(other) or GRADIENT not in audit.flow.of(var):
            continue
        for number in (
            n for n, power in powers_of(audit.flow.of(other)).items() if power == divided
        ):
            audit.collected[_Divisor].append(_Divisor(number))
            if _of_gradient(var, audit).get(number, 0) == 0:
                message = "gradients are divided by the loss scale a second time."
                where = audit.findings.where(op)
                fix = f"Remove the second division by the loss scale, at {where}."
                audit.collected[_Event].append(_Event(number, op, message, fix))


@SCALED_GRADIENTS.on_operation("lt", "le", "gt", "ge", "min", "max", "clamp", "add", "sub")
def check_use(op: OpOccurrence, audit: Auditor) -> None:
    """Collects limits of scaled gradients or of their norm, and sums with arguments."""
    if op.location.phase == BACKWARD:
        return
    is_sum = op.name in ("add", "sub")
    message = "gradients are clipped while they are multiplied by the loss scale."
    if is_sum:
        message = "the state is updated with gradients that are multiplied by the loss scale."
    for var in op.equation.invars:
        others = [x for x in op.equation.invars if x is not var]
        for number, power in _of_gradient(var, audit).items():
            is_other = all(_is_other(x, number, is_sum, audit) for x in others)
            if (power or 0) > 0 or (power and not is_sum):
                audit.collected[_Event] += [_Event(number, op, message)] * is_other


def _is_other(var: Atom, number: int, is_sum: bool, audit: Auditor) -> bool:
    """Returns True for a summand from the state, and for a limit without the loss scale."""
    labels = audit.flow.of(var)
    if number in powers_of(labels):
        return False
    if is_sum:
        return any(isinstance(label, From) for label in labels)
    value = abs(float(var.val)) if is_literal(var) and np.ndim(var.val) == 0 else 1
    return 1e-3 < value < math.inf


@SCALED_GRADIENTS.on_program
def check_scales(audit: Auditor, traced: Traced) -> Iterable[Finding]:
    """Reports the collected events of loss scales, and results that depend on one."""
    scales = set(powers_of(audit.flow.of_all(var for _, var in traced.scales())))
    if not scales and audit.float16_backward is not None:
        scales = audit.flow.scaled_by
    scales = (scales | {x.number for x in audit.collected[_Divisor]}) & audit.flow.scaled_by
    events = [event for event in audit.collected[_Event] if event.number in scales]
    for event in events:
        audit.add(SCALED_GRADIENTS, event.op, event.message, event.fix)
    for (path, _), var in zip(traced.results, traced.jaxpr.outvars, strict=False):
        powers = _of_gradient(var, audit)
        is_state = any(isinstance(label, From) for label in audit.flow.of(var))
        is_norm = var.aval.size == 1 and not is_state and any(powers.get(n) for n in scales)
        maker = traced.maker_of(var) if is_norm and not events else None
        if maker is not None:
            file, line = audit.findings.line_of(maker)
            message = f"result{jtu.keystr(path)} is computed from gradients that are multiplied by"
            yield SCALED_GRADIENTS.finding(f"{message} the loss scale.", _FIX, file=file, line=line)
