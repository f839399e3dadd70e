"""Warns of a device that computes slowly in the dtypes of a policy."""

from __future__ import annotations

import functools
import warnings

import jax.numpy as jnp
import numpy as np

from jaxmp._core import _compat
from jaxmp._policies._required import named_dtypes
from jaxmp._policies._resolve import PolicyMap
from jaxmp.errors import RecipeWarning

_BFLOAT16 = np.dtype(jnp.bfloat16)
# Compute capability of the first NVIDIA GPUs with bfloat16 matmuls, such as the A100.
_FIRST_WITH_BFLOAT16 = (8, 0)


def check_device(policies: PolicyMap) -> None:
    """Warns once of policies in bfloat16 on a GPU without bfloat16 matmuls.

    Called while a model is traced, because the device that is compiled for is known only then.
    """
    if _compat.target() != "gpu" or not _computes_in_bfloat16(policies):
        return
    capability = _compat.target_capability()
    if capability is not None and capability < _FIRST_WITH_BFLOAT16:
        is_stored = policies.default.param_dtype == _BFLOAT16
        _warn_of_bfloat16(capability, "fp16_params" if is_stored else "fp16")


@functools.cache
def _computes_in_bfloat16(policies: PolicyMap) -> bool:
    names = named_dtypes(policies)
    return any(field == "compute_dtype" and dtype == _BFLOAT16 for _, field, dtype in names)


@functools.cache
def _warn_of_bfloat16(capability: tuple[int, int], recipe: str) -> None:
    major, minor = capability
    warnings.warn(
        f"The policies compute in bfloat16, and this GPU (compute capability {major}.{minor}) has "
        "no matmuls in bfloat16, which begin with 8.0. Use float16, which it has: recipe = "
        f"jaxmp.load_recipe({recipe!r}).",
        RecipeWarning,
        stacklevel=2,
    )
