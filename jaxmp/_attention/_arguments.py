"""The arguments of attention: checked before any compute, and brought into one form.

Shape suffixes: B batch, T query positions, S key positions, N query heads, K key heads, H head size
of query and key, V head size of value.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxmp._dtypes import bits
from jaxmp._policy import ATTENTION, get_policy
from jaxmp.errors import AttentionError, did_you_mean

_DTYPES = ("float16", "bfloat16", "float32", "float64")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What is known of an attention before it runs, beside the shapes. Hashable."""

    scale: float
    is_causal: bool = False
    # Positions to the left and right of a query that it sees; None: no window. Causal: (left, 0).
    window: tuple[int, int] | None = None
    dropout_rate: float = 0.0
    # One dropout mask [T, S] for all of B and N.
    broadcast_dropout: bool = False
    # The logits' gradient is multiplied in FP32: twice as exact, and no work for a Tensor Core.
    wide_gradients: bool = False


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Query `[B, T, N, H]`, key `[B, S, K, H]`, value `[B, S, K, V]`, and what goes with them.

    Bias and mask have four dimensions, each 1 or that of `[B, N, T, S]`; lengths are int32 `[B]`.
    """

    query: Any
    key: Any
    value: Any
    bias: Any
    mask: Any
    query_lengths: Any
    key_lengths: Any
    dropout_rng: Any
    settings: Settings

    @property
    def logits_shape(self) -> tuple[int, int, int, int]:
        """`[B, N, T, S]`."""
        batch, positions, heads, _ = self.query.shape
        return batch, heads, positions, self.key.shape[1]

    @property
    def may_mask_rows(self) -> bool:
        """Whether there may be a query that sees no key."""
        _, _, queries, keys = self.logits_shape
        window = self.settings.window
        beyond = window is not None and queries > keys + window[0]
        given = (self.mask, self.query_lengths, self.key_lengths)
        return beyond or any(array is not None for array in given)


def check_implementation(implementation: Any) -> None:
    """Refuses what is no implementation.

    Raises:
      AttentionError: naming those that there are.
    """
    if implementation not in ATTENTION:
        hint = did_you_mean(implementation, ATTENTION) if isinstance(implementation, str) else ""
        raise AttentionError(
            f"implementation={implementation!r} is none that jaxmp has.{hint} Allowed: "
            f"{', '.join(map(repr, ATTENTION))}; for example "
            "dot_product_attention(query, key, value, implementation='auto')."
        )


def arguments(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: Any = None,
    dropout_rate: float = 0.0,
    dropout_rng: Any = None,
    broadcast_dropout: bool = False,
    policy: Any = None,
    wide_gradients: bool = False,
) -> Arguments:
    """Checks the arguments of `dot_product_attention`, which says what each means.

    Raises:
      AttentionError: if shapes or dtypes do not fit together, or a setting is not allowed.
      PolicyError: if `policy` is none.
    """
    query, key, value = (
        _array(a, n) for a, n in ((query, "query"), (key, "key"), (value, "value"))
    )
    if policy is not None:
        compute = get_policy(policy).compute_dtype
        query, key, value = (_cast(array, compute) for array in (query, key, value))
    _check_dtypes(query, key, value)
    query, key, value = (_with_batch(a, 4) for a in (query, key, value))
    _check_shapes(query, key, value)
    batch, queries, heads, size = query.shape
    logits = (batch, heads, queries, key.shape[1])
    return Arguments(
        query,
        key,
        value,
        _bias(bias, logits),
        _mask(mask, logits),
        _lengths(query_seq_lengths, "query_seq_lengths", batch, queries),
        _lengths(key_value_seq_lengths, "key_value_seq_lengths", batch, key.shape[1]),
        _checked_rng(dropout_rate, dropout_rng),
        Settings(
            scale=_scale(scale, size),
            window=_window(local_window_size, is_causal),
            is_causal=_is_causal(is_causal, local_window_size),
            dropout_rate=float(dropout_rate),
            broadcast_dropout=broadcast_dropout,
            wide_gradients=wide_gradients,
        ),
    )


# ---------------------------------------------------------------------------
# Query, key, value
# ---------------------------------------------------------------------------


def _array(value: Any, name: str) -> Any:
    is_array = isinstance(value, (jax.Array, jax.ShapeDtypeStruct))
    array = value if is_array else jnp.asarray(value)
    if array.ndim not in (3, 4):
        raise AttentionError(
            f"{name} has shape {array.shape}. Allowed: [batch, positions, heads, size], or without "
            f"the batch; for example {name}.reshape(batch, positions, heads, size)."
        )
    return array


def _cast(array: Any, dtype: np.dtype) -> Any:
    if isinstance(array, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(array.shape, dtype)
    return array.astype(dtype)


def _with_batch(array: Any, ndim: int) -> Any:
    shape = (1,) * (ndim - array.ndim) + array.shape
    if shape == array.shape:
        return array
    if isinstance(array, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(shape, array.dtype)
    return array.reshape(shape)


def _check_dtypes(query: Any, key: Any, value: Any) -> None:
    dtypes = [array.dtype for array in (query, key, value)]
    names = ", ".join(
        f"{name} {dtype.name}"
        for name, dtype in zip(("query", "key", "value"), dtypes, strict=True)
    )
    if len(set(dtypes)) > 1:
        widest = max(dtypes, key=lambda dtype: bits(dtype) if dtype.name in _DTYPES else 0)
        raise AttentionError(
            f"{names}: the three must share a dtype. Cast them, or name the compute dtype: "
            f"dot_product_attention(query, key, value, policy={widest.name!r})."
        )
    if dtypes[0].name not in _DTYPES:
        raise AttentionError(
            f"{names}. Allowed: {', '.join(_DTYPES)}; for example "
            "dot_product_attention(query, key, value, policy='bfloat16')."
        )


def _check_shapes(query: Any, key: Any, value: Any) -> None:
    shapes = f"query {query.shape}, key {key.shape}, value {value.shape}"
    if key.shape[:3] != value.shape[:3]:
        raise AttentionError(f"{shapes}: key and value differ in batch, positions or heads.")
    if query.shape[0] != key.shape[0]:
        raise AttentionError(
            f"{shapes}: the batches differ. Broadcast the smaller one: jnp.broadcast_to(key, …)."
        )
    if query.shape[3] != key.shape[3]:
        raise AttentionError(f"{shapes}: query and key differ in head size.")
    if not all(math.prod(array.shape) for array in (query, key, value)):
        raise AttentionError(f"{shapes}: a dimension is 0, and nothing can be attended to.")
    if query.shape[2] % key.shape[2]:
        raise AttentionError(
            f"{shapes}: {query.shape[2]} query heads cannot share {key.shape[2]} key heads. "
            "Grouped-query attention needs a multiple."
        )


# ---------------------------------------------------------------------------
# Bias, mask, lengths
# ---------------------------------------------------------------------------


def _bias(bias: Any, logits: tuple[int, ...]) -> Any:
    if bias is None:
        return None
    bias = bias if hasattr(bias, "dtype") else jnp.asarray(bias)
    if not jnp.issubdtype(bias.dtype, jnp.floating):
        raise AttentionError(
            f"bias is {bias.dtype.name}; it is added to the logits and must be floating. A bool "
            "mask has its own argument: dot_product_attention(query, key, value, mask=mask)."
        )
    return _broadcastable(bias, "bias", logits)


def _mask(mask: Any, logits: tuple[int, ...]) -> Any:
    if mask is None:
        return None
    mask = mask if hasattr(mask, "dtype") else jnp.asarray(mask)
    if mask.dtype != np.bool_:
        raise AttentionError(
            f"mask is {mask.dtype.name}, not bool. Write mask=mask.astype(bool), or, for a mask "
            "that is added to the logits, bias=mask."
        )
    return _broadcastable(mask, "mask", logits)


def _broadcastable(array: Any, name: str, logits: tuple[int, ...]) -> Any:
    fits = array.ndim <= 4 and all(
        size in (1, whole) for size, whole in zip(array.shape[::-1], logits[::-1], strict=False)
    )
    if not fits:
        raise AttentionError(
            f"{name} has shape {array.shape}, which does not broadcast to the logits' "
            f"[batch, heads, queries, keys] = {list(logits)}."
        )
    return _with_batch(array, 4)


def _lengths(lengths: Any, name: str, batch: int, positions: int) -> Any:
    if lengths is None:
        return None
    lengths = lengths if hasattr(lengths, "dtype") else jnp.asarray(lengths)
    if not jnp.issubdtype(lengths.dtype, jnp.integer) or lengths.shape != (batch,):
        raise AttentionError(
            f"{name} is {lengths.dtype.name} of shape {lengths.shape}. Allowed: integers, one for "
            f"each of the {batch} sequences; for example {name}=mask.sum(-1)."
        )
    if isinstance(lengths, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(lengths.shape, np.dtype("int32"))
    if not isinstance(lengths, Tracer):
        values = np.asarray(lengths)
        if values.min() < 0 or values.max() > positions:
            raise AttentionError(
                f"{name}={values.tolist()}: a length lies between 0 and the {positions} positions."
            )
    return jnp.asarray(lengths, jnp.int32)


# ---------------------------------------------------------------------------
# Settings
# ---------------------------------------------------------------------------


def _scale(scale: Any, size: int) -> float:
    if scale is None:
        return size**-0.5
    if isinstance(scale, Tracer) or not isinstance(scale, (int, float, np.number)):
        raise AttentionError(
            f"scale={scale!r} is no number. It is part of the compiled kernel; "
            "a learned scale goes into the query: dot_product_attention(query * scale, key, value)."
        )
    if not math.isfinite(scale):
        raise AttentionError(f"scale={scale!r} is not finite; for example scale=head_size**-0.5.")
    return float(scale)


def _window(size: Any, is_causal: bool) -> tuple[int, int] | None:
    if size is None:
        return None
    pair = (size, size) if isinstance(size, int) else size
    fits = (
        isinstance(pair, (tuple, list))
        and len(pair) == 2
        and all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in pair)
        and not isinstance(size, bool)
    )
    if not fits:
        raise AttentionError(
            f"local_window_size={size!r} is neither an integer nor a pair (left, right) of "
            "integers that are not negative; for example local_window_size=(1023, 0)."
        )
    left, right = pair
    return (left, 0) if is_causal else (left, right)


def _is_causal(is_causal: Any, window: Any) -> bool:
    if not isinstance(is_causal, bool):
        raise AttentionError(
            f"is_causal={is_causal!r} is neither True nor False; it is part of the compiled kernel."
        )
    # A window that ends at the query is causal, and cuDNN has windows for causal masks only.
    return is_causal or (isinstance(window, (tuple, list)) and window[1] == 0) or window == 0


def _checked_rng(rate: Any, rng: Any) -> Any:
    if isinstance(rate, Tracer) or not isinstance(rate, (int, float)) or not 0 <= rate < 1:
        raise AttentionError(
            f"dropout_rate={rate!r} is no number from 0 up to, not including, 1; for example "
            "dropout_rate=0.1."
        )
    if rate and rng is None:
        raise AttentionError(
            f"dropout_rate={rate!r} without a key. Write dropout_rng=jax.random.key(0), or "
            "dropout_rate=0.0 where nothing is to be dropped."
        )
    return rng if rate else None


def sees(settings: Settings, queries: jax.Array, keys: jax.Array) -> jax.Array:
    """Whether causality and window let a query see a key; bool, of positions that broadcast."""
    if settings.window is None:
        return keys <= queries if settings.is_causal else (keys >= 0) | (queries >= 0)
    left, right = settings.window
    return (keys >= queries - left) & (keys <= queries + right)
