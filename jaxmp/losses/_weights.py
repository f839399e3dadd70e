"""Weights of rows, and the reductions of weighted losses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxmp._core._typing import ArrayLike, DTypeLike
from jaxmp.errors import JaxmpError
from jaxmp.losses._arguments import (
    Reduction,
    shape_of,
)


def row_factors(
    weights: ArrayLike | None, counted: jax.Array | None, rows: Sequence[int], wide: DTypeLike
) -> jax.Array | None:
    """Returns the factor of each row, in `wide`; None if all are 1."""
    if weights is None:
        return None if counted is None else counted.astype(wide)
    weights = jnp.asarray(weights)
    if jnp.issubdtype(weights.dtype, jnp.complexfloating) or weights.shape != tuple(rows):
        raise JaxmpError(
            f"weights are {weights.dtype} of shape {shape_of(weights)}; the losses have shape "
            f"{list(rows)}, and each has one real weight. For equal weights of all rows: "
            f"weights=jnp.full({tuple(rows)}, weight)."
        )
    weights = weights.astype(wide)
    return weights if counted is None else jnp.where(counted, weights, jnp.zeros_like(weights))


def mark_invalid(losses: jax.Array, valid: jax.Array | None) -> jax.Array:
    """Replaces losses of invalid labels by NaN, through which no gradient passes."""
    if valid is None:
        return losses
    return jnp.where(valid, losses, jnp.full_like(losses, jnp.nan))


def apply_factors(losses: jax.Array, factors: jax.Array) -> jax.Array:
    return zero_unweighted(losses, factors) * factors


def zero_unweighted(losses: jax.Array, factors: jax.Array) -> jax.Array:
    """Replaces non-finite losses of factor 0 by 0, because 0 * inf is NaN."""
    return jnp.where((factors == 0) & ~jnp.isfinite(losses), jnp.zeros_like(losses), losses)


def weighted_sum(losses: jax.Array, factors: jax.Array) -> jax.Array:
    return jnp.sum(apply_factors(losses, factors))


def total_weight(factors: jax.Array | None, rows: Sequence[int], wide: DTypeLike) -> jax.Array:
    return jnp.asarray(math.prod(rows), wide) if factors is None else jnp.sum(factors)


def reduce_losses(losses: jax.Array, factors: jax.Array | None, reduction: Reduction) -> Any:
    weighted = losses if factors is None else apply_factors(losses, factors)
    if reduction == "none":
        return weighted
    weight = total_weight(factors, losses.shape, losses.dtype)
    return reduce_sum(jnp.sum(weighted), weight, reduction)


def reduce_sum(total: jax.Array, weight: jax.Array, reduction: Reduction) -> Any:
    if reduction == "sum":
        return total
    if reduction == "sum_and_weight":
        return total, weight
    return total / jnp.where(weight == 0, jnp.ones_like(weight), weight)
