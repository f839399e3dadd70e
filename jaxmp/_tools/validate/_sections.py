"""Sections of a validation report for text and rich: verdicts first, then the figures."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from jaxmp._tools.report._section import Fix, Section, counted, nonempty
from jaxmp._tools.validate._rows import (
    DIFFERS,
    FAIL,
    INCONCLUSIVE,
    PASS,
    CandidateResult,
    Comparison,
    TrainingRow,
)

if TYPE_CHECKING:
    from jaxmp._tools.validate._report import ValidationReport

# Modules of a table without `full`.
_MAX_MODULES = 6
_MOODS = {PASS: "good", FAIL: "bad", DIFFERS: "bad", INCONCLUSIVE: "open"}
# Figures without a sign; the others are differences.
_ERRORS = ("gradient_error", "loss_error")


def report_sections(report: ValidationReport, full: bool) -> list[Section]:
    """Returns the sections of a report.

    Args:
      report: the report.
      full: True for every module and seed.
    """
    sections = [_figures(report)]
    for candidate in report.candidates:
        sections += _candidate_sections(report, candidate, full)
    sections.append(Section("Notes", text=" ".join(report.notes)))
    verdicts = [Section(each.headline, mood=_MOODS[each.verdict]) for each in report.candidates]
    return verdicts + nonempty(sections)


def _figures(report: ValidationReport) -> Section:
    text = (
        f"{report.steps} steps and {counted(len(report.seeds), 'seed')} each, with the same "
        f"initial parameters and batches as {report.reference}. {report.metric.reason} "
        f"{report.test}"
    )
    rows = tuple(
        (
            each.name,
            label(comparison.name),
            figure_text(comparison.value, comparison.scale, sign=comparison.name not in _ERRORS),
            _interval_text(comparison),
            figure_text(comparison.budget, comparison.scale, sign=False),
            comparison.verdict,
        )
        for each in report.candidates
        for comparison in each.checks
    )
    fixes = tuple(
        Fix(f"{each.name}: {cause.summary}", ((False, cause.evidence), (True, cause.fix)))
        for each in report.candidates
        for cause in each.causes
    )
    columns = ("candidate", "figure", "value", "95 % interval", "budget", "verdict")
    return Section("Figures and budgets", text.strip(), columns, rows, fixes)


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
    if comparison.low is None or comparison.high is None:
        return ""
    low, high = (figure_text(x, comparison.scale) for x in (comparison.low, comparison.high))
    return f"{low} to {high}"


def _candidate_sections(
    report: ValidationReport, candidate: CandidateResult, full: bool
) -> list[Section]:
    sections = [
        Section(
            f"{candidate.name}: training",
            candidate.power.text,
            ("quantity", "value"),
            training_rows(candidate.training),
        ),
        _gradients(candidate),
        _modules(candidate, full),
    ]
    if full:
        sections.append(_pairs(report, candidate))
    return sections


def training_rows(training: TrainingRow) -> tuple[tuple[str, str], ...]:
    """Returns (quantity, value) of the comparison of the whole training."""
    low, high = training.final_loss_scale
    scale = f"{low:g}" if low == high else f"{low:g} to {high:g}"
    return (
        ("distance of the loss curves", percent(training.curve_distance)),
        ("distance between seeds of the reference", percent(training.curve_band)),
        ("steps within the range of these seeds", f"{100 * training.curve_inside:.0f} %"),
        ("gradient norms over those of the reference", f"{training.gradient_norm_ratio:.4g}"),
        ("skipped steps", str(training.skipped)),
        ("final loss scale", scale),
    )


def _gradients(candidate: CandidateResult) -> Section:
    rows = tuple(
        (
            str(row.step),
            percent(row.error),
            f"{row.cosine:.6f}",
            percent(row.underflow),
            percent(row.nonfinite),
            percent(row.stalled),
            f"{row.update_ratio:.4g}",
        )
        for row in candidate.gradients
    )
    columns = ("step", "error", "cosine", "became zero", "not finite", "unchanged parameters")
    columns += ("update size",)
    return Section(f"{candidate.name}: gradients", candidate.origin.text, columns, rows)


def _modules(candidate: CandidateResult, full: bool) -> Section:
    """Returns a table with a row per module, and columns for its errors at the compared steps."""
    errors = {(row.module, row.step): row for row in candidate.modules}
    steps = sorted({row.step for row in candidate.modules})
    largest: dict[str, float] = {}
    for row in candidate.modules:  # in the order of the forward pass
        largest[row.module] = max(largest.get(row.module, 0.0), row.gradient_error or 0.0)
    modules = list(largest)
    if not full:
        modules = sorted(modules, key=lambda module: -largest[module])[:_MAX_MODULES]
    text = "Relative errors on the same parameters and batch."
    if len(modules) < len(largest):
        text += f" The {len(modules)} largest errors of gradients of {len(largest)} modules."
    quantities = [("output", "activation_error"), ("gradient", "gradient_error")]
    cells = tuple(
        (
            module or "(root)",
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


def _pairs(report: ValidationReport, candidate: CandidateResult) -> Section:
    rows = tuple(
        (
            str(pair.seed),
            f"{pair.reference:.6g}",
            f"{pair.candidate:.6g}",
            figure_text(pair.difference, report.metric.scale),
        )
        for pair in candidate.pairs
    )
    columns = ("seed", report.reference, candidate.name, "difference")
    return Section(f"{candidate.name}: {report.metric.name} by seed", "", columns, rows)
