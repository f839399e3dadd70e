"""Rendering of sections as plain text and HTML. Every string in them may come from a user."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from typing import NamedTuple

from jaxmp._audit._section import Fix, Section

WIDTH = 80  # characters per line of plain text
# Columns of text are not made narrower than this. If a table is still too wide, each row becomes a
# list.
_NARROWEST = 14
_GAP = "  "


class Line(NamedTuple):
    """Line of a report with its role: "title", "good", "bad", "head", "code" or ""."""

    text: str
    role: str = ""


def printable(text: str) -> str:
    """Escapes control characters, which a terminal would execute."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


# ---------------------------------------------------------------------------
# Plain text
# ---------------------------------------------------------------------------


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
    numeric = _numeric(section)
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


# Where a long word may be broken.
_WORD_PARTS = re.compile(r".+?[/.,_=:)\]-]+|.+")


def _wrapped(text: str, width: int) -> list[str]:
    """Wraps text at blanks, and words that are too long at their punctuation."""
    lines, line, width = [], "", max(width, 1)
    for word in printable(text).split():
        if line and len(line) + 1 + len(word) <= width:
            line = f"{line} {word}"
            continue
        lines += [line] if line else []
        line = ""
        for part in _WORD_PARTS.findall(word) if len(word) > width else [word]:
            if line and len(line) + len(part) > width:
                lines.append(line)
                line = ""
            line += part
            while len(line) > width:
                lines.append(line[:width])
                line = line[width:]
    return [*lines, line] if line else lines


# ---------------------------------------------------------------------------
# HTML
# ---------------------------------------------------------------------------

# A phone shows this number of columns without scrolling.
_MAX_PHONE_COLUMNS = 3
# The contrast of text and page is at least 4.5 in both schemes (WCAG 2.2, AA).
_STYLE = """
.jaxmp { --ink: #1f2328; --soft: #59636e; --rule: #d1d9e0; --page: #ffffff; --good: #1a7f37;
  --bad: #cf222e; color-scheme: light dark; color: var(--ink); background: var(--page);
  font: 14px/1.45 system-ui, sans-serif; margin: 0 auto; max-width: 82rem; padding: 1.5rem; }
@media (prefers-color-scheme: dark) {
  .jaxmp { --ink: #e6edf3; --soft: #9198a1; --rule: #3d444d; --page: #0d1117; --good: #3fb950;
    --bad: #f85149; }
}
.jaxmp h1 { font-size: 1.5rem; margin: 0 0 .3rem; padding-left: .7rem;
  border-left: 6px solid var(--soft); }
.jaxmp h1.good { border-color: var(--good); } .jaxmp h1.bad { border-color: var(--bad); }
.jaxmp h2 { font-size: 1.05rem; margin: 1.8rem 0 .4rem; }
.jaxmp p { max-width: 60rem; margin: .4rem 0; overflow-wrap: anywhere; }
.jaxmp .wide { overflow-x: auto; }
.jaxmp table { border-collapse: collapse; min-width: min(36rem, 100%); font-size: 1em;
  color: inherit; }
.jaxmp tr { background: none !important; }
.jaxmp th { color: var(--soft); font-weight: 600; white-space: nowrap;
  border-bottom: 2px solid var(--rule); }
.jaxmp th, .jaxmp td { padding: .3rem 1rem .3rem 0; text-align: left; vertical-align: top; }
.jaxmp td { border-bottom: 1px solid var(--rule); min-width: 6rem; max-width: 34rem;
  overflow-wrap: break-word; }
.jaxmp .number { text-align: right; white-space: nowrap; min-width: 0;
  font-variant-numeric: tabular-nums; }
.jaxmp td:first-child, .jaxmp pre { font-family: ui-monospace, monospace; font-size: .93em; }
.jaxmp .fix { margin: .6rem 0; } .jaxmp .fix p { margin: 0 0 .3rem; }
.jaxmp .index { min-width: 0; } .jaxmp .index + td { font-family: ui-monospace, monospace; }
.jaxmp pre { margin: 0 0 .3rem; padding: .4rem .7rem; border: 1px solid var(--rule);
  border-radius: 4px; overflow-x: auto; color: inherit; background: none; }
.jaxmp tr > :last-child { padding-right: 0; }
@media screen and (max-width: 30rem) {
  .jaxmp .stacked :is(table, tbody, tr) { display: block; min-width: 0; }
  .jaxmp .stacked thead { display: none; }
  .jaxmp .stacked tr { border-bottom: 1px solid var(--rule); padding: .4rem 0; }
  .jaxmp .stacked td { display: flex; justify-content: space-between; gap: 1rem; border: 0;
    min-width: 0; max-width: none; padding: .05rem 0; text-align: right; white-space: normal; }
  .jaxmp .stacked td::before { content: attr(data-name); color: var(--soft); text-align: left;
    font-family: system-ui, sans-serif; white-space: nowrap; }
  .jaxmp .stacked td:empty { display: none; }
  .jaxmp .stacked td:first-child { font-weight: 600; }
}
@media print {
  .jaxmp { --ink: #000; --soft: #444; --rule: #bbb; --page: #fff; max-width: none; padding: 0;
    font-size: 8.5pt; }
  .jaxmp .wide { overflow: visible; }
  .jaxmp td { min-width: 0; overflow-wrap: anywhere; }
  .jaxmp td:first-child { overflow-wrap: break-word; }
  .jaxmp tr, .jaxmp h1, .jaxmp h2 { break-inside: avoid; }
  .jaxmp h1, .jaxmp h2 { break-after: avoid; }
}
"""


