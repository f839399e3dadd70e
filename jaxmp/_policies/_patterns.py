"""Patterns of module paths and module types."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Iterable
from typing import TypeAlias

from jaxmp.errors import RuleError

# The class of a module, its name, or None where it is not known.
ModuleType: TypeAlias = type | str | None

# ---------------------------------------------------------------------------
# Paths
# ---------------------------------------------------------------------------


def path_string(path: str | Iterable[str | int]) -> str:
    """Joins the names of a path by "/"; a string is returned unchanged.

    Example:
      >>> path_string(("block", 0)), path_string("block/0")
      ('block/0', 'block/0')
    """
    return path if isinstance(path, str) else "/".join(map(str, path))


@functools.lru_cache(maxsize=4096)
def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Compiles a path pattern to a regular expression that must match a whole path.

    `a` matches only `a`, `a/*` its children, `a/**` itself and everything below, `**/a` every `a`,
    `''` the root and `a:kernel` one parameter. A regular expression starts with `re:`.

    Raises:
      RuleError: if the pattern is not valid; the message contains valid ones.
    """
    if pattern.startswith("re:"):
        return _compile_regex(pattern)
    module, colon, parameter = pattern.partition(":")
    segments = module.split("/") if module else []
    if colon and (not parameter or ":" in parameter or "/" in parameter):
        raise _pattern_error(pattern, "requires one parameter name after ':'")
    if not all(segments):
        problem = "has an empty path segment (paths have no leading, trailing or double '/')"
        raise _pattern_error(pattern, problem)
    for segment in segments:
        if "**" in segment and segment != "**":
            raise _pattern_error(pattern, f"has '**' inside the segment {segment!r}")
    return re.compile(_module_regex(segments) + (f":{glob_regex(parameter)}" if colon else ""))


_SEGMENT_WILDCARDS = {"*": "[^/:]*", "?": "[^/:]"}


def glob_regex(segment: str) -> str:
    """Returns the regular expression of one path segment or type name with `*` and `?`."""
    if segment == "*":
        return "[^/:]+"  # names are not empty
    return "".join(_SEGMENT_WILDCARDS.get(char, re.escape(char)) for char in segment)


def _module_regex(segments: list[str]) -> str:
    """Returns the regular expression of path segments; `**` matches zero or more segments."""
    if all(segment == "**" for segment in segments):
        return "[^:]*" if segments else ""
    # `pending`: the next segment requires a separator.
    regex, pending = "", False
    for index, segment in enumerate(segments):
        last = index == len(segments) - 1
        if segment != "**":
            regex += ("/" if pending else "") + glob_regex(segment)
            pending = True
        elif last:
            regex += "(?:/[^:]+)?"
        elif pending:
            regex += "(?:/[^:/]+)*"
        elif not regex:
            regex += "(?:[^:/]+/)*"
    return regex


def _compile_regex(pattern: str) -> re.Pattern[str]:
    try:
        with warnings.catch_warnings():
            # Python warns of syntax whose meaning changes in later versions.
            warnings.simplefilter("error")
            return re.compile(pattern[3:])
    except (re.error, OverflowError, RecursionError, Warning) as error:
        raise _pattern_error(pattern, f"is not a valid regular expression ({error})") from None


# Regular-expression syntax in which a colon does not match a colon, or is part of a character set:
# escapes, sets, and groups such as `(?:`.
_REGEX_SYNTAX = re.compile(r"\\[^:]|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?[^:)=!<>]*:")


def names_parameter(pattern: str) -> bool:
    """Returns True if a pattern addresses parameters (`path:name`) instead of modules."""
    if pattern.startswith("re:"):
        return ":" in _REGEX_SYNTAX.sub("", pattern[3:])
    return ":" in pattern


def _pattern_error(pattern: str, problem: str) -> RuleError:
    return RuleError(
        f"Pattern {pattern!r} {problem}; for example 'encoder/*/mlp', '**/head', 'dense:kernel' or "
        "'re:block_[0-3]/.*'."
    )


# ---------------------------------------------------------------------------
# Module types
# ---------------------------------------------------------------------------


def module_type_names(module_type: ModuleType) -> tuple[str, ...]:
    """Returns the class names that a rule may use for a module: its class and the base classes."""
    if module_type is None:
        return ()
    if isinstance(module_type, str):
        return (module_type,)
    return _base_names(module_type)


@functools.lru_cache(maxsize=4096)
def _base_names(module_type: type) -> tuple[str, ...]:
    return tuple(cls.__name__ for cls in module_type.__mro__ if cls is not object)


@functools.lru_cache(maxsize=4096)
def compile_type_pattern(pattern: str) -> re.Pattern[str]:
    """Compiles a pattern of class names, which may contain `*` and `?`."""
    return re.compile(glob_regex(pattern))
