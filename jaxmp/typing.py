"""Types of arguments and results, for annotations.

The aliases describe what an argument accepts, and the classes what a function returns. Users
construct none of these classes, but read reports from files: `AuditReport.from_json(text)`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from jaxmp._loss_scale import LossScaleLike
from jaxmp._policies._policy import PolicyLike
from jaxmp._recipe_files._load import RecipeLike
from jaxmp._recipe_files._scaling_table import ScalingLike

if TYPE_CHECKING:
    from jaxmp._audit import AuditReport
    from jaxmp._explain import Explanation
    from jaxmp._memory import MemoryEstimate
    from jaxmp._nonfinite import NonfiniteReport
    from jaxmp._plan import PlanReport
    from jaxmp._statistics import StatsReport, TrainingStats
    from jaxmp._validate import ValidationReport

__all__ = [
    "AuditReport",
    "Explanation",
    "LossScaleLike",
    "MemoryEstimate",
    "NonfiniteReport",
    "PlanReport",
    "PolicyLike",
    "RecipeLike",
    "ScalingLike",
    "StatsReport",
    "TrainingStats",
    "ValidationReport",
]

# Classes of features that `import jaxmp` does not load.
_LAZY = {
    "AuditReport": "jaxmp._audit",
    "Explanation": "jaxmp._explain",
    "MemoryEstimate": "jaxmp._memory",
    "NonfiniteReport": "jaxmp._nonfinite",
    "PlanReport": "jaxmp._plan",
    "StatsReport": "jaxmp._statistics",
    "TrainingStats": "jaxmp._statistics",
    "ValidationReport": "jaxmp._validate",
}


def __getattr__(name: str) -> Any:
    """Imports a class at its first use (PEP 562)."""
    if name not in _LAZY:
        raise AttributeError(f"module 'jaxmp.typing' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return __all__
