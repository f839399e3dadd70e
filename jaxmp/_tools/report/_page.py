"""Sections as an HTML page. Every string in them may come from a user."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from pathlib import Path

from jaxmp._tools.report import _section, _text


def html_document(title: str, body: str, *styles: str) -> str:
    """Returns a page with the style of all reports, in page.css.

    The contrast of text and page is at least 4.5 in both schemes (WCAG 2.2, AA).

    Args:
      title: the title of the window.
      body: HTML, in which every string of a user is escaped.
      *styles: names of further files beside this one, such as "charts".
    """
    files = [Path(__file__).with_name(f"{name}.css") for name in ("page", *styles)]
    rules = "".join("\n" + file.read_text("utf-8") for file in files)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title></head>\n"
        f'<body><style>{rules}</style><div class="jaxmp">\n'
        f"{body}\n</div></body></html>\n"
    )


def html_sections(sections: Iterable[_section.Section]) -> str:
    """Returns sections as HTML, to be put into `html_document`."""
    return "\n".join(map(_html_section, sections))


def _html_section(section: _section.Section) -> str:
    severity = "h1" if section.mood else "h2"
    mood = f' class="{section.mood}"' if section.mood else ""
    text = f"<p>{_html(section.text)}</p>" if section.text else ""
    fixes = "".join(map(_html_fix, section.fixes))
    table = _html_table(section)
    return f"<{severity}{mood}>{_html(section.title)}</{severity}>{text}{table}{fixes}"


def _html_fix(fix: _section.Fix) -> str:
    lines = lambda text: "\n".join(map(_text.printable, text.splitlines()))
    parts = [
        f"<pre><code>{html.escape(lines(text))}</code></pre>" if code else f"<p>{_html(text)}</p>"
        for code, text in fix.parts
    ]
    return f'<div class="fix"><b>{_html(fix.title)}</b><div>{"".join(parts)}</div></div>'


def _html_table(section: _section.Section) -> str:
    if not section.rows:
        return ""
    styles = [' class="number"' if numeric else "" for numeric in _text.numeric_columns(section)]
    styles[0] = ' class="index"' if section.columns[0] == "#" else ""
    head = _html_row("th", section.columns, styles)
    rows = "\n".join(_html_row("td", row, styles) for row in section.rows)
    body = f"<thead>{head}</thead><tbody>\n{rows}\n</tbody>"
    return f'<div class="wide"><table>{body}</table></div>'


def _html_row(tag: str, cells: Iterable[str], styles: list[str]) -> str:
    pairs = zip(cells, styles, strict=True)
    return f"<tr>{''.join(f'<{tag}{style}>{_html(cell)}</{tag}>' for cell, style in pairs)}</tr>"


# Positions besides blanks where a line may break: in module paths, code and long names.
_BREAKS = re.compile(r"(?<!\*\*)/(?=[\w*])|\)(?=\.)|\](?=\[)|(?<=\w{20})_")


def _html(text: str) -> str:
    return _BREAKS.sub(r"\g<0><wbr>", html.escape(_text.printable(text)))
