"""Compares `jaxmp.estimate_memory` with the memory that XLA allocates for an H200.

    python benchmarks/memory_estimates.py                  # all models, prints the table
    python benchmarks/memory_estimates.py --models bert vit --recipes bf16 --devices 1 4
    python benchmarks/memory_estimates.py --out benchmarks/results/memory_estimates_h200.json
    python benchmarks/memory_estimates.py --calibrate      # the ranges of estimates, from the file

Each row is a training step with AdamW and donated state: of a foreign model of `transformers` at
the width of its smallest published form, with fewer layers, of examples/gpt.py, or of a small model
of this file, whose programs are unlike those: convolutions, a U-Net, an autoencoder, a mixer,
two towers, a recurrent net, mixtures of experts, a GAN, and microbatches. With remat, the
results of matmuls are kept and everything else is computed again (in examples/gpt.py, all but the
input of each block). On several devices, parameters and optimizer state are split (FSDP), and the
results of modules like the batch; the models of tensor_parallel.py have an axis "model" of up to
four devices. Nothing is run, and no GPU is required, but XLA's GPU compiler:
pip install -e ".[aot]". With a file that exists, only the programs that it lacks are compiled; the
estimates of the chosen programs are made again. The file is written after each row. With
--calibrate, jaxmp/_tools/memory/errors.toml is written: ratios of XLA's temporary memory and the
estimate. Of the ranges of a width of 1.58 for one device, and of 1.95 for several, it has the one
with the most ratios.
Columns, per device:

    state       largest relative error of parameters, masters, moments, FP8 state and batch
    temporary   everything else but results: estimate, XLA, and their ratio, in MB
"""

import argparse
import functools
import itertools
import json
import math
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import jax
import jax.numpy as jnp
import optax
import transformers
from flax import linen as nn
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from transformers.models.bart import modeling_flax_bart
from transformers.models.bert import modeling_flax_bert
from transformers.models.gpt2 import modeling_flax_gpt2
from transformers.models.llama import modeling_flax_llama
from transformers.models.opt import modeling_flax_opt
from transformers.models.resnet import modeling_flax_resnet
from transformers.models.roberta import modeling_flax_roberta
from transformers.models.vit import modeling_flax_vit

import gpt
import jaxmp
import tensor_parallel
from jaxmp._tools import memory
from jaxmp._tools.memory import STATE
from result_file import write_result

TARGET = "h200"
ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks" / "results" / "memory_estimates_h200.json"
ERRORS = Path(memory.__file__).with_name("errors.toml")
# With the workspaces of cuBLAS, estimates of one device are at most 1.6 times as wide, and those of
# several devices twice.
WIDTHS = {"one": 1.58, "several": 1.95}
RECIPES = ("fp32", "bf16", "bf16_params", "fp16", "fp8", "fp8_delayed")


