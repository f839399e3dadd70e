"""Dataclasses as data of JSON, for reports and manifests of checkpoints; and sets of names."""

from __future__ import annotations

import dataclasses
import functools
import math
import typing
from collections.abc import Mapping
from typing import Any, TypeAlias, TypeVar

# Data that `json.dumps` accepts.
JSONValue: TypeAlias = "str | int | float | bool | list[JSONValue] | dict[str, JSONValue] | None"

T = TypeVar("T")


def to_plain(value: object) -> JSONValue:
    """Returns a value of dataclass fields as JSON data; non-finite numbers become strings."""
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [to_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    assert value is None or isinstance(value, (str, int, float, bool)), type(value)
    return value


def from_plain(cls: type[T], data: Mapping[str, Any]) -> T:
    """Returns the dataclass that `to_plain(dataclasses.asdict(...))` was made from.

    Raises:
      TypeError: if a field is missing or unknown.
    """
    hints = _hints(cls)
    return cls(**{name: _restored(value, hints.get(name)) for name, value in data.items()})


# Evaluating annotations takes longer than reading a report.
@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _restored(value: Any, hint: Any) -> Any:
    """Returns the value of a field; its annotation has the class of rows."""
    if isinstance(value, list):
        return tuple(_restored(item, hint) for item in value)
    if isinstance(value, dict):
        types = (hint, *typing.get_args(hint))
        row: Any = next((cls for cls in types if dataclasses.is_dataclass(cls)), None)
        if row is not None:
            return from_plain(row, value)
        return {key: _restored(item, hint) for key, item in value.items()}
    return float(value) if isinstance(value, str) and "float" in str(hint) else value


def named(text: str) -> frozenset[str]:
    """Returns the set of the names in a string, which are separated by blanks."""
    return frozenset(text.split())
