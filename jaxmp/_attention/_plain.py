"""Attention with the logits of all pairs in memory; logits, mask and softmax are in FP32.

Shape suffixes: B any batch dimensions, T query positions, S key positions, N query heads, K key
heads, H head size of query and key, V head size of value.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxmp import _core
from jaxmp._attention._arguments import NO_KEY, AttentionArguments, masks_at


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    bias: jax.Array | None,
    mask: jax.Array | None,
    dropout_rate: float,
    dropout_rng: Any,
    broadcast_dropout: bool,
    sow: Callable[[jax.Array], Any] | None = None,
    precision: lax.PrecisionLike = None,
    scale: float | jax.Array | None = None,
    wide_gradients: bool = False,
    qk_einsum: Callable[..., jax.Array] | None = None,
    value_einsum: Callable[..., jax.Array] | None = None,
    residual: bool = False,
) -> Any:
    """Computes attention in plain JAX, for `xla_attention` and for Flax layers.

    Args:
      query: `[B..., T, N, H]`.
      key: `[B..., S, K, H]`, of the dtype of `query`. N is a multiple of K.
      value: `[B..., S, K, V]`, of the dtype of `query`.
      bias: added to the scaled logits; broadcastable to `[B..., N, T, S]`.
      mask: bool, broadcastable to `[B..., N, T, S]`; False hides a key from a query.
      dropout_rate: probability that a weight is dropped.
      dropout_rng: key of the dropout; None for no dropout.
      broadcast_dropout: True to drop the same weights for all batch entries and heads.
      sow: called with the weights before dropout.
      precision: of the matmuls, as in `jnp.einsum`.
      scale: of the logits; None for `H ** -0.5`.
      wide_gradients: True to multiply the gradient of the logits in FP32.
      qk_einsum, value_einsum: functions to use instead of `jnp.einsum`, such as those of a layer.
      residual: True to return the log-sum-exp of the logits too.

    Returns:
      `[B..., T, N, V]` in the dtype of `query`, zero for queries that see no key. With `residual`,
      a pair of that and the log-sum-exp `[B..., T, N]`, in FP32 (float64 for float64 operands) and
      without a gradient.
    """
    if key.shape[-2] != query.shape[-2]:
        key, value = (_repeat_heads(array, query.shape[-2]) for array in (key, value))
    logits = _logits(query, key, precision, qk_einsum, wide_gradients)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if isinstance(scale, jax.Array):
        logits *= scale.astype(logits.dtype)
    else:
        logits *= logits.dtype.type(scale)
    logits, seeing = _masked(logits, bias, mask)
    weights = jax.nn.softmax(logits).astype(query.dtype)
    if sow is not None:
        sow(weights)
    if dropout_rng is not None and dropout_rate != 0.0:
        shape = weights.shape
        if broadcast_dropout:
            shape = (1,) * (weights.ndim - 2) + shape[-2:]
        keep = jax.random.bernoulli(dropout_rng, 1.0 - dropout_rate, shape)
        weights *= keep.astype(weights.dtype) / jnp.asarray(1.0 - dropout_rate, weights.dtype)
    einsum = value_einsum or functools.partial(jnp.einsum, precision=precision)
    out = einsum("...hqk,...khd->...qhd", weights, value)
    # A query that sees no key gives zero. The selection also blocks its gradient, so that none
    # reaches the values or the logits.
    seeing = None if seeing is None else jnp.swapaxes(seeing, -3, -2)
    out = out if seeing is None else jnp.where(seeing, out, 0)
    if not residual:
        return out
    sums = jnp.swapaxes(jax.nn.logsumexp(lax.stop_gradient(logits), axis=-1), -2, -1)
    return out, sums if seeing is None else jnp.where(seeing[..., 0], sums, NO_KEY)


def _repeat_heads(array: jax.Array, heads: int) -> jax.Array:
    """Repeats each key head N / K times in a row: `[B..., S, K, H]` -> `[B..., S, N, H]`."""
    if heads % array.shape[-2]:
        raise ValueError(
            f"query has {heads} heads, key and value have {array.shape[-2]}; grouped-query "
            "attention needs a multiple."
        )
    return jnp.repeat(array, heads // array.shape[-2], axis=-2)


def _logits(
    query: jax.Array,
    key: jax.Array,
    precision: lax.PrecisionLike,
    einsum: Callable[..., jax.Array] | None,
    wide_gradients: bool,
) -> jax.Array:
    """Computes QK^T `[B..., N, T, S]` in FP32; in float64 for float64 operands."""
    wide = _core.wide_dtype(query.dtype)
    if einsum is not None:
        return einsum("...qhd,...khd->...hqk", query, key).astype(wide)
    heads, size = query.ndim - 2, query.ndim - 1
    batch = (*range(query.ndim - 3), heads)
    product = functools.partial(
        lax.dot_general,
        dimension_numbers=(((size,), (size,)), (batch, batch)),
        precision=precision,
    )
    if query.dtype == wide:
        return product(query, key)
    if wide_gradients:
        return product(query, key, preferred_element_type=wide)
    return _core.wide_product(product, query, key, wide)


def _masked(
    logits: jax.Array, bias: jax.Array | None, mask: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
    """Adds the bias to the logits and applies the mask.

    Returns:
      The logits for softmax; those of a query that sees no key are finite but arbitrary. And a bool
      mask `[B..., N|1, T, 1]` of the queries that see a key; None if all do.
    """
    seeing = None
    if bias is not None:
        logits = logits + bias.astype(logits.dtype)
        # Bias and mask together decide: all keys that the mask shows may have a bias of -inf.
        logits = logits if mask is None else jnp.where(mask, logits, -jnp.inf)
        seeing = logits.max(-1, keepdims=True) != -jnp.inf
        logits = jnp.where(seeing, logits, 0)
    elif mask is not None:
        logits = jnp.where(mask, logits, jnp.finfo(logits.dtype).min)
        seeing = mask.any(-1, keepdims=True)
    return logits, seeing


def xla_attention(args: AttentionArguments) -> Any:
    """Computes attention with the logits of all pairs in memory.

    Returns:
      `[B, T, N, V]` in the operands' dtype. With `settings.residual`, a pair of that and the
      log-sum-exp `[B, T, N]` in FP32.
    """
    settings = args.settings
    return attend(
        args.query,
        args.key,
        args.value,
        bias=args.bias,
        mask=whole_mask(args),
        dropout_rate=settings.dropout_rate,
        dropout_rng=args.dropout_rng,
        broadcast_dropout=settings.broadcast_dropout,
        scale=settings.scale if args.scale is None else args.scale,
        wide_gradients=settings.wide_gradients,
        residual=settings.residual,
    )


def whole_mask(args: AttentionArguments) -> jax.Array | None:
    """Combines mask, causality, window and lengths to one bool mask `[B|1, N|1, T|1, S|1]`.

    None if no argument hides a key.
    """
    _, _, queries, keys = args.logits_shape
    rows = lax.broadcasted_iota(jnp.int32, (1, 1, queries, 1), 2)
    columns = lax.broadcasted_iota(jnp.int32, (1, 1, 1, keys), 3)
    masks = [*([] if args.mask is None else [args.mask]), *masks_at(args, rows, columns)]
    return functools.reduce(jnp.logical_and, masks) if masks else None


def seeing_queries(args: AttentionArguments) -> jax.Array | None:
    """Returns the bool mask `[B|1, T|1, N|1, 1]` of queries that see a key; None if all do."""
    if not args.may_mask_rows:
        return None
    _, _, queries, keys = args.logits_shape
    if args.mask is not None or args.bias is not None:
        mask = whole_mask(args)
        if args.bias is not None:
            finite = ~jnp.isneginf(args.bias)
            mask = finite if mask is None else finite & mask
        assert mask is not None
        return mask.any(-1).transpose(0, 2, 1)[..., None]
    # Without a mask, a query that sees any key sees the one nearest to its own position.
    rows = jnp.arange(queries, dtype=jnp.int32)[None, :]
    last = keys - 1 if args.key_lengths is None else args.key_lengths[:, None] - 1
    nearest = jnp.minimum(rows, last)
    seeing = functools.reduce(jnp.logical_and, [nearest >= 0, *masks_at(args, rows, nearest)])
    return seeing[..., None, None]
