"""Trains GPT-2, from 124 million to 1.5 billion parameters, with any recipe.

    python examples/gpt.py
    python examples/gpt.py --recipe fp16 --framework nnx --steps 60
    python examples/gpt.py --size gpt2-xl --remat --batch-size 16 --tokens train.bin
    python examples/gpt.py --help
    jaxmp audit examples/gpt.py:make_step --recipe bf16 --target h200
    jaxmp audit examples/gpt.py:make_nnx_step --recipe bf16 --target h200

The same model in Flax Linen and in Flax NNX, with the same parameter names: one block, scanned over
the layers; causal attention; one table for tokens in and out. The models contain no dtype: the
recipe sets all of them. Queries, keys and values have a matmul each: cuDNN's attention reads whole
arrays, and a split of one wide result would copy each of them. Blocks compute on arrays of two
dimensions, because XLA would copy a residual of three before the matmul that adds to it.

    size           parameters     layers   width   heads
    tiny              842,496          4     128       4
    gpt2          124,439,808         12     768      12
    gpt2-medium   354,823,168         24    1024      16
    gpt2-large    774,030,080         36    1280      20
    gpt2-xl     1,557,611,200         48    1600      25

The default size trains in less than a minute on a CPU. The table of tokens has 50,304 rows for the
vocabulary of 50,257; the parameters above do not include the padding. Tokens are the bytes of
Python's standard library, or those of the file --tokens: 16-bit integers without a header, as
nanoGPT writes them.
On a GPU, set XLA_FLAGS=--xla_gpu_enable_triton_gemm=false: cuBLAS then adds biases and computes
GELUs while it writes the results of matmuls. XLA's Triton kernels do not.
Install first: pip install -e ".[examples]".

Shape suffixes: B batch, T position, S position and one more, M token of the batch (B x T), D width,
N head, V row of the token table.
"""

import enum
import functools
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import typer
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

import jaxmp
from command_line import Positive, RecipeName, Seed
from jaxmp import fp8, functional

EPSILON = 1e-5  # of the norms
NORMAL = nn.initializers.normal(0.02)


# ---------------------------------------------------------------------------
# Linen
# ---------------------------------------------------------------------------


class Block(nn.Module):
    """A pre-norm transformer block."""

    heads: int
    layers: int  # of the whole model; decides the initial size of the residual branches

    @nn.compact
    def __call__(self, x_BTD: jax.Array, _: None = None) -> tuple[jax.Array, None]:
        """Returns x_BTD after attention and a two-layer perceptron, each with a residual."""
        shape, width, residual = x_BTD.shape, x_BTD.shape[-1], residual_init(self.layers)
        x_MD = x_BTD.reshape(-1, width)
        h_MD = nn.LayerNorm(EPSILON, name="attention_norm")(x_MD)
        linear = functools.partial(nn.Dense, width, kernel_init=NORMAL)
        qkv = (linear(name=name)(h_MD) for name in ("query", "key", "value"))
        h_MD = causal_attention(*qkv, (*shape[:2], self.heads, -1))
        x_MD = x_MD + nn.Dense(width, kernel_init=residual, name="attention_out")(h_MD)
        x_MD = checkpoint_name(x_MD, "residual")
        h_MD = nn.LayerNorm(EPSILON, name="mlp_norm")(x_MD)
        up = nn.Dense(4 * width, kernel_init=NORMAL, name="mlp_up")
        down = nn.Dense(width, kernel_init=residual, name="mlp_down")
        x_MD = x_MD + down(functional.gelu(checkpoint_name(up(h_MD), "mlp")))
        return x_MD.reshape(shape), None


