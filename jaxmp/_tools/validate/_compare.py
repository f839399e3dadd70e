"""Compares the records of a candidate with those of the reference."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from jaxmp._tools.validate._budget import Budget, choose_training, final_loss, limit_of, smooth
from jaxmp._tools.validate._rows import (
    DIFFERS,
    FAIL,
    INCONCLUSIVE,
    MAX,
    PASS,
    TWO_SIDED,
    Comparison,
    GradientRow,
    MetricChoice,
    Power,
    SeedPair,
    TrainingRecord,
    TrainingRow,
)
from jaxmp._tools.validate._sections import figure_text, label
from jaxmp._tools.validate._statistics import (
    Interval,
    has_outlier,
    judge_interval,
    paired_interval,
    seeds_needed,
)

Records = Sequence[TrainingRecord]
# Spacing of FP32 numbers, relative to their magnitude: evaluations return FP32 metrics.
_SPACING = 2.0**-23

# ---------------------------------------------------------------------------
# Budgets
# ---------------------------------------------------------------------------


def compare_metrics(
    reference: Records,
    candidate: Records,
    metrics: Sequence[MetricChoice],
    budget: Budget,
    training: MetricChoice | None = None,
    candidates: int = 1,
) -> tuple[list[Comparison], list[SeedPair], Power]:
    """Compares final metrics and training losses.

    Args:
      reference: records of the reference.
      candidate: records of the candidate.
      metrics: the metrics, the deciding one first.
      budget: the budget of the candidate.
      training: scale of the training loss; None: that of these records.
      candidates: number of candidates, for which the intervals are corrected.

    Returns:
      The comparisons with the deciding metric first, its values for each seed, and the power of
      its test.
    """
    training = training or choose_training(reference, candidate, [budget])
    pairs = [seed_pairs(reference, candidate, metric) for metric in metrics]
    checks = [
        _tested(f"held_out_{metric.name}", each, metric, budget, candidates)
        for metric, each in zip(metrics, pairs, strict=True)
    ]
    finals = [
        _pair(first.seed, final_loss(first), final_loss(second), training)
        for first, second in zip(reference, candidate, strict=True)
    ]
    checks.append(_tested("final_loss", finals, training, budget, candidates))
    power = _power(pairs[0], metrics[0], limit_of(metrics[0], budget), candidates)
    return checks, pairs[0], power


def seed_pairs(reference: Records, candidate: Records, metric: MetricChoice) -> list[SeedPair]:
    """Returns the final metric of both for each seed, and the difference."""
    final = lambda record: record.evaluations[metric.name][-1]
    return [
        _pair(first.seed, final(first), final(second), metric)
        for first, second in zip(reference, candidate, strict=True)
    ]


def _pair(seed: int, reference: float, candidate: float, metric: MetricChoice) -> SeedPair:
    difference = metric_difference(reference, candidate, metric)
    return SeedPair(seed=seed, reference=reference, candidate=candidate, difference=difference)


def metric_difference(reference: float, candidate: float, metric: MetricChoice) -> float:
    """Returns log(candidate / reference) or the difference; positive if the candidate is worse."""
    sign = -1.0 if metric.direction == MAX else 1.0
    if not (math.isfinite(reference) and math.isfinite(candidate)):
        return math.nan
    if metric.scale == "absolute":
        return sign * (candidate - reference)
    return sign * math.log(candidate / reference) if candidate > 0 and reference > 0 else math.nan


def _tested(
    name: str, pairs: Sequence[SeedPair], metric: MetricChoice, budget: Budget, candidates: int
) -> Comparison:
    """Returns the comparison of paired differences with a budget."""
    limit, scale = limit_of(metric, budget), metric.scale
    ratio = lambda value: relative_difference(value, metric)
    interval = paired_interval([pair.difference for pair in pairs], candidates)
    interval = _without_rounding(interval, pairs, scale)
    verdict = judge_interval(interval, limit, metric.direction)
    bound = interval.mean if interval.high is None else interval.high
    if metric.direction == TWO_SIDED:
        bound = max(bound, -(interval.mean if interval.low is None else interval.low))
    text = f"{label(name)} {_shown(interval.mean, metric)}"
    if interval.low is not None and interval.high is not None and math.isfinite(interval.mean):
        low, high = (_shown(x, metric) for x in (interval.low, interval.high))
        text += f" ({low} to {high})"
    if verdict == INCONCLUSIVE and has_outlier(interval, limit):
        far = _shown(interval.outlier, metric).lstrip("+")
        text += f" with an outlier, one seed at {far} from the others"
    return Comparison(
        name=name,
        verdict=verdict,
        value=ratio(interval.mean),
        low=None if interval.low is None else ratio(interval.low),
        high=None if interval.high is None else ratio(interval.high),
        budget=ratio(limit),
        margin=ratio(limit) - ratio(bound),
        scale=scale,
        text=text,
    )


def _without_rounding(interval: Interval, pairs: Sequence[SeedPair], scale: str) -> Interval:
    """Moves a mean to zero if the rounding of metrics to FP32 alone can explain it."""
    magnitude = 1.0 if scale == "relative" else max(abs(pair.reference) for pair in pairs)
    if not 0 < abs(interval.mean) <= _SPACING * magnitude:
        return interval
    low, high = (
        None if bound is None else bound - interval.mean for bound in (interval.low, interval.high)
    )
    return interval._replace(mean=0.0, low=low, high=high)


def relative_difference(value: float, metric: MetricChoice) -> float:
    """Converts a difference of logarithms to a ratio minus 1; positive if the candidate is worse.

    Example:
      >>> relative_difference(math.log(2), MetricChoice(direction="max"))
      0.5
    """
    if metric.scale == "absolute":
        return value
    return -math.expm1(-value) if metric.direction == MAX else math.expm1(min(value, 700.0))


def _shown(value: float, metric: MetricChoice) -> str:
    return figure_text(relative_difference(value, metric), metric.scale)


def _power(pairs: Sequence[SeedPair], metric: MetricChoice, limit: float, candidates: int) -> Power:
    """Returns the number of seeds with which a candidate without any difference would pass."""
    deviation = paired_interval([pair.difference for pair in pairs], candidates).deviation
    if not math.isfinite(deviation):
        cause = "one seed" if len(pairs) < 2 else "a run without a finite result"
        text = f"With {cause}, the difference has no interval; use seeds=3 or more."
        return Power(text=text)
    count = seeds_needed(deviation, limit, candidates)
    text = (
        f"The paired differences of {metric.name} have a standard deviation of "
        f"{_shown(deviation, metric).lstrip('+')} over {len(pairs)} seeds. A true difference of "
        f"zero would pass with {count if count else 'more than 1,000'} seeds with a probability of "
        "80 %."
    )
    return Power(deviation=deviation, seeds_needed=count, text=text)


def compare_figures(
    gradients: Sequence[GradientRow], training: TrainingRow, budget: Budget, steps: int, unit: float
) -> list[Comparison]:
    """Compares the errors of gradients and losses, and the skipped steps, with their budgets.

    Errors of losses below `unit` are relative to it; `steps` are those of all seeds.
    """
    checks = []
    if gradients:
        error = float(np.median([row.error for row in gradients]))
        checks.append(_measured("gradient_error", error, budget.gradient))
        errors = [row.loss_error * min(1.0, abs(row.loss) / (unit or 1e-30)) for row in gradients]
        error = float(np.median(errors))
        checks.append(_measured("loss_error", error, budget.loss_error, DIFFERS))
    share = training.skipped_after_warmup / max(steps, 1)
    checks.append(_measured("skipped_steps", share, budget.skipped))
    return checks


def _measured(name: str, value: float, budget: float, otherwise: str = FAIL) -> Comparison:
    """Returns the comparison of a figure without an interval."""
    text = f"{label(name)} {figure_text(value, 'relative', sign=False)}"
    return Comparison(
        name=name,
        verdict=PASS if value <= budget else otherwise,
        value=value,
        budget=budget,
        margin=budget - value,
        text=text,
    )


def overall(checks: Sequence[Comparison]) -> Comparison:
    """Returns the comparison that decides: the first that fails, or else differs, and so on."""
    for verdict in (FAIL, DIFFERS, INCONCLUSIVE):
        for check in checks:
            if check.verdict == verdict:
                return check
    return checks[0]


# ---------------------------------------------------------------------------
# Whole training
# ---------------------------------------------------------------------------


def compare_training(reference: Records, candidate: Records, choice: MetricChoice) -> TrainingRow:
    """Compares curves, gradient norms, skipped steps and loss scales.

    Args:
      reference: records of the reference.
      candidate: records of the candidate.
      choice: scale of the training loss.
    """
    steps = len(reference[0].losses)
    first, second = (np.array([smooth(r.losses) for r in rs]) for rs in (reference, candidate))
    low, high, mean = first.min(axis=0), first.max(axis=0), second.mean(axis=0)
    inside = np.mean((mean >= low) & (mean <= high)) if len(reference) > 1 else math.nan
    skipped = [step for record in candidate for step in record.skipped]
    scales = [record.loss_scales[-1] for record in candidate]
    return TrainingRow(
        curve_distance=float(
            np.mean([_distance(a, b, choice) for a, b in zip(first, second, strict=True)])
        ),
        curve_band=_band(first, choice),
        curve_inside=float(inside),
        gradient_norm_ratio=_norm_ratio(reference, candidate),
        skipped=len(skipped),
        skipped_share=len(skipped) / (steps * len(candidate)),
        skipped_after_warmup=sum(step >= steps // 10 for step in skipped),
        final_loss_scale=(min(scales), max(scales)),
    )


def _distance(x: np.ndarray, y: np.ndarray, choice: MetricChoice) -> float:
    """Returns the mean distance of two curves; infinite if a value is not finite."""
    if not np.isfinite(y).all():
        return math.inf
    if choice.scale == "absolute":
        return float(np.mean(np.abs(y - x))) / choice.unit
    return float(np.mean(np.abs(np.log(y / x)))) if (y > 0).all() else math.inf


def _band(curves: np.ndarray, choice: MetricChoice) -> float:
    pairs = [_distance(curves[i], curves[j], choice) for i in range(len(curves)) for j in range(i)]
    return float(np.mean(pairs)) if pairs else math.nan


def _norms(records: Records) -> np.ndarray:
    return np.concatenate([np.asarray(record.gradient_norms, np.float64) for record in records])


def _norm_ratio(reference: Records, candidate: Records) -> float:
    x, y = _norms(reference), _norms(candidate)
    if x.shape != y.shape or not x.size:
        return math.nan
    valid = np.isfinite(x) & np.isfinite(y) & (x > 0) & (y > 0)
    return float(np.exp(np.mean(np.log(y[valid] / x[valid])))) if valid.any() else math.nan
