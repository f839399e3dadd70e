"""Attention of a layer: masks and weights as Flax's attention layers pass them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.lax import PrecisionLike
from jax.typing import DTypeLike

from jaxmp._attention import run
from jaxmp._attention._arguments import arguments, check_implementation, sees
from jaxmp._attention._declared import (
    Declaration,
    check_known,
    mark,
    refuse_lengths,
    refuse_missing,
    sequence_lengths,
)
from jaxmp._attention._plain import attend, weight_dropout
from jaxmp.errors import AttentionError


@dataclasses.dataclass(frozen=True)
class MaskHints:
    """Properties of a layer's mask that the author of the model specifies."""

    implementation: str = "auto"
    is_causal: bool = False
    local_window_size: int | tuple[int, int] | None = None
    # The layer's mask is a prefix of each sequence, and is passed to the kernel as lengths.
    padding_mask: bool = False
    # The structure that the layer's policy declares for its mask; None: it declares none.
    declared: Declaration | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "implementation", check_implementation(self.implementation))
        if isinstance(self.local_window_size, list):
            object.__setattr__(self, "local_window_size", tuple(self.local_window_size))


@dataclasses.dataclass(frozen=True)
class Weights:
    """Uses of the attention weights other than the multiplication with the values."""

    dropout_rate: float = 0.0
    dropout_rng: jax.Array | None = None
    broadcast_dropout: bool = True
    # Accepts weights `[B..., N, T, S]`.
    sow: Callable[[jax.Array], Any] | None = None
    precision: PrecisionLike = None
    qk_einsum: Callable[..., jax.Array] | None = None
    value_einsum: Callable[..., jax.Array] | None = None

    @property
    def stored_for(self) -> str:
        """The argument that requires the weights of all pairs to be stored; "" if none does."""
        users = {
            "sow_weights": self.sow,
            "precision": self.precision,
            "qk_attn_weights_einsum": self.qk_einsum,
        }
        return next((name for name, value in users.items() if value is not None), "")


# A mask whose elements are known is a NumPy array.
MaskArray: TypeAlias = jax.Array | np.ndarray
# Query, key and value.
Operands: TypeAlias = tuple[jax.Array, jax.Array, jax.Array]


def operands(
    query: jax.Array, key: jax.Array, value: jax.Array, dtype: DTypeLike | None
) -> Operands:
    """Casts query, key and value to `dtype`; None: to the dtype to which they promote."""
    dtype = dtype or jnp.result_type(query, key, value)
    return jnp.asarray(query, dtype), jnp.asarray(key, dtype), jnp.asarray(value, dtype)


def layer_attention(
    operands: Operands,
    bias: jax.Array | None,
    mask: MaskArray | None,
    hints: MaskHints,
    weights: Weights,
) -> jax.Array:
    """Computes the attention of a Flax layer.

    Args:
      operands: query `[B..., T, N, H]`, key and value `[B..., S, K, H]`; all of one dtype.
      bias: broadcastable to `[B..., N, T, S]`, or None.
      mask: broadcastable to the same shape, or None; nonzero elements are visible.
      hints: known properties of the mask.
      weights: further uses of the weights.

    Returns:
      `[B..., T, N, H]` in the dtype of the operands.

    Raises:
      AttentionError: if arguments contradict each other, or the requested implementation does not
        support them.
    """
    query, key, value = operands
    visible = None if mask is None else _as_bool(mask)
    structure = _structure(operands, visible, hints)
    if weights.stored_for:
        if hints.implementation not in ("auto", "xla"):
            raise AttentionError(
                f"{weights.stored_for} requires the attention weights of all pairs, which "
                f"implementation={hints.implementation!r} never stores. Remove "
                f"{weights.stored_for}, or add a rule with implementation='xla' for the layer."
            )
        return _attend_with_weights(operands, bias, visible, hints, weights)
    batch = query.shape[:-3]
    count = math.prod(batch)
    lengths: dict[str, Any] = {}
    if structure is not None:
        query, visible, hints, lengths = structure.query, None, structure.hints, structure.lengths
    elif hints.padding_mask and visible is not None:
        visible, lengths = None, _lengths(_flatten_batch(visible, batch), query.shape[-3])
    call = arguments(
        query.reshape(count, *query.shape[-3:]),
        key.reshape(count, *key.shape[-3:]),
        value.reshape(count, *value.shape[-3:]),
        None if bias is None else _flatten_batch(bias, batch),
        None if visible is None else _flatten_batch(visible, batch),
        is_causal=hints.is_causal,
        local_window_size=hints.local_window_size,
        dropout_rate=weights.dropout_rate,
        dropout_rng=weights.dropout_rng,
        broadcast_dropout=weights.broadcast_dropout,
        **lengths,
    )
    out = run(call, hints.implementation)
    return out.reshape(*batch, *out.shape[1:])


class _Structure(NamedTuple):
    """Arguments of the kernel that replace a declared mask."""

    query: jax.Array
    hints: MaskHints
    lengths: dict[str, jax.Array]