class GPT(nn.Module):
    """GPT-2 (Radford et al. 2019); the defaults are its smallest size."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    vocabulary: int = 50257
    max_length: int = 1024
    remat: bool = False  # whether the backward pass recomputes each block as a whole
    unroll: bool = False  # whether the layers run without a loop: faster, but compiles longer
    logits_dtype: str | None = None  # in which the loss stores logits; None is float32
    loss_chunk: int | None = None  # rows whose logits are stored at a time; None is by memory

    @nn.compact
    def __call__(self, tokens_BT: jax.Array, labels_BT: jax.Array | None = None) -> jax.Array:
        """Returns FP32 logits of the next tokens; with labels_BT, their mean loss."""
        rows = padded(self.vocabulary)
        token = nn.Embed(rows, self.width, embedding_init=NORMAL, name="token_embedding")
        position = nn.Embed(
            self.max_length, self.width, embedding_init=NORMAL, name="position_embedding"
        )
        x_BTD = token(tokens_BT) + position(jnp.arange(tokens_BT.shape[1])[None])
        blocks = nn.scan(
            rematerialized(nn.remat, Block, self, saved(self.remat)),
            # FP8 with delayed scaling keeps its state in the second collection.
            variable_axes={"params": 0, "_overwrite_with_gradient": 0},
            split_rngs={"params": True},
            length=self.layers,
            unroll=self.layers if self.unroll else 1,
        )
        x_BTD, _ = blocks(self.heads, self.layers, name="blocks")(x_BTD, None)
        x_BTD = nn.LayerNorm(EPSILON, name="final_norm")(x_BTD)
        table_VD = token.embedding
        options = {"logits_dtype": self.logits_dtype, "chunk": self.loss_chunk}
        return logits_or_loss(x_BTD, table_VD, self.vocabulary, labels_BT, **options)


# ---------------------------------------------------------------------------
# NNX
# ---------------------------------------------------------------------------


class NnxBlock(nnx.Module):
    """`Block` in NNX."""

    def __init__(self, gpt: GPT, *, rngs: nnx.Rngs) -> None:
        """Makes layers with the sizes of `gpt`."""
        width, residual = gpt.width, residual_init(gpt.layers)
        self.heads = gpt.heads
        self.attention_norm = nnx.LayerNorm(width, epsilon=EPSILON, rngs=rngs)
        self.query = nnx.Linear(width, width, kernel_init=NORMAL, rngs=rngs)
        self.key = nnx.Linear(width, width, kernel_init=NORMAL, rngs=rngs)
        self.value = nnx.Linear(width, width, kernel_init=NORMAL, rngs=rngs)
        self.attention_out = nnx.Linear(width, width, kernel_init=residual, rngs=rngs)
        self.mlp_norm = nnx.LayerNorm(width, epsilon=EPSILON, rngs=rngs)
        self.mlp_up = nnx.Linear(width, 4 * width, kernel_init=NORMAL, rngs=rngs)
        self.mlp_down = nnx.Linear(4 * width, width, kernel_init=residual, rngs=rngs)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """Returns x_BTD after attention and a two-layer perceptron, each with a residual."""
        x_MD = x_BTD.reshape(-1, x_BTD.shape[-1])
        h_MD = self.attention_norm(x_MD)
        qkv = (linear(h_MD) for linear in (self.query, self.key, self.value))
        h_MD = causal_attention(*qkv, (*x_BTD.shape[:2], self.heads, -1))
        x_MD = checkpoint_name(x_MD + self.attention_out(h_MD), "residual")
        up = checkpoint_name(self.mlp_up(self.mlp_norm(x_MD)), "mlp")
        return (x_MD + self.mlp_down(functional.gelu(up))).reshape(x_BTD.shape)


class NnxGPT(nnx.Module):
    """`GPT` in NNX."""

    def __init__(self, gpt: GPT, *, rngs: nnx.Rngs) -> None:
        """Makes layers with the sizes of `gpt`."""
        rows, width = padded(gpt.vocabulary), gpt.width
        self.gpt = gpt
        self.token_embedding = nnx.Embed(rows, width, embedding_init=NORMAL, rngs=rngs)
        self.position_embedding = nnx.Embed(gpt.max_length, width, embedding_init=NORMAL, rngs=rngs)
        stacked = nnx.split_rngs(splits=gpt.layers)(nnx.vmap(lambda r: NnxBlock(gpt, rngs=r)))
        self.blocks = stacked(rngs)
        self.final_norm = nnx.LayerNorm(width, epsilon=EPSILON, rngs=rngs)

    def __call__(self, tokens_BT: jax.Array, labels_BT: jax.Array | None = None) -> jax.Array:
        """Returns FP32 logits of the next tokens; with labels_BT, their mean loss."""
        positions_1T = jnp.arange(tokens_BT.shape[1])[None]
        x_BTD = self.token_embedding(tokens_BT) + self.position_embedding(positions_1T)
        gpt = self.gpt
        x_BTD = self.final_norm(scan_blocks(self.blocks, x_BTD, gpt, saved(gpt.remat)))
        table_VD = self.token_embedding.embedding[...]
        options = {"logits_dtype": gpt.logits_dtype, "chunk": gpt.loss_chunk}
        return logits_or_loss(x_BTD, table_VD, gpt.vocabulary, labels_BT, **options)


def scan_blocks(blocks: Any, x_BTD: jax.Array, sizes: Any, policy: Any) -> jax.Array:
    """Runs stacked NNX blocks one after another; `sizes` has `layers`, `unroll` and `remat`."""
    # A block changes no Variable. With graph_updates each step of the scan would return all of
    # them, and XLA would keep that copy for the backward pass.
    transform = functools.partial(nnx.remat, graph_updates=False)
    run = rematerialized(transform, lambda x_BTD, block: block(x_BTD), sizes, policy)
    unroll, axes = sizes.layers if sizes.unroll else 1, (nnx.Carry, 0)
    return nnx.scan(run, in_axes=axes, out_axes=nnx.Carry, unroll=unroll)(x_BTD, blocks)


# ---------------------------------------------------------------------------
# Parts of both
# ---------------------------------------------------------------------------


def padded(vocabulary: int) -> int:
    """Returns the rows of the token table: multiples of 128 fill the tiles of a Tensor Core."""
    return -(-vocabulary // 128) * 128


def residual_init(layers: int) -> Callable[..., jax.Array]:
    """Returns the initializer of the 2 * layers projections whose outputs are added to x."""
    return nn.initializers.normal(0.02 / (2 * layers) ** 0.5)


def rematerialized(transform: Callable[..., Any], block: Any, sizes: Any, policy: Any) -> Any:
    """Applies `nn.remat` or `nnx.remat` to a block, unless the model runs faster without it.

    A loop saves all that the backward pass reads, unless a policy names less. Without a loop, XLA
    saves few arrays by itself: it computes norms and activations again where they are read.
    """
    if sizes.unroll and sizes.remat in (False, "none"):
        return block
    # Outside of a loop, XLA would merge the recomputation with the original operations.
    return transform(block, prevent_cse=sizes.unroll, policy=policy)


# Named results that a block saves for its backward pass, beside those of cuDNN's attention. Without
# a policy, a scan would also save several arrays for each norm and GELU, some of them in FP32.
NAMES = ("qkv", "residual", "mlp")


def saved(remat: bool) -> Callable[..., bool]:
    """Returns the policy for results that a block saves: none with `remat`."""
    is_named = jax.checkpoint_policies.save_only_these_names(*NAMES)

    def is_saved(primitive: Any, *args: Any, **params: Any) -> bool:
        attends = primitive.name.startswith("dot_product_attention_fwd")
        return not remat and (attends or is_named(primitive, *args, **params))

    return fp8.checkpoint_policy(is_saved)


def causal_attention(
    q_MD: jax.Array, k_MD: jax.Array, v_MD: jax.Array, split: tuple[int, ...]
) -> jax.Array:
    """Computes causal attention, with cuDNN's fused kernel on a GPU in 16 bits.

    `split` is the shape of queries with heads, such as (B, T, N, -1).
    """
    qkv = (checkpoint_name(part.reshape(split), "qkv") for part in (q_MD, k_MD, v_MD))
    return jaxmp.dot_product_attention(*qkv, is_causal=True).reshape(q_MD.shape)


def logits_or_loss(
    x_BTD: jax.Array,
    table_VD: jax.Array,
    vocabulary: int,
    labels_BT: jax.Array | None,
    **options: Any,
) -> jax.Array:
    """Returns FP32 logits, or the mean loss of labels_BT, computed with the `options` of the loss.

    Padded rows have probability 0.
    """
    if labels_BT is None:
        product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
        return product("btd,vd->btv", x_BTD, table_VD.astype(x_BTD.dtype))[..., :vocabulary]
    return jaxmp.losses.linear_cross_entropy(
        x_BTD,
        table_VD,
        labels_BT,
        transposed=True,
        num_classes=vocabulary,
        **options,
    )


# ---------------------------------------------------------------------------
# Training
# ---------------------------------------------------------------------------


def make_optimizer(lr: float = 6e-4, steps: int = 100_000) -> optax.GradientTransformation:
    """Returns AdamW with the settings of GPT-3 (Brown et al. 2020) and decay of matrices only."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, lr, steps // 10, steps, lr / 10)
    adamw = optax.adamw(schedule, b2=0.95, weight_decay=0.1, mask=matrices)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


