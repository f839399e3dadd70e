"""A report as titled tables of strings: what every view shows, in words."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any, NamedTuple

from jaxmp._audit._kinds import NOTE

_PHASES = ("forward", "backward", "recompute")
# Rows that a table of modules shows; the rest is added up in one more.
_LONGEST = 40


class Section(NamedTuple):
    """A title, a sentence, and a table."""

    title: str
    text: str = ""
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    # "good" or "bad" where the section is a verdict.
    mood: str = ""


def report_sections(report: Any) -> list[Section]:
    """The sections of an `AuditReport`; those with nothing to say are left out."""
    sections = [
        _verdict(report),
        Section("Faults", "", _FINDING_COLUMNS, _finding_rows(report.faults)),
        _matmuls(report),
        _alignment(report),
        _modules(report),
        _casts(report),
        _gemms(report),
        _gemm_lines(report),
        _attention(report),
        _collectives(report),
        _memory(report),
        _rules(report),
        _notes(report),
        _uncounted(report),
    ]
    return [section for section in sections if section.text or section.rows]


def difference_sections(diff: Any) -> list[Section]:
    """The sections of an `AuditDiff`."""
    sections = [
        Section("What changed", "" if _changed(diff) else "nothing"),
        Section("New findings", "", _FINDING_COLUMNS, _finding_rows(diff.added)),
        Section("Findings that are gone", "", _FINDING_COLUMNS, _finding_rows(diff.removed)),
        Section(
            "Matmul FLOPs",
            "",
            ("operands", "change"),
            tuple((" x ".join(k), _signed(v, flops_words)) for k, v in diff.matmul_flops.items()),
        ),
        Section("Casts", _signed(diff.cast_bytes, bytes_words) if diff.cast_bytes else ""),
    ]
    return [section for section in sections if section.text or section.rows]


def _changed(diff: Any) -> bool:
    return bool(diff.added or diff.removed or diff.matmul_flops or diff.cast_bytes)


def _signed(value: int, words: Any) -> str:
    return f"{'-' if value < 0 else '+'}{words(abs(value))}"


# ---------------------------------------------------------------------------
# One section each
# ---------------------------------------------------------------------------


def _verdict(report: Any) -> Section:
    judged = f" against {report.policies}" if report.policies else ""
    size = f"{report.equations:,} operations, {flops_words(report.flops)} in matmuls"
    size += f"; compiled for {report.gpu}" if report.gpu else ""
    if report.ok:
        return Section("Precision audit: ok", f"No fault{judged}; {size}.", mood="good")
    counts = ", ".join(f"{kind} {count}" for kind, count in report.counts().items())
    text = f"Judged{judged or ' without policies'}: {counts}; {size}."
    return Section("Precision audit: faults", text, mood="bad")


_FINDING_COLUMNS = ("kind", "module", "line", "what", "fix")


def _notes(report: Any) -> Section:
    """A row for each kind of note and its fix."""
    alike: dict[Any, list[Any]] = {}
    for finding in report.findings:
        if finding.level == NOTE:
            alike.setdefault((finding.kind, finding.fix), []).append(finding)
    rows = tuple(_finding_row(group) for group in alike.values())
    return Section("Notes: no faults, worth knowing", "", _FINDING_COLUMNS, rows)


def _finding_rows(findings: Any) -> tuple[tuple[str, ...], ...]:
    """A row for each finding; modules that differ in a number alone share one."""
    alike: dict[Any, list[Any]] = {}
    for finding in findings:
        key = finding.kind, _numberless(finding.module), finding.file, finding.line, finding.fix
        alike.setdefault(key, []).append(finding)
    return tuple(_finding_row(group) for group in alike.values())


def _finding_row(group: list[Any]) -> tuple[str, ...]:
    first, count = group[0], sum(finding.count for finding in group)
    where = _together(sorted({finding.module for finding in group}))
    # What is about an argument has its number in the message.
    times = f" ({count} operations)" if count > 1 and first.primitive else ""
    what = first.message + times
    lines = len({(finding.file, finding.line) for finding in group})
    place = first.place + (f" and {lines - 1} more" if lines > 1 else "")
    return first.kind, where, place, what, first.fix


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
        (str(multiple), flops_words(flops), _share(flops, report.flops))
        for multiple, flops in report.aligned
        if report.flops
    )
    columns = ("all sizes multiples of", "FLOPs", "share")
    return Section("Alignment of the widths that stand last in memory", "", columns, rows)


def _modules(report: Any) -> Section:
    """A row for each module with matmuls; modules that differ in a number alone share one."""
    decided = {row.module: (row.policy, row.rule) for row in report.modules}
    casts: Counter[str] = Counter()
    for row in report.casts:
        casts[row.module] += row.bytes
    dtypes: dict[str, dict[str, None]] = {}
    for row in report.matmuls:
        dtypes.setdefault(row.module, {})[" x ".join(_pair((row.lhs, row.rhs)))] = None
    alike: dict[Any, list[str]] = {}
    for (module,) in report.flops_by("module"):
        words = ", ".join(sorted(dtypes[module]))
        alike.setdefault((_numberless(module), words, decided.get(module)), []).append(module)
    flops = report.flops_by("module")
    rows = [
        (
            _together(modules),
            flops_words(sum(flops[module,] for module in modules)),
            words,
            _bytes_or_none(sum(casts[module] for module in modules)),
            *(decision or ()),
        )
        for (_, words, decision), modules in alike.items()
    ]
    columns = ("module", "FLOPs", "operands", "casts", "policy", "decided by")
    columns = columns if report.policies else columns[:-2]
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
    rows = tuple((*key, str(counts[key]), bytes_words(sums[key])) for key, _ in sums.most_common())
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
    whole = sum(flops.values())
    rows = tuple(
        (*key, str(counts[key]), flops_words(value), _share(value, whole))
        for key, value in flops.most_common()
    )
    columns = ("multiplied in", "result", "kernel", "count", "FLOPs", "share")
    return Section("Matmuls as the GPU runs them", "", columns, rows)


def _gemm_lines(report: Any) -> Section:
    """A row for each line of the user's; modules that differ in a number alone share one."""
    alike: dict[Any, list[Any]] = {}
    for row in report.gemms:
        words = " x ".join(_pair((row.lhs, row.rhs)))
        alike.setdefault((_numberless(row.module), row.place, words), []).append(row)
    rows = [
        (
            _together(sorted({row.module for row in group})),
            place,
            words,
            ", ".join(phase for phase in _PHASES if phase in {row.phase for row in group}),
            flops_words(sum(row.flops for row in group)),
        )
        for (_, place, words), group in alike.items()
    ]
    columns = ("module", "line", "multiplied in", "passes", "FLOPs")
    text = _left_out(rows).replace("matmuls", "gemms")
    return Section("Matmuls of the GPU by module", text, columns, tuple(rows[:_LONGEST]))


def _attention(report: Any) -> Section:
    rows = tuple(
        (module_words(row.module), row.place, row.phase, row.kernel, row.dtype, str(row.count))
        for row in report.attention
    )
    columns = ("module", "line", "pass", "kernel", "dtype", "count")
    text = "none" if report.gpu and not rows else ""
    return Section("Fused attention kernels", text, columns if rows else (), rows)


def _collectives(report: Any) -> Section:
    rows = tuple(
        (
            row.operation,
            row.dtype,
            bytes_words(row.bytes),
            str(row.count),
            row.phase,
            module_words(row.module),
            row.place,
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
        ("fused kernels", f"{memory.fusions:,}"),
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
    return f"{part / whole:.1%}" if whole else ""


def _left_out(rows: list[Any]) -> str:
    more = len(rows) - _LONGEST
    return f"The {_LONGEST} largest; {more} more in report.matmuls." if more > 0 else ""
