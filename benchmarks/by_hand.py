"""Training steps of GPT-2 and Llama in plain JAX, with bfloat16 by hand, to compare recipes with.

The models are those of examples/gpt.py and examples/llama.py, with the same parameters by name.
Parameters, gradients and optimizer state are FP32; weights are cast where they are used; norms,
rotations and the loss compute in FP32; attention is cuDNN's. The loss is computed in chunks of rows
whose logits are not stored. A step clips by the global norm, and skips non-finite gradients by that
norm, which takes no pass over the gradients of its own.

Shape suffixes are those of the two examples; C rows of a chunk, M chunks.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name

BF16, FP32 = jnp.bfloat16, jnp.float32
EPSILON = 1e-5
LOGITS = 2.2e9  # bytes of FP32 logits that exist at the same time at most


# ---------------------------------------------------------------------------
# Layers
# ---------------------------------------------------------------------------


def linear(x, p):
    x = x @ p["kernel"].astype(BF16)
    return x + p["bias"].astype(BF16) if "bias" in p else x


@jax.custom_vjp
def linear_fp32(x, p):
    """A linear layer whose gradients of kernel and bias are sums in FP32 without rounding."""
    return linear(x, p)


def _linear_forward(x, p):
    low = jax.tree.map(lambda array: array.astype(BF16), p)
    return linear(x, low), (x, low)


def _linear_backward(saved, slope):
    x, low = saved
    grads = {"kernel": jnp.einsum("...i,...o->io", x, slope, preferred_element_type=FP32)}
    if "bias" in low:
        grads["bias"] = slope.astype(FP32).sum(range(slope.ndim - 1))
    return slope @ low["kernel"].T, grads


linear_fp32.defvjp(_linear_forward, _linear_backward)


def layer_norm(x, p):
    wide = x.astype(FP32)
    mean = wide.mean(-1, keepdims=True)
    variance = jnp.maximum(0, (wide * wide).mean(-1, keepdims=True) - mean * mean)
    scale = jax.lax.rsqrt(variance + EPSILON) * p["scale"]
    return ((wide - mean) * scale + p["bias"]).astype(BF16)


def rms_norm(x, p):
    wide = x.astype(FP32)
    scale = jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + EPSILON) * p["scale"]
    return (wide * scale).astype(BF16)


def rotate(x_BTNH, base):
    size = x_BTNH.shape[-1]
    rates = base ** (-jnp.arange(0, size, 2, dtype=FP32) / size)
    angles = (jnp.arange(x_BTNH.shape[1], dtype=FP32)[:, None] * rates)[:, None]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    a, b = jnp.split(x_BTNH.astype(FP32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).astype(BF16)


def attention(q_BTNH, k_BTKH, v_BTKH, implementation):
    out = jax.nn.dot_product_attention(
        q_BTNH, k_BTKH, v_BTKH, is_causal=True, implementation=implementation
    )
    return out.reshape(*out.shape[:2], -1)


@jax.custom_vjp
def mean_loss(x_ND, table_VD, labels_N, bias_V):
    return _loss_and_gradients(x_ND, table_VD, labels_N, bias_V)[0]


def _loss_and_gradients(x_ND, table_VD, labels_N, bias_V):
    rows = x_ND.shape[0]
    most = min(1 << int(LOGITS // (4 * len(table_VD))).bit_length() - 1, rows)
    size = next(size for size in range(most, 0, -1) if rows % size == 0)
    weights_VD = table_VD.astype(BF16)

    def add_chunk(d_table_VD, chunk):
        x_CD, labels_C = chunk
        logits_CV = jnp.einsum("cd,vd->cv", x_CD, weights_VD, preferred_element_type=FP32) + bias_V
        total_C1 = jax.nn.logsumexp(logits_CV, axis=-1, keepdims=True)
        is_label_CV = jnp.arange(logits_CV.shape[1]) == labels_C[:, None]
        losses_C = total_C1[:, 0] - jnp.where(is_label_CV, logits_CV, 0).sum(-1)
        slope_CV = ((jnp.exp(logits_CV - total_C1) - is_label_CV) / rows).astype(BF16)
        d_x_CD = jnp.einsum("cv,vd->cd", slope_CV, weights_VD, preferred_element_type=FP32)
        d_table_VD += jnp.einsum("cv,cd->vd", slope_CV, x_CD, preferred_element_type=FP32)
        return d_table_VD, (losses_C, d_x_CD.astype(BF16))

    chunks = x_ND.reshape(-1, size, x_ND.shape[-1]), labels_N.reshape(-1, size)
    d_table_VD, (losses, d_x) = jax.lax.scan(add_chunk, jnp.zeros(table_VD.shape, FP32), chunks)
    return losses.sum() / rows, (d_x.reshape(x_ND.shape), d_table_VD)


def _mean_loss_backward(gradients, slope):
    d_x_ND, d_table_VD = gradients
    return (d_x_ND * slope).astype(BF16), d_table_VD * slope, None, None


mean_loss.defvjp(_loss_and_gradients, _mean_loss_backward)


def plain_loss(x_ND, table_VD, labels_N, bias_V):
    """Computes the loss from all logits, in FP32."""
    logits_NV = (x_ND @ table_VD.astype(BF16).T).astype(FP32) + bias_V
    return optax.softmax_cross_entropy_with_integer_labels(logits_NV, labels_N).mean()


# ---------------------------------------------------------------------------
# Models
# ---------------------------------------------------------------------------


def saves(*names: str) -> Callable[..., bool]:
    """Returns the policy of both models: save named results and those of cuDNN's attention."""
    named = jax.checkpoint_policies.save_only_these_names(*names)

    def is_saved(primitive: Any, *args: Any, **params: Any) -> bool:
        attends = primitive.name.startswith("dot_product_attention_fwd")
        return attends or named(primitive, *args, **params)

    return is_saved


