"""Parts of error messages, and warnings at the line of the user's call."""

from __future__ import annotations

import dataclasses
import difflib
import dis
import inspect
import platform
import sys
import warnings
from collections.abc import Iterable
from types import FrameType
from typing import Any, TypeVar

import numpy as np

from jaxmp.errors import MissingDependencyError, RecipeWarning

T = TypeVar("T")


def missing_dependency(package: str, purpose: str, extra: str) -> MissingDependencyError:
    """Creates the error for a missing optional package.

    Args:
      package: name of the package.
      purpose: feature that requires the package, such as "Linen models".
      extra: the extra of jaxmp that installs it.

    Returns:
      The exception to raise.
    """
    text = f"{package} is not installed; jaxmp requires it for {purpose}. "
    if extra == "aot" and sys.version_info < (3, 12):
        own = platform.python_version()
        text += f"Its packages require Python 3.12 or newer, and this is {own}. In another"
        text += " environment, run:"
        return MissingDependencyError(f"{text}\n    {install_command(extra)}")
    return MissingDependencyError(f"{text}Install it with:\n    {install_command(extra)}")


def install_command(extra: str) -> str:
    """Returns the command that installs an extra of the jaxmp that is already installed."""
    return f'pip install "jaxmp[{extra}]"'


def nearest(word: str, options: Iterable[str], count: int = 3) -> list[str]:
    """Returns the options most similar to `word`, best first; empty if none is similar."""
    return difflib.get_close_matches(word, list(options), n=count, cutoff=0.5)


def did_you_mean(word: object, options: Iterable[str]) -> str:
    """Returns the sentence " Did you mean 'x'?" with a leading space; "" if nothing is similar."""
    close = nearest(word, options, count=1) if isinstance(word, str) else []
    return f" Did you mean {close[0]!r}?" if close else ""


# ---------------------------------------------------------------------------
# Warnings
# ---------------------------------------------------------------------------


@dataclasses.dataclass(unsafe_hash=True)
class Mark:
    """Mark of an object of one training. All marks are equal, so that they never cause a retrace.

    Attributes:
      dtype: compute dtype of the optimizer's recipe, if it has 16 bits; otherwise None.
      is_checked: the hint of the object has been considered.
      is_applied: a model or function with a 16-bit recipe ran in the loss of the optimizer.
    """

    dtype: np.dtype | None = dataclasses.field(default=None, compare=False, repr=False)
    is_checked: bool = dataclasses.field(default=False, compare=False, repr=False)
    is_applied: bool = dataclasses.field(default=False, compare=False, repr=False)


def warn_if_dropped(result: T, fix: str) -> T:
    """Returns the result of the caller, and warns if the statement that called it drops this.

    Args:
      result: a new object; the caller modifies nothing.
      fix: the statement that keeps it.
    """
    here: Any = inspect.currentframe()
    name, frame = here.f_back.f_code.co_name, here.f_back.f_back
    if frame is not None and _drops_call(frame, name):
        message = f"The result of {name} is dropped, and nothing else changes. Keep it: {fix}."
        warnings.warn(message, RecipeWarning, stacklevel=3)
    return result


def _drops_call(frame: FrameType, name: str) -> bool:
    """Returns True if a frame calls the function of a name, and its next instruction is a pop."""
    code, following = frame.f_code.co_code, frame.f_lasti + 2
    while code[following] == 0:  # Inline caches of the interpreter.
        following += 2
    if code[following] != dis.opmap["POP_TOP"]:
        return False
    # A function in C, such as `list.extend(map(recipe.wrap, models))`, may keep what it drops.
    before = [each for each in dis.get_instructions(frame.f_code) if each.offset <= frame.f_lasti]
    start = lambda each: each.positions and (each.positions.lineno, each.positions.col_offset)
    return any(each.argval == name and start(each) == start(before[-1]) for each in before)


_LIBRARIES = {"jaxmp", "jax", "flax", "optax", "equinox", "haiku", "contextlib", "functools"}


def _user_frame() -> Any:
    """Returns the innermost call outside of jaxmp, JAX and Flax."""
    frame: Any = inspect.currentframe()
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in _LIBRARIES:
        frame = frame.f_back
    return frame


def user_line() -> tuple[str, int]:
    """Returns file and line of the innermost call outside of jaxmp, JAX and Flax."""
    frame = _user_frame()
    return frame.f_code.co_filename, frame.f_lineno


def warn_user(message: str, *, repeats: bool = False) -> None:
    """Warns at the line of the user's call.

    Args:
      message: the text of a `RecipeWarning`.
      repeats: True to warn each time, because a hint is due once for each training; False to show
        the warning once for each line, as Python's filters do by default.
    """
    frame = _user_frame()
    registry = None if repeats else frame.f_globals.setdefault("__warningregistry__", {})
    place = frame.f_code.co_filename, frame.f_lineno
    warnings.warn_explicit(message, RecipeWarning, *place, registry=registry)