def ids(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def images(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def mask(tokens: jax.Array) -> jax.Array:
    return jnp.ones_like(tokens)


def positions(tokens: jax.Array) -> jax.Array:
    return jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)


SMALL = dict(hidden_size=768, num_hidden_layers=2, num_attention_heads=12)
# Class, configuration, input, the arguments of the module for an input.
ForeignModel = tuple[Any, Any, jax.ShapeDtypeStruct, Callable[[jax.Array], tuple[Any, ...]]]
FOREIGN: dict[str, ForeignModel] = {
    "bert": (
        modeling_flax_bert.FlaxBertForMaskedLMModule,
        transformers.BertConfig(**SMALL),
        ids(8, 512),
        lambda x: (x, mask(x), 0 * x, positions(x), None),
    ),
    "gpt2": (
        modeling_flax_gpt2.FlaxGPT2LMHeadModule,
        transformers.GPT2Config(n_layer=2, tie_word_embeddings=False),
        ids(4, 1024),
        lambda x: (x, mask(x), positions(x)),
    ),
    "llama": (
        modeling_flax_llama.FlaxLlamaForCausalLMModule,
        transformers.LlamaConfig(**SMALL, intermediate_size=2048, max_position_embeddings=1024),
        ids(4, 1024),
        lambda x: (x, mask(x), positions(x)),
    ),
    "opt": (
        modeling_flax_opt.FlaxOPTForCausalLMModule,
        transformers.OPTConfig(**SMALL, ffn_dim=3072, tie_word_embeddings=False),
        ids(4, 1024),
        lambda x: (x, mask(x), positions(x)),
    ),
    "roberta": (
        modeling_flax_roberta.FlaxRobertaForSequenceClassificationModule,
        transformers.RobertaConfig(**SMALL),
        ids(16, 256),
        lambda x: (x, mask(x), 0 * x, positions(x), None),
    ),
    "bart": (
        modeling_flax_bart.FlaxBartForConditionalGenerationModule,
        transformers.BartConfig(
            d_model=768, encoder_layers=2, decoder_layers=2, tie_word_embeddings=False
        ),
        ids(8, 512),
        lambda x: (x, mask(x), x, mask(x), positions(x), positions(x)),
    ),
    "vit": (
        modeling_flax_vit.FlaxViTForImageClassificationModule,
        transformers.ViTConfig(**SMALL),
        images(32, 224, 224, 3),
        lambda x: (x,),
    ),
    "resnet": (
        modeling_flax_resnet.FlaxResNetForImageClassificationModule,
        transformers.ResNetConfig(depths=[1, 1, 1, 1]),
        images(32, 224, 224, 3),
        lambda x: (x, False),
    ),
}


class Convolutions(nn.Module):
    """Residual blocks at two resolutions."""

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array]:
        for width in (64, 64, 128, 128):
            y = nn.Conv(width, (3, 3), strides=2 if width != x.shape[-1] else 1)(x)
            z = nn.Conv(width, (3, 3))(nn.silu(nn.GroupNorm(16)(y)))
            x = y + nn.Conv(width, (3, 3))(nn.silu(nn.GroupNorm(16)(z)))
        return (nn.Dense(1000)(x.mean((1, 2))),)


class UNet(nn.Module):
    """Segmentation: residual blocks on the way down to an eighth of the resolution, and back."""

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array]:
        def block(x: jax.Array, width: int) -> jax.Array:
            y = nn.Conv(width, (3, 3))(nn.silu(nn.GroupNorm(32)(x)))
            return nn.Conv(width, (1, 1))(x) + nn.Conv(width, (3, 3))(nn.silu(nn.GroupNorm(32)(y)))

        x, skips = nn.Conv(64, (3, 3))(x), list[jax.Array]()
        for width in (64, 128, 256):
            skips.append(block(x, width))
            x = nn.Conv(width, (3, 3), strides=2)(skips[-1])
        x = block(x, 512)
        for skip in reversed(skips):
            x = jnp.concatenate(
                [jax.image.resize(x, (*skip.shape[:3], x.shape[-1]), "nearest"), skip], -1
            )
            x = block(x, skip.shape[-1])
        return (nn.Conv(21, (3, 3))(nn.silu(nn.GroupNorm(32)(x))),)


class Autoencoder(nn.Module):
    """Convolutions of half the resolution each, and transposed convolutions back."""

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array]:
        for width in (64, 128, 256):
            x = nn.relu(nn.Conv(width, (4, 4), strides=2)(x))
        for width in (256, 128):
            x = nn.relu(nn.ConvTranspose(width, (4, 4), strides=(2, 2))(x))
        return (nn.ConvTranspose(16, (4, 4), strides=(2, 2))(x),)


class Mixer(nn.Module):
    """MLP-Mixer with four layers of 512 features."""

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array]:
        x = nn.Conv(512, (16, 16), strides=16)(x)
        x = x.reshape(x.shape[0], -1, 512)
        for _ in range(4):
            y = nn.gelu(nn.Dense(256)(nn.LayerNorm()(x).swapaxes(1, 2)))
            x = x + nn.Dense(x.shape[1])(y).swapaxes(1, 2)
            x = x + nn.Dense(512)(nn.gelu(nn.Dense(2048)(nn.LayerNorm()(x))))
        return (nn.Dense(1000)(x.mean(1)),)


