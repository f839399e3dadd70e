"""Rendering of sections in the colors of a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from jaxmp._core._messages import missing_dependency
from jaxmp._report._section import Section
from jaxmp._report._text import text_lines

try:
    from rich.console import Console, ConsoleOptions
    from rich.text import Text
except ModuleNotFoundError as error:
    raise missing_dependency("rich", "colored tables", "cli") from error

_STYLES = {
    "title": "bold cyan",
    "good": "bold green",
    "bad": "bold red",
    "open": "bold cyan",
    "head": "dim",
    "code": "bold",
}


class Renderable:
    """Sections of a report, which rich prints in the width of its console."""

    def __init__(self, sections: list[Section]) -> None:
        self.sections = sections

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        for line in text_lines(self.sections, options.max_width):
            yield Text(line.text, style=_STYLES.get(line.role, ""))
