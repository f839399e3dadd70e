"""A report as titled tables of strings: what every view shows, in words."""

from __future__ import annotations

import ast
import re
import textwrap
from collections import Counter
from typing import Any, NamedTuple

from jaxmp._audit._checks import WARNING

_PHASES = ("forward", "backward", "recompute")
# Rows that a table of modules shows; the rest is added up in one more.
_LONGEST = 40
# Rows of the table of errors in the short report.
_MOST_ERRORS = 20


class Fix(NamedTuple):
    """The remedy of one or more rows of the table of errors."""

    title: str
    # (is code, text): sentences and code in turn; code keeps its lines.
    parts: tuple[tuple[bool, str], ...]


class Section(NamedTuple):
    """A title, a sentence, a table, and remedies."""

    title: str
    text: str = ""
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    fixes: tuple[Fix, ...] = ()
    # "good" or "bad" if the section is the verdict.
    mood: str = ""


def report_sections(report: Any, full: bool = False) -> list[Section]:
    """The sections of an `AuditReport`; empty ones are omitted.

    Args:
      report: the report.
      full: False: verdict, errors with their fixes, matmuls and memory; True: all else too.
    """
    groups = _alike(report.errors)
    sections = [
        _verdict(report, len(groups)),
        *_errors(groups, None if full else _MOST_ERRORS),
        _matmuls(report),
        _gemms(report),
        _memory(report),
    ]
    if full:
        sections += [
            *_warnings(report),
            _alignment(report),
            _modules(report),
            _casts(report),
            _gemm_lines(report),
            _attention(report),
            _collectives(report),
            _rules(report),
            _uncounted(report),
        ]
    else:
        sections.append(_more(report))
    return [section for section in sections if section.text or section.rows or section.fixes]


def difference_sections(diff: Any) -> list[Section]:
    """The sections of an `AuditDiff`."""
    sections = [
        Section("What changed", "" if _changed(diff) else "nothing"),
        *_finding_sections("New findings", _alike(diff.added)),
        *_finding_sections("Findings that are gone", _alike(diff.removed))[:1],
        Section(
            "Matmul FLOPs",
            "",
            ("operands", "change"),
            tuple((" x ".join(k), _signed(v, flops_words)) for k, v in diff.matmul_flops.items()),
        ),
        Section("Casts", _signed(diff.cast_bytes, bytes_words) if diff.cast_bytes else ""),
    ]
    return [section for section in sections if section.text or section.rows or section.fixes]


def _changed(diff: Any) -> bool:
    return bool(diff.added or diff.removed or diff.matmul_flops or diff.cast_bytes)


def _signed(value: int, words: Any) -> str:
    return f"{'-' if value < 0 else '+'}{words(abs(value))}"


# ---------------------------------------------------------------------------
# One section each
# ---------------------------------------------------------------------------


def _verdict(report: Any, errors: int) -> Section:
    against = (
        f"Checked against {report.policies}" if report.policies else "Checked without policies"
    )
    size = f"{against}: {report.equations:,} operations"
    size += f", compiled for {report.gpu}." if report.gpu else "."
    share = "The program has no floating-point matmuls."
    if report.flops:
        share = f"{share_words(report.low_precision_share)} of the matmul FLOPs"
        share += f" ({flops_words(report.flops)}) run in 16 bits or FP8."
    title = f"Precision audit: {counted(errors, 'error') if errors else 'ok'}"
    return Section(title, f"{share} {size}", mood="bad" if errors else "good")


# -- findings -------------------------------------------------------------------------------


def _alike(findings: Any) -> list[list[Any]]:
    """Groups findings that share one row: their modules differ in a number alone."""
    groups: dict[Any, list[Any]] = {}
    for finding in findings:
        key = finding.check, _numberless(finding.module), finding.file, finding.line, finding.fix
        groups.setdefault(key, []).append(finding)
    return list(groups.values())


