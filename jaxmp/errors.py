"""Exceptions and warnings. All errors are subclasses of `JaxmpError`, which is a `ValueError`."""

from __future__ import annotations

__all__ = [
    "AttentionError",
    "AuditError",
    "AuditFailedError",
    "CheckpointError",
    "CompositionError",
    "JaxmpError",
    "LossScaleError",
    "MasterOverflowError",
    "MissingDependencyError",
    "OpError",
    "PolicyError",
    "RecipeError",
    "RecipeWarning",
    "RuleError",
    "ScaleCollapsedError",
    "SkippedStepsWarning",
    "TargetError",
    "ValidationError",
    "ValidationFailedError",
]

# Characters at the beginning and the end of a message that are printed if it has many more.
_FIRST, _LAST = 300, 1000


class JaxmpError(ValueError):
    """Base class of all errors that jaxmp raises for mistakes of users.

    A message that contains the text of a whole model or tree is shortened in the middle.
    """

    def __init__(self, message: str = "") -> None:
        omitted = len(message) - _FIRST - _LAST
        if omitted > _FIRST and not isinstance(self, (AuditFailedError, ValidationFailedError)):
            message = f"{message[:_FIRST]} ... ({omitted:,} characters) ... {message[-_LAST:]}"
        super().__init__(message)


class PolicyError(JaxmpError):
    """Error for an invalid policy, or an invalid dtype in a policy."""


class RuleError(JaxmpError):
    """Error for an invalid rule, or a required rule without a match."""


class OpError(JaxmpError):
    """Error for an operation or a category that the op table cannot contain."""


class RecipeError(JaxmpError):
    """Error for a recipe file or name that cannot be loaded."""


class LossScaleError(JaxmpError):
    """Error for invalid settings or values of a loss scale."""


class AttentionError(JaxmpError):
    """Error for attention arguments that contradict each other, or are not supported."""


class AuditError(JaxmpError):
    """Error for a program that cannot be audited, or an audit report that cannot be read."""


class TargetError(AuditError):
    """Error for a chip that is unknown, or for which a program cannot be compiled."""


class AuditFailedError(JaxmpError):
    """Error for a program that fails a check of its audit report."""


class CompositionError(JaxmpError):
    """Error for a composition that would silently break training."""


class ScaleCollapsedError(JaxmpError):
    """Error for gradients that still overflow at the minimum loss scale."""


class MasterOverflowError(JaxmpError):
    """Error for a finite FP32 master that the 16-bit dtype of its parameter cannot represent."""


class CheckpointError(JaxmpError):
    """A checkpoint is damaged, differs from the state to restore, or cannot be written."""


class ValidationError(JaxmpError):
    """Error for runs that cannot be compared, or a validation report that cannot be read."""


class ValidationFailedError(JaxmpError):
    """Error for a precision that fails its validation."""


class MissingDependencyError(JaxmpError, ImportError):
    """Error for a missing optional package."""


class SkippedStepsWarning(UserWarning):
    """Warning of consecutive steps with non-finite gradients, or with gradients that are zero."""


class RecipeWarning(UserWarning):
    """Warning of a part of a model, or a device, that does not follow the recipe."""