def matrices(params: Any) -> Any:
    """Returns True for matrices, by name, because a scan stacks biases to two dimensions."""

    def is_matrix(path: Any, _: Any) -> bool:
        return any(getattr(key, "key", None) in ("kernel", "embedding") for key in path)

    return jax.tree_util.tree_map_with_path(is_matrix, params)


def linen_training(
    recipe: Any, gpt: nn.Module, tx: optax.GradientTransformation, seed: int = 0
) -> tuple[Callable[[], jaxmp.TrainState], Callable[..., Any]]:
    """Returns a function that makes the initial state, and the jitted train step."""
    recipe = jaxmp.load_recipe(recipe)
    model = recipe.wrap(gpt)

    def init() -> jaxmp.TrainState:
        params = model.init(jax.random.key(seed), jnp.zeros((1, 8), jnp.int32))
        return jaxmp.TrainState.create(apply_fn=model.apply, params=params, tx=recipe.optimizer(tx))

    def loss_fn(params: Any, tokens_BS: jax.Array) -> jax.Array:
        return model.apply(params, tokens_BS[:, :-1], tokens_BS[:, 1:])

    @functools.partial(jax.jit, donate_argnums=0)
    def train_step(state: jaxmp.TrainState, tokens_BS: jax.Array) -> Any:
        loss, grads = state.value_and_grad(loss_fn)(tokens_BS)
        return state.apply_gradients(grads=grads), loss

    return init, train_step


