"""Sections as plain text, Markdown and HTML. Every string in them may come from a user."""

from __future__ import annotations

import html
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
            rows = [section.columns, ["---"] * len(section.columns)]
            body = [[_markdown_cell(cell) for cell in row] for row in section.rows]
            parts.append("\n".join(f"| {' | '.join(row)} |" for row in [*rows, *body]))
    return "\n\n".join(parts) + "\n"


def _markdown_cell(text: str) -> str:
    escaped = html.escape(printable(text), quote=False)
    for char in "\\|`*_[]":
        escaped = escaped.replace(char, f"\\{char}")
    return escaped


# ---------------------------------------------------------------------------
# HTML
# ---------------------------------------------------------------------------

_STYLE = """
.jaxmp { font: 14px/1.45 system-ui, sans-serif; color: #1b1f24; background: #fff; margin: 2rem auto;
  max-width: 78rem; padding: 0 1.5rem; }
.jaxmp h1 { font-size: 1.5rem; margin: 0 0 .3rem; padding-left: .7rem;
  border-left: 6px solid #888; }
.jaxmp h1.good { border-color: #1a7f37; } .jaxmp h1.bad { border-color: #cf222e; }
.jaxmp h2 { font-size: 1.05rem; margin: 1.8rem 0 .4rem; }
.jaxmp table { border-collapse: collapse; width: 100%; }
.jaxmp th { text-align: left; color: #57606a; font-weight: 600; border-bottom: 2px solid #d0d7de; }
.jaxmp th, .jaxmp td { padding: .3rem .8rem .3rem 0; vertical-align: top; overflow-wrap: anywhere; }
.jaxmp td { border-bottom: 1px solid #eaeef2; font-variant-numeric: tabular-nums; }
.jaxmp td:first-child { font-family: ui-monospace, monospace; font-size: .93em; min-width: 11rem; }
"""


def html_page(sections: Iterable[Section]) -> str:
    """One page with its style inside: no scripts, no links."""
    body = "\n".join(_html_section(section) for section in sections)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>Precision audit</title><style>{_STYLE}</style></head>\n"
        f'<body class="jaxmp">\n{body}\n</body></html>\n'
    )


def _html_section(section: Section) -> str:
    level = "h1" if section.mood else "h2"
    mood = f' class="{section.mood}"' if section.mood else ""
    text = f"<p>{_html(section.text)}</p>" if section.text else ""
    return f"<{level}{mood}>{_html(section.title)}</{level}>{text}{_html_table(section)}"


def _html_table(section: Section) -> str:
    if not section.rows:
        return ""
    head = "".join(f"<th>{_html(name)}</th>" for name in section.columns)
    rows = "\n".join(
        "<tr>" + "".join(f"<td>{_html(cell)}</td>" for cell in row) + "</tr>"
        for row in section.rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>\n{rows}\n</tbody></table>"


def _html(text: str) -> str:
    return html.escape(printable(text))
