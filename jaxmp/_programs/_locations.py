"""Locations of equations: module path, pass, and line of the user's code."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from types import CodeType
from typing import Any, NamedTuple

import jax

from jaxmp._programs import _jaxprs

# Packages whose frames do not belong to the user's code.
_LIBRARIES = (
    *("jax", "jaxlib", "flax", "optax", "jaxmp", "chex", "equinox", "haliax", "jaxtyping"),
    *("beartype", "distrax", "einops", "haiku", "rlax", "typer", "click", "blackjax", "diffrax"),
    *("jaxopt", "lineax", "optimistix", "qwix"),
)


# Name scope of `jaxmp.full_precision`, which is not a module.
FULL_PRECISION = "jaxmp_full_precision"

# Frames of JAX are between the user's call and the equations that it makes.
_JAX = os.path.dirname(jax.__file__) + os.sep


class Location(NamedTuple):
    """Location in a program, from the name stacks of an equation and of the enclosing ones."""

    names: _jaxprs.Path = ()
    # "forward", "backward" or "recompute".
    phase: str = _jaxprs.FORWARD
    # True inside of a function that is differentiated.
    differentiated: bool = False

    def inside(self, stack: str) -> Location:
        """Returns the location with a name stack in a jaxpr at this location."""
        names = self.names + _jaxprs.scope_names(stack)
        phase = _jaxprs.phase_of(stack, self.phase)
        return Location(names, phase, self.differentiated or "jvp(" in stack)

    def of(self, equation: _jaxprs.Equation) -> Location:
        """Returns the location of an equation of a jaxpr at this location."""
        return self.inside(str(equation.source_info.name_stack))

    @property
    def is_outside(self) -> bool:
        """True outside of modules and derivatives, as in an optimizer."""
        return not self.names and not self.differentiated


class Locations:
    """Locations of a program's equations, one for each name stack."""

    def __init__(self) -> None:
        self._of_stack = functools.cache(self._make)
        self.names: dict[_jaxprs.Path, None] = {}

    def of(self, equation: _jaxprs.Equation, outer: Location) -> Location:
        """Returns the location of an equation inside an equation at `outer`."""
        return self._of_stack(outer, str(equation.source_info.name_stack))

    def _make(self, outer: Location, stack: str) -> Location:
        location = outer.inside(stack)
        if location.phase == _jaxprs.BACKWARD and location.names not in self.names:
            # In a backward pass, the scopes of a recomputed region appear twice.
            short = outer.names + _jaxprs.collapsed(_jaxprs.scope_names(stack))
            location = location._replace(names=short) if short in self.names else location
        names = location.names
        self.names |= {names[:length]: None for length in range(len(names) + 1)}
        return location


def root_of(names: dict[_jaxprs.Path, None]) -> _jaxprs.Path:
    """Returns the scope that Flax names after the root's class, if there is exactly one."""
    roots = {_jaxprs.without_methods(p[:1]) for p in names if len(p) > 1 and p[0][:1].isupper()}
    return next(iter(roots)) if len(roots) == 1 else ()


def module_of(names: _jaxprs.Path, root: _jaxprs.Path) -> str:
    """Returns the `/`-joined module path below the root."""
    # The scope of a method of the root itself, such as `Net/Net.pool`, is that of the root.
    path = _jaxprs.without_methods(tuple(name for name in names if name != FULL_PRECISION))
    return "/".join(path[len(root) :] if path[: len(root)] == root else path)


# ---------------------------------------------------------------------------
# Lines
# ---------------------------------------------------------------------------


class Lines:
    """Finds the line of the user's code that an equation comes from."""

    def __init__(self) -> None:
        # The frames of all equations are in few files.
        self.is_own = functools.cache(self._is_own)
        self._folders = tuple(_folders())
        self._standard = sysconfig.get_path("stdlib") + os.sep

    def of(self, equations: Iterable[_jaxprs.Equation]) -> tuple[str, int]:
        """Returns (file, line) of the innermost equation with a known line; `("", 0)` without one.

        Args:
          equations: an equation and the enclosing equations, innermost first.
        """
        for equation in equations:
            traceback = equation.source_info.traceback
            if traceback is None:
                continue
            for code, instruction in zip(*traceback.raw_frames(), strict=True):
                if self.is_own(code.co_filename):
                    return code.co_filename, traceback.code_addr2line(code, instruction)
        return "", 0

    def has_own(self, traceback: Any) -> bool:
        """Returns True if a frame of a traceback belongs to the user's code."""
        # The outermost frame mostly does.
        return any(self.is_own(code.co_filename) for code in reversed(traceback.raw_frames()[0]))

    def first_own(self, frames: Iterable[tuple[str, int]]) -> tuple[str, int]:
        """Returns the first (file, line) of the user's code; `("", 0)` if there is none."""
        return next((frame for frame in frames if self.is_own(frame[0])), ("", 0))

    def _is_own(self, file: str) -> bool:
        """Returns True for a file of the user's code."""
        standard = file.startswith(self._standard) and "-packages" + os.sep not in file
        return not (standard or file.startswith((*self._folders, "<frozen ")))


def _folders() -> list[str]:
    modules = (sys.modules.get(name) for name in _LIBRARIES)
    files = (getattr(module, "__file__", None) for module in modules)
    return [os.path.dirname(file) + os.sep for file in files if file]


def call_site(equation: _jaxprs.Equation) -> tuple[CodeType, int] | None:
    """Returns the instruction outside of JAX whose call made an equation; None if it is not known.

    Line and column do not distinguish `x.astype(y.dtype) + y` from `x + y`: both begin at `x`.
    """
    return next(_calls(equation), None)


def call_stack(equation: _jaxprs.Equation) -> tuple[tuple[CodeType, int], ...]:
    """Returns all such calls, the innermost first, which are also those of its gradients."""
    return tuple(_calls(equation))


# Folders and files whose outermost frame calls a module.
_MODULE_CALLS = ("/flax/linen/", "/jaxmp/_flax/_method_call.py")


def model_call(equation: _jaxprs.Equation) -> tuple[tuple[CodeType, int], ...]:
    """Returns the calls that enclose that of the model, whose gradients have the same ones.

    Empty outside of models.
    """
    stack = call_stack(equation)
    for count, (code, _) in enumerate(reversed(stack)):
        file = code.co_filename.replace(os.sep, "/")
        if any(part in file for part in _MODULE_CALLS):
            return stack[len(stack) - count :]
    return ()


def _calls(equation: _jaxprs.Equation) -> Iterator[tuple[CodeType, int]]:
    traceback = equation.source_info.traceback
    frames = () if traceback is None else zip(*traceback.raw_frames(), strict=True)
    return (frame for frame in frames if not frame[0].co_filename.startswith(_JAX))
