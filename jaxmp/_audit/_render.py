"""Sections as plain text, Markdown and HTML. Every string in them may come from a user."""

from __future__ import annotations

import html
import re
import textwrap
from collections.abc import Iterable

from jaxmp._audit._sections import Section

_WIDEST = 60  # characters of a column of plain text


def printable(text: str) -> str:
    """`text` with control characters shown, and not obeyed by a terminal."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


# ---------------------------------------------------------------------------
# Plain text
# ---------------------------------------------------------------------------


def plain_text(sections: Iterable[Section]) -> str:
    """Aligned columns; long cells wrap."""
    parts = []
    for section in sections:
        lines = [printable(section.title)]
        lines += textwrap.wrap(printable(section.text), 100)
        parts.append("\n".join(lines + _text_table(section)))
    return "\n\n".join(parts)


def _text_table(section: Section) -> list[str]:
    if not section.rows:
        return []
    table = [section.columns, *section.rows]
    wrapped = [[textwrap.wrap(printable(cell), _WIDEST) or [""] for cell in row] for row in table]
    widths = [max(len(line) for row in wrapped for line in row[n]) for n in range(len(table[0]))]
    lines = [line for row in wrapped for line in _text_row(row, widths)]
    rule = "  ".join("-" * width for width in widths)
    return [f"  {line}".rstrip() for line in (lines[0], rule, *lines[1:])]


def _text_row(cells: list[list[str]], widths: list[int]) -> list[str]:
    height = max(map(len, cells))
    columns = [
        [*(line.ljust(width) for line in cell), *[" " * width] * (height - len(cell))]
        for cell, width in zip(cells, widths, strict=True)
    ]
    return ["  ".join(parts) for parts in zip(*columns, strict=True)]


# ---------------------------------------------------------------------------
# Markdown
# ---------------------------------------------------------------------------


def markdown(sections: Iterable[Section]) -> str:
    """A heading and a table for each section."""
    parts = []
    for section in sections:
        parts.append(f"## {_markdown_cell(section.title)}")
        if section.text:
            parts.append(_markdown_cell(section.text))
        if section.rows:
            rules = ["---:" if numeric else "---" for numeric in _numeric(section)]
            rows = [map(_markdown_cell, section.columns), rules]
            rows += [map(_markdown_cell, row) for row in section.rows]
            parts.append("\n".join(f"| {' | '.join(row)} |" for row in rows))
    return "\n\n".join(parts) + "\n"


def _markdown_cell(text: str) -> str:
    escaped = html.escape(printable(text), quote=False)
    for char in "\\|`*_[]~":
        escaped = escaped.replace(char, f"\\{char}")
    return escaped


# ---------------------------------------------------------------------------
# HTML
# ---------------------------------------------------------------------------

# Contrast of text to page is 4.5 or more in both schemes (WCAG 2.2, AA).
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
.jaxmp td:first-child { font-family: ui-monospace, monospace; font-size: .93em; }
.jaxmp tr > :last-child { padding-right: 0; }
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
    """One page with its style inside: no scripts, no links."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Precision audit</title><style>{_STYLE}</style></head>\n"
        f'<body class="jaxmp">\n{_html_body(sections)}\n</body></html>\n'
    )


def html_fragment(sections: Iterable[Section]) -> str:
    """The same for a notebook, which drops the body's own tag, and its class with it."""
    return f'<style>{_STYLE}</style>\n<div class="jaxmp">\n{_html_body(sections)}\n</div>\n'


def _html_body(sections: Iterable[Section]) -> str:
    return "\n".join(map(_html_section, sections))


def _html_section(section: Section) -> str:
    level = "h1" if section.mood else "h2"
    mood = f' class="{section.mood}"' if section.mood else ""
    text = f"<p>{_html(section.text)}</p>" if section.text else ""
    return f"<{level}{mood}>{_html(section.title)}</{level}>{text}{_html_table(section)}"


def _html_table(section: Section) -> str:
    if not section.rows:
        return ""
    styles = [' class="number"' if numeric else "" for numeric in _numeric(section)]
    head = _html_row("th", section.columns, styles)
    rows = "\n".join(_html_row("td", row, styles) for row in section.rows)
    table = f"<table><thead>{head}</thead><tbody>\n{rows}\n</tbody></table>"
    return f'<div class="wide">{table}</div>'


def _html_row(tag: str, cells: Iterable[str], styles: list[str]) -> str:
    pairs = zip(cells, styles, strict=True)
    return f"<tr>{''.join(f'<{tag}{style}>{_html(cell)}</{tag}>' for cell, style in pairs)}</tr>"


# Where a line may be broken besides its blanks: in module paths, in code, in long names.
_BREAKS = re.compile(r"(?<!\*\*)/(?=[\w*])|\)(?=\.)|\](?=\[)|(?<=\w{20})_")


def _html(text: str) -> str:
    return _BREAKS.sub(r"\g<0><wbr>", html.escape(printable(text)))


# ---------------------------------------------------------------------------
# Columns
# ---------------------------------------------------------------------------

_NUMBER = re.compile(r"[-+]?\d[\d,.]*( ?[kMGTP]?(FLOP|B)|%)?")


def _numeric(section: Section) -> list[bool]:
    """For each column but the first, whether numbers stand in it, which line up on the right."""
    _, *columns = zip(*section.rows, strict=True)
    filled = [[cell for cell in column if cell] for column in columns]
    return [False, *(bool(cells) and all(map(_NUMBER.fullmatch, cells)) for cells in filled)]
