"""Scales of delayed scaling that are known before a step, for all operands of a layer at once.

If each operand computed its scale where it is quantized, a program for a GPU would start one small
kernel per operand and one per dot. Scales of earlier amaxes do not depend on the tensors. XLA
computes those of all layers in one kernel, with the products of factors that the dots apply.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmp._core._typing import DTypeLike
from jaxmp.fp8._quantize import compute_scale
from jaxmp.fp8._scaling import GEMMS, DelayedScaling, Scaling
from jaxmp.fp8._state import COMMON_SCALE, OPERANDS, State, is_active, known_amax, of_operand


class Known(NamedTuple):
    """Scale of an operand that is known before the step; float32 scalars."""

    # True if the amaxes of this operand and of all earlier ones are known.
    are_all_known: jax.Array
    # True if the amax of this operand is known.
    is_known: jax.Array
    # 0 if it is unknown.
    amax: jax.Array
    scale: jax.Array
    # Products of the factors of each earlier operand and this one.
    products: tuple[jax.Array, ...]


def factor_of(scale: jax.Array) -> jax.Array:
    """Returns the reciprocal of a scale, which undoes it in the result of a dot."""
    # The reciprocal of a scale above 2**126 would be subnormal and might be flushed to zero.
    return lax.div(lax.full_like(scale, 1), lax.min(scale, lax.full_like(scale, 2.0**126)))


def scale_of(amax: jax.Array, scaling: Scaling, dtype: DTypeLike) -> jax.Array:
    """Computes the scale of a tensor from its amax."""
    return compute_scale(amax, dtype, scaling.margin, scaling.power_of_two)


def are_known(scaling: Scaling, state: State | None) -> bool:
    """Returns True if `known_scales` applies to a layer.

    It must use delayed scaling, its state must be active on one device, and each operand must have
    one format in both dots that use it.
    """
    return (
        isinstance(scaling, DelayedScaling)
        and state is not None
        and is_active(state)
        and state[f"{OPERANDS[0]}_amax_history"].shape[0] > 1
        and len(formats(scaling)) == len(OPERANDS)
    )


@functools.cache
def formats(scaling: Scaling) -> dict[str, DTypeLike]:
    """Returns the format of each operand; operands whose two dots do not share one are missing."""
    uses: dict[str, set[DTypeLike | None]] = {role: set() for role in OPERANDS}
    for gemm, roles in GEMMS.items():
        for role, dtype in zip(roles, scaling.formats(gemm) or (None, None), strict=True):
            uses[role].add(dtype)
    shared = {r: dtype for r, each in uses.items() for dtype in each if len(each) == 1}
    return {role: dtype for role, dtype in shared.items() if dtype is not None}


# Settings whose scales `begin_step` computes for all layers together, in a few kernels. With other
# settings, each layer computes its scales.
COMMON = DelayedScaling()


@functools.cache
def _is_common(scaling: DelayedScaling) -> bool:
    """Returns True if the scales of earlier amaxes are those of `COMMON`."""
    others = "amax_history_len", "calibrate", "fast_accumulation", "min_width", "emulate"
    return (
        dataclasses.replace(scaling, **{name: getattr(COMMON, name) for name in others}) == COMMON
    )


def common_scales(amaxes: jax.Array) -> jax.Array:
    """Computes the scales of layers and the products of their factors for the `COMMON` settings.

    Args:
      amaxes: `[3 * layers, ...]`, the largest entry of each history, in the order of `OPERANDS`.

    Returns:
      `[3 * layers, ..., 4]`: the scale of each operand, the products of its factor and those of the
      first two operands, and the smallest amax up to this operand.
    """
    layers = amaxes.shape[0] // len(OPERANDS)
    amaxes = amaxes.reshape(layers, len(OPERANDS), *amaxes.shape[1:])
    roles = lax.broadcasted_iota(np.int32, amaxes.shape, 1)
    scale = jnp.zeros_like(amaxes)
    for number, role in enumerate(OPERANDS):
        own = scale_of(amaxes, COMMON, formats(COMMON)[role])
        scale = jnp.where(roles == number, own, scale)
    factor = factor_of(scale)
    products = [factor * factor[:, number : number + 1] for number in range(2)]
    values = jnp.stack([scale, *products, lax.cummin(amaxes, axis=1)], axis=-1)
    return values.reshape(layers * len(OPERANDS), *values.shape[2:])


@functools.partial(jax.jit, static_argnames="scaling")
def known_scales(scaling: DelayedScaling, state: State) -> dict[str, Known]:
    """Returns the scales of a layer's operands that come from the amaxes of earlier steps.

    Args:
      scaling: the scaling.
      state: the active state of the layer, for which `are_known` is True.
    """
    operands = {role: of_operand(state, role) for role in OPERANDS}
    amaxes = {role: known_amax(scaling, each) for role, each in operands.items()}
    if _is_common(scaling):
        scales = {role: each.amax[COMMON_SCALE] for role, each in operands.items()}
        product = lambda other, role: operands[role].amax[COMMON_SCALE + 1 + OPERANDS.index(other)]
        smallest = lambda role: operands[role].amax[COMMON_SCALE + 3]
    else:
        scales = {r: scale_of(amax, scaling, formats(scaling)[r]) for r, amax in amaxes.items()}
        factors = {role: factor_of(scale) for role, scale in scales.items()}
        product = lambda other, role: factors[other] * factors[role]
        until = lambda role: OPERANDS[: OPERANDS.index(role) + 1]
        smallest = lambda role: functools.reduce(jnp.minimum, [amaxes[r] for r in until(role)])
    known = {}
    for number, role in enumerate(OPERANDS):
        are_all_known = smallest(role) > np.float32(0)
        products = tuple(product(other, role) for other in OPERANDS[:number])
        # Without the barrier, XLA moves the computation into the branches that use it.
        scale, products = lax.optimization_barrier((scales[role], products))
        is_known = amaxes[role] > np.float32(0)
        known[role] = Known(are_all_known, is_known, amaxes[role], scale, products)
    return known


def resolve(
    scaling: DelayedScaling,
    known: Known,
    dtype: DTypeLike,
    earlier: tuple[jax.Array, ...],
    measure: Callable[[], jax.Array],
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Returns the scale of an operand in this step.

    Args:
      scaling: the scaling.
      known: the scale that is known before the step.
      dtype: the format of the operand.
      earlier: scales of the earlier operands of the layer in this step.
      measure: computes the amax of the tensor, for the first step.

    Returns:
      The scale, and the products of the factors of the earlier operands and this one.
    """
    before = known.scale, known.products
    if not scaling.calibrate:
        return before

    def calibrate() -> tuple[jax.Array, tuple[jax.Array, ...]]:
        amax = lax.select(known.is_known, known.amax, measure())
        scale = scale_of(amax, scaling, dtype)
        return scale, tuple(factor_of(each) * factor_of(scale) for each in earlier)

    # Only the first step measures a tensor before it is scaled. The other steps measure it in the
    # kernel that quantizes it.
    return lax.cond(known.are_all_known, lambda: before, calibrate)
