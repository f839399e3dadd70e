"""Attention of a layer: masks and weights as Flax's attention layers pass them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

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
class Stated:
    """What the owner of an attention layer knows of its mask, and which implementation it wants."""

    implementation: str = "auto"
    is_causal: bool = False
    local_window_size: int | tuple[int, int] | None = None
    # The layer's mask is a prefix of each sequence, and is handed on as lengths.
    padding_mask: bool = False
    # The structure that the layer's policy declares of its mask; None: it declares none.
    declared: Declaration | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "implementation", check_implementation(self.implementation))
        if isinstance(self.local_window_size, list):
            object.__setattr__(self, "local_window_size", tuple(self.local_window_size))


@dataclasses.dataclass(frozen=True)
class Weights:
    """What a layer does with the weights besides multiplying by them."""

    dropout_rate: float = 0.0
    dropout_rng: Any = None
    broadcast_dropout: bool = True
    # Takes `[B..., N, T, S]`.
    sow: Callable[[jax.Array], Any] | None = None
    precision: Any = None
    qk_einsum: Callable[..., jax.Array] | None = None
    value_einsum: Callable[..., jax.Array] | None = None

    @property
    def wants_all(self) -> str:
        """The argument for which the weights of all pairs have to be held; "" if there is none."""
        given = {
            "sow_weights": self.sow,
            "precision": self.precision,
            "qk_attn_weights_einsum": self.qk_einsum,
        }
        return next((name for name, value in given.items() if value is not None), "")


# Query, key and value.
Operands = tuple[jax.Array, jax.Array, jax.Array]


def operands(query: jax.Array, key: jax.Array, value: jax.Array, dtype: Any) -> Operands:
    """The three in `dtype`; None: in the one that they promote to."""
    dtype = dtype or jnp.result_type(query, key, value)
    return jnp.asarray(query, dtype), jnp.asarray(key, dtype), jnp.asarray(value, dtype)


def layer_attention(
    operands: Operands,
    bias: Any,
    mask: Any,
    stated: Stated,
    weights: Weights,
) -> jax.Array:
    """Attention of a Flax layer.

    Args:
      operands: query `[B..., T, N, H]`, key and value `[B..., S, K, H]`; all of one dtype.
      bias: broadcastable to `[B..., N, T, S]`, or None.
      mask: likewise; what is not zero is seen.
      stated: what is known of the mask.
      weights: what is done to the weights.

    Returns:
      `[B..., T, N, H]` in the dtype of the operands.

    Raises:
      AttentionError: if arguments do not fit together, or an implementation that was asked for
        cannot serve them.
    """
    query, key, value = operands
    mask = None if mask is None else _as_bool(mask)
    structure = _structure(operands, mask, stated)
    if weights.wants_all:
        if stated.implementation not in ("auto", "xla"):
            raise AttentionError(
                f"{weights.wants_all} needs the attention weights of all pairs, which "
                f"implementation={stated.implementation!r} never holds. Leave {weights.wants_all} "
                "out, or put a rule with implementation='xla' on the layer."
            )
        return _whole(operands, bias, mask, stated, weights)
    batch = query.shape[:-3]
    count = math.prod(batch)
    lengths: dict[str, Any] = {}
    if structure is not None:
        query, mask, stated, lengths = structure.query, None, structure.stated, structure.lengths
    elif stated.padding_mask and mask is not None:
        mask, lengths = None, _lengths(_flat(mask, batch), query.shape[-3])
    given = arguments(
        query.reshape(count, *query.shape[-3:]),
        key.reshape(count, *key.shape[-3:]),
        value.reshape(count, *value.shape[-3:]),
        None if bias is None else _flat(bias, batch),
        None if mask is None else _flat(mask, batch),
        is_causal=stated.is_causal,
        local_window_size=stated.local_window_size,
        dropout_rate=weights.dropout_rate,
        dropout_rng=weights.dropout_rng,
        broadcast_dropout=weights.broadcast_dropout,
        **lengths,
    )
    out = run(given, stated.implementation)
    return out.reshape(*batch, *out.shape[1:])


class _Structure(NamedTuple):
    """What the kernel receives in the place of a declared mask."""

    query: jax.Array
    stated: Stated
    lengths: dict[str, Any]


def _structure(operands: Operands, mask: Any, stated: Stated) -> _Structure | None:
    """The declared structure of a layer's mask, checked as far as it is known; None: the array is.

    A layer with one query is taken for a step of autoregressive decoding. There the mask hides the
    unused end of the cache, no declaration describes it, and it is short.

    Raises:
      AttentionError: if mask and declaration contradict each other.
    """
    query, key, _ = operands
    queries, keys, batch = query.shape[-3], key.shape[-3], query.shape[:-3]
    declared = stated.declared
    if declared is None or queries == 1:
        return None
    if declared.is_square and queries != keys:
        raise refuse_lengths(declared, queries, keys)
    if stated.is_causal or stated.local_window_size is not None:
        seen = _stated_mask(operands, stated)
        mask = seen if mask is None else jnp.logical_and(_ranked(mask, seen.ndim), seen)
    lengths: dict[str, Any] = {}
    if mask is not None:
        whole = _whole_mask(mask, batch, (queries, keys))
        if isinstance(whole, np.ndarray):
            check_known(whole, declared)
        else:
            query = mark(query, whole, declared)
        if declared.is_padded:
            lengths = _declared_lengths(whole, declared, math.prod(batch))
    elif declared.is_square:
        raise refuse_missing(declared)
    plain = Stated(stated.implementation, declared.is_causal, declared.window)
    return _Structure(query, plain, lengths)


def _whole_mask(mask: Any, batch: tuple[int, ...], positions: tuple[int, int]) -> Any:
    """A mask as `[B|1, N|1, T, S]`; of NumPy if its elements are known."""
    if isinstance(mask, Tracer):
        flat = _flat(mask, batch)
        return jnp.broadcast_to(flat, (*flat.shape[:2], *positions))
    with jax.ensure_compile_time_eval():
        flat = np.asarray(_flat(mask, batch))
    return np.broadcast_to(flat, (*flat.shape[:2], *positions))


def _declared_lengths(mask: Any, declared: Declaration, count: int) -> dict[str, Any]:
    """Both lengths of each of the `count` sequences, by the names of the arguments."""
    lengths = (jnp.asarray(n, jnp.int32) for n in sequence_lengths(mask, declared))
    names = ("query_seq_lengths", "key_value_seq_lengths")
    return {name: jnp.broadcast_to(x, (count,)) for name, x in zip(names, lengths, strict=True)}


def _as_bool(mask: Any) -> Any:
    """A mask as bool; one whose elements are known stays known while a program is traced."""
    if isinstance(mask, Tracer):
        return mask.astype(bool)
    with jax.ensure_compile_time_eval():
        return jnp.asarray(mask).astype(bool)


def _flat(array: jax.Array, batch: tuple[int, ...]) -> jax.Array:
    """`[B..., N, T, S]` with one batch dimension, which is 1 where the array has none."""
    own = array.shape[:-3]
    if math.prod(own) != 1:
        array = jnp.broadcast_to(array, (*batch, *array.shape[-3:]))
    return array.reshape(-1, *(1,) * (3 - array.ndim), *array.shape[-3:])


def _lengths(mask: jax.Array, queries: int) -> dict[str, Any]:
    """Lengths `[B]` from a mask `[B, N, T, S]` that hides what stands behind each sequence."""
    lengths = {"key_value_seq_lengths": mask.any((1, 2)).sum(-1, dtype=jnp.int32)}
    if mask.shape[2] == queries and queries > 1:
        lengths["query_seq_lengths"] = mask.any((1, 3)).sum(-1, dtype=jnp.int32)
    return lengths


def _whole(operands: Operands, bias: Any, mask: Any, stated: Stated, weights: Weights) -> jax.Array:
    query, key, value = operands
    if stated.is_causal or stated.local_window_size is not None:
        seen = _stated_mask(operands, stated)
        mask = seen if mask is None else jnp.logical_and(_ranked(mask, seen.ndim), seen)
    deterministic = weights.dropout_rng is None
    rate, rng, broadcast = weights.dropout_rate, weights.dropout_rng, weights.broadcast_dropout
    return attend(
        query,
        key,
        value,
        bias=None if bias is None else _ranked(bias, query.ndim),
        mask=None if mask is None else _ranked(mask, query.ndim),
        dropout=weight_dropout(deterministic, rate, rng, broadcast),
        sow=weights.sow,
        precision=weights.precision,
        qk_einsum=weights.qk_einsum,
        value_einsum=weights.value_einsum,
    )


def _stated_mask(operands: Operands, stated: Stated) -> jax.Array:
    """The bool mask `[1..., T, S]` of the causality and the window that a function states."""
    query, key, _ = operands
    one, other, third = (jax.ShapeDtypeStruct(a.shape[-3:], a.dtype) for a in operands)
    settings = arguments(
        one,
        other,
        third,
        is_causal=stated.is_causal,
        local_window_size=stated.local_window_size,
    ).settings
    ones = (1,) * (query.ndim - 2)
    rows = jnp.arange(query.shape[-3], dtype=jnp.int32).reshape(*ones, -1, 1)
    columns = jnp.arange(key.shape[-3], dtype=jnp.int32).reshape(*ones, 1, -1)
    return sees(settings, rows, columns)


def _ranked(array: jax.Array, ndim: int) -> jax.Array:
    return array.reshape(*(1,) * (ndim - array.ndim), *array.shape)
