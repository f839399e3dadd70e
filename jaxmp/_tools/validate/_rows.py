"""Rows of a validation report, and their sections for text and rich: verdicts first."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from jaxmp._tools.audit._rows import NOT_INSPECTED
from jaxmp._tools.report._section import (
    Fix,
    Section,
    counted,
    grouped,
    module_text,
    nonempty,
    table,
)

if TYPE_CHECKING:
    from jaxmp._tools.validate._report import ValidationReport

PASS, FAIL, INCONCLUSIVE, DIFFERS = "pass", "fail", "inconclusive", "differs"
# Directions of metrics: which values are better.
MIN, MAX, TWO_SIDED = "min", "max", "two-sided"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MetricChoice:
    """Held-out metric that decides, and the reason for it.

    Args:
      name: its name in `evaluate`, such as "loss" or "accuracy".
      scale: "relative": differences are relative to the reference; "absolute": they are in units
        of the metric.
      reason: the reason for this choice, in one or two sentences.
      direction: "min" if smaller values are better, "max" if larger ones are, and "two-sided" if it
        is not known: then, a difference in either direction fails.
      unit: magnitude of the metric, of which budgets are shares if the scale is absolute.
    """

    name: str = "loss"
    scale: str = "relative"
    reason: str = ""
    direction: str = MIN
    unit: float = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """Measured figure of a candidate and its budget.

    Args:
      name: "held_out_loss", "final_loss", "held_out_accuracy", "gradient_error", "loss_error", ...
      verdict: "pass", "fail", "differs" or "inconclusive".
      value: the measured figure; larger is worse, except of a two-sided metric.
      low: lower bound of its 95 % interval; None if the figure has no interval.
      high: upper bound of its 95 % interval; None if the figure has no interval.
      budget: the largest value that passes.
      margin: budget - high, or budget - value without an interval; negative if it does not pass.
      scale: "relative" (a ratio minus 1; print as percent) or "absolute".
      text: the comparison as a sentence.
    """

    name: str
    verdict: str
    value: float
    low: float | None = None
    high: float | None = None
    budget: float = 0.0
    margin: float = 0.0
    scale: str = "relative"
    text: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cause:
    """Known cause of a failure, diagnosed from measurements and from the audit of the step.

    Args:
      id: "rounding" or the id of a check of the audit for a source line, "fp16_underflow",
        "missing_masters", "overflow", "skipped_steps", "gradient_factor", "update_factor",
        "clipping", "weight_decay", "zero_gradient" or "state". Without a known cause, "update",
        "module" or "unknown" with the location of the error.
      summary: the cause in a few words; the headline contains it.
      evidence: the measurements that show it.
      fix: the remedy, as code.
    """

    id: str
    summary: str
    evidence: str = ""
    fix: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SeedPair:
    """Deciding metric of reference and candidate for one seed.

    Args:
      seed: seed of the initial parameters and of the data order.
      reference: the metric of the reference.
      candidate: the metric of the candidate.
      difference: log(candidate / reference) if the scale is relative, otherwise the difference;
        positive if the candidate is worse, or larger if the metric is two-sided.
    """

    seed: int
    reference: float
    candidate: float
    difference: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Power:
    """Number of seeds that the test requires.

    Args:
      deviation: standard deviation of the paired differences over the seeds.
      seeds_needed: number of seeds with which a true difference of zero passes with a probability
        of at least 80 %; 0 if more than 1,000 would be needed.
      text: the same as a sentence.
    """

    deviation: float = math.nan
    seeds_needed: int = 0
    text: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GradientRow:
    """Gradient of all parameters at one step, on the reference's parameters and batch.

    Args:
      step: number of updates before it.
      error: norm of (candidate - reference) over the norm of the reference.
      cosine: cosine of the angle between both.
      norm: norm of the reference's gradient.
      underflow: share of the elements that are nonzero in the reference and zero in the candidate.
      nonfinite: share of the candidate's elements that are infinite or NaN.
      stalled: share of the candidate's parameters with a nonzero gradient that the update does not
        change; 0 for the initial steps of a warm-up with a learning rate of zero.
      reference_stalled: the same share in the reference.
      update_ratio: norm of the candidate's update, from its own optimizer state, over that of the
        reference; NaN if the reference's update is zero.
      loss_error: absolute difference of the loss of this batch over that of the reference.
      loss: loss of this batch in the reference; NaN in reports of earlier versions.
      update_error: norm of (candidate - reference) of the updates over that of the reference.
    """

    step: int
    error: float
    cosine: float
    norm: float
    underflow: float = 0.0
    nonfinite: float = 0.0
    stalled: float = 0.0
    reference_stalled: float = 0.0
    update_ratio: float = 1.0
    loss_error: float = 0.0
    loss: float = math.nan
    update_error: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pattern:
    """Difference of gradients, updates or states at one step that has a known form.

    Args:
      step: number of updates before it.
      id: id of the cause, such as "gradient_factor", "learning_rate" or "clipping".
      text: the difference in a few words.
      error: the relative error that it explains; at most 1.
      factor: ratio of all gradients or updates; 0 for other forms.
    """

    step: int
    id: str
    text: str
    error: float
    factor: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModuleRow:
    """Gradients and activations of one module at one step, on identical parameters and batch.

    Args:
      module: path, such as "block_0/attention/query".
      step: number of updates before it.
      order: position of the module in the forward pass; -1 if it is not known.
      gradient_error: relative error of the gradient of the module's own parameters; None for
        modules without parameters.
      underflow: share of that gradient's elements that became zero; None without parameters.
      activation_error: relative error of the module's output; None if it was not captured.
    """

    module: str
    step: int
    order: int = -1
    gradient_error: float | None = None
    underflow: float | None = None
    activation_error: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ErrorOrigin:
    """Modules in which the error first appears, and in which it grows most.

    Args:
      forward: first module in the forward pass whose output has an error; "" if none.
      growth: module whose output's error exceeds that of the preceding module by most.
      backward: module with the largest error of its gradient.
      text: the same as a sentence.
    """

    forward: str = ""
    growth: str = ""
    backward: str = ""
    text: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingRow:
    """Comparison of the whole training of a candidate with that of the reference.

    Args:
      curve_distance: mean over steps of |log(candidate / reference)| of the smoothed training
        loss, averaged over seeds; of the absolute difference over its unit if that loss is not
        compared by ratios.
      curve_band: the same distance between pairs of seeds of the reference, averaged.
      curve_inside: share of the steps at which the candidate's mean curve is within the range of
        the reference's seeds.
      gradient_norm_ratio: geometric mean over steps of the ratio of gradient norms.
      skipped: number of skipped steps, summed over seeds.
      skipped_share: share of the steps of all seeds that were skipped.
      skipped_after_warmup: those after the first tenth of the steps.
      final_loss_scale: (smallest, largest) final loss scale over the seeds.
    """

    curve_distance: float = 0.0
    curve_band: float = 0.0
    curve_inside: float = 1.0
    gradient_norm_ratio: float = 1.0
    skipped: int = 0
    skipped_share: float = 0.0
    skipped_after_warmup: int = 0
    final_loss_scale: tuple[float, float] = (1.0, 1.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingRecord:
    """Record of one training run.

    Args:
      name: name of the reference or candidate.
      seed: seed of the initial parameters and of the data order.
      losses: training loss of each step.
      gradient_norms: norm of each step's gradient; empty if the step does not return `grads`.
      loss_scales: loss scale before each step.
      skipped: indices of the steps whose update was skipped.
      eval_steps: numbers of updates at which `evaluate` was called, from 0 to `steps`.
      evaluations: name of a metric -> value at each of `eval_steps`.
      initial_checksum: checksum of the initial FP32 parameters.
      data_checksum: checksum of all batches in their order.
      program: checksum of the traced step.
    """

    name: str
    seed: int
    losses: tuple[float, ...] = ()
    gradient_norms: tuple[float, ...] = ()
    loss_scales: tuple[float, ...] = ()
    skipped: tuple[int, ...] = ()
    eval_steps: tuple[int, ...] = ()
    evaluations: Mapping[str, tuple[float, ...]] = dataclasses.field(default_factory=dict)
    initial_checksum: str = ""
    data_checksum: str = ""
    program: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CandidateResult:
    """Result of one candidate: verdict, causes, and all comparisons.

    Args:
      name: name of the candidate.
      recipe: name of its recipe, or its policy.
      verdict: "pass", "fail", "differs" (better than the reference by more than the budget, or
        another loss on identical parameters) or "inconclusive" (the interval contains the budget,
        one seed is an outlier, or there is only one seed).
      headline: the verdict in one line, with number, budget, margin and the cause of a failure.
      causes: diagnosed causes, the most important first; empty for a candidate that passes.
      checks: comparisons with budgets; the first failing one decides the headline.
      phases: the comparison that decides for the steps of each phase, with its name, such as
        "mine@900"; empty for a recipe without phases.
      pairs: the deciding metric for each seed.
      power: the number of seeds that the test requires.
      gradients: gradients of all parameters at each of `compare_steps`.
      modules: gradients and activations of each module at each of `compare_steps`.
      patterns: differences of gradients, updates and states that have a known form.
      origin: the modules in which the error appears and grows.
      training: comparison of the whole training.
    """

    name: str
    recipe: str = ""
    verdict: str = PASS
    headline: str = ""
    causes: tuple[Cause, ...] = ()
    checks: tuple[Comparison, ...] = ()
    phases: tuple[Comparison, ...] = ()
    pairs: tuple[SeedPair, ...] = ()
    power: Power = dataclasses.field(default_factory=Power)
    gradients: tuple[GradientRow, ...] = ()
    modules: tuple[ModuleRow, ...] = ()
    patterns: tuple[Pattern, ...] = ()
    origin: ErrorOrigin = dataclasses.field(default_factory=ErrorOrigin)
    training: TrainingRow = dataclasses.field(default_factory=TrainingRow)


# Modules of a table without `full`.
_MAX_MODULES = 6
_MOODS = {PASS: "good", FAIL: "bad", DIFFERS: "bad", INCONCLUSIVE: "open"}
# Figures without a sign; the others are differences.
_ERRORS = ("gradient_error", "loss_error")


def validation_sections(report: ValidationReport, full: bool) -> list[Section]:
    """Returns the sections of a report.

    Args:
      report: the report.
      full: True for every module and seed.
    """
    sections = [_causes(report), _figures(report)]
    for candidate in report.candidates:
        sections += _candidate_sections(report, candidate, full)
    sections.append(Section("Notes", " ".join(n for n in report.notes if NOT_INSPECTED not in n)))
    unseen = Section("Incomplete", " ".join(n for n in report.notes if NOT_INSPECTED in n))
    verdicts = [Section(each.headline, mood=_MOODS[each.verdict]) for each in report.candidates]
    return verdicts + nonempty([unseen, *sections])


def _causes(report: ValidationReport) -> Section:
    """Returns each cause with its remedy; candidates with equal texts share one."""
    causes = [(each.name, cause) for each in report.candidates for cause in each.causes]
    groups = grouped(causes, lambda item: item[1])
    fixes = tuple(
        Fix(
            f"{', '.join(name for name, _ in group)}: {cause.summary}",
            ((False, cause.evidence), (True, cause.fix)),
        )
        for cause, group in groups.items()
    )
    return Section("Causes", fixes=fixes)


def _figures(report: ValidationReport) -> Section:
    text = (
        f"{report.steps} steps and {counted(len(report.seeds), 'seed')} each, with the same "
        f"initial parameters and batches as {report.reference}. {report.metric.reason} "
        f"{report.test}"
    )
    rows = tuple(
        (
            candidate.name,
            label(check.name),
            figure_text(check.value, check.scale, sign=check.name not in _ERRORS),
            _interval_text(check),
            figure_text(check.budget, check.scale, sign=False),
            check.verdict,
        )
        for candidate in report.candidates
        for check in candidate.checks
    )
    columns = ("candidate", "figure", "value", "95 % interval", "budget", "verdict")
    return Section("Figures and budgets", text.strip(), columns, rows)


def label(name: str) -> str:
    """Returns the name of a comparison as text, such as "held-out loss"."""
    return name.replace("held_out", "held-out").replace("_", " ")


def figure_text(value: float, scale: str, *, sign: bool = True) -> str:
    """Returns a figure as text: `+0.02 %` if it is relative, otherwise three digits."""
    if not math.isfinite(value):
        return str(value)
    plus = "+" if sign and value else ""
    value = value or 0.0  # without the sign of -0.0
    return f"{100 * value:{plus}.3g} %" if scale == "relative" else f"{value:{plus}.3g}"


def _interval_text(comparison: Comparison) -> str:
    bounds = [x for x in (comparison.low, comparison.high) if x is not None]
    return " to ".join(figure_text(x, comparison.scale) for x in bounds)


def _candidate_sections(
    report: ValidationReport, candidate: CandidateResult, full: bool
) -> list[Section]:
    name, training = candidate.name, candidate.training
    low, high = training.final_loss_scale
    of_seeds = (
        ("distance between seeds of the reference", percent(training.curve_band)),
        ("steps within the range of these seeds", f"{100 * training.curve_inside:.0f} %"),
    )
    quantities = (
        ("distance of the loss curves", percent(training.curve_distance)),
        # A single seed has no range.
        *(() if math.isnan(training.curve_inside) else of_seeds),
        ("gradient norms over those of the reference", f"{training.gradient_norm_ratio:.4g}"),
        ("skipped steps", str(training.skipped)),
        ("final loss scale", f"{low:g}" if low == high else f"{low:g} to {high:g}"),
    )
    phases = (
        ("phase", lambda each: each.name),
        ("verdict", lambda each: each.verdict),
        ("decided by", lambda each: each.text),
    )
    gradients = (
        ("step", lambda row: str(row.step)),
        ("error", lambda row: percent(row.error)),
        ("cosine", lambda row: f"{row.cosine:.6f}"),
        ("became zero", lambda row: percent(row.underflow)),
        ("not finite", lambda row: percent(row.nonfinite)),
        ("unchanged parameters", lambda row: percent(row.stalled)),
        ("update size", lambda row: f"{row.update_ratio:.4g}"),
    )
    pairs = (
        ("seed", lambda pair: str(pair.seed)),
        (report.reference, lambda pair: f"{pair.reference:.6g}"),
        (name, lambda pair: f"{pair.candidate:.6g}"),
        ("difference", lambda pair: figure_text(pair.difference, report.metric.scale)),
    )
    sections = [
        Section(f"{name}: training", candidate.power.text, ("quantity", "value"), quantities),
        table(f"{name}: phases", candidate.phases, phases),
        table(f"{name}: gradients", candidate.gradients, gradients, candidate.origin.text),
        _modules(candidate, full),
    ]
    if full:
        sections.append(table(f"{name}: {report.metric.name} by seed", candidate.pairs, pairs))
    return sections


def _modules(candidate: CandidateResult, full: bool) -> Section:
    """Returns a table with a row per module, and columns for its errors at the compared steps."""
    errors = {(row.module, row.step): row for row in candidate.modules}
    steps = sorted({row.step for row in candidate.modules})
    # In the order of the forward pass.
    groups = grouped(candidate.modules, lambda row: row.module)
    largest = lambda module: max([0.0, *(row.gradient_error or 0.0 for row in groups[module])])
    modules = list(groups) if full else sorted(groups, key=largest, reverse=True)[:_MAX_MODULES]
    text = "Relative errors on the same parameters and batch."
    if len(modules) < len(groups):
        text += f" The {len(modules)} largest errors of gradients of {len(groups)} modules."
    quantities = [("output", "activation_error"), ("gradient", "gradient_error")]
    cells = tuple(
        (
            module_text(module),
            *(
                percent(getattr(errors.get((module, step)), field, None))
                for _, field in quantities
                for step in steps
            ),
        )
        for module in modules
    )
    columns = ("module", *(f"{name} {step}" for name, _ in quantities for step in steps))
    return Section(f"{candidate.name}: errors of modules by step", text, columns, cells)


def percent(value: float | None) -> str:
    """Returns a share as text; "" for None."""
    if value is None:
        return ""
    return f"{100 * value:.3g} %" if math.isfinite(value) else "infinite"
