"""Types of the sections of a report, helpers to fill them, and numbers with units."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from typing import NamedTuple, TypeVar

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


# ---------------------------------------------------------------------------
# Numbers with units
# ---------------------------------------------------------------------------


def counted(count: int, noun: str) -> str:
    """Returns a count with its noun, such as `1 cast` and `2 launches`."""
    plural = "es" if noun.endswith("ch") else "s"
    return f"{count:,} {noun}{plural * (count != 1)}"


def flops_text(flops: float) -> str:
    """Returns FLOPs with a unit, such as `1.5 GFLOP`."""
    return f"{_scaled(flops)}FLOP"


def bytes_text(count: float) -> str:
    """Returns bytes with a unit, such as `1.5 MB`; a megabyte is 10**6 bytes."""
    return f"{_scaled(count)}B"


def share_text(part: float, whole: float = 1) -> str:
    """Returns a share such as `12.5%`; `""` of nothing.

    Only exact values are `0.0%` and `100.0%`.
    """
    if not whole:
        return ""
    share = part / whole
    if 0 < share < 0.0005:
        return "<0.1%"
    if 0.9995 <= share < 1:
        return ">99.9%"
    return f"{share:.1%}"


def module_text(module: str) -> str:
    """Returns a module path; `(root)` for the empty one."""
    return module or "(root)"


def _scaled(value: float) -> str:
    for prefix in ("", "k", "M", "G", "T", "P"):
        if value < 1000 or prefix == "P":
            break
        value /= 1000
    return f"{value:.3g} {prefix}"