class Towers(nn.Module):
    """Retrieval: each row of one tower is classified among those of the other."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> tuple[jax.Array]:
        rows = []
        for n in range(2):
            x = nn.Embed(50_000, 128)(tokens[:, n])
            for width in (1024, 512, 128):
                x = nn.Dense(width)(nn.relu(x))
            rows.append(x)
        return (rows[0] @ rows[1].T,)


class Recurrent(nn.Module):
    """Two layers of an LSTM over 128 tokens."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> tuple[jax.Array]:
        x = nn.Embed(32_000, 512)(tokens)
        for _ in range(2):
            x = nn.RNN(nn.OptimizedLSTMCell(512))(x)
        return (nn.Dense(32_000, use_bias=False)(x),)


class Experts(nn.Module):
    """A layer of eight experts, of which each token uses two: by `ragged_dot`, or by masks."""

    is_ragged: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the sum of the results of two experts for each token of x."""
        init = nn.initializers.lecun_normal(batch_axis=0)
        up = self.param("up", init, (8, x.shape[-1], 4 * x.shape[-1])).astype(x.dtype)
        down = self.param("down", init, (8, 4 * x.shape[-1], x.shape[-1])).astype(x.dtype)
        gates = jax.nn.softmax(nn.Dense(8)(x).astype(jnp.float32))
        weights, chosen = jax.lax.top_k(gates, 2)
        if self.is_ragged:
            order = jnp.argsort(chosen.reshape(-1))
            sizes = jnp.bincount(chosen.reshape(-1), length=8)
            rows = x.reshape(-1, x.shape[-1])[order // 2]
            rows = jax.lax.ragged_dot(nn.gelu(jax.lax.ragged_dot(rows, up, sizes)), down, sizes)
            y = jnp.zeros_like(rows).at[order].set(rows).reshape(*chosen.shape, -1)
            return (y * weights[..., None].astype(y.dtype)).sum(-2)
        slots = x.shape[1] * 5 // 16  # a quarter more than each expert has on average
        is_chosen = jax.nn.one_hot(chosen, 8)
        place = jnp.cumsum(is_chosen.reshape(len(x), -1, 8), 1).reshape(is_chosen.shape) * is_chosen
        masks = jnp.einsum("btk,btkes->btes", weights, jax.nn.one_hot(place - 1, slots))
        rows = jnp.einsum("btes,btd->besd", (masks > 0).astype(x.dtype), x)
        rows = jnp.einsum("besf,efd->besd", nn.gelu(jnp.einsum("besd,edf->besf", rows, up)), down)
        return jnp.einsum("btes,besd->btd", masks.astype(x.dtype), rows)


class MixtureOfExperts(nn.Module):
    """Two blocks of attention and experts."""

    is_ragged: bool

    @nn.compact
    def __call__(self, tokens: jax.Array) -> tuple[jax.Array]:
        x = nn.Embed(16_000, 512)(tokens)
        for _ in range(2):
            y = nn.LayerNorm()(x)
            x = x + nn.MultiHeadDotProductAttention(8)(y, mask=nn.make_causal_mask(tokens))
            x = x + Experts(self.is_ragged)(nn.LayerNorm()(x))
        return (nn.Dense(16_000, use_bias=False)(x),)


class Generator(nn.Module):
    """Images of 64 x 64 pixels from noise."""

    @nn.compact
    def __call__(self, noise: jax.Array) -> jax.Array:
        """Returns images."""
        x = nn.Dense(4 * 4 * 512)(noise).reshape(-1, 4, 4, 512)
        for width in (256, 128, 64):
            x = nn.relu(nn.GroupNorm(16)(nn.ConvTranspose(width, (4, 4), strides=(2, 2))(x)))
        return jnp.tanh(nn.ConvTranspose(3, (4, 4), strides=(2, 2))(x))


class Discriminator(nn.Module):
    """One logit for each image."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns logits."""
        for width in (64, 128, 256, 512):
            x = nn.leaky_relu(nn.Conv(width, (5, 5), strides=2)(x), 0.2)
        return nn.Dense(1)(x.reshape(len(x), -1))


