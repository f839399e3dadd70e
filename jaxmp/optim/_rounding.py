"""Stochastic rounding: 16-bit parameters that learn without masters."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from jaxmp._core import _trees
from jaxmp._core._dtypes import FLOAT32, is_16bit
from jaxmp.errors import CompositionError


class StochasticRoundingState(NamedTuple):
    """State of `stochastic_rounding`.

    Attributes:
      key: uint32[2], raw PRNG key data; it moves on at every update.
      inner_state: the state of the inner transformation.
    """

    key: jax.Array
    inner_state: Any


def stochastic_rounding(
    inner: optax.GradientTransformation | None = None, *, seed: int = 0
) -> optax.GradientTransformationExtraArgs:
    """Rounds the updated 16-bit parameters up or down at random, right on average.

    Rounding to nearest loses every update below half a unit in the last place: 1.0 + 0.001 is 1.0
    in bfloat16, a thousand times over. Rounding up with the probability that equals the distance
    from below keeps the expected value (Gupta et al. 2015, arXiv:1502.02551).

    Use it around everything else, on parameters without masters:
    `stochastic_rounding(mixed_precision(adamw, policies=..., master="none"))`, or last in a chain.
    FP32 parameters pass through. A zero update leaves a parameter where it is, bit for bit, so
    skipped steps stay skipped.

    Args:
      inner: the transformation whose updates are rounded. None: those it is given.
      seed: seed of the random bits, which are in the state: the same state gives the same step.

    Returns:
      An optax transformation that needs `params` in `update`.

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

    def init_fn(params: Any) -> Any:
        return StochasticRoundingState(
            jax.random.key_data(jax.random.key(seed, impl="threefry2x32")),
            inner.init(params),
        )

    def update_fn(
        updates: Any, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[Any, Any]:
        if params is None:
            raise CompositionError(
                "stochastic_rounding needs the parameters: tx.update(grads, state, params)."
            )
        deltas, inner_state = inner.update(updates, state.inner_state, params, **extra_args)
        key, use = jax.random.split(jax.random.wrap_key_data(state.key, impl="threefry2x32"))
        leaves, treedef = jax.tree.flatten(params)
        rounded = [
            _round_leaf(jax.random.fold_in(use, index), param, delta)
            for index, (param, delta) in enumerate(
                zip(leaves, treedef.flatten_up_to(deltas), strict=True)
            )
        ]
        return treedef.unflatten(rounded), StochasticRoundingState(
            jax.random.key_data(key), inner_state
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _round_leaf(key: jax.Array, param: Any, delta: Any) -> Any:
    dtype = _trees.dtype_of(param)
    if dtype is None or not is_16bit(dtype):
        return delta
    old = param.astype(FLOAT32)
    return round_stochastically(key, old + delta.astype(FLOAT32), dtype).astype(FLOAT32) - old


def round_stochastically(key: jax.Array, value: jax.Array, dtype: Any) -> jax.Array:
    """Rounds float32 `value` to bfloat16 or float16 so that the expected value is `value`.

    Random bits are added below the last bit kept, and what is below it is then cut off. Values that
    `dtype` holds stay as they are; infinities and NaN too. Magnitudes below float16's smallest
    normal number (2**-14) are rounded on its subnormal grid of 2**-24.
    """
    bits = lax.bitcast_convert_type(value, jnp.uint32)
    # Bits of the FP32 significand (23) that the format drops: 16 for bfloat16, 13 for float16.
    dropped = 23 - jnp.finfo(dtype).nmant
    noise = jax.random.bits(key, value.shape, jnp.uint32) & np.uint32(2**dropped - 1)
    cut = (bits + noise) & ~np.uint32(2**dropped - 1)
    rounded = lax.bitcast_convert_type(cut, jnp.float32)
    if np.dtype(dtype) == np.float16:
        grid = np.float32(2.0**-24)
        uniform = jax.random.uniform(key, value.shape, jnp.float32)
        subnormal = jnp.copysign(jnp.floor(value / grid + uniform) * grid, value)
        rounded = jnp.where(jnp.abs(value) < np.float32(2.0**-14), subnormal, rounded)
    return jnp.where(jnp.isfinite(value), rounded, value).astype(dtype)
