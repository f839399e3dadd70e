"""FP8 dot of delayed scaling whose scales are known before the step."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
from jax import lax

from jaxmp._core._typing import DTypeLike
from jaxmp.fp8._call import Call, differentiated_once, shield
from jaxmp.fp8._checkpoint import named, named_values
from jaxmp.fp8._dims import Dims
from jaxmp.fp8._known_scales import Known, formats, independent, known_scales, products_of
from jaxmp.fp8._operands import RESOLVE_AND_QUANTIZE, multiply_values
from jaxmp.fp8._repeated import is_repeated
from jaxmp.fp8._scaling import DelayedScaling
from jaxmp.fp8._state import (
    AGE,
    OPERANDS,
    OperandState,
    State,
    check_reducible,
    next_state,
    of_operand,
    to_float32,
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def known_product(call: Call, lhs: jax.Array, rhs: jax.Array, state: State) -> jax.Array:
    """Computes the dot of a layer whose state is active; see `known_scales`.

    Args:
      call: the dot; its scaling is a `DelayedScaling`.
      lhs, rhs: high-precision operands.
      state: the active state of the layer, in float32 or `fm32`.
    """
    return _forward_pass(call, lhs, rhs, state)[0]


# Role -> scale, and active amax and partial maxima for the next state.
_Scales = dict[str, jax.Array]
_Seen = dict[str, tuple[jax.Array, jax.Array]]


class _Saved(NamedTuple):
    """Results of the forward pass for the backward pass."""

    values: tuple[jax.Array, jax.Array]
    scales: _Scales
    seen: _Seen
    known: Known  # of the output gradient
    age: jax.Array
    # A history of the active state, in the dtype of the state; all of them are equal.
    history: jax.Array


def _quantize(
    scaling: DelayedScaling,
    state: OperandState,
    role: str,
    x: jax.Array,
    known: Known,
    earlier: _Scales,
    is_separate: bool = False,
) -> tuple[jax.Array, jax.Array, tuple[jax.Array, ...], tuple[jax.Array, jax.Array]]:
    """Quantizes an operand; returns values, scale, products of factors, and a `_Seen` entry."""
    scales = tuple(earlier.values())
    values, scale, products, partials = RESOLVE_AND_QUANTIZE[role](
        x,
        state,
        independent(known) if is_separate else known,
        () if is_separate else scales,
        scaling=scaling,
        dtype=formats(scaling)[role],
    )
    if is_separate:
        products = products_of(scaling, known, scales, scale)
    return values, scale, products, (known.amax, partials)


# Everything but the dots is jitted, so that layers with operands of the same shapes share one trace
# and, in StableHLO, one function. The dots are not, because each has its own line and name scope.


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _operands(
    scaling: DelayedScaling,
    kernel: int,
    is_repeated: bool,
    arrays: tuple[jax.Array, jax.Array],
    state: State,
) -> tuple[list[jax.Array], jax.Array, _Saved]:
    """Quantizes input and kernel.

    Args:
      scaling: the scaling.
      kernel: 0 or 1, the operand that is the kernel.
      is_repeated: the kernel is quantized before a loop.
      arrays: high-precision operands.
      state: the active state.

    Returns:
      The values of both operands and the product of their factors for the forward dot, and what the
      backward pass reads.
    """
    arrays = differentiated_once(type(scaling).__name__, *arrays)
    values: list[Any] = [None, None]
    forwards: list[Any] = [None, None]
    products: Any = ()
    scales: _Scales = {}
    seen: _Seen = {}
    before = to_float32(state)
    known = known_scales(scaling, before)
    # The kernel is quantized second; see `OPERANDS`.
    for side, role in zip((1 - kernel, kernel), OPERANDS, strict=False):
        own, is_separate = of_operand(before, role), side == kernel and is_repeated
        quantized, scales[role], products, seen[role] = _quantize(
            scaling, own, role, arrays[side], known[role], scales, is_separate
        )
        values[side], forwards[side] = named_values(quantized)
    role = OPERANDS[-1]
    history = state[f"{role}_amax_history"]
    saved = _Saved((values[0], values[1]), scales, seen, known[role], before[AGE], history)
    return forwards, named(products[0]), saved


@functools.partial(jax.jit, static_argnums=0)
def _gradient(
    scaling: DelayedScaling, gradient: jax.Array, saved: _Saved
) -> tuple[jax.Array, dict[str, jax.Array], State]:
    """Quantizes the gradient of the result.

    Returns:
      Its values, the products of its factor and those of the other operands, and the gradient of
      the active state.
    """
    (gradient,) = differentiated_once(type(scaling).__name__, gradient)
    role = OPERANDS[-1]
    own = OperandState(saved.age, saved.known.amax, saved.history)
    values, _, products, of_gradient = _quantize(
        scaling, own, role, gradient, saved.known, saved.scales
    )
    histories = {f"{operand}_amax_history": saved.history for operand in OPERANDS}
    seen = {**saved.seen, role: of_gradient}
    state = next_state(scaling, {AGE: saved.age, **histories}, seen, saved.history)
    return values, dict(zip(saved.scales, products, strict=True)), state


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


def _forward_pass(
    call: Call, lhs: jax.Array, rhs: jax.Array, state: State
) -> tuple[jax.Array, _Saved]:
    check_reducible(state[AGE])
    (left, right), factor, saved = _operands(
        _scaling(call), call.kernel, is_repeated(), (lhs, rhs), state
    )
    out = _multiply(call, "fprop", left, right, factor, call.dims, call.out_dtype)
    return shield(call, out, (lhs, rhs)[call.kernel].shape), saved


def _backward_pass(
    call: Call, saved: _Saved, gradient: jax.Array
) -> tuple[jax.Array, jax.Array, State]:
    values, factors, state = _gradient(_scaling(call), gradient, saved)
    results = []
    for side in (0, 1):
        dims, order = call.dims.transposed(side)
        # The gradient of the result replaces operand `side`.
        lhs, rhs = (saved.values[0], values) if side else (values, saved.values[1])
        factor, dtype = factors[call.role(1 - side)], call.dtypes[side]
        product = _multiply(call, call.gemm_of_gradient(side), lhs, rhs, factor, dims, dtype)
        results.append(lax.transpose(product, order))
    return results[0], results[1], state


known_product.defvjp(_forward_pass, _backward_pass)
