"""Sections of errors and warnings."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterable

from jaxmp._audit._rows import Finding
from jaxmp._report._section import Fix, Section, abbreviate, grouped, numberless
from jaxmp._report._units import counted

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
