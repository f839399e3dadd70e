"""Sections of a report, helpers to fill them, numbers with units, and sections as plain text."""

from __future__ import annotations

import ast
import itertools
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

Row = TypeVar("Row")
Key = TypeVar("Key", bound=Hashable)

PHASES = ("forward", "backward", "recompute")
# Rows of a table of modules or lines.
MAX_ROWS = 40


class Fix(NamedTuple):
    """The remedy of one or more rows of a table of findings."""

    title: str
    # (is code, text). Sentences and code alternate; code keeps its lines.
    parts: tuple[tuple[bool, str], ...]


class Section(NamedTuple):
    """A title, a sentence, a table and remedies."""

    title: str
    text: str = ""
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    fixes: tuple[Fix, ...] = ()
    # "good", "bad" or "open" for a verdict.
    mood: str = ""


def table(
    title: str,
    rows: Iterable[Row],
    columns: Sequence[tuple[str, Callable[[Row], str]]],
    text: str = "",
) -> Section:
    """Returns a table.

    Args:
      title: of the table.
      rows: its rows.
      columns: (name of a column, function that returns the cell of a row).
      text: a sentence before the table.
    """
    cells = tuple(tuple(cell(row) for _, cell in columns) for row in rows)
    return Section(title, text, tuple(name for name, _ in columns), cells)


def nonempty(sections: list[Section]) -> list[Section]:
    """Returns the sections that contain anything besides a title."""
    return [section for section in sections if section.text or section.rows or section.fixes]


def grouped(rows: Iterable[Row], key: Callable[[Row], Key]) -> dict[Key, list[Row]]:
    """Returns the rows by a key, in their order."""
    groups: dict[Key, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def numberless(module: str) -> str:
    """Returns a module path with `*` in place of numbers, such as `block_*/mlp`."""
    return re.sub(r"\d+", "*", module)


def abbreviate(modules: list[str]) -> str:
    """Joins module paths: `block_*/mlp (3 modules)`, or `a, b and 4 more`."""
    if len(modules) == 1:
        return module_text(modules[0])
    groups = Counter(map(numberless, modules))
    names = [f"{name} ({n} modules)" if n > 1 else module_text(name) for name, n in groups.items()]
    shown, more = names[:2], len(names) - 2
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "")


def pair_text(lhs: str, rhs: str) -> str:
    """Returns one dtype for two equal ones, otherwise `bfloat16 x float32`."""
    return lhs if lhs == rhs else f"{lhs} x {rhs}"


def largest_rows(
    title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]], field: str
) -> Section:
    """Returns a table of the first rows, with a sentence about those that it leaves out.

    Args:
      title: of the table.
      columns: names of the columns.
      rows: all rows, the largest first.
      field: the field of the report that has all of them.
    """
    more = len(rows) - MAX_ROWS
    text = f"The {MAX_ROWS} largest; report.{field} has {more} more." if more > 0 else ""
    return Section(title, text, columns, tuple(rows[:MAX_ROWS]))


# ---------------------------------------------------------------------------
# Fixes and locations
# ---------------------------------------------------------------------------


class Located:
    """Row or report about one source line."""

    file: str
    line: int

    @property
    def location(self) -> str:
        """File name and line of the source, joined by a colon; "" if they are not known."""
        return location_text(self.file, self.line)


def location_text(file: str, line: int) -> str:
    """Returns file name and line, such as `model.py:12`; "" if they are not known."""
    return f"{Path(file).name}:{line}" if file else ""


def fix_parts(fix: str) -> tuple[tuple[bool, str], ...]:
    """Splits a fix into sentences and code.

    Lines of code are indented by four spaces, unless the whole fix is code.
    """
    if _is_code(fix):
        return ((True, fix),)
    parts: list[tuple[bool, list[str]]] = []
    for line in fix.splitlines():
        code = line.startswith("    ") or (not line.strip() and bool(parts) and parts[-1][0])
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


# ---------------------------------------------------------------------------
# Numbers with units
# ---------------------------------------------------------------------------


def counted(count: int, noun: str) -> str:
    """Returns a count with its noun, such as `1 cast` and `2 launches`."""
    plural = "es" if noun.endswith("ch") else "s"
    return f"{count:,} {noun}{plural * (count != 1)}"


def flops_text(flops: float) -> str:
    """Returns FLOPs with a unit, such as `1.5 GFLOP`."""
    return f"{_scaled(flops)}FLOP"


def bytes_text(count: float) -> str:
    """Returns bytes with a unit, such as `1.5 MB`; a megabyte is 10**6 bytes."""
    return f"{_scaled(count)}B"


def share_text(part: float, whole: float = 1) -> str:
    """Returns a share such as `12.5%`; `""` of nothing.

    Only exact values are `0.0%` and `100.0%`.
    """
    if not whole:
        return ""
    share = part / whole
    if 0 < share < 0.0005:
        return "<0.1%"
    if 0.9995 <= share < 1:
        return ">99.9%"
    return f"{share:.1%}"


def module_text(module: str) -> str:
    """Returns a module path; `(root)` for the empty one."""
    return module or "(root)"


