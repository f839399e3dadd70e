"""Quantization of a matrix to two copies, in which each dot contracts the last axis.

cuBLAS multiplies FP8 matrices that are contracted along their last axes. Of the three dots of a
linear layer, each operand is therefore needed in two layouts. The copies are written by XLA, or by
one Pallas kernel, which can also compute the tensor, such as the result of an activation.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap

from jaxmp._core import _compat
from jaxmp._core._dtypes import FLOAT32
from jaxmp._core._typing import DTypeLike
from jaxmp.fp8._cast_transpose import Prologue, cast_transpose
from jaxmp.fp8._checkpoint import named_values
from jaxmp.fp8._dims import Dims
from jaxmp.fp8._known_scales import Known, factor_of, resolve, scale_of
from jaxmp.fp8._operands import jitted_by_role, measure_amax, measure_partials, multiply_values
from jaxmp.fp8._quantize import quantize_finite
from jaxmp.fp8._scaling import DelayedScaling, Scaling
from jaxmp.fp8._state import OperandState

_LAST_AXES = Dims(((1,), (1,)), ((), ()), (2, 2))


class Source(NamedTuple):
    """Static arguments of a quantization."""

    scaling: Scaling
    dtype: Any
    # Computes the tensor from FP32 elements.
    prologue: Prologue
    # "xla", "pallas", or "interpret" for the Pallas kernel on any device.
    kernels: str
    # Also compute the sums of the columns.
    sums: bool = False


class Copies(NamedTuple):
    """A quantized matrix; the copy that a pass does not read may be None."""

    values: Any
    transposed: Any
    scale: jax.Array


class Quantized(NamedTuple):
    """Result of `QUANTIZE_COPIES`."""

    copies: Copies
    # Products of the factors of earlier operands of the layer and this one.
    products: tuple[jax.Array, ...]
    partials: jax.Array | None
    sums: jax.Array | None


def identity(x: jax.Array) -> jax.Array:
    """Returns `x`: the prologue of tensors that are stored."""
    return x


def _quantize_copies(
    xs: tuple[jax.Array, ...],
    state: OperandState | None,
    known: Known | None,
    earlier: tuple[jax.Array, ...],
    source: Source,
    stored: jax.Array | None = None,
) -> Quantized:
    """Quantizes `source.prologue(*xs)`.

    Args:
      xs: matrices of one shape.
      state: active state of the operand; None for `CurrentScaling`.
      known: scale that is known before the step; None for `CurrentScaling`.
      earlier: scales of the operands of the layer that are already quantized.
      source: static arguments.
      stored: for scalings without known scales, the amax of the tensor; None: measure it.
    """
    # With the barrier, XLA computes the tensor again instead of storing it.
    again = lambda: _computed(source, lax.optimization_barrier(xs))
    if state is None or known is None:
        assert not isinstance(source.scaling, DelayedScaling)
        largest = measure_amax(again(), None) if stored is None else stored
        scale = scale_of(largest, source.scaling, source.dtype)
        products = tuple(factor_of(each) * factor_of(scale) for each in earlier)
    else:
        measure = lambda: measure_amax(again(), state)
        assert isinstance(source.scaling, DelayedScaling)
        scale, products = resolve(source.scaling, known, source.dtype, earlier, measure)
    if source.kernels == "xla":
        values, transposed = _by_xla(xs, scale, source)
        tensor = xs[0] if source.prologue is identity else again()
        partials = None if state is None else measure_partials(tensor, state)
        sums = jnp.sum(_computed(source, xs), axis=0) if source.sums else None
        return Quantized(Copies(values, transposed, scale), products, partials, sums)
    count = 4096 if state is None else state.amax_history.shape[0]
    age = jnp.zeros((), FLOAT32) if state is None else state.age
    values, transposed, partials, sums = _by_pallas(source, count)(xs, scale, age)
    own = partials if state is not None else None
    return Quantized(Copies(values, transposed, scale), products, own, sums)


# Prefix of the names of the jitted functions; the operand's role follows.
COPIES = "jaxmp_fp8_copies_"
QUANTIZE_COPIES = jitted_by_role(_quantize_copies, "source", prefix=COPIES)


def _computed(source: Source, xs: tuple[jax.Array, ...]) -> jax.Array:
    if source.prologue is identity:
        return xs[0]
    return source.prologue(*(lax.convert_element_type(x, FLOAT32) for x in xs))


def _by_xla(
    xs: tuple[jax.Array, ...], scale: jax.Array, source: Source
) -> tuple[jax.Array, jax.Array]:
    # Without the constraint, XLA would write the first copy transposed, and transpose it back.
    on_gpu = _compat.target() == "gpu"
    row_major = _compat.row_major if on_gpu else lambda x: x
    values = row_major(quantize_finite(_computed(source, xs), scale, source.dtype))
    if isinstance(source.scaling, DelayedScaling):
        # With the barrier, XLA computes the amax in the kernel that quantizes.
        values = lax.optimization_barrier(values)
    return values, row_major(values.T)


@functools.cache
def _by_pallas(source: Source, count: int) -> Any:
    """Returns a function of `xs`, the scale and the age of the state that runs the kernel."""

    @custom_vmap
    def quantize(xs: tuple[jax.Array, ...], scale: jax.Array, age: jax.Array) -> Any:
        del age
        written = cast_transpose(
            xs,
            scale,
            source.dtype,
            prologue=source.prologue,
            count=count,
            sums=source.sums,
            interpret=source.kernels == "interpret",
        )
        padding = [(0, count - written.partials.size, 0)]
        partials = lax.pad(written.partials, np.float32(0), padding)
        return written.values, written.transposed, partials, written.sums

    # The kernel is not mapped: XLA quantizes the examples.
    @quantize.def_vmap
    def _(axis_size: int, in_batched: list[Any], xs: Any, scale: Any, age: Any) -> Any:
        in_axes = jax.tree.map(lambda batched: 0 if batched else None, tuple(in_batched))
        mapped = functools.partial(jax.vmap, axis_size=axis_size)
        copies = mapped(lambda xs, scale: _by_xla(xs, scale, source), in_axes=in_axes[:2])
        values, transposed = copies(xs, scale)
        own = 0 if in_batched[2] else None
        measure = lambda xs, age: measure_partials(
            _computed(source, xs), OperandState(age, age, jnp.zeros((count, 1), FLOAT32))
        )
        partials = mapped(measure, in_axes=(in_axes[0], own), out_axes=own)(xs, age)
        sums = None
        if source.sums:
            total = lambda xs: jnp.sum(_computed(source, xs), axis=0)
            sums = mapped(total, in_axes=in_axes[:1])(xs)
        return (values, transposed, partials, sums), (
            *(True, True, in_batched[2]),
            True if source.sums else None,
        )

    return quantize


def keep(copies: Copies, *, transposed: bool) -> tuple[Copies, Copies]:
    """Names the copy that the backward pass reads, so that `jax.checkpoint` can save it.

    Returns:
      The copies for the backward pass and for the forward pass.
    """
    saved, same = named_values(copies.transposed if transposed else copies.values)
    if transposed:
        return Copies(None, saved, copies.scale), Copies(copies.values, None, copies.scale)
    return Copies(saved, None, copies.scale), Copies(same, copies.transposed, copies.scale)


def multiply_last(
    lhs: jax.Array,
    rhs: jax.Array,
    factor: jax.Array,
    dtype: DTypeLike,
    *,
    accurate: bool,
) -> jax.Array:
    """Multiplies `[m, k]` and `[n, k]` FP8 matrices and a factor to `[m, n]`."""
    return multiply_values(lhs, rhs, factor, _LAST_AXES, dtype, accurate=accurate, shared=0)
