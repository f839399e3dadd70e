"""Attention function of a Flax layer, common to Linen and NNX."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax.lax import PrecisionLike
from jax.typing import DTypeLike

from jaxmp._attention._declared import Declaration
from jaxmp._attention._layer import MaskHints, Weights, layer_attention, operands
from jaxmp._core._dtypes import is_16bit
from jaxmp._policies._policy import Policy
from jaxmp.errors import AttentionError

Function = TypeVar("Function", bound=Callable[..., jax.Array])


@dataclasses.dataclass(frozen=True)
class AttentionFunction:
    """Result of `attention_fn` of `jaxmp.linen` and `jaxmp.nnx`; compared by its fields.

    Attributes:
      mask_hints: structure of the mask, and the implementation.
      intermediates: the collection, or type of Variable, in which a layer stores its weights.
    """

    mask_hints: MaskHints
    intermediates: Any = "intermediates"

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
            sow = functools.partial(module.sow, self.intermediates, "attention_weights")
        is_dropped = bool(dropout_rate) and not deterministic
        weights = Weights(
            dropout_rate=0.0 if deterministic else dropout_rate,
            dropout_rng=dropout_rng if is_dropped else None,
            broadcast_dropout=broadcast_dropout,
            sow=sow,
            precision=precision,
            qk_einsum=qk_attn_weights_einsum,
            value_einsum=attn_weights_value_einsum,
        )
        promoted = (
            operands(query, key, value, dtype)
            if promote_dtype is None
            else promote_dtype((query, key, value), dtype=dtype)
        )
        hints = self.mask_hints
        hints = dataclasses.replace(hints, is_causal=True) if is_causal else hints
        return layer_attention(promoted, bias, mask, hints, weights)


# Flax inspects the signature about a dozen times in each call of an attention layer.
_parameters = list(inspect.signature(AttentionFunction.__call__).parameters.values())[1:]
AttentionFunction.__signature__ = inspect.Signature(_parameters)  # pyright: ignore


def attention_function(
    current: Function,
    default: Callable[..., jax.Array],
    make: Callable[[MaskHints], Function],
    policy: Policy,
    path: str,
) -> Function:
    """Returns the attention function of a layer under a policy.

    Args:
      current: the function that the layer has. One that is neither `default` nor jaxmp's is kept.
      default: the framework's default function.
      make: makes one of jaxmp's functions.
      policy: the policy of the layer.
      path: the path of the layer.
    """
    hints = getattr(current, "mask_hints", None)
    is_requested = policy.implementation != "auto" or policy.mask != "array"
    if current is default and (is_requested or is_16bit(policy.compute_dtype)):
        hints = MaskHints()
    if hints is None:
        return current
    if hints.implementation == "auto":
        hints = dataclasses.replace(hints, implementation=policy.implementation)
    if policy.mask != "array":
        declared = Declaration(policy.mask, policy.window, path)
        hints = dataclasses.replace(hints, declared=declared)
    return make(hints)
