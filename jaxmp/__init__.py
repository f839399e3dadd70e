"""Mixed precision for JAX and Flax: applies dtype policies, keeps training correct, audits it."""

from __future__ import annotations

__version__ = "0.1.0"

import importlib as _importlib
import typing as _typing

from jaxmp import errors, fp8, functional, optim, typing
from jaxmp._core._messages import missing_dependency as _missing_dependency
from jaxmp._loss_scale import DynamicLossScale, NoLossScale, StaticLossScale
from jaxmp._policies._policy import Policy, get_policy
from jaxmp._policies._rules import Rule
from jaxmp._recipe import Recipe, list_recipes, load_recipe
from jaxmp._recipe_files._load import PolicyMap
from jaxmp._sharding import state_shardings
from jaxmp._targets import default_target
from jaxmp.errors import JaxmpError
from jaxmp.optim._find import get_loss_scale, get_master_params
from jaxmp.optim._skipped_steps import check, get_skip_stats

if _typing.TYPE_CHECKING:
    from jaxmp import checkpoint, losses, nnx
    from jaxmp._attention import dot_product_attention
    from jaxmp._attention._layer import attention_fn
    from jaxmp._audit import audit
    from jaxmp._autocast import autocast, full_precision
    from jaxmp._doctor import doctor
    from jaxmp._explain import explain
    from jaxmp._flax._register import register_layer
    from jaxmp._gradients import grad, value_and_grad
    from jaxmp._memory import estimate_memory
    from jaxmp._nonfinite import locate_nonfinite
    from jaxmp._plan import plan
    from jaxmp._statistics import with_stats
    from jaxmp._train_state import TrainState
    from jaxmp._validate import Budget, TrainingRun, validate

__all__ = [
    "Budget",
    "DynamicLossScale",
    "JaxmpError",
    "NoLossScale",
    "Policy",
    "PolicyMap",
    "Recipe",
    "Rule",
    "StaticLossScale",
    "TrainState",
    "TrainingRun",
    "attention_fn",
    "audit",
    "autocast",
    "check",
    "checkpoint",
    "default_target",
    "doctor",
    "dot_product_attention",
    "errors",
    "estimate_memory",
    "explain",
    "fp8",
    "full_precision",
    "functional",
    "get_loss_scale",
    "get_master_params",
    "get_policy",
    "get_skip_stats",
    "grad",
    "list_recipes",
    "load_recipe",
    "locate_nonfinite",
    "losses",
    "nnx",
    "optim",
    "plan",
    "register_layer",
    "state_shardings",
    "typing",
    "validate",
    "value_and_grad",
    "with_stats",
]

# Name -> its module, the package that it loads, the feature for error messages, and the extra
# that installs the package.
_LAZY = {
    "attention_fn": ("jaxmp._attention._layer", "jax", "jaxmp.attention_fn", ""),
    "autocast": ("jaxmp._autocast", "jax", "jaxmp.autocast", ""),
    "dot_product_attention": ("jaxmp._attention", "jax", "jaxmp.dot_product_attention", ""),
    "full_precision": ("jaxmp._autocast", "jax", "jaxmp.full_precision", ""),
    "grad": ("jaxmp._gradients", "jax", "jaxmp.grad", ""),
    "losses": ("jaxmp.losses", "jax", "jaxmp.losses", ""),
    "value_and_grad": ("jaxmp._gradients", "jax", "jaxmp.value_and_grad", ""),
    "audit": ("jaxmp._audit", "jax", "jaxmp.audit", ""),
    "checkpoint": ("jaxmp.checkpoint", "orbax", "checkpoints", "checkpoint"),
    "doctor": ("jaxmp._doctor", "jax", "jaxmp.doctor", ""),
    "estimate_memory": ("jaxmp._memory", "jax", "jaxmp.estimate_memory", ""),
    "explain": ("jaxmp._explain", "jax", "jaxmp.explain", ""),
    "locate_nonfinite": ("jaxmp._nonfinite", "jax", "jaxmp.locate_nonfinite", ""),
    "nnx": ("jaxmp.nnx", "flax", "Flax NNX models", "flax"),
    "plan": ("jaxmp._plan", "jax", "jaxmp.plan", ""),
    "register_layer": ("jaxmp._flax._register", "flax", "jaxmp.register_layer", "flax"),
    "TrainState": ("jaxmp._train_state", "flax", "jaxmp.TrainState", "flax"),
    "Budget": ("jaxmp._validate", "flax", "jaxmp.validate", "flax"),
    "TrainingRun": ("jaxmp._validate", "flax", "jaxmp.validate", "flax"),
    "validate": ("jaxmp._validate", "flax", "jaxmp.validate", "flax"),
    "with_stats": ("jaxmp._statistics", "jax", "jaxmp.with_stats", ""),
}


def __getattr__(name: str) -> _typing.Any:
    """Imports a name at its first use (PEP 562): it loads many modules, or an optional package."""
    if name not in _LAZY:
        raise AttributeError(f"module 'jaxmp' has no attribute {name!r}")
    module_name, package, purpose, extra = _LAZY[name]
    try:
        module = _importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        raise _missing_dependency(package, purpose, extra) from error
    return module if module_name == f"jaxmp.{name}" else getattr(module, name)


def __dir__() -> list[str]:
    return __all__
