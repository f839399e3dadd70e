"""Types of arguments and results, for annotations.

The aliases describe what an argument accepts, and the classes what a function returns. Users
construct none of these classes, but read reports from files: `AuditReport.from_json(text)`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from jaxmp._gradients._dynamic_loss_scale import LossScaleLike
from jaxmp._policies._load import RecipeLike
from jaxmp._policies._policy import PolicyLike
from jaxmp.fp8._scaling import ScalingLike

if TYPE_CHECKING:
    from jaxmp._tools.audit._audit import AuditReport
    from jaxmp._tools.audit._explain import Explanation
    from jaxmp._tools.memory import MemoryEstimate
    from jaxmp._tools.nonfinite import NonfiniteReport
    from jaxmp._tools.plan._report import PlanReport
    from jaxmp._tools.stats import StatsReport, TrainingStats
    from jaxmp._tools.validate._parity import ParityReport
    from jaxmp._tools.validate._report import ValidationReport

__all__ = [
    "AuditReport",
    "Explanation",
    "LossScaleLike",
    "MemoryEstimate",
    "NonfiniteReport",
    "ParityReport",
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
    "AuditReport": "jaxmp._tools.audit._audit",
    "Explanation": "jaxmp._tools.audit._explain",
    "MemoryEstimate": "jaxmp._tools.memory",
    "NonfiniteReport": "jaxmp._tools.nonfinite",
    "ParityReport": "jaxmp._tools.validate._parity",
    "PlanReport": "jaxmp._tools.plan._report",
    "StatsReport": "jaxmp._tools.stats",
    "TrainingStats": "jaxmp._tools.stats",
    "ValidationReport": "jaxmp._tools.validate._report",
}


def __getattr__(name: str) -> Any:
    """Imports a class at its first use (PEP 562)."""
    if name not in _LAZY:
        raise AttributeError(f"module 'jaxmp.typing' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return __all__
