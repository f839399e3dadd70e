"""Arguments that a module does not cast, by the names and positions in `keep_inputs`."""

from __future__ import annotations

import abc
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, Generic, NamedTuple, Protocol

Names = tuple[str | int, ...]

# ---------------------------------------------------------------------------
# Values of `keep_inputs`
# ---------------------------------------------------------------------------


def canonical_inputs(value: Any) -> Names:
    """Parses a value of `keep_inputs` to a tuple of argument names and positions.

    Args:
      value: a list, tuple or set of argument names and positions, or their form in a policy string:
        `"t+positions"`, `"1"`, `"none"`.

    Returns:
      Names and positions without duplicates; those of a set are sorted.

    Raises:
      ValueError: if an entry is neither a name nor a position.

    Example:
      >>> canonical_inputs(["t", 2]), canonical_inputs("t+2"), canonical_inputs("none")
      (('t', 2), ('t', 2), ())
    """
    if isinstance(value, str):
        parts = [] if value.strip() == "none" else value.split("+")
        value = [_parsed(part.strip()) for part in parts]
    if not isinstance(value, (list, tuple, set, frozenset)):
        raise ValueError("it must be a list of argument names and positions")
    for entry in value:
        _check(entry)
    ordered = value if isinstance(value, (list, tuple)) else sorted(value, key=str)
    return tuple(dict.fromkeys(ordered))


def _parsed(part: str) -> str | int:
    return int(part) if part.lstrip("-").isdecimal() else part


def _check(entry: object) -> None:
    if type(entry) is int:
        if entry < 0:
            raise ValueError(f"position {entry} is negative; positions count from 0, after self")
    elif not isinstance(entry, str):
        raise ValueError(f"{entry!r} is neither an argument name nor a position")
    elif not entry.isidentifier():
        raise ValueError(f"{entry!r} is not the name of an argument")


def inputs_text(names: Iterable[str | int]) -> str:
    """Formats names and positions as in a policy string; the inverse of `canonical_inputs`.

    Example:
      >>> inputs_text(("t", 2)), inputs_text(())
      ('t+2', 'none')
    """
    return "+".join(map(str, names)) or "none"


# ---------------------------------------------------------------------------
# Arguments of a module class
# ---------------------------------------------------------------------------


class Arguments(NamedTuple):
    """Arguments of one method, without `self`."""

    positional: tuple[str, ...]
    keyword_only: tuple[str, ...]
    # True for methods with `*args` and `**kwargs`, respectively.
    more_positions: bool
    more_names: bool


# Base classes whose methods, such as `init` and `apply`, are not called inside a model.
_BASES: tuple[Any, ...] = (object, abc.ABC, Generic, Protocol)
_BASE_MODULES = frozenset(
    {"flax.linen.module", "flax.nnx.module", "flax.nnx.pytreelib", "flax.nnx.object"}
)


@functools.cache
def methods_of(cls: type) -> dict[str, Arguments]:
    """Returns name -> arguments for the methods of a module class, without Flax's base classes."""
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
    return methods


def _arguments(method: Callable[..., Any], is_flax: bool) -> Arguments | None:
    try:
        parameters = list(inspect.signature(method).parameters.values())
    except (TypeError, ValueError):
        return None
    kinds = [parameter.kind for parameter in parameters]
    named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if not parameters or kinds[0] not in named:
        return None
    return Arguments(
        tuple(p.name for p in parameters[1:] if p.kind in named),
        tuple(p.name for p in parameters if p.kind == inspect.Parameter.KEYWORD_ONLY),
        # `*args` and `**kwargs` of Flax's layers are options, not inputs.
        inspect.Parameter.VAR_POSITIONAL in kinds and not is_flax,
        inspect.Parameter.VAR_KEYWORD in kinds and not is_flax,
    )


@functools.cache
def own_inputs(cls: type, names: Names) -> Names:
    """Returns the entries of `keep_inputs` that some method of a module class accepts."""
    methods = methods_of(cls).values()
    accepted: set[str | int] = set()
    for method in methods:
        accepted.update(method.positional, method.keyword_only, range(len(method.positional)))
    any_position = any(method.more_positions for method in methods)
    any_name = any(method.more_names for method in methods)
    return tuple(
        name
        for name in names
        if name in accepted or (any_position if isinstance(name, int) else any_name)
    )


class Kept(NamedTuple):
    """Arguments of one method that are not cast."""

    positions: frozenset[int] = frozenset()
    names: frozenset[str] = frozenset()


NOTHING_KEPT = Kept()


@functools.cache
def kept_inputs(cls: type, method: str, names: Names) -> Kept:
    """Returns the arguments of a method that are not cast.

    An argument that `keep_inputs` lists by name is not cast if it is passed by position either, and
    vice versa.

    Args:
      cls: the module's class.
      method: the name of the method.
      names: the policy's `keep_inputs`.
    """
    arguments = methods_of(cls).get(method)
    ordered = () if arguments is None else arguments.positional
    positions = {index for index, name in enumerate(ordered) if name in names}
    positions |= {name for name in names if isinstance(name, int)}
    by_position = {ordered[index] for index in positions if index < len(ordered)}
    return Kept(
        frozenset(positions), frozenset(n for n in names if isinstance(n, str)) | by_position
    )
