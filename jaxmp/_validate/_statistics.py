"""Paired test over seeds, and its power.

The same seed gives reference and candidate the same initial parameters and batches, so their
losses share most of the variation between seeds: of a byte-level GPT, two FP32 seeds differ by
1.9 %, and FP32 and BF16 of one seed by less than 0.1 %. The test is therefore a paired t test of
the differences per seed, in the form of two one-sided tests with alpha = 0.05 each:

- pass: the upper bound of the one-sided 95 % interval of the mean difference is within the budget
  (the candidate is not inferior by more than the budget; an improvement is not a failure);
- fail: the lower bound exceeds the budget;
- inconclusive: the interval contains the budget, so more seeds are needed.

Source: D. Schuirmann, "A comparison of the two one-sided tests procedure and the power approach",
Journal of Pharmacokinetics and Biopharmaceutics 15, 1987.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import special

from jaxmp._validate._rows import FAIL, INCONCLUSIVE, PASS

ALPHA = 0.05
POWER = 0.8
_MAX_SEEDS = 1000


class Interval(NamedTuple):
    """Mean of paired differences with its one-sided 95 % bounds; None with a single seed."""

    mean: float
    low: float | None
    high: float | None
    deviation: float

    @property
    def half_width(self) -> float:
        """Distance of a bound from the mean; NaN with a single seed."""
        return math.nan if self.high is None else self.high - self.mean


def paired_interval(differences: Sequence[float]) -> Interval:
    """Returns the mean of the differences and the bounds of its one-sided 95 % intervals.

    Args:
      differences: one per seed.

    Example:
      >>> interval = paired_interval([0.1, 0.2, 0.3])
      >>> round(interval.low, 3), round(interval.mean, 3), round(interval.high, 3)
      (0.031, 0.2, 0.369)
    """
    values = np.asarray(differences, np.float64)
    mean = float(np.mean(values))
    if len(values) < 2:
        return Interval(mean, None, None, math.nan)
    if not np.isfinite(values).all():
        return Interval(mean, mean, mean, math.nan)
    deviation = float(np.std(values, ddof=1))
    half = quantile_t(len(values)) * deviation / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half, deviation)


def quantile_t(seeds: int) -> float:
    """Returns the 95 % quantile of Student's t distribution for a mean over `seeds` seeds."""
    return float(special.stdtrit(seeds - 1, 1 - ALPHA))


def judge_interval(interval: Interval, budget: float) -> str:
    """Returns "pass", "fail" or "inconclusive".

    With one seed there is no interval, and the difference itself decides.

    Example:
      >>> judge_interval(paired_interval([0.001, 0.002, 0.001]), 0.005)
      'pass'
    """
    if not math.isfinite(interval.mean):
        # A loss of -inf or an improvement without bound does not occur; NaN is a failure, too.
        return FAIL
    low = interval.mean if interval.low is None else interval.low
    high = interval.mean if interval.high is None else interval.high
    if high <= budget:
        return PASS
    return FAIL if low > budget else INCONCLUSIVE


def seeds_needed(deviation: float, budget: float) -> int:
    """Returns the number of seeds with which a true difference of zero passes in 80 % of cases.

    Args:
      deviation: standard deviation of the paired differences.
      budget: the budget, in the same unit.

    Returns:
      At least 2; 0 if more than 1,000 seeds are needed or the deviation is unknown.

    Example:
      >>> seeds_needed(0.001, 0.005), seeds_needed(0.005, 0.005)
      (3, 8)
    """
    if not math.isfinite(deviation):
        return 0
    return next((n for n in range(2, _MAX_SEEDS) if _pass_power(n, deviation, budget) >= POWER), 0)


def detectable_excess(deviation: float, seeds: int) -> float:
    """Returns the excess over the budget that fails with a probability of 80 %.

    A candidate whose true difference is `budget + excess` then has a lower bound above the budget.

    Args:
      deviation: standard deviation of the paired differences.
      seeds: number of seeds.

    Returns:
      The excess in the unit of the deviation; NaN for one seed.
    """
    if seeds < 2 or not math.isfinite(deviation):
        return math.nan
    error = deviation / math.sqrt(seeds)
    if error == 0:
        return 0.0
    low, high = 0.0, 1e3
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if _noncentral(seeds, middle) >= POWER else (middle, high)
    return high * error


def _pass_power(seeds: int, deviation: float, budget: float) -> float:
    """Returns the probability that a true difference of zero passes."""
    if deviation == 0:
        return 1.0
    return _noncentral(seeds, budget / (deviation / math.sqrt(seeds)))


def _noncentral(seeds: int, shift: float) -> float:
    """Returns P(T > t) for a noncentral T with `seeds - 1` degrees and noncentrality `shift`."""
    if shift > 30:
        return 1.0
    return float(1 - special.nctdtr(seeds - 1, shift, quantile_t(seeds)))
