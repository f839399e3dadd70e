"""Dynamic loss scale, and the settings of other frameworks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Self, TypeAlias, cast, final

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from jaxmp import _core
from jaxmp._gradients._loss_scale import (
    LARGEST_SCALE,
    SMALLEST_SCALE,
    LossScale,
    NoLossScale,
    Refill,
    Scaling,
    StaticLossScale,
    check_bound,
    check_count,
    check_factor,
    check_order,
    check_refill,
    check_scale,
    float32,
    int32,
    is_number,
    new_leaf,
)
from jaxmp.errors import LossScaleError


@final
@jax.tree_util.register_pytree_with_keys_class
class DynamicLossScale(Scaling):
    """Loss scale that grows after a number of finite steps and backs off after an overflow.

    It thereby finds the largest scale that keeps gradients finite. One step, in plain Python
    (`adjust` is the traced form, and agrees with it bit for bit)::

        if grads_finite:
            if hysteresis_refill == "clean":
                hysteresis_left = hysteresis
            if growth_delay_left > 0:
                growth_delay_left -= 1
            else:
                good_steps += 1
                if good_steps == growth_interval:
                    good_steps = 0
                    hysteresis_left = hysteresis
                    scale = min(scale * growth_factor, max_scale)
        else:
            good_steps = 0
            growth_delay_left = first_growth_delay
            if hysteresis_left > 1:
                hysteresis_left -= 1
            else:
                scale = max(scale * backoff_factor, min_scale)

    The scale is never 0 and never infinite: it stays between 2**-126 and 2**126. A scale outside of
    its bounds, as from a checkpoint of a training with others, returns to them when it changes.
    Factors are applied in FP32.

    The method is that of Micikevicius et al., "Mixed Precision Training" (2018, arXiv:1710.03740).
    `preset` creates loss scales with the settings of other frameworks. They have the same sequence
    of scales as the framework between 2**-126 and 2**126: bit for bit if the factors are powers of
    two, as in all defaults, and otherwise up to the rounding of FP32.

    Args:
      init_scale: scale of the first step. Like all scales here, it is a number from 2**-126 to
        2**126, or a scalar array of such a number. Traced values are not checked.
      growth_factor: factor by which the scale grows; above 1.
      backoff_factor: factor by which the scale changes after an overflow; between 0 and 1.
      growth_interval: number of consecutive finite steps after which the scale grows.
      min_scale: minimum scale; None for 2**-126. Default 2**-14, with which the smallest positive
        float16 number, 2**-24, represents a gradient of 2**-10.
      max_scale: maximum scale; None for 2**126. Default 2**24, as in apex.
      hysteresis: number of overflows since the last refill at which the scale backs off for the
        first time; each further overflow backs off again. 1: at every overflow.
      hysteresis_refill: event at which the count of overflows restarts: "growth" at each
        `growth_interval`, "clean" at each finite step (DeepSpeed's `consecutive_hysteresis`).
      first_growth_delay: number of finite steps that do not count towards `growth_interval`, at
        the start and after each overflow.

    Raises:
      LossScaleError: if an argument is out of its range, or not
        `min_scale <= init_scale <= max_scale`.

    Example:
      >>> loss_scale = DynamicLossScale(1024, growth_interval=2)
      >>> loss_scale = loss_scale.adjust(True).adjust(True)
      >>> float(loss_scale.scale_value), float(loss_scale.adjust(False).scale_value)
      (2048.0, 1024.0)
    """

    LEAVES = ("scale_value", "good_steps", "hysteresis_left", "growth_delay_left")

    good_steps: jax.Array
    hysteresis_left: jax.Array
    growth_delay_left: jax.Array
    growth_factor: float
    backoff_factor: float
    growth_interval: int
    min_scale: float | None
    max_scale: float | None
    hysteresis: int
    hysteresis_refill: Refill
    first_growth_delay: int

    def __init__(
        self,
        init_scale: ArrayLike = 2.0**16,
        *,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        min_scale: float | None = 2.0**-14,
        max_scale: float | None = 2.0**24,
        hysteresis: int = 1,
        hysteresis_refill: Refill = "growth",
        first_growth_delay: int = 0,
    ) -> None:
        vars(self).update(
            growth_factor=check_factor("growth_factor", growth_factor, 1.0, math.inf),
            backoff_factor=check_factor("backoff_factor", backoff_factor, 0.0, 1.0),
            growth_interval=check_count("growth_interval", growth_interval, 1),
            min_scale=None if min_scale is None else check_bound("min_scale", min_scale),
            max_scale=None if max_scale is None else check_bound("max_scale", max_scale),
            hysteresis=check_count("hysteresis", hysteresis, 1),
            hysteresis_refill=check_refill("hysteresis_refill", hysteresis_refill),
            first_growth_delay=check_count("first_growth_delay", first_growth_delay, 0),
        )
        scale = check_scale("init_scale", init_scale)
        check_order(self.floor, scale, self.ceiling)
        vars(self).update(
            scale_value=new_leaf(scale, jnp.float32),
            good_steps=new_leaf(0, jnp.int32),
            hysteresis_left=new_leaf(self.hysteresis, jnp.int32),
            growth_delay_left=new_leaf(self.first_growth_delay, jnp.int32),
        )

    # The settings, which are the arguments by keyword.
    STATIC = tuple(__init__.__kwdefaults__ or ())

    @property
    def floor(self) -> float:
        """Smallest scale that a step can reach."""
        return SMALLEST_SCALE if self.min_scale is None else self.min_scale

    @property
    def ceiling(self) -> float:
        return LARGEST_SCALE if self.max_scale is None else self.max_scale

    @property
    def at_floor(self) -> jax.Array:
        return self.scale_value <= self.floor

    def _next(self, finite: jax.Array) -> Self:
        # A counter that the settings do not use stays constant and adds no operation.
        has_delay, has_hysteresis = self.first_growth_delay > 0, self.hysteresis > 1
        hysteresis, delay = self.hysteresis_left, self.growth_delay_left
        counts = finite & lax.eq(delay, int32(0)) if has_delay else finite
        counted = lax.select(counts, lax.add(self.good_steps, int32(1)), int32(0))
        # `>=` rather than `==`: a count restored from a run with a longer interval must still grow.
        grows = lax.ge(counted, int32(self.growth_interval))
        backs_off = ~finite & lax.le(hysteresis, int32(1)) if has_hysteresis else ~finite
        fallen = lax.select(backs_off, self._scaled_by(self.backoff_factor), self.scale_value)
        return self.with_leaves(
            scale_value=lax.select(grows, self._scaled_by(self.growth_factor), fallen),
            good_steps=lax.select(grows, int32(0), counted),
            hysteresis_left=self._next_hysteresis(finite, grows) if has_hysteresis else hysteresis,
            growth_delay_left=self._next_delay(finite) if has_delay else delay,
        )

    def _scaled_by(self, factor: float) -> jax.Array:
        scale = lax.mul(self.scale_value, float32(factor))
        return lax.clamp(float32(self.floor), scale, float32(self.ceiling))

    def _next_delay(self, finite: jax.Array) -> jax.Array:
        one_less = lax.max(lax.sub(self.growth_delay_left, int32(1)), int32(0))
        return lax.select(finite, one_less, int32(self.first_growth_delay))

    def _next_hysteresis(self, finite: jax.Array, grows: jax.Array) -> jax.Array:
        one_less = lax.max(lax.sub(self.hysteresis_left, int32(1)), int32(1))
        left = lax.select(finite, self.hysteresis_left, one_less)
        refills = finite if self.hysteresis_refill == "clean" else grows
        return lax.select(refills, int32(self.hysteresis), left)

    @classmethod
    def preset(cls, framework: str, **settings: Any) -> Self:
        """Creates a loss scale with the settings of another library.

        Args:
          framework: "torch" (`torch.amp.GradScaler`, Accelerate, Lightning), "deepspeed" (ZeRO; for
            `consecutive_hysteresis`, pass `hysteresis_refill="clean"`), "megatron"
            (`DynamicGradScaler`), "keras" (`LossScaleOptimizer`) or "tensorflow"
            (`DynamicLossScale`).
          **settings: arguments of `DynamicLossScale` that differ.

        Raises:
          LossScaleError: for another framework.

        Example:
          >>> DynamicLossScale.preset("megatron", init_scale=2.0**16).growth_interval
          1000
        """
        if framework not in [*PRESETS]:
            raise LossScaleError(
                f"Unknown framework {framework!r}.{_core.did_you_mean(str(framework), PRESETS)} "
                f"Allowed: {', '.join(PRESETS)}; for example DynamicLossScale.preset('torch')."
            )
        return cls(**{"max_scale": None, **PRESETS[framework], **settings})


# Settings of each framework. All use the factors 2 and 0.5.
PRESETS: dict[str, dict[str, Any]] = {
    "torch": {"init_scale": 2.0**16, "growth_interval": 2000, "min_scale": None},
    "deepspeed": {
        "init_scale": 2.0**16,
        "growth_interval": 1000,
        "min_scale": 1.0,
        "hysteresis": 2,
        "first_growth_delay": 1,
    },
    "megatron": {
        "init_scale": 2.0**32,
        "growth_interval": 1000,
        "min_scale": 1.0,
        "hysteresis": 2,
    },
    "keras": {"init_scale": 2.0**15, "growth_interval": 2000, "min_scale": None},
    "tensorflow": {"init_scale": 2.0**15, "growth_interval": 2000, "min_scale": 1.0},
}


# Values that `as_loss_scale` accepts; also the loss scales of jmp and Flax.
LossScaleLike: TypeAlias = LossScale | ArrayLike | None


def as_loss_scale(value: LossScaleLike) -> LossScale:
    """Converts a value to a loss scale.

    Args:
      value: a loss scale; None for no scaling; or a number for a static loss scale. The loss
        scales of jmp and `flax.training.dynamic_scale.DynamicScale` are converted, with their
        settings, scale and count.

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
    convert = _OTHERS.get((type(value).__module__.partition(".")[0], type(value).__name__))
    if convert is not None:
        return convert(value)
    is_scale = lambda leaf: isinstance(leaf, LossScale)
    if any(map(is_scale, jax.tree.leaves(value, is_leaf=is_scale))):
        raise LossScaleError(
            f"This {type(value).__name__} is not a loss scale, but contains one. Write "
            "loss_scale=jaxmp.get_loss_scale(opt_state) with this state in place of opt_state."
        )
    raise LossScaleError(
        f"{value!r} is not a loss scale. Allowed: None, a positive number, NoLossScale(), "
        "StaticLossScale(1024), DynamicLossScale(), and those of jmp and Flax; for example "
        "DynamicLossScale(init_scale=65536)."
    )


def _from_jmp(value: Any) -> DynamicLossScale:
    scale = DynamicLossScale(
        value.loss_scale,
        growth_factor=value.factor,
        backoff_factor=1 / value.factor,
        growth_interval=value.period,
        min_scale=float(value.min_loss_scale),
        max_scale=None,
    )
    return scale.with_leaves(good_steps=new_leaf(value.counter, jnp.int32))


def _from_flax(value: Any) -> DynamicLossScale:
    scale = DynamicLossScale(
        value.scale,
        growth_factor=value.growth_factor,
        backoff_factor=value.backoff_factor,
        # The scale of Flax grows in the step after the interval.
        growth_interval=value.growth_interval + 1,
        min_scale=value.minimum_scale,
        max_scale=None,
    )
    return scale.with_leaves(good_steps=new_leaf(value.fin_steps, jnp.int32))


# Package and class of the loss scales of other libraries, which are not imported.
_OTHERS: dict[tuple[str, str], Callable[[Any], LossScale]] = {
    ("jmp", "NoOpLossScale"): lambda _: NoLossScale(),
    ("jmp", "StaticLossScale"): lambda value: StaticLossScale(value.loss_scale),
    ("jmp", "DynamicLossScale"): _from_jmp,
    ("flax", "DynamicScale"): _from_flax,
}
