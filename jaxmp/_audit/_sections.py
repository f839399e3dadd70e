"""Sections of a report, from which all views are rendered."""

from __future__ import annotations

import ast
import textwrap
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from jaxmp._audit._rows import AttentionRow, CollectiveRow, Finding, GemmRow, MemoryRow
from jaxmp._report._section import (
    MAX_ROWS,
    PHASES,
    Fix,
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
    from jaxmp._audit._report import AuditReport

# Rows of the table of errors in the short report.
_MAX_ERRORS = 20
_INDENT = "    "

Groups = list[list[Finding]]


def group_findings(findings: Iterable[Finding]) -> Groups:
    """Groups the findings that share one row: their modules differ in numbers only."""
    groups = grouped(findings, lambda f: (f.check, numberless(f.module), f.file, f.line, f.fix))
    return list(groups.values())


def error_sections(groups: Groups, full: bool) -> list[Section]:
    """Returns the table of errors and the fixes.

    Args:
      groups: errors, one group for each row.
      full: True for all rows; False for the first ones.
    """
    shown = groups if full else groups[:_MAX_ERRORS]
    more = len(groups) - len(shown)
    text = f"The first {len(shown)}; use --full to print {more} more." if more else ""
    return finding_sections("Errors", shown, "Fixes", text)


def warning_sections(findings: Iterable[Finding]) -> list[Section]:
    """Returns the table of warnings, grouped by check and fix, and suggestions."""
    groups = grouped(findings, lambda finding: (finding.check, finding.fix))
    return finding_sections("Warnings", list(groups.values()), "Suggestions")


def finding_sections(title: str, groups: Groups, fixes: str, text: str = "") -> list[Section]:
    """Returns a numbered table of findings, and the fix of each.

    Args:
      title: of the table.
      groups: findings, one group for each row.
      fixes: title of the fixes.
      text: a sentence above the table.
    """
    rows = tuple((str(n), *_row(group)) for n, group in enumerate(groups, start=1))
    by_fix = grouped(range(len(groups)), lambda number: groups[number][0].fix)
    remedies = tuple(
        Fix(_fix_title(numbers, groups[numbers[0]][0].location), fix_parts(fix))
        for fix, numbers in by_fix.items()
        if fix
    )
    return [
        Section(title, text, ("#", "check", "location", "finding"), rows),
        Section(fixes, fixes=remedies),
    ]


def _row(group: list[Finding]) -> tuple[str, ...]:
    first, count = group[0], sum(finding.count for finding in group)
    modules = abbreviate(sorted({finding.module for finding in group}))
    # The message of a finding about an argument contains its count.
    times = f" ({counted(count, 'operation')})" if count > 1 and first.primitive else ""
    lines = len({(finding.file, finding.line) for finding in group})
    line = first.location + (f" and {counted(lines - 1, 'more line')}" if lines > 1 else "")
    location = f"{modules}, {line}" if line else modules
    return first.check, location, first.message + times


def _fix_title(numbers: list[int], location: str) -> str:
    """Returns `1 (model.py:12)`, or `1, 3` for the remedy of several rows."""
    title = ", ".join(str(number + 1) for number in numbers)
    return f"{title} ({location})" if location and len(numbers) == 1 else title


def fix_parts(fix: str) -> tuple[tuple[bool, str], ...]:
    """Splits a fix into sentences and code.

    Lines of code are indented by four spaces, unless the whole fix is code.
    """
    if _is_code(fix):
        return ((True, fix),)
    parts: list[tuple[bool, list[str]]] = []
    for line in fix.splitlines():
        code = line.startswith(_INDENT) or (not line.strip() and bool(parts) and parts[-1][0])
        if not parts or parts[-1][0] != code:
            parts.append((code, []))
        parts[-1][1].append(line)
    return tuple(
        (code, textwrap.dedent("\n".join(lines)).rstrip() if code else " ".join(lines))
        for code, lines in parts
    )


def _is_code(text: str) -> bool:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError):
        return False
    return bool(text.strip())


def _kernel_of(row: GemmRow | AttentionRow) -> tuple[str, str, str]:
    """Returns the dtypes of operands and result, and the kernel."""
    if isinstance(row, AttentionRow):
        return row.dtype, row.dtype, "fused attention"
    return pair_text(row.lhs, row.rhs), row.out, row.kernel


