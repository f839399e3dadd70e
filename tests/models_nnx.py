"""The test networks in NNX: those of `models_linen`, and networks that use features of NNX only."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from models_linen import sinusoids


class MLP(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(8, 16, rngs=rngs)
        self.norm = nnx.LayerNorm(16, rngs=rngs)
        self.head = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        return self.head(self.norm(nnx.relu(self.hidden(x))))


class Perceptron(nnx.Module):
    def __init__(self, rngs, features=8):
        self.hidden = nnx.Linear(features, 16, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(16, 4, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.tanh(self.hidden(x)))


class Dropout(Perceptron):
    def __init__(self, rngs, features=8):
        super().__init__(rngs, features)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(super().__call__(x))


class TiedLM(nnx.Module):
    """Language model whose embedding table is also the output layer."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(32, 16, rngs=rngs)
        up, down = nnx.Linear(16, 32, rngs=rngs), nnx.Linear(32, 16, rngs=rngs)
        self.body = nnx.Sequential(up, nnx.gelu, down)
        self.norm = nnx.RMSNorm(16, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        return self.embed.attend(self.norm(x + self.body(x)))


class CNN(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(3, 8, (3, 3), rngs=rngs)
        self.batch_norm = nnx.BatchNorm(8, rngs=rngs)
        self.up = nnx.ConvTranspose(8, 4, (3, 3), rngs=rngs)
        self.group_norm = nnx.GroupNorm(4, num_groups=2, rngs=rngs)
        self.head = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, images):
        x = nnx.relu(self.batch_norm(self.conv(images)))
        x = self.up(nnx.avg_pool(x, (2, 2), (2, 2)))
        return self.head(nnx.relu(self.group_norm(x)).mean(axis=(1, 2)))


class Recurrent(nnx.Module):
    def __init__(self, cell, rngs):
        self.rnn = nnx.RNN(cell(8, 8, rngs=rngs))
        self.head = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x):
        return self.head(self.rnn(x))


class Bidirectional(nnx.Module):
    def __init__(self, rngs):
        forward, backward = nnx.LSTMCell(8, 8, rngs=rngs), nnx.GRUCell(8, 8, rngs=rngs)
        self.both = nnx.Bidirectional(nnx.RNN(forward), nnx.RNN(backward))

    def __call__(self, x):
        return self.both(x)


def attention(features: int, rngs: nnx.Rngs, **options) -> nnx.MultiHeadAttention:
    return nnx.MultiHeadAttention(2, features, decode=False, rngs=rngs, **options)


class Attention(nnx.Module):
    def __init__(self, rngs, **options):
        self.attention = attention(8, rngs, **options)

    def __call__(self, x):
        return x + self.attention(x)


class GroupedQueries(nnx.Module):
    """Attention in which four query heads share two key and value heads."""

    def __init__(self, rngs):
        self.attention = nnx.MultiHeadAttention(4, 8, num_kv_heads=2, decode=False, rngs=rngs)

    def __call__(self, x):
        return self.attention(x, mask=nnx.make_causal_mask(x[..., 0]))


