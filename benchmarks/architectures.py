"""Models of seven architectures in plain Flax Linen, which `program.py` compiles.

A model with `dtype=None` is written as for FP32, and a recipe decides its dtypes. With
`dtype=jnp.bfloat16` it is the hand-written form: Flax computes in bfloat16, and the casts that
precision needs (softmax, norms, decays, the loss) are in the code. Both use the attention function
of the recipe where they call Flax's attention.

Shape suffixes: B batch, T positions, D width, H heads, N experts or states.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.linen.dtypes import promote_dtype

import jaxmp

FP32 = jnp.float32
Dtype = Any
# A recipe leaves an `Embed` alone whose dtypes are promoted by another function than Flax's, so
# that its gradient is a sum in 16 bits.
NARROW = functools.partial(promote_dtype)


class RMSNorm(nn.Module):
    """Norm by the root of the mean square, in FP32."""

    dtype: Dtype = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns an array of the shape of x."""
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        wide = x.astype(FP32)
        wide = wide * jax.lax.rsqrt((wide**2).mean(-1, keepdims=True) + 1e-6) * scale
        return wide.astype(self.dtype or x.dtype)


def attention(heads: int, dtype: Dtype, name: str) -> nn.Module:
    """Returns an attention layer with the attention function of the recipe."""
    fused = jaxmp.attention_fn()
    return nn.MultiHeadDotProductAttention(heads, dtype=dtype, attention_fn=fused, name=name)


def perceptron(x: jax.Array, dtype: Dtype, name: str) -> jax.Array:
    """Returns the result of two layers, of which the first is four times as wide as x."""
    hidden = nn.gelu(nn.Dense(4 * x.shape[-1], dtype=dtype, name=f"{name}_up")(x))
    return nn.Dense(x.shape[-1], dtype=dtype, name=f"{name}_down")(hidden)


# ---------------------------------------------------------------------------
# Models
# ---------------------------------------------------------------------------


