"""Tables, escaped text and files that the commands write."""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import rich.box
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxmp._tools.report import _section, _views
from jaxmp._tools.report._views import Interrupted, Report
from jaxmp.errors import JaxmpError

R = TypeVar("R", bound=Report)

# Command -> keys of its JSON results, and titles of its pages: those of an earlier result.
_KEYS = {
    **{"recipes": "policy summary", "show": "policy rules", "doctor": "machine problems"},
    **{"audit": "findings gemms", "memory": "kinds most", "plan": "baseline choices"},
    **{"validate": "candidates compare_steps", "locate": "operands reproduced"},
    **{"checkpoint show": "leaves steps", "checkpoint verify": "intact leaves"},
}
_TITLES = {
    **{"audit": "Precision audit", "memory": "Memory", "plan": "Plan"},
    **{"validate": "Precision validation", "locate": "First value that is not finite"},
}
# Columns that are never wrapped.
_WHOLE_COLUMNS = ("operation", "recipe", "policy", "loss scale")


def console() -> Console:
    """Returns a console for standard output. It does not color numbers or paths."""
    return Console(highlight=False)


def escape(text: str, style: str = "") -> Text:
    """Returns text without markup, in which control characters are visible."""
    return Text("\n".join(map(_section.printable, text.split("\n"))), style=style)


def make_table(*columns: str) -> Table:
    """Returns an empty table with a header and without borders."""
    table = Table(box=rich.box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column in _WHOLE_COLUMNS)
    return table


def write_json(file: str | None, value: object) -> bool:
    """Writes the JSON result of a command, and returns True if it replaces the printed text.

    Args:
      file: the argument of `--json`: None, a path, or "-" for standard output.
      value: JSON text, or an object of dicts, lists, strings and numbers.
    """
    if file is None:
        return False
    text = value if isinstance(value, str) else json.dumps(value, indent=1)
    if file == "-":
        print(text)
        return True
    write_file(file, text)
    return False


def write_report(report: Report, json: str | None, html: str | None, *, full: bool = False) -> None:
    """Prints a report, and then writes it to the files of `--json` and `--html`."""
    if json != "-":
        # Code is not wrapped, so that it can be pasted.
        console().print(report.to_rich(full=full), soft_wrap=True)
    write_json(json, report.to_json())
    if html is not None:
        write_file(html, report.to_html(full=full))


def write_result(
    make: Callable[[], R], advice: str, json: str | None, html: str | None, *, full: bool = False
) -> R:
    """Writes the report that a function makes, and returns it; after Ctrl-C, ends the command.

    Args:
      make: the function.
      advice: the message after Ctrl-C.
      json, html, full: as in `write_report`.

    Raises:
      Exit: by Ctrl-C, after the report on what is finished is written.
    """
    try:
        report = make()
    except Interrupted as stop:
        write_report(stop.report, json, html, full=full)
        print(advice, file=sys.stderr)
        raise typer.Exit(130) from None
    write_report(report, json, html, full=full)
    return report


def check_outputs(command: str, parameters: Mapping[str, object]) -> None:
    """Checks before the work that the outputs of a command can be written.

    Args:
      command: its name.
      parameters: name -> argument of the command line. Files among them are inputs, also as a part:
        `file.py:function`, or one of several recipes.

    Raises:
      JaxmpError: if an output cannot be written; if it would replace an input, another result, or
        any file but an earlier result.
    """
    passed = ((name, parameters.get(name)) for name in ("json", "html"))
    outputs = {name: str(file) for name, file in passed if file is not None}
    used: dict[str, str] = {}
    inputs = [value for name, value in parameters.items() if name not in outputs]
    lists = (value if isinstance(value, list) else [value] for value in inputs)
    for text in map(str, itertools.chain.from_iterable(lists)):
        for file in (text, *re.split(r"\s*[,:]\s*", text.strip())):
            used |= {os.path.realpath(file): "an input"} if os.path.isfile(file) else {}
    for name, file in outputs.items():
        if (name, file) == ("json", "-"):
            continue
        path = os.path.realpath(file)
        try:
            _try_output(file, path)
        except OSError as error:
            reader = " Start the reader of the FIFO first." if error.errno == errno.ENXIO else ""
            raise JaxmpError(
                f"{file!r} cannot be written: {error.strerror}.{reader} Name a file in a directory"
                " that exists, and that this user may write to."
            ) from None
        if path in used:
            raise JaxmpError(
                f"--{name} {file!r} is {used[path]} of this command. "
                f"Write another file: --{name} result.{name}"
            )
        used[path] = f"the --{name}"
        if os.path.isfile(path) and not _is_earlier(command, name, path):
            raise JaxmpError(
                f"--{name} {file!r} exists, and is not an earlier result of jaxmp {command}. "
                f"Remove it, or write another file: --{name} result.{name}"
            )


# Devices and FIFOs among the outputs -> their descriptors. An open FIFO keeps its reader.
_opened: dict[str, int] = {}


def _try_output(file: str, path: str) -> None:
    """Raises an OSError if a file cannot be written, as one whose name is too long.

    Args:
      file: the argument of `--json` or `--html`.
      path: the same without symbolic links, except for links to themselves.
    """
    if file in ("", "-"):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    if os.path.exists(file) or os.path.islink(path):
        descriptor = os.open(file, os.O_WRONLY | os.O_NONBLOCK)
        if not os.path.isfile(file):
            _opened[file] = descriptor
            return
        os.close(descriptor)
    _views.partial_of(path).touch()
    _views.partial_of(path).unlink()


def _is_earlier(command: str, kind: str, path: str) -> bool:
    """Returns True for an earlier result of a command, and for an empty file that is no module.

    Args:
      command: its name.
      kind: "json" or "html".
      path: the file.
    """
    try:
        text = Path(path).read_text("utf-8")
        if not text:
            return not path.endswith(".py")  # such as __init__.py
        if kind == "html":
            is_page = text.startswith("<!doctype html>") and 'class="jaxmp"' in text
            return is_page and f"<title>{_TITLES[command]}</title>" in text
        rows = json.loads(text)
        first = rows[0] if command == "recipes" else rows
        return isinstance(first, dict) and set(_KEYS[command].split()) <= first.keys()
    except (OSError, ValueError, TypeError, LookupError, RecursionError):
        return False


def write_file(file: str, text: str) -> None:
    """Writes a checked output; a regular file is replaced atomically, through symbolic links.

    Raises:
      JaxmpError: if it cannot be written; an old file is then unchanged.
    """
    try:
        descriptor = _opened.pop(file, None)
        if descriptor is None:
            _views.replace_file(os.path.realpath(file), text.encode())
            return
        os.set_blocking(descriptor, True)
        with open(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
    except OSError as error:
        raise JaxmpError(f"{file!r} cannot be written: {error.strerror}.") from None
