"""Attention by JAX's splash attention: fused kernels for TPUs, written in Pallas.

XLA cannot partition a Pallas kernel, and libtpu supports no custom partitioning. `_explicit`
therefore maps the kernels over all axes of an explicit mesh. `_choice` refuses automatic axes,
whose sharding is not known while a program is traced.

The kernels read `[heads, positions, size]`, and positions in blocks. Queries and keys are padded
with zeros to whole blocks. Padded keys, and those beyond a length, are hidden by segment ids.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxmp._attention._arguments import Arguments, with_scaled_query
from jaxmp._attention._plain import seeing_queries
from jaxmp._core._compat import load_splash_attention
from jaxmp._core._dtypes import wide_dtype

# Positions per block are a multiple of the first number, up to the second. Larger blocks exceed the
# 16 MiB of vector memory that XLA grants a kernel on a TPU v5e.
LEAST_BLOCK, _LARGEST_BLOCK = 128, 512

Arrays = dict[str, jax.Array]

_OPERANDS = ("query", "key", "value")


class _Call(NamedTuple):
    """Static settings of a call. Hashable."""

    is_causal: bool
    window: tuple[int, int] | None
    # True to run the kernels in Pallas' interpreter, on any device.
    interpret: bool


def splash_attention(args: Arguments, interpret: bool = False) -> jax.Array:
    """Computes attention with JAX's splash attention.

    Args:
      args: the arguments, to which no blocker of `_choice` applies.
      interpret: True to run the kernels in Pallas' interpreter, on any device.

    Returns:
      `[B, T, N, V]` in the operands' dtype, zero for queries that see no key.
    """
    args = with_scaled_query(args)
    # The kernel has no scale. A power of two is exact; another one rounds the query.
    wide = args.query.astype(wide_dtype(args.query.dtype))
    query = (wide * wide.dtype.type(args.settings.scale)).astype(args.query.dtype)
    arrays = {"query": query, "key": args.key, "value": args.value}
    if args.key_lengths is not None:
        arrays["key_lengths"] = args.key_lengths
    call = _Call(args.settings.is_causal, args.settings.window, interpret)
    out: Any = _attention(call, arrays)
    seeing = seeing_queries(args)
    return out if seeing is None else jnp.where(seeing, out, 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(call: _Call, arrays: Arrays) -> jax.Array:
    return _forward_rule(call, arrays)[0]


def _forward_rule(call: _Call, arrays: Arrays) -> tuple[jax.Array, Arrays]:
    results = _forward(call, arrays)
    return results["out"], {**arrays, **results}


def _backward_rule(call: _Call, saved: Arrays, d_out: jax.Array) -> tuple[dict[str, Any]]:
    gradients = _backward(call, {**saved, "gradient": d_out})
    return ({**dict.fromkeys(set(saved) & {"key_lengths"}), **gradients},)


_attention.defvjp(_forward_rule, _backward_rule)


# ---------------------------------------------------------------------------
# Kernels
# ---------------------------------------------------------------------------


def _forward(call: _Call, arrays: Arrays) -> Arrays:
    """Returns `out` `[B, T, N, V]`, and the log-sum-exp `residual` `[B, T, N]` in FP32."""
    queries = arrays["query"].shape[1]
    kernel, ids = _kernel_of(call, arrays), _segment_ids(call, arrays)
    operands = (_padded(arrays[name]) for name in _OPERANDS)
    out, (residual,) = jax.vmap(kernel)(*operands, ids)
    return {
        "out": out.swapaxes(1, 2)[:, :queries],
        "residual": residual.swapaxes(1, 2)[:, :queries],
    }


def _backward(call: _Call, arrays: Arrays) -> Arrays:
    """Returns the gradients of `query`, `key` and `value`."""
    kernel, ids = _kernel_of(call, arrays), _segment_ids(call, arrays)
    splash = load_splash_attention()
    assert splash is not None
    options = kernel.kwargs | {"save_residuals": False}
    names = ("save_residuals", "mask_value", "is_mqa", "block_sizes", "residual_checkpoint_name")
    names += ("mask_function", "attn_logits_soft_cap", "interpret")
    settings, infos = [options[name] for name in names], (kernel.dq_mask_info, kernel.dkv_mask_info)

    def gradients(*saved: Any) -> Any:
        query, key, value, ids, out, residual, d_out = saved
        residuals = (query, key, value, ids, None, out, residual, *infos)
        return splash.backward(*settings, residuals, d_out)[3:6]

    *operands, out, d_out = (_padded(arrays[name]) for name in (*_OPERANDS, "out", "gradient"))
    residual = _padded(arrays["residual"][..., None])[..., 0]
    results = jax.vmap(gradients)(*operands, ids, out, residual, d_out)
    return {
        name: result.swapaxes(1, 2)[:, : arrays[name].shape[1]]
        for name, result in zip(_OPERANDS, results, strict=True)
    }


def padded_positions(positions: int) -> int:
    """Returns the number of positions of all blocks; long sequences have no blocks of 128."""
    unit = LEAST_BLOCK if positions <= _LARGEST_BLOCK else 2 * LEAST_BLOCK
    return -(-positions // unit) * unit


def _block_size(positions: int) -> int:
    """Returns the number of positions per block."""
    sizes = range(_LARGEST_BLOCK, 0, -LEAST_BLOCK)
    return next(size for size in sizes if padded_positions(positions) % size == 0)


def _padded(array: jax.Array) -> jax.Array:
    """Pads positions to whole blocks: `[B, T, heads, size]` to `[B, heads, blocks, size]`."""
    missing = padded_positions(array.shape[1]) - array.shape[1]
    return jnp.pad(array.swapaxes(1, 2), ((0, 0), (0, 0), (0, missing), (0, 0)))


def _kernel_of(call: _Call, arrays: Arrays) -> Any:
    """Makes the kernels for the positions of the arrays."""
    splash = load_splash_attention()
    assert splash is not None
    package = splash.package
    queries, keys = arrays["query"].shape[1], arrays["key"].shape[1]
    rows, columns = _block_size(queries), _block_size(keys)
    shape = (padded_positions(queries), padded_positions(keys))
    if call.window is not None:
        mask = package.LocalMask(shape, call.window, 0)
    else:
        mask = package.CausalMask(shape) if call.is_causal else package.FullMask(shape)
    blocks = package.BlockSizes(
        block_q=rows,
        block_kv=columns,
        block_q_dkv=rows,
        block_kv_dkv=columns,
        block_q_dq=rows,
        block_kv_dq=columns,
    )
    return package.make_splash_mha(
        package.MultiHeadMask([mask]),  # one mask for all heads
        block_sizes=blocks,
        head_shards=1,
        q_seq_shards=1,
        save_residuals=True,
        interpret=call.interpret,
    )


def _segment_ids(call: _Call, arrays: Arrays) -> Any:
    """Returns segment ids `[B, blocks]` that hide keys; None if the mask hides all padded keys."""
    splash = load_splash_attention()
    assert splash is not None
    (batch, queries), keys = arrays["query"].shape[:2], arrays["key"].shape[1]
    rows, columns = padded_positions(queries), padded_positions(keys)
    lengths = arrays.get("key_lengths")
    if lengths is None and (columns == keys or (call.is_causal and queries <= keys)):
        return None
    if lengths is None:
        lengths = jnp.full((batch,), keys, jnp.int32)
    seen = lax.broadcasted_iota(jnp.int32, (batch, columns), 1) < lengths[:, None]
    return splash.package.SegmentIds(jnp.ones((batch, rows), jnp.int32), seen.astype(jnp.int32))
