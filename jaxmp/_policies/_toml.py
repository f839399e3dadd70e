"""Reads TOML files, locates their keys for error messages, and formats single values."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxmp import _core
from jaxmp.errors import RecipeError

# `("policy", "matmul")`, or `("rules", 0, "path")` for a key of the first [[rules]].
Key = tuple[str | int, ...]
# Line and column, both counted from 1.
Position = tuple[int, int]

# ---------------------------------------------------------------------------
# Reading
# ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Document:
    """Parsed TOML file."""

    # File name for messages, as the user wrote it.
    file: str
    # Parsed content.
    table: dict[str, Any]
    # Source text; "" for a table that was made in Python.
    text: str = ""

    @functools.cached_property
    def positions(self) -> dict[Key, Position]:
        """Positions of the table headers and keys; only errors read them."""
        return _find_positions(self.text)

    def locate(self, *key: str | int) -> str:
        """Describes the location of a key: `'my.toml', line 4, column 1, key 'policy.matmul'`.

        A key without a known position gets that of the nearest table that contains it, or none.
        """
        known = [key[:end] for end in range(len(key), 0, -1) if key[:end] in self.positions]
        positions = (self.positions[each] for each in known[:1])
        position = "".join(f", line {line}, column {column}" for line, column in positions)
        return f"{self.file!r}{position}{_key_label(key)}"


def _key_label(key: Key) -> str:
    names = [str(part) for part in key if isinstance(part, str)]
    if len(key) > 1 and isinstance(key[1], int):
        rule = f", {'phase' if key[0] == 'phases' else 'rule'} {key[1] + 1}"
        return rule + (f", key {'.'.join(names[1:])!r}" if names[1:] else "")
    return f", key {'.'.join(names)!r}" if names else ""


def parse(file: str, text: str) -> Document:
    """Parses the text of a TOML file.

    Args:
      file: its name for messages.
      text: its text.

    Raises:
      RecipeError: if it is not valid TOML; the message contains line and column.
    """
    text = text.replace("\r\n", "\n")
    try:
        return Document(file, tomllib.loads(text), text)
    except tomllib.TOMLDecodeError as error:
        raise _syntax_error(file, text, str(error)) from None
    except RecursionError:
        raise RecipeError(f"{file!r}: arrays or tables are nested too deeply.") from None
    except ValueError as error:  # an integer with more digits than Python converts
        raise RecipeError(f"{file!r}: {error}.") from None


def read_text(file: str, path: Traversable) -> str:
    """Reads the text of a TOML file.

    Args:
      file: its name for messages.
      path: its path; only regular files are read.

    Raises:
      RecipeError: if the file does not exist, or is not UTF-8.
    """
    try:
        data = path.read_bytes() if path.is_file() else None
        problem = f"There is no file {file!r} (current directory: {str(Path.cwd())!r})"
    except (OSError, ValueError) as error:  # ValueError: a NUL or a lone surrogate in the name
        data, problem = None, f"{file!r} cannot be read: {error}"
    if data is None:
        raise RecipeError(
            f"{problem}. Give the path of a readable file or the name of an installed recipe, such "
            "as:\n    load_recipe('bf16')"
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        column = error.start - data.rfind(b"\n", 0, error.start)
        raise RecipeError(
            f"{file!r}, line {line}, column {column}: byte {data[error.start]:#04x} is not UTF-8, "
            "the encoding of TOML files. Save the file as UTF-8."
        ) from None


def _syntax_error(file: str, text: str, problem: str) -> RecipeError:
    match = re.search(r"at line (\d+), column (\d+)", problem)
    lines = text.split("\n")
    line, column = (int(match[1]), int(match[2])) if match else (len(lines), len(lines[-1]) + 1)
    source = lines[line - 1] if line <= len(lines) else ""
    reason = re.sub(r"\s*\(at [^)]*\)", "", problem)
    location = f"{file!r}, line {line}, column {column}: {reason} in {source!r}."
    if reason.startswith(("Cannot overwrite", "Cannot declare")):
        return RecipeError(f"{location} The key or table appears twice; delete one of the two.")
    return RecipeError(
        f"{location} TOML requires quotes around text, and lower case for true and false. For "
        'example:\n    [policy]\n    compute_dtype = "bfloat16"'
    )


# ---------------------------------------------------------------------------
# Positions of keys
# ---------------------------------------------------------------------------


def _find_positions(text: str) -> dict[Key, Position]:
    """Returns the line and column of each table header and of each key at the start of a line.

    A line starts a setting if the text above it is complete, which a value of several lines is not.
    """
    positions: dict[Key, Position] = {}
    lines, start = text.split("\n"), 0
    for end in range(1, len(lines) + 1):
        with contextlib.suppress(tomllib.TOMLDecodeError):
            table = tomllib.loads("\n".join(lines[:end]))
            column = len(lines[start]) - len(lines[start].lstrip(" \t[")) + 1
            positions = {key: (start + 1, column) for key in _keys(table)} | positions
            start = end
    return positions


def _keys(value: object, above: Key = ()) -> Iterator[Key]:
    """Yields the keys of all values in a TOML value, whose own key is `above`."""
    pairs = value.items() if isinstance(value, dict) else ()
    for name, each in enumerate(value) if isinstance(value, list) else pairs:
        yield (*above, name)
        yield from _keys(each, (*above, name))


# ---------------------------------------------------------------------------
# Writing
# ---------------------------------------------------------------------------


def quoted(text: str) -> str:
    """Returns `text` as a TOML string on one line.

    Raises:
      RecipeError: if it contains a lone surrogate, which UTF-8 cannot encode.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RecipeError(
            f"{text!r} contains half of a surrogate pair, which UTF-8 cannot encode. Write:\n"
            f"    {text.encode('utf-8', 'ignore').decode()!r}"
        ) from None
    # JSON's escapes are valid in TOML, but JSON does not escape DEL.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def literal(value: object) -> str:
    """Returns `value` as TOML text; None is `"none"`, as in [loss_scale]."""
    if value is None:
        return '"none"'
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(literal, value))}]"
    if isinstance(value, str):
        return quoted(value)
    return str(value).lower() if isinstance(value, bool) else repr(value)


