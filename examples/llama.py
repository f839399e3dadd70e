"""Trains Llama, from a toy to 8 billion parameters, with any recipe.

    python examples/llama.py
    python examples/llama.py --recipe fp8 --framework nnx --steps 60
    python examples/llama.py --size llama-3.2-1b --remat mlp --batch-size 4 --tokens train.bin
    python examples/llama.py --help
    jaxmp audit examples/llama.py:make_step --recipe bf16 --target h200
    jaxmp audit examples/llama.py:make_nnx_step --recipe bf16 --target h200

The same model in Flax Linen and in Flax NNX, with the same parameter names: one block, scanned over
the layers; RMS norms; rotary positions; grouped-query causal attention; a gated perceptron. The
models contain no dtype: the recipe sets all of them.

    size             parameters   layers   width   heads   key heads   perceptron   vocabulary
    tiny                771,200        4     128       4           2          352          256
    llama-1.3b    1,364,297,728       24    2048      16          16         5632       32,000
    llama-3.2-1b  1,235,814,400       16    2048      32           8         8192      128,256
    llama-3.2-3b  3,212,749,824       28    3072      24           8         8192      128,256
    llama-3-8b    8,030,261,248       32    4096      32           8        14336      128,256
    llama-3-70b  70,553,706,496       80    8192      64           8        28672      128,256

The tiny size and those of Llama 3.2 have one table for tokens in and out, the others have two.
Sizes are those of the published models (Dubey et al. 2024, arXiv:2407.21783), without the rescaled
frequencies of Llama 3.2; llama-1.3b has the perceptron of TinyLlama. The default size trains in
about a minute on a CPU. Tokens are those of examples/gpt.py; a file of 16-bit tokens fits
vocabularies of up to 65,536.
Install first: pip install -e ".[examples]".

--remat decides what the backward pass computes again instead of reading it:

    none   norms, activations and casts
    mlp    also the two wide matmuls of the perceptron, whose results are most of the memory
    full   each block as a whole

Shape suffixes: B batch, T position, S position and one more, D width, F perceptron, N head, K key
head, G query heads of a key head and two more, H features of a head, V row of the token table.
"""

import dataclasses
import enum
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import typer
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

import gpt
import jaxmp
from command_line import Positive, RecipeName, Seed
from jaxmp import fp8, functional

EPSILON = 1e-5  # of the norms
NORMAL = nn.initializers.normal(0.02)


