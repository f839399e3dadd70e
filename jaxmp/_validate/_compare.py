"""Compares the records of a candidate with those of the reference."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from jaxmp._validate._budget import LOSS, Budget, initial_loss, is_higher_better
from jaxmp._validate._rows import (
    FAIL,
    INCONCLUSIVE,
    PASS,
    Comparison,
    GradientRow,
    MetricChoice,
    Power,
    SeedPair,
    TrainingRecord,
    TrainingRow,
)
from jaxmp._validate._sections import figure_text, label
from jaxmp._validate._statistics import (
    Interval,
    detectable_excess,
    judge_interval,
    paired_interval,
    seeds_needed,
)

Records = Sequence[TrainingRecord]
# Share of the steps at the end over which the training loss is averaged.
_LAST = 0.1
# Spacing of FP32 numbers, relative to their magnitude: evaluations return FP32 metrics.
_SPACING = 2.0**-23
# Quantiles of the gradient norms.
_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)

# ---------------------------------------------------------------------------
# Budgets
# ---------------------------------------------------------------------------


def compare_metrics(
    reference: Records, candidate: Records, metric: MetricChoice, budget: Budget
) -> tuple[list[Comparison], list[SeedPair], Power]:
    """Compares final metrics and training losses.

    Returns:
      The comparisons with the deciding metric first, its values for each seed, and the power of
      its test.
    """
    pairs = seed_pairs(reference, candidate, metric)
    limit = _limit(metric, budget, reference)
    checks = [_tested(f"held_out_{metric.name}", pairs, limit, metric.scale)]
    loss = MetricChoice(name=LOSS, scale=metric.scale)
    loss_limit = _limit(loss, budget, reference)
    if metric.name != LOSS and LOSS in reference[0].evaluations:
        others = seed_pairs(reference, candidate, loss)
        checks.append(_tested("held_out_loss", others, loss_limit, metric.scale))
    finals = [
        _pair(first.seed, _final_loss(first), _final_loss(second), loss)
        for first, second in zip(reference, candidate, strict=True)
    ]
    checks.append(_tested("final_loss", finals, loss_limit, metric.scale))
    return checks, pairs, _power(pairs, reference, metric, limit)


def seed_pairs(reference: Records, candidate: Records, metric: MetricChoice) -> list[SeedPair]:
    """Returns the final metric of both for each seed, and the difference."""
    final = lambda record: record.evaluations[metric.name][-1]
    return [
        _pair(first.seed, final(first), final(second), metric)
        for first, second in zip(reference, candidate, strict=True)
    ]


def _pair(seed: int, reference: float, candidate: float, metric: MetricChoice) -> SeedPair:
    sign = -1.0 if is_higher_better(metric.name) else 1.0
    difference = sign * loss_difference(reference, candidate, metric.scale)
    return SeedPair(seed=seed, reference=reference, candidate=candidate, difference=difference)


def loss_difference(reference: float, candidate: float, scale: str) -> float:
    """Returns log(candidate / reference), or the difference if the scale is absolute."""
    if not math.isfinite(candidate):
        return math.nan
    if scale == "absolute":
        return candidate - reference
    return math.log(candidate / reference) if candidate > 0 and reference > 0 else math.nan


def _limit(metric: MetricChoice, budget: Budget, reference: Records) -> float:
    """Returns the budget of a metric in the unit of its differences."""
    if is_higher_better(metric.name):
        largest = max(max(record.evaluations[metric.name]) for record in reference)
        return budget.accuracy * (100 if largest > 1.5 else 1)
    if metric.scale == "absolute":
        return budget.loss * initial_loss(reference)
    return math.log1p(budget.loss)


def _final_loss(record: TrainingRecord) -> float:
    last = max(1, round(_LAST * len(record.losses)))
    return float(np.mean(record.losses[-last:]))


def _tested(name: str, pairs: Sequence[SeedPair], limit: float, scale: str) -> Comparison:
    """Returns the comparison of paired differences with a budget."""
    interval = _without_rounding(paired_interval([pair.difference for pair in pairs]), pairs, scale)
    verdict = judge_interval(interval, limit)
    bound = interval.mean if interval.high is None else interval.high
    text = f"{label(name)} {_shown(interval.mean, scale)}"
    if interval.low is not None and interval.high is not None and math.isfinite(interval.mean):
        low, high = (_shown(x, scale) for x in (interval.low, interval.high))
        text += f" ({low} to {high})"
    return Comparison(
        name=name,
        verdict=verdict,
        value=_ratio(interval.mean, scale),
        low=None if interval.low is None else _ratio(interval.low, scale),
        high=None if interval.high is None else _ratio(interval.high, scale),
        budget=_ratio(limit, scale),
        margin=_ratio(limit, scale) - _ratio(bound, scale),
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


def _ratio(value: float, scale: str) -> float:
    """Converts a difference of logarithms to a ratio minus 1."""
    return math.expm1(min(value, 700.0)) if scale == "relative" else value


def _shown(value: float, scale: str) -> str:
    return figure_text(_ratio(value, scale), scale)


def _power(pairs: list[SeedPair], reference: Records, metric: MetricChoice, limit: float) -> Power:
    interval = paired_interval([pair.difference for pair in pairs])
    values = [pair.reference for pair in pairs]
    if metric.scale == "relative" and min(values) > 0:
        values = [math.log(value) for value in values]
    unpaired = paired_interval(values).deviation
    needed = seeds_needed(interval.deviation, limit)
    excess = detectable_excess(interval.deviation, len(pairs))
    power = Power(
        deviation=interval.deviation,
        unpaired_deviation=unpaired,
        interval=interval.half_width,
        detectable=excess,
        seeds_needed=needed,
    )
    return Power(**{**vars(power), "text": _power_text(power, pairs, metric, limit, reference)})


def _power_text(
    power: Power, pairs: list[SeedPair], metric: MetricChoice, limit: float, reference: Records
) -> str:
    if not math.isfinite(power.deviation):
        cause = "one seed" if len(pairs) < 2 else "a run without a finite result"
        return f"With {cause}, the difference has no interval; use seeds=3 or more."
    shown = lambda value: _shown(value, metric.scale).lstrip("+")
    needed = f"{power.seeds_needed} seeds" if power.seeds_needed else "more than 1,000 seeds"
    return (
        f"The paired differences of {metric.name} have a standard deviation of "
        f"{shown(power.deviation)} over {len(pairs)} seeds; seeds of the reference alone differ "
        f"by {shown(power.unpaired_deviation)}. A true difference of "
        f"{shown(limit + power.detectable)} would fail, and one of zero would pass with {needed}, "
        f"each with a probability of 80 % after {len(reference[0].losses)} steps. More steps "
        "change the deviation, which has to be measured again."
    )


def compare_figures(
    gradients: Sequence[GradientRow], training: TrainingRow, budget: Budget, steps: int, seeds: int
) -> list[Comparison]:
    """Compares the errors of gradients and the skipped steps with their budgets."""
    checks = []
    if gradients:
        error = float(np.median([row.error for row in gradients]))
        checks.append(_measured("gradient_error", error, budget.gradient))
    share = training.skipped_after_warmup / max(steps * seeds, 1)
    checks.append(_measured("skipped_steps", share, budget.skipped))
    return checks


def _measured(name: str, value: float, budget: float) -> Comparison:
    """Returns the comparison of a figure without an interval."""
    text = f"{label(name)} {figure_text(value, 'relative', sign=False)}"
    return Comparison(
        name=name,
        verdict=PASS if value <= budget else FAIL,
        value=value,
        budget=budget,
        margin=budget - value,
        text=text,
    )


def overall(checks: Sequence[Comparison]) -> Comparison:
    """Returns the comparison that decides: the first failing, inconclusive or passing one."""
    for verdict in (FAIL, INCONCLUSIVE):
        for check in checks:
            if check.verdict == verdict:
                return check
    return checks[0]


# ---------------------------------------------------------------------------
# Whole training
# ---------------------------------------------------------------------------


def compare_training(reference: Records, candidate: Records) -> TrainingRow:
    """Compares curves, gradient norms, skipped steps, loss scales and parameter norms."""
    steps = len(reference[0].losses)
    first, second = (np.array([_smooth(r.losses) for r in rs]) for rs in (reference, candidate))
    low, high, mean = first.min(axis=0), first.max(axis=0), second.mean(axis=0)
    inside = np.mean((mean >= low) & (mean <= high)) if len(reference) > 1 else math.nan
    skipped = [step for record in candidate for step in record.skipped]
    scales = [record.loss_scales[-1] for record in candidate]
    return TrainingRow(
        curve_distance=float(
            np.mean([_distance(a, b) for a, b in zip(first, second, strict=True)])
        ),
        curve_band=_band(first),
        curve_inside=float(inside),
        gradient_norm_ratio=_norm_ratio(reference, candidate),
        gradient_norm_quantiles=_norm_quantiles(reference, candidate),
        skipped=len(skipped),
        skipped_share=len(skipped) / (steps * len(candidate)),
        skipped_after_warmup=sum(step >= steps // 10 for step in skipped),
        final_loss_scale=(min(scales), max(scales)),
        weight_norm_drift=_drift(reference, candidate),
    )


def _smooth(losses: Sequence[float]) -> np.ndarray:
    """Returns the running mean of the losses over a twentieth of the steps."""
    width = max(1, len(losses) // 20)
    return np.convolve(np.asarray(losses, np.float64), np.ones(width) / width, mode="valid")


def _distance(x: np.ndarray, y: np.ndarray) -> float:
    """Returns the mean of |log(y / x)|; infinite if a loss is not positive and finite."""
    if not (np.isfinite(y).all() and (x > 0).all() and (y > 0).all()):
        return math.inf
    return float(np.mean(np.abs(np.log(y / x))))


def _band(curves: np.ndarray) -> float:
    pairs = [_distance(curves[i], curves[j]) for i in range(len(curves)) for j in range(i)]
    return float(np.mean(pairs)) if pairs else math.nan


def _norms(records: Records) -> np.ndarray:
    return np.array([record.gradient_norms for record in records], np.float64).ravel()


def _norm_ratio(reference: Records, candidate: Records) -> float:
    x, y = _norms(reference), _norms(candidate)
    if x.shape != y.shape or not x.size:
        return math.nan
    valid = np.isfinite(x) & np.isfinite(y) & (x > 0) & (y > 0)
    return float(np.exp(np.mean(np.log(y[valid] / x[valid])))) if valid.any() else math.nan


def _norm_quantiles(
    reference: Records, candidate: Records
) -> tuple[tuple[float, float, float], ...]:
    x, y = (norms[np.isfinite(norms)] for norms in (_norms(reference), _norms(candidate)))
    if not x.size or not y.size:
        return ()
    return tuple((q, float(np.quantile(x, q)), float(np.quantile(y, q))) for q in _QUANTILES)


def _drift(reference: Records, candidate: Records) -> float:
    """Returns the mean over seeds of the largest relative difference of the parameters' norms.

    Steps whose norm is zero in the reference, such as the first of parameters that are initialized
    to zero, are not compared.
    """
    drifts: list[float] = []
    for r, c in zip(reference, candidate, strict=True):
        x, y = np.array(r.weight_norms), np.array(c.weight_norms)
        drifts.append(float(np.max(np.abs(y[x != 0] / x[x != 0] - 1), initial=0.0)))
    return float(np.mean(drifts))
