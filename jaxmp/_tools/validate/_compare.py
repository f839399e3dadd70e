"""Compares the records of a candidate with those of the reference.

The deciding metric has a paired test over seeds, with its power.

The same seed gives reference and candidate the same initial parameters and batches, so their
losses share most of the variation between seeds. The test is therefore a paired test of the
differences per seed, with the 95 % interval of their mean:

- pass: the interval is not above the budget;
- fail: the lower bound exceeds the budget;
- differs: the upper bound is below minus the budget, so the candidate is better than the reference
  by more than rounding explains, and does not do the same;
- inconclusive: the interval contains the budget, one seed is an outlier, or there is only one seed;
  more seeds are needed.

The interval is that of Student's t distribution, which assumes normal differences, and is wider in
the direction in which the differences are skewed. benchmarks/validate_coverage.py measures its
coverage: at least 93 % for normal differences and for lognormal ones with sigma of at most 0.5, and
for lognormal ones with sigma of 1 from 20 seeds on. For several candidates, the intervals are wider
(Bonferroni), so that the probability that one of them passes wrongly is at most 5 %.

Sources: D. Schuirmann, "A comparison of the two one-sided tests procedure and the power approach",
Journal of Pharmacokinetics and Biopharmaceutics 15, 1987; N. Johnson, "Modified t tests and
confidence intervals for asymmetrical populations", Journal of the American Statistical Association
73, 1978; F. Grubbs, "Procedures for detecting outlying observations in samples", Technometrics 11,
1969.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from scipy import special

from jaxmp._tools.validate import _rows
from jaxmp._tools.validate._budget import Budget, final_loss, limit_of, smooth
from jaxmp._tools.validate._rows import (
    Comparison,
    GradientRow,
    MetricChoice,
    Power,
    SeedPair,
    TrainingRecord,
    TrainingRow,
)

# Probability with which the true mean is above the upper bound, and below the lower bound.
ALPHA = 0.025
# The same for one of several candidates.
FAMILY_ALPHA = 0.05
# Johnson's term for skewness, (1 + 2 * 1.96**2) / 6, times 2.25: the skewness of a sample of few
# seeds is smaller than that of its distribution.
_SKEWNESS = 3.25
POWER = 0.8
_MAX_SEEDS = 1000
# Sample with which the power is simulated, up to a number of seeds; then, skewness is negligible.
_SAMPLES, _SIMULATED = 4000, 64
# From four seeds on, a seed is an outlier if Grubbs's test finds it with this probability of an
# error, and if its distance from the median of the others exceeds this share of the budget.
OUTLIER_SEEDS, OUTLIER_ALPHA, OUTLIER_SHARE = 4, 0.05, 0.5


class Interval(NamedTuple):
    """Mean of paired differences with the bounds of its 95 % interval: the mean for a single seed.

    `outlier` is the distance of an outlier from the median of the other seeds, 0 if there is none.
    """

    mean: float
    low: float
    high: float
    deviation: float
    outlier: float = 0.0


def paired_interval(differences: Sequence[float], candidates: int = 1) -> Interval:
    """Returns the mean of the differences and the bounds of its 95 % interval.

    Args:
      differences: one per seed.
      candidates: number of candidates, none of which is to pass wrongly.

    Example:
      >>> interval = paired_interval([0.1, 0.2, 0.3])
      >>> round(interval.low, 3), round(interval.mean, 3), round(interval.high, 3)
      (-0.048, 0.2, 0.448)
    """
    values = np.asarray(differences, np.float64)
    mean = float(np.mean(values))
    if len(values) < 2 or not np.isfinite(values).all():
        return Interval(mean, mean, mean, math.nan)
    below, above = _widths(values[None], candidates)
    deviation = float(np.std(values, ddof=1))
    return Interval(
        mean, mean - float(below[0]), mean + float(above[0]), deviation, _outlier(values)
    )


def _widths(rows: np.ndarray, candidates: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the distances of both bounds from the mean of each row."""
    count = rows.shape[-1]
    centred = rows - rows.mean(-1, keepdims=True)
    error = rows.std(-1, ddof=1) / math.sqrt(count)
    half = quantile_t(count, candidates) * error
    third = (centred**3).sum(-1) * count / ((count - 1) * max(count - 2, 1))
    skewness = third / np.where(error > 0, error * math.sqrt(count), 1.0) ** 3
    shift = _SKEWNESS * skewness / math.sqrt(count) * error
    return half + np.maximum(-shift, 0), half + np.maximum(shift, 0)


def quantile_t(seeds: int, candidates: int = 1) -> float:
    """Returns the quantile of Student's t distribution for a mean over `seeds` seeds.

    It is that of 97.5 %, and of a larger share for more than two candidates.
    """
    return float(special.stdtrit(seeds - 1, 1 - min(ALPHA, FAMILY_ALPHA / candidates)))