class Block(nnx.Module):
    """Transformer block, causal without a mask."""

    def __init__(self, rngs):
        self.norm1 = nnx.LayerNorm(16, rngs=rngs)
        self.attention = attention(16, rngs)
        self.norm2 = nnx.LayerNorm(16, rngs=rngs)
        self.up = nnx.Linear(16, 32, rngs=rngs)
        self.down = nnx.Linear(32, 16, rngs=rngs)

    def __call__(self, x, mask=None):
        if mask is None:
            mask = nnx.make_causal_mask(jnp.zeros(x.shape[:2]))
        x = x + self.attention(self.norm1(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class Transformer(nnx.Module):
    """Embedding, blocks (in a Python loop, or scanned and rematerialized), norm, head."""

    def __init__(self, rngs, layers=2, scanned=False):
        self.embed = nnx.Embed(32, 16, rngs=rngs)
        if scanned:
            self.blocks = nnx.split_rngs(splits=layers)(nnx.vmap(Block))(rngs)
        else:
            self.blocks = nnx.List(Block(rngs) for _ in range(layers))
        self.norm = nnx.LayerNorm(16, rngs=rngs)
        self.lm_head = nnx.Linear(16, 32, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        if isinstance(self.blocks, Block):
            step = nnx.remat(lambda x, block: block(x))
            x = nnx.scan(step, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.blocks)
        else:
            for block in self.blocks:
                x = block(x)
        return self.lm_head(self.norm(x))


class EncoderDecoder(nnx.Module):
    """Encoder and decoder; token 0 is padding, which the decoder does not attend to."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(32, 16, rngs=rngs)
        self.encoder = Block(rngs)
        self.decoder = DecoderBlock(rngs)
        self.norm = nnx.LayerNorm(16, rngs=rngs)
        self.lm_head = nnx.Linear(16, 32, rngs=rngs)

    def __call__(self, source, target):
        seen = nnx.make_attention_mask(source > 0, source > 0, dtype=bool)
        context = self.encoder(self.embed(source), seen)
        seen = nnx.make_attention_mask(jnp.ones(target.shape, bool), source > 0, dtype=bool)
        return self.lm_head(self.norm(self.decoder(self.embed(target), context, seen)))


class DecoderBlock(nnx.Module):
    def __init__(self, rngs):
        self.self_norm = nnx.LayerNorm(16, rngs=rngs)
        self.self_attention = attention(16, rngs)
        self.cross_norm = nnx.LayerNorm(16, rngs=rngs)
        self.cross_attention = attention(16, rngs)
        self.up = nnx.Linear(16, 32, rngs=rngs)
        self.out = nnx.Linear(32, 16, rngs=rngs)

    def __call__(self, x, context, mask):
        causal = nnx.make_causal_mask(x[..., 0], dtype=bool)
        x = x + self.self_attention(self.self_norm(x), mask=causal)
        x = x + self.cross_attention(self.cross_norm(x), context, mask=mask)
        return x + self.out(nnx.relu(self.up(x)))


class ViT(nnx.Module):
    """Vision transformer with patches of 4 x 4, a class token and learned positions."""

    def __init__(self, rngs):
        self.patchify = nnx.Conv(3, 16, (4, 4), strides=4, rngs=rngs)
        self.token = nnx.Param(jnp.zeros((1, 1, 16)))
        self.positions = nnx.Param(jnp.zeros((1, 5, 16)))
        self.block = Block(rngs)
        self.norm = nnx.LayerNorm(16, rngs=rngs)
        self.head = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, images):
        x = self.patchify(images)
        x = x.reshape(x.shape[0], -1, 16)
        token = jnp.broadcast_to(self.token[...], (x.shape[0], 1, 16))
        x = jnp.concatenate([token, x], axis=1) + self.positions
        x = self.block(x, jnp.ones((1, 1, 1, x.shape[1]), bool))
        return self.head(self.norm(x[:, 0]))


class UNet(nnx.Module):
    """U-Net with one level and a skip connection; the time step is an integer."""

    def __init__(self, rngs):
        self.time = nnx.Linear(8, 16, rngs=rngs)
        self.conv = nnx.Conv(1, 8, (3, 3), rngs=rngs)
        self.norm = nnx.GroupNorm(8, num_groups=4, rngs=rngs)
        self.down = nnx.Conv(8, 16, (3, 3), strides=2, rngs=rngs)
        self.bottom_norm = nnx.GroupNorm(16, num_groups=4, rngs=rngs)
        self.attention = attention(16, rngs)
        self.up = nnx.ConvTranspose(16, 8, (3, 3), strides=(2, 2), rngs=rngs)
        self.out = nnx.Conv(16, 1, (3, 3), rngs=rngs)

    def __call__(self, images, step):
        time = self.time(sinusoids(step, 8))
        skip = nnx.silu(self.norm(self.conv(images)))
        x = nnx.silu(self.bottom_norm(self.down(skip) + time[:, None, None]))
        x = x + self.attention(x.reshape(x.shape[0], -1, 16)).reshape(x.shape)
        return self.out(jnp.concatenate([self.up(x), skip], axis=-1))


class Ensemble(nnx.Module):
    def __init__(self, rngs):
        self.members = nnx.split_rngs(splits=3)(nnx.vmap(MLP))(rngs)

    def __call__(self, x):
        run = nnx.vmap(lambda member, x: member(x), in_axes=(0, None))
        return run(self.members, x).mean(axis=0)


class Shared(nnx.Module):
    """Model with one Linear that both the model and its submodule call."""

    def __init__(self, rngs):
        self.dense = nnx.Linear(8, 8, rngs=rngs)
        self.child = Borrower(self.dense)

    def __call__(self, x):
        return self.child(self.dense(x))


class Borrower(nnx.Module):
    def __init__(self, dense):
        self.dense = dense

    def __call__(self, x):
        return self.dense(nnx.relu(x))


class HardCoded(nnx.Module):
    """Model with a user-defined `dtype` attribute that sets float32 in every layer."""

    def __init__(self, rngs, dtype=jnp.float32):
        self.dtype = dtype
        self.hidden = nnx.Linear(8, 8, dtype=self.dtype, rngs=rngs)
        self.head = nnx.Linear(8, 4, dtype=jnp.float32, rngs=rngs)

    def __call__(self, x):
        return self.head(self.hidden(x))


class RawParam(nnx.Module):
    def __init__(self, rngs):
        self.w = nnx.Param(jnp.zeros((8, 8)))
        self.v = nnx.Param(jnp.zeros((8, 4)))

    def __call__(self, x):
        return x @ self.w @ self.v[...]


class NestedParams(nnx.Module):
    """Model with parameters in a list, in a dict, and in a dict of lists."""

    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Param(jnp.zeros((8, 8))), nnx.Param(jnp.zeros((8, 8)))])
        self.heads = nnx.data({"wide": nnx.Param(jnp.zeros((8, 4))), "deep": [self.layers[0]]})

    def __call__(self, x):
        for layer in self.layers:
            x = nnx.relu(x @ layer)
        return x @ self.heads["deep"][0] @ self.heads["wide"]


class Einsum(nnx.Module):
    def __init__(self, rngs):
        self.split = nnx.Einsum("bi,ihd->bhd", (8, 2, 4), (2, 4), rngs=rngs)
        self.merge = nnx.Einsum("bhd,hdo->bo", (2, 4, 8), (8,), rngs=rngs)

    def __call__(self, x):
        return self.merge(nnx.relu(self.split(x)))


class MoE(nnx.Module):
    """Mixture of two experts; the softmax of the router is plain `jax.nn.softmax`."""

    def __init__(self, rngs):
        self.router = Router(rngs)
        self.experts = nnx.List(nnx.Linear(8, 8, rngs=rngs) for _ in range(2))

    def __call__(self, x):
        gates = self.router(x)
        experts = jnp.stack([expert(x) for expert in self.experts], axis=-1)
        return (experts * gates[..., None, :].astype(experts.dtype)).sum(axis=-1)


class Router(nnx.Module):
    def __init__(self, rngs):
        self.logits = nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x):
        return jax.nn.softmax(self.logits(x))


class LoRA(nnx.Module):
    """Model with `nnx.LoRALinear`, and with `nnx.LoRA` around a layer."""

    def __init__(self, rngs):
        self.hidden = nnx.LoRALinear(8, 8, lora_rank=2, rngs=rngs)
        self.head = nnx.LoRA(8, 2, 4, base_module=nnx.Linear(8, 4, rngs=rngs), rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.relu(self.hidden(x)))


class OfEachKind(nnx.Module):
    """Model with one layer of each class, and one with a custom `dot_general`."""

    def __init__(self, rngs):
        own = lambda *args, **kwargs: lax.dot_general(*args, **kwargs)
        self.odd = nnx.Linear(32, 30, rngs=rngs)
        self.own = nnx.Linear(30, 64, dot_general=own, rngs=rngs)
        self.einsum = nnx.Einsum("btd,dnh->btnh", (64, 4, 16), (4, 16), rngs=rngs)
        self.general = nnx.LinearGeneral((4, 16), 32, axis=(-2, -1), rngs=rngs)

    def __call__(self, x):
        return self.general(self.einsum(self.own(self.odd(x))))


def pure_gradients(model, optimizer, loss_fn):
    """Returns a function of a state and arguments that returns gradients, and the first state."""
    graph, state = nnx.split((model, optimizer))

    def gradients(state, *args):
        model, optimizer = nnx.merge(graph, state)
        return nnx.to_pure_dict(optimizer.value_and_grad(loss_fn)(model, *args)[1])

    return gradients, state
