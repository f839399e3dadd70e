"""HTML page of a validation: verdicts, figures, charts, and all tables."""

from __future__ import annotations

import html
import importlib.util
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from jaxmp._core._messages import install_command
from jaxmp._report import _chart
from jaxmp._report._chart import Curve, chart
from jaxmp._report._page import html_document, html_sections
from jaxmp._report._section import Section
from jaxmp._report._text import printable
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
        *map(_verdict, sections[:verdicts]),
        html_sections(tables[:figures], stacked=True),
        _charts_of(report),
        html_sections(tables[figures:], stacked=True),
    ]
    body = "\n".join(part for part in body if part)
    return html_document("Precision validation", body, _chart.STYLE + _STYLE)


def _verdict(section: Section) -> str:
    """Returns a headline; an inconclusive one has neither the colour of a pass nor of a failure."""
    return f'<h1 class="{section.mood}">{html.escape(printable(section.title))}</h1>'


# ---------------------------------------------------------------------------
# Charts
# ---------------------------------------------------------------------------


def _charts_of(report: ValidationReport) -> str:
    if report.runs and importlib.util.find_spec("matplotlib") is None:
        return f"<p>The charts require matplotlib: {html.escape(install_command('examples'))}</p>"
    names = [report.reference, *(candidate.name for candidate in report.candidates)]
    runs = {name: [run for run in report.runs if run.name == name] for name in names}
    metric = report.metric.name
    charts = [
        chart(
            f"Held-out {metric}",
            "mean of the seeds, range of the reference",
            _over_seeds(runs, lambda run: run.evaluations.get(metric, ()), _eval_steps),
        ),
        chart(
            f"Difference of held-out {metric}",
            _difference_note(report),
            _differences(runs, report),
            limits=_budgets(report),
            label=percent if report.metric.scale == "relative" else None,
        ),
        chart(
            "Training loss",
            "mean of the seeds, range of the reference",
            _over_seeds(runs, lambda run: _smoothed(run.losses), _steps),
        ),
        chart(
            "Gradient norm",
            "mean of the seeds, range of the reference",
            _over_seeds(runs, lambda run: _smoothed(run.gradient_norms), _steps),
            log=10,
        ),
        chart(
            "Loss scale",
            "range of the seeds",
            [curve for curve in _over_seeds(runs, _scales, _steps, ranges=True) if _moves(curve)],
            log=2,
        ),
    ]
    key = _chart.key([f"{names[0]} (reference)", *names[1:]])
    charts = "".join(charts)
    return f'<h2>Training</h2>{key}<div class="charts">{charts}</div>' if charts else ""


def _over_seeds(
    runs: dict[str, list[TrainingRecord]],
    values: Callable[[TrainingRecord], Sequence[float]],
    steps: Callable[[TrainingRecord, int], Sequence[float]],
    *,
    ranges: bool = False,
) -> list[Curve]:
    """Returns the mean over the seeds of each run; the reference, or all with `ranges`, as band."""
    curves = []
    for style, records in enumerate(runs.values()):
        rows = [row for row in map(values, records) if row]
        if not rows:
            continue
        columns = list(zip(*rows, strict=False))  # to the end of the shortest run
        band = (list(map(min, columns)), list(map(max, columns))) if ranges or style == 0 else ()
        x = steps(records[0], len(columns))
        curves.append(Curve(x, list(map(_mean, columns)), style, *band))
    return curves


def _differences(runs: dict[str, list[TrainingRecord]], report: ValidationReport) -> list[Curve]:
    """Returns the paired differences of the deciding metric, with their range over the seeds."""
    name, relative = report.metric.name, report.metric.scale == "relative"
    reference, *candidates = runs.values()
    pairs = {run.seed: run for run in reference}
    curves = []
    for style, records in enumerate(candidates, 1):
        rows = [
            [
                y / x - 1 if relative and x else y - x
                for x, y in zip(
                    pairs[run.seed].evaluations.get(name, ()),
                    run.evaluations.get(name, ()),
                    strict=False,
                )
            ]
            for run in records
            if run.seed in pairs
        ]
        columns = list(zip(*(row for row in rows if row), strict=False))
        if columns:
            x = _eval_steps(records[0], len(columns))
            band = list(map(min, columns)), list(map(max, columns))
            curves.append(Curve(x, list(map(_mean, columns)), style, *band))
    return curves


def _difference_note(report: ValidationReport) -> str:
    budgets = _budgets(report)
    shown = "paired by seed, range of the seeds"
    return f"{shown}, dashed: budget" if budgets else shown


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


def _eval_steps(run: TrainingRecord, count: int) -> Sequence[float]:
    return run.eval_steps[:count]


def _steps(_: TrainingRecord, count: int) -> Sequence[float]:
    return range(count)


def _scales(run: TrainingRecord) -> Sequence[float]:
    return run.loss_scales


def _moves(curve: Curve) -> bool:
    """Returns True unless a loss scale is 1 at all steps, as without one."""
    return any(value != 1 for value in curve.y)


def _smoothed(values: Sequence[float]) -> list[float]:
    """Returns an exponential mean over about a fortieth of the values, without a bias."""
    keep = max(0.0, 1 - 40 / max(len(values), 1))
    total = weight = 0.0
    smooth = []
    for value in values:
        total, weight = keep * total + (1 - keep) * value, keep * weight + 1 - keep
        smooth.append(total / weight)
    return smooth


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values)
