"""Attention function of NNX layers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.lax import PrecisionLike
from jax.typing import DTypeLike

from jaxmp._attention._layer import MaskHints, Weights, layer_attention, operands
from jaxmp._flax._attention import dropout_options


@dataclasses.dataclass(frozen=True)
class AttentionFunction:
    """Result of `jaxmp.nnx.attention_fn`. Compared and pickled by its mask hints."""

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
        module: nnx.Module | None = None,
        promote_dtype: Callable[..., Any] | None = None,
        is_causal: bool = False,
    ) -> jax.Array:
        if promote_dtype is None:
            promoted = operands(query, key, value, dtype)
        else:
            promoted = promote_dtype((query, key, value), dtype=dtype)
        sow = None
        if module is not None:
            sow = functools.partial(module.sow, nnx.Intermediate, "attention_weights")
        weights = Weights(
            **dropout_options(dropout_rate, dropout_rng, broadcast_dropout, deterministic),
            sow=sow,
            precision=precision,
        )
        hints = self.mask_hints
        if is_causal:
            hints = dataclasses.replace(hints, is_causal=True)
        return layer_attention(promoted, bias, mask, hints, weights)