OWN: dict[str, ForeignModel] = {
    "convolutions": (lambda _: Convolutions(), None, images(32, 128, 128, 3), lambda x: (x,)),
    "unet": (lambda _: UNet(), None, images(16, 128, 128, 3), lambda x: (x,)),
    "autoencoder": (lambda _: Autoencoder(), None, images(64, 128, 128, 3), lambda x: (x,)),
    "mixer": (lambda _: Mixer(), None, images(64, 224, 224, 3), lambda x: (x,)),
    "towers": (lambda _: Towers(), None, ids(4096, 2), lambda x: (x,)),
    "recurrent": (lambda _: Recurrent(), None, ids(32, 128), lambda x: (x,)),
    "experts, ragged": (lambda _: MixtureOfExperts(True), None, ids(8, 512), lambda x: (x,)),
    "experts, masks": (lambda _: MixtureOfExperts(False), None, ids(8, 512), lambda x: (x,)),
}


class State(jaxmp.TrainState):
    """Train state with batch statistics."""

    batch_stats: Any = None


def foreign_step(
    row: ForeignModel,
    recipe: jaxmp.Recipe,
    remat: bool = False,
    autocast: bool = False,
    microbatches: int = 1,
) -> tuple[Any, ...]:
    """Returns the train step of a model of `transformers`, and the shapes of its arguments."""
    cls, config, batch, arguments = row
    model = recipe.wrap(cls(config))

    def create() -> State:
        variables = model.init(jax.random.key(0), *arguments(jnp.zeros(batch.shape, batch.dtype)))
        stats = variables.pop("batch_stats", {})
        params = variables if len(variables) > 1 else variables["params"]
        tx = recipe.optimizer(optax.adamw(1e-4))
        return State.create(apply_fn=model.apply, params=params, tx=tx, batch_stats=stats)

    def loss(params: Any, inputs: jax.Array, stats: Any) -> Any:
        variables = params if "params" in params else {"params": params}
        outputs, new = model.apply(
            variables | {"batch_stats": stats}, *arguments(inputs), mutable=["batch_stats"]
        )
        logits = outputs[0].astype(jnp.float32)
        labels = jnp.zeros(logits.shape[:-1], jnp.int32)
        values = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return values.mean(), new.get("batch_stats", stats)

    if autocast:
        loss = jaxmp.autocast(loss, recipe)
    if remat:
        loss = jax.checkpoint(loss, policy=jax.checkpoint_policies.dots_saveable)

    def train_step(state: State, inputs: jax.Array) -> tuple[State, jax.Array]:
        run = state.value_and_grad(loss, has_aux=True, microbatches=microbatches)
        (value, stats), grads = run(inputs, state.batch_stats)
        return state.apply_gradients(grads=grads, batch_stats=stats), value

    return jax.jit(train_step, donate_argnums=0), jax.eval_shape(create), batch


def gan_step(loaded: jaxmp.Recipe, remat: bool) -> tuple[Any, ...]:
    """Returns the step of two networks, of which the first is trained after the second."""
    generator, judge = loaded.wrap(Generator()), loaded.wrap(Discriminator())
    batch = images(64, 64, 64, 3)

    def create() -> tuple[jaxmp.TrainState, ...]:
        rows = (generator, jnp.zeros((64, 128))), (judge, jnp.zeros(batch.shape))
        return tuple(
            jaxmp.TrainState.create(
                apply_fn=model.apply,
                params=model.init(jax.random.key(0), x),
                tx=loaded.optimizer(optax.adamw(1e-4)),
            )
            for model, x in rows
        )

    def judged(params: Any, x: jax.Array) -> jax.Array:
        return judge.apply(params, x).astype(jnp.float32)

    def loss_of_judge(params: Any, others: Any, x: jax.Array, noise: jax.Array) -> jax.Array:
        made = jax.lax.stop_gradient(generator.apply(others, noise))
        return (jax.nn.softplus(-judged(params, x)) + jax.nn.softplus(judged(params, made))).mean()

    def loss_of_generator(params: Any, others: Any, noise: jax.Array) -> jax.Array:
        return jax.nn.softplus(-judged(others, generator.apply(params, noise))).mean()

    saved = functools.partial(tensor_parallel.saved, remat=remat)

    def train_step(states: Any, x: jax.Array) -> Any:
        first, second = states
        noise = x.reshape(64, -1)[:, :128]
        value, grads = second.value_and_grad(saved(loss_of_judge))(first.params, x, noise)
        second = second.apply_gradients(grads=grads)
        _, grads = first.value_and_grad(saved(loss_of_generator))(second.params, noise)
        return (first.apply_gradients(grads=grads), second), value

    return jax.jit(train_step, donate_argnums=0), jax.eval_shape(create), batch


