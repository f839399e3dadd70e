"""HTML page of a validation: verdicts, figures, charts, and the error of each module."""

from __future__ import annotations

import html
import importlib.util
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from jaxmp._report import _chart
from jaxmp._report._chart import Curve, chart
from jaxmp._report._page import html_document, html_sections
from jaxmp._report._section import Section
from jaxmp._report._text import printable
from jaxmp._validate._rows import CandidateResult, ModuleRow, TrainingRecord
from jaxmp._validate._sections import report_sections
from jaxmp.errors import install_command

if TYPE_CHECKING:
    from jaxmp._validate._report import ValidationReport

# Errors of modules from `_FAINT` to `_STRONG` have colours between those of the page and red.
_FAINT, _STRONG = 1e-4, 1.0
_MAX_ALPHA = 0.6  # the contrast of the text is at least 4.5 in both schemes

_STYLE = """
.jaxmp .heat td { text-align: right; white-space: nowrap; min-width: 4.2rem; padding: .15rem .5rem;
  font-variant-numeric: tabular-nums; border: 1px solid var(--page); }
.jaxmp .heat th { padding: .15rem .5rem; text-align: right; }
.jaxmp .heat th[scope=row] { text-align: left; color: var(--ink); font-weight: 400;
  font-family: ui-monospace, monospace; font-size: .93em; border: 0; padding-left: 0;
  position: sticky; left: 0; background: var(--page); }
.jaxmp .heat table { min-width: 0; align-self: flex-start; }
.jaxmp .heat caption { text-align: left; font-weight: 600; color: var(--soft); }
.jaxmp .heat td:first-child { font-family: inherit; font-size: 1em; }
.jaxmp .heat { display: flex; flex-wrap: wrap; gap: .6rem 2.5rem; }
@media (max-width: 30rem) {
  .jaxmp { padding: 1rem; } .jaxmp h1 { font-size: 1.15rem; }
  .jaxmp .heat td, .jaxmp .heat th { min-width: 0; padding: .15rem .3rem; font-size: .93em; }
}
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
    maps = [_heat_map(candidate) for candidate in report.candidates]
    # The heat maps contain all figures of the tables of modules.
    tables = [section for section in sections[verdicts:] if not section.title.endswith(": modules")]
    figures = next((n for n, section in enumerate(tables, 1) if section.rows), 0)
    body = [
        *map(_verdict, sections[:verdicts]),
        html_sections(tables[:figures], stacked=True),
        _charts_of(report),
        *maps,
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
            label=_percent if report.metric.scale == "relative" else None,
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


def _percent(value: float) -> str:
    return f"{100 * value:.3g} %"


# ---------------------------------------------------------------------------
# Error by module and step
# ---------------------------------------------------------------------------


def _heat_map(candidate: CandidateResult) -> str:
    """Returns a table with a row per module and a coloured cell per step and quantity."""
    rows = candidate.modules
    if not rows:
        return ""
    steps = sorted({row.step for row in rows})
    by_place = {(row.module, row.step): row for row in rows}
    # In the order of the forward pass; modules that were not seen there are last.
    first = {row.module: row.order if row.order >= 0 else math.inf for row in rows}
    modules = sorted(first, key=lambda module: (first[module], module))
    quantities: list[tuple[str, Callable[[ModuleRow], float | None]]] = [
        ("activation error", lambda row: row.activation_error),
        ("gradient error", lambda row: row.gradient_error),
    ]
    tables = "".join(
        _heat_table(name, get, modules, steps, by_place)
        for name, get in quantities
        if any(get(row) is not None for row in rows)
    )
    title = html.escape(printable(f"{candidate.name}: error by module and step"))
    return (
        f"<h2>{title}</h2><p>Relative to the reference, on the same parameters and batch. The "
        "modules are in the order of the forward pass.</p>"
        f'<div class="wide heat">{tables}</div>'
    )


def _heat_table(
    quantity: str,
    get: Callable[[ModuleRow], float | None],
    modules: Sequence[str],
    steps: Sequence[int],
    by_place: Mapping[tuple[str, int], ModuleRow],
) -> str:
    """Returns the table of one quantity; on a phone, the tables are below each other."""
    head = "".join(f"<th>step {step}</th>" for step in steps)
    lines = []
    for module in modules:
        rows = [by_place.get((module, step)) for step in steps]
        values = [None if row is None else get(row) for row in rows]
        if all(value is None for value in values):
            continue  # not measured for this module, such as gradients without parameters
        cells = "".join(map(_cell, values))
        name = html.escape(printable(module or "(root)")).replace("/", "/<wbr>")
        lines.append(f'<tr><th scope="row">{name}</th>{cells}</tr>')
    return (
        f"<table><caption>{quantity}</caption><thead><tr><th></th>{head}</tr></thead>"
        f"<tbody>{''.join(lines)}</tbody></table>"
    )


def _cell(value: float | None) -> str:
    if value is None:
        return "<td></td>"
    share = 1.0
    if math.isfinite(value):
        size = min(max(value, _FAINT), _STRONG)
        share = math.log(size / _FAINT) / math.log(_STRONG / _FAINT)
    colour = f"background: rgb(207 34 46 / {_MAX_ALPHA * share:.2f})"
    text = _percent(value) if math.isfinite(value) else str(value)
    return f'<td style="{colour}">{text}</td>'