def _scaled(value: float) -> str:
    for prefix in ("", "k", "M", "G", "T", "P"):
        if value < 1000 or prefix == "P":
            break
        value /= 1000
    return f"{value:.3g} {prefix}"


# ---------------------------------------------------------------------------
# Plain text. Every string of a section may come from a user.
# ---------------------------------------------------------------------------


WIDTH = 80  # characters per line of plain text
# Columns of text are not made narrower than this. If a table is still too wide, each row becomes a
# list.
_NARROWEST = 14
_GAP = "  "


class Line(NamedTuple):
    """Line of a report with its role: "title", "good", "bad", "open", "head", "code" or ""."""

    text: str
    role: str = ""


def printable(text: str) -> str:
    """Escapes control characters, which a terminal would execute."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def text_lines(sections: Iterable[Section], width: int = WIDTH) -> list[Line]:
    """Returns the lines of a report, with aligned columns; long cells wrap, code does not.

    Args:
      sections: of the report.
      width: characters per line.
    """
    lines: list[Line] = []
    for section in sections:
        lines += [Line("")] if lines else []
        lines.append(Line(printable(section.title), section.mood or "title"))
        lines += map(Line, _wrapped(section.text, width))
        lines += _text_table(section, width - len(_GAP)) if section.rows else []
        for fix in section.fixes:
            lines += _text_fix(fix, width)
    return lines


def _text_table(section: Section, width: int) -> list[Line]:
    cells = [[printable(cell) for cell in row] for row in (section.columns, *section.rows)]
    numeric = numeric_columns(section)
    widths = _widths(cells, numeric, width)
    if widths is None:
        return _text_records(section, width)
    head, *rows = (_text_row(row, widths, numeric) for row in cells)
    rule = _GAP + _GAP.join("-" * width for width in widths)
    return [*(Line(line, "head") for line in (*head, rule)), *map(Line, itertools.chain(*rows))]


def _text_row(row: Sequence[str], widths: list[int], numeric: list[bool]) -> list[str]:
    """Returns the lines of a row; its cells wrap in their columns."""
    cells = [_wrapped(cell, width) or [""] for cell, width in zip(row, widths, strict=True)]
    lines = (
        _GAP.join(
            part.rjust(width) if right else part.ljust(width)
            for part, width, right in zip(parts, widths, numeric, strict=True)
        )
        for parts in itertools.zip_longest(*cells, fillvalue="")
    )
    return [(_GAP + line).rstrip() for line in lines]


def _widths(cells: list[list[str]], numeric: list[bool], width: int) -> list[int] | None:
    """Returns the widths of a table's columns; the widest columns of text are made narrower.

    Returns:
      None if the table does not fit.
    """
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    # Numbers and short columns do not wrap.
    fixed = [right or w <= _NARROWEST for right, w in zip(numeric, widths, strict=True)]
    while sum(widths) + len(_GAP) * (len(widths) - 1) > width:
        free = [n for n, w in enumerate(widths) if not fixed[n] and w > _NARROWEST]
        if not free:
            return None
        widths[max(free, key=widths.__getitem__)] -= 1
    return widths


def _text_records(section: Section, width: int) -> list[Line]:
    """Returns a table that is too wide as a list of names and values for each row."""
    label = max(map(len, section.columns))
    widths = [label, max(width - label - len(_GAP), _NARROWEST)]
    lines: list[Line] = []
    for row in section.rows:
        lines += [Line("")] if lines else []
        for pair in zip(section.columns, row, strict=True):
            lines += map(Line, _text_row(pair, widths, [False, False]))
    return lines


def _text_fix(fix: Fix, width: int) -> list[Line]:
    """Returns the numbers of the rows and their remedy; code keeps its lines."""
    head = _wrapped(f"{fix.title}:", width - len(_GAP))
    lines = [Line(_GAP + line) for line in head]
    for code, text in fix.parts:
        if code:
            lines += [Line(" " * 8 + printable(line), "code") for line in text.splitlines()]
        else:
            lines += [Line(" " * 4 + line) for line in _wrapped(text, width - 4)]
    first_is_code = fix.parts[0][0]
    if len(head) == 1 and not first_is_code and len(head[0]) + len(lines[1].text) < width:
        # The first sentence follows the number on the same line.
        lines[:2] = [Line(f"{_GAP}{head[0]} {lines[1].text.lstrip()}")]
    return lines


def _wrapped(text: str, width: int) -> list[str]:
    """Wraps text at blanks; words that are longer than a line are broken."""
    return textwrap.wrap(" ".join(printable(text).split()), max(width, 1), break_on_hyphens=False)


_NUMBER = re.compile(r"[-+<>]?\d[\d,.]*( ?[kMGTP]?(FLOP|B)| ?%| [a-z]+)?")


def numeric_columns(section: Section) -> list[bool]:
    """Returns for each column whether it contains numbers, which are aligned on the right."""
    _, *columns = zip(*section.rows, strict=True)
    filled = [[cell for cell in column if cell] for column in columns]
    return [False, *(bool(cells) and all(map(_NUMBER.fullmatch, cells)) for cells in filled)]