def describe(value: object) -> str:
    """Returns `value` as TOML text for an error message, which may be any TOML value."""
    try:
        return literal(value)
    except ValueError:  # an integer with more digits than Python prints
        return f"an integer of {value.bit_length() if isinstance(value, int) else 0} bits"


# ---------------------------------------------------------------------------
# Fields
# ---------------------------------------------------------------------------


class Field(NamedTuple):
    """Values that one key allows, and their conversion to a setting."""

    # Allowed values, for error messages.
    allowed: str
    # An allowed value as TOML text.
    example: str
    # Allowed TOML types; of `bool` and `int` only the exact type counts.
    types: tuple[type, ...] = (str,)
    # Allowed strings -> settings; they need not be of the types above.
    names: Mapping[str, Any] = {}
    # Returns True if a value of these types is allowed.
    check: Callable[[Any], bool] = lambda _: True
    # Converts the TOML value. A ValueError, such as a JaxmpError, means that it is not allowed.
    convert: Callable[[Any], Any] | None = None

    def read(self, value: Any) -> Any:
        """Converts a TOML value to a setting.

        Raises:
          ValueError: if the value is not allowed; the message contains the value and the reason.
        """
        if isinstance(value, str) and value in self.names:
            return self.names[value]
        if type(value) not in self.types or not self.check(value):
            hint = _core.did_you_mean(value, self.names)
            raise RecipeError(f"{describe(value)} is not allowed.{hint} Allowed: {self.allowed}.")
        return value if self.convert is None else self.convert(value)


def _between(low: float, high: float) -> Callable[[float], bool]:
    return lambda value: low <= value <= high


def choice(*options: str, example: str = "") -> Field:
    allowed = f"one of {', '.join(map(quoted, options))}"
    names = dict(zip(options, options, strict=True))
    return Field(allowed, quoted(example or options[0]), (), names)


def _dtype_name(name: str) -> str:
    dtype = _core.canonical_dtype(name)
    if _core.bits(dtype) < 16:
        raise RecipeError(
            f"{dtype.name} is too narrow: values overflow without a scale. Use float32, bfloat16 "
            'or float16; matmul = "fp8" makes linear layers multiply in FP8, with scales.'
        )
    return dtype.name


_FP32_MAX = float(np.finfo(np.float32).max)
BOOLEAN = Field("true or false", "true", (bool,))
NUMBER = Field(
    "a number that FP32 can represent",
    "65536.0",
    (int, float),
    check=_between(-_FP32_MAX, _FP32_MAX),
    convert=float,
)
COUNT = Field("an integer", "2000", (int,), check=_between(-(2**31), 2**31 - 1))
NATURAL = COUNT._replace(allowed="a nonnegative integer", check=_between(0, 2**31 - 1))
POSITIVE = COUNT._replace(allowed="a positive integer", check=_between(1, 2**31 - 1))
DTYPE = Field("the name of a dtype of at least 16 bits", '"float32"', convert=_dtype_name)


class Setting(NamedTuple):
    """Value of a key, as TOML or after its conversion, and the location of the key."""

    value: Any
    document: Document
    key: Key = ()

    def below(self, key: str | int) -> Setting:
        """Returns an entry of a table or of a list."""
        return Setting(self.value[key], self.document, (*self.key, key))

    @property
    def location(self) -> str:
        """File, line, column and key, for error messages."""
        return self.document.locate(*self.key)


# ---------------------------------------------------------------------------
# Names and files of the recipes in the package
# ---------------------------------------------------------------------------


# The files do not change while the package is imported.
@functools.lru_cache(maxsize=1)
def shipped() -> dict[str, Traversable]:
    """Returns name -> file of the recipes in the package, or next to it in a source checkout."""
    inside = resources.files("jaxmp") / "policies"
    folder = inside if inside.is_dir() else Path(__file__).parents[2] / "policies"
    return {
        entry.name.removesuffix(".toml"): entry
        for entry in folder.iterdir()
        if entry.name.endswith(".toml")
    }


def recipe_names() -> list[str]:
    """Returns the sorted names of the recipes in the package."""
    return sorted(shipped())
