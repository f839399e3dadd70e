"""Attention functions of Flax layers, common to Linen and NNX."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.lax import PrecisionLike
from jax.typing import DTypeLike

from jaxmp import _core
from jaxmp._attention import _arguments, _declared, run_attention
from jaxmp._attention._declared import Declaration
from jaxmp._attention._plain import attend
from jaxmp._policies._policy import Policy
from jaxmp.errors import AttentionError

# A mask whose elements are known is a NumPy array.
MaskArray: TypeAlias = jax.Array | np.ndarray
# Query, key and value.
Operands: TypeAlias = tuple[jax.Array, jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True)
class AttentionFunction:
    """Result of `attention_fn`; compared by its fields.

    The first three fields are the arguments of `attention_fn`.
    """

    implementation: str = "auto"
    is_causal: bool = False
    local_window_size: int | tuple[int, int] | None = None
    # The structure that the layer's policy declares for its mask; None: it declares none.
    declared: Declaration | None = None

    def __post_init__(self) -> None:
        if isinstance(self.local_window_size, list):
            object.__setattr__(self, "local_window_size", tuple(self.local_window_size))

    def __call__(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        bias: jax.Array | None = None,
        mask: jax.Array | None = None,
        broadcast_dropout: bool = True,
        dropout_rng: jax.Array | None = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype: DTypeLike | None = None,
        precision: PrecisionLike = None,
        module: Any = None,
        # Arguments of Linen.
        force_fp32_for_softmax: bool = True,
        qk_attn_weights_einsum: Callable[..., jax.Array] | None = None,
        attn_weights_value_einsum: Callable[..., jax.Array] | None = None,
        # Arguments of NNX.
        promote_dtype: Callable[..., Any] | None = None,
        is_causal: bool = False,
    ) -> jax.Array:
        del force_fp32_for_softmax  # The softmax is always computed in FP32.
        if (qk_attn_weights_einsum is None) != (attn_weights_value_einsum is None):
            raise AttentionError(
                "qk_attn_weights_einsum and attn_weights_value_einsum replace two matmuls of one "
                "computation. Pass both, or neither."
            )
        if precision and qk_attn_weights_einsum:
            raise AttentionError(
                "qk_attn_weights_einsum ignores precision. Pass either precision or the einsums."
            )
        sow = None
        if module is not None:
            # In NNX, this is the name of `nnx.Intermediate`.
            sow = functools.partial(module.sow, "intermediates", "attention_weights")
        dropout = {
            "dropout_rate": 0.0 if deterministic else dropout_rate,
            "dropout_rng": dropout_rng,
            "broadcast_dropout": broadcast_dropout,
        }
        weights = {
            "sow": sow,
            "precision": precision,
            "qk_einsum": qk_attn_weights_einsum,
            "value_einsum": attn_weights_value_einsum,
        }
        operands: Any = query, key, value
        if promote_dtype is None:
            dtype = dtype or jnp.result_type(*operands)
            operands = tuple(jnp.asarray(array, dtype) for array in operands)
        else:
            operands = promote_dtype(operands, dtype=dtype)
        hints = dataclasses.replace(self, is_causal=True) if is_causal else self
        return layer_attention(operands, bias, mask, hints, dropout, weights)


def attention_fn(
    *,
    implementation: str | None = None,
    is_causal: bool = False,
    local_window_size: int | tuple[int, int] | None = None,
) -> AttentionFunction:
    """Returns an `attention_fn` for an attention layer of Flax.

    The layer is a `flax.linen.MultiHeadDotProductAttention` or a `flax.nnx.MultiHeadAttention`. The
    function calls `jaxmp.dot_product_attention`. 16-bit policies install it automatically. Install
    it yourself to declare a causal mask or a window, which lets the fused kernel skip masked
    blocks. A dense mask is read in full; recipes declare padding (`mask = "padding"`).

    Args:
      implementation: as in `dot_product_attention`; None or "auto": the policy decides.
      is_causal: position t attends to positions 0 to t. Do not pass a causal mask as well.
      local_window_size: `(left, right)`, or one number for both.

    Returns:
      A function; equal arguments give equal functions.

    Raises:
      AttentionError: if `implementation` is not valid; when the function is called, the errors of
        `dot_product_attention`, or an error if `sow_weights`, `precision` or custom einsums
        require all weights and the implementation does not store them.

    Example:
      >>> layer = flax.linen.MultiHeadDotProductAttention(
      ...     num_heads=2, attention_fn=jaxmp.attention_fn(is_causal=True)
      ... )
      >>> x = jnp.ones((1, 4, 8))
      >>> layer.init_with_output(jax.random.key(0), x)[0].shape
      (1, 4, 8)
    """
    implementation = _arguments.check_implementation(implementation)
    return AttentionFunction(implementation, is_causal, local_window_size)


def attention_under_policy(
    current: Callable[..., jax.Array],
    default: Callable[..., jax.Array],
    policy: Policy,
    path: str,
) -> Callable[..., jax.Array]:
    """Returns the attention function of a layer under a policy.

    Args:
      current: the function that the layer has. One that is neither `default` nor jaxmp's is kept.
      default: the framework's default function.
      policy: the policy of the layer.
      path: the path of the layer.
    """
    is_requested = policy.implementation != "auto" or policy.mask != "array"
    if current is default and (is_requested or _core.is_16bit(policy.compute_dtype)):
        current = AttentionFunction()
    if not isinstance(current, AttentionFunction):
        return current
    if current.implementation == "auto":
        current = dataclasses.replace(current, implementation=policy.implementation)
    if policy.mask != "array":
        declared = Declaration(policy.mask, policy.window, path)
        current = dataclasses.replace(current, declared=declared)
    return current


def layer_attention(
    operands: Operands,
    bias: jax.Array | None,
    mask: MaskArray | None,
    hints: AttentionFunction,
    dropout: dict[str, Any],
    weights: dict[str, Any],
) -> jax.Array:
    """Computes the attention of a Flax layer.

    Args:
      operands: query `[B..., T, N, H]`, key and value `[B..., S, K, H]`; all of one dtype.
      bias: broadcastable to `[B..., N, T, S]`, or None.
      mask: broadcastable to the same shape, or None; nonzero elements are visible.
      hints: known properties of the mask.
      dropout: arguments of `arguments` for dropout.
      weights: arguments of `attend` that require the weights of all pairs.

    Returns:
      `[B..., T, N, H]` in the dtype of the operands.

    Raises:
      AttentionError: if arguments contradict each other, or the requested implementation does not
        support them.
    """
    query, key, value = operands
    visible = None if mask is None else _as_bool(mask)
    structure = _structure(operands, visible, hints)
    flags = ("sow_weights", "precision", "qk_attn_weights_einsum")
    users = [flag for flag, use in zip(flags, weights.values(), strict=False) if use is not None]
    if users:
        if hints.implementation not in ("auto", "xla"):
            raise AttentionError(
                f"{users[0]} requires the attention weights of all pairs, which "
                f"implementation={hints.implementation!r} never stores. Remove "
                f"{users[0]}, or add a rule with implementation='xla' for the layer."
            )
        visible = _with_hints(operands, visible, hints)
        return attend(
            *operands,
            bias=None if bias is None else _arguments.with_rank(bias, query.ndim),
            mask=None if visible is None else _arguments.with_rank(visible, query.ndim),
            **dropout,
            **weights,
        )
    batch = query.shape[:-3]
    count = math.prod(batch)
    lengths: dict[str, Any] = {}
    if structure is not None:
        query, hints, lengths = structure
        visible = None
    query, key, value = (x.reshape(count, *x.shape[-3:]) for x in (query, key, value))
    call = _arguments.arguments(
        query,
        key,
        value,
        None if bias is None else _flatten_batch(bias, batch),
        None if visible is None else _flatten_batch(visible, batch),
        is_causal=hints.is_causal,
        local_window_size=hints.local_window_size,
        **dropout,
        **lengths,
    )
    out = run_attention(call, hints.implementation)
    return out.reshape(*batch, *out.shape[1:])


def _structure(
    operands: Operands, mask: jax.Array | None, hints: AttentionFunction
) -> tuple[jax.Array, AttentionFunction, dict[str, jax.Array]] | None:
    """Returns query, hints and lengths for a declared mask; None if the mask array is used.

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
        raise _declared.refuse_lengths(declared, queries, keys)
    mask = _with_hints(operands, mask, hints)
    lengths: dict[str, jax.Array] = {}
    if mask is not None:
        full = _full_mask(mask, batch, (queries, keys))
        if isinstance(full, np.ndarray):
            _declared.check_known(full, declared)
        else:
            query = _declared.mark(query, full, declared)
        if declared.is_padded:
            lengths = _declared_lengths(full, declared, math.prod(batch))
    elif declared.is_square:
        raise _declared.refuse_missing(declared)
    hints = AttentionFunction(hints.implementation, declared.is_causal, declared.window)
    return query, hints, lengths


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
    lengths = (jnp.asarray(n, jnp.int32) for n in _declared.sequence_lengths(mask, declared))
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


def _with_hints(
    operands: Operands, mask: jax.Array | None, hints: AttentionFunction
) -> jax.Array | None:
    """Combines a mask with the hinted causality and window, a bool mask `[1..., T, S]`."""
    if not hints.is_causal and hints.local_window_size is None:
        return mask
    query, key, _ = operands
    _, window = _arguments.structure(hints.is_causal, hints.local_window_size)
    ones = (1,) * (query.ndim - 2)
    rows = jnp.arange(query.shape[-3], dtype=jnp.int32).reshape(*ones, -1, 1)
    columns = jnp.arange(key.shape[-3], dtype=jnp.int32).reshape(*ones, 1, -1)
    visible = _arguments.sees(window, rows, columns)
    if mask is None:
        return visible
    return jnp.logical_and(_arguments.with_rank(mask, visible.ndim), visible)