class ViT(nn.Module):
    """Vision transformer of images of 224 x 224: 196 patches and a class token."""

    width: int = 1024
    layers: int = 3
    dtype: Dtype = None

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        """Returns logits of 1,000 classes."""
        patch = (16, 16)
        x = nn.Conv(self.width, patch, patch, dtype=self.dtype, name="patches")(images)
        x = x.reshape(len(x), -1, self.width)
        first = self.param("class_token", nn.initializers.zeros, (1, 1, self.width))
        first = jnp.broadcast_to(first.astype(x.dtype), (len(x), 1, self.width))
        x = jnp.concatenate([first, x], axis=1)
        table = self.param("positions", nn.initializers.normal(0.02), (1, *x.shape[1:]))
        x = x + table.astype(x.dtype)
        norm = functools.partial(nn.LayerNorm, dtype=self.dtype)
        for n in range(self.layers):
            x = x + attention(self.width // 64, self.dtype, f"attention_{n}")(norm()(x))
            x = x + perceptron(norm()(x), self.dtype, f"mlp_{n}")
        return nn.Dense(1000, dtype=self.dtype, name="classifier")(norm()(x)[:, 0])


class Embedding(nn.Module):
    """Base class of models whose embeddings may be promoted by another function; see `NARROW`."""

    width: int = 1024
    dtype: Dtype = None
    promote: Any = promote_dtype

    @property
    def embed(self) -> Callable[..., nn.Embed]:
        """Makes an embedding layer of (vocabulary, width)."""
        return functools.partial(nn.Embed, dtype=self.dtype, promote_dtype=self.promote)


class Bert(Embedding):
    """Encoder with a mask of padding, and logits of every position."""

    vocabulary: int = 30522
    layers: int = 3

    @nn.compact
    def __call__(self, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
        """Returns logits for `(tokens_BT, is_token_BT)`."""
        tokens_BT, is_token_BT = batch
        norm = functools.partial(nn.LayerNorm, dtype=self.dtype)
        positions = jnp.arange(tokens_BT.shape[1])[None]
        x = self.embed(self.vocabulary, self.width, name="words")(tokens_BT)
        x = norm()(x + self.embed(512, self.width, name="places")(positions))
        mask = nn.make_attention_mask(is_token_BT, is_token_BT)
        for n in range(self.layers):
            heads = self.width // 64
            x = norm()(x + attention(heads, self.dtype, f"attention_{n}")(x, mask=mask))
            x = norm()(x + perceptron(x, self.dtype, f"mlp_{n}"))
        x = norm()(nn.gelu(nn.Dense(self.width, dtype=self.dtype, name="transform")(x)))
        return nn.Dense(self.vocabulary, dtype=self.dtype, name="lm_head")(x)


class T5(Embedding):
    """Encoder and decoder with learned biases of relative positions."""

    vocabulary: int = 32128
    layers: int = 2

    def attend(self, x: jax.Array, source: jax.Array, bias: Any, causal: bool, name: str) -> Any:
        """Returns attention without scaling, whose softmax is in FP32."""
        size = (self.width // 64, 64)
        project = functools.partial(nn.DenseGeneral, use_bias=False, dtype=self.dtype)
        q, k, v = (
            project(size, name=f"{name}_{part}")(each)
            for part, each in (("q", x), ("k", source), ("v", source))
        )
        logits = jnp.einsum("bqhd,bkhd->bhqk", q, k)
        logits = logits if bias is None else logits + bias.astype(logits.dtype)
        if causal:
            allowed = jnp.tril(jnp.ones(logits.shape[-2:], bool))
            logits = jnp.where(allowed, logits, jnp.finfo(logits.dtype).min)
        weights = jax.nn.softmax(logits.astype(FP32)).astype(v.dtype)
        out = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
        return project(self.width, axis=(-2, -1), name=f"{name}_out")(out)

    def feed(self, x: jax.Array, name: str) -> jax.Array:
        """Returns the gated perceptron of a layer."""
        dense = functools.partial(nn.Dense, use_bias=False, dtype=self.dtype)
        hidden = [dense(2816, name=f"{name}_{part}")(x) for part in ("gate", "up")]
        return dense(self.width, name=f"{name}_down")(nn.gelu(hidden[0]) * hidden[1])

    @nn.compact
    def __call__(self, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
        """Returns logits for `(source_BT, target_BT)`."""
        words = self.embed(self.vocabulary, self.width, name="words")
        norm = functools.partial(RMSNorm, self.dtype)
        states = []
        for part, tokens_BT in zip(("encoder", "decoder"), batch, strict=True):
            x, steps = words(tokens_BT), jnp.arange(tokens_BT.shape[1])
            near = jnp.clip(steps[None] - steps[:, None], -15, 16) + 15
            biases = self.embed(32, self.width // 64, name=f"{part}_bias")
            bias = biases(near).transpose(2, 0, 1)[None]
            for n in range(self.layers):
                name, h = f"{part}_{n}", norm()(x)
                x = x + self.attend(h, h, bias, bool(states), f"{name}_own")
                if states:
                    x = x + self.attend(norm()(x), states[0], None, False, f"{name}_cross")
                x = x + self.feed(norm()(x), name)
            states.append(norm()(x))
        logits = nn.Dense(self.vocabulary, use_bias=False, dtype=self.dtype, name="lm_head")
        return logits(states[1])


class Experts(nn.Module):
    """Mixture of experts that all compute all rows, as einsums of stacked weights."""

    width: int = 2048
    hidden: int = 4096
    experts: int = 8
    layers: int = 2
    dtype: Dtype = None

    @nn.compact
    def __call__(self, x_TD: jax.Array) -> jax.Array:
        """Returns logits of 256 classes."""
        for n in range(self.layers):
            h_TD = RMSNorm(self.dtype)(x_TD)
            scores = nn.Dense(self.experts, use_bias=False, dtype=self.dtype, name=f"scores_{n}")
            best, chosen = jax.lax.top_k(jax.nn.softmax(scores(h_TD).astype(FP32)), 2)
            best = best / best.sum(-1, keepdims=True)
            shares_TN = (jax.nn.one_hot(chosen, self.experts) * best[..., None]).sum(-2)
            init = nn.initializers.lecun_normal(batch_axis=0)
            into, out = (self.width, self.hidden), (self.hidden, self.width)
            gate, up, down = (
                self.param(f"{name}_{n}", init, (self.experts, *shape)).astype(h_TD.dtype)
                for name, shape in (("gate", into), ("up", into), ("down", out))
            )
            act = nn.silu(jnp.einsum("td,ndf->ntf", h_TD, gate))
            act = act * jnp.einsum("td,ndf->ntf", h_TD, up)
            shares_TN = shares_TN.astype(h_TD.dtype)
            x_TD = x_TD + jnp.einsum("ntf,nfd,tn->td", act, down, shares_TN)
        return nn.Dense(256, dtype=self.dtype, name="classifier")(RMSNorm(self.dtype)(x_TD))


class DiT(Embedding):
    """Diffusion transformer, whose norms are modulated by time and class."""

    width: int = 1152
    layers: int = 3

    @nn.compact
    def __call__(self, batch: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        """Returns the noise of `(latents, time, classes)`."""
        latents, time, classes = batch
        count, height, width, channels = latents.shape
        dense = functools.partial(nn.Dense, dtype=self.dtype)
        x = nn.Conv(self.width, (2, 2), (2, 2), dtype=self.dtype, name="patches")(latents)
        x = x.reshape(count, -1, self.width)
        table = self.param("positions", nn.initializers.normal(0.02), (1, *x.shape[1:]))
        x = x + table.astype(x.dtype)
        angles = time[:, None] * jnp.exp(-jnp.log(1e4) * jnp.arange(128) / 128)
        c = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
        c = dense(self.width, name="time_in")(c)
        c = dense(self.width, name="time_out")(nn.silu(c))
        c = nn.silu(c + self.embed(1001, self.width, name="label")(classes))

        def modulated(x: jax.Array, shift: jax.Array, scale: jax.Array) -> jax.Array:
            norm = nn.LayerNorm(use_bias=False, use_scale=False, dtype=self.dtype)
            return norm(x) * (1 + scale) + shift

        for n in range(self.layers):
            six = jnp.split(dense(6 * self.width, name=f"modulation_{n}")(c)[:, None], 6, axis=-1)
            h = modulated(x, six[0], six[1])
            x = x + six[2] * attention(16, self.dtype, f"attention_{n}")(h)
            h = modulated(x, six[3], six[4])
            x = x + six[5] * perceptron(h, self.dtype, f"mlp_{n}")
        shift, scale = jnp.split(dense(2 * self.width, name="modulation")(c)[:, None], 2, axis=-1)
        x = dense(4 * channels, name="noise")(modulated(x, shift, scale))
        x = x.reshape(count, height // 2, width // 2, 2, 2, channels)
        return x.transpose(0, 1, 3, 2, 4, 5).reshape(latents.shape)


class ResNet(nn.Module):
    """Residual network with one bottleneck block for each of three resolutions."""

    blocks: tuple[int, ...] = (1, 1, 1)
    dtype: Dtype = None
    norm_input: Dtype = None  # dtype to which the inputs of BatchNorm are cast; None: uncast

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        """Returns logits of 1,000 classes."""

        def conv(x: jax.Array, features: int, size: int, stride: int = 1) -> jax.Array:
            layer = nn.Conv(
                features, (size, size), (stride, stride), use_bias=False, dtype=self.dtype
            )
            y = layer(x)
            y = y if self.norm_input is None else y.astype(self.norm_input)
            return nn.BatchNorm(use_running_average=False, dtype=self.dtype)(y)

        x = nn.relu(conv(images, 64, 7, 2))
        x = nn.max_pool(x, (3, 3), (2, 2), "SAME")
        for stage, count in enumerate(self.blocks):
            for block in range(count):
                stride, features = 1 + (stage > 0 and block == 0), 64 * 2**stage
                y = nn.relu(conv(x, features, 1))
                y = conv(nn.relu(conv(y, features, 3, stride)), 4 * features, 1)
                x = x if x.shape == y.shape else conv(x, 4 * features, 1, stride)
                x = nn.relu(x + y)
        return nn.Dense(1000, dtype=self.dtype, name="classifier")(x.mean((1, 2)))


class Mamba2(Embedding):
    """State-space model with scalar decays, computed in chunks (Dao and Gu 2024)."""

    vocabulary: int = 32768
    layers: int = 3
    states: int = 128
    chunk: int = 256

    def mix(self, x: jax.Array, n: int) -> jax.Array:
        """Returns the result of one mixer. Decays and the carried states are in FP32."""
        batch, length, width = x.shape
        inner, size = 2 * width, 64
        heads, chunks = inner // size, (batch, length // self.chunk, self.chunk)
        dense = functools.partial(nn.Dense, use_bias=False, dtype=self.dtype)
        wide = 2 * inner + 2 * self.states + heads
        parts = [inner, 2 * inner + 2 * self.states]
        z, u, step = jnp.split(dense(wide, name=f"in_{n}")(x), parts, axis=-1)
        mixed = u.shape[-1]
        causal = nn.Conv(
            mixed, (4,), padding=((3, 0),), feature_group_count=mixed, dtype=self.dtype
        )
        u, b, c = jnp.split(nn.silu(causal(u)), [inner, inner + self.states], axis=-1)
        bias = self.param(f"step_bias_{n}", nn.initializers.constant(-4.0), (heads,))
        step = jax.nn.softplus(step.astype(FP32) + bias)
        rate = -jnp.exp(self.param(f"rate_{n}", nn.initializers.zeros, (heads,)))
        decay = (rate * step).reshape(*chunks, heads).transpose(0, 3, 1, 2)
        total = jnp.cumsum(decay, axis=-1)
        u = u.reshape(batch, length, heads, size)
        v = (u.astype(FP32) * step[..., None]).astype(u.dtype).reshape(*chunks, heads, size)
        b, c = b.reshape(*chunks, -1), c.reshape(*chunks, -1)

        between = total[..., :, None] - total[..., None, :]
        is_past = jnp.tril(jnp.ones((self.chunk, self.chunk), bool))
        weights = jnp.exp(jnp.where(is_past, between, -jnp.inf)).astype(u.dtype)
        scores = jnp.einsum("bcqn,bckn->bcqk", c, b)
        y = jnp.einsum("bcqk,bhcqk,bckhp->bcqhp", scores, weights, v)

        to_end = jnp.exp(total[..., -1:] - total).astype(u.dtype)
        ends = jnp.einsum("bckn,bhck,bckhp->bchpn", b, to_end, v).astype(FP32)
        kept = jnp.exp(total[..., -1]).transpose(0, 2, 1)

        def combine(left: Any, right: Any) -> Any:
            return left[0] * right[0], left[1] * right[0][..., None, None] + right[1]

        _, after = jax.lax.associative_scan(combine, (kept, ends), axis=1)
        before = jnp.pad(after[:, :-1], ((0, 0), (1, 0), (0, 0), (0, 0), (0, 0))).astype(u.dtype)
        since = jnp.exp(total).astype(u.dtype)
        y = y + jnp.einsum("bcqn,bchpn,bhcq->bcqhp", c, before, since)
        skip = self.param(f"skip_{n}", nn.initializers.ones, (heads,))
        y = y.reshape(u.shape) + u * skip.astype(u.dtype)[:, None]
        y = RMSNorm(self.dtype)(y.reshape(batch, length, inner) * nn.silu(z))
        return dense(width, name=f"out_{n}")(y)

    @nn.compact
    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        """Returns logits of every position."""
        x = self.embed(self.vocabulary, self.width, name="words")(tokens_BT)
        for n in range(self.layers):
            x = x + self.mix(RMSNorm(self.dtype)(x), n)
        logits = nn.Dense(self.vocabulary, use_bias=False, dtype=self.dtype, name="lm_head")
        return logits(RMSNorm(self.dtype)(x))


# ---------------------------------------------------------------------------
# Training steps
# ---------------------------------------------------------------------------


def integers(*shape: int) -> jax.ShapeDtypeStruct:
    """Returns the type of an array of integers."""
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def floats(*shape: int) -> jax.ShapeDtypeStruct:
    """Returns the type of an array in FP32."""
    return jax.ShapeDtypeStruct(shape, FP32)


class Case(NamedTuple):
    """A model, and the types of its batch and of its targets."""

    model: Callable[..., nn.Module]
    batch: Any
    targets: jax.ShapeDtypeStruct


TEXT = integers(16, 512), integers(16, 512)
PAIR = integers(8, 512), integers(8, 512)
LATENTS = floats(32, 32, 32, 4)
IMAGES = floats(64, 224, 224, 3)
CASES = {
    "MoE": Case(Experts, floats(4096, 2048), integers(4096)),
    "BERT": Case(Bert, TEXT, TEXT[0]),
    "T5-like": Case(T5, PAIR, PAIR[0]),
    "ViT, 197 tokens": Case(ViT, IMAGES, integers(64)),
    "DiT": Case(DiT, (LATENTS, floats(32), integers(32)), LATENTS),
    "ResNet": Case(ResNet, IMAGES, integers(64)),
    "Mamba-2": Case(Mamba2, integers(4, 2048), integers(4, 2048)),
}


def loss_of(out: jax.Array, targets: jax.Array) -> jax.Array:
    """Returns the mean cross-entropy, or of floating targets the mean square, in FP32."""
    out = out.astype(FP32)
    if jnp.issubdtype(targets.dtype, jnp.floating):
        return ((out - targets) ** 2).mean()
    return optax.softmax_cross_entropy_with_integer_labels(out, targets).mean()


def make_optimizer() -> optax.GradientTransformation:
    """Returns AdamW with clipping."""
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4))


def _loss_fn(model: nn.Module, rest: Any, batch: Any, targets: jax.Array) -> Callable[..., Any]:
    def loss_fn(params: Any) -> Any:
        out, new = model.apply({"params": params, **rest}, batch, mutable=list(rest))
        return loss_of(out, targets), new

    return loss_fn


def make_step(case: Case, recipe: jaxmp.Recipe, **changes: Any) -> tuple[Any, ...]:
    """Returns the step of a recipe, and the types of its arguments; `changes` are of the model."""
    model, tx = recipe.wrap(case.model(**changes)), recipe.optimizer(make_optimizer())
    variables = dict(jax.eval_shape(model.init, jax.random.key(0), case.batch))
    params = variables.pop("params")
    state = jaxmp.TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(state: Any, rest: Any, batch: Any, targets: jax.Array) -> Any:
        loss_fn = _loss_fn(model, rest, batch, targets)
        (loss, rest), grads = state.value_and_grad(loss_fn, has_aux=True)()
        return state.apply_gradients(grads=grads), rest, loss

    return step, state, variables, case.batch, case.targets


def make_hand_step(case: Case, **changes: Any) -> tuple[Any, ...]:
    """Returns the hand-written step, which skips gradients that are not finite."""
    model, tx = case.model(dtype=jnp.bfloat16, **changes), make_optimizer()
    variables = dict(jax.eval_shape(model.init, jax.random.key(0), case.batch))
    params = variables.pop("params")
    state = params, jax.eval_shape(tx.init, params)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(state: Any, rest: Any, batch: Any, targets: jax.Array) -> Any:
        params, opt_state = state
        loss_fn = _loss_fn(model, rest, batch, targets)
        (loss, new_rest), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        updates, new_state = tx.update(grads, opt_state, params)
        new = optax.apply_updates(params, updates), new_state, new_rest
        finite = jnp.isfinite(optax.tree.norm(grads))
        keep = lambda new, old: jnp.where(finite, new, old)
        params, opt_state, rest = jax.tree.map(keep, new, (params, opt_state, rest))
        return (params, opt_state), rest, loss

    return step, state, variables, case.batch, case.targets
