"""Paired test over seeds, and its power.

The same seed gives reference and candidate the same initial parameters and batches, so their
losses share most of the variation between seeds. The test is therefore a paired test of the
differences per seed, with the 95 % interval of their mean:

- pass: the interval is not above the budget;
- fail: the lower bound exceeds the budget;
- differs: the upper bound is below minus the budget, so the candidate is better than the reference
  by more than rounding explains, and does not do the same;
- inconclusive: the interval contains the budget, or one seed is an outlier; more seeds are needed.

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
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import special

from jaxmp._tools.validate._rows import DIFFERS, FAIL, INCONCLUSIVE, PASS, TWO_SIDED

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
    """Mean of paired differences with the bounds of its 95 % interval; None with a single seed.

    `outlier` is the distance of an outlier from the median of the other seeds, 0 if there is none.
    """

    mean: float
    low: float | None
    high: float | None
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
    if len(values) < 2:
        return Interval(mean, None, None, math.nan)
    if not np.isfinite(values).all():
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

    With one seed there is no interval, and the difference itself decides.

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
        return FAIL
    low = interval.mean if interval.low is None else interval.low
    high = interval.mean if interval.high is None else interval.high
    is_two_sided = direction == TWO_SIDED
    if low > budget:
        return FAIL
    if high < -budget:
        return FAIL if is_two_sided else DIFFERS
    is_inside = high <= budget and (low >= -budget or not is_two_sided)
    return PASS if is_inside and not has_outlier(interval, budget) else INCONCLUSIVE


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


@functools.cache
def _reach(seeds: int, candidates: int, power: float) -> float:
    """Returns the upper bound that a share of samples of a standard normal does not exceed.

    By symmetry, it is also the distance of the lower bound below the true difference.
    """
    if seeds > _SIMULATED:
        return (quantile_t(seeds, candidates) + special.ndtri(power)) / math.sqrt(seeds)
    rows = np.random.default_rng(seeds).normal(size=(_SAMPLES, seeds))
    return float(np.quantile(rows.mean(-1) + _widths(rows, candidates)[1], power))
