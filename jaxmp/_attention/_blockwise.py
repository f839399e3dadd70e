"""Attention block by block: online softmax, memory linear in the sequence length.

The algorithm of FlashAttention-2 (Dao 2023, arXiv:2307.08691) as one `lax.scan` over the pairs of
blocks that causality and window do not mask. The backward pass recomputes the weights from the
largest logit and the sum of each row, which are saved separately: the rounding error of their
logsumexp would affect every weight of the row. Logits, weights and all sums are FP32 (float64 for
float64 operands); matmuls read their operands in the dtype of the arguments, as on a Tensor Core.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmp import _core
from jaxmp._attention import _arguments
from jaxmp._attention._arguments import NO_KEY, AttentionArguments, AttentionSettings
from jaxmp._core import PyTree, _compat
from jaxmp.errors import AttentionError

# Smallest and largest number of positions per block, and of logits at a time (64 MiB in FP32). On a
# GPU, whose blocks are few and large, their FP32 logits take at most this share of its memory. The
# number of positions also has a limit, because `jax.vmap` multiplies the logits unseen.
_LEAST, _MOST, _LOGITS = 64, 512, 2**24
_MOST_ON_GPU, _SHARE_OF_GPU = 1024, 1 / 128


class _Shape(NamedTuple):
    """Sizes of one call. Hashable."""

    batch: int
    groups: int  # key heads
    shared: int  # query heads that share a key head
    queries: int
    keys: int
    query_block: int
    key_block: int

    @property
    def query_blocks(self) -> int:
        return -(-self.queries // self.query_block)

    @property
    def key_blocks(self) -> int:
        return -(-self.keys // self.key_block)


def blockwise_attention(args: AttentionArguments, block: int | None = None) -> Any:
    """Returns `[B, T, N, V]` in the operands' dtype, zero for queries that see no key.

    With `settings.residual`, it also returns the log-sum-exp `[B, T, N]` in FP32, without gradient.

    Args:
      args: the arguments.
      block: largest number of positions per block; None: as many as the memory of a GPU allows.

    Raises:
      AttentionError: for symbolic sizes, as in `jax.export`.
    """
    args = _arguments.with_scaled_query(args)
    precision = jax.config.jax_default_matmul_precision  # pyright: ignore
    settings = dataclasses.replace(args.settings, precision=precision)
    batch, heads, queries, keys = args.logits_shape
    if not all(isinstance(size, int) for size in args.logits_shape):
        raise AttentionError(
            f"implementation='blockwise' splits logits of shape {args.logits_shape} into blocks, "
            "and some of these sizes are symbolic. Write implementation='xla', or leave it out."
        )
    groups = args.key.shape[2]
    block = block or _block_size(batch * heads)
    blocks = (min(block, -(-positions // 8) * 8) for positions in (queries, keys))
    shape = _Shape(batch, groups, heads // groups, queries, keys, *blocks)
    return _attention(shape, dataclasses.replace(args, settings=settings))


def _block_size(heads: int) -> int:
    """Returns the number of positions per block for the heads of all sequences together.

    A pair of blocks takes about 37 kernels in both passes, and reads its operands and sums again
    (`python benchmarks/attention_memory.py --target h200`). A GPU therefore computes few large
    blocks, as many logits at a time as its memory allows. XLA replaces a loop over a single pair by
    its body, and may then keep the weights of the forward pass instead of computing them again.
    """
    block, logits = _MOST, _LOGITS
    memory = _core.target_memory() if _compat.target() == "gpu" else None
    if memory is not None:
        block, logits = _MOST_ON_GPU, max(logits, memory * _SHARE_OF_GPU / 4)
    while block > _LEAST and heads * block * block > logits:
        block //= 2
    return block


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(shape: _Shape, operands: AttentionArguments) -> Any:
    return _forward_rule(shape, operands)[0]


# ---------------------------------------------------------------------------
# Blocks
# ---------------------------------------------------------------------------


def _pairs(shape: _Shape, settings: AttentionSettings) -> np.ndarray:
    """Returns the pairs `[P, 2]` of query and key blocks with unmasked entries, before tracing."""
    rows = np.arange(shape.query_blocks)[:, None] * shape.query_block
    columns = np.arange(shape.key_blocks)[None, :] * shape.key_block
    last_row = np.minimum(rows + shape.query_block, shape.queries) - 1
    last_column = np.minimum(columns + shape.key_block, shape.keys) - 1
    # A window of a causal structure ends at the query.
    whole = shape.queries, 0 if settings.is_causal else shape.keys
    left, right = settings.window or whole
    needed = (last_column >= rows - left) & (columns <= last_row + right)
    return np.argwhere(needed).astype(np.int32)


def _split(array: jax.Array, block: int, blocks: int, shape: _Shape) -> jax.Array:
    """Splits `[B, L, heads, size]` into `[blocks, B, K, G, block, size]`, padded with zeros."""
    batch, positions, heads, size = array.shape
    array = jnp.pad(array, ((0, 0), (0, block * blocks - positions), (0, 0), (0, 0)))
    array = array.reshape(batch, blocks, block, shape.groups, heads // shape.groups, size)
    return array.transpose(1, 0, 3, 4, 2, 5)


def _joined(blocks: jax.Array, positions: int) -> jax.Array:
    """Inverts `_split`."""
    count, batch, groups, shared, block, size = blocks.shape
    array = blocks.transpose(1, 0, 4, 2, 3, 5)
    return array.reshape(batch, count * block, groups * shared, size)[:, :positions]


def _split_logits(array: jax.Array, shape: _Shape) -> jax.Array:
    """Splits `[B|1, N|1, T|1, S|1]` into `[I|1, J|1, B|1, K|1, G|1, block|1, block|1]`."""
    batch, heads, queries, keys = array.shape
    pad_q = shape.query_blocks * shape.query_block - queries if queries > 1 else 0
    pad_k = shape.key_blocks * shape.key_block - keys if keys > 1 else 0
    array = jnp.pad(array, ((0, 0), (0, 0), (0, pad_q), (0, pad_k)))
    groups = (shape.groups, shape.shared) if heads > 1 else (1, 1)
    rows = (shape.query_blocks, shape.query_block) if queries > 1 else (1, 1)
    columns = (shape.key_blocks, shape.key_block) if keys > 1 else (1, 1)
    return array.reshape(batch, *groups, *rows, *columns).transpose(3, 5, 0, 1, 2, 4, 6)


def _joined_logits(blocks: jax.Array, like: jax.Array) -> jax.Array:
    """Inverts `_split_logits`."""
    i, j, batch, groups, shared, rows, columns = blocks.shape
    array = blocks.transpose(2, 3, 4, 0, 5, 1, 6)
    array = array.reshape(batch, groups * shared, i * rows, j * columns)
    return array[:, :, : like.shape[2], : like.shape[3]]


def _at(blocks: jax.Array, *index: jax.Array) -> jax.Array:
    """Returns one block; a dimension with a single block is broadcast, as indices are clamped."""
    # The indices have one dtype; in 64-bit mode, the number 0 would be int64.
    starts = (*index, *(np.int32(0),) * (blocks.ndim - len(index)))
    sizes = blocks.shape[len(index) :]
    return lax.dynamic_slice(blocks, starts, (*(1,) * len(index), *sizes)).reshape(sizes)


def _put(blocks: jax.Array, block: jax.Array, *index: jax.Array) -> jax.Array:
    starts = (*index, *(np.int32(0),) * (blocks.ndim - len(index)))
    return lax.dynamic_update_slice(blocks, block.reshape((1,) * len(index) + block.shape), starts)


class _Blocks:
    """Operands in blocks, with the logits and dropout factors of each pair."""

    def __init__(self, shape: _Shape, operands: AttentionArguments) -> None:
        self.shape, self.settings, self.operands = shape, operands.settings, operands
        self.dtype = operands.query.dtype
        self.wide = _core.wide_dtype(self.dtype)
        self.query = _split(operands.query, shape.query_block, shape.query_blocks, shape)
        self.key = _split(operands.key, shape.key_block, shape.key_blocks, shape)[:, :, :, 0]
        self.value = _split(operands.value, shape.key_block, shape.key_blocks, shape)[:, :, :, 0]
        self.bias = None if operands.bias is None else _split_logits(operands.bias, shape)
        self.mask = None if operands.mask is None else _split_logits(operands.mask, shape)

    def product(self, equation: str, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        """Multiplies in the operands' dtype and accumulates in FP32."""
        lhs, rhs = lhs.astype(self.dtype), rhs.astype(self.dtype)
        precision = self.settings.precision
        return jnp.einsum(equation, lhs, rhs, precision=precision, preferred_element_type=self.wide)

    def product_of_gradient(self, equation: str, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        """Multiplies the gradient of the logits, in FP32 if the settings require it."""
        if not self.settings.wide_gradients:
            return self.product(equation, lhs, rhs)
        return jnp.einsum(equation, lhs, rhs.astype(self.wide), precision=self.settings.precision)

    def logits(self, i: jax.Array, j: jax.Array) -> jax.Array:
        """Returns logits `[B, K, G, block, block]`, -inf where a query does not see a key."""
        logits = self.product("bkgth,bksh->bkgts", _at(self.query, i), _at(self.key, j))
        logits *= self.wide.type(self.settings.scale)
        if self.bias is not None:
            logits += _at(self.bias, i, j).astype(self.wide)
        return jnp.where(self._seen(i, j), logits, -jnp.inf)

    def _seen(self, i: jax.Array, j: jax.Array) -> jax.Array:
        shape = self.shape
        # [1, 1, 1, block, 1] and [1, 1, 1, 1, block]
        rows = i * shape.query_block + lax.broadcasted_iota(
            jnp.int32, (1, 1, 1, shape.query_block, 1), 3
        )
        columns = j * shape.key_block + lax.broadcasted_iota(
            jnp.int32, (1, 1, 1, 1, shape.key_block), 4
        )
        masks = [columns < shape.keys, *_arguments.masks_at(self.operands, rows, columns)]
        masks += [] if self.mask is None else [_at(self.mask, i, j)]
        return functools.reduce(jnp.logical_and, masks)

    def kept(self, i: jax.Array, j: jax.Array) -> jax.Array | None:
        """Returns the dropout factors of the weights of a pair, the same in both passes."""
        rate = self.settings.dropout_rate
        if self.operands.dropout_rng is None:
            return None
        shape = self.shape
        rng = jax.random.fold_in(self.operands.dropout_rng, i * shape.key_blocks + j)
        heads = (shape.batch, shape.groups, shape.shared)
        heads = (1, 1, 1) if self.settings.broadcast_dropout else heads
        keep = jax.random.bernoulli(rng, 1.0 - rate, (*heads, shape.query_block, shape.key_block))
        return keep.astype(self.wide) / self.wide.type(1.0 - rate)


# ---------------------------------------------------------------------------
# Forward
# ---------------------------------------------------------------------------


def _forward(
    shape: _Shape, operands: AttentionArguments
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Returns the result `[B, T, N, V]` in FP32; largest logit, 1 / sum `[I, B, K, G, block]`."""
    blocks = _Blocks(shape, operands)
    value_size = operands.value.shape[-1]

    def step(carry: tuple[Any, ...], pair: jax.Array) -> tuple[Any, None]:
        sums, most, total = carry
        i, j = pair
        logits = blocks.logits(i, j)
        before = _at(most, i)
        now = jnp.maximum(before, logits.max(-1))
        # A row that has seen no key yet has -inf, and -inf - -inf is NaN.
        finite = jnp.where(now == -jnp.inf, 0, now)
        weights = jnp.exp(logits - finite[..., None])
        shrunk = jnp.exp(before - finite)
        added = weights.sum(-1)
        kept = blocks.kept(i, j)
        weights = weights if kept is None else weights * kept
        part = blocks.product("bkgts,bksv->bkgtv", weights, _at(blocks.value, j))
        sums = _put(sums, _at(sums, i) * shrunk[..., None] + part, i)
        total = _put(total, _at(total, i) * shrunk + added, i)
        return (sums, _put(most, now, i), total), None

    # Like the query, so that they are sharded over a mesh as it is.
    row = blocks.query[..., :1]
    start = (
        jnp.full_like(jnp.broadcast_to(row, (*row.shape[:-1], value_size)), 0, blocks.wide),
        jnp.full_like(row[..., 0], -jnp.inf, blocks.wide),
        jnp.full_like(row[..., 0], 0, blocks.wide),
    )
    start = _compat.vary(start, _compat.varying_axes(operands))
    (sums, most, total), _ = lax.scan(step, start, jnp.asarray(_pairs(shape, operands.settings)))
    # A row that sees no key: its weights are exp(-inf - 0) / inf.
    most = jnp.where(most == -jnp.inf, 0, most)
    shares = 1 / jnp.where(total == 0, jnp.inf, total)
    out = sums * shares[..., None]
    return _joined(out, shape.queries), (most, shares)


def _forward_rule(shape: _Shape, operands: AttentionArguments) -> Any:
    settings = operands.settings
    wide, rows = _forward(shape, operands)
    out = wide.astype(operands.query.dtype)
    saved = operands, wide if settings.wide_gradients else out, rows
    return (out, _residual(shape, rows)) if settings.residual else out, saved


def _residual(shape: _Shape, rows: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Computes the log-sum-exp `[B, T, N]` from the largest logit and 1 / sum of each row."""
    most, shares = rows
    # The sum of a row that sees a key is at least 1.
    sums = jnp.where(shares == 0, NO_KEY, most - jnp.log(jnp.where(shares == 0, 1, shares)))
    return _joined(sums[..., None], shape.queries)[..., 0]


# ---------------------------------------------------------------------------
# Backward
# ---------------------------------------------------------------------------


def _backward_rule(shape: _Shape, saved: tuple[Any, ...], d_out: PyTree) -> Any:
    operands, out, (most, shares) = saved
    settings = operands.settings
    d_out = d_out[0] if settings.residual else d_out
    blocks = _Blocks(shape, operands)
    wide = blocks.wide
    scale = wide.type(settings.scale)
    d_outs = _split(d_out, shape.query_block, shape.query_blocks, shape)
    # The part of the softmax's gradient that all weights of a row share.
    product = (d_out.astype(wide) * out.astype(wide)).sum(-1)
    shared = _split(product[..., None], shape.query_block, shape.query_blocks, shape)[..., 0]

    def step(carry: tuple[Any, ...], pair: jax.Array) -> tuple[Any, None]:
        d_query, d_key, d_value, d_bias = carry
        i, j = pair
        weights = jnp.exp(blocks.logits(i, j) - _at(most, i)[..., None])
        weights *= _at(shares, i)[..., None]
        above = _at(d_outs, i)
        d_weights = blocks.product("bkgtv,bksv->bkgts", above, _at(blocks.value, j))
        kept = blocks.kept(i, j)
        used = weights if kept is None else weights * kept
        d_weights = d_weights if kept is None else d_weights * kept
        d_logits = weights * (d_weights - _at(shared, i)[..., None])
        part = blocks.product_of_gradient("bkgts,bksh->bkgth", d_logits, _at(blocks.key, j))
        d_query = _put(d_query, _at(d_query, i) + part * scale, i)
        part = blocks.product_of_gradient("bkgts,bkgth->bksh", d_logits, _at(blocks.query, i))
        d_key = _put(d_key, _at(d_key, j) + part * scale, j)
        part = blocks.product("bkgts,bkgtv->bksv", used, above)
        d_value = _put(d_value, _at(d_value, j) + part, j)
        if d_bias is not None:
            axes = tuple(axis for axis in range(5) if d_bias.shape[axis + 2] == 1)
            part = d_logits.sum(axes, keepdims=True)
            d_bias = _put(d_bias, _at(d_bias, i, j) + part, i, j)
        return (d_query, d_key, d_value, d_bias), None

    start = (
        jnp.full_like(blocks.query, 0, wide),
        jnp.full_like(blocks.key, 0, wide),
        jnp.full_like(blocks.value, 0, wide),
        None if blocks.bias is None else jnp.full_like(blocks.bias, 0, wide),
    )
    start = _compat.vary(start, _compat.varying_axes((operands, d_out)))
    pairs = jnp.asarray(_pairs(shape, operands.settings))
    (d_query, d_key, d_value, d_bias), _ = lax.scan(step, start, pairs)
    d_bias = None if d_bias is None else _joined_logits(d_bias, operands.bias)
    gradients = {
        "query": _joined(d_query, shape.queries),
        "key": _joined(d_key[:, :, :, None], shape.keys),
        "value": _joined(d_value[:, :, :, None], shape.keys),
        "bias": d_bias,
    }
    cast = {
        name: gradients[name].astype(getattr(operands, name).dtype)
        for name in sorted(gradients)
        if gradients[name] is not None
    }
    return (dataclasses.replace(jax.tree.map(lambda _: None, operands), **cast),)


_attention.defvjp(_forward_rule, _backward_rule)
