"""The test networks in Linen; `models_nnx` has their counterparts."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(16)(x))
        x = nn.LayerNorm()(x)
        return nn.Dense(4, name="head")(x)


class Perceptron(nn.Module):
    """Model of few parameters, as most time of a validation is the compilation of its steps."""

    @nn.compact
    def __call__(self, x):
        hidden = nn.tanh(nn.Dense(16, use_bias=False, name="hidden")(x))
        return nn.Dense(4, use_bias=False, name="out")(hidden)


class Outer(nn.Module):
    """Model that calls another one."""

    inner: nn.Module

    def __call__(self, *args):
        return self.inner(*args)


class TiedLM(nn.Module):
    """Language model whose embedding table is also the output layer."""

    def setup(self):
        self.embed = nn.Embed(32, 16)
        self.body = nn.Sequential([nn.Dense(32), nn.gelu, nn.Dense(16)])
        self.norm = nn.RMSNorm()

    def __call__(self, tokens):
        return self.embed.attend(self.encode(tokens))

    def encode(self, tokens):
        x = self.embed(tokens)
        return self.norm(x + self.body(x))

    def transposed(self, tokens):
        return self.encode(tokens) @ self.embed.embedding.T


class CNN(nn.Module):
    @nn.compact
    def __call__(self, images, train=True):
        x = nn.Conv(8, (3, 3), name="conv")(images)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, name="batch_norm")(x))
        x = nn.avg_pool(x, (2, 2), (2, 2))
        x = nn.ConvTranspose(4, (3, 3), name="up")(x)
        x = nn.relu(nn.GroupNorm(num_groups=2, name="group_norm")(x))
        return nn.Dense(4, name="head")(x.mean(axis=(1, 2)))


class Recurrent(nn.Module):
    cell: type[nn.RNNCellBase]

    @nn.compact
    def __call__(self, x):
        return nn.Dense(4, name="head")(nn.RNN(self.cell(8, name="cell"), name="rnn")(x))


class Bidirectional(nn.Module):
    @nn.compact
    def __call__(self, x):
        forward, backward = nn.RNN(nn.LSTMCell(8)), nn.RNN(nn.GRUCell(8))
        return nn.Bidirectional(forward, backward)(x)


class ConvRecurrent(nn.Module):
    @nn.compact
    def __call__(self, images):
        return nn.RNN(nn.ConvLSTMCell(4, (3, 3)))(images)


class Attention(nn.Module):
    normalize_qk: bool = False

    @nn.compact
    def __call__(self, x, mask=None):
        attention = nn.MultiHeadDotProductAttention(
            num_heads=2, normalize_qk=self.normalize_qk, name="attention"
        )
        return x + attention(x, mask=mask)


class Block(nn.Module):
    """Transformer block, causal without a mask; its second result is stacked by a scan."""

    @nn.compact
    def __call__(self, x, mask=None):
        y = nn.LayerNorm()(x)
        if mask is None:
            mask = nn.make_causal_mask(jnp.zeros(x.shape[:2]))
        x = x + nn.MultiHeadDotProductAttention(num_heads=2)(y, mask=mask)
        y = nn.Dense(32, name="up")(nn.LayerNorm()(x))
        return x + nn.Dense(x.shape[-1], name="down")(nn.gelu(y)), None


class Transformer(nn.Module):
    """Embedding, blocks (in a Python loop, or scanned and rematerialized), norm, head."""

    layers: int = 2
    scanned: bool = False

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(32, 16, name="embed")(tokens)
        if self.scanned:
            blocks = nn.scan(
                nn.remat(Block),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=self.layers,
            )
            x, _ = blocks(name="blocks")(x, None)
        else:
            for layer in range(self.layers):
                x, _ = Block(name=f"block_{layer}")(x)
        return nn.Dense(32, name="lm_head")(nn.LayerNorm()(x))


class EncoderDecoder(nn.Module):
    """Encoder and decoder; token 0 is padding, which the decoder does not attend to."""

    @nn.compact
    def __call__(self, source, target):
        embed = nn.Embed(32, 16, name="embed")
        seen = nn.make_attention_mask(source > 0, source > 0, dtype=bool)
        context, _ = Block(name="encoder")(embed(source), seen)
        seen = nn.make_attention_mask(jnp.ones(target.shape, bool), source > 0, dtype=bool)
        x = DecoderBlock(name="decoder")(embed(target), context, seen)
        return nn.Dense(32, name="lm_head")(nn.LayerNorm(name="norm")(x))


class DecoderBlock(nn.Module):
    @nn.compact
    def __call__(self, x, context, mask):
        causal = nn.make_causal_mask(x[..., 0], dtype=bool)
        attend = nn.MultiHeadDotProductAttention(num_heads=2, name="self_attention")
        x = x + attend(nn.LayerNorm(name="self_norm")(x), mask=causal)
        attend = nn.MultiHeadDotProductAttention(num_heads=2, name="cross_attention")
        x = x + attend(nn.LayerNorm(name="cross_norm")(x), context, mask=mask)
        return x + nn.Dense(16, name="out")(nn.relu(nn.Dense(32, name="up")(x)))


class ViT(nn.Module):
    """Vision transformer with patches of 4 x 4, a class token and learned positions."""

    @nn.compact
    def __call__(self, images):
        x = nn.Conv(16, (4, 4), strides=4, name="patchify")(images)
        x = x.reshape(x.shape[0], -1, 16)
        token = self.param("token", nn.initializers.normal(), (1, 1, 16))
        positions = self.param("positions", nn.initializers.normal(), (1, 1 + x.shape[1], 16))
        x = jnp.concatenate([jnp.broadcast_to(token, (x.shape[0], 1, 16)), x], axis=1) + positions
        x, _ = Block(name="block")(x, jnp.ones((1, 1, 1, x.shape[1]), bool))
        return nn.Dense(4, name="head")(nn.LayerNorm(name="norm")(x[:, 0]))


class UNet(nn.Module):
    """U-Net with one level and a skip connection; the time step is an integer."""

    @nn.compact
    def __call__(self, images, step):
        time = nn.Dense(16, name="time")(sinusoids(step, 8))
        skip = nn.silu(nn.GroupNorm(4, name="norm")(nn.Conv(8, (3, 3), name="conv")(images)))
        x = nn.Conv(16, (3, 3), strides=2, name="down")(skip) + time[:, None, None]
        x = nn.silu(nn.GroupNorm(4, name="bottom_norm")(x))
        attend = nn.MultiHeadDotProductAttention(num_heads=2, name="attention")
        x = x + attend(x.reshape(x.shape[0], -1, 16)).reshape(x.shape)
        x = nn.ConvTranspose(8, (3, 3), strides=(2, 2), name="up")(x)
        return nn.Conv(1, (3, 3), name="out")(jnp.concatenate([x, skip], axis=-1))


def sinusoids(step, size):
    """Returns sinusoidal embeddings `[B, size]` of integers `[B]`, computed in FP32."""
    angles = step[:, None].astype(jnp.float32) * jnp.exp(-jnp.arange(size // 2.0))[None]
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


class Ensemble(nn.Module):
    @nn.compact
    def __call__(self, x):
        members = nn.vmap(
            MLP,
            in_axes=None,
            axis_size=3,
            variable_axes={"params": 0},
            split_rngs={"params": True},
        )
        return members(name="members")(x).mean(axis=0)


class Shared(nn.Module):
    """Model with one Dense that both the model and its submodule call."""

    def setup(self):
        self.dense = nn.Dense(8)
        self.child = Borrower(self.dense)

    def __call__(self, x):
        return self.child(self.dense(x))


class Borrower(nn.Module):
    dense: nn.Module

    def __call__(self, x):
        return self.dense(nn.relu(x))


class HardCoded(nn.Module):
    """Model with a user-defined `dtype` attribute that sets float32 in every layer."""

    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(8, dtype=self.dtype)(x)
        return nn.Dense(4, dtype=jnp.float32, name="head")(x)


class RawParam(nn.Module):
    @nn.compact
    def __call__(self, x):
        boxed = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
        w = self.param("w", nn.initializers.lecun_normal(), (x.shape[-1], 8))
        v = self.param("v", boxed, (8, 4))
        return x @ w @ v


class Einsum(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Einsum((8, 2, 4), "bi,ihd->bhd", name="split")(x)
        return nn.Einsum((2, 4, 8), "bhd,hdo->bo", name="merge")(nn.relu(x))


class MoE(nn.Module):
    """Mixture of two experts; the softmax of the router is plain `jax.nn.softmax`."""

    @nn.compact
    def __call__(self, x):
        gates = Router(name="router")(x)
        experts = jnp.stack([nn.Dense(8, name=f"expert_{i}")(x) for i in range(2)], axis=-1)
        return (experts * gates[..., None, :].astype(experts.dtype)).sum(axis=-1)


class Router(nn.Module):
    @nn.compact
    def __call__(self, x):
        return jax.nn.softmax(nn.Dense(2)(x))


class OfEachKind(nn.Module):
    """Model with one layer of each class, and one with a custom `dot_general`."""

    @nn.compact
    def __call__(self, x):
        own = lambda *args, **kwargs: lax.dot_general(*args, **kwargs)
        x = nn.Dense(30, name="odd")(x)
        x = nn.Dense(64, name="own", dot_general=own)(x)
        x = nn.DenseGeneral((4, 16), name="einsum")(x)
        return nn.DenseGeneral(32, axis=(-2, -1), name="general")(x)
