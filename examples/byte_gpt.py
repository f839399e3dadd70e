"""A byte-level GPT in Flax Linen and in Flax NNX, its training text, and the option `--recipe`.

The models contain no dtypes: `train_lm.py` applies a recipe to them. Both use the same module
names, so that the rules of a recipe match both. The text is the source code of Python's standard
library, which is part of every installation of Python.

Shape suffixes: B batch, T position, D width, F hidden, V byte value.
"""

import functools
import hashlib
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

VOCABULARY = 256  # a token is a byte

# ---------------------------------------------------------------------------
# Linen
# ---------------------------------------------------------------------------


class Block(nn.Module):
    """A pre-norm transformer block."""

    heads: int

    @nn.compact
    def __call__(self, x_BTD: jax.Array, mask_B1TT: jax.Array) -> jax.Array:
        """Returns x_BTD after attention and a two-layer perceptron, each with a residual."""
        width = x_BTD.shape[-1]
        h_BTD = nn.LayerNorm(name="attention_norm")(x_BTD)
        attention = nn.MultiHeadDotProductAttention(self.heads, name="attention")
        x_BTD = x_BTD + attention(h_BTD, mask=mask_B1TT)
        h_BTD = nn.LayerNorm(name="mlp_norm")(x_BTD)
        h_BTF = nn.gelu(nn.Dense(4 * width, name="mlp_up")(h_BTD))
        return x_BTD + nn.Dense(width, name="mlp_down")(h_BTF)


def unchanged(x_BTD: jax.Array) -> jax.Array:
    """Returns x_BTD."""
    return x_BTD


class GPT(nn.Module):
    """Transformer that predicts each byte from the bytes before it."""

    layers: int = 3
    width: int = 128
    heads: int = 4
    max_length: int = 64
    constrain: Callable[[jax.Array], jax.Array] = unchanged  # sets the sharding of x_BTD

    @nn.compact
    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        """Returns logits_BTV for int tokens_BT, at most `max_length` long."""
        x_BTD = nn.Embed(VOCABULARY, self.width, name="token_embedding")(tokens_BT)
        positions_1T = jnp.arange(tokens_BT.shape[1])[None]
        positions = nn.Embed(self.max_length, self.width, name="position_embedding")
        x_BTD = self.constrain(x_BTD + jnp.broadcast_to(positions(positions_1T), x_BTD.shape))
        mask_B1TT = nn.make_causal_mask(tokens_BT, dtype=bool)
        for layer in range(self.layers):
            x_BTD = self.constrain(Block(self.heads, name=f"block_{layer}")(x_BTD, mask_B1TT))
        x_BTD = nn.LayerNorm(name="final_norm")(x_BTD)
        return nn.Dense(VOCABULARY, use_bias=False, name="lm_head")(x_BTD)


# ---------------------------------------------------------------------------
# NNX
# ---------------------------------------------------------------------------


class NnxBlock(nnx.Module):
    """`Block` in NNX."""

    def __init__(self, width: int, heads: int, *, rngs: nnx.Rngs) -> None:
        """Makes layers for vectors of `width`."""
        self.attention_norm = nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs)
        self.mlp_norm = nnx.LayerNorm(width, rngs=rngs)
        self.mlp_up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.mlp_down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x_BTD: jax.Array, mask_B1TT: jax.Array) -> jax.Array:
        """Returns x_BTD after attention and a two-layer perceptron, each with a residual."""
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), mask=mask_B1TT)
        h_BTF = nnx.gelu(self.mlp_up(self.mlp_norm(x_BTD)))
        return x_BTD + self.mlp_down(h_BTF)


class NnxGPT(nnx.Module):
    """`GPT` in NNX."""

    def __init__(self, gpt: GPT, *, rngs: nnx.Rngs) -> None:
        """Makes layers with the sizes of `gpt`."""
        self.token_embedding = nnx.Embed(VOCABULARY, gpt.width, rngs=rngs)
        self.position_embedding = nnx.Embed(gpt.max_length, gpt.width, rngs=rngs)
        self.layers = gpt.layers
        for layer in range(gpt.layers):
            setattr(self, f"block_{layer}", NnxBlock(gpt.width, gpt.heads, rngs=rngs))
        self.final_norm = nnx.LayerNorm(gpt.width, rngs=rngs)
        self.lm_head = nnx.Linear(gpt.width, VOCABULARY, use_bias=False, rngs=rngs)

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        """Returns logits_BTV for int tokens_BT, at most `max_length` long."""
        positions_1T = jnp.arange(tokens_BT.shape[1])[None]
        positions_1TD = self.position_embedding(positions_1T)
        x_BTD = self.token_embedding(tokens_BT)
        x_BTD = x_BTD + jnp.broadcast_to(positions_1TD, x_BTD.shape)
        mask_B1TT = nnx.make_causal_mask(tokens_BT, dtype=bool)
        for layer in range(self.layers):
            x_BTD = getattr(self, f"block_{layer}")(x_BTD, mask_B1TT)
        return self.lm_head(self.final_norm(x_BTD))


def in_nnx(gpt: GPT, params: Any) -> NnxGPT:
    """Returns the same model in NNX, with the values of Linen's `params`."""
    model = NnxGPT(gpt, rngs=nnx.Rngs(0))
    nnx.update(model, params)
    return model


# ---------------------------------------------------------------------------
# Text
# ---------------------------------------------------------------------------

# Some distributions of Python omit the tests; installed packages are not part of the library.
_EXCLUDED = {"test", "tests", "idle_test", "site-packages", "dist-packages"}


class Text(NamedTuple):
    """Bytes of the standard library; each file belongs to one of the two parts."""

    train: np.ndarray  # uint8
    held_out: np.ndarray  # uint8, about a tenth


@functools.cache
def standard_library_text() -> Text:
    """Reads `*.py` of the standard library; the hash of a file's name decides its part."""
    root = Path(sysconfig.get_path("stdlib"))
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if not _EXCLUDED.intersection(name.parts):
            parts[_is_held_out(name.as_posix())].append(path.read_bytes())
    return Text(*(np.frombuffer(b"\n".join(parts[part]), np.uint8) for part in (False, True)))


def _is_held_out(name: str) -> bool:
    return hashlib.sha256(name.encode()).digest()[0] < 26  # 26 / 256: a tenth


def random_batch(
    text: np.ndarray, batch_size: int, seq_len: int, seed: int, step: int, rows: slice = slice(None)
):
    """Returns int32 (B, T+1) windows that depend only on `seed` and `step`, also after a resume.

    With `rows`, only those of the batch are read.
    """
    starts = np.random.default_rng((seed, step)).integers(0, len(text) - seq_len, batch_size)
    return _windows(text, starts[rows], seq_len)


def even_batches(text: np.ndarray, count: int, batch_size: int, seq_len: int):
    """Returns `count` int32 (B, T+1) batches with windows at equal distances in `text`."""
    starts = np.linspace(0, len(text) - seq_len - 1, count * batch_size).astype(int)
    return _windows(text, starts, seq_len).reshape(count, batch_size, seq_len + 1)


def _windows(text: np.ndarray, starts: np.ndarray, seq_len: int) -> np.ndarray:
    return text[starts[:, None] + np.arange(seq_len + 1)].astype(np.int32)