def fsdp(arguments: list[Any], devices: int) -> list[Any]:
    """Splits the arguments of a step over devices.

    The batch, the last argument, is split along its first axis, and each leaf of the others along
    its longest axis that the devices divide.
    """
    mesh = AbstractMesh((devices,), ("data",), axis_types=(AxisType.Auto,))

    def split(leaf: jax.ShapeDtypeStruct, axis: int | None) -> jax.ShapeDtypeStruct:
        spec = () if axis is None else (*[None] * axis, "data")
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    def longest(leaf: jax.ShapeDtypeStruct) -> int | None:
        sizes = [size if size % devices == 0 else 0 for size in leaf.shape]
        return sizes.index(max(sizes)) if max(sizes, default=0) else None

    *states, batch = arguments
    states = jax.tree.map(lambda leaf: split(leaf, longest(leaf)), states)
    return [*states, jax.tree.map(lambda leaf: split(leaf, 0), batch)]


def split_rows(step: Any, batch: jax.ShapeDtypeStruct) -> Any:
    """Splits the results of Linen modules like the batch, so that XLA gathers weights instead."""

    def keep(call: Any, args: Any, kwargs: Any, _: Any) -> Any:
        def split(leaf: Any) -> Any:
            has_rows = isinstance(leaf, jax.Array) and leaf.shape[:1] == batch.shape[:1]
            return jax.lax.with_sharding_constraint(leaf, batch.sharding) if has_rows else leaf

        return jax.tree.map(split, call(*args, **kwargs))

    def run(*args: Any) -> Any:
        with nn.intercept_methods(keep):
            return step(*args)

    return jax.jit(run, donate_argnums=0)


def gpt_step(recipe: str, remat: bool, unroll: bool) -> tuple[Any, ...]:
    model = gpt.SIZES["gpt2"].clone(layers=4, remat=remat, unroll=unroll)
    return gpt.make_step(recipe, model, 8)


MAKERS: dict[str, Callable[[str, bool], tuple[Any, ...]]] = {
    "example gpt": lambda recipe, remat: gpt_step(recipe, remat, True),
    "example gpt, scanned": lambda recipe, remat: gpt_step(recipe, remat, False),
    **{
        name: lambda recipe, remat, row=row: foreign_step(row, jaxmp.load_recipe(recipe), remat)
        for name, row in (FOREIGN | OWN).items()
    },
    "gan": lambda recipe, remat: gan_step(jaxmp.load_recipe(recipe), remat),
    "llama, 4 microbatches": lambda recipe, remat: foreign_step(
        FOREIGN["llama"], jaxmp.load_recipe(recipe), remat, microbatches=4
    ),
}


Row = dict[str, Any]


def key(row: Row) -> tuple[Any, ...]:
    """Returns what identifies a program."""
    return row["model"], row["recipe"], row["remat"], row["devices"]


def measure(model: str, recipe: str, remat: bool, devices: int, known: Row | None) -> Row:
    """Estimates one step, and compiles it unless its row of an earlier run is known."""
    sharded = tensor_parallel.MAKERS.get(model)
    step, *arguments = sharded(recipe, remat, devices) if sharded else MAKERS[model](recipe, remat)
    if devices > 1 and not sharded:
        arguments = fsdp(arguments, devices)
        step = split_rows(step, arguments[-1])
    quick = jaxmp.estimate_memory(step, *arguments, target=TARGET, exact=False)
    if known is None:
        exact = jaxmp.estimate_memory(step, *arguments, target=TARGET, exact=True)
        sizes = {kind: size for kind, size in exact.kinds.items() if kind in STATE}
        known = {"xla_kinds": sizes, "xla_temporary": exact.temporary}
    return {
        "model": model,
        "recipe": recipe,
        "remat": remat,
        "devices": devices,
        "state": {kind: quick.kinds.get(kind, 0) for kind in known["xla_kinds"]},
        "xla_kinds": known["xla_kinds"],
        "temporary": quick.temporary,
        "xla_temporary": known["xla_temporary"],
    }


