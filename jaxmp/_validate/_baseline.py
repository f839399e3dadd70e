"""Comparison of a validation with an earlier one of the same runs, for continuous integration."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from jaxmp._validate._compare import metric_difference, relative_difference
from jaxmp._validate._rows import TWO_SIDED, CandidateResult
from jaxmp._validate._sections import figure_text
from jaxmp._validate._statistics import paired_interval
from jaxmp.errors import ValidationError

if TYPE_CHECKING:
    from jaxmp._validate._report import ValidationReport

# A deciding metric is worse if its mean increase over the same seeds exceeds this share of the
# budget, and the lower bound of its interval exceeds zero.
LOSS_SHARE = 0.2
_REMEDY = (
    ", or write a new baseline:\n"
    "    jaxmp validate run.py:make_run --baseline baseline.json --write-baseline"
)
# Increase that other versions and machines may cause.
GRADIENT_FACTOR = 1.2


def find_regressions(report: ValidationReport, baseline: ValidationReport) -> list[str]:
    """Returns a sentence for each figure that is worse than in the baseline.

    Args:
      report: the new report.
      baseline: the earlier report. It may have more candidates.

    Raises:
      ValidationError: if the runs differ in seeds, steps or metric, or the baseline lacks a
        candidate.
    """
    for name in ("reference", "seeds", "steps"):
        new, old = getattr(report, name), getattr(baseline, name)
        if new != old:
            raise ValidationError(
                f"The baseline was made with {name}={old!r}, and this report with {new!r}. Use "
                f"the same arguments{_REMEDY}"
            )
    new, old = report.metric, baseline.metric
    if (new.name, new.scale, new.direction) != (old.name, old.scale, old.direction):
        raise ValidationError(
            f"In the baseline, the {old.scale} difference of {old.name!r} decides "
            f"({old.direction}), and in this report the {new.scale} difference of {new.name!r} "
            f"({new.direction}). Return the same metrics from evaluate, and declare "
            f"metrics={{{old.name!r}: {old.direction!r}}}{_REMEDY}"
        )
    earlier = {candidate.name: candidate for candidate in baseline.candidates}
    missing = [each.name for each in report.candidates if each.name not in earlier]
    if missing:
        raise ValidationError(
            f"The baseline has no candidate {missing[0]!r}; it has "
            f"{', '.join(map(repr, earlier))}. Use the same candidates{_REMEDY}"
        )
    return [
        f"{candidate.name}: {text}"
        for candidate in report.candidates
        for text in _worse(report, candidate, earlier[candidate.name])
    ]


def _worse(report: ValidationReport, new: CandidateResult, old: CandidateResult) -> Iterator[str]:
    yield from _worse_metric(report, new, old)
    before, after = (
        float(np.median([row.error for row in each.gradients] or [math.nan])) for each in (old, new)
    )
    # Below this error, FP32 programs of two versions differ as much.
    if after > GRADIENT_FACTOR * before and after > 1e-4:
        yield f"the gradient error rose from {100 * before:.3g} % to {100 * after:.3g} %."


def _worse_metric(
    report: ValidationReport, new: CandidateResult, old: CandidateResult
) -> Iterator[str]:
    scale = report.metric.scale
    differences = [
        metric_difference(before.candidate, after.candidate, report.metric)
        for before, after in zip(old.pairs, new.pairs, strict=True)
    ]
    interval = paired_interval(differences)
    if report.metric.direction == TWO_SIDED and interval.mean < 0:
        interval = paired_interval([-difference for difference in differences])
    low = interval.mean if interval.low is None else interval.low
    limit = LOSS_SHARE * new.checks[0].budget
    if math.isnan(interval.mean) or (low > 0 and interval.mean > limit):
        value = relative_difference(interval.mean, report.metric)
        yield (
            f"the held-out {report.metric.name} is worse by {figure_text(value, scale)} than in "
            "the baseline."
        )
