"""Pallas kernel that reads a tensor once, and writes it and its transpose in FP8, and maxima."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmp._core import _compat
from jaxmp._core._dtypes import FLOAT32, FLOAT64
from jaxmp._core._typing import DTypeLike

# Rows and columns of a tile. A thread block reads one or several tiles of a row of tiles.
TILE = 64
_EXPONENT = np.int32(0x7F800000)

# Function of FP32 tiles whose result is quantized.
Prologue = Callable[..., jax.Array]


class Written(NamedTuple):
    """Results of the kernel for tensors of shape `[rows, columns]`."""

    values: jax.Array  # FP8, [rows, columns]
    transposed: jax.Array  # FP8, [columns, rows]
    partials: jax.Array  # float32, at most `count` magnitudes, of which the largest is the amax
    sums: jax.Array | None  # float32, [columns], of the values before quantization


def explain_fallback(*arrays: jax.Array, interpret: bool, count: int = 4096) -> str:
    """Returns the reason why the kernel cannot quantize matrices, or "" if it can.

    Args:
      *arrays: the matrices; their dtypes and shapes matter.
      interpret: evaluate the kernel in JAX, on any device.
      count: largest number of partial maxima.
    """
    if _compat.target() != "gpu" and not interpret:
        return f"compiled for a {_compat.target().upper()}, not for CUDA"
    for x in arrays:
        if x.dtype == FLOAT64:
            return "the kernel reads 16 or 32 bits per element, not float64"
        if any(size % TILE for size in x.shape):
            return f"sizes {list(x.shape)} are not multiples of {TILE}"
        if x.shape[0] // TILE > count:
            return f"{x.shape[0]} rows are more than {count * TILE}"
        mesh = getattr(jax.typeof(x).sharding, "mesh", None)
        if mesh is not None and mesh.size > 1:
            return "on several devices, where XLA would gather the operands of the kernel"
    return ""


def cast_transpose(
    xs: tuple[jax.Array, ...],
    scale: jax.Array,
    dtype: DTypeLike,
    *,
    prologue: Prologue,
    count: int,
    sums: bool,
    interpret: bool,
) -> Written:
    """Quantizes `prologue(*xs)` with one read of `xs`.

    Args:
      xs: matrices of one shape, whose sizes are multiples of `TILE`, in 16 or 32 bits.
      scale: float32 scalar.
      dtype: the FP8 format.
      prologue: function of FP32 tiles.
      count: largest number of partial maxima.
      sums: also compute the sums of the columns.
      interpret: evaluate the kernel in JAX, on any device.
    """
    pl = _compat.load_pallas()
    rows, columns = xs[0].shape
    tiles = _tiles_per_block(rows, columns, count)
    width, grid = TILE * tiles, (rows // TILE, columns // (TILE * tiles))
    block = pl.BlockSpec((TILE, width), lambda i, j: (i, j))
    out_specs = [
        block,
        pl.BlockSpec((width, TILE), lambda i, j: (j, i)),
        pl.BlockSpec((1, 1), lambda i, j: (i, j)),
    ]
    shapes = [
        jax.ShapeDtypeStruct((rows, columns), dtype),
        jax.ShapeDtypeStruct((columns, rows), dtype),
        jax.ShapeDtypeStruct(grid, jnp.int32),
    ]
    if sums:
        out_specs.append(pl.BlockSpec((1, width), lambda i, j: (i, j)))
        shapes.append(jax.ShapeDtypeStruct((grid[0], columns), FLOAT32))
    kernel = pl.pallas_call(
        functools.partial(
            _kernel,
            number=len(xs),
            prologue=prologue,
            limit=float(jnp.finfo(dtype).max),
            tiles=tiles,
        ),
        grid=grid,
        in_specs=[block] * len(xs) + [pl.BlockSpec((1,), lambda i, j: (0,))],
        out_specs=out_specs,
        out_shape=shapes,
        compiler_params=pl.triton.CompilerParams(num_warps=4),
        interpret=interpret,
        name="jaxmp_cast_transpose",
    )
    with _compat.described_gpu():
        values, transposed, bits, *rest = kernel(*xs, scale.reshape(1))
    partials = lax.bitcast_convert_type(bits, FLOAT32).reshape(-1)
    return Written(values, transposed, partials, jnp.sum(rest[0], axis=0) if rest else None)


def _tiles_per_block(rows: int, columns: int, count: int) -> int:
    """Returns the smallest number of tiles with which at most `count` blocks cover a matrix."""
    across = columns // TILE
    return next(
        n for n in range(1, across + 1) if across % n == 0 and rows // TILE * (across // n) <= count
    )


def _kernel(*refs: Any, number: int, prologue: Prologue, limit: float, tiles: int) -> None:
    pl = _compat.load_pallas()
    inputs, scale_ref = refs[:number], refs[number]
    values_ref, transposed_ref, bits_ref, *sums_ref = refs[number + 1 :]
    scale = scale_ref[0]

    def tile(index: Any, largest: jax.Array) -> jax.Array:
        at = pl.ds(index * TILE, TILE)
        x = prologue(*(ref[:, at].astype(FLOAT32) for ref in inputs))
        # By its bits: the maximum of floats in Triton drops NaN.
        bits = lax.bitcast_convert_type(jnp.abs(x), jnp.int32)
        clipped = jnp.clip(x * scale, -limit, limit)
        finite = jnp.where(bits < _EXPONENT, clipped, jnp.full_like(clipped, math.nan))
        values = finite.astype(values_ref.dtype)
        values_ref[:, at] = values
        transposed_ref[at, :] = values.T
        for ref in sums_ref:
            ref[0, at] = jnp.sum(x, axis=0)
        return jnp.maximum(largest, bits)

    largest = jnp.zeros((TILE, TILE), jnp.int32)
    largest = tile(0, largest) if tiles == 1 else lax.fori_loop(0, tiles, tile, largest)
    bits_ref[...] = jnp.full((1, 1), jnp.max(largest), jnp.int32)
