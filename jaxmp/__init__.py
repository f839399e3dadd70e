"""Mixed precision for JAX and Flax: applies dtype policies, keeps training correct, audits it."""

from __future__ import annotations

__version__ = "0.1.0"

import importlib
from typing import TYPE_CHECKING, Any

from jaxmp import _interrupt as _interrupt  # first: see there
from jaxmp import errors as errors
from jaxmp import fp8 as fp8
from jaxmp import functional as functional
from jaxmp import losses as losses
from jaxmp import optim as optim
from jaxmp import sharding as sharding
from jaxmp._attention import AttentionExplanation as AttentionExplanation
from jaxmp._attention import dot_product_attention as dot_product_attention
from jaxmp._attention import explain_attention as explain_attention
from jaxmp._autocast import AutocastDecision as AutocastDecision
from jaxmp._autocast import AutocastExplanation as AutocastExplanation
from jaxmp._autocast import autocast as autocast
from jaxmp._autocast import explain_autocast as explain_autocast
from jaxmp._autocast import full_precision as full_precision
from jaxmp._core._dtypes import canonical_dtype as canonical_dtype
from jaxmp._core._explanation import Explanation as Explanation
from jaxmp._core._trees import all_finite as all_finite
from jaxmp._core._trees import cast_floating as cast_floating
from jaxmp._gradients import LossDtypeWarning as LossDtypeWarning
from jaxmp._gradients import grad as grad
from jaxmp._gradients import value_and_grad as value_and_grad
from jaxmp._loss_scale import DynamicLossScale as DynamicLossScale
from jaxmp._loss_scale import LossScaleLike as LossScaleLike
from jaxmp._loss_scale import NoLossScale as NoLossScale
from jaxmp._loss_scale import StaticLossScale as StaticLossScale
from jaxmp._policies._explanation import PolicyDecision as PolicyDecision
from jaxmp._policies._explanation import PolicyExplanation as PolicyExplanation
from jaxmp._policies._op_table import DEFAULT_OPS as DEFAULT_OPS
from jaxmp._policies._op_table import OpRule as OpRule
from jaxmp._policies._op_table import OpTable as OpTable
from jaxmp._policies._policy import Policy as Policy
from jaxmp._policies._policy import PolicyLike as PolicyLike
from jaxmp._policies._policy import get_policy as get_policy
from jaxmp._policies._resolve import PolicyMap as PolicyMap
from jaxmp._policies._rules import Rule as Rule
from jaxmp._recipe import Recipe as Recipe
from jaxmp._recipe import list_recipes as list_recipes
from jaxmp._recipe import load_recipe as load_recipe
from jaxmp._recipe_files._load import RecipeLike as RecipeLike
from jaxmp.errors import AttentionError as AttentionError
from jaxmp.errors import AuditError as AuditError
from jaxmp.errors import AuditFailedError as AuditFailedError
from jaxmp.errors import CheckpointError as CheckpointError
from jaxmp.errors import CompositionError as CompositionError
from jaxmp.errors import JaxmpError as JaxmpError
from jaxmp.errors import LossScaleError as LossScaleError
from jaxmp.errors import MasterOverflowError as MasterOverflowError
from jaxmp.errors import MissingDependencyError as MissingDependencyError
from jaxmp.errors import OpError as OpError
from jaxmp.errors import PolicyError as PolicyError
from jaxmp.errors import RecipeError as RecipeError
from jaxmp.errors import RecipeWarning as RecipeWarning
from jaxmp.errors import RuleError as RuleError
from jaxmp.errors import ScaleCollapsedError as ScaleCollapsedError
from jaxmp.errors import SkippedStepsWarning as SkippedStepsWarning
from jaxmp.errors import ValidationError as ValidationError
from jaxmp.errors import ValidationFailedError as ValidationFailedError
from jaxmp.fp8._scaling import ScalingLike as ScalingLike
from jaxmp.optim._find import get_loss_scale as get_loss_scale
from jaxmp.optim._find import get_master_params as get_master_params
from jaxmp.optim._skipped_steps import check as check
from jaxmp.optim._skipped_steps import get_skip_stats as get_skip_stats

if TYPE_CHECKING:
    from jaxmp import checkpoint as checkpoint
    from jaxmp import linen as linen
    from jaxmp import nnx as nnx
    from jaxmp import testing as testing
    from jaxmp._audit import AuditDiff as AuditDiff
    from jaxmp._audit import AuditReport as AuditReport
    from jaxmp._audit import Finding as Finding
    from jaxmp._audit import audit as audit
    from jaxmp._train_state import TrainState as TrainState
    from jaxmp._validate import Budget as Budget
    from jaxmp._validate import TrainingRun as TrainingRun
    from jaxmp._validate import ValidationReport as ValidationReport
    from jaxmp._validate import validate as validate

# Name -> its module, the package that it loads, the feature for error messages, and the extra
# that installs the package.
_LAZY = {
    "AuditDiff": ("jaxmp._audit", "jax", "jaxmp.audit", ""),
    "AuditReport": ("jaxmp._audit", "jax", "jaxmp.audit", ""),
    "Finding": ("jaxmp._audit", "jax", "jaxmp.audit", ""),
    "audit": ("jaxmp._audit", "jax", "jaxmp.audit", ""),
    "checkpoint": ("jaxmp.checkpoint", "orbax", "checkpoints", "checkpoint"),
    "linen": ("jaxmp.linen", "flax", "Flax Linen models", "flax"),
    "nnx": ("jaxmp.nnx", "flax", "Flax NNX models", "flax"),
    "testing": ("jaxmp.testing", "flax", "jaxmp.testing", "flax"),
    "TrainState": ("jaxmp._train_state", "flax", "jaxmp.TrainState", "flax"),
    "Budget": ("jaxmp._validate", "flax", "jaxmp.validate", "flax"),
    "TrainingRun": ("jaxmp._validate", "flax", "jaxmp.validate", "flax"),
    "ValidationReport": ("jaxmp._validate", "flax", "jaxmp.validate", "flax"),
    "validate": ("jaxmp._validate", "flax", "jaxmp.validate", "flax"),
}


def __getattr__(name: str) -> Any:
    """Imports a name at its first use (PEP 562): it loads many modules, or an optional package."""
    if name not in _LAZY:
        raise AttributeError(f"module 'jaxmp' has no attribute {name!r}")
    module_name, package, purpose, extra = _LAZY[name]
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        raise errors.missing_dependency(package, purpose, extra) from error
    return module if module_name == f"jaxmp.{name}" else getattr(module, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
