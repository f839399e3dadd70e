"""Attention by cuDNN's fused kernel, through `jax.nn.dot_product_attention`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxmp._attention._arguments import NO_KEY, Arguments, with_scaled_query
from jaxmp._attention._plain import seeing_queries
from jaxmp._attention._sharding import one_sharding

# Head sizes must be multiples of this.
HEAD_MULTIPLE = 8


def padded_size(head: int, value: int) -> int:
    """Returns the head size after padding: one multiple of 8 for query, key and value."""
    return -(-max(head, value) // HEAD_MULTIPLE) * HEAD_MULTIPLE


def cudnn_attention(args: Arguments) -> Any:
    """Computes attention with cuDNN's fused kernel.

    Returns:
      `[B, T, N, V]` in the operands' dtype, zero for queries that see no key. With
      `settings.residual`, a pair of that and the log-sum-exp `[B, T, N]`, which JAX rounds to the
      same dtype.
    """
    args = with_scaled_query(args)
    settings = args.settings
    _, _, queries, keys = args.logits_shape
    size = args.value.shape[-1]
    padded = padded_size(args.query.shape[-1], size)
    query, key, value = (_padded(a, padded) for a in (args.query, args.key, args.value))
    seeing = seeing_queries(args)
    if seeing is not None:
        # Queries that see no key are replaced by zero here, and their results below. So neither
        # results nor gradients depend on how the kernel treats such rows.
        query = jnp.where(seeing, query, 0)
    operands = {
        "query": query,
        "key": key,
        "value": value,
        "bias": _whole(args.bias, queries, keys),
        "mask": _whole(args.mask, queries, keys),
        "query_seq_lengths": args.query_lengths,
        "key_value_seq_lengths": args.key_lengths,
    }
    attend: Any = jax.nn.dot_product_attention
    result = attend(
        **one_sharding(operands),
        is_causal=settings.is_causal,
        scale=settings.scale,
        local_window_size=settings.window,
        implementation="cudnn",
        return_residual=settings.residual,
    )
    out, residual = result if settings.residual else (result, None)
    out = one_sharding({"query": out})["query"][..., :size]
    out = out if seeing is None else jnp.where(seeing, out, 0)
    if residual is None:
        return out
    residual = lax.stop_gradient(residual)
    return out, residual if seeing is None else jnp.where(seeing[..., 0], residual, NO_KEY)


def _padded(array: jax.Array, size: int) -> jax.Array:
    """Pads each head to `size` with zeros, which do not change a matmul."""
    missing = size - array.shape[-1]
    return jnp.pad(array, ((0, 0), (0, 0), (0, 0), (0, missing))) if missing else array


def _whole(array: jax.Array | None, queries: int, keys: int) -> jax.Array | None:
    """Broadcasts the last two dimensions to `[T, S]`, as cuDNN requires."""
    if array is None:
        return None
    return jnp.broadcast_to(array, (*array.shape[:2], queries, keys))