def _structure(operands: Operands, mask: jax.Array | None, hints: MaskHints) -> _Structure | None:
    """Returns the declared structure of a layer's mask; None if the mask array is used.

    The declaration is compared with the array as far as its elements are known. A layer with one
    query performs a step of autoregressive decoding: its mask hides the unused end of the cache,
    which no declaration describes, and is short.

    Raises:
      AttentionError: if mask and declaration contradict each other.
    """
    query, key, _ = operands
    queries, keys, batch = query.shape[-3], key.shape[-3], query.shape[:-3]
    declared = hints.declared
    if declared is None or queries == 1:
        return None
    if declared.is_square and queries != keys:
        raise refuse_lengths(declared, queries, keys)
    if hints.is_causal or hints.local_window_size is not None:
        visible = _hinted_mask(operands, hints)
        mask = visible if mask is None else jnp.logical_and(_rank(mask, visible.ndim), visible)
    lengths: dict[str, jax.Array] = {}
    if mask is not None:
        full = _full_mask(mask, batch, (queries, keys))
        if isinstance(full, np.ndarray):
            check_known(full, declared)
        else:
            query = mark(query, full, declared)
        if declared.is_padded:
            lengths = _declared_lengths(full, declared, math.prod(batch))
    elif declared.is_square:
        raise refuse_missing(declared)
    plain = MaskHints(hints.implementation, declared.is_causal, declared.window)
    return _Structure(query, plain, lengths)


def _full_mask(mask: jax.Array, batch: tuple[int, ...], positions: tuple[int, int]) -> MaskArray:
    """Returns a mask `[B|1, N|1, T, S]`, which is a NumPy array if its elements are known."""
    if isinstance(mask, Tracer):
        flat = _flatten_batch(mask, batch)
        return jnp.broadcast_to(flat, (*flat.shape[:2], *positions))
    with jax.ensure_compile_time_eval():
        flat = np.asarray(_flatten_batch(mask, batch))
    return np.broadcast_to(flat, (*flat.shape[:2], *positions))


def _declared_lengths(mask: MaskArray, declared: Declaration, count: int) -> dict[str, jax.Array]:
    """Returns the two lengths of each of `count` sequences, by argument name."""
    lengths = (jnp.asarray(n, jnp.int32) for n in sequence_lengths(mask, declared))
    names = ("query_seq_lengths", "key_value_seq_lengths")
    return {name: jnp.broadcast_to(x, (count,)) for name, x in zip(names, lengths, strict=True)}


def _as_bool(mask: MaskArray) -> jax.Array:
    """Casts a mask to bool. Known elements stay known while a program is traced."""
    if isinstance(mask, Tracer):
        return mask.astype(bool)
    with jax.ensure_compile_time_eval():
        return jnp.asarray(mask).astype(bool)


def _flatten_batch(array: jax.Array, batch: tuple[int, ...]) -> jax.Array:
    """Merges the batch dimensions of `[B..., N, T, S]`. Without any, adds one of size 1."""
    own = array.shape[:-3]
    if math.prod(own) != 1:
        array = jnp.broadcast_to(array, (*batch, *array.shape[-3:]))
    return array.reshape(-1, *(1,) * (3 - array.ndim), *array.shape[-3:])


def _lengths(mask: jax.Array, queries: int) -> dict[str, jax.Array]:
    """Computes the lengths `[B]` of sequences from a mask `[B, N, T, S]` of their padding."""
    lengths = {"key_value_seq_lengths": mask.any((1, 2)).sum(-1, dtype=jnp.int32)}
    if mask.shape[2] == queries and queries > 1:
        lengths["query_seq_lengths"] = mask.any((1, 3)).sum(-1, dtype=jnp.int32)
    return lengths


def _attend_with_weights(
    operands: Operands,
    bias: jax.Array | None,
    mask: jax.Array | None,
    hints: MaskHints,
    weights: Weights,
) -> jax.Array:
    """Computes attention that stores the weights of all pairs."""
    query, key, value = operands
    if hints.is_causal or hints.local_window_size is not None:
        visible = _hinted_mask(operands, hints)
        mask = visible if mask is None else jnp.logical_and(_rank(mask, visible.ndim), visible)
    deterministic = weights.dropout_rng is None
    rate, rng, broadcast = weights.dropout_rate, weights.dropout_rng, weights.broadcast_dropout
    return attend(
        query,
        key,
        value,
        bias=None if bias is None else _rank(bias, query.ndim),
        mask=None if mask is None else _rank(mask, query.ndim),
        dropout=weight_dropout(deterministic, rate, rng, broadcast),
        sow=weights.sow,
        precision=weights.precision,
        qk_einsum=weights.qk_einsum,
        value_einsum=weights.value_einsum,
    )


def _hinted_mask(operands: Operands, hints: MaskHints) -> jax.Array:
    """Returns the bool mask `[1..., T, S]` of the hinted causality and window."""
    query, key, _ = operands
    settings = arguments(
        *(jax.ShapeDtypeStruct(array.shape[-3:], array.dtype) for array in operands),
        is_causal=hints.is_causal,
        local_window_size=hints.local_window_size,
    ).settings
    ones = (1,) * (query.ndim - 2)
    rows = jnp.arange(query.shape[-3], dtype=jnp.int32).reshape(*ones, -1, 1)
    columns = jnp.arange(key.shape[-3], dtype=jnp.int32).reshape(*ones, 1, -1)
    return sees(settings, rows, columns)


def _rank(array: jax.Array, ndim: int) -> jax.Array:
    """Adds leading dimensions of size 1."""
    return array.reshape(*(1,) * (ndim - array.ndim), *array.shape)
