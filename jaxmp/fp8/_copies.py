"""Quantization of a matrix to two copies, in which each dot contracts the last axis.

cuBLAS multiplies FP8 matrices that are contracted along their last axes. Of the three dots of a
linear layer, each operand is therefore needed in two layouts. One Pallas kernel writes both, and
can also compute the tensor, such as the result of an activation.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap

from jaxmp._core._dtypes import FLOAT32
from jaxmp._core._typing import DTypeLike
from jaxmp.fp8._cast_transpose import Prologue, Written, cast_transpose
from jaxmp.fp8._operands import measure_partials
from jaxmp.fp8._quantize import quantize
from jaxmp.fp8._state import OperandState


def identity(x: jax.Array) -> jax.Array:
    """Returns `x`: the prologue of tensors that are stored."""
    return x


class Source(NamedTuple):
    """Static arguments of a quantization by the Pallas kernel."""

    # Evaluate the kernel in JAX, on any device.
    interpret: bool
    # Computes the tensor from FP32 elements.
    prologue: Prologue = identity
    # Also compute the sums of the columns.
    sums: bool = False

    def tensor(self, xs: tuple[jax.Array, ...]) -> jax.Array:
        """Returns the tensor that is quantized."""
        if self.prologue is identity:
            return xs[0]
        return self.prologue(*(lax.convert_element_type(x, FLOAT32) for x in xs))


def quantize_copies(
    xs: tuple[jax.Array, ...],
    scale: jax.Array,
    state: OperandState,
    dtype: DTypeLike,
    source: Source,
) -> Written:
    """Quantizes `source.tensor(xs)`.

    Args:
      xs: matrices of one shape.
      scale: float32 scalar.
      state: active state of the operand, with as many partial maxima as the result has.
      dtype: the FP8 format.
      source: static arguments.
    """
    count = state.amax_history.shape[0]
    return Written(*_by_pallas(source, dtype, count)(xs, scale, state.age))


@functools.cache
def _by_pallas(source: Source, dtype: DTypeLike, count: int) -> Any:
    """Returns a function of `xs`, the scale and the age of the state that runs the kernel."""

    @custom_vmap
    def run(xs: tuple[jax.Array, ...], scale: jax.Array, age: jax.Array) -> Any:
        del age
        written = cast_transpose(
            xs,
            scale,
            dtype,
            prologue=source.prologue,
            count=count,
            sums=source.sums,
            interpret=source.interpret,
        )
        padding = [(0, count - written.partials.size, 0)]
        return tuple(written._replace(partials=lax.pad(written.partials, np.float32(0), padding)))

    def by_xla(xs: tuple[jax.Array, ...], scale: jax.Array) -> Any:
        tensor = source.tensor(xs)
        values = quantize(tensor, scale, dtype)
        return values, values.T, jnp.sum(tensor, axis=0) if source.sums else None

    # The kernel is not mapped: XLA quantizes the examples.
    @run.def_vmap
    def _(axis_size: int, in_batched: list[Any], xs: Any, scale: Any, age: Any) -> Any:
        in_axes = jax.tree.map(lambda batched: 0 if batched else None, tuple(in_batched))
        mapped = functools.partial(jax.vmap, axis_size=axis_size)
        values, transposed, sums = mapped(by_xla, in_axes=in_axes[:2])(xs, scale)
        own = 0 if in_batched[2] else None
        like = jnp.zeros((count, 1), FLOAT32)
        measure = lambda xs, age: measure_partials(source.tensor(xs), OperandState(age, age, like))
        partials = mapped(measure, in_axes=(in_axes[0], own), out_axes=own)(xs, age)
        results = values, transposed, partials, sums
        return results, (True, True, in_batched[2], True if source.sums else None)

    return run
