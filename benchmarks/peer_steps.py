"""Training steps of GPT-2 and Llama with other JAX libraries, for benchmarks/train_step.py.

    flax            Flax layers with `dtype=bfloat16`, JAX's default attention
    flax-cudnn      the same with cuDNN's attention
    qwix-fp8        `flax-cudnn` with linear layers in FP8 by qwix, one scale per tensor
    te-bf16         layers of Transformer Engine
    te-fp8          the same in FP8 with current scaling
    te-fp8_delayed  the same in FP8 with delayed scaling

All have FP32 parameters and bfloat16 activations, store all logits, compute the loss in FP32, clip
by the global norm and use optax's AdamW; none checks for non-finite gradients. Flax and qwix begin
with the parameters of the examples, the others with their own.

Transformer Engine requires CUDA at installation. Its step follows version 2.20, and has not been
run so far.
"""

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name

import by_hand
import gpt
from by_hand import BF16, EPSILON
from gpu_record import versions_of
from workload_sizes import Sizes

NORMAL = nn.initializers.normal(0.02)
Training = tuple[Callable[[], Any], Callable[..., Any]]


# ---------------------------------------------------------------------------
# Step
# ---------------------------------------------------------------------------


def make_training(
    init: Callable[[], Any], loss_fn: Callable[[Any, jax.Array], jax.Array]
) -> Training:
    """Returns a function that makes the state, and the jitted step.

    `init()` returns the variables of a model. Collections other than "params" take the values of
    their gradients, as Transformer Engine updates its amaxes.
    """
    tx = gpt.make_optimizer()

    def make_state() -> Any:
        variables = nn.meta.unbox(init())
        return variables, tx.init(variables["params"])

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: Any, tokens_BS: jax.Array) -> Any:
        variables, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(variables, tokens_BS)
        updates, opt_state = tx.update(grads["params"], opt_state, variables["params"])
        params = optax.apply_updates(variables["params"], updates)
        return ({**grads, "params": params}, opt_state), loss

    return make_state, step


def mean_loss(logits_BTV: jax.Array, labels_BT: jax.Array) -> jax.Array:
    logits_BTV = logits_BTV.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits_BTV, labels_BT).mean()


# ---------------------------------------------------------------------------
# Flax, qwix
# ---------------------------------------------------------------------------


class FlaxBlock(nn.Module):
    """The block of examples/gpt.py or examples/llama.py, with its parameters by name."""

    size: Sizes
    implementation: str | None  # of attention; None is JAX's default

    @nn.compact
    def __call__(self, x_BTD: jax.Array, _: None = None) -> tuple[jax.Array, None]:
        size, residual = self.size, gpt.residual_init(self.size.layers)
        norm = nn.RMSNorm if size.is_llama else nn.LayerNorm
        norm = functools.partial(norm, EPSILON, dtype=BF16)
        linear = functools.partial(nn.Dense, use_bias=not size.is_llama, dtype=BF16)
        head, groups = size.width // size.heads, size.heads // size.key_heads
        h = norm(name="attention_norm")(x_BTD)
        batch, length, _ = h.shape
        if size.is_llama:
            features = size.width + 2 * size.key_heads * head
            h = linear(features, kernel_init=NORMAL, name="qkv")(h)
            h = h.reshape(batch, length, size.key_heads, groups + 2, head)
            q = by_hand.rotate(h[..., :-2, :].reshape(batch, length, -1, head), size.rope_base)
            k, v = by_hand.rotate(h[..., -2, :], size.rope_base), h[..., -1, :]
        else:
            linears = (
                linear(size.width, kernel_init=NORMAL, name=name)
                for name in ("query", "key", "value")
            )
            q, k, v = (layer(h).reshape(batch, length, -1, head) for layer in linears)
        q, k, v = (checkpoint_name(part, "qkv") for part in (q, k, v))
        h = by_hand.attention(q, k, v, self.implementation)
        x_BTD += linear(size.width, kernel_init=residual, name="attention_out")(h)
        x_BTD = checkpoint_name(x_BTD, "residual")
        h = norm(name="mlp_norm")(x_BTD)
        if size.is_llama:
            layers = (
                linear(size.hidden, kernel_init=NORMAL, name=name)
                for name in ("mlp_gate", "mlp_up")
            )
            gate, up = (checkpoint_name(layer(h), "mlp") for layer in layers)
            h = nn.silu(gate) * up
        else:
            up = linear(size.hidden, kernel_init=NORMAL, name="mlp_up")(h)
            h = nn.gelu(checkpoint_name(up, "mlp"))
        return x_BTD + linear(size.width, kernel_init=residual, name="mlp_down")(h), None


class Ends(nn.Module):
    """Tokens to logits around the blocks that `make_blocks` returns."""

    size: Sizes
    make_blocks: Callable[[Sizes], Callable[[jax.Array], jax.Array]]

    @nn.compact
    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        size = self.size
        table = functools.partial(nn.Embed, features=size.width, embedding_init=NORMAL, dtype=BF16)
        token = table(size.vocabulary, name="token_embedding")
        output = token if size.tied else table(size.vocabulary, name="output_embedding")
        x_BTD = token(tokens_BT)
        if not size.is_llama:
            positions = jnp.arange(tokens_BT.shape[1])[None]
            x_BTD += table(size.length, name="position_embedding")(positions)
        x_BTD = self.make_blocks(size)(x_BTD)
        norm = nn.RMSNorm if size.is_llama else nn.LayerNorm
        return output.attend(norm(EPSILON, dtype=BF16, name="final_norm")(x_BTD))


