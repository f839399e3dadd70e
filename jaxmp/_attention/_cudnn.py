"""Attention by cuDNN's fused kernel, through `jax.nn.dot_product_attention`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxmp._attention._arguments import NO_KEY, Arguments, with_scaled_query
from jaxmp._attention._plain import whole_mask
from jaxmp._attention._sharding import one_sharding

# cuDNN takes heads whose size is a multiple of it.
HEAD_MULTIPLE = 8


def padded_size(head: int, value: int) -> int:
    """The head size that cuDNN is given: one for all operands, a multiple of 8."""
    return -(-max(head, value) // HEAD_MULTIPLE) * HEAD_MULTIPLE


def cudnn_attention(given: Arguments) -> Any:
    """`[B, T, N, V]` in the operands' dtype; queries that see no key give zero.

    With `settings.residual`, also the log-sum-exp `[B, T, N]`, which JAX rounds to that dtype.
    """
    given = with_scaled_query(given)
    settings = given.settings
    _, _, queries, keys = given.logits_shape
    size = given.value.shape[-1]
    padded = padded_size(given.query.shape[-1], size)
    query, key, value = (_padded(a, padded) for a in (given.query, given.key, given.value))
    seeing = _seeing(given)
    if seeing is not None:
        # Selected on both sides: no kernel is trusted with what it does to rows of nothing.
        query = jnp.where(seeing, query, 0)
    operands = {
        "query": query,
        "key": key,
        "value": value,
        "bias": _whole(given.bias, queries, keys),
        "mask": _whole(given.mask, queries, keys),
        "query_seq_lengths": given.query_lengths,
        "key_value_seq_lengths": given.key_lengths,
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
    """Zeros behind each head: they add nothing to a product, and are cut off the result."""
    missing = size - array.shape[-1]
    return jnp.pad(array, ((0, 0), (0, 0), (0, 0), (0, missing))) if missing else array


def _whole(array: Any, queries: int, keys: int) -> Any:
    """Broadcast over positions: cuDNN wants the last two dimensions whole."""
    if array is None:
        return None
    return jnp.broadcast_to(array, (*array.shape[:2], queries, keys))


def _seeing(given: Arguments) -> jax.Array | None:
    """Bool `[B|1, T, N|1, 1]`: the queries that see a key; None if it is known that all do."""
    if not given.may_mask_rows:
        return None
    _, _, queries, keys = given.logits_shape
    if given.mask is not None:
        mask = whole_mask(given)
        assert mask is not None
        return mask.any(-1).transpose(0, 2, 1)[..., None]
    rows = jnp.arange(queries, dtype=jnp.int32)[None, :]
    last = jnp.full((1, 1), keys, jnp.int32) - 1
    if given.key_lengths is not None:
        last = given.key_lengths[:, None] - 1
    window = given.settings.window
    first = jnp.zeros_like(rows) if window is None else jnp.maximum(rows - window[0], 0)
    seeing = first <= last
    if given.query_lengths is not None:
        seeing = seeing & (rows < given.query_lengths[:, None])
    return seeing[..., None, None]
