"""Losses that an optimizer differentiates itself, as those of a line search or of a Hessian."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxmp import _core
from jaxmp._core import PyTree
from jaxmp._gradients import _loss_scale

# Arguments of optax's transformations that are losses, which an update differentiates.
_LOSSES = {"value_fn", "obj_fn"}


def losses_of(extra_args: dict[str, Any]) -> dict[str, Any]:
    """Returns those extra arguments of an update that the optimizer differentiates."""
    return {key: fn for key, fn in extra_args.items() if key in _LOSSES and callable(fn)}


def with_scaled_losses(extra_args: dict[str, Any], state: Any) -> dict[str, Any]:
    """Replaces losses by those with the gradients of the train state's `value_and_grad`.

    Args:
      extra_args: of an update.
      state: the `SkipNonfiniteState` of the optimizer.
    """
    settings, scale = state.settings, state.loss_scale
    is_plain = isinstance(scale, _loss_scale.NoLossScale) and not settings.axis_name
    if is_plain or settings.is_noted:
        return extra_args
    options = settings.options() | {"loss_scale": scale}
    change = functools.partial(_loss_scale.differentiable, **options)
    return extra_args | {key: change(fn) for key, fn in losses_of(extra_args).items()}


def stays_finite(old: PyTree, new: PyTree) -> jax.Array:
    """Returns True if all arrays of a state that were finite still are.

    A derivative that the optimizer computes of a scaled loss can overflow, although the gradients
    are finite, and would remain in averages. Scalars may be infinite, as those of line searches.
    """
    leaves = zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True)
    arrays = [(a, b) for a, b in leaves if _core.is_inexact(b) and b.ndim]
    flags = (jnp.all(jnp.isfinite(b) | ~jnp.isfinite(a)) for a, b in arrays)
    return functools.reduce(lax.bitwise_and, flags, jnp.array(True))