def flax_blocks(implementation: str | None, size: Sizes) -> Callable[[jax.Array], jax.Array]:
    """Returns the scanned blocks, which save what those of the examples save."""
    policy = by_hand.saves("qkv", "residual", "mlp")
    block = FlaxBlock if size.unroll else nn.remat(FlaxBlock, prevent_cse=False, policy=policy)
    blocks = nn.scan(
        block,
        variable_axes={"params": 0},
        split_rngs={"params": True},
        length=size.layers,
        unroll=size.layers if size.unroll else 1,
    )(size, implementation, name="blocks")
    return lambda x_BTD: blocks(x_BTD, None)[0]


def flax_training(size: Sizes, implementation: str | None, wrap: Any = None) -> Training:
    """Returns the step of the Flax model, which `wrap` changes."""
    model: Any = Ends(size, functools.partial(flax_blocks, implementation))
    initial, model = model, wrap(model) if wrap else model
    init = lambda: initial.init(jax.random.key(0), jnp.zeros((1, 8), jnp.int32))
    apply = lambda variables, tokens: model.apply(variables, tokens)
    return make_training(init, lambda v, t: mean_loss(apply(v, t[:, :-1]), t[:, 1:]))


def qwix_training(size: Sizes, implementation: str | None) -> Training:
    """Returns the step of the Flax model with the linear layers of the blocks in FP8."""
    qwix = importlib.import_module("qwix")
    rule = qwix.QtRule(
        module_path=".*(qkv|query|key|value|attention_out|mlp_gate|mlp_up|mlp_down)",
        weight_qtype=jnp.float8_e4m3fn,
        act_qtype=jnp.float8_e4m3fn,
        bwd_qtype=jnp.float8_e5m2,
        disable_channelwise_axes=True,
    )
    wrap = lambda model: qwix.quantize_model(model, qwix.QtProvider([rule]))
    return flax_training(size, implementation, wrap)


# ---------------------------------------------------------------------------
# Transformer Engine
# ---------------------------------------------------------------------------


def te_blocks(size: Sizes) -> Callable[[jax.Array], jax.Array]:
    """Returns the blocks: one `TransformerLayer` each, with FP32 parameters."""
    layer = importlib.import_module("transformer_engine.jax.flax").TransformerLayer
    llama = {
        "num_gqa_groups": size.key_heads,
        "layernorm_type": "rmsnorm",
        "mlp_activations": ("silu", "linear"),
        "enable_rotary_pos_emb": True,
        "rotary_pos_emb_windows": (1, int(size.rope_base)),
        "rotary_pos_emb_group_method": "alternate",
    }
    make = functools.partial(
        layer,
        hidden_size=size.width,
        mlp_hidden_size=size.hidden,
        num_attention_heads=size.heads,
        layernorm_epsilon=EPSILON,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        intermediate_dropout=0.0,
        use_bias=not size.is_llama,
        self_attn_mask_type="causal",
        self_attn_bias_type="no_bias",
        enable_relative_embedding=False,
        scale_attn_logits=True,
        scaled_query_init=False,
        **(llama if size.is_llama else {}),
    )

    def blocks(x_BTD: jax.Array) -> jax.Array:
        for index in range(size.layers):
            x_BTD = make(name=f"block_{index}")(x_BTD, deterministic=True)
        return x_BTD

    return blocks


def te_training(size: Sizes, scaling: str | None) -> Training:
    """Returns the step with Transformer Engine's layers; `scaling` is the name of its recipe."""
    te = importlib.import_module("transformer_engine.jax")
    recipes = importlib.import_module("transformer_engine.common.recipe")
    recipe = getattr(recipes, scaling)() if scaling else None
    context = functools.partial(
        te.autocast, enabled=recipe is not None, recipe=recipe, mesh_resource=te.MeshResource()
    )
    model = Ends(size, te_blocks)

    def init() -> Any:
        with context():
            return model.init(jax.random.key(0), jnp.zeros((1, size.length), jnp.int32))

    def loss_fn(variables: Any, tokens_BS: jax.Array) -> jax.Array:
        with context():
            logits_BTV = model.apply(variables, tokens_BS[:, :-1])
        return mean_loss(logits_BTV, tokens_BS[:, 1:])

    return make_training(init, loss_fn)


# ---------------------------------------------------------------------------
# Table
# ---------------------------------------------------------------------------


def trainings() -> dict[str, Callable[[Sizes], Training]]:
    """Returns name -> function that makes the state and the step."""
    fused = "cudnn" if jax.default_backend() == "gpu" else "xla"
    return {
        "flax": functools.partial(flax_training, implementation=None),
        "flax-cudnn": functools.partial(flax_training, implementation=fused),
        "qwix-fp8": functools.partial(qwix_training, implementation=fused),
        "te-bf16": functools.partial(te_training, scaling=None),
        "te-fp8": functools.partial(te_training, scaling="Float8CurrentScaling"),
        "te-fp8_delayed": functools.partial(te_training, scaling="DelayedScaling"),
    }


PACKAGES = {"qwix": "qwix", "te": "transformer_engine"}


def package_of(arm: str) -> dict[str, str]:
    """Returns the package of a step with its version, which decides what is pooled."""
    name = PACKAGES.get(arm.partition("-")[0], "").replace("_", "-")
    return {"package": f"{name} {versions_of((name,)).get(name)}"} if name else {}


def refusal(arm: str) -> str | None:
    """Returns the reason why a step cannot run here; None if it can."""
    package = PACKAGES.get(arm.partition("-")[0])
    if package and importlib.util.find_spec(package) is None:
        return f"{package} is not installed"
    return None