def _outlier(values: np.ndarray) -> float:
    """Returns the distance of an outlier from the median of the other values; 0 without one."""
    count, deviation = len(values), np.std(values, ddof=1)
    if count < OUTLIER_SEEDS or deviation == 0:
        return 0.0
    index = int(np.argmax(np.abs(values - values.mean())))
    t = special.stdtrit(count - 2, 1 - OUTLIER_ALPHA / (2 * count))
    limit = (count - 1) / math.sqrt(count) * math.sqrt(t * t / (count - 2 + t * t))
    if abs(values[index] - values.mean()) <= limit * deviation:
        return 0.0
    return float(abs(values[index] - np.median(np.delete(values, index))))


def has_outlier(interval: Interval, budget: float) -> bool:
    """Returns True if a seed is an outlier whose distance matters for the budget."""
    return interval.outlier > OUTLIER_SHARE * budget


def judge_interval(interval: Interval, budget: float, direction: str = "min") -> str:
    """Returns "pass", "fail", "differs" or "inconclusive".

    One seed has no interval, and never passes: its difference fails if it exceeds the budget.

    Args:
      interval: the mean of the differences; positive if the candidate is worse.
      budget: the largest difference that passes.
      direction: "two-sided" if a difference in either direction fails.

    Example:
      >>> judge_interval(paired_interval([0.001, 0.002, 0.001]), 0.005)
      'pass'
      >>> judge_interval(paired_interval([-0.16, -0.161, -0.162]), 0.005)
      'differs'
    """
    if not math.isfinite(interval.mean):
        # A loss of -inf or an improvement without bound does not occur; NaN is a failure, too.
        return _rows.FAIL
    is_two_sided = direction == _rows.TWO_SIDED
    if interval.low > budget:
        return _rows.FAIL
    if interval.high < -budget:
        return _rows.FAIL if is_two_sided else _rows.DIFFERS
    is_inside = interval.high <= budget and (interval.low >= -budget or not is_two_sided)
    is_certain = math.isfinite(interval.deviation) and not has_outlier(interval, budget)
    return _rows.PASS if is_inside and is_certain else _rows.INCONCLUSIVE


# ---------------------------------------------------------------------------
# Power
# ---------------------------------------------------------------------------


def seeds_needed(deviation: float, budget: float, candidates: int = 1) -> int:
    """Returns the number of seeds with which a true difference of zero passes in 80 % of cases.

    Args:
      deviation: standard deviation of the paired differences.
      budget: the budget, in the same unit.
      candidates: number of candidates.

    Returns:
      At least 2; 0 if more than 1,000 seeds are needed or the deviation is unknown.

    Example:
      >>> seeds_needed(0.001, 0.005), seeds_needed(0.005, 0.005)
      (3, 13)
    """
    if not math.isfinite(deviation):
        return 0
    counts, power = range(2, _MAX_SEEDS + 1), POWER / (1 - OUTLIER_ALPHA)
    return next((n for n in counts if deviation * _reach(n, candidates, power) <= budget), 0)


# A search over seeds asks for it again, and it may be simulated.
@functools.cache
def _reach(seeds: int, candidates: int, power: float) -> float:
    """Returns the upper bound that a share of samples of a standard normal does not exceed.

    By symmetry, it is also the distance of the lower bound below the true difference.
    """
    if seeds > _SIMULATED:
        return (quantile_t(seeds, candidates) + special.ndtri(power)) / math.sqrt(seeds)
    rows = np.random.default_rng(seeds).normal(size=(_SAMPLES, seeds))
    return float(np.quantile(rows.mean(-1) + _widths(rows, candidates)[1], power))


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
    training: MetricChoice,
    candidates: int = 1,
) -> tuple[list[Comparison], list[SeedPair], Power]:
    """Compares final metrics and training losses.

    Args:
      reference: records of the reference.
      candidate: records of the candidate.
      metrics: the metrics, the deciding one first.
      budget: the budget of the candidate.
      training: scale of the training loss.
      candidates: number of candidates, for which the intervals are corrected.

    Returns:
      The comparisons with the deciding metric first, its values for each seed, and the power of
      its test.
    """
    final = lambda name: lambda record: record.evaluations[name][-1]
    pairs = [_pairs(reference, candidate, final(metric.name), metric) for metric in metrics]
    checks = [
        _tested(f"held_out_{metric.name}", each, metric, budget, candidates)
        for metric, each in zip(metrics, pairs, strict=True)
    ]
    finals = _pairs(reference, candidate, final_loss, training)
    checks.append(_tested("final_loss", finals, training, budget, candidates))
    power = _power(pairs[0], metrics[0], limit_of(metrics[0], budget), candidates)
    return checks, pairs[0], power