def nnx_training(
    recipe: Any,
    gpt: Any,
    tx: optax.GradientTransformation,
    seed: int = 0,
    make: Callable[..., Any] = NnxGPT,
) -> tuple[Callable[[], Any], Callable[..., jax.Array]]:
    """Returns a function that makes the model and its optimizer, and the jitted train step."""
    recipe = jaxmp.load_recipe(recipe)

    def init() -> tuple[nnx.Module, jaxmp.nnx.Optimizer]:
        model = recipe.wrap(make(gpt, rngs=nnx.Rngs(seed)))
        return model, jaxmp.nnx.Optimizer(model, recipe.optimizer(tx))

    def loss_fn(model: Any, tokens_BS: jax.Array) -> jax.Array:
        return model(tokens_BS[:, :-1], tokens_BS[:, 1:])

    @functools.partial(nnx.jit, donate_argnums=(0, 1))
    def train_step(model: nnx.Module, optimizer: jaxmp.nnx.Optimizer, tokens_BS: jax.Array) -> Any:
        loss, grads = optimizer.value_and_grad(loss_fn)(model, tokens_BS)
        optimizer.update(model, grads)
        return loss

    return init, train_step


SIZES = {
    "tiny": GPT(layers=4, width=128, heads=4, vocabulary=256, max_length=128),
    "gpt2": GPT(),
    "gpt2-medium": GPT(layers=24, width=1024, heads=16),
    "gpt2-large": GPT(layers=36, width=1280, heads=20),
    "gpt2-xl": GPT(layers=48, width=1600, heads=25),
}


def make_step(
    recipe: str | jaxmp.Recipe = "bf16",
    gpt: GPT = SIZES["gpt2"],
    batch_size: int = 8,
    remat: bool | None = None,
) -> Any:
    """Returns the train step and the shapes of its arguments, for `jaxmp audit` and `plan`."""
    gpt = gpt if remat is None else gpt.clone(remat=remat)
    init, train_step = linen_training(recipe, gpt, make_optimizer())
    tokens_BS = jax.ShapeDtypeStruct((batch_size, gpt.max_length + 1), jnp.int32)
    return train_step, jax.eval_shape(init), tokens_BS


def make_nnx_step(recipe: str = "bf16", gpt: GPT = SIZES["gpt2"], batch_size: int = 8) -> Any:
    """Returns the train step in NNX and the shapes of its arguments, for `jaxmp audit`."""
    init, train_step = nnx_training(recipe, gpt, make_optimizer())
    tokens_BS = jax.ShapeDtypeStruct((batch_size, gpt.max_length + 1), jnp.int32)
    return train_step, *nnx.eval_shape(init), tokens_BS


