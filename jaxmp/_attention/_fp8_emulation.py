"""Emulation of cuDNN's FP8 attention in plain JAX, for devices without the kernel.

It rounds the same intermediate values as the kernel. The steps follow NVIDIA's cudnn-frontend:
`include/cudnn_frontend/node/sdpa_fp8_bwd.h`, `matmul_fp8.h` and
`scaled_dot_product_flash_attention.h`, and its `test/python/sdpa/fp8_ref.py`. There are two
differences. The kernel processes the keys in blocks and rounds the weights of each block relative
to the largest logit so far; the emulation uses the largest logit of the row. The emulation
accumulates in FP32; FP8 Tensor Cores accumulate with fewer bits. The emulation keeps the logits of
all pairs in memory.

Shape suffixes: B batch, T query positions, S key positions, N query heads, K key heads, G = N / K.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxmp._core._dtypes import FLOAT32
from jaxmp.fp8._quantize import saturate

# Query, key and value.
Operands = tuple[jax.Array, jax.Array, jax.Array]
Scales = dict[str, jax.Array]


def forward(
    operands: Operands, scales: Scales, *, scale: float, is_causal: bool, training: bool
) -> tuple[jax.Array, ...]:
    """Emulates `_compat.fp8_attention_forward`, with the same arguments and results."""
    query, key, value = _grouped(*operands)
    logits = _logits(query, key, scales, scale, is_causal)
    most = logits.max(-1, keepdims=True)
    weights = jnp.exp(logits - most)
    total = weights.sum(-1, keepdims=True)
    out = _product("bkgts,bskh->bkgth", _rounded(weights, scales["scale_s"]), value)
    out = out * (scales["descale_s"] * scales["descale_v"]) / total
    rows = operands[0].shape
    result = saturate(out.transpose(0, 3, 1, 2, 4).reshape(rows), scales["scale_o"], "e4m3fn")
    if not training:
        return result, jnp.abs(out).max()
    logsumexp = (most + jnp.log(total)).reshape(rows[0], rows[2], rows[1])
    return result, jnp.abs(out).max(), logsumexp


def backward(
    operands: Operands,
    out: jax.Array,
    d_out: jax.Array,
    logsumexp: jax.Array,
    scales: Scales,
    *,
    scale: float,
    is_causal: bool,
) -> tuple[jax.Array, ...]:
    """Emulates `_compat.fp8_attention_backward`, with the same arguments and results."""
    query, key, value = _grouped(*operands)
    logits = _logits(query, key, scales, scale, is_causal)
    weights = jnp.exp(logits - logsumexp.reshape(*logits.shape[:-1], 1))
    above, result = (_split(array, key.shape[2]) for array in (d_out, out))
    descale = scales["descale_dO"]

    rounded = _rounded(weights, scales["scale_s"])
    d_value = _product("bkgts,btkgh->bskh", rounded, above) * (scales["descale_s"] * descale)

    d_weights = _product("btkgh,bskh->bkgts", above, value) * (descale * scales["descale_v"])
    shared = (_wide(above) * _wide(result)).sum(-1) * (scales["descale_o"] * descale)
    d_logits = weights * (d_weights - shared.transpose(0, 2, 3, 1)[..., None]) * FLOAT32.type(scale)
    rounded = _rounded(d_logits, scales["scale_dP"])
    d_query = _product("bkgts,bskh->btkgh", rounded, key)
    d_query = d_query.reshape(operands[0].shape) * (scales["descale_dP"] * scales["descale_k"])
    d_key = _product("bkgts,btkgh->bskh", rounded, query)
    d_key = d_key * (scales["descale_dP"] * scales["descale_q"])

    gradients = (d_query, d_key, d_value)
    factors = (scales["scale_dQ"], scales["scale_dK"], scales["scale_dV"])
    amaxes = (jnp.abs(array).max() for array in (*gradients, d_logits))
    return *map(_to_e4m3, gradients, factors), *amaxes


def _to_e4m3(array: jax.Array, scale: jax.Array) -> jax.Array:
    # PTX's cvt to E4M3 always saturates; it also converts an infinity to 448.
    return saturate(array, scale, "e4m3fn")


def _wide(array: jax.Array) -> jax.Array:
    return lax.optimization_barrier(array).astype(FLOAT32)


def _rounded(array: jax.Array, scale: jax.Array) -> jax.Array:
    # Without the barrier, XLA would remove a cast to FP8 and back, and so the rounding.
    return lax.optimization_barrier(_to_e4m3(array, scale))


def _product(equation: str, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    return jnp.einsum(equation, lhs, rhs, preferred_element_type=FLOAT32)


def _split(array: jax.Array, groups: int) -> jax.Array:
    """Groups query heads by their key head: `[B, T, N, H]` -> `[B, T, K, G, H]`."""
    batch, positions, heads, size = array.shape
    return array.reshape(batch, positions, groups, heads // groups, size)


def _grouped(query: jax.Array, key: jax.Array, value: jax.Array) -> Operands:
    return _split(query, key.shape[2]), key, value


def _logits(
    query: jax.Array, key: jax.Array, scales: Scales, scale: float, is_causal: bool
) -> jax.Array:
    """Returns the scaled logits `[B, K, G, T, S]`; -inf where a query does not see a key."""
    logits = _product("btkgh,bskh->bkgts", query, key)
    logits = logits * FLOAT32.type(scale) * scales["descale_q"] * scales["descale_k"]
    if not is_causal:
        return logits
    rows, columns = (lax.broadcasted_iota(jnp.int32, logits.shape, axis) for axis in (3, 4))
    return jnp.where(columns <= rows, logits, -jnp.inf)
