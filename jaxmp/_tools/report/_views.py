"""The views that all reports have: text, colors of a terminal, an HTML page, and data of JSON."""

from __future__ import annotations

import abc
import dataclasses
import html
import importlib
import importlib.util
import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

from jaxmp import _core
from jaxmp._core import JSONValue  # `from_plain` looks its name up in this module
from jaxmp._tools.report import _section
from jaxmp.errors import JaxmpError

R = TypeVar("R", bound="Report")
# Errors of a text that is not the JSON text of a report.
_INVALID = (ValueError, TypeError, KeyError, AttributeError, RecursionError)


class Report(abc.ABC):
    """Base of the reports, which are frozen dataclasses of plain data.

    A subclass has the method `_sections` and the attributes below.
    """

    # The subject of an error message, as "audit", and the title of the page.
    _subject: ClassVar[str]
    _title: ClassVar[str]
    # The command that writes the JSON text of a report.
    _command: ClassVar[str]
    _error: ClassVar[type[Exception]] = JaxmpError
    # The fields that precede the others in JSON: constants, and names of properties.
    _schema: ClassVar[dict[str, JSONValue]]
    _summary: ClassVar[tuple[str, ...]] = ()

    @abc.abstractmethod
    def _sections(self, full: bool) -> list[_section.Section]:
        """Returns the sections of the short or the full report."""

    def __str__(self) -> str:
        return self.to_text()

    def __rich__(self) -> _core.RichRenderable:
        return self.to_rich()

    def to_text(self, *, full: bool = False, width: int = _section.WIDTH) -> str:
        """Returns the report as plain text, as `print(report)` does.

        Args:
          full: False for the short report; True for everything.
          width: characters per line; only code may be longer.
        """
        return "\n".join(line.text for line in _section.text_lines(self._sections(full), width))

    def to_rich(self, *, full: bool = False) -> _core.RichRenderable:
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
        return html_document(self._title, html_sections(sections))

    def _repr_html_(self) -> str:
        return self.to_html()

    def to_dict(self) -> dict[str, JSONValue]:
        """Returns the report as plain data: the fields of `to_json`."""
        assert dataclasses.is_dataclass(self)
        summary = {name: getattr(self, name) for name in self._summary}
        plain = _core.to_plain(dataclasses.asdict(self))
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
            return cls._parsed(text)
        except _INVALID as error:
            subject = f"{'an' if cls._subject[0] in 'aeiou' else 'a'} {cls._subject}"
            raise cls._error(
                f"{text[:80]!r} is not the JSON text of {subject} ({error}). Write one with:"
                f"\n    pathlib.Path('{cls._subject}.json').write_text(report.to_json())"
            ) from None

    @classmethod
    def _parsed(cls, text: str) -> Self:
        data = json.loads(text)
        for name, value in cls._schema.items():
            if (own := data.pop(name, None)) != value:
                raise ValueError(f"{name} is {own!r}, and must be {value!r}")
        for name in cls._summary:
            data.pop(name, None)
        return _core.from_plain(cls, data)


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
        return cls._parsed(text)
    except (OSError, *_INVALID) as error:
        raise cls._error(
            f"The {cls._subject} {str(source)!r} cannot be read ({error}). Write one with:\n"
            f"    {cls._command}"
        ) from None


def partial_of(path: str | os.PathLike[str]) -> Path:
    """Returns the file that `replace_file` writes first."""
    return Path(f"{os.fspath(path)}.partial-{os.getpid()}")


def replace_file(path: str | os.PathLike[str], content: bytes) -> None:
    """Writes a file, and replaces an earlier one when all is written; an error leaves no part."""
    partial = partial_of(path)
    try:
        partial.write_bytes(content)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


_STYLES = {"good": "bold green", "bad": "bold red", "head": "dim", "code": "bold"}
_STYLES |= dict.fromkeys(("title", "open"), "bold cyan")


class _Renderable:
    """Sections of a report, which rich prints in the width of its console."""

    def __init__(self, sections: list[_section.Section]) -> None:
        self._sections = sections
        if importlib.util.find_spec("rich") is None:
            raise _core.missing_dependency("rich", "colored tables", "cli")

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        text = importlib.import_module("rich.text").Text
        for line in _section.text_lines(self._sections, options.max_width):
            yield text(line.text, style=_STYLES.get(line.role, ""))


# ---------------------------------------------------------------------------
# HTML. Every string of a section may come from a user.
# ---------------------------------------------------------------------------


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
    lines = lambda text: "\n".join(map(_section.printable, text.splitlines()))
    parts = [
        f"<pre><code>{html.escape(lines(text))}</code></pre>" if code else f"<p>{_html(text)}</p>"
        for code, text in fix.parts
    ]
    return f'<div class="fix"><b>{_html(fix.title)}</b><div>{"".join(parts)}</div></div>'


def _html_table(section: _section.Section) -> str:
    if not section.rows:
        return ""
    styles = [' class="number"' if numeric else "" for numeric in _section.numeric_columns(section)]
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
    return _BREAKS.sub(r"\g<0><wbr>", html.escape(_section.printable(text)))
