"""Dot-product attention whose logits, mask and softmax are in FP32 whatever the operands' dtype.

Shape suffixes: B any batch dimensions, T query positions, S key positions, N heads, H head size.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxmp._dtypes import FLOAT32, is_half
from jaxmp._products import wide_product


def fp32_softmax_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: jax.Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: Any = None,
    force_fp32_for_softmax: bool = True,
    qk_attn_weights_einsum: Callable[..., jax.Array] | None = None,
    attn_weights_value_einsum: Callable[..., jax.Array] | None = None,
) -> jax.Array:
    """`softmax(q k^T / sqrt(H) + bias) v`, a drop-in for `flax.linen.dot_product_attention`.

    QK^T is emitted in FP32, so logits beyond 65504 stay finite in float16; the weights are
    rounded to the compute dtype for the product with `value`.

    Args:
      query: `[B..., T, N, H]`.
      key, value: `[B..., S, N, H]`.
      bias: added to the logits, broadcastable to `[B..., N, T, S]`.
      mask: bool, broadcastable to `[B..., N, T, S]`; False masks a logit out.
      broadcast_dropout: one dropout mask `[T, S]` for all of B and N.
      dropout_rng: key of the dropout mask.
      dropout_rate: probability that a weight is dropped.
      deterministic: no dropout.
      dtype: the compute dtype; None: the one that `query`, `key` and `value` promote to.
      precision: of both products, as in `jax.lax.dot_general`.
      module: a Linen module that sows the weights as `intermediates/attention_weights`.
      force_fp32_for_softmax: accepted because Flax passes it; the softmax is always in FP32.
      qk_attn_weights_einsum, attn_weights_value_einsum: replace `jnp.einsum`, both or neither,
        and not together with `precision`.

    Returns:
      `[B..., T, N, H]` in the compute dtype.

    Example:
      >>> q = jnp.ones((1, 4, 2, 8), jnp.bfloat16)
      >>> fp32_softmax_attention(q, q, q).dtype
      dtype(bfloat16)

    Raises:
      ValueError: if only one einsum is given, or an einsum together with `precision`.
    """
    del force_fp32_for_softmax
    if (qk_attn_weights_einsum is None) != (attn_weights_value_einsum is None):
        raise ValueError(
            "qk_attn_weights_einsum and attn_weights_value_einsum must be given together."
        )
    if precision and qk_attn_weights_einsum:
        raise ValueError("precision is not used by qk_attn_weights_einsum; give one of them.")
    return attend(
        *operands(query, key, value, dtype=dtype),
        bias=bias,
        mask=mask,
        dropout=weight_dropout(deterministic, dropout_rate, dropout_rng, broadcast_dropout),
        sow=functools.partial(module.sow, "intermediates", "attention_weights") if module else None,
        precision=precision,
        qk_einsum=qk_attn_weights_einsum,
        value_einsum=attn_weights_value_einsum,
    )


# Flax asks for the signature a dozen times in each call of an attention layer.
fp32_softmax_attention.__signature__ = inspect.signature(  # pyright: ignore[reportFunctionMemberAccess]
    fp32_softmax_attention
)


def operands(*arrays: jax.Array, dtype: Any) -> tuple[jax.Array, ...]:
    """The arrays in `dtype`; None: in the one that they promote to."""
    dtype = dtype or jnp.result_type(*arrays)
    return tuple(jnp.asarray(array, dtype) for array in arrays)


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    bias: jax.Array | None,
    mask: jax.Array | None,
    dropout: Callable[[jax.Array], jax.Array] | None,
    sow: Callable[[jax.Array], Any] | None,
    precision: Any,
    qk_einsum: Callable[..., jax.Array] | None = None,
    value_einsum: Callable[..., jax.Array] | None = None,
) -> jax.Array:
    """What the drop-ins of both frameworks share; operands of one dtype, which is the result's."""
    if key.shape[-2] != query.shape[-2]:
        key, value = (_repeat_heads(array, query.shape[-2]) for array in (key, value))
    logits = _logits(query, key, precision, qk_einsum)
    logits *= logits.dtype.type(query.shape[-1] ** -0.5)
    weights = _softmax(logits, bias, mask).astype(query.dtype)
    if sow is not None:
        sow(weights)
    if dropout is not None:
        weights = dropout(weights)
    einsum = value_einsum or functools.partial(jnp.einsum, precision=precision)
    return einsum("...hqk,...khd->...qhd", weights, value)


def _repeat_heads(array: jax.Array, heads: int) -> jax.Array:
    """Grouped queries: `[B..., S, K, H]` -> `[B..., S, N, H]`, each head N / K times in a row."""
    if heads % array.shape[-2]:
        raise ValueError(
            f"query has {heads} heads, key and value have {array.shape[-2]}; grouped-query "
            "attention needs a multiple."
        )
    return jnp.repeat(array, heads // array.shape[-2], axis=-2)


def _logits(query: jax.Array, key: jax.Array, precision: Any, einsum: Any) -> jax.Array:
    """QK^T `[B..., N, T, S]` in FP32, or in float64 where the operands are."""
    wide = FLOAT32 if is_half(query.dtype) else query.dtype
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
    return wide_product(product, query, key, wide)


def _softmax(logits: jax.Array, bias: jax.Array | None, mask: jax.Array | None) -> jax.Array:
    if bias is not None:
        logits = logits + bias.astype(logits.dtype)
    if mask is not None:
        # The FP32 minimum, not -inf: a fully masked row gives uniform weights, not NaN.
        logits = jnp.where(mask, logits, jnp.finfo(logits.dtype).min)
    return jax.nn.softmax(logits)


def weight_dropout(
    deterministic: bool, rate: float, rng: Any, broadcast: bool
) -> Callable[[jax.Array], jax.Array] | None:
    """Drops weights `[B..., N, T, S]` at `rate`, the same ones for all of B and N or not."""
    if deterministic or rate == 0.0:
        return None

    def dropout(weights: jax.Array) -> jax.Array:
        shape = weights.shape
        if broadcast:
            shape = (1,) * (weights.ndim - 2) + shape[-2:]
        keep = jax.random.bernoulli(rng, 1.0 - rate, shape)
        multiplier = keep.astype(weights.dtype) / jnp.asarray(1.0 - rate, weights.dtype)
        return weights * multiplier

    return dropout
