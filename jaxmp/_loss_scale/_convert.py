"""Converts numbers and the loss scales of jmp to loss scales."""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias, cast

import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxmp._loss_scale._arguments import is_number
from jaxmp._loss_scale._base import LossScale
from jaxmp._loss_scale._dynamic import DynamicLossScale
from jaxmp._loss_scale._leaves import new_leaf
from jaxmp._loss_scale._static import NoLossScale, StaticLossScale
from jaxmp.errors import LossScaleError


class JmpLossScale(Protocol):
    """Loss scale of jmp, or of another library with the same attribute."""

    @property
    def loss_scale(self) -> Any: ...


# Values that `as_loss_scale` accepts.
LossScaleLike: TypeAlias = LossScale | JmpLossScale | ArrayLike | None


def as_loss_scale(value: LossScaleLike) -> LossScale:
    """Converts a value to a loss scale.

    Args:
      value: a loss scale; None for no scaling; a number for a static loss scale; or one of jmp's
        three loss scales, with its state (jmp's `counter` becomes `good_steps`).

    Returns:
      The loss scale; `value` itself if it is a loss scale of jaxmp.

    Raises:
      LossScaleError: for any other value.

    Example:
      >>> as_loss_scale(None)
      NoLossScale()
    """
    if isinstance(value, LossScale):
        return value
    if value is None:
        return NoLossScale()
    if is_number(value):
        return StaticLossScale(cast(ArrayLike, value))
    if (converted := _from_jmp(value)) is not None:
        return converted
    raise LossScaleError(
        f"{value!r} is not a loss scale. Allowed: None, a positive number, NoLossScale(), "
        "StaticLossScale(1024), DynamicLossScale(), or a loss scale of jmp; "
        "for example DynamicLossScale(init_scale=65536)."
    )


def _from_jmp(value: Any) -> LossScale | None:
    """Converts a jmp loss scale, recognized by its class name, as jmp need not be installed."""
    names = {base.__name__ for base in type(value).__mro__}
    if "NoOpLossScale" in names:
        return NoLossScale()
    if "StaticLossScale" in names and hasattr(value, "loss_scale"):
        return StaticLossScale(value.loss_scale)
    if "DynamicLossScale" in names and hasattr(value, "min_loss_scale"):
        return _from_jmp_dynamic(value)
    return None


def _from_jmp_dynamic(value: Any) -> DynamicLossScale:
    converted = DynamicLossScale(
        value.loss_scale,
        growth_factor=value.factor,
        backoff_factor=1 / value.factor,
        growth_interval=value.period,
        min_scale=value.min_loss_scale,
        max_scale=None,
    )
    return converted.with_leaves(good_steps=new_leaf(value.counter, jnp.int32))