# ---------------------------------------------------------------------------
# Command
# ---------------------------------------------------------------------------


def read_standard_library() -> np.ndarray:
    """Returns the bytes of the Python files at the top of the standard library."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return np.frombuffer(b"\n".join(file.read_bytes() for file in files), np.uint8)


def random_batch(
    text: np.ndarray, batch_size: int, length: int, rng: np.random.Generator
) -> np.ndarray:
    """Returns int32 (B, T+1) windows of a text."""
    starts = rng.integers(0, len(text) - length, batch_size)
    return text[starts[:, None] + np.arange(length + 1)].astype(np.int32)


def read_tokens(file: Path, gpt: Any) -> np.ndarray:
    """Maps a file of 16-bit tokens into memory; raises an error if it does not fit the model."""
    if file.stat().st_size % 2:
        raise typer.BadParameter(f"{file} has an odd number of bytes, and a token has two.")
    if file.stat().st_size < 4 * gpt.max_length:
        raise typer.BadParameter(f"{file} is shorter than two texts of {gpt.max_length} tokens.")
    text = np.memmap(file, np.uint16, "r")
    largest = text[:1_000_000].max()
    if largest >= gpt.vocabulary:
        raise typer.BadParameter(
            f"{file} contains the token {largest}, and this size has {gpt.vocabulary} tokens. "
            "Name a size with the vocabulary of GPT-2: --size gpt2"
        )
    return text


class LogitsDtype(enum.StrEnum):
    """Dtype in which the loss stores logits."""

    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"


class Framework(enum.StrEnum):
    """Library in which the model is written."""

    linen = "linen"
    nnx = "nnx"


def train(
    framework: Framework,
    init: Callable[[], Any],
    train_step: Callable[..., Any],
    text: np.ndarray,
    steps: int,
    batch_size: int,
    length: int,
    seed: int,
) -> list[float]:
    """Runs the steps on random windows of a text, and returns the loss of each."""
    is_linen = framework == Framework.linen
    model, state = (None, jax.jit(init)()) if is_linen else nnx.jit(init)()
    losses, rng, start = [], np.random.default_rng(seed), time.perf_counter()
    for step in range(1, steps + 1):
        batch_BS = random_batch(text, batch_size, length, rng)
        if is_linen:
            state, loss = train_step(state, batch_BS)
        else:
            loss = train_step(model, state, batch_BS)
        losses.append(loss)
        if step % 10 == 0 or step == steps:
            jaxmp.check(state)  # raises if gradients overflow at the smallest loss scale
            skipped = int(jaxmp.get_skip_stats(state).total)
            print(f"step {step:>5}  loss {float(loss):.3f}  {skipped} steps skipped", flush=True)
    tokens_per_second = steps * batch_size * length / (time.perf_counter() - start)
    print(f"{tokens_per_second:,.0f} tokens/s, with compilation")
    return [float(loss) for loss in losses]


Size = enum.StrEnum("Size", {name: name for name in SIZES})


def main(
    recipe: RecipeName = "bf16",
    size: Size = Size["tiny"],
    framework: Framework = Framework.linen,
    steps: Positive = 100,
    batch_size: Positive = 16,
    lr: Annotated[float, typer.Option(help="Peak learning rate.")] = 2e-3,
    remat: Annotated[bool, typer.Option(help="Recompute each block: less memory.")] = False,
    unroll: Annotated[bool, typer.Option(help="No loop over layers: faster, on GPUs.")] = False,
    logits_dtype: LogitsDtype | None = None,
    tokens: Annotated[
        Path | None, typer.Option(help="File of 16-bit tokens.", exists=True, dir_okay=False)
    ] = None,
    seed: Seed = 0,
) -> list[float]:
    """Trains GPT-2 and returns the loss of each step."""
    gpt = SIZES[size].clone(remat=remat, unroll=unroll, logits_dtype=logits_dtype)
    text = read_tokens(tokens, gpt) if tokens else read_standard_library()
    training = linen_training if framework == Framework.linen else nnx_training
    init, train_step = training(recipe, gpt, make_optimizer(lr, steps), seed)
    return train(framework, init, train_step, text, steps, batch_size, gpt.max_length, seed)


if __name__ == "__main__":
    typer.run(main)
