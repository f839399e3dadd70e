"""HTML page of a validation: verdicts, figures, charts, and all tables."""

from __future__ import annotations

import html
import importlib.util
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from jaxmp._core._messages import install_command
from jaxmp._report import _chart
from jaxmp._report._chart import Curve, chart
from jaxmp._report._page import html_document, html_sections
from jaxmp._validate._rows import TrainingRecord
from jaxmp._validate._sections import percent, report_sections

if TYPE_CHECKING:
    from jaxmp._validate._report import ValidationReport

_STYLE = """
@media (max-width: 30rem) { .jaxmp { padding: 1rem; } .jaxmp h1 { font-size: 1.15rem; } }
"""


def render_page(report: ValidationReport, full: bool = True) -> str:
    """Returns a report as one HTML page with its style and charts, without scripts or links.

    The page follows the reader's light or dark scheme, and fits a phone.

    Args:
      report: the report.
      full: True for all tables.
    """
    sections = report_sections(report, full)
    verdicts = len(report.candidates)
    tables = sections[verdicts:]
    figures = next((n for n, section in enumerate(tables, 1) if section.rows), 0)
    body = [
        html_sections(sections[:verdicts]),
        html_sections(tables[:figures]),
        _charts_of(report),
        html_sections(tables[figures:]),
    ]
    body = "\n".join(part for part in body if part)
    return html_document("Precision validation", body, _chart.STYLE + _STYLE)


# ---------------------------------------------------------------------------
# Charts
# ---------------------------------------------------------------------------


def _charts_of(report: ValidationReport) -> str:
    if report.runs and importlib.util.find_spec("matplotlib") is None:
        return f"<p>The charts require matplotlib: {html.escape(install_command('examples'))}</p>"
    names = [report.reference, *(candidate.name for candidate in report.candidates)]
    runs = [[run for run in report.runs if run.name == name] for name in names]
    metric, budgets = report.metric.name, _budgets(report)
    band, note = "mean of the seeds, range of the reference", "paired by seed, range of the seeds"
    scales = _over_seeds(runs, lambda run: run.loss_scales, ranges=True)
    charts = (
        chart(
            f"Held-out {metric}",
            band,
            _over_seeds(runs, lambda run: run.evaluations.get(metric, ()), evaluated=True),
        ),
        chart(
            f"Difference of held-out {metric}",
            f"{note}, dashed: budget" if budgets else note,
            _over_seeds(runs, _difference(report), evaluated=True, ranges=True),
            limits=budgets,
            label=percent if report.metric.scale == "relative" else None,
        ),
        chart("Training loss", band, _over_seeds(runs, lambda run: _smoothed(run.losses))),
        chart(
            "Gradient norm",
            band,
            _over_seeds(runs, lambda run: _smoothed(run.gradient_norms)),
            log=10,
        ),
        chart(
            "Loss scale",
            "range of the seeds",
            [curve for curve in scales if any(value != 1 for value in curve.y)],
            log=2,
        ),
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
    total = weight = 0.0
    smooth = []
    for value in values:
        total, weight = keep * total + (1 - keep) * value, keep * weight + 1 - keep
        smooth.append(total / weight)
    return smooth
