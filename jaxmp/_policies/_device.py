"""Warns of a device that computes slowly in the dtypes of a policy."""

from __future__ import annotations

import functools
import warnings

import jax.numpy as jnp
import numpy as np

from jaxmp._core._capability import BFLOAT16_MATMULS, capability_text, unsupported_gpu
from jaxmp._policies._required import named_dtypes
from jaxmp._policies._resolve import PolicyMap
from jaxmp.errors import RecipeWarning

_BFLOAT16 = np.dtype(jnp.bfloat16)


def check_device(policies: PolicyMap) -> None:
    """Warns once of policies in bfloat16 on a GPU without bfloat16 matmuls.

    Called while a model is traced, because the device that is compiled for is known only then.
    """
    gpu = unsupported_gpu(BFLOAT16_MATMULS)
    if gpu and _computes_in_bfloat16(policies):
        is_stored = policies.default.param_dtype == _BFLOAT16
        _warn_of_bfloat16(gpu, "fp16_params" if is_stored else "fp16")


@functools.cache
def _computes_in_bfloat16(policies: PolicyMap) -> bool:
    names = named_dtypes(policies)
    return any(field == "compute_dtype" and dtype == _BFLOAT16 for _, field, dtype in names)


@functools.cache
def _warn_of_bfloat16(gpu: str, recipe: str) -> None:
    warnings.warn(
        f"The policies compute in bfloat16, but {gpu} has no bfloat16 matmuls: they require "
        f"compute capability {capability_text(BFLOAT16_MATMULS)}. Use float16, which this GPU "
        f"supports: recipe = jaxmp.load_recipe({recipe!r}).",
        RecipeWarning,
        stacklevel=2,
    )
