"""Counts the sums of gradients over devices in steps with microbatches, compiled for 8 H200.

    python benchmarks/microbatch_sums.py --out microbatch_sums.json

The model has a table of tokens, three residual blocks with LayerNorm and two Dense layers with
biases, a last LayerNorm and a head; blocks are a Python loop ("plain") or a scan of rematerialized
blocks ("remat"). Parameters are replicated, the batch is split over eight devices, and the step
evaluates four microbatches. It is compiled in three ways:

    automatic    under `jit`, on automatic mesh axes: gradients are summed in each microbatch
    explicit     under `jit`, on explicit mesh axes: gradients are summed after the loop
    shard_map    in `jax.shard_map` with `axis_name`: gradients are summed after the loop

Nothing is run, and no GPU is required, but XLA's GPU compiler: pip install -e ".[aot]". For each
program the script prints the all-reduces of arrays above 4 kB that a step executes, their megabytes
per device (10^6 bytes), whether any is in the loop, and the temporary memory.
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp

VOCABULARY, WIDTH, LAYERS, ROWS, LENGTH, PARTS = 2048, 512, 3, 64, 128, 4
FORMS = ("plain", "remat")
WAYS = ("automatic", "explicit", "shard_map")


class Block(nn.Module):
    """Residual block of two Dense layers."""

    @nn.compact
    def __call__(self, x_BTD: jax.Array, _: None) -> tuple[jax.Array, None]:
        """Returns x_BTD after the block."""
        h = nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x_BTD)))
        return x_BTD + nn.Dense(WIDTH)(h), None


class Stack(nn.Module):
    """Blocks between a table and a head. `nn.Embed` refuses indices on explicit mesh axes."""

    form: str

    @nn.compact
    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        """Returns the logits of tokens_BT."""
        table = self.param("table", nn.initializers.normal(), (VOCABULARY, WIDTH))
        sharding = jax.typeof(tokens_BT).sharding
        x_BTD = table.at[tokens_BT].get(out_sharding=sharding if any(sharding.spec) else None)
        if self.form == "plain":
            for _ in range(LAYERS):
                x_BTD, _ = Block()(x_BTD, None)
        else:
            axes = {"params": 0, "_overwrite_with_gradient": 0}
            scan = nn.scan(nn.remat(Block), axes, split_rngs={"params": True}, length=LAYERS)
            x_BTD, _ = scan()(x_BTD, None)
        return nn.Dense(VOCABULARY)(nn.LayerNorm()(x_BTD))


def measure(recipe_name: str, form: str, way: str) -> dict[str, Any]:
    """Compiles one step and returns its row."""
    recipe = jaxmp.load_recipe(recipe_name)
    kind = AxisType.Explicit if way == "explicit" else AxisType.Auto
    mesh = AbstractMesh((8,), ("data",), axis_types=(kind,))
    model = recipe.wrap(Stack(form))
    axis_name = "data" if way == "shard_map" else None

    def init() -> jaxmp.TrainState:
        params = model.init(jax.random.key(0), jnp.zeros((1, 8), jnp.int32))
        tx = recipe.optimizer(optax.adamw(1e-3))
        return jaxmp.TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    def loss_fn(params: Any, tokens: jax.Array) -> jax.Array:
        logits = model.apply(params, tokens)
        return jaxmp.losses.softmax_cross_entropy(logits, tokens).mean()

    grads_fn = jaxmp.value_and_grad(
        loss_fn, microbatches=PARTS, interleave=True, axis_name=axis_name
    )
    if way == "shard_map":
        specs = (P(), P("data"))
        grads_fn = jax.shard_map(grads_fn, mesh=mesh, in_specs=specs, out_specs=P())

    def step(state: jaxmp.TrainState, tokens: jax.Array) -> Any:
        loss, grads = grads_fn(state.params, tokens)
        return state.apply_gradients(grads=grads), loss

    whole, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    abstract = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole)
    state = jax.tree.map(abstract, jax.eval_shape(init))
    tokens = jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32, sharding=rows)
    jitted = jax.jit(step, donate_argnums=0)
    report = jaxmp.audit(jitted, state, tokens, recipe=recipe, target="h200")
    sums = [row for row in report.collectives if row.bytes > 4096 * row.count]
    return {
        "recipe": recipe_name,
        "form": form,
        "way": way,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(state.params)),
        "operations": sorted({row.operation for row in sums}),
        "count": sum(row.count for row in sums),
        "bytes": sum(row.bytes for row in sums),
        "in_loop": any(row.in_outer_loop for row in sums),
        "temporary": report.memory.temporary,
    }


def main() -> None:
    """Prints a table, and writes the rows as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--recipes", nargs="+", default=["bf16", "fp8"])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    print("| recipe | form | way | sums per step | MB | in the loop | temporary, MB |")
    print("| --- | --- | --- | ---: | ---: | --- | ---: |")
    rows = []
    for recipe in args.recipes:
        for form in FORMS:
            for way in WAYS:
                row = measure(recipe, form, way)
                rows.append(row)
                megabytes = f"{row['bytes'] / 1e6:.1f}"
                temporary = f"{row['temporary'] / 1e6:.1f}"
                where = "yes" if row["in_loop"] else "no"
                cells = (recipe, form, way, row["count"], megabytes, where, temporary)
                print("|", " | ".join(map(str, cells)), "|", flush=True)
    if args.out:
        versions = {"jax": jax.__version__, "flax": flax.__version__}
        report = {"target": "NVIDIA H200 141GB HBM3e", "versions": versions, "rows": rows}
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
