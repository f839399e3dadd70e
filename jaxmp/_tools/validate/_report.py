"""The report of a validation: its JSON layout, its page, and its comparison with an earlier one.

`ValidationReport.to_dict()` returns the fields of the dataclasses below, with the same names, as
dicts, lists, strings and numbers; tuples become lists. Two fields precede them: `schema`
("jaxmp.validation") and `schema_version` (3; it increases when a field is removed or changes its
meaning). Non-finite numbers are the strings "nan", "inf" and "-inf", which `float` converts. The
lists of a `TrainingRecord` are parallel: `losses`, `gradient_norms` and `loss_scales` have an item
per step, `evaluations` an item per item of `eval_steps`.

    {
      "schema": "jaxmp.validation", "schema_version": 3,
      "ok": false, "reference": "fp32", "seeds": [0, 1, 2], "steps": 250,
      "eval_steps": [0, 50, 100, 150, 200, 250], "compare_steps": [0, 16, 249],
      "metric": {"name": "loss", "scale": "relative", "reason": "...", "direction": "min",
                 "unit": 2.19},
      "test": "Paired t interval ...",
      "candidates": [{
        "name": "fp16", "recipe": "fp16", "verdict": "fail", "headline": "fp16 FAILS: ...",
        "causes": [{"id": "fp16_underflow", "summary": "...", "evidence": "...", "fix": "..."}],
        "checks": [{"name": "held_out_loss", "verdict": "fail", "value": 0.031, "low": 0.028,
                    "high": 0.034, "budget": 0.005, "margin": -0.026, "scale": "relative",
                    "text": "..."}],
        "phases": [],
        "pairs": [{"seed": 0, "reference": 2.1975, "candidate": 2.2650, "difference": 0.0303}],
        "power": {"deviation": 0.001, "seeds_needed": 2, "text": "..."},
        "gradients": [{"step": 0, "error": 0.41, "cosine": 0.93, "underflow": 0.31, ...}],
        "modules": [{"module": "block_0/attention", "step": 0, "gradient_error": 0.41, ...}],
        "origin": {"forward": "...", "backward": "...", "text": "..."},
        "training": {"curve_distance": 0.02, "curve_band": 0.015, ...}
      }],
      "runs": [{"name": "fp32", "seed": 0, "losses": [...], ...}],
      "unfinished": [],
      "notes": []
    }
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import html
import importlib
import importlib.util
import io
import itertools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from jaxmp import _core
from jaxmp._tools.report import _section, _views
from jaxmp._tools.report._views import html_document, html_sections
from jaxmp._tools.validate._compare import metric_difference, paired_interval, relative_difference
from jaxmp._tools.validate._rows import (
    DIFFERS,
    FAIL,
    TWO_SIDED,
    CandidateResult,
    MetricChoice,
    TrainingRecord,
    figure_text,
    percent,
    validation_sections,
)
from jaxmp.errors import ValidationError, ValidationFailedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValidationReport(_views.Report):
    """Report of a validation: a verdict for each candidate. Frozen; contains plain data.

    `print(report)` shows the verdicts, the causes and the main figures; `report.to_text(full=True)`
    shows every module. rich and notebooks render it, too.

    Args:
      reference: name of the reference.
      seeds: the seeds.
      steps: number of training steps of each run.
      eval_steps: numbers of updates at which `evaluate` was called.
      compare_steps: numbers of updates after which gradients and activations were compared.
      metric: the metric that decides, and the reason.
      test: description of the statistical test.
      candidates: results in the order of the argument.
      runs: records of all runs, those of the reference first.
      unfinished: names of the candidates without a verdict, because the validation was interrupted.
      notes: measurements that were not made, and why.

    Example:
      >>> text = ValidationReport(reference="fp32", seeds=(0, 1, 2), steps=100).to_json()
      >>> report = ValidationReport.from_json(text)
      >>> report.steps, report.ok, report.candidates
      (100, True, ())
    """

    _subject = "validation"
    _title = "Precision validation"
    _command = "jaxmp validate run.py:make_run --json validation.json"
    _error = ValidationError
    _summary = ("ok",)
    _schema: ClassVar = {"schema": "jaxmp.validation", "schema_version": 3}

    reference: str = "fp32"
    seeds: tuple[int, ...] = ()
    steps: int = 0
    eval_steps: tuple[int, ...] = ()
    compare_steps: tuple[int, ...] = ()
    metric: MetricChoice = dataclasses.field(default_factory=MetricChoice)
    test: str = ""
    candidates: tuple[CandidateResult, ...] = ()
    runs: tuple[TrainingRecord, ...] = ()
    unfinished: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """True if every candidate has a verdict, and none fails or differs.

        A candidate may be inconclusive.
        """
        return not self._failed()

    def _failed(self) -> list[str]:
        """Returns a sentence for each candidate that fails, differs, or has no verdict."""
        return [
            *(each.headline for each in self.candidates if each.verdict in (FAIL, DIFFERS)),
            *(f"{name} has no verdict: go on with resume=report." for name in self.unfinished),
        ]

    def __getitem__(self, name: str) -> CandidateResult:
        """Returns the result of a candidate.

        Raises:
          ValidationError: if the report contains no such candidate.
        """
        named = {candidate.name: candidate for candidate in self.candidates}
        if name not in named:
            names = ", ".join(map(repr, named))
            raise ValidationError(f"The report has no candidate {name!r}; it has {names}.")
        return named[name]

    def check(self, *, baseline: ValidationReport | str | os.PathLike[str] | None = None) -> None:
        """Raises an exception if a candidate fails, differs, or has no verdict, as in a test.

        Args:
          baseline: an earlier report of the same seeds and steps, its JSON text, or a path that
            ends in `.json`. A larger held-out loss or gradient error than there fails, too.

        Raises:
          ValidationFailedError: with the headline of each candidate that fails or differs, the
            candidates without a verdict, and each figure that is worse than in the baseline.
          ValidationError: if the baseline cannot be read, or has other seeds or steps.
        """
        failed = self._failed()
        if baseline is not None:
            failed += find_regressions(self, _views.read_report(ValidationReport, baseline))
        if failed:
            raise ValidationFailedError("\n".join(failed))

    # -- views ------------------------------------------------------------------------------

    def __repr__(self) -> str:
        verdicts = ", ".join(f"{each.name}: {each.verdict}" for each in self.candidates)
        return f"<ValidationReport of {verdicts or 'no candidates'}>"

    def _sections(self, full: bool) -> list[_section.Section]:
        return validation_sections(self, full)

    def to_html(self, *, full: bool = True) -> str:
        """Returns the report as one HTML page with charts, without scripts or links.

        The page follows the reader's light or dark scheme, and fits a phone.

        Args:
          full: as in `to_text`.

        Example:
          >>> page = ValidationReport(steps=100).to_html()
          >>> _ = Path("validation.html").write_text(page, encoding="utf-8")
        """
        sections = validation_sections(self, full)
        tables = (number for number, section in enumerate(sections, 1) if section.rows)
        first = next(tables, len(self.candidates))
        parts = html_sections(sections[:first]), _charts_of(self), html_sections(sections[first:])
        return html_document(self._title, "\n".join(filter(None, parts)), "charts")


# ---------------------------------------------------------------------------
# Baselines
# ---------------------------------------------------------------------------


# A deciding metric is worse if its mean increase over the same seeds exceeds this share of the
# budget, and the lower bound of its interval exceeds zero.
LOSS_SHARE = 0.2
_REMEDY = ", or write a new baseline:\n    jaxmp validate run.py:make_run --json baseline.json"
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
    """Yields a sentence for each figure of a candidate that is worse than in the baseline."""
    metric = report.metric
    differences = [
        metric_difference(before.candidate, after.candidate, metric)
        for before, after in zip(old.pairs, new.pairs, strict=True)
    ]
    interval = paired_interval(differences)
    if metric.direction == TWO_SIDED and interval.mean < 0:
        interval = paired_interval([-difference for difference in differences])
    limit = LOSS_SHARE * new.checks[0].budget
    if math.isnan(interval.mean) or (interval.low > 0 and interval.mean > limit):
        value = figure_text(relative_difference(interval.mean, metric), metric.scale)
        yield f"the held-out {metric.name} is worse by {value} than in the baseline."
    before, after = (
        float(np.median([row.error for row in each.gradients] or [math.nan])) for each in (old, new)
    )
    # Below this error, FP32 programs of two versions differ as much.
    if after > GRADIENT_FACTOR * before and after > 1e-4:
        yield f"the gradient error rose from {100 * before:.3g} % to {100 * after:.3g} %."


# ---------------------------------------------------------------------------
# Charts
# ---------------------------------------------------------------------------


def _charts_of(report: ValidationReport) -> str:
    if report.runs and importlib.util.find_spec("matplotlib") is None:
        command = html.escape(_core.install_command("examples"))
        return f"<p>The charts require matplotlib: {command}</p>"
    names = [report.reference, *(candidate.name for candidate in report.candidates)]
    runs = [[run for run in report.runs if run.name == name] for name in names]
    metric, budgets = report.metric.name, _budgets(report)
    band, note = "mean of the seeds, range of the reference", "paired by seed, range of the seeds"
    note = f"{note}, dashed: budget" if budgets else note
    label = percent if report.metric.scale == "relative" else None
    curves = functools.partial(_over_seeds, runs)
    held_out = curves(lambda run: run.evaluations.get(metric, ()), evaluated=True)
    differences = curves(_difference(report), evaluated=True, ranges=True)
    losses = curves(lambda run: _smoothed(run.losses))
    norms = curves(lambda run: _smoothed(run.gradient_norms))
    scales = curves(lambda run: run.loss_scales, ranges=True)
    scales = [curve for curve in scales if any(value != 1 for value in curve.y)]
    charts = (
        chart(f"Held-out {metric}", band, held_out),
        chart(f"Difference of held-out {metric}", note, differences, limits=budgets, label=label),
        chart("Training loss", band, losses),
        chart("Gradient norm", band, norms, log=10),
        chart("Loss scale", "range of the seeds", scales, log=2),
    )
    images = "".join(charts)
    return f'<h2>Training</h2><div class="charts">{images}</div>' if images else ""


def _over_seeds(
    runs: Sequence[Sequence[TrainingRecord]],
    values: Callable[[TrainingRecord], Sequence[float]],
    *,
    evaluated: bool = False,
    ranges: bool = False,
) -> list[Curve]:
    """Returns the mean over the seeds of each run; the reference, or all with `ranges`, as band.

    Args:
      runs: the runs of the reference, and of each candidate.
      values: returns the values of a run at each step, or of its evaluations.
      evaluated: True for evaluations.
      ranges: True for bands of all.
    """
    curves = []
    for style, records in enumerate(runs):
        rows = [row for row in map(values, records) if row]
        if not rows:
            continue
        columns = list(zip(*rows, strict=False))  # to the end of the shortest run
        band = (list(map(min, columns)), list(map(max, columns))) if ranges or style == 0 else ()
        x = records[0].eval_steps[: len(columns)] if evaluated else range(len(columns))
        mean = [sum(column) / len(column) for column in columns]
        curves.append(Curve(x, mean, style, records[0].name, *band))
    return curves


def _difference(report: ValidationReport) -> Callable[[TrainingRecord], Sequence[float]]:
    """Returns a function of a run: the differences of its metric from the run of the same seed."""
    name, relative = report.metric.name, report.metric.scale == "relative"
    reference = {run.seed: run for run in report.runs if run.name == report.reference}

    def difference(run: TrainingRecord) -> list[float]:
        if run.name == report.reference or run.seed not in reference:
            return []
        curves = (each.evaluations.get(name, ()) for each in (reference[run.seed], run))
        return [y / x - 1 if relative and x else y - x for x, y in zip(*curves, strict=False)]

    return difference


def _budgets(report: ValidationReport) -> list[float]:
    """Returns the budgets of the deciding metric, in both directions."""
    name = f"held_out_{report.metric.name}"
    budgets = {
        check.budget
        for candidate in report.candidates
        for check in candidate.checks
        if check.name == name and check.scale == report.metric.scale
    }
    return sorted({sign * budget for budget in budgets for sign in (-1, 1)})


def _smoothed(values: Sequence[float]) -> list[float]:
    """Returns an exponential mean over about a fortieth of the values, without a bias."""
    keep = max(0.0, 1 - 40 / max(len(values), 1))
    add = lambda total, value: keep * total + (1 - keep) * value
    totals = itertools.accumulate(values, add, initial=0.0)
    return [total / (1 - keep**count) for count, total in enumerate(totals) if count]


# ---------------------------------------------------------------------------
# Drawing, by matplotlib for the light and dark scheme
# ---------------------------------------------------------------------------


# Dashes distinguish the curves without colors; the reference is 0, solid.
_DASHES = ("-", "-", "--", ":", "-.", (0, (10, 4)))
# Colors of the text and of the curves, with a contrast of at least 4.5 to the page (WCAG 2.2, AA).
_LIGHT = ("#59636e", "#1f2328", "#0067b0", "#b94700", "#00765a", "#9a3b7f", "#7a6200")
_DARK = ("#9198a1", "#e6edf3", "#56b4e9", "#f28c4a", "#2fbf95", "#dd8ec0", "#e0c341")


class Curve(NamedTuple):
    """Curve of a chart.

    Args:
      x: increasing positions.
      y: values; non-finite ones interrupt the curve.
      style: index of color and dashes; 0 is the reference.
      name: its name in the legend.
      low: lower bounds of a band around the curve; () without a band.
      high: upper bounds of the band.
    """

    x: Sequence[float]
    y: Sequence[float]
    style: int
    name: str
    low: Sequence[float] = ()
    high: Sequence[float] = ()


def chart(
    title: str,
    note: str,
    curves: Sequence[Curve],
    *,
    log: int = 0,
    limits: Sequence[float] = (),
    label: Callable[[float], str] | None = None,
) -> str:
    """Returns a figure with curves over the training step; "" without a finite value.

    Args:
      title: the quantity.
      note: its unit, or the meaning of the band.
      curves: the curves, in the order in which they are drawn.
      log: 0 for a linear vertical axis; 2 or 10 for a logarithmic one with this base, which shows
        positive values only, unless they differ by less than this factor.
      limits: values at which a dashed horizontal line is drawn.
      label: the text of a value on the vertical axis.
    """
    values = [value for curve in curves for value in curve.y]
    values = [value for value in values if math.isfinite(value) and (value > 0 or not log)]
    if not values:
        return ""
    if log and max(values) < log * min(values):
        log = 0  # a logarithmic axis of this range would have a single label
    light, dark = (_drawn(curves, log, limits, label, *colors) for colors in (_LIGHT, _DARK))
    name = html.escape(f"{title}, {note}", quote=True)
    return (
        f"<figure><figcaption>{html.escape(title)} <span>{html.escape(note)}</span></figcaption>"
        f'<picture><source media="(prefers-color-scheme: dark)" srcset="{dark}">'
        f'<img src="{light}" alt="{name}"></picture></figure>'
    )


def _drawn(
    curves: Sequence[Curve],
    log: int,
    limits: Sequence[float],
    label: Callable[[float], str] | None,
    ink: str,
    *colors: str,
) -> str:
    """Returns the image of a chart as a data URL."""
    names = ("matplotlib.figure", "matplotlib.ticker")  # an optional dependency
    figures, ticker = map(importlib.import_module, names)
    figure = figures.Figure(figsize=(4, 2.6), layout="constrained")
    axes: Any = figure.subplots()
    if log:
        axes.set_yscale("log", base=log, nonpositive="mask")
    if label is not None:
        axes.yaxis.set_major_formatter(lambda value, _: label(value))
    axes.xaxis.set_major_locator(ticker.MaxNLocator(5, integer=True))
    for limit in limits:
        axes.axhline(limit, color=ink, linewidth=0.8, linestyle="--")
    for curve in curves:
        style, text = curve.style % len(_DASHES), curve.name.replace("$", r"\$")
        if curve.low:
            band = {"color": colors[style], "alpha": 0.16, "linewidth": 0}
            axes.fill_between(curve.x, curve.low, curve.high, **band)
        line = {"color": colors[style], "linestyle": _DASHES[style], "linewidth": 1.3}
        axes.plot(curve.x, curve.y, label=text, **line)
    axes.grid(axis="y", color=ink, alpha=0.25)
    axes.spines[:].set_visible(False)
    axes.tick_params(which="both", left=False, bottom=False, labelcolor=ink)
    axes.set_xlabel("step", loc="right", color=ink)
    axes.legend(frameon=False, labelcolor=ink, fontsize=8)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=200, transparent=True)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
