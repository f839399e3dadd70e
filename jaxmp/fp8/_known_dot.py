"""FP8 dot of delayed scaling whose scales are known before the step."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
from jax import lax

from jaxmp._core import _compat
from jaxmp._core._typing import DTypeLike
from jaxmp.fp8._call import Call, differentiated_once, shield
from jaxmp.fp8._checkpoint import named, named_values
from jaxmp.fp8._copies import Source, quantize_copies
from jaxmp.fp8._dims import Dims
from jaxmp.fp8._known_scales import (
    Known,
    formats,
    independent,
    known_scales,
    products_of,
    resolve,
)
from jaxmp.fp8._operands import (
    COPIES,
    cast,
    has_transposed_copy,
    is_repeated,
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

_LAST_AXES = Dims(((1,), (1,)), ((), ()), (2, 2))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def known_product(
    call: Call, source: Source | None, lhs: jax.Array, rhs: jax.Array, state: State
) -> jax.Array:
    """Computes the dot of a layer whose state is active; see `known_scales`.

    Args:
      call: the dot; its scaling is a `DelayedScaling`.
      source: for the Pallas kernel, which quantizes matrices `[rows, k]` and `[k, n]`; None: XLA
        quantizes.
      lhs, rhs: high-precision operands.
      state: the active state of the layer, in float32 or `fm32`.
    """
    return _forward_pass(call, source, lhs, rhs, state)[0]


# ---------------------------------------------------------------------------
# Quantization of an operand
# ---------------------------------------------------------------------------


class Quantized(NamedTuple):
    """An operand of a layer, and what the quantization computed beside it."""

    values: jax.Array
    # Copy for dots that contract the rows, and from the Pallas kernel, the sums of the columns.
    transposed: jax.Array | None
    scale: jax.Array
    # Products of the factors of earlier operands of the layer and this one.
    products: tuple[jax.Array, ...]
    partials: jax.Array
    sums: jax.Array | None = None


def _resolve_and_quantize(
    xs: tuple[jax.Array, ...],
    state: OperandState,
    known: Known,
    earlier: tuple[jax.Array, ...],
    scaling: DelayedScaling,
    dtype: DTypeLike,
    source: Source | None,
    is_copied: bool,
) -> Quantized:
    """Quantizes `xs[0]`, or with the Pallas kernel `source.tensor(xs)`."""
    if source is None:
        x = xs[0]
        scale, products = resolve(scaling, known, dtype, earlier, lambda: measure_amax(x, state))
        values = cast(x, scale, scaling, dtype)
        transposed = _compat.row_major(values.T) if is_copied else None
        return Quantized(values, transposed, scale, products, measure_partials(x, state))
    # With the barrier, XLA computes the tensor again instead of storing it.
    measure = lambda: measure_amax(source.tensor(lax.optimization_barrier(xs)), state)
    scale, products = resolve(scaling, known, dtype, earlier, measure)
    written = quantize_copies(xs, scale, state, dtype, source)
    return Quantized(written.values, written.transposed, scale, products, *written[2:])


_STATIC = "scaling", "dtype", "source", "is_copied"
_BY_XLA = jitted_by_role(_resolve_and_quantize, *_STATIC)
_BY_PALLAS = jitted_by_role(_resolve_and_quantize, *_STATIC, prefix=COPIES)

# Role -> scale, and active amax and partial maxima for the next state.
_Scales = dict[str, jax.Array]
_Seen = dict[str, tuple[jax.Array, jax.Array]]


def _quantize(
    scaling: DelayedScaling,
    source: Source | None,
    state: OperandState,
    role: str,
    xs: tuple[jax.Array, ...],
    known: Known,
    earlier: _Scales,
    is_separate: bool = False,
    is_copied: bool = False,
) -> Quantized:
    """Quantizes an operand; `is_separate` if it is quantized before a loop."""
    scales = tuple(earlier.values())
    quantized = (_BY_XLA if source is None else _BY_PALLAS)[role](
        xs,
        state,
        independent(known) if is_separate else known,
        () if is_separate else scales,
        scaling=scaling,
        dtype=formats(scaling)[role],
        source=source,
        is_copied=is_copied,
    )
    if is_separate:
        products = products_of(scaling, known, scales, quantized.scale)
        quantized = quantized._replace(products=products)
    return quantized


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


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _operands(
    scaling: DelayedScaling,
    source: Source | None,
    kernel: int,
    is_repeated: bool,
    is_copied: bool,
    arrays: tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]],
    state: State,
) -> tuple[list[jax.Array], jax.Array, Saved]:
    """Quantizes input and kernel.

    Args:
      scaling: the scaling.
      source: that of the input.
      kernel: 0 or 1, the operand that is the kernel.
      is_repeated: the kernel is quantized before a loop.
      is_copied: the forward dot reads a transposed copy of the kernel.
      arrays: the arrays from which each operand is computed.
      state: the active state.

    Returns:
      The values of both operands and the product of their factors for the forward dot, and what the
      backward pass reads.
    """
    leaves, structure = jax.tree.flatten(arrays)
    arrays = structure.unflatten(differentiated_once(type(scaling).__name__, *leaves))
    saved: list[Any] = [None, None]
    forwards: list[Any] = [None, None]
    products: Any = ()
    scales: _Scales = {}
    seen: _Seen = {}
    before = to_float32(state)
    known = known_scales(scaling, before)
    # The kernel is quantized second; see `OPERANDS`.
    for side, role in zip((1 - kernel, kernel), OPERANDS, strict=False):
        own, is_kernel = of_operand(before, role), side == kernel
        flags = is_kernel and is_repeated, is_kernel and is_copied
        quantized = _quantize(scaling, source, own, role, arrays[side], known[role], scales, *flags)
        scales[role], products = quantized.scale, quantized.products
        seen[role] = known[role].amax, quantized.partials
        saved[side], forwards[side] = _named_copies(quantized, role)
        source = None if source is None else Source(source.interpret)
    role = OPERANDS[-1]
    history = state[f"{role}_amax_history"]
    values = saved[0], saved[1]
    return (
        forwards,
        named(products[0]),
        Saved(values, scales, seen, known[role], before[AGE], history),
    )


def _named_copies(quantized: Quantized, role: str) -> tuple[jax.Array, jax.Array]:
    """Returns the values that the backward pass reads, which are named, and those of the forward.

    The backward pass contracts the rows of the input, and the forward pass those of the kernel.
    """
    values, transposed = quantized.values, quantized.transposed
    if transposed is None:
        return named_values(values)
    of_backward, of_forward = (values, transposed) if role == "kernel" else (transposed, values)
    return named_values(of_backward)[0], of_forward


@functools.partial(jax.jit, static_argnums=(0, 1))
def _gradient(
    scaling: DelayedScaling, source: Source | None, arrays: tuple[jax.Array, ...], saved: Saved
) -> tuple[Quantized, dict[str, jax.Array], State]:
    """Quantizes the gradient of the result.

    Returns:
      The gradient, the products of its factor and those of the other operands, and the gradient of
      the active state.
    """
    arrays = differentiated_once(type(scaling).__name__, *arrays)
    role = OPERANDS[-1]
    own = OperandState(saved.age, saved.known.amax, saved.history)
    quantized = _quantize(scaling, source, own, role, arrays, saved.known, saved.scales)
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


def forward(
    call: Call,
    source: Source | None,
    lhs: tuple[jax.Array, ...],
    rhs: tuple[jax.Array, ...],
    state: State,
) -> tuple[jax.Array, Saved]:
    """Multiplies input and kernel; returns the result, and what `backward` reads.

    Args:
      call: the dot.
      source: that of the input; None: XLA quantizes.
      lhs, rhs: the arrays from which each operand is computed.
      state: the active state.
    """
    check_reducible(state[AGE])
    is_rows = call.kernel == 1 and call.dims.contract[1] == (0,)
    is_copied = source is None and is_rows and has_transposed_copy(rhs[0])
    (left, right), factor, saved = _operands(
        _scaling(call), source, call.kernel, is_repeated(), is_copied, (lhs, rhs), state
    )
    dims = call.dims.with_last_axis() if is_copied or source is not None else call.dims
    return _multiply(call, "fprop", left, right, factor, dims, call.out_dtype), saved


class Gradients(NamedTuple):
    """Gradients of the operands, of the active state, and the sums of the columns, if requested."""

    lhs: jax.Array
    rhs: jax.Array
    state: State
    sums: jax.Array | None


def backward(
    call: Call, source: Source | None, saved: Saved, arrays: tuple[jax.Array, ...]
) -> Gradients:
    """Returns the gradients of a dot.

    Args:
      call: the dot.
      source: that of the gradient of the result; None: XLA quantizes.
      saved: from `forward`.
      arrays: the arrays from which the gradient of the result is computed.
    """
    quantized, factors, state = _gradient(_scaling(call), source, arrays, saved)
    results = []
    for side in (0, 1):
        values, (dims, order) = quantized.values, call.dims.transposed(side)
        if side and quantized.transposed is not None:
            values, dims = quantized.transposed, _LAST_AXES
        # The gradient of the result replaces operand `side`.
        lhs, rhs = (saved.values[0], values) if side else (values, saved.values[1])
        factor, dtype = factors[call.role(1 - side)], call.dtypes[side]
        product = _multiply(call, call.gemm_of_gradient(side), lhs, rhs, factor, dims, dtype)
        results.append(lax.transpose(product, order))
    return Gradients(results[0], results[1], state, quantized.sums)


def _forward_pass(
    call: Call, source: Source | None, lhs: jax.Array, rhs: jax.Array, state: State
) -> tuple[jax.Array, Saved]:
    out, saved = forward(call, source, (lhs,), (rhs,), state)
    return shield(call, out, (lhs, rhs)[call.kernel].shape), saved


def _backward_pass(
    call: Call, source: Source | None, saved: Saved, gradient: jax.Array
) -> tuple[jax.Array, jax.Array, State]:
    gradients = backward(call, source, saved, (gradient,))
    return gradients.lhs, gradients.rhs, gradients.state


known_product.defvjp(_forward_pass, _backward_pass)