def compiled_matmuls(kernels: Iterable[GemmRow | AttentionRow]) -> Section:
    """Returns the FLOPs of the GPU's kernels by dtype."""
    groups = grouped(kernels, _kernel_of)
    flops = Counter({key: sum(row.flops for row in group) for key, group in groups.items()})
    rows = tuple(
        (
            *key,
            counted(sum(row.count for row in groups[key]), "launch"),
            flops_text(value),
            share_text(value, flops.total()),
        )
        for key, value in flops.most_common()
    )
    columns = ("multiplied in", "result", "kernel", "count", "FLOPs", "share")
    return Section("Matmuls in the compiled program", "", columns, rows)


def compiled_lines(kernels: Iterable[GemmRow | AttentionRow]) -> Section:
    """Returns the GPU's matmuls by module and source line."""
    key_of = lambda row: (numberless(row.module), row.location, *_kernel_of(row))
    rows = [
        (
            abbreviate(sorted({row.module for row in group})),
            location,
            dtypes,
            kernel,
            ", ".join(phase for phase in PHASES if phase in {row.phase for row in group}),
            flops_text(sum(row.flops for row in group)),
        )
        for (_, location, dtypes, _, kernel), group in grouped(kernels, key_of).items()
    ]
    columns = ("module", "line", "multiplied in", "kernel", "passes", "FLOPs")
    text = left_out_text(rows, "gemms")
    return Section("Compiled matmuls by module", text, columns, tuple(rows[:MAX_ROWS]))


def collectives(collectives: Iterable[CollectiveRow]) -> Section:
    """Returns the arrays that devices send to one another."""
    rows = [
        (
            row.operation,
            row.dtype,
            bytes_text(row.bytes),
            counted(row.count, "array"),
            row.content,
            ", ".join(row.axes),
            row.phase,
            module_text(row.module),
            row.location,
        )
        for row in collectives
    ]
    columns = ("collective", "dtype", "bytes", "count", "content", "axes", "pass", "module", "line")
    text = left_out_text(rows, "collectives")
    return Section("Collectives per device", text, columns, tuple(rows[:MAX_ROWS]))


def memory(memory: MemoryRow | None) -> Section:
    """Returns the memory of the program and the bytes that the optimizer update moves."""
    if memory is None:
        return Section("")
    rows = [
        ("arguments", bytes_text(memory.arguments)),
        ("results", bytes_text(memory.outputs)),
        ("results in donated arguments", bytes_text(memory.aliased)),
        ("temporary buffers", bytes_text(memory.temporary)),
        ("fusions in the program", counted(memory.fusions, "kernel")),
    ]
    if memory.update_bytes and memory.parameters:
        moved = memory.update_bytes / memory.parameters
        minimum = memory.update_floor / memory.parameters
        text = f"{moved:.1f} bytes per parameter (minimum {minimum:.1f})"
        rows.append(("memory traffic of the update", text))
    return Section("Memory per device", "", ("quantity", "value"), tuple(rows))


def report_sections(report: AuditReport, full: bool = False) -> list[Section]:
    """Returns the sections of a report; empty ones are omitted.

    Args:
      report: the report.
      full: False for verdict, errors with their fixes, matmuls and memory; True for everything.
    """
    groups, kernels = group_findings(report.errors), (*report.gemms, *report.attention)
    sections = [
        _verdict(report, len(groups)),
        *error_sections(groups, full),
        _matmuls(report),
        compiled_matmuls(kernels),
        memory(report.memory),
    ]
    if full:
        sections += [
            *warning_sections(report.warnings),
            _modules(report),
            compiled_lines(kernels),
            collectives(report.collectives),
            Section("Notes", "", ("note",), tuple((note,) for note in report.notes)),
        ]
    else:
        sections.append(_details(report))
    return nonempty(sections)


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
        f"Use --full or report.to_text(full=True) to print {warnings}modules, kernels and notes.",
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


def _modules(report: AuditReport) -> Section:
    """Returns a row for each module with matmuls; modules that differ in a number share one."""
    matmuls = grouped(report.matmuls, lambda row: row.module)
    flops = report.flops_by("module")

    def key_of(module: str) -> tuple[str, str]:
        dtypes = {pair_text(row.lhs, row.rhs) for row in matmuls[module]}
        return numberless(module), ", ".join(sorted(dtypes))

    rows = []
    for (_, operands), modules in grouped((module for (module,) in flops), key_of).items():
        total = flops_text(sum(flops[module,] for module in modules))
        rows.append((abbreviate(modules), total, operands))
    text, columns = left_out_text(rows, "matmuls"), ("module", "FLOPs", "operands")
    return Section("Matmuls by module", text, columns, tuple(rows[:MAX_ROWS]))
