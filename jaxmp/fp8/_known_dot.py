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
from jaxmp.fp8._known_scales import (
    Known,
    formats,
    known_scales,
    resolve,
)
from jaxmp.fp8._operands import (
    cast,
    jitted_by_role,
    measure_amax,
    measure_partials,
    multiply_values,
)
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
    return _forward(call, lhs, rhs, state)[0]


# ---------------------------------------------------------------------------
# Quantization of an operand
# ---------------------------------------------------------------------------


class Quantized(NamedTuple):
    """An operand of a layer, and what the quantization computed beside it."""

    values: jax.Array
    scale: jax.Array
    # Products of the factors of earlier operands of the layer and this one.
    products: tuple[jax.Array, ...]
    partials: jax.Array


def _resolve_and_quantize(
    x: jax.Array,
    state: OperandState,
    known: Known,
    earlier: tuple[jax.Array, ...],
    scaling: DelayedScaling,
    dtype: DTypeLike,
) -> Quantized:
    scale, products = resolve(scaling, known, dtype, earlier, lambda: measure_amax(x, state))
    values = cast(x, scale, scaling, dtype)
    return Quantized(values, scale, products, measure_partials(x, state))


_QUANTIZE = jitted_by_role(_resolve_and_quantize, "scaling", "dtype")

# Role -> scale, and active amax and partial maxima for the next state.
_Scales = dict[str, jax.Array]
_Seen = dict[str, tuple[jax.Array, jax.Array]]


def _quantize(
    scaling: DelayedScaling,
    state: OperandState,
    role: str,
    x: jax.Array,
    known: Known,
    earlier: _Scales,
) -> Quantized:
    scales, dtype = tuple(earlier.values()), formats(scaling)[role]
    return _QUANTIZE[role](x, state, known, scales, scaling=scaling, dtype=dtype)


# ---------------------------------------------------------------------------
# Operands of the dots
# ---------------------------------------------------------------------------


class Saved(NamedTuple):
    """Results of the forward pass for the backward pass."""

    values: tuple[jax.Array, jax.Array]
    scales: _Scales
    seen: _Seen
    known: Known  # of the output gradient
    age: jax.Array
    # A history of the active state, in the dtype of the state; all of them are equal.
    history: jax.Array


# Everything but the dots is jitted, so that layers with operands of the same shapes share one trace
# and, in StableHLO, one function. The dots are not, because each has its own line and name scope.


@functools.partial(jax.jit, static_argnums=(0, 1))
def _operands(
    scaling: DelayedScaling,
    kernel: int,
    arrays: tuple[jax.Array, jax.Array],
    state: State,
) -> tuple[list[jax.Array], jax.Array, Saved]:
    """Quantizes input and kernel.

    Args:
      scaling: the scaling.
      kernel: 0 or 1, the operand that is the kernel.
      arrays: the operands.
      state: the active state.

    Returns:
      The values of both operands and the product of their factors for the forward dot, and what the
      backward pass reads.
    """
    arrays = differentiated_once(type(scaling).__name__, *arrays)
    saved: list[Any] = [None, None]
    forwards: list[Any] = [None, None]
    products: Any = ()
    scales: _Scales = {}
    seen: _Seen = {}
    before = to_float32(state)
    known = known_scales(scaling, before)
    # The kernel is quantized second; see `OPERANDS`.
    for side, role in zip((1 - kernel, kernel), OPERANDS, strict=False):
        own = of_operand(before, role)
        quantized = _quantize(scaling, own, role, arrays[side], known[role], scales)
        scales[role], products = quantized.scale, quantized.products
        seen[role] = known[role].amax, quantized.partials
        saved[side], forwards[side] = named_values(quantized.values)
    role = OPERANDS[-1]
    history = state[f"{role}_amax_history"]
    values = saved[0], saved[1]
    return (
        forwards,
        named(products[0]),
        Saved(values, scales, seen, known[role], before[AGE], history),
    )


@functools.partial(jax.jit, static_argnums=0)
def _gradient(
    scaling: DelayedScaling, gradient: jax.Array, saved: Saved
) -> tuple[Quantized, dict[str, jax.Array], State]:
    """Quantizes the gradient of the result.

    Returns:
      The gradient, the products of its factor and those of the other operands, and the gradient of
      the active state.
    """
    (gradient,) = differentiated_once(type(scaling).__name__, gradient)
    role = OPERANDS[-1]
    own = OperandState(saved.age, saved.known.amax, saved.history)
    quantized = _quantize(scaling, own, role, gradient, saved.known, saved.scales)
    histories = {f"{operand}_amax_history": saved.history for operand in OPERANDS}
    seen = {**saved.seen, role: (saved.known.amax, quantized.partials)}
    state = next_state(scaling, {AGE: saved.age, **histories}, seen, saved.history)
    return quantized, dict(zip(saved.scales, quantized.products, strict=True)), state


# ---------------------------------------------------------------------------
# Forward and backward pass
# ---------------------------------------------------------------------------


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


def _forward(call: Call, lhs: jax.Array, rhs: jax.Array, state: State) -> tuple[jax.Array, Saved]:
    check_reducible(state[AGE])
    (left, right), factor, saved = _operands(_scaling(call), call.kernel, (lhs, rhs), state)
    out = _multiply(call, "fprop", left, right, factor, call.dims, call.out_dtype)
    return shield(call, out, (lhs, rhs)[call.kernel].shape), saved


def _backward(call: Call, saved: Saved, gradient: jax.Array) -> tuple[jax.Array, jax.Array, State]:
    quantized, factors, state = _gradient(_scaling(call), gradient, saved)
    results = []
    for side in (0, 1):
        dims, order = call.dims.transposed(side)
        # The gradient of the result replaces operand `side`.
        operands = (
            (saved.values[0], quantized.values) if side else (quantized.values, saved.values[1])
        )
        factor, dtype = factors[call.role(1 - side)], call.dtypes[side]
        product = _multiply(call, call.gemm_of_gradient(side), *operands, factor, dims, dtype)
        results.append(lax.transpose(product, order))
    return results[0], results[1], state


known_product.defvjp(_forward, _backward)
