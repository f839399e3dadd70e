"""Sections as plain text. Every string in them may come from a user."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable
from typing import NamedTuple

from jaxmp._tools.report._section import Fix, Section

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


def plain_text(sections: Iterable[Section], width: int = WIDTH) -> str:
    """Returns sections as text with aligned columns; long cells wrap, code does not."""
    return "\n".join(line.text for line in text_lines(sections, width))


def text_lines(sections: Iterable[Section], width: int = WIDTH) -> list[Line]:
    """Returns the lines of a report.

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
    wrapped = [
        [_wrapped(cell, w) or [""] for cell, w in zip(row, widths, strict=True)] for row in cells
    ]
    head, *rows = ([_GAP + line for line in _text_row(row, widths, numeric)] for row in wrapped)
    rule = _GAP + _GAP.join("-" * width for width in widths)
    return [
        *(Line(line, "head") for line in (*head, rule)),
        *(Line(n) for row in rows for n in row),
    ]


def _text_row(cells: list[list[str]], widths: list[int], numeric: list[bool]) -> list[str]:
    height = max(map(len, cells))
    columns = [
        [line.rjust(width) if right else line.ljust(width) for line in cell]
        + [" " * width] * (height - len(cell))
        for cell, width, right in zip(cells, widths, numeric, strict=True)
    ]
    return [_GAP.join(parts).rstrip() for parts in zip(*columns, strict=True)]


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
    lines: list[Line] = []
    for row in section.rows:
        lines += [Line("")] if lines else []
        for name, cell in zip(section.columns, row, strict=True):
            texts = _wrapped(cell, max(width - label - len(_GAP), _NARROWEST)) or [""]
            names = [name, *[""] * (len(texts) - 1)]
            pairs = zip(names, texts, strict=True)
            lines += [Line(f"{_GAP}{n.ljust(label)}{_GAP}{text}".rstrip()) for n, text in pairs]
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
    line = " ".join(printable(text).split())
    return textwrap.wrap(line, max(width, 1), break_on_hyphens=False)


_NUMBER = re.compile(r"[-+<>]?\d[\d,.]*( ?[kMGTP]?(FLOP|B)| ?%| [a-z]+)?")


def numeric_columns(section: Section) -> list[bool]:
    """Returns for each column whether it contains numbers, which are aligned on the right."""
    _, *columns = zip(*section.rows, strict=True)
    filled = [[cell for cell in column if cell] for column in columns]
    return [False, *(bool(cells) and all(map(_NUMBER.fullmatch, cells)) for cells in filled)]
