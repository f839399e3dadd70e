"""Mixed precision for JAX and Flax: applies dtype policies, keeps training correct, audits it."""

from __future__ import annotations

__version__ = "0.1.0"

import importlib as _importlib
import sys as _sys
import typing as _typing

try:
    _importlib.import_module("jax")
except ValueError as _error:
    # JAX refuses the value of an environment variable. A command ends with one line.
    if _sys.argv[0].rpartition("/")[2] not in ("-m", "jaxmp"):
        raise
    print(f"jaxmp: JAX: {_error}. Correct the variable, or unset it.", file=_sys.stderr)
    _sys.exit(2)

from jaxmp import errors, fp8, functional, optim, typing
from jaxmp._core import default_target
from jaxmp._core import missing_dependency as _missing_dependency
from jaxmp._gradients._dynamic_loss_scale import DynamicLossScale
from jaxmp._gradients._loss_scale import NoLossScale, StaticLossScale
from jaxmp._policies._load import PolicyMap
from jaxmp._policies._policy import Policy, get_policy
from jaxmp._policies._recipe import Recipe, list_recipes, load_recipe
from jaxmp._policies._rules import Rule
from jaxmp.errors import JaxmpError
from jaxmp.optim._find import get_loss_scale, get_master_params
from jaxmp.optim._shardings import state_shardings
from jaxmp.optim._skipped_steps import check, get_skip_stats

if _typing.TYPE_CHECKING:
    from jaxmp import checkpoint, losses, nnx
    from jaxmp._attention import dot_product_attention
    from jaxmp._attention._layer import attention_fn
    from jaxmp._autocast import autocast, full_precision
    from jaxmp._flax._register import register_layer
    from jaxmp._flax._train_state import TrainState
    from jaxmp._gradients._value_and_grad import grad, value_and_grad
    from jaxmp._tools.audit._audit import audit
    from jaxmp._tools.audit._explain import explain
    from jaxmp._tools.memory import estimate_memory
    from jaxmp._tools.nonfinite import locate_nonfinite
    from jaxmp._tools.plan import plan
    from jaxmp._tools.plan._doctor import doctor
    from jaxmp._tools.stats import with_stats
    from jaxmp._tools.validate._budget import Budget
    from jaxmp._tools.validate._parity import assert_parity, parity
    from jaxmp._tools.validate._run import TrainingRun
    from jaxmp._tools.validate._validate import validate

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
    "assert_parity",
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
    "parity",
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
    "grad": ("jaxmp._gradients._value_and_grad", "jax", "jaxmp.grad", ""),
    "losses": ("jaxmp.losses", "jax", "jaxmp.losses", ""),
    "value_and_grad": ("jaxmp._gradients._value_and_grad", "jax", "jaxmp.value_and_grad", ""),
    "audit": ("jaxmp._tools.audit._audit", "jax", "jaxmp.audit", ""),
    "checkpoint": ("jaxmp.checkpoint", "orbax", "checkpoints", "checkpoint"),
    "doctor": ("jaxmp._tools.plan._doctor", "jax", "jaxmp.doctor", ""),
    "estimate_memory": ("jaxmp._tools.memory", "jax", "jaxmp.estimate_memory", ""),
    "explain": ("jaxmp._tools.audit._explain", "jax", "jaxmp.explain", ""),
    "locate_nonfinite": ("jaxmp._tools.nonfinite", "jax", "jaxmp.locate_nonfinite", ""),
    "nnx": ("jaxmp.nnx", "flax", "Flax NNX models", "flax"),
    "assert_parity": ("jaxmp._tools.validate._parity", "jax", "jaxmp.assert_parity", ""),
    "parity": ("jaxmp._tools.validate._parity", "jax", "jaxmp.parity", ""),
    "plan": ("jaxmp._tools.plan", "jax", "jaxmp.plan", ""),
    "register_layer": ("jaxmp._flax._register", "flax", "jaxmp.register_layer", "flax"),
    "TrainState": ("jaxmp._flax._train_state", "flax", "jaxmp.TrainState", "flax"),
    "Budget": ("jaxmp._tools.validate._budget", "flax", "jaxmp.validate", "flax"),
    "TrainingRun": ("jaxmp._tools.validate._run", "flax", "jaxmp.validate", "flax"),
    "validate": ("jaxmp._tools.validate._validate", "flax", "jaxmp.validate", "flax"),
    "with_stats": ("jaxmp._tools.stats", "jax", "jaxmp.with_stats", ""),
}


def __getattr__(name: str) -> _typing.Any:
    """Imports a name at its first use (PEP 562): it loads many modules, or an optional package."""
    if name not in _LAZY:
        # The commands `locate` and `memory` have longer names in Python.
        similar = [f" Use jaxmp.{each}." for each in _LAZY if f"_{name}" in f"_{each}"]
        raise AttributeError(f"module 'jaxmp' has no attribute {name!r}.{''.join(similar)}")
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
