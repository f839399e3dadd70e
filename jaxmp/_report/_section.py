"""Types of the sections of a report, and helpers to fill them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from typing import NamedTuple, TypeVar

from jaxmp._report._units import module_text

Row = TypeVar("Row")
Key = TypeVar("Key", bound=Hashable)

PHASES = ("forward", "backward", "recompute")
# Rows of a table of modules or lines.
MAX_ROWS = 40


class Fix(NamedTuple):
    """The remedy of one or more rows of a table of findings."""

    title: str
    # (is code, text). Sentences and code alternate; code keeps its lines.
    parts: tuple[tuple[bool, str], ...]


class Section(NamedTuple):
    """A title, a sentence, a table and remedies."""

    title: str
    text: str = ""
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    fixes: tuple[Fix, ...] = ()
    # "good", "bad" or "open" for a verdict.
    mood: str = ""


def nonempty(sections: list[Section]) -> list[Section]:
    """Returns the sections that contain anything besides a title."""
    return [section for section in sections if section.text or section.rows or section.fixes]


def grouped(rows: Iterable[Row], key: Callable[[Row], Key]) -> dict[Key, list[Row]]:
    """Returns the rows by a key, in their order."""
    groups: dict[Key, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def numberless(module: str) -> str:
    """Returns a module path with `*` in place of numbers, such as `block_*/mlp`."""
    return re.sub(r"\d+", "*", module)


def abbreviate(modules: list[str]) -> str:
    """Joins module paths: `block_*/mlp (3 modules)`, or `a, b and 4 more`."""
    if len(modules) == 1:
        return module_text(modules[0])
    groups = Counter(map(numberless, modules))
    names = [f"{name} ({n} modules)" if n > 1 else module_text(name) for name, n in groups.items()]
    shown, more = names[:2], len(names) - 2
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "")


def pair_text(lhs: str, rhs: str) -> str:
    """Returns one dtype for two equal ones, otherwise `bfloat16 x float32`."""
    return lhs if lhs == rhs else f"{lhs} x {rhs}"


def left_out_text(rows: list[tuple[str, ...]], field: str) -> str:
    """Returns a sentence about the rows that a table leaves out; `""` if there are none.

    Args:
      rows: all rows.
      field: the field of the report that has all of them.
    """
    more = len(rows) - MAX_ROWS
    return f"The {MAX_ROWS} largest; report.{field} has {more} more." if more > 0 else ""
