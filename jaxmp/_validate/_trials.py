"""Repeats a compared step in FP32, and with the roundings of one source line at a time.

The errors of these repetitions are measured effects: a line whose roundings alone cause an error
of the gradient explains it, and an error that remains in FP32 is not caused by roundings.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxmp._core._typing import PyTree
from jaxmp._validate._emulate import EXACT, MAX_LINES, ROUNDED, WIDE_RANGE, Emulation, Origin
from jaxmp._validate._probe import Probe, gradient_row, make_probe, module_rows
from jaxmp._validate._pure import PureRun
from jaxmp._validate._rows import GradientRow, ModuleRow

# Errors that 16-bit recipes have without a fault, by the field of a `GradientRow`.
FLOORS = {"error": 0.03, "loss_error": 0.005, "update_error": 0.05}
# Part of an error that has to vanish, or to remain, for a line to be its cause.
SHARE = 0.5


class LineTrial(NamedTuple):
    """Errors of a step in which only one source line rounds."""

    origin: Origin
    module: str
    row: GradientRow


class Trial(NamedTuple):
    """Errors of a step, compared with the reference on its parameters and batch.

    Args:
      rounded: with all roundings.
      exact: without roundings.
      wide_range: with roundings to the precision of each format, in the range of FP32.
      modules: outputs and gradients of the modules without roundings.
      lines: each line alone; empty if roundings do not explain an error.
      uses_float16: True if operations are computed in float16.
    """

    rounded: GradientRow
    exact: GradientRow
    wide_range: GradientRow
    modules: Sequence[ModuleRow]
    lines: Sequence[LineTrial]
    uses_float16: bool

    def explained(self, field: str) -> float:
        """Returns an error that vanishes without roundings; 0 for one that remains or is small."""
        before, after = finite(self.rounded, field), finite(self.exact, field)
        # The repetition begins with the initial state of the optimizer.
        is_comparable = field != "update_error" or self.rounded.step == 0
        return before if after < SHARE * before and is_comparable else 0.0


def finite(row: GradientRow, field: str) -> float:
    """Returns an error that may be infinite; 0 if it is as small as those without a fault."""
    value = getattr(row, field)
    return math.inf if math.isnan(value) else value if value > FLOORS[field] else 0.0


def step_to_repeat(rows: Sequence[GradientRow]) -> int:
    """Returns the step whose error is repeated: the first with a large error of the gradient.

    A loss that is not finite comes first. Gradients that are not finite come last, since a loss
    scale that is too large at the beginning causes them.
    """
    largest = max((row.error for row in rows if math.isfinite(row.error)), default=0.0)

    def rank(row: GradientRow) -> tuple[bool, bool, bool, int]:
        is_large = row.error >= SHARE * min(largest, 1.0)
        is_known = math.isfinite(row.error)
        return math.isfinite(row.loss_error), not is_known, not is_large, row.step

    return min(rows, key=rank).step


def repeat_step(run: PureRun, arrays: PyTree, batch: PyTree, step: int, reference: Probe) -> Trial:
    """Repeats a step.

    Args:
      run: the candidate.
      arrays: its state, with the parameters of the reference at this step.
      batch: the batch of this step.
      step: number of updates before it.
      reference: measurements of the reference.
    """
    emulation = Emulation(run)
    probe = make_probe(emulation.pure_run)

    def measure(modes: np.ndarray) -> Probe:
        return probe((modes, arrays), batch)

    same = lambda mode: np.full(MAX_LINES, mode, np.int32)
    exact = measure(same(EXACT))
    rounded, exact_row, wide_range = (
        gradient_row(step, reference, each)
        for each in (measure(same(ROUNDED)), exact, measure(same(WIDE_RANGE)))
    )
    modules = module_rows(step, reference, exact)
    is_float16 = any(origin.dtype == "float16" for origin in emulation.origins)
    trial = Trial(rounded, exact_row, wide_range, modules, (), is_float16)
    if not any(map(trial.explained, FLOORS)):
        return trial
    lines = []
    for number, origin in enumerate(emulation.origins[:MAX_LINES]):
        modes = same(EXACT)
        modes[number] = ROUNDED
        row = gradient_row(step, reference, measure(modes))
        lines.append(LineTrial(origin, emulation.module(origin), row))
    return trial._replace(lines=lines)
