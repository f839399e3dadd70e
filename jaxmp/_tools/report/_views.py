"""The views that all reports have: text, colors of a terminal, an HTML page, and data of JSON."""

from __future__ import annotations

import abc
import dataclasses
import importlib
import importlib.util
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

from jaxmp._core import _messages, _plain, _typing
from jaxmp._core._plain import JSONValue  # `from_plain` looks its name up in this module
from jaxmp._tools.report import _page, _section, _text

R = TypeVar("R", bound="Report")


class Report(abc.ABC):
    """Base of the reports, which are frozen dataclasses of plain data.

    A subclass has the method `_sections` and the attributes below.
    """

    # The subject of an error message, as "audit", and the title of the page.
    _subject: ClassVar[str]
    _title: ClassVar[str]
    # The command that writes the JSON text of a report.
    _command: ClassVar[str]
    _error: ClassVar[type[Exception]]
    # The fields that precede the others in JSON: constants, and names of properties.
    _schema: ClassVar[dict[str, JSONValue]]
    _summary: ClassVar[tuple[str, ...]] = ("ok",)

    @abc.abstractmethod
    def _sections(self, full: bool) -> list[_section.Section]:
        """Returns the sections of the short or the full report."""

    def __str__(self) -> str:
        return _text.plain_text(self._sections(full=False))

    def __rich__(self) -> _typing.RichRenderable:
        return _Renderable(self._sections(full=False))

    def to_text(self, *, full: bool = False, width: int = _text.WIDTH) -> str:
        """Returns the report as plain text, as `print(report)` does.

        Args:
          full: False for the short report; True for everything.
          width: characters per line; only code may be longer.
        """
        return _text.plain_text(self._sections(full), width)

    def to_rich(self, *, full: bool = False) -> _typing.RichRenderable:
        """Returns an object that rich prints in color, in the width of its console.

        Args:
          full: as in `to_text`.

        Raises:
          MissingDependencyError: if rich is not installed.
        """
        return _Renderable(self._sections(full))

    def to_html(self, *, full: bool = False) -> str:
        """Returns the report as an HTML page without scripts or links.

        Args:
          full: as in `to_text`.
        """
        # A page has no command line: it leaves out the section that names its options.
        sections = [each for each in self._sections(full) if each.title != "Details"]
        return _page.html_document(self._title, _page.html_sections(sections))

    def _repr_html_(self) -> str:
        return self.to_html()

    def to_dict(self) -> dict[str, JSONValue]:
        """Returns the report as plain data: the fields of `to_json`."""
        assert dataclasses.is_dataclass(self)
        summary = {name: getattr(self, name) for name in self._summary}
        plain = _plain.to_plain(dataclasses.asdict(self))
        assert isinstance(plain, dict)
        return self._schema | summary | plain

    def to_json(self) -> str:
        """Returns the whole report as JSON text, which `from_json` reads.

        The fields are those of the class after the version of the schema and a summary.
        """
        return json.dumps(self.to_dict(), indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Reads the JSON text that `to_json` returns.

        Args:
          text: the JSON text.

        Raises:
          AuditError, ValidationError, JaxmpError: if the text is not a report of this class, or
            has another schema version.
        """
        try:
            data = json.loads(text)
            schema = {name: data.pop(name, None) for name in cls._schema}
            for name, value in cls._schema.items():
                if schema[name] != value:
                    raise ValueError(f"{name} is {schema[name]!r}, and must be {value!r}")
            for name in cls._summary:
                data.pop(name, None)
            return _plain.from_plain(cls, data)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            subject = f"{'an' if cls._subject[0] in 'aeiou' else 'a'} {cls._subject}"
            raise cls._error(
                f"{text[:80]!r} is not the JSON text of {subject} ({error}). Write one with:"
                f"\n    pathlib.Path('{cls._subject}.json').write_text(report.to_json())"
            ) from None


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during the work on a report.

    Args:
      report: the report on what is finished.
    """

    def __init__(self, report: Report) -> None:
        super().__init__()
        self.report = report


def read_report(cls: type[R], source: R | str | os.PathLike[str]) -> R:
    """Returns a report of a class, given itself, its JSON text, or a path that ends in `.json`.

    Raises:
      AuditError, ValidationError: if it cannot be read.
    """
    if isinstance(source, cls):
        return source
    if isinstance(source, str) and not source.endswith(".json"):
        return cls.from_json(source)
    try:
        text = Path(source).read_text(encoding="utf-8")  # type: ignore[arg-type]
    except (OSError, TypeError, ValueError) as error:
        raise cls._error(
            f"The {cls._subject} {str(source)!r} cannot be read ({error}). Write one with:\n"
            f"    {cls._command}"
        ) from None
    return cls.from_json(text)


_STYLES = {"good": "bold green", "bad": "bold red", "head": "dim", "code": "bold"}
_STYLES |= dict.fromkeys(("title", "open"), "bold cyan")


class _Renderable:
    """Sections of a report, which rich prints in the width of its console."""

    def __init__(self, sections: list[_section.Section]) -> None:
        self._sections = sections
        if importlib.util.find_spec("rich") is None:
            raise _messages.missing_dependency("rich", "colored tables", "cli")

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        text = importlib.import_module("rich.text").Text
        for line in _text.text_lines(self._sections, options.max_width):
            yield text(line.text, style=_STYLES.get(line.role, ""))