def _pairs(
    reference: Records,
    candidate: Records,
    figure: Callable[[TrainingRecord], float],
    metric: MetricChoice,
) -> list[SeedPair]:
    """Returns a figure of both for each seed, and the difference."""
    pairs = []
    for first, second in zip(reference, candidate, strict=True):
        x, y = figure(first), figure(second)
        difference = metric_difference(x, y, metric)
        pairs.append(SeedPair(seed=first.seed, reference=x, candidate=y, difference=difference))
    return pairs


def metric_difference(reference: float, candidate: float, metric: MetricChoice) -> float:
    """Returns log(candidate / reference) or the difference; positive if the candidate is worse."""
    sign = -1.0 if metric.direction == _rows.MAX else 1.0
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
    magnitude = 1.0 if scale == "relative" else max(abs(pair.reference) for pair in pairs)
    if 0 < abs(interval.mean) <= _SPACING * magnitude:
        # The rounding of metrics to FP32 alone can explain it.
        low, high = (bound - interval.mean for bound in (interval.low, interval.high))
        interval = interval._replace(mean=0.0, low=low, high=high)
    verdict = judge_interval(interval, limit, metric.direction)
    bounds = (interval.low, interval.high) if len(pairs) > 1 else ()
    bound = (
        max(interval.high, -interval.low) if metric.direction == _rows.TWO_SIDED else interval.high
    )
    text = f"{_rows.label(name)} {_shown(interval.mean, metric)}"
    if bounds and math.isfinite(interval.mean):
        text += f" ({' to '.join(_shown(x, metric) for x in bounds)})"
    if verdict == _rows.INCONCLUSIVE and not bounds:
        text += " for one seed, which gives no interval"
    elif verdict == _rows.INCONCLUSIVE and has_outlier(interval, limit):
        far = _shown(interval.outlier, metric).lstrip("+")
        text += f" with an outlier, one seed at {far} from the others"
    return Comparison(
        name=name,
        verdict=verdict,
        value=ratio(interval.mean),
        low=ratio(interval.low) if bounds else None,
        high=ratio(interval.high) if bounds else None,
        budget=ratio(limit),
        margin=ratio(limit) - ratio(bound),
        scale=scale,
        text=text,
    )


def relative_difference(value: float, metric: MetricChoice) -> float:
    """Converts a difference of logarithms to a ratio minus 1; positive if the candidate is worse.

    Example:
      >>> relative_difference(math.log(2), MetricChoice(direction="max"))
      0.5
    """
    if metric.scale == "absolute":
        return value
    return -math.expm1(-value) if metric.direction == _rows.MAX else math.expm1(min(value, 700.0))


def _shown(value: float, metric: MetricChoice) -> str:
    return _rows.figure_text(relative_difference(value, metric), metric.scale)


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
    gradients: Sequence[GradientRow],
    training: TrainingRow,
    budget: Budget,
    steps: int,
    unit: float,
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
        checks.append(_measured("loss_error", error, budget.loss_error, _rows.DIFFERS))
    share = training.skipped_after_warmup / max(steps, 1)
    checks.append(_measured("skipped_steps", share, budget.skipped))
    return checks


def _measured(name: str, value: float, budget: float, otherwise: str = _rows.FAIL) -> Comparison:
    """Returns the comparison of a figure without an interval."""
    text = f"{_rows.label(name)} {_rows.figure_text(value, 'relative', sign=False)}"
    return Comparison(
        name=name,
        verdict=_rows.PASS if value <= budget else otherwise,
        value=value,
        budget=budget,
        margin=budget - value,
        text=text,
    )


def overall(checks: Sequence[Comparison]) -> Comparison:
    """Returns the comparison that decides: the first that fails, or else differs, and so on."""
    order = (_rows.FAIL, _rows.DIFFERS, _rows.INCONCLUSIVE, _rows.PASS)
    return min(checks, key=lambda check: order.index(check.verdict))


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
    distances = [_distance(a, b, choice) for a, b in zip(first, second, strict=True)]
    between = [_distance(a, b, choice) for n, a in enumerate(first) for b in first[:n]]
    skipped = [step for record in candidate for step in record.skipped]
    scales = [record.loss_scales[-1] for record in candidate]
    return TrainingRow(
        curve_distance=float(np.mean(distances)),
        curve_band=float(np.mean(between)) if between else math.nan,
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


def _norm_ratio(reference: Records, candidate: Records) -> float:
    norms = lambda record: np.asarray(record.gradient_norms, np.float64)
    x, y = (np.concatenate(list(map(norms, records))) for records in (reference, candidate))
    if x.shape != y.shape or not x.size:
        return math.nan
    valid = np.isfinite(x) & np.isfinite(y) & (x > 0) & (y > 0)
    return float(np.exp(np.mean(np.log(y[valid] / x[valid])))) if valid.any() else math.nan
