"""Where an equation comes from: module path, pass, and the user's own line."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax

from jaxmp._core._jaxprs import BACKWARD, FORWARD, Path, collapsed, phase_of, scope_names

# Packages whose frames are not the user's own.
_LIBRARIES = (
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "jaxmp",
    "chex",
    "equinox",
    "haliax",
    "jaxtyping",
    "typer",
    "click",
)


# The scope that `jaxmp.full_precision` leaves; no module.
FULL_PRECISION = "jaxmp_full_precision"

_JAX = os.path.dirname(jax.__file__) + os.sep


class Location(NamedTuple):
    """What an equation's name stack says, with those of the equations around it."""

    names: Path = ()
    phase: str = FORWARD
    # Whether it is part of a function that is differentiated.
    differentiated: bool = False

    @property
    def is_outside(self) -> bool:
        """Whether, beside a backward pass, this is the optimizer's: no module, no derivative."""
        return not self.names and not self.differentiated


class Locations:
    """The locations of a program's equations; made once for each name stack."""

    def __init__(self) -> None:
        self._found: dict[tuple[Location, str], Location] = {}
        self.names: dict[Path, None] = {}

    def of(self, equation: Any, outer: Location) -> Location:
        """The location of an equation inside an equation at `outer`."""
        key = outer, str(equation.source_info.name_stack)
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = self._make(*key)
            for length in range(len(found.names) + 1):
                self.names[found.names[:length]] = None
        return found

    def _make(self, outer: Location, stack: str) -> Location:
        phase = phase_of(stack, outer.phase)
        own = scope_names(stack)
        names = outer.names + own
        if phase == BACKWARD and names not in self.names:
            # Backwards, scopes around a rematerialised region are named twice.
            short = outer.names + collapsed(own)
            names = short if short in self.names else names
        return Location(names, phase, outer.differentiated or "jvp(" in stack)


def root_of(names: dict[Path, None]) -> Path:
    """The scope that Flax names after the root's class, if there is exactly one such."""
    roots = {path[:1] for path in names if len(path) > 1 and path[0][:1].isupper()}
    return next(iter(roots)) if len(roots) == 1 else ()


def module_of(names: Path, root: Path) -> str:
    """The `/`-joined module path below the root."""
    below = names[len(root) :] if root and names[: len(root)] == root else names
    return "/".join(name.partition(".")[0] for name in below if name != FULL_PRECISION)


# ---------------------------------------------------------------------------
# Lines
# ---------------------------------------------------------------------------


class Lines:
    """Finds the user's own line of an equation."""

    def __init__(self) -> None:
        self._own: dict[str, bool] = {}
        self._folders = tuple(_folders())
        self._standard = sysconfig.get_path("stdlib") + os.sep

    def of(self, equations: Any) -> tuple[str, int]:
        """`(file, line)`, from the innermost equation outwards; `("", 0)` if there is none.

        Args:
          equations: an equation, and those around it, the innermost first.
        """
        for equation in equations:
            traceback = equation.source_info.traceback
            frames = () if traceback is None else traceback.frames
            found = self.first_own((frame.file_name, frame.line_num) for frame in frames)
            if found[0]:
                return found
        return "", 0

    def first_own(self, frames: Iterable[tuple[str, int]]) -> tuple[str, int]:
        """The first `(file, line)` that is the user's own; `("", 0)` if there is none."""
        for file, line in frames:
            if self.is_own(file):
                return file, line
        return "", 0

    def is_own(self, file: str) -> bool:
        """Returns True for a file of the user's."""
        found = self._own.get(file)
        if found is None:
            standard = file.startswith(self._standard) and "-packages" + os.sep not in file
            library = standard or file.startswith((*self._folders, "<frozen "))
            found = self._own[file] = not library
        return found


def _folders() -> list[str]:
    modules = (sys.modules.get(name) for name in _LIBRARIES)
    files = (getattr(module, "__file__", None) for module in modules)
    return [os.path.dirname(file) + os.sep for file in files if file]


def call_site(equation: Any) -> tuple[Any, int] | None:
    """The instruction, outside of JAX, whose call made an equation; None if it is not known.

    A line and column do not tell `x.astype(y.dtype) + y` from `x + y`: both begin where `x` does.
    """
    traceback = equation.source_info.traceback
    if traceback is None:
        return None
    codes, instructions = traceback.raw_frames()
    for code, instruction in zip(codes, instructions, strict=True):
        if not code.co_filename.startswith(_JAX):
            return code, instruction
    return None
