"""Exception types, and the small helpers that make their messages teach."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class JaxmpError(ValueError):
    """Base of every error that jaxmp raises for a user's mistake."""


class PolicyError(JaxmpError):
    """A policy, or a dtype inside one, cannot be understood."""


class RuleError(JaxmpError):
    """A rule is malformed, or a required rule matched nothing."""

    # The pattern to write instead, where the error is about a pattern.
    fix: str = ""


class OpError(JaxmpError):
    """The table of operations is asked for an operation or a category that it cannot have."""

    # The operation to write instead, where the error is about its name.
    fix: str = ""


class RecipeError(JaxmpError):
    """A recipe file or name cannot be loaded."""


class LossScaleError(JaxmpError):
    """A loss scale was given values it cannot hold."""


class AttentionError(JaxmpError):
    """Arguments of attention do not fit together, or an implementation cannot serve them."""


class AuditError(JaxmpError):
    """A program cannot be audited, or an audit cannot be read."""


class AuditFailedError(JaxmpError):
    """A program does not hold what it should."""


class CompositionError(JaxmpError):
    """Pieces were put together in a way that would break training silently."""


class ScaleCollapsedError(JaxmpError):
    """The loss scale sits at its floor and gradients still overflow."""


class MasterOverflowError(JaxmpError):
    """A finite FP32 master does not fit the 16-bit dtype that its parameter is stored in."""


class CheckpointError(JaxmpError):
    """A checkpoint is damaged, differs from the state to restore, or cannot be written."""


class MissingDependencyError(JaxmpError, ImportError):
    """An optional package is needed and is not installed."""


class SkippedStepsWarning(UserWarning):
    """Several steps in a row were skipped, because their gradients were not finite."""


class RecipeWarning(UserWarning):
    """Part of a model or a device does not do what the recipe asks for."""


def missing_dependency(package: str, purpose: str, extra: str) -> MissingDependencyError:
    """Builds the error for an absent optional package.

    Args:
      package: the name of the package that could not be imported.
      purpose: what jaxmp needs it for, as in "Linen models".
      extra: the extra of jaxmp that installs it.

    Returns:
      The exception to raise.
    """
    return MissingDependencyError(
        f"{package} is not installed; jaxmp needs it for {purpose}. "
        f'Install it with:\n    pip install "jaxmp[{extra}]"'
    )


def nearest(word: str, options: Iterable[str], count: int = 3) -> list[str]:
    """The options most like `word`, best first; empty when none is close."""
    return difflib.get_close_matches(word, list(options), n=count, cutoff=0.5)


def did_you_mean(word: str, options: Iterable[str]) -> str:
    """A sentence " Did you mean 'x'?" with a leading blank, or an empty string."""
    close = nearest(word, options, count=1)
    return f" Did you mean {close[0]!r}?" if close else ""
