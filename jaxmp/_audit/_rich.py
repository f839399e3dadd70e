"""A report in a terminal's colours."""

from __future__ import annotations

from typing import Any

from jaxmp._audit._render import printable
from jaxmp._audit._sections import Section, difference_sections, report_sections
from jaxmp.errors import missing_dependency

try:
    import rich.box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text
except ModuleNotFoundError as error:
    raise missing_dependency("rich", "coloured tables", "cli") from error

_MOODS = {"good": "bold green", "bad": "bold red", "": "bold cyan"}


def renderable(report: Any) -> Group:
    """What `rich.print` shows for an `AuditReport` or an `AuditDiff`."""
    sections = report_sections if hasattr(report, "findings") else difference_sections
    return Group(*(part for section in sections(report) for part in _parts(section)))


def _parts(section: Section) -> list[Any]:
    parts: list[Any] = [_text(section.title, _MOODS[section.mood])]
    parts += [_text(section.text)] if section.text else []
    parts += [_table(section)] if section.rows else []
    return [*parts, Text()]


def _table(section: Section) -> Table:
    table = Table(box=rich.box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for number, column in enumerate(section.columns):
        style = "bold" if number == 0 else ""
        table.add_column(column, overflow="fold", style=style, no_wrap=column == "kind")
    for row in section.rows:
        table.add_row(*map(_text, row))
    return table


def _text(value: str, style: str = "") -> Text:
    """Text without markup."""
    return Text(printable(value), style=style)