def html_page(sections: Iterable[Section]) -> str:
    """Returns one HTML page with its style, without scripts or links.

    Notebooks drop the body's own tag, so the style applies to an element inside of it.
    """
    return html_document("Precision audit", html_sections(sections))


def html_document(title: str, body: str, style: str = "") -> str:
    """Returns a page with the style of all reports.

    Args:
      title: the title of the window.
      body: HTML, in which every string of a user is escaped.
      style: more rules for elements within `.jaxmp`.
    """
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title></head>\n"
        f'<body><style>{_STYLE}{style}</style><div class="jaxmp">\n'
        f"{body}\n</div></body></html>\n"
    )


def html_sections(sections: Iterable[Section], stacked: bool = False) -> str:
    """Returns sections as HTML, to be put into `html_document`.

    Args:
      sections: of the report.
      stacked: True to show each row of a wide table as a list of names and values on a phone.
    """
    return "\n".join(_html_section(section, stacked) for section in sections)


def _html_section(section: Section, stacked: bool) -> str:
    severity = "h1" if section.mood else "h2"
    mood = f' class="{section.mood}"' if section.mood else ""
    text = f"<p>{_html(section.text)}</p>" if section.text else ""
    fixes = "".join(map(_html_fix, section.fixes))
    table = _html_table(section, stacked and len(section.columns) > _MAX_PHONE_COLUMNS)
    return f"<{severity}{mood}>{_html(section.title)}</{severity}>{text}{table}{fixes}"


def _html_fix(fix: Fix) -> str:
    parts = [
        f"<pre><code>{html.escape(_printable_lines(text))}</code></pre>"
        if code
        else f"<p>{_html(text)}</p>"
        for code, text in fix.parts
    ]
    return f'<div class="fix"><b>{_html(fix.title)}</b><div>{"".join(parts)}</div></div>'


def _printable_lines(text: str) -> str:
    return "\n".join(map(printable, text.splitlines()))


def _html_table(section: Section, stacked: bool) -> str:
    if not section.rows:
        return ""
    styles = [' class="number"' if numeric else "" for numeric in _numeric(section)]
    styles[0] = ' class="index"' if section.columns[0] == "#" else ""
    names = [f' data-name="{html.escape(printable(name))}"' for name in section.columns]
    cell_styles = [a + b for a, b in zip(styles, names, strict=True)] if stacked else styles
    head = _html_row("th", section.columns, styles)
    rows = "\n".join(_html_row("td", row, cell_styles) for row in section.rows)
    table = f"<table><thead>{head}</thead><tbody>\n{rows}\n</tbody></table>"
    return f'<div class="wide{" stacked" if stacked else ""}">{table}</div>'


def _html_row(tag: str, cells: Iterable[str], styles: list[str]) -> str:
    pairs = zip(cells, styles, strict=True)
    return f"<tr>{''.join(f'<{tag}{style}>{_html(cell)}</{tag}>' for cell, style in pairs)}</tr>"


# Positions besides blanks where a line may break: in module paths, code and long names.
_BREAKS = re.compile(r"(?<!\*\*)/(?=[\w*])|\)(?=\.)|\](?=\[)|(?<=\w{20})_")


def _html(text: str) -> str:
    return _BREAKS.sub(r"\g<0><wbr>", html.escape(printable(text)))


# ---------------------------------------------------------------------------
# Columns
# ---------------------------------------------------------------------------

_NUMBER = re.compile(r"[-+<>]?\d[\d,.]*( ?[kMGTP]?(FLOP|B)|%| [a-z]+)?")


def _numeric(section: Section) -> list[bool]:
    """Returns for each column whether it contains numbers, which are aligned on the right."""
    _, *columns = zip(*section.rows, strict=True)
    filled = [[cell for cell in column if cell] for column in columns]
    return [False, *(bool(cells) and all(map(_NUMBER.fullmatch, cells)) for cells in filled)]