def gpt_loss(
    gpt: Any,
    implementation: str | None = "cudnn",
    chunked: bool = True,
    linear: Callable[..., jax.Array] = linear,
) -> Callable[..., jax.Array]:
    """Returns the loss function `(params, tokens_BS)` of a `gpt.GPT`, which gives the sizes."""

    def block(x_BTD, p):
        h = layer_norm(x_BTD, p["attention_norm"])
        heads = (*x_BTD.shape[:2], gpt.heads, -1)
        qkv = (linear(h, p[name]).reshape(heads) for name in ("query", "key", "value"))
        q, k, v = (checkpoint_name(part, "qkv") for part in qkv)
        x_BTD = x_BTD + linear(attention(q, k, v, implementation), p["attention_out"])
        x_BTD = checkpoint_name(x_BTD, "residual")
        up = checkpoint_name(linear(layer_norm(x_BTD, p["mlp_norm"]), p["mlp_up"]), "mlp")
        return x_BTD + linear(jax.nn.gelu(up), p["mlp_down"]), None

    if gpt.remat or not gpt.unroll:
        policy = None if gpt.remat else saves("qkv", "residual", "mlp")
        block = jax.checkpoint(block, prevent_cse=gpt.unroll, policy=policy)
    unroll = gpt.layers if gpt.unroll else 1

    def loss_fn(params, tokens_BS):
        tokens_BT, labels_BT = tokens_BS[:, :-1], tokens_BS[:, 1:]
        table_VD = params["token_embedding"]["embedding"]
        positions = params["position_embedding"]["embedding"][: tokens_BT.shape[1]]
        x_BTD = table_VD.astype(BF16)[tokens_BT] + positions.astype(BF16)[None]
        x_BTD, _ = jax.lax.scan(block, x_BTD, params["blocks"], unroll=unroll)
        x_BTD = layer_norm(x_BTD, params["final_norm"])
        bias_V = jnp.where(jnp.arange(len(table_VD)) < gpt.vocabulary, 0.0, -jnp.inf)
        x_ND = x_BTD.reshape(-1, x_BTD.shape[-1])
        loss = mean_loss if chunked else plain_loss
        return loss(x_ND, table_VD, labels_BT.reshape(-1), bias_V)

    return loss_fn


def llama_loss(
    shape: Any,
    implementation: str | None = "cudnn",
    chunked: bool = True,
    linear: Callable[..., jax.Array] = linear,
) -> Callable[..., jax.Array]:
    """Returns the loss function `(params, tokens_BS)` of a `llama.Shape`."""

    def block(x_BTD, p):
        batch, length, _ = x_BTD.shape
        qkv = linear(rms_norm(x_BTD, p["attention_norm"]), p["qkv"])
        qkv = qkv.reshape(batch, length, shape.key_heads, -1, shape.head_size)
        q = rotate(qkv[:, :, :, :-2].reshape(batch, length, shape.heads, -1), shape.rope_base)
        k, v = rotate(qkv[:, :, :, -2], shape.rope_base), qkv[:, :, :, -1]
        q, k, v = (checkpoint_name(part, "qkv") for part in (q, k, v))
        x_BTD = x_BTD + linear(attention(q, k, v, implementation), p["attention_out"])
        x_BTD = checkpoint_name(x_BTD, "residual")
        h = rms_norm(x_BTD, p["mlp_norm"])
        gate, up = (checkpoint_name(linear(h, p[name]), "mlp") for name in ("mlp_gate", "mlp_up"))
        return x_BTD + linear(jax.nn.silu(gate) * up, p["mlp_down"]), None

    policies = {
        "none": saves("qkv", "residual", "mlp"),
        "mlp": saves("qkv", "residual"),
        "full": None,
    }
    if shape.remat != "none" or not shape.unroll:
        block = jax.checkpoint(block, prevent_cse=shape.unroll, policy=policies[shape.remat])
    unroll = shape.layers if shape.unroll else 1

    def loss_fn(params, tokens_BS):
        tokens_BT, labels_BT = tokens_BS[:, :-1], tokens_BS[:, 1:]
        x_BTD = params["token_embedding"]["embedding"].astype(BF16)[tokens_BT]
        x_BTD, _ = jax.lax.scan(block, x_BTD, params["blocks"], unroll=unroll)
        x_BTD = rms_norm(x_BTD, params["final_norm"])
        output = "token_embedding" if shape.tied else "output_embedding"
        table_VD = params[output]["embedding"]
        x_ND = x_BTD.reshape(-1, x_BTD.shape[-1])
        loss = mean_loss if chunked else plain_loss
        return loss(x_ND, table_VD, labels_BT.reshape(-1), jnp.zeros(len(table_VD)))

    return loss_fn


# ---------------------------------------------------------------------------
# Step
# ---------------------------------------------------------------------------


def make_training(
    loss_fn: Callable[..., jax.Array], tx: optax.GradientTransformation, guard: bool = True
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns `init(params)`, which makes the state, and the jitted train step.

    `tx` clips by the global norm, so that XLA computes the norm only once. `guard` skips steps with
    gradients that are not finite.
    """

    def init(params):
        return params, tx.init(params)

    @functools.partial(jax.jit, donate_argnums=0)
    def train_step(state, tokens_BS):
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, tokens_BS)
        updates, new_state = tx.update(grads, opt_state, params)
        new = optax.apply_updates(params, updates), new_state
        if not guard:
            return new, loss
        finite = jnp.isfinite(optax.tree.norm(grads)) & jnp.isfinite(loss)
        keep = lambda new, old: jnp.where(finite, new, old)
        return jax.tree.map(keep, new, (params, opt_state)), loss

    return init, train_step
