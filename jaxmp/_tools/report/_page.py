"""Sections as an HTML page. Every string in them may come from a user."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable

from jaxmp._tools.report import _section, _text

# The contrast of text and page is at least 4.5 in both schemes (WCAG 2.2, AA).
_STYLE = """
.jaxmp { --ink: #1f2328; --soft: #59636e; --rule: #d1d9e0; --page: #ffffff; --good: #1a7f37;
  --bad: #cf222e; color-scheme: light dark; color: var(--ink); background: var(--page);
  font: 14px/1.45 system-ui, sans-serif; margin: 0 auto; max-width: 82rem; padding: 1.5rem; }
body:has(> .jaxmp) { margin: 0; color-scheme: light dark; background: light-dark(#fff, #0d1117); }
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
@media (max-width: 30rem) { .jaxmp td:last-child:not(.number) { min-width: 14rem; } }
"""


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
