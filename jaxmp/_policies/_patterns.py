"""Patterns of module paths and module types."""

from __future__ import annotations

import abc
import functools
import inspect
import re
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Generic, NamedTuple, Protocol, TypeAlias

from jaxmp.errors import RuleError

# The class of a module, its name, or None where it is not known.
ModuleType: TypeAlias = type | str | None
# Names of arguments or methods.
Names = tuple[str, ...]

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


# A model matches each rule with the path of each layer.
@functools.lru_cache(maxsize=4096)
def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Compiles a path pattern to a regular expression that must match a whole path.

    `a` matches only `a`, `a/*` its children, `a/**` itself and everything below, `**/a` every `a`,
    `''` the root and `a:kernel` one parameter; `#` is a number. A regular expression starts with
    `re:`.

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
    regex = "".join(
        _DEEP if segment == "**" else glob_regex(segment) + _END for segment in segments
    )
    return re.compile(regex + (f":{glob_regex(parameter)}" if colon else ""))


_SEGMENT_WILDCARDS = {"*": "[^/:]*", "?": "[^/:]", "#": r"(\d+)"}
# End of a segment, and `**`: any number of segments.
_END = r"(?:/|(?=:)|\Z)"
_DEEP = f"(?:[^/:]+{_END})*"


def glob_regex(segment: str) -> str:
    """Returns the regular expression of one path segment or type name with `*`, `?` and `#`."""
    if segment == "*":
        return "[^/:]+"  # names are not empty
    return "".join(_SEGMENT_WILDCARDS.get(char, re.escape(char)) for char in segment)


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
    return tuple(cls.__name__ for cls in module_type.__mro__ if cls is not object)


# Read for each layer and rule.
@functools.lru_cache(maxsize=4096)
def compile_type_pattern(pattern: str) -> re.Pattern[str]:
    """Compiles a pattern of class names, which may contain `*` and `?`."""
    return re.compile(glob_regex(pattern))


# ---------------------------------------------------------------------------
# Arguments of a module class
# ---------------------------------------------------------------------------


class Arguments(NamedTuple):
    """Arguments of one method, without `self`."""

    positional: tuple[str, ...]
    # Those, and the arguments that can only be passed by name.
    names: tuple[str, ...]
    # True for methods with `**kwargs`.
    has_others: bool


# Base classes whose methods, such as `init` and `apply`, are not called inside a model.
_BASES: tuple[Any, ...] = (object, abc.ABC, Generic, Protocol)
_BASE_MODULES = frozenset(
    {"flax.linen.module", "flax.nnx.module", "flax.nnx.pytreelib", "flax.nnx.object"}
)


# Each module of a class asks for them, and `inspect.signature` is slow. They die with the class.
_methods: weakref.WeakKeyDictionary[type, dict[str, Arguments]] = weakref.WeakKeyDictionary()


def methods_of(cls: type) -> dict[str, Arguments]:
    """Returns name -> arguments for the methods of a module class, without Flax's base classes."""
    if cls in _methods:
        return _methods[cls]
    methods: dict[str, Arguments] = {}
    for base in reversed(cls.__mro__):
        if base in _BASES or base.__module__ in _BASE_MODULES:
            continue
        for name, member in vars(base).items():
            dunder = name.startswith("__") and name != "__call__"
            if dunder or not callable(member) or isinstance(member, (type, staticmethod)):
                continue
            arguments = _arguments(member, base.__module__.partition(".")[0] == "flax")
            if arguments is not None:
                methods[name] = arguments
    _methods[cls] = methods
    return methods


def _arguments(method: Callable[..., Any], is_flax: bool) -> Arguments | None:
    try:
        own, *others = inspect.signature(method).parameters.values()
    except (TypeError, ValueError):  # no signature, or no `self`
        return None
    named = (own.POSITIONAL_ONLY, own.POSITIONAL_OR_KEYWORD)
    if own.kind not in named:
        return None
    return Arguments(
        tuple(p.name for p in others if p.kind in named),
        tuple(p.name for p in others if p.kind in (*named, own.KEYWORD_ONLY)),
        # `**kwargs` of Flax's layers are options, not inputs.
        not is_flax and any(p.kind == own.VAR_KEYWORD for p in others),
    )


def own_inputs(cls: type, names: Names) -> Names:
    """Returns the entries of `keep_inputs` that some method of a module class accepts."""
    methods = methods_of(cls).values()
    accepted = {name for method in methods for name in method.names}
    accepts_any = any(method.has_others for method in methods)
    return tuple(name for name in names if accepts_any or name in accepted)


def kept_inputs(cls: type, method: str, names: Names) -> frozenset[int | str]:
    """Returns the positions and the names of the arguments of a method that are not cast.

    Args:
      cls: the module's class.
      method: the name of the method.
      names: the policy's `keep_inputs`.
    """
    arguments = methods_of(cls).get(method)
    ordered = () if arguments is None else arguments.positional
    positions = (index for index, name in enumerate(ordered) if name in names)
    return frozenset([*positions, *names])
