"""Attention function of a Flax layer under a policy, common to Linen and NNX."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypedDict, TypeVar

import jax

from jaxmp._attention._declared import Declaration
from jaxmp._attention._layer import MaskHints
from jaxmp._core._dtypes import is_16bit
from jaxmp._policies._policy import Policy


class DropoutOptions(TypedDict):
    """Fields of `Weights` that specify dropout."""

    dropout_rate: float
    dropout_rng: jax.Array | None
    broadcast_dropout: bool


Function = TypeVar("Function", bound=Callable[..., jax.Array])


def attention_function(
    current: Function,
    default: Callable[..., jax.Array],
    make: Callable[[MaskHints], Function],
    policy: Policy,
    path: str,
) -> Function:
    """Returns the attention function of a layer under a policy.

    Args:
      current: the function that the layer has. One that is neither `default` nor jaxmp's is kept.
      default: the framework's default function.
      make: makes one of jaxmp's functions.
      policy: the policy of the layer.
      path: the path of the layer.
    """
    hints = getattr(current, "mask_hints", None)
    is_requested = policy.implementation != "auto" or policy.mask != "array"
    if current is default and (is_requested or is_16bit(policy.compute_dtype)):
        hints = MaskHints()
    if hints is None:
        return current
    if hints.implementation == "auto":
        hints = dataclasses.replace(hints, implementation=policy.implementation)
    if policy.mask != "array":
        declared = Declaration(policy.mask, policy.window, path)
        hints = dataclasses.replace(hints, declared=declared)
    return make(hints)


def dropout_options(
    rate: float, rng: jax.Array | None, broadcast: bool, deterministic: bool
) -> DropoutOptions:
    """Returns the fields of `Weights` for the dropout arguments of Flax's attention functions."""
    is_active = bool(rate) and not deterministic
    return {
        "dropout_rate": 0.0 if deterministic else rate,
        "dropout_rng": rng if is_active else None,
        "broadcast_dropout": broadcast,
    }
