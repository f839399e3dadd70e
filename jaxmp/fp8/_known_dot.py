"""FP8 dot of delayed scaling whose scales are known before the step."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxmp._core._typing import DTypeLike
from jaxmp.fp8._call import Call, differentiated_once, shield
from jaxmp.fp8._checkpoint import named, named_values
from jaxmp.fp8._dims import Dims
from jaxmp.fp8._known_scales import Known, formats, independent, known_scales, products_of
from jaxmp.fp8._operands import RESOLVE_AND_QUANTIZE, multiply_values
from jaxmp.fp8._repeated import is_repeated
from jaxmp.fp8._scaling import DelayedScaling
from jaxmp.fp8._state import AGE, OPERANDS, State, before_step, next_state, of_operand


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def known_product(call: Call, lhs: jax.Array, rhs: jax.Array, state: State) -> jax.Array:
    """Computes the dot of a layer whose state is active; see `known_scales`.

    Args:
      call: the dot; its scaling is a `DelayedScaling`.
      lhs, rhs: high-precision operands.
      state: the active state of the layer, in float32 or `fm32`.
    """
    return _forward(call, lhs, rhs, before_step(state))[0]


# Role -> scale, and active amax and partial maxima for the next state.
_Scales = dict[str, jax.Array]
_Seen = dict[str, tuple[jax.Array, jax.Array]]


class _Saved(NamedTuple):
    """Results of the forward pass for the backward pass."""

    values: list[jax.Array]
    scales: _Scales
    seen: _Seen
    known: Known  # of the output gradient


def _quantize(
    call: Call, state: State, role: str, x: jax.Array, known: Known, earlier: _Scales
) -> tuple[jax.Array, jax.Array, tuple[jax.Array, ...], tuple[jax.Array, jax.Array]]:
    """Quantizes an operand; returns values, scale, products of factors, and a `_Seen` entry."""
    scaling = _scaling(call)
    scales = tuple(earlier.values())
    is_separate = role == "kernel" and is_repeated()
    values, scale, products, partials = RESOLVE_AND_QUANTIZE[role](
        x,
        of_operand(state, role),
        independent(known) if is_separate else known,
        () if is_separate else scales,
        scaling=scaling,
        dtype=formats(scaling)[role],
    )
    if is_separate:
        products = products_of(scaling, known, scales, scale)
    return values, scale, products, (known.amax, partials)


def _scaling(call: Call) -> DelayedScaling:
    assert isinstance(call.scaling, DelayedScaling)
    return call.scaling


def _multiply(
    call: Call,
    gemm: str,
    lhs: jax.Array,
    rhs: jax.Array,
    factor: jax.Array,
    dims: Dims,
    dtype: DTypeLike,
) -> jax.Array:
    accurate = gemm not in call.scaling.fast_accumulation
    return multiply_values(lhs, rhs, factor, dims, dtype, accurate=accurate)


def _forward(call: Call, lhs: jax.Array, rhs: jax.Array, state: State) -> tuple[jax.Array, _Saved]:
    values: list[Any] = [None, None]
    forwards: list[Any] = [None, None]
    products: tuple[jax.Array, ...] = ()
    scales: _Scales = {}
    seen: _Seen = {}
    known = known_scales(_scaling(call), state)
    # The kernel is quantized second; see `OPERANDS`.
    for side in (1 - call.kernel, call.kernel):
        role = call.role(side)
        quantized, scales[role], products, seen[role] = _quantize(
            call, state, role, (lhs, rhs)[side], known[role], scales
        )
        values[side], forwards[side] = named_values(quantized)
    factor = named(products[0])
    left, right = forwards
    out = _multiply(call, "fprop", left, right, factor, call.dims, call.out_dtype)
    saved = _Saved(values, scales, seen, known[OPERANDS[-1]])
    return shield(call, out, (lhs, rhs)[call.kernel].shape), saved


def _forward_pass(
    call: Call, lhs: jax.Array, rhs: jax.Array, state: State
) -> tuple[jax.Array, Any]:
    lhs, rhs = differentiated_once(type(call.scaling).__name__, lhs, rhs)
    before = before_step(state)
    out, saved = _forward(call, lhs, rhs, before)
    return out, (saved, before, state[AGE])


def _backward_pass(
    call: Call, residuals: tuple[Any, ...], gradient: jax.Array
) -> tuple[jax.Array, jax.Array, State]:
    (saved, scales, seen, known), before, state_leaf = residuals
    (gradient,) = differentiated_once(type(call.scaling).__name__, gradient)
    role = OPERANDS[-1]
    values, _, products, of_gradient = _quantize(call, before, role, gradient, known, scales)
    factors = dict(zip(scales, products, strict=True))
    results = []
    for side in (0, 1):
        dims, order = call.dims.transposed(side)
        # The gradient of the result replaces operand `side`.
        lhs, rhs = (saved[0], values) if side else (values, saved[1])
        factor, dtype = factors[call.role(1 - side)], call.dtypes[side]
        product = _multiply(call, call.gemm_of_gradient(side), lhs, rhs, factor, dims, dtype)
        results.append(jnp.transpose(product, order))
    seen = {**seen, role: of_gradient}
    return results[0], results[1], next_state(_scaling(call), before, seen, state_leaf)


known_product.defvjp(_forward_pass, _backward_pass)
