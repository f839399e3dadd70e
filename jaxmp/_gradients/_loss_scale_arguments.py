"""Checks the arguments of loss scales."""

from __future__ import annotations

import math
from typing import Any, Literal, TypeGuard, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

from jaxmp._core._trees import dtype_of
from jaxmp.errors import LossScaleError

Refill = Literal["growth", "clean"]

# FP32 numbers below, and the reciprocals of those above, are subnormal, and devices may flush them
# to zero.
SMALLEST_SCALE, LARGEST_SCALE = 2.0**-126, 2.0**126
_LARGEST_COUNT = int(np.iinfo(np.int32).max)

_SCALE = "a number from 2**-126 to 2**126"


def is_number(value: object) -> bool:
    """Returns True if `value` is a single real number, traced or not, and not a bool."""
    if isinstance(value, (int, float)):
        return not isinstance(value, bool)
    kind = dtype_of(value) if _is_scalar(value) else None
    return kind is not None and any(jnp.issubdtype(kind, k) for k in (jnp.floating, jnp.integer))


def _is_scalar(value: object) -> bool:
    return isinstance(value, (jax.Array, np.ndarray, np.generic)) and value.shape == ()


def _is_traced(value: object) -> TypeGuard[Tracer]:
    return isinstance(value, Tracer)


def _fp32(value: Any) -> float:
    """Rounds `value` to FP32; returns NaN if it is not a concrete number."""
    if not is_number(value) or _is_traced(value):
        return math.nan
    try:
        with np.errstate(over="ignore"):
            return float(np.float32(float(value)))
    except OverflowError:
        return math.inf


def check_scale(name: str, value: ArrayLike) -> float | jax.Array:
    """Returns a scale as an FP32 number; a traced scale is returned unchanged."""
    if is_number(value) and _is_traced(value):
        return value
    return check_bound(name, value)


def check_bound(name: str, value: object) -> float:
    number = _fp32(value)
    if not SMALLEST_SCALE <= number <= LARGEST_SCALE:
        raise _refusal(name, value, _SCALE, 65536.0)
    return number


def check_factor(name: str, value: float, low: float, high: float) -> float:
    if not low < _fp32(value) < high:
        allowed = f"a number between {low} and {high} after rounding to FP32"
        raise _refusal(name, value, allowed, (low + min(high, low + 2)) / 2)
    return float(value)


def check_count(name: str, value: int, least: int) -> int:
    whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not whole or not least <= value <= _LARGEST_COUNT:
        raise _refusal(name, value, f"an int from {least} to 2**31 - 1", least + 1)
    return int(value)


def check_refill(name: str, value: Refill) -> Refill:
    if not isinstance(value, str) or value not in get_args(Refill):
        raise _refusal(name, value, " or ".join(map(repr, get_args(Refill))), "clean")
    return value


def _refusal(name: str, value: object, allowed: str, example: object) -> LossScaleError:
    cls = "StaticLossScale" if name == "loss_scale" else "DynamicLossScale"
    return LossScaleError(
        f"{cls}({name}={value!r}): {name} must be {allowed}; for example {cls}({name}={example!r})."
    )


def check_order(low: float, init: float | jax.Array, high: float) -> None:
    inside = () if _is_traced(init) else (init,)
    if [low, *inside, high] == sorted([low, *inside, high]):
        return
    start = "".join(f"init_scale={value!r}, " for value in inside)
    widest = (low, *inside, high)
    raise LossScaleError(
        f"DynamicLossScale({start}min_scale={low!r}, max_scale={high!r}): "
        "the condition is min_scale <= init_scale <= max_scale; for example "
        f"DynamicLossScale({start}min_scale={min(widest)!r}, max_scale={max(widest)!r})."
    )


def check_bool(value: object) -> jax.Array:
    if isinstance(value, bool) or (_is_scalar(value) and dtype_of(value) == np.bool_):
        return jnp.asarray(value)
    raise LossScaleError(
        f"adjust(grads_finite={value!r}): grads_finite must be a single bool, or a bool array of "
        "shape (). Reduce flags with loss_scale.adjust(jnp.all(flags)); convert a 0/1 number to "
        "a bool with loss_scale.adjust(number != 0); batched loss scales need jax.vmap."
    )