def unchanged(array: jax.Array, _: Any = None) -> jax.Array:
    """Returns an array as it is."""
    return array


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a model; the defaults are those of Llama 3 with 8 billion parameters."""

    layers: int = 32
    width: int = 4096
    heads: int = 32
    key_heads: int = 8
    hidden: int = 14336  # width of the perceptron
    vocabulary: int = 128256
    max_length: int = 8192
    tied: bool = False  # whether one table serves for tokens in and out
    rope_base: float = 500000.0
    remat: str = "none"  # a key of SAVED
    unroll: bool = False  # whether the layers run without a loop: faster, but compiles longer
    logits_dtype: str | None = None  # in which the loss stores logits; None is float32
    # For several devices: set the sharding of x_BTD, and that of the last table, which is used in
    # the dtype of x_BTD.
    constrain: Callable[[jax.Array], jax.Array] = unchanged
    gather: Callable[[jax.Array, Any], jax.Array] = unchanged

    @property
    def head_size(self) -> int:
        """Features of a head."""
        return self.width // self.heads

    @property
    def qkv_size(self) -> int:
        """Features of queries, keys and values of all heads."""
        return (self.heads + 2 * self.key_heads) * self.head_size


# ---------------------------------------------------------------------------
# Linen
# ---------------------------------------------------------------------------


class Block(nn.Module):
    """A pre-norm transformer block."""

    shape: Shape

    @nn.compact
    def __call__(self, x_BTD: jax.Array, _: None = None) -> tuple[jax.Array, None]:
        """Returns x_BTD after attention and a gated perceptron, each with a residual."""
        shape = self.shape
        linear = functools.partial(nn.Dense, use_bias=False)
        residual = gpt.residual_init(shape.layers)
        h_BTD = nn.RMSNorm(EPSILON, name="attention_norm")(x_BTD)
        qkv_BTF = linear(shape.qkv_size, kernel_init=NORMAL, name="qkv")(h_BTD)
        h_BTD = attention(shape, qkv_BTF)
        x_BTD += linear(shape.width, kernel_init=residual, name="attention_out")(h_BTD)
        x_BTD = checkpoint_name(x_BTD, "residual")
        h_BTD = nn.RMSNorm(EPSILON, name="mlp_norm")(x_BTD)
        gate = linear(shape.hidden, kernel_init=NORMAL, name="mlp_gate")
        up = linear(shape.hidden, kernel_init=NORMAL, name="mlp_up")
        down = linear(shape.width, kernel_init=residual, name="mlp_down")
        hidden = (checkpoint_name(layer(h_BTD), "mlp") for layer in (gate, up))
        x_BTD += down(functional.swiglu(*hidden))
        return shape.constrain(x_BTD), None


class Llama(nn.Module):
    """Llama 3 (Dubey et al. 2024)."""

    shape: Shape = Shape()

    @nn.compact
    def __call__(self, tokens_BT: jax.Array, labels_BT: jax.Array | None = None) -> jax.Array:
        """Returns FP32 logits of the next tokens; with labels_BT, their mean loss."""
        shape = self.shape
        table = functools.partial(nn.Embed, shape.vocabulary, shape.width, embedding_init=NORMAL)
        token = table(name="token_embedding")
        output = token if shape.tied else table(name="output_embedding")
        blocks = nn.scan(
            gpt.rematerialized(nn.remat, Block, shape, saved(shape.remat)),
            # FP8 with delayed scaling keeps its state in the second collection.
            variable_axes={"params": 0, "_overwrite_with_gradient": 0},
            split_rngs={"params": True},
            length=shape.layers,
            unroll=shape.layers if shape.unroll else 1,
        )
        x_BTD, _ = blocks(shape, name="blocks")(shape.constrain(token(tokens_BT)), None)
        x_BTD = nn.RMSNorm(EPSILON, name="final_norm")(x_BTD)
        table_VD = shape.gather(output.embedding, x_BTD.dtype)
        dtype = shape.logits_dtype
        return gpt.logits_or_loss(x_BTD, table_VD, shape.vocabulary, labels_BT, logits_dtype=dtype)


# ---------------------------------------------------------------------------
# NNX
# ---------------------------------------------------------------------------


class NnxBlock(nnx.Module):
    """`Block` in NNX."""

    def __init__(self, shape: Shape, *, rngs: nnx.Rngs) -> None:
        """Makes layers with the sizes of `shape`."""
        self.shape = shape
        linear = functools.partial(nnx.Linear, use_bias=False, rngs=rngs)
        width, residual = shape.width, gpt.residual_init(shape.layers)
        self.attention_norm = nnx.RMSNorm(width, epsilon=EPSILON, rngs=rngs)
        self.qkv = linear(width, shape.qkv_size, kernel_init=NORMAL)
        self.attention_out = linear(width, width, kernel_init=residual)
        self.mlp_norm = nnx.RMSNorm(width, epsilon=EPSILON, rngs=rngs)
        self.mlp_gate = linear(width, shape.hidden, kernel_init=NORMAL)
        self.mlp_up = linear(width, shape.hidden, kernel_init=NORMAL)
        self.mlp_down = linear(shape.hidden, width, kernel_init=residual)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """Returns x_BTD after attention and a gated perceptron, each with a residual."""
        qkv_BTF = self.qkv(self.attention_norm(x_BTD))
        x_BTD += self.attention_out(attention(self.shape, qkv_BTF))
        x_BTD = checkpoint_name(x_BTD, "residual")
        h_BTD = self.mlp_norm(x_BTD)
        layers = self.mlp_gate, self.mlp_up
        hidden = (checkpoint_name(layer(h_BTD), "mlp") for layer in layers)
        x_BTD += self.mlp_down(functional.swiglu(*hidden))
        return self.shape.constrain(x_BTD)


class NnxLlama(nnx.Module):
    """`Llama` in NNX."""

    def __init__(self, shape: Shape, *, rngs: nnx.Rngs) -> None:
        """Makes layers with the sizes of `shape`."""
        self.shape = shape
        table = functools.partial(
            nnx.Embed, shape.vocabulary, shape.width, embedding_init=NORMAL, rngs=rngs
        )
        self.token_embedding = table()
        if not shape.tied:
            self.output_embedding = table()
        stacked = nnx.split_rngs(splits=shape.layers)(nnx.vmap(lambda r: NnxBlock(shape, rngs=r)))
        self.blocks = stacked(rngs)
        self.final_norm = nnx.RMSNorm(shape.width, epsilon=EPSILON, rngs=rngs)

    def __call__(self, tokens_BT: jax.Array, labels_BT: jax.Array | None = None) -> jax.Array:
        """Returns FP32 logits of the next tokens; with labels_BT, their mean loss."""
        shape = self.shape
        x_BTD = shape.constrain(self.token_embedding(tokens_BT))
        x_BTD = gpt.scan_blocks(self.blocks, x_BTD, shape, saved(shape.remat))
        x_BTD = self.final_norm(x_BTD)
        output = self.token_embedding if shape.tied else self.output_embedding
        table_VD = shape.gather(output.embedding[...], x_BTD.dtype)
        dtype = shape.logits_dtype
        return gpt.logits_or_loss(x_BTD, table_VD, shape.vocabulary, labels_BT, logits_dtype=dtype)


# ---------------------------------------------------------------------------
# Parts of both
# ---------------------------------------------------------------------------

# Named results that a block saves for its backward pass. Results of attention are saved too, except
# with "full". The rotated queries and keys are sufficient for the backward pass of the rotation.
SAVED = {"none": ("qkv", "residual", "mlp"), "mlp": ("qkv", "residual"), "full": ()}


def saved(remat: str) -> Callable[..., bool]:
    """Returns the policy for results that a block saves for its backward pass."""
    is_named = jax.checkpoint_policies.save_only_these_names(*SAVED[remat])

    def is_saved(primitive: Any, *args: Any, **params: Any) -> bool:
        attends = primitive.name.startswith("dot_product_attention_fwd")
        return (attends and remat != "full") or is_named(primitive, *args, **params)

    return fp8.checkpoint_policy(is_saved)


def rotary_embedding(x_BTNH: jax.Array, base: float) -> jax.Array:
    """Rotates pairs of features by angles proportional to the position (arXiv:2104.09864).

    Angles, sines and rotation are in FP32: bfloat16 cannot represent all positions above 256.
    """
    length, size = x_BTNH.shape[1], x_BTNH.shape[-1]
    rates = base ** (-jnp.arange(0, size, 2, dtype=jnp.float32) / size)
    angles = jnp.outer(jnp.arange(length, dtype=jnp.float32), rates)[None, :, None]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    rotated = (first * cos - second * sin, first * sin + second * cos)
    return jnp.concatenate(rotated, axis=-1).astype(x_BTNH.dtype)


def attention(shape: Shape, qkv_BTF: jax.Array) -> jax.Array:
    """Computes causal attention with rotary positions.

    Queries, keys and values are grouped by key head, so that devices that split the features among
    them each have whole groups.
    """
    batch, length, _ = qkv_BTF.shape
    qkv_BTKGH = qkv_BTF.reshape(batch, length, shape.key_heads, -1, shape.head_size)
    q_BTNH = qkv_BTKGH[:, :, :, :-2].reshape(batch, length, shape.heads, shape.head_size)
    q_BTNH = rotary_embedding(q_BTNH, shape.rope_base)
    k_BTKH = rotary_embedding(qkv_BTKGH[:, :, :, -2], shape.rope_base)
    v_BTKH = qkv_BTKGH[:, :, :, -1]
    qkv = (checkpoint_name(part, "qkv") for part in (q_BTNH, k_BTKH, v_BTKH))
    return jaxmp.dot_product_attention(*qkv, is_causal=True).reshape(batch, length, -1)


# ---------------------------------------------------------------------------
# Training
# ---------------------------------------------------------------------------


def linen_training(recipe: Any, shape: Shape, *args: Any) -> tuple[Any, Any]:
    """Returns a function that makes the initial state, and the jitted train step."""
    return gpt.linen_training(recipe, Llama(shape), *args)


def nnx_training(recipe: Any, shape: Shape, *args: Any) -> tuple[Any, Any]:
    """Returns a function that makes the model and its optimizer, and the jitted train step."""
    return gpt.nnx_training(recipe, shape, *args, make=NnxLlama)


SIZES = {
    "tiny": Shape(4, 128, 4, 2, 352, 256, 128, tied=True),
    "llama-1.3b": Shape(24, 2048, 16, 16, 5632, 32000, 2048, rope_base=10000.0),
    "llama-3.2-1b": Shape(16, 2048, 32, 8, 8192, tied=True),
    "llama-3.2-3b": Shape(28, 3072, 24, 8, 8192, tied=True),
    "llama-3-8b": Shape(),
    "llama-3-70b": Shape(80, 8192, 64, 8, 28672),
}


def make_step(
    recipe: str | jaxmp.Recipe = "bf16",
    shape: Shape = SIZES["llama-3.2-1b"],
    batch_size: int = 1,
    remat: str | None = None,
) -> Any:
    """Returns the train step and the shapes of its arguments, for `jaxmp audit` and `plan`."""
    shape = dataclasses.replace(shape, remat=remat or shape.remat)
    init, train_step = linen_training(recipe, shape, gpt.make_optimizer())
    tokens_BS = jax.ShapeDtypeStruct((batch_size, shape.max_length + 1), jnp.int32)
    return train_step, jax.eval_shape(init), tokens_BS


def make_nnx_step(
    recipe: str | jaxmp.Recipe = "bf16", shape: Shape = SIZES["llama-3.2-1b"], batch_size: int = 1
) -> Any:
    """Returns the train step in NNX and the shapes of its arguments, for `jaxmp audit`."""
    init, train_step = nnx_training(recipe, shape, gpt.make_optimizer())
    tokens_BS = jax.ShapeDtypeStruct((batch_size, shape.max_length + 1), jnp.int32)
    return train_step, *nnx.eval_shape(init), tokens_BS


# ---------------------------------------------------------------------------
# Command
# ---------------------------------------------------------------------------

Size = enum.StrEnum("Size", {name: name for name in SIZES})
Remat = enum.StrEnum("Remat", {name: name for name in SAVED})


def main(
    recipe: RecipeName = "bf16",
    size: Size = Size["tiny"],
    framework: gpt.Framework = gpt.Framework.linen,
    steps: Positive = 100,
    batch_size: Positive = 16,
    lr: Annotated[float, typer.Option(help="Peak learning rate.")] = 2e-3,
    remat: Annotated[Remat, typer.Option(help="Results to compute again.")] = Remat["none"],
    unroll: Annotated[bool, typer.Option(help="No loop over layers: faster, on GPUs.")] = False,
    logits_dtype: gpt.LogitsDtype | None = None,
    tokens: Annotated[
        Path | None, typer.Option(help="File of 16-bit tokens.", exists=True, dir_okay=False)
    ] = None,
    seed: Seed = 0,
) -> list[float]:
    """Trains Llama and returns the loss of each step."""
    changes = {"remat": str(remat), "unroll": unroll, "logits_dtype": logits_dtype}
    shape = dataclasses.replace(SIZES[size], **changes)
    text = gpt.read_tokens(tokens, shape) if tokens else gpt.read_standard_library()
    training = linen_training if framework == gpt.Framework.linen else nnx_training
    init, train_step = training(recipe, shape, gpt.make_optimizer(lr, steps), seed)
    return gpt.train(framework, init, train_step, text, steps, batch_size, shape.max_length, seed)


if __name__ == "__main__":
    typer.run(main)
