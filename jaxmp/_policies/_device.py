"""Warns of policies that do not fit the device, or the training around the model."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable

import jax
import numpy as np

from jaxmp import _core
from jaxmp._core import PyTree, _compat
from jaxmp._gradients import _hints
from jaxmp._gradients._hints import expect_scale, traced
from jaxmp._policies._policy import Policy
from jaxmp._policies._required import named_dtypes
from jaxmp._policies._resolve import Policies


def check_training(policies: Policies, inputs: Callable[[], PyTree], mark: _core.Mark) -> None:
    """Warns if the device, or the training around a model, does not fit its policies.

    Called while the model is traced, because the device that is compiled for is known only then. A
    model in float16 must not be differentiated without a loss scale. The function also tells the
    optimizer, in whose loss the model runs, that a recipe was applied.

    Args:
      policies: the policies of the model.
      inputs: returns the parameters and the arguments of the model.
      mark: that of the model.
    """
    _check_device(policies)
    if (loss := traced.get()) is not None and computes_in_16_bits(policies):
        loss.mark.is_applied = True
    if not mark.is_checked and computes_in(policies, _core.FLOAT16):
        expect_scale(inputs(), mark)


def check_inner_gradient(policies: Policies, mark: _core.Mark) -> None:
    """Warns of a float16 function that takes a gradient itself, as `autocast(jax.grad(fn))`."""
    if traced.get() is None and computes_in(policies, _core.FLOAT16):
        _hints.warn_of_gradient(mark, _core.user_line())


def _check_device(policies: Policies) -> None:
    """Warns once of policies in a 16-bit format that the device does not multiply natively."""
    if _compat.target() == "tpu":
        lacks, other = _core.FLOAT16, "bf16"
        device = "TPUs multiply bfloat16 natively, and not float16"
    elif gpu := _core.unsupported_gpu(_core.BFLOAT16_MATMULS):
        lacks, other = _core.BFLOAT16, "fp16"
        device = f"{gpu} has no bfloat16 matmuls: they require compute capability "
        device += f"{_core.capability_text(_core.BFLOAT16_MATMULS)}"
    else:
        return
    if computes_in(policies, lacks):
        _warn_of(lacks.name, device, other + "_params" * (policies.default.param_dtype == lacks))


# Each call of a model asks for it.
@functools.cache
def computes_in(policies: Policies, dtype: np.dtype) -> bool:
    """Returns True if the default policy or a rule has this compute dtype."""
    names = named_dtypes(policies)
    return any(field == "compute_dtype" and each == dtype for _, field, each in names)


# Each call of a model asks for it.
@functools.cache
def computes_in_16_bits(policies: Policies) -> bool:
    """Returns True if the default policy or a rule computes in 16 bits."""
    return any(computes_in(policies, dtype) for dtype in _core.FLOATS_16BIT)


# Warns once of each combination.
@functools.cache
def _warn_of(dtype: str, device: str, recipe: str) -> None:
    _core.warn_user(
        f"The policies compute in {dtype}, but {device}. Use the other 16-bit format: recipe = "
        f"jaxmp.load_recipe({recipe!r}).",
        repeats=True,
    )


_PRECISIONS = {"highest": "highest", "tf32": "tensorfloat32"}


def matmul_precision(policy: Policy, default: str | None) -> str | None:
    """Returns the value of `jax.default_matmul_precision` under a policy.

    Args:
      policy: the policy.
      default: the value for `matmul = "default"` and `"fp8"`.
    """
    return _PRECISIONS.get(policy.matmul, default)


def precision_scope(
    policy: Policy, outer: Policy | None, ambient: str | None
) -> contextlib.AbstractContextManager[None]:
    """Runs a block with the matmul precision of a module.

    Args:
      policy: the policy of the module.
      outer: that of the module which calls it; None if none does. If its precision is equal, the
        block runs unchanged.
      ambient: the value of `jax.default_matmul_precision` outside of the model.
    """
    precision = matmul_precision(policy, ambient)
    is_equal = precision == (matmul_precision(outer, ambient) if outer else ambient)
    return contextlib.nullcontext() if is_equal else jax.default_matmul_precision(precision)