def _errors(groups: list[list[Any]], most: int | None) -> list[Section]:
    left_out = len(groups[most:]) if most else 0
    text = f"The first {most}; --full prints {left_out} more." if left_out else ""
    return _finding_sections("Faults", groups[:most], text)


def _warnings(report: Any) -> list[Section]:
    """The notes, grouped by check and fix."""
    groups: dict[Any, list[Any]] = {}
    for finding in report.findings:
        if finding.severity == WARNING:
            groups.setdefault((finding.check, finding.fix), []).append(finding)
    return _finding_sections("Warnings", list(groups.values()))


def _finding_sections(title: str, groups: list[list[Any]], text: str = "") -> list[Section]:
    """A numbered table of findings, and below it the remedy of each."""
    rows = tuple((str(n), *_finding_row(group)) for n, group in enumerate(groups, start=1))
    alike: dict[str, list[int]] = {}
    for number, group in enumerate(groups):
        if group[0].fix:
            alike.setdefault(group[0].fix, []).append(number)
    fixes = tuple(
        Fix(_fix_title(numbers, groups[numbers[0]][0].location), fix_parts(fix))
        for fix, numbers in alike.items()
    )
    return [
        Section(title, text, ("#", "check", "where", "what"), rows),
        Section("Fixes" if title == "Faults" else "What to do", fixes=fixes),
    ]


def _finding_row(group: list[Any]) -> tuple[str, ...]:
    first, count = group[0], sum(finding.count for finding in group)
    module = _together(sorted({finding.module for finding in group}))
    # The message of a finding about an argument contains its number.
    times = f" ({counted(count, 'operation')})" if count > 1 and first.primitive else ""
    lines = len({(finding.file, finding.line) for finding in group})
    location = first.location + (f" and {counted(lines - 1, 'more line')}" if lines > 1 else "")
    where = f"{module}, {location}" if location else module
    return first.check, where, first.message + times


def _fix_title(numbers: list[int], location: str) -> str:
    """`1 (model.py:12)`, or `1, 3` for a remedy of several rows."""
    title = ", ".join(str(number + 1) for number in numbers)
    return f"{title} ({location})" if location and len(numbers) == 1 else title


_INDENT = "    "


def fix_parts(fix: str) -> tuple[tuple[bool, str], ...]:
    """Splits a fix into sentences and code: lines with an indent of four, or a whole statement."""
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


def _more(report: Any) -> Section:
    """The number of notes, and how to print what is left out."""
    warnings: Counter[str] = Counter()
    for finding in report.findings:
        if finding.severity == WARNING:
            warnings[finding.check] += 1
    words = ", ".join(f"{check} ({counted(n, 'location')})" for check, n in warnings.items())
    more = "--full, or report.to_text(full=True), prints"
    more += f" the warnings ({words}), and" if warnings else ""
    return Section("More", f"{more} modules, casts, alignment and rules.")


def _numberless(module: str) -> str:
    return re.sub(r"\d+", "*", module)


def _together(modules: list[str]) -> str:
    """`block_*/mlp (3 modules)`, `head, stem`, `a, b and 4 more`."""
    if len(modules) == 1:
        return module_words(modules[0])
    alike: Counter[str] = Counter(map(_numberless, modules))
    words = [f"{name} ({n} modules)" if n > 1 else module_words(name) for name, n in alike.items()]
    shown, more = words[:2], len(words) - 2
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "")


def _matmuls(report: Any) -> Section:
    phases = [phase for phase in _PHASES if (phase,) in report.flops_by("phase")]
    by_phase = report.flops_by("lhs", "rhs", "phase")
    rows = tuple(
        (
            " x ".join(pair),
            *(flops_words(by_phase.get((*pair, phase), 0)) for phase in phases),
            flops_words(flops),
            _share(flops, report.flops),
        )
        for pair, flops in report.matmul_flops.items()
    )
    return Section("Matmuls by operand dtype", "", ("operands", *phases, "total", "share"), rows)


