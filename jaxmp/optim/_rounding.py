"""Rounding of 16-bit parameters: packed with a remainder, or stochastic instead of masters."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from jaxmp import _core
from jaxmp._core import Array, DTypeLike, PyTree
from jaxmp.errors import CompositionError

_HALF_ULP = np.uint32(0x8000)
_QUIET_NAN = np.uint32(0x7FC00000)

# Finite FP32 values of at least this magnitude become infinite by the cast: the largest finite
# value plus half a unit in its last place (65504 + 16 for float16).
OVERFLOW_THRESHOLD = {
    _core.FLOAT16: np.float32(65520.0),
    _core.BFLOAT16: np.array(0x7F7F8000, np.uint32).view(np.float32)[()],
}


def pack(master: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Splits FP32 values into bfloat16, with ties away from zero, and an int16 remainder.

    Args:
      master: float32 array of any shape.

    Returns:
      bfloat16 and int16 arrays of the same shape, from which `unpack` restores finite and infinite
      values exactly, except subnormal ones below 2**-134, which become zero. A NaN becomes the
      quiet NaN.
    """
    bits = lax.bitcast_convert_type(master, jnp.uint32)
    bits = lax.select(jnp.isnan(master), jnp.full_like(bits, _QUIET_NAN), bits)
    high = lax.shift_right_logical(bits + _HALF_ULP, jnp.full_like(bits, 16)).astype(jnp.uint16)
    low = bits.astype(jnp.uint16)
    return (
        lax.bitcast_convert_type(high, jnp.bfloat16),
        lax.bitcast_convert_type(low, jnp.int16),
    )


def unpack(param: jax.Array, remainder: jax.Array) -> jax.Array:
    """Returns the FP32 value of a bfloat16 parameter and its int16 remainder.

    A zero has no remainder, so that a parameter which the user sets to zero is zero.
    """
    high = _high_bits(param)
    is_zero = (high & 0x7FFFFFFF) == 0
    full = jnp.where(is_zero, high, high + remainder.astype(jnp.int32))
    return lax.bitcast_convert_type(full, jnp.float32)


def remainder_to(master: jax.Array, param: jax.Array) -> jax.Array:
    """Returns the int16 remainder with which `param` is closest to `master`.

    It is exact if `param` is `pack(master)[0]`, and otherwise clipped.
    """
    bits = lax.bitcast_convert_type(master, jnp.int32)
    return jnp.clip(bits - _high_bits(param), -(2**15), 2**15 - 1).astype(jnp.int16)


def _high_bits(param: jax.Array) -> jax.Array:
    high = lax.bitcast_convert_type(param, jnp.int16).astype(jnp.int32)
    return lax.shift_left(high, jnp.full_like(high, 16))


# ---------------------------------------------------------------------------
# Stochastic rounding
# ---------------------------------------------------------------------------


class StochasticRoundingState(NamedTuple):
    """State of `stochastic_rounding`.

    Attributes:
      key: uint32[2], raw PRNG key data; every update replaces it.
      inner_state: the state of the inner transformation.
    """

    key: jax.Array
    inner_state: PyTree