def summary(rows: list[Row]) -> dict[str, float]:
    """Returns the errors of the temporary memory on one device, relative to XLA's."""
    rows = [row for row in rows if row["devices"] == 1] or rows
    errors = [abs(row["temporary"] / row["xla_temporary"] - 1) for row in rows]
    within = {n: sum(100 * error <= n for error in errors) for n in (15, 30)}
    return {
        "median_error": round(statistics.median(errors), 3),
        "largest_error": round(max(errors), 3),
        "within_15_percent": within[15],
        "within_30_percent": within[30],
    }


def calibrate(rows: list[Row]) -> None:
    """Writes the range of XLA's temporary memory relative to the estimate."""
    lines = [
        "# Written by `python benchmarks/memory_estimates.py --calibrate`: XLA's temporary memory"
    ]
    lines += ["# relative to the estimate, for the programs of", f"# {RESULT.relative_to(ROOT)}."]
    for name in ("one", "several"):
        own = [row for row in rows if (row["devices"] == 1) == (name == "one")]
        ratios = [row["xla_temporary"] / row["temporary"] for row in own]
        logs, width = [math.log(ratio) for ratio in ratios], math.log(WIDTHS[name])
        end = max(logs, key=lambda end: sum(end - width <= x <= end for x in logs))
        low = math.floor(math.exp(end - width) * 1000) / 1000
        high = math.ceil(math.exp(end) * 1000) / 1000
        inside = sum(low <= ratio <= high for ratio in ratios)
        lines += ["", f"[{name}]", f"low = {low}", f"high = {high}"]
        lines += [f"inside = {inside}", f"programs = {len(ratios)}"]
    ERRORS.write_text("\n".join(lines) + "\n", "utf-8")
    print(*lines, sep="\n")


def write_rows(path: Path | None, rows: list[Row]) -> None:
    """Writes all rows, in the order of the models."""
    order = [*MAKERS, *tensor_parallel.MAKERS]
    rows = sorted(rows, key=lambda row: (order.index(row["model"]), row["devices"]))
    write_result(path, target=TARGET, **summary(rows), rows=rows)


def main() -> None:
    """Prints the table; with --out, also writes it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    models = [*MAKERS, *tensor_parallel.MAKERS]
    parser.add_argument("--models", nargs="+", choices=models, default=list(MAKERS))
    parser.add_argument("--recipes", nargs="+", default=RECIPES)
    parser.add_argument("--devices", nargs="+", type=int, default=[1], help="sizes of FSDP meshes")
    parser.add_argument("--known", action="store_true", help="compile nothing that --out lacks")
    parser.add_argument("--calibrate", action="store_true", help="write the ranges of estimates")
    parser.add_argument("--out", type=Path, help="a JSON file to write")
    options = parser.parse_args()
    if options.calibrate:
        calibrate(json.loads(RESULT.read_text("utf-8"))["rows"])
        return
    known: dict[tuple[Any, ...], Row] = {}
    if options.out is not None and options.out.exists():
        known = {key(row): row for row in json.loads(options.out.read_text("utf-8"))["rows"]}
    cases = itertools.product(options.models, options.recipes, (False, True), options.devices)
    for name, recipe, remat, devices in cases:
        case = {"model": name, "recipe": recipe, "remat": remat, "devices": devices}
        if options.known and key(case) not in known:
            continue
        row = known[key(case)] = measure(**case, known=known.get(key(case)))
        state = max(abs(row["state"][kind] / size - 1) for kind, size in row["xla_kinds"].items())
        ratio = row["temporary"] / row["xla_temporary"]
        print(
            f"{name:22}{recipe:12}{'remat' if remat else '':6}{devices:3}{state:9.4f}"
            f"{row['temporary'] / 1e6:8.0f}{row['xla_temporary'] / 1e6:8.0f}{ratio:7.2f}",
            flush=True,
        )
        write_rows(options.out, list(known.values()))
    print(len(known), summary(list(known.values())))


if __name__ == "__main__":
    main()