def _alignment(report: Any) -> Section:
    rows = tuple(
        (f"{multiple} elements", flops_words(flops), _share(flops, report.flops))
        for multiple, flops in report.aligned
        if report.flops
    )
    columns = ("all sizes multiples of", "FLOPs", "share")
    return Section("Matmul alignment (innermost dimensions)", "", columns, rows)


def _modules(report: Any) -> Section:
    """A row for each module with matmuls; modules that differ in a number alone share one."""
    rules = {row.module: row.rule for row in report.modules}
    casts: Counter[str] = Counter()
    for row in report.casts:
        casts[row.module] += row.bytes
    dtypes: dict[str, dict[str, None]] = {}
    for row in report.matmuls:
        dtypes.setdefault(row.module, {})[" x ".join(_pair((row.lhs, row.rhs)))] = None
    alike: dict[Any, list[str]] = {}
    for (module,) in report.flops_by("module"):
        words = ", ".join(sorted(dtypes[module]))
        alike.setdefault((_numberless(module), words, rules.get(module)), []).append(module)
    flops = report.flops_by("module")
    rows = [
        (
            _together(modules),
            flops_words(sum(flops[module,] for module in modules)),
            words,
            _bytes_or_none(sum(casts[module] for module in modules)),
            rule or "",
        )
        for (_, words, rule), modules in alike.items()
    ]
    columns = ("module", "FLOPs", "operands", "casts", "rule")
    if not any(rule for *_, rule in rows):
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    return Section("Matmuls by module", _left_out(rows), columns, tuple(rows[:_LONGEST]))


def _bytes_or_none(count: int) -> str:
    return bytes_words(count) if count else ""


def _pair(names: tuple[str, ...]) -> tuple[str, ...]:
    return names[:1] if names[0] == names[1] else names


def _casts(report: Any) -> Section:
    sums: Counter[tuple[str, ...]] = Counter()
    counts: Counter[tuple[str, ...]] = Counter()
    for row in report.casts:
        key = (f"{row.source} -> {row.target}", row.phase)
        sums[key] += row.bytes
        counts[key] += row.count
    rows = tuple(
        (*key, counted(counts[key], "cast"), bytes_words(sums[key]))
        for key, _ in sums.most_common()
    )
    return Section(
        "Casts, before the compiler fuses them", "", ("cast", "pass", "count", "bytes"), rows
    )


# -- the compiled program -------------------------------------------------------------------


def _gemms(report: Any) -> Section:
    flops: Counter[tuple[str, ...]] = Counter()
    counts: Counter[tuple[str, ...]] = Counter()
    for row in report.gemms:
        key = (f"{row.lhs} x {row.rhs}", row.out, row.kernel)
        flops[key] += row.flops
        counts[key] += row.count
    for row in report.attention:
        key = (f"{row.dtype} x {row.dtype}", row.dtype, "fused attention")
        flops[key] += row.flops
        counts[key] += row.count
    whole = sum(flops.values())
    rows = tuple(
        (*key, counted(counts[key], "kernel"), flops_words(value), _share(value, whole))
        for key, value in flops.most_common()
    )
    columns = ("multiplied in", "result", "kernel", "count", "FLOPs", "share")
    return Section("Matmuls as the GPU runs them", "", columns, rows)


def _gemm_lines(report: Any) -> Section:
    """A row for each line of the user's; modules that differ in a number alone share one."""
    alike: dict[Any, list[Any]] = {}
    for row in report.gemms:
        words = " x ".join(_pair((row.lhs, row.rhs)))
        alike.setdefault((_numberless(row.module), row.location, words), []).append(row)
    rows = [
        (
            _together(sorted({row.module for row in group})),
            location,
            words,
            ", ".join(phase for phase in _PHASES if phase in {row.phase for row in group}),
            flops_words(sum(row.flops for row in group)),
        )
        for (_, location, words), group in alike.items()
    ]
    columns = ("module", "line", "multiplied in", "passes", "FLOPs")
    text = _left_out(rows).replace("matmuls", "gemms")
    return Section("Matmuls of the GPU by module", text, columns, tuple(rows[:_LONGEST]))


