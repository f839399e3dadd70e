"""Training steps with tensor parallelism, for benchmarks/memory_estimates.py.

Each function returns a step with AdamW and the shapes of its arguments, which are sharded over the
axes "data" and "model" of a mesh without devices: the first kernel of an attention or a perceptron
is divided by its columns, the second by its rows, and a table of tokens or logits by its rows. The
state of the two examples is divided over "data", too (FSDP). Shardings are set by the names of the
layers, by logical axes of Linen, by `nnx.with_partitioning`, or for each array.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax
import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import byte_gpt
import jaxmp
import llama
import plan_llama
import train_sharded

WIDTH, HEADS, TOKENS, VOCABULARY = 1024, 16, 512, 32_000
RULES = (("heads", "model"), ("hidden", "model"), ("width", None))


def make_mesh(devices: int) -> AbstractMesh:
    """Returns a mesh whose axis "model" has at most four devices."""
    model = min(devices, 4)
    return AbstractMesh((devices // model, model), ("data", "model"), (AxisType.Auto,) * 2)


def placed(leaf: Any, mesh: AbstractMesh, spec: P) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    logits = logits.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def saved(loss: Callable[..., Any], remat: bool, checkpoint: Any = jax.checkpoint) -> Any:
    """Keeps only the results of matmuls, with `remat`."""
    return checkpoint(loss, policy=jax.checkpoint_policies.dots_saveable) if remat else loss


def linen_step(
    model: nn.Module,
    batch: jax.ShapeDtypeStruct,
    recipe: str,
    remat: bool,
    mesh: AbstractMesh,
    specs_of: Callable[[Any], Any],
    loss: Callable[[Any, Any, jax.Array], jax.Array],
) -> tuple[Any, ...]:
    """Returns the step of a model. `specs_of` returns the shardings of its variables."""
    loaded = jaxmp.load_recipe(recipe)
    wrapped, tx = loaded.wrap(model), loaded.optimizer(optax.adamw(1e-4))
    init = lambda: wrapped.init(jax.random.key(0), jnp.zeros(batch.shape, batch.dtype))

    def create() -> jaxmp.TrainState:
        return jaxmp.TrainState.create(apply_fn=wrapped.apply, params=nn.unbox(init()), tx=tx)

    def train_step(
        state: jaxmp.TrainState, inputs: jax.Array
    ) -> tuple[jaxmp.TrainState, jax.Array]:
        run = saved(lambda params, inputs: loss(wrapped.apply, params, inputs), remat)
        value, grads = state.value_and_grad(run)(inputs)
        return state.apply_gradients(grads=grads), value

    state = jax.eval_shape(create)
    shardings = jaxmp.state_shardings(state, specs_of(jax.eval_shape(init)))
    leaves = jax.tree.map(lambda leaf, own: placed(leaf, mesh, own.spec), state, shardings)
    return jax.jit(train_step, donate_argnums=0), leaves, placed(batch, mesh, P("data"))


def gpt_by_names(recipe: str, remat: bool, devices: int) -> tuple[Any, ...]:
    """Returns the step of examples/train_sharded.py."""
    mesh = make_mesh(devices)
    rows = NamedSharding(mesh, P("data"))
    model = byte_gpt.GPT(
        4, WIDTH, HEADS, TOKENS, lambda x_BTD: jax.lax.with_sharding_constraint(x_BTD, rows)
    )
    sharding_of = functools.partial(train_sharded.parameter_sharding, mesh)
    return linen_step(
        model,
        jax.ShapeDtypeStruct((16, TOKENS), jnp.int32),
        recipe,
        remat,
        mesh,
        lambda variables: {
            "params": jax.tree_util.tree_map_with_path(sharding_of, variables["params"])
        },
        lambda apply, params, tokens: cross_entropy(apply(params, tokens), tokens),
    )


def scanned_llama(recipe: str, remat: bool, devices: int) -> tuple[Any, ...]:
    """Returns the step of examples/plan_llama.py for a small model."""
    small = dataclasses.replace(llama.SIZES["llama-3.2-1b"], layers=3, max_length=1024)
    llama.SIZES["small"] = small
    model = min(devices, 4)
    return plan_llama.make_step(recipe, "small", devices, model, 4, "full" if remat else "none")


# ---------------------------------------------------------------------------
# Linen with logical axes
# ---------------------------------------------------------------------------


class VisionBlock(nn.Module):
    """A block whose kernels have logical axes."""

    @nn.compact
    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """Returns x_BTD after attention and a perceptron."""

        def dense(features: int, *axes: str) -> nn.Dense:
            init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), axes)
            return nn.Dense(features, use_bias=False, kernel_init=init)

        y_BTD = nn.LayerNorm()(x_BTD)
        parts = (*x_BTD.shape[:2], HEADS, WIDTH // HEADS)
        qkv = (dense(WIDTH, "width", "heads")(y_BTD).reshape(parts) for _ in range(3))
        attended_BTD = jax.nn.dot_product_attention(*qkv).reshape(x_BTD.shape)
        x_BTD = x_BTD + dense(WIDTH, "heads", "width")(attended_BTD)
        hidden_BTF = nn.gelu(dense(4 * WIDTH, "width", "hidden")(nn.LayerNorm()(x_BTD)))
        return x_BTD + dense(WIDTH, "hidden", "width")(hidden_BTF)


class VisionTransformer(nn.Module):
    """Four blocks."""

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        """Returns logits."""
        x_BTD = nn.Conv(WIDTH, (16, 16), strides=16)(images)
        x_BTD = x_BTD.reshape(len(images), -1, WIDTH)
        for _ in range(4):
            x_BTD = VisionBlock()(x_BTD)
        return nn.Dense(1000)(x_BTD.mean(1))


def vit_with_logical_axes(recipe: str, remat: bool, devices: int) -> tuple[Any, ...]:
    """Returns the step of a vision transformer."""
    mesh = make_mesh(devices)

    def specs_of(variables: Any) -> Any:
        specs = nn.logical_to_mesh(nn.get_partition_spec(variables), RULES)
        is_spec = lambda leaf: isinstance(leaf, P)
        return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=is_spec)

    def loss(apply: Any, params: Any, images: jax.Array) -> jax.Array:
        return cross_entropy(apply(params, images), jnp.zeros(len(images), jnp.int32))

    images = jax.ShapeDtypeStruct((32, 224, 224, 3), jnp.float32)
    return linen_step(VisionTransformer(), images, recipe, remat, mesh, specs_of, loss)


# ---------------------------------------------------------------------------
# NNX
# ---------------------------------------------------------------------------


def linear(inputs: int, outputs: int, spec: tuple[str | None, ...], rngs: nnx.Rngs) -> nnx.Linear:
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), spec)
    return nnx.Linear(inputs, outputs, use_bias=False, kernel_init=init, rngs=rngs)


class NnxBlock(nnx.Module):
    """A block with `nnx.with_partitioning`."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        """Makes the layers."""
        columns, rows = (None, "model"), ("model", None)
        self.norms = nnx.List([nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2)])
        self.qkv = nnx.List([linear(WIDTH, WIDTH, columns, rngs) for _ in range(3)])
        self.out = linear(WIDTH, WIDTH, rows, rngs)
        self.up, self.down = (
            linear(WIDTH, 4 * WIDTH, columns, rngs),
            linear(4 * WIDTH, WIDTH, rows, rngs),
        )

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """Returns x_BTD after attention and a perceptron."""
        y_BTD = self.norms[0](x_BTD)
        parts = (*x_BTD.shape[:2], HEADS, WIDTH // HEADS)
        qkv = (layer(y_BTD).reshape(parts) for layer in self.qkv)
        attended_BTD = jax.nn.dot_product_attention(*qkv, is_causal=True).reshape(x_BTD.shape)
        x_BTD = x_BTD + self.out(attended_BTD)
        return x_BTD + self.down(nnx.gelu(self.up(self.norms[1](x_BTD))))


class NnxGPT(nnx.Module):
    """Four blocks between tables that the axis "model" divides by tokens."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        """Makes the layers."""
        init = nnx.with_partitioning(nnx.initializers.normal(0.02), ("model", None))
        self.embed = nnx.Embed(VOCABULARY, WIDTH, embedding_init=init, rngs=rngs)
        self.blocks = nnx.List([NnxBlock(rngs) for _ in range(4)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.head = linear(WIDTH, VOCABULARY, (None, "model"), rngs)

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        """Returns logits."""
        x_BTD = self.embed(tokens_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(self.norm(x_BTD))


@contextlib.contextmanager
def without_eager_sharding() -> Any:
    """Lets variables have a partitioning where no mesh is set."""
    before = flax.config.flax_always_shard_variable
    flax.config.update("flax_always_shard_variable", False)
    yield
    flax.config.update("flax_always_shard_variable", before)


def nnx_gpt(recipe: str, remat: bool, devices: int) -> tuple[Any, ...]:
    """Returns the step of a GPT in NNX."""
    mesh, loaded = make_mesh(devices), jaxmp.load_recipe(recipe)

    def create() -> tuple[Any, Any]:
        model = loaded.wrap(NnxGPT(nnx.Rngs(0)))
        tx = loaded.optimizer(optax.adamw(1e-4))
        return model, jaxmp.nnx.Optimizer(model, tx, wrt=nnx.Param)

    def place(tree: Any) -> Any:
        graph, state = nnx.split(tree)
        specs = nnx.get_partition_spec(state)
        return nnx.merge(
            graph, jax.tree.map(lambda *row: placed(row[0], mesh, row[1]), state, specs)
        )

    @functools.partial(nnx.jit, donate_argnums=(0, 1))
    def train_step(model: Any, optimizer: Any, tokens_BT: jax.Array) -> jax.Array:
        loss = saved(lambda model, tokens: cross_entropy(model(tokens), tokens), remat, nnx.remat)
        value, grads = jaxmp.nnx.value_and_grad(loss)(model, tokens_BT)
        optimizer.update(model, grads)
        return value

    with without_eager_sharding():
        model, optimizer = map(place, nnx.eval_shape(create))
    tokens = placed(jax.ShapeDtypeStruct((8, TOKENS), jnp.int32), mesh, P("data"))
    return train_step, model, optimizer, tokens


# ---------------------------------------------------------------------------
# Plain JAX
# ---------------------------------------------------------------------------


def scanned_blocks(
    recipe: str, remat: bool, devices: int, moments_by_shape: bool = False
) -> tuple[Any, ...]:
    """Returns the step of four scanned blocks with a padding mask, whose rows all devices have.

    With `moments_by_shape`, the moments of a parameter are divided as the first parameter of its
    shape is: those of "o" by its columns, unlike "o".
    """
    mesh = AbstractMesh((devices,), ("model",), (AxisType.Auto,))
    columns, rows, everywhere = P(None, None, "model"), P(None, "model", None), P()
    specs = dict.fromkeys("qkv", columns) | {"o": rows, "up": columns, "down": rows}
    sizes = {"up": (4, WIDTH, 4 * WIDTH), "down": (4, 4 * WIDTH, WIDTH)}
    shapes = {name: sizes.get(name, (4, WIDTH, WIDTH)) for name in specs}
    params = {
        name: placed(jax.ShapeDtypeStruct(shape, jnp.float32), mesh, specs[name])
        for name, shape in shapes.items()
    }
    loaded = jaxmp.load_recipe(recipe)
    tx = loaded.optimizer(optax.adamw(1e-3))

    def place(path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
        name = getattr(path[-1], "key", "")
        if moments_by_shape:
            name = next((own for own, shape in shapes.items() if shape == leaf.shape), "")
        return placed(leaf, mesh, specs.get(name, everywhere))

    def loss(params: Any, x_BTD: jax.Array, mask_BT: jax.Array) -> jax.Array:
        def block(x_BTD: jax.Array, own: Any) -> tuple[jax.Array, None]:
            scale = jax.lax.rsqrt(jnp.square(x_BTD).mean(-1, keepdims=True) + 1e-5)
            parts = (*x_BTD.shape[:2], 8, WIDTH // 8)
            qkv = ((x_BTD * scale @ own[name]).reshape(parts) for name in "qkv")
            mask = (mask_BT > 0)[:, None, None, :]
            attended_BTD = jax.nn.dot_product_attention(*qkv, mask=mask).reshape(x_BTD.shape)
            x_BTD = x_BTD + attended_BTD @ own["o"]
            return x_BTD + nn.gelu(x_BTD @ own["up"]) @ own["down"], None

        x_BTD, _ = jax.lax.scan(block, x_BTD, params)
        return jnp.square(x_BTD.astype(jnp.float32)).mean()

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def train_step(params: Any, state: Any, *batch: jax.Array) -> tuple[Any, ...]:
        run = saved(jaxmp.autocast(loss, loaded), remat)
        value, grads = jaxmp.value_and_grad(run)(params, *batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    state = jax.tree_util.tree_map_with_path(place, jax.eval_shape(tx.init, params))
    x_BTD = placed(jax.ShapeDtypeStruct((8, 1024, WIDTH), jnp.float32), mesh, everywhere)
    mask_BT = placed(jax.ShapeDtypeStruct((8, 1024), jnp.int32), mesh, everywhere)
    return train_step, params, state, x_BTD, mask_BT


MAKERS: dict[str, Callable[[str, bool, int], tuple[Any, ...]]] = {
    "gpt, by names": gpt_by_names,
    "llama, scanned": scanned_llama,
    "vit, logical axes": vit_with_logical_axes,
    "gpt in NNX": nnx_gpt,
    "blocks, scanned": scanned_blocks,
    "blocks, moments by shape": functools.partial(scanned_blocks, moments_by_shape=True),
}
