"""Checks the arguments of attention and converts them to one form, before any computation.

Shape suffixes: B batch, T query positions, S key positions, N query heads, K key heads, H head size
of query and key, V head size of value.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxmp import _core
from jaxmp._core import ArrayLike
from jaxmp._policies._policy import ATTENTION, PolicyLike, get_policy
from jaxmp.errors import AttentionError

_DTYPES = ("float16", "bfloat16", "float32", "float64")

# Log-sum-exp of a query that sees no key, as in jax.nn.dot_product_attention. It is finite, so that
# `jnp.logaddexp` merges partial results without NaN.
NO_KEY = -0.7 * float(np.finfo(np.float32).max)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionSettings:
    """Static settings of an attention call, which are part of the compiled kernel. Hashable."""

    # Factor of the logits; 1 if `Arguments.scale` is an array.
    scale: float
    is_causal: bool = False
    # Number of positions that a query sees to its left and right; (left, 0) if causal. None for no
    # window.
    window: tuple[int, int] | None = None
    dropout_rate: float = 0.0
    # True to use one dropout mask [T, S] for all batch entries and heads.
    broadcast_dropout: bool = False
    # True to multiply the gradient of the logits in FP32, which halves the error but cannot use
    # Tensor Cores.
    wide_gradients: bool = False
    # True to return the log-sum-exp of the logits with the result.
    residual: bool = False
    # `jax.default_matmul_precision` of the call. The backward pass is traced after it has ended.
    precision: str | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionArguments:
    """Checked arguments of attention. Optional arrays are None if they are not passed.

    Query is `[B, T, N, H]`, key `[B, S, K, H]` and value `[B, S, K, V]`. Bias and mask have four
    dimensions, each of size 1 or that of `[B, N, T, S]`. Lengths are int32 `[B]`.
    """

    bias: Any
    dropout_rng: Any
    key: Any
    key_lengths: Any
    mask: Any
    query: Any
    query_lengths: Any
    # Scalar array that multiplies the logits; None if the scale is the number `settings.scale`.
    scale: Any
    value: Any
    settings: AttentionSettings = dataclasses.field(metadata={"static": True})

    @property
    def logits_shape(self) -> tuple[int, int, int, int]:
        """Shape of the logits, `[B, N, T, S]`."""
        batch, positions, heads, _ = self.query.shape
        return batch, heads, positions, self.key.shape[1]

    @property
    def may_mask_rows(self) -> bool:
        """True if some query may see no key."""
        _, _, queries, keys = self.logits_shape
        window = self.settings.window
        beyond = window is not None and queries > keys + window[0]
        optional = (self.bias, self.mask, self.query_lengths, self.key_lengths)
        return beyond or any(array is not None for array in optional)


def check_implementation(implementation: object) -> str:
    """Returns the name of an implementation; "auto" for None, which is JAX's default.

    Raises:
      AttentionError: if the implementation does not exist.
    """
    if implementation is None:
        return "auto"
    if implementation not in ATTENTION:
        raise AttentionError(
            f"Unknown implementation={implementation!r}."
            f"{_core.did_you_mean(implementation, ATTENTION)} Allowed: "
            f"{', '.join(map(repr, ATTENTION))}, and None, which is 'auto'; for example "
            "dot_product_attention(query, key, value, implementation='auto')."
        )
    return implementation


def with_scaled_query(args: AttentionArguments) -> AttentionArguments:
    """Returns arguments without an array `scale`, by multiplying the query with it in FP32."""
    if args.scale is None:
        return args
    query = args.query.astype(_core.wide_dtype(args.query.dtype))
    query = (query * args.scale.astype(query.dtype)).astype(args.query.dtype)
    return dataclasses.replace(args, query=query, scale=None)


def arguments(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    is_causal: bool = False,
    scale: ArrayLike | None = None,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: jax.Array | None = None,
    broadcast_dropout: bool = False,
    policy: PolicyLike | None = None,
    wide_gradients: bool = False,
    return_residual: bool = False,
) -> AttentionArguments:
    """Checks the arguments of `dot_product_attention`, where they are documented.

    `broadcast_dropout` and `wide_gradients` are internal; see `Settings`.

    Returns:
      The arguments in one form: a batch dimension, four dimensions of bias and mask, int32 lengths.

    Raises:
      AttentionError: if shapes or dtypes do not fit together, or a setting is not allowed.
      PolicyError: if `policy` is not a policy.
    """
    query, key, value = (
        _array(a, n) for a, n in ((query, "query"), (key, "key"), (value, "value"))
    )
    if policy is not None:
        compute = get_policy(policy).compute_dtype
        query, key, value = (array.astype(compute) for array in (query, key, value))
    _check_dtypes(query, key, value)
    query, key, value = (with_rank(a, 4) for a in (query, key, value))
    _check_shapes(query, key, value)
    batch, queries, heads, size = query.shape
    logits = (batch, heads, queries, key.shape[1])
    number, array = _scale(scale, size)
    causal, window = structure(is_causal, local_window_size)
    return AttentionArguments(
        query=query,
        key=key,
        value=value,
        bias=_optional(_bias, bias, logits),
        mask=_optional(_mask, mask, logits),
        query_lengths=_optional(_lengths, query_seq_lengths, "query_seq_lengths", batch, queries),
        key_lengths=_optional(
            _lengths, key_value_seq_lengths, "key_value_seq_lengths", batch, key.shape[1]
        ),
        dropout_rng=_checked_rng(dropout_rate, dropout_rng),
        scale=array,
        settings=AttentionSettings(
            scale=number,
            is_causal=causal,
            window=window,
            dropout_rate=float(dropout_rate),
            broadcast_dropout=broadcast_dropout,
            wide_gradients=wide_gradients,
            residual=_flag(return_residual, "return_residual"),
        ),
    )


# ---------------------------------------------------------------------------
# Query, key, value
# ---------------------------------------------------------------------------


def _array(value: ArrayLike, name: str) -> jax.Array:
    array = jnp.asarray(value)
    if array.ndim not in (3, 4):
        raise AttentionError(
            f"{name} has shape {array.shape}. Allowed: [batch, positions, heads, size], or without "
            f"the batch; for example {name}.reshape(batch, positions, heads, size)."
        )
    return array


def with_rank(array: jax.Array, ndim: int) -> jax.Array:
    """Adds leading dimensions of size 1."""
    return array.reshape(*(1,) * (ndim - array.ndim), *array.shape)


def _check_dtypes(query: jax.Array, key: jax.Array, value: jax.Array) -> None:
    dtypes = [array.dtype for array in (query, key, value)]
    names = ", ".join(
        f"{name} {dtype.name}"
        for name, dtype in zip(("query", "key", "value"), dtypes, strict=True)
    )
    if len(set(dtypes)) > 1:
        widest = max(dtypes, key=lambda dtype: _core.bits(dtype) if dtype.name in _DTYPES else 0)
        raise AttentionError(
            f"{names}: the three must share a dtype. Cast them, or name the compute dtype: "
            f"dot_product_attention(query, key, value, policy={widest.name!r})."
        )
    if dtypes[0].name not in _DTYPES:
        raise AttentionError(
            f"{names}. Allowed: {', '.join(_DTYPES)}; for example "
            "dot_product_attention(query, key, value, policy='bfloat16')."
        )


def _check_shapes(query: jax.Array, key: jax.Array, value: jax.Array) -> None:
    shapes = f"query {query.shape}, key {key.shape}, value {value.shape}"
    if key.shape[:3] != value.shape[:3]:
        raise AttentionError(f"{shapes}: key and value differ in batch, positions or heads.")
    if query.shape[0] != key.shape[0]:
        raise AttentionError(
            f"{shapes}: the batches differ. Broadcast the smaller one: jnp.broadcast_to(key, …)."
        )
    if query.shape[3] != key.shape[3]:
        raise AttentionError(f"{shapes}: query and key differ in head size.")
    # An empty batch, or no queries, is allowed: the result is empty, as in JAX.
    if not all((*query.shape[2:], *key.shape[1:], *value.shape[1:])):
        raise AttentionError(f"{shapes}: a dimension is 0.")
    if query.shape[2] % key.shape[2]:
        raise AttentionError(
            f"{shapes}: {query.shape[2]} query heads cannot share {key.shape[2]} key heads. "
            "Grouped-query attention requires a multiple."
        )


# ---------------------------------------------------------------------------
# Bias, mask, lengths
# ---------------------------------------------------------------------------


def _optional(check: Callable[..., jax.Array], value: ArrayLike | None, *args: Any) -> Any:
    """Returns the checked array of an argument that may be None."""
    return None if value is None else check(jnp.asarray(value), *args)


def _bias(bias: jax.Array, logits: tuple[int, ...]) -> jax.Array:
    if jnp.issubdtype(bias.dtype, jnp.integer):
        bias = bias.astype(jnp.float32)
    if not jnp.issubdtype(bias.dtype, jnp.floating):
        raise AttentionError(
            f"bias is {bias.dtype.name}; it is added to the logits and must be real numbers. A "
            "bool mask has its own argument: dot_product_attention(query, key, value, mask=mask)."
        )
    return _broadcastable(bias, "bias", logits)


def _mask(mask: jax.Array, logits: tuple[int, ...]) -> jax.Array:
    if mask.dtype != np.bool_:
        raise AttentionError(
            f"mask is {mask.dtype.name}, not bool. Write mask=mask.astype(bool), or, for a mask "
            "that is added to the logits, bias=mask."
        )
    return _broadcastable(mask, "mask", logits)


def _broadcastable(array: jax.Array, name: str, logits: tuple[int, ...]) -> jax.Array:
    fits = array.ndim <= 4 and all(
        size in (1, whole) for size, whole in zip(array.shape[::-1], logits[::-1], strict=False)
    )
    if not fits:
        raise AttentionError(
            f"{name} has shape {array.shape}, which does not broadcast to the logits' "
            f"[batch, heads, queries, keys] = {list(logits)}."
        )
    return with_rank(array, 4)


def _lengths(lengths: jax.Array, name: str, batch: int, positions: int) -> jax.Array:
    if not jnp.issubdtype(lengths.dtype, jnp.integer) or lengths.shape != (batch,):
        raise AttentionError(
            f"{name} is {lengths.dtype.name} of shape {lengths.shape}. Allowed: integers, one for "
            f"each of the {batch} sequences; for example {name}=mask.sum(-1)."
        )
    if not isinstance(lengths, Tracer):
        values = np.asarray(lengths)
        if values.min() < 0 or values.max() > positions:
            raise AttentionError(
                f"{name}={values.tolist()}: a length lies between 0 and the {positions} positions."
            )
    return lengths.astype(jnp.int32)


# ---------------------------------------------------------------------------
# Settings
# ---------------------------------------------------------------------------


def _scale(scale: Any, size: int) -> tuple[float, Any]:
    """Returns the scale as (number, None); as (1, array) if it is traced."""
    if scale is None:
        return size**-0.5, None
    traced = isinstance(scale, Tracer) and math.prod(scale.shape) == 1
    if traced and jnp.issubdtype(scale.dtype, jnp.floating):
        return 1.0, scale.reshape(())
    number = isinstance(scale, (int, float, np.generic, np.ndarray, jax.Array))
    if isinstance(scale, Tracer) or not number or np.size(scale) != 1:
        raise AttentionError(
            f"scale={scale!r} is not a number. Allowed: a number, or a floating array of one "
            "element; for example scale=head_size**-0.5."
        )
    value = float(np.asarray(scale).reshape(()))
    if not math.isfinite(value):
        raise AttentionError(f"scale={scale!r} is not finite; for example scale=head_size**-0.5.")
    return value, None


def structure(is_causal: object, size: object) -> tuple[bool, tuple[int, int] | None]:
    """Returns causality and window."""
    causal = _flag(is_causal, "is_causal")
    if size is None:
        return causal, None
    pair = _pair(size)
    if pair is None or min(pair) < 0:
        raise AttentionError(
            f"local_window_size={size!r} is neither an integer nor a pair (left, right) of "
            "integers that are not negative; for example local_window_size=(1023, 0)."
        )
    left, right = pair
    # A window with right = 0 is causal, and cuDNN supports windows only with a causal mask.
    return (True, (left, 0)) if causal or right == 0 else (False, pair)


def _pair(size: Any) -> tuple[int, int] | None:
    """Returns a window as (left, right); None if it is not an integer or a pair of integers."""
    pair = size if isinstance(size, (tuple, list)) else (size, size)
    if len(pair) != 2 or any(isinstance(n, (bool, np.bool_)) for n in pair):
        return None
    try:
        left, right = map(operator.index, pair)
    except TypeError:
        return None
    return left, right


def _flag(value: object, name: str) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise AttentionError(
            f"{name}={value!r} is neither True nor False; it is part of the compiled kernel."
        )
    return bool(value)


def _checked_rng(rate: object, rng: jax.Array | None) -> jax.Array | None:
    if isinstance(rate, Tracer) or not isinstance(rate, (int, float)) or not 0 <= rate < 1:
        raise AttentionError(
            f"dropout_rate={rate!r} is not a number with 0 <= dropout_rate < 1; for example "
            "dropout_rate=0.1."
        )
    if rate and rng is None:
        raise AttentionError(
            f"dropout_rate={rate!r} without a key. Write dropout_rng=jax.random.key(0), or "
            "dropout_rate=0.0 to disable dropout."
        )
    return rng if rate else None


def sees(window: tuple[int, int] | None, queries: Any, keys: Any) -> Any:
    """Returns a bool mask for int32 positions, which are broadcast.

    Args:
      window: positions to the left and right of a query that it sees; None: it sees the positions
        up to its own, as with a causal mask.
      queries, keys: arrays of JAX or NumPy.
    """
    if window is None:
        return keys <= queries
    left, right = window
    return (keys >= queries - left) & (keys <= queries + right)


def masks_at(args: AttentionArguments, queries: jax.Array, keys: jax.Array) -> list[jax.Array]:
    """Returns bool masks of causality, window and lengths for int32 positions, which are broadcast.

    The first of their dimensions is the batch.
    """
    masks = []
    if args.settings.is_causal or args.settings.window is not None:
        masks.append(sees(args.settings.window, queries, keys))
    for lengths, positions in ((args.query_lengths, queries), (args.key_lengths, keys)):
        if lengths is not None:
            masks.append(positions < lengths.reshape(-1, *(1,) * (positions.ndim - 1)))
    return masks