def _attention(report: Any) -> Section:
    alike: dict[Any, list[Any]] = {}
    for row in report.attention:
        key = _numberless(row.module), row.location, row.phase, row.kernel, row.dtype
        alike.setdefault(key, []).append(row)
    rows = tuple(
        (
            _together(sorted({row.module for row in group})),
            *key[1:],
            counted(sum(row.count for row in group), "kernel"),
            flops_words(sum(row.flops for row in group)),
        )
        for key, group in alike.items()
    )
    columns = ("module", "line", "pass", "kernel", "dtype", "count", "FLOPs")
    text = "none" if report.gpu and not rows else ""
    return Section("Fused attention kernels", text, columns if rows else (), rows)


def _collectives(report: Any) -> Section:
    rows = tuple(
        (
            row.operation,
            row.dtype,
            bytes_words(row.bytes),
            counted(row.count, "array"),
            row.phase,
            module_words(row.module),
            row.location,
        )
        for row in report.collectives
    )
    columns = ("collective", "dtype", "bytes", "count", "pass", "module", "line")
    return Section("Collectives, on each device", "", columns, rows[:_LONGEST])


def _memory(report: Any) -> Section:
    memory = report.memory
    if memory is None:
        return Section("")
    rows = [
        ("arguments", bytes_words(memory.arguments)),
        ("results", bytes_words(memory.outputs)),
        ("of these in the memory of arguments", bytes_words(memory.aliased)),
        ("temporary", bytes_words(memory.temporary)),
        ("fused kernels", counted(memory.fusions, "kernel")),
    ]
    if memory.update_bytes and memory.parameters:
        moved = memory.update_bytes / memory.parameters
        floor = memory.update_floor / memory.parameters
        words = f"{moved:.1f} bytes per parameter, at least {floor:.1f}"
        rows.append(("the update reads and writes", words))
    return Section("Memory, on each device", "", ("what", "size"), tuple(rows))


def _rules(report: Any) -> Section:
    rows = tuple(
        (
            row.rule,
            ", ".join(map(module_words, row.modules)) or "never fired",
            row.why,
        )
        for row in report.rules
    )
    return Section("Rules", "", ("rule", "decided for", "why"), rows)


def _uncounted(report: Any) -> Section:
    return Section("Not counted", "", ("what",), tuple((note,) for note in report.notes))


# ---------------------------------------------------------------------------
# Words
# ---------------------------------------------------------------------------


def module_words(module: str) -> str:
    """The path, or a word for the empty one."""
    return module or "(root)"


def counted(count: int, noun: str) -> str:
    """`1 cast`, `2 casts`."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def flops_words(flops: float) -> str:
    """`1.5 GFLOP`."""
    return f"{_scaled(flops)}FLOP"


def bytes_words(count: float) -> str:
    """`1.5 MB`; a megabyte is 10**6 bytes."""
    return f"{_scaled(count)}B"


def _scaled(value: float) -> str:
    for prefix in ("", "k", "M", "G", "T", "P"):
        if value < 1000 or prefix == "P":
            break
        value /= 1000
    return f"{value:.3g} {prefix}"


def _share(part: float, whole: float) -> str:
    return share_words(part / whole) if whole else ""


def share_words(share: float) -> str:
    """`12.5%`; neither all nor nothing is the result of rounding."""
    if 0 < share < 0.0005:
        return "<0.1%"
    if 0.9995 <= share < 1:
        return ">99.9%"
    return f"{share:.1%}"


def _left_out(rows: list[Any]) -> str:
    more = len(rows) - _LONGEST
    return f"The {_LONGEST} largest; {more} more in report.matmuls." if more > 0 else ""
