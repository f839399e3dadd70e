"""Attention function of Linen layers."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable

import flax.linen as nn
import jax
from jax.lax import PrecisionLike
from jax.typing import DTypeLike

from jaxmp._attention._layer import MaskHints, Weights, layer_attention, operands
from jaxmp._flax._attention import dropout_options
from jaxmp.errors import AttentionError


@dataclasses.dataclass(frozen=True)
class AttentionFunction:
    """Result of `jaxmp.linen.attention_fn`. Compared and pickled by its mask hints."""

    mask_hints: MaskHints

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
        module: nn.Module | None = None,
        force_fp32_for_softmax: bool = True,
        qk_attn_weights_einsum: Callable[..., jax.Array] | None = None,
        attn_weights_value_einsum: Callable[..., jax.Array] | None = None,
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
            sow = functools.partial(module.sow, "intermediates", "attention_weights")
        weights = Weights(
            **dropout_options(dropout_rate, dropout_rng, broadcast_dropout, deterministic),
            sow=sow,
            precision=precision,
            qk_einsum=qk_attn_weights_einsum,
            value_einsum=attn_weights_value_einsum,
        )
        promoted = operands(query, key, value, dtype)
        return layer_attention(promoted, bias, mask, self.mask_hints, weights)


# Flax inspects the signature about a dozen times in each call of an attention layer.
_parameters = list(inspect.signature(AttentionFunction.__call__).parameters.values())[1:]
AttentionFunction.__signature__ = inspect.Signature(_parameters)  # pyright: ignore
