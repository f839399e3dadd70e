"""Parts of error messages: spelling suggestions, and packages to install."""

from __future__ import annotations

import difflib
import platform
import sys
from collections.abc import Iterable

from jaxmp.errors import MissingDependencyError


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


def did_you_mean(word: str, options: Iterable[str]) -> str:
    """Returns the sentence " Did you mean 'x'?" with a leading space; "" if nothing is similar."""
    close = nearest(word, options, count=1)
    return f" Did you mean {close[0]!r}?" if close else ""
