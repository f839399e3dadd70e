"""Counts the bytes that a sharded training step sends, by dtype, compiled for several H200.

    python benchmarks/sharded_programs.py                        # prints the table
    python benchmarks/sharded_programs.py --out sharded.json     # also writes it
    python benchmarks/sharded_programs.py --devices 16 --recipes bf16

The model is a stack of residual blocks with two Dense layers each, under `nn.scan` and `nn.remat`,
between an embedding and a head. The step is compiled for eight GPUs: as data parallelism, with
replicated parameters, and as FSDP, with kernels, masters and moments sharded over the same axis, to
which activations are constrained. Row "jax.grad" is the same step with `jax.grad` in place of
`state.value_and_grad`. Nothing is run, and no GPU is required, but XLA's GPU compiler:
pip install "jaxmp[aot]". Columns, in MB per device and step (1 MB = 10^6 bytes):

    sums in 16 bits, sums in FP32    all-reduce and reduce-scatter outside of the loss, arrays above
                                     4 kB
    gathered                         all-gather, by dtype
    temporary                        memory that the program allocates beside arguments and results
"""

import argparse
import json
import os
import platform
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp
from jaxmp._audit._gpus import GPUS
from jaxmp._core._compat import described_gpus

RECIPES = ("bf16", "bf16_params", "fp16", "fp16_params", "fp8", "fp8_delayed")
VOCABULARY, WIDTH, LAYERS, ROWS, LENGTH = 2048, 1024, 4, 64, 256


class Block(nn.Module):
    """Residual block of two Dense layers."""

    constrain: Callable[[jax.Array], jax.Array]

    @nn.compact
    def __call__(self, x_BTD: jax.Array, _: None) -> tuple[jax.Array, None]:
        """Returns x_BTD after the block."""
        h = nn.Dense(4 * WIDTH, name="up")(nn.LayerNorm(name="norm")(x_BTD))
        return self.constrain(x_BTD + nn.Dense(WIDTH, name="down")(nn.gelu(h))), None


class Stack(nn.Module):
    """Blocks between an embedding and a head."""

    constrain: Callable[[jax.Array], jax.Array]

    @nn.compact
    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        """Returns the logits of tokens_BT."""
        x_BTD = self.constrain(nn.Embed(VOCABULARY, WIDTH, name="embed")(tokens_BT))
        axes = {"params": 0, "_overwrite_with_gradient": 0}
        blocks = nn.scan(nn.remat(Block), axes, split_rngs={"params": True}, length=LAYERS)
        x_BTD, _ = blocks(self.constrain, name="blocks")(x_BTD, None)
        return nn.Dense(VOCABULARY, name="lm_head")(x_BTD)


def measure(recipe_name: str, layout: str, count: int, use_jax_grad: bool) -> dict[str, Any]:
    """Compiles one step and returns its row."""
    mesh = Mesh(np.array(described_gpus(GPUS["h200"].description, count)), ("data",))
    batch = NamedSharding(mesh, P("data"))
    recipe = jaxmp.load_recipe(recipe_name)
    model = recipe.wrap(Stack(lambda x: jax.lax.with_sharding_constraint(x, batch)))
    tokens = jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32, sharding=batch)

    def init() -> jaxmp.TrainState:
        plain = recipe.wrap(Stack(lambda x: x))
        params = plain.init(jax.random.key(0), jnp.zeros((1, 8), jnp.int32))
        tx = recipe.optimizer(optax.adamw(1e-3))
        return jaxmp.TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    def loss_fn(params: Any, tokens: jax.Array) -> jax.Array:
        return jaxmp.losses.softmax_cross_entropy(model.apply(params, tokens), tokens).mean()

    def step(state: jaxmp.TrainState, tokens: jax.Array) -> Any:
        if use_jax_grad:
            loss, grads = jax.value_and_grad(loss_fn)(state.params, tokens)
        else:
            loss, grads = state.value_and_grad(loss_fn)(tokens)
        return state.apply_gradients(grads=grads), loss

    def sharding(leaf: Any) -> NamedSharding:
        if layout == "data parallel" or leaf.ndim < 2:
            return NamedSharding(mesh, P())
        # The largest dimension, which is not that of the scan.
        largest = int(np.argmax(leaf.shape))
        return NamedSharding(mesh, P(*("data" if n == largest else None for n in range(leaf.ndim))))

    state = jax.eval_shape(init)
    params = jax.tree.map(sharding, state.params["params"])
    shardings = jaxmp.sharding.state_shardings(state, {"params": params})
    placed = jax.tree.map(
        lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
        *(state, shardings),
    )
    jitted = jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))
    report = jaxmp.audit(jitted, placed, tokens, policies=recipe, target="h200")
    sums: Counter[str] = Counter()
    gathered: Counter[str] = Counter()
    for row in report.collectives:
        if row.bytes < 4096 * row.count:
            continue
        if row.operation in ("all-reduce", "reduce-scatter"):
            sums["fp32" if row.dtype == "float32" else "16-bit"] += row.bytes
        elif row.operation == "all-gather":
            gathered[row.dtype] += row.bytes
    return {
        "recipe": recipe_name,
        "layout": layout,
        "gradients": "jax.grad" if use_jax_grad else "value_and_grad",
        "sums_16_bit": sums["16-bit"],
        "sums_fp32": sums["fp32"],
        "gathered": dict(sorted(gathered.items())),
        "temporary": report.memory.temporary,
    }


HEADER = (
    "| layout | recipe | gradients | sums in 16 bits | sums in FP32 | gathered | temporary |\n"
    "| --- | --- | --- | --- | --- | --- | --- |"
)


def markdown(row: dict[str, Any]) -> str:
    """Returns one row of the table."""
    gathered = ", ".join(f"{size / 1e6:.1f} {dtype}" for dtype, size in row["gathered"].items())
    sizes = [f"{row[key] / 1e6:.1f}" for key in ("sums_16_bit", "sums_fp32", "temporary")]
    cells = [row["layout"], row["recipe"], f"`{row['gradients']}`", *sizes[:2], gathered or "0.0"]
    return f"| {' | '.join(cells)} | {sizes[2]} |"


def main() -> None:
    """Prints the table, and writes it as JSON if that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--recipes", nargs="+", default=RECIPES)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = []
    print(HEADER)
    for layout in ("data parallel", "FSDP"):
        for recipe in args.recipes:
            for use_jax_grad in (True, False) if recipe == "bf16" else (False,):
                row = measure(recipe, layout, args.devices, use_jax_grad)
                rows.append(row)
                print(markdown(row), flush=True)
    if args.out:
        versions = {"jax": jax.__version__, "flax": flax.__version__}
        versions["python"] = platform.python_version()
        report = {"target": GPUS["h200"].name, "devices": args.devices, "versions": versions}
        args.out.write_text(json.dumps(report | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
