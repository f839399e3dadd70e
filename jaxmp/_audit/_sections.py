"""Sections of a report and of a comparison, from which all views are rendered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from jaxmp._audit._rows import merged
from jaxmp._audit._sections_compiled import (
    attention_kernels,
    collectives,
    compiled_lines,
    compiled_matmuls,
    memory,
)
from jaxmp._audit._sections_findings import (
    error_sections,
    finding_sections,
    group_findings,
    warning_sections,
)
from jaxmp._report._section import (
    MAX_ROWS,
    PHASES,
    Section,
    abbreviate,
    grouped,
    left_out_text,
    nonempty,
    numberless,
    pair_text,
)
from jaxmp._report._units import bytes_text, counted, flops_text, module_text, share_text

if TYPE_CHECKING:
    from jaxmp._audit._report import AuditDiff, AuditReport


def report_sections(report: AuditReport, full: bool = False) -> list[Section]:
    """Returns the sections of a report; empty ones are omitted.

    Args:
      report: the report.
      full: False for verdict, errors with their fixes, matmuls and memory; True for everything.
    """
    groups = group_findings(report.errors)
    sections = [
        _verdict(report, len(groups)),
        *error_sections(groups, full),
        _matmuls(report),
        compiled_matmuls(report.gemms, report.attention),
        memory(report.memory),
    ]
    if full:
        sections += [
            *warning_sections(report.warnings),
            _alignment(report),
            _modules(report),
            _casts(report),
            compiled_lines(report.gemms),
            attention_kernels(report.attention, report.gpu),
            collectives(report.collectives),
            _rules(report),
            Section("Notes", "", ("note",), tuple((note,) for note in report.notes)),
        ]
    else:
        sections.append(_details(report))
    return nonempty(sections)


def difference_sections(diff: AuditDiff) -> list[Section]:
    """Returns the sections of a comparison."""
    rows = tuple(
        (" x ".join(pair), _signed(flops, flops_text)) for pair, flops in diff.matmul_flops.items()
    )
    casts = _signed(diff.cast_bytes, bytes_text) if diff.cast_bytes else ""
    is_changed = bool(diff.added or diff.removed or rows or casts)
    return nonempty(
        [
            Section("Changes", "" if is_changed else "none"),
            *finding_sections("New findings", group_findings(diff.added), "Fixes"),
            *finding_sections("Removed findings", group_findings(diff.removed), "")[:1],
            Section("Matmul FLOPs", "", ("operands", "change"), rows),
            Section("Bytes of casts", casts),
        ]
    )


def _signed(value: int, text: Callable[[float], str]) -> str:
    return f"{'-' if value < 0 else '+'}{text(abs(value))}"


# ---------------------------------------------------------------------------
# The traced program
# ---------------------------------------------------------------------------


def _verdict(report: AuditReport, errors: int) -> Section:
    share = "The program has no floating-point matmuls."
    if report.flops:
        share = f"{share_text(report.low_precision_share)} of the matmul FLOPs"
        share += f" ({flops_text(report.flops)}) run in 16 bits or FP8."
    policies = f"the policy {report.policies}" if report.policies else "no policy"
    size = f"{report.equations:,} operations, checked against {policies}"
    if report.gpu:
        # The name of a GPU that is not present on this machine ends with a remark in parentheses.
        verb = "cross-compiled" if report.gpu.endswith(")") else "compiled"
        size += f", {verb} for {report.gpu}"
    title = f"Precision audit: {counted(errors, 'error') if errors else 'ok'}"
    return Section(title, f"{share} {size}.", mood="bad" if errors else "good")


def _details(report: AuditReport) -> Section:
    """Returns the number of warnings, and the command that prints everything."""
    counts = Counter(finding.check for finding in report.warnings)
    text = ", ".join(f"{check}: {count}" for check, count in counts.items())
    warnings = f"{counted(counts.total(), 'warning')} ({text}), " if counts else ""
    return Section(
        "Details",
        f"Use --full or report.to_text(full=True) to print {warnings}modules, casts, alignment and"
        " rules.",
    )


def _matmuls(report: AuditReport) -> Section:
    phases = [phase for phase in PHASES if (phase,) in report.flops_by("phase")]
    by_phase = report.flops_by("lhs", "rhs", "phase")
    rows = tuple(
        (
            " x ".join(pair),
            *(flops_text(by_phase.get((*pair, phase), 0)) for phase in phases),
            flops_text(flops),
            share_text(flops, report.flops),
        )
        for pair, flops in report.matmul_flops.items()
    )
    return Section("Matmuls by operand dtype", "", ("operands", *phases, "total", "share"), rows)


def _alignment(report: AuditReport) -> Section:
    rows = tuple(
        (f"{multiple} elements", flops_text(flops), share_text(flops, report.flops))
        for multiple, flops in report.aligned
        if report.flops
    )
    columns = ("all sizes are multiples of", "FLOPs", "share")
    return Section("Matmul alignment (innermost dimensions)", "", columns, rows)


def _modules(report: AuditReport) -> Section:
    """Returns a row for each module with matmuls; modules that differ in a number share one."""
    rules = {row.module: row.rule for row in report.modules}
    casts = grouped(report.casts, lambda row: row.module)
    matmuls = grouped(report.matmuls, lambda row: row.module)
    flops = report.flops_by("module")

    def key_of(module: str) -> tuple[str, str, str]:
        dtypes = {pair_text(row.lhs, row.rhs) for row in matmuls[module]}
        return numberless(module), ", ".join(sorted(dtypes)), rules.get(module) or ""

    rows = []
    for (_, operands, rule), modules in grouped((module for (module,) in flops), key_of).items():
        size = sum(row.bytes for module in modules for row in casts.get(module, ()))
        total = flops_text(sum(flops[module,] for module in modules))
        rows.append((abbreviate(modules), total, operands, bytes_text(size) if size else "", rule))
    columns = ("module", "FLOPs", "operands", "casts", "rule")
    if not any(rule for *_, rule in rows):
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    text = left_out_text(rows, "matmuls")
    return Section("Matmuls by module", text, columns, tuple(rows[:MAX_ROWS]))


def _casts(report: AuditReport) -> Section:
    rows = tuple(
        (
            f"{row.source} -> {row.target}",
            row.phase,
            counted(row.count, "cast"),
            bytes_text(row.bytes),
        )
        for row in merged((replace(row, module="") for row in report.casts), "bytes", "count")
    )
    return Section("Casts before compiler fusion", "", ("cast", "pass", "count", "bytes"), rows)


def _rules(report: AuditReport) -> Section:
    rows = tuple(
        (row.rule, ", ".join(map(module_text, row.modules)) or "no module", row.why)
        for row in report.rules
    )
    return Section("Rules", "", ("rule", "decides for", "reason"), rows)
