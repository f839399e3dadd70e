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
from jaxmp._audit._scale_powers import Power, powers_of
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


class _Event(NamedTuple):
    """Use of gradients that would be wrong if argument `number` is a loss scale."""

    number: int
    op: OpOccurrence
    message: str
    fix: str


class _Scales(NamedTuple):
    """Numbers of the scalars that the backward pass multiplies by, or by which gradients are
    divided after it.
    """

    in_backward: set[int]
    divisors: set[int]


# ---------------------------------------------------------------------------
# Events
# ---------------------------------------------------------------------------


def _scales(audit: Auditor) -> _Scales:
    if not audit.collected[_Scales]:
        audit.collected[_Scales].append(_Scales(set(), set()))
    return audit.collected[_Scales][0]


def _of_gradient(var: Atom, audit: Auditor) -> dict[int, float | None]:
    labels = audit.flow.of(var)
    return powers_of(labels) if GRADIENT in labels else {}


@SCALED_GRADIENTS.on_operation("mul", "div")
def collect_scales(op: OpOccurrence, audit: Auditor) -> None:
    """Collects the scalars that the backward pass depends on, and divisors of gradients."""
    lhs, rhs = op.equation.invars
    if op.location.phase == BACKWARD:
        powers = powers_of(audit.flow.of_all(op.equation.invars))
        _scales(audit).in_backward.update(n for n, exponent in powers.items() if exponent)
        return
    for var, other in ((lhs, rhs), (rhs, lhs)) if op.name == "mul" else ((lhs, rhs),):
        labels = audit.flow.of(other)
        if GRADIENT in labels or GRADIENT not in audit.flow.of(var):
            continue
        for number, exponent in powers_of(labels).items():
            if exponent == (-1 if op.name == "mul" else 1):
                _scales(audit).divisors.add(number)
                if powers_of(audit.flow.of(var)).get(number, 0) == 0:
                    text = "gradients are divided by the loss scale a second time."
                    where = audit.findings.where(op)
                    fix = f"Remove the second division by the loss scale, at {where}."
                    audit.collected[_Event].append(_Event(number, op, text, fix))


@SCALED_GRADIENTS.on_operation("lt", "le", "gt", "ge", "min", "max", "clamp")
def check_clip(op: OpOccurrence, audit: Auditor) -> None:
    """Collects comparisons of scaled gradients, or of their norm, with a constant."""
    if op.location.phase == BACKWARD:
        return
    for var in op.equation.invars:
        for number, exponent in _of_gradient(var, audit).items():
            others = [x for x in op.equation.invars if x is not var]
            is_limit = all(
                number not in powers_of(audit.flow.of(x)) and _is_limit(x) for x in others
            )
            if exponent and is_limit:
                text = "gradients are clipped while they are multiplied by the loss scale, so that"
                text += " the limit depends on the scale."
                fix = "Divide the gradients by the loss scale before they are clipped:\n"
                fix += f"    {SCALED_GRADIENTS.fix}"
                audit.collected[_Event].append(_Event(number, op, text, fix))


def _is_limit(var: Atom) -> bool:
    value = var.val if is_literal(var) and np.ndim(var.val) == 0 else 1
    return 1e-3 < abs(float(value)) < math.inf


@SCALED_GRADIENTS.on_operation("add", "sub")
def check_update(op: OpOccurrence, audit: Auditor) -> None:
    """Collects updates of the state with scaled gradients."""
    if op.location.phase == BACKWARD or op.location.differentiated:
        return
    lhs, rhs = op.equation.invars
    for var, state in ((lhs, rhs), (rhs, lhs)):
        is_state = any(isinstance(label, From) for label in audit.flow.of(state))
        for number, exponent in _of_gradient(var, audit).items() if is_state else ():
            if (exponent or 0) > 0 and number not in powers_of(audit.flow.of(state)):
                text = "the state is updated with gradients that are multiplied by the loss scale."
                fix = f"Divide the gradients by the loss scale:\n    {SCALED_GRADIENTS.fix}"
                audit.collected[_Event].append(_Event(number, op, text, fix))


@SCALED_GRADIENTS.on_program
def check_scales(audit: Auditor, traced: Traced) -> Iterable[Finding]:
    """Reports the collected events of loss scales, and results that depend on one."""
    scales = {
        label.number
        for _, var in traced.scales()
        for label in audit.flow.of(var)
        if isinstance(label, Power)
    }
    by_hand = _scales(audit)
    scales |= by_hand.in_backward & by_hand.divisors
    if audit.float16_backward is not None and not traced.scales():
        scales |= by_hand.in_backward
    events = [
        event for event in audit.collected[_Event] if event.number in scales & by_hand.in_backward
    ]
    for event in events:
        audit.add(SCALED_GRADIENTS, event.op, event.message, event.fix)
    for (path, _), var in zip(traced.results, traced.jaxpr.outvars, strict=False):
        powers = _of_gradient(var, audit)
        is_state = any(isinstance(label, From) for label in audit.flow.of(var))
        is_norm = var.aval.size == 1 and not is_state and any(powers.get(n) for n in scales)
        if is_norm and not events:
            file, line = traced.line_of(var)
            message = (
                f"result {jtu.keystr(path)} is a norm of gradients times a power of the loss scale."
            )
            fix = f"Divide the gradients by the loss scale first:\n    {SCALED_GRADIENTS.fix}"
            yield Finding(check=SCALED_GRADIENTS.id, message=message, fix=fix, file=file, line=line)
