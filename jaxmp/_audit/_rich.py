"""A report in a terminal's colours."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jaxmp._audit._render import text_lines
from jaxmp._audit._sections import Section
from jaxmp.errors import missing_dependency

try:
    from rich.text import Text
except ModuleNotFoundError as error:
    raise missing_dependency("rich", "coloured tables", "cli") from error

_STYLES = {
    "title": "bold cyan",
    "good": "bold green",
    "bad": "bold red",
    "head": "dim",
    "code": "bold",
}


class Renderable:
    """Sections that rich prints in the width of its console."""

    def __init__(self, sections: list[Section]) -> None:
        self.sections = sections

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Text]:
        for line in text_lines(self.sections, options.max_width):
            yield Text(line.text, style=_STYLES.get(line.role, ""))