def stochastic_rounding(
    inner: optax.GradientTransformation | None = None, *, seed: int = 0
) -> optax.GradientTransformationExtraArgs:
    """Rounds updated 16-bit parameters up or down at random, with the exact expected value.

    Rounding to nearest loses every update below half a unit in the last place: in bfloat16,
    1.0 + 0.001 is 1.0, however often it is repeated. Rounding up with a probability equal to the
    distance from the lower neighbor preserves the expected value (Gupta et al. 2015,
    arXiv:1502.02551).

    Use it as the outermost transformation, on parameters without masters, or last in a chain:
    `stochastic_rounding(recipe.replace(master="none").optimizer(adamw))`.
    FP32 parameters are not rounded. A zero update does not change a parameter, so that skipped
    steps remain skipped.

    Args:
      inner: the transformation whose updates are rounded. None: the updates themselves.
      seed: seed of the random bits, which are in the state: equal states give equal steps.

    Returns:
      An optax transformation that requires `params` in `update`.

    Raises:
      CompositionError: if `update` is called without the parameters.

    Example:
      >>> params = jnp.ones(10_000, jnp.bfloat16)
      >>> tx = stochastic_rounding(optax.sgd(1e-3), seed=0)
      >>> updates, _ = tx.update(jnp.ones(10_000, jnp.float32), tx.init(params), params)
      >>> moved = optax.apply_updates(params, updates).astype(jnp.float32).mean()
      >>> bool(abs(moved - 0.999) < 1e-4)
      True
    """
    inner = optax.with_extra_args_support(optax.identity() if inner is None else inner)

    def init_fn(params: PyTree) -> PyTree:
        return StochasticRoundingState(
            jax.random.key_data(jax.random.key(seed, impl="threefry2x32")),
            inner.init(params),
        )

    def update_fn(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: object
    ) -> tuple[PyTree, PyTree]:
        if params is None:
            raise CompositionError(
                "stochastic_rounding requires the parameters: tx.update(grads, state, params)."
            )
        deltas, inner_state = inner.update(updates, state.inner_state, params, **extra_args)
        key, round_key = jax.random.split(jax.random.wrap_key_data(state.key, impl="threefry2x32"))
        leaves, treedef = jax.tree.flatten(params)
        rounded = [
            _round_leaf(jax.random.fold_in(round_key, index), param, delta)
            for index, (param, delta) in enumerate(
                zip(leaves, treedef.flatten_up_to(deltas), strict=True)
            )
        ]
        return treedef.unflatten(rounded), StochasticRoundingState(
            jax.random.key_data(key), inner_state
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _round_leaf(key: jax.Array, param: Array, delta: Array) -> Array:
    dtype = _core.dtype_of(param)
    if dtype is None or not _core.is_16bit(dtype):
        return delta
    old = param.astype(_core.FLOAT32)
    new = round_stochastically(key, old + delta.astype(_core.FLOAT32), dtype)
    return new.astype(_core.FLOAT32) - old


def round_stochastically(key: jax.Array, value: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Rounds float32 `value` to bfloat16 or float16 so that the expected value is `value`.

    Random bits are added below the last bit of the format, and the bits below it are then cut off.
    Values that `dtype` represents exactly, infinities and NaN do not change. Magnitudes above the
    largest finite number are rounded to nearest: those of float16 above 65,504 have no finite upper
    neighbor, and are infinite from 65,520 on. Magnitudes below 2**-14, the smallest normal number
    of float16, are rounded on its subnormal grid of 2**-24.
    """
    noise = jax.random.bits(key, value.shape, jnp.uint32)
    rounded = with_noise(value, noise, dtype)
    if np.dtype(dtype) == np.float16:
        grid = np.float32(2.0**-24)
        uniform = jax.random.uniform(key, value.shape, jnp.float32)
        subnormal = jnp.copysign(jnp.floor(value / grid + uniform) * grid, value)
        is_subnormal = jnp.abs(value) < np.float32(2.0**-14)
        rounded = jnp.where(is_subnormal, subnormal.astype(dtype), rounded)
    return rounded


def with_noise(value: jax.Array, noise: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Rounds float32 `value` with uniform random uint32: adds them below the last bit, and cuts."""
    bits = lax.bitcast_convert_type(value, jnp.uint32)
    # Bits of the FP32 significand (23) that the format drops: 16 for bfloat16, 13 for float16.
    dropped = np.uint32(2 ** (23 - jnp.finfo(dtype).nmant) - 1)
    rounded = lax.bitcast_convert_type((bits + (noise & dropped)) & ~dropped, jnp.float32)
    largest = np.float32(jnp.finfo(dtype).max)
    return jnp.where(jnp.abs(value) <= largest, rounded, value).astype(dtype)
