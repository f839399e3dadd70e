"""Plans the training of Llama 3 on 8 to 256 H200: memory and communication, without a GPU.

    python examples/plan_llama.py
    python examples/plan_llama.py --size llama-3-70b --gpus 64 --model 8
    python examples/plan_llama.py --size llama-3-8b --gpus 8 --recipe fp8 --out plan.json
    jaxmp audit examples/plan_llama.py:make_step --recipe bf16_params --target h200

Each row is the training step of examples/llama.py, compiled for as many H200: the layers are one
scanned block, which the backward pass computes again as a whole; arrays of the state are split over
the axis "data" (FSDP), and heads, hidden units and tokens of the vocabulary over the axis "model"
(tensor parallelism). The mesh has no devices and the arrays have no values, so that a laptop can
plan a cluster. Each group of "model" devices trains on --sequences sequences of 8,192 tokens.
The program is not run, and only the compilation is timed.

Install first: pip install -e ".[examples,aot]" (Python 3.12, about 3 GB). Columns, per device, in
GB (10^9 bytes):

    state        parameters, and masters, moments and the rest of the optimizer state
    temporary    memory that the program allocates in addition to arguments and results
    sums         all-reduce and reduce-scatter, by dtype
    gathers      all-gather, by dtype
    other        all-to-all and collective-permute
    CPU          seconds to trace, compile and read the program
"""

import dataclasses
import json
import math
import os
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

# JAX must not look for the GPUs that programs are compiled for.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import optax
import typer
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp
import llama

# Layer -> the dimension that the axis "model" splits: heads, hidden units, tokens.
MODEL_DIMENSION = {
    **dict.fromkeys(("qkv", "mlp_gate", "mlp_up"), -1),
    **dict.fromkeys(("attention_out", "mlp_down", "token_embedding", "output_embedding"), -2),
}
# (size, GPUs, of them in a group of tensor parallelism)
PLANS = [("llama-3-8b", gpus, 1) for gpus in (8, 16, 32, 64, 128, 256)]
PLANS += [("llama-3-70b", gpus, 8) for gpus in (16, 32, 64, 128, 256)]


def parameter_sharding(mesh: AbstractMesh, path: tuple[Any, ...], leaf: Any) -> NamedSharding:
    """Returns the sharding of a parameter: "model" by its name, "data" by its largest dimension."""
    split: list[str | None] = [None] * leaf.ndim
    dimension = MODEL_DIMENSION.get(path[-2].key)
    if dimension is not None and mesh.shape["model"] > 1:
        split[dimension] = "model"
    # Scales of norms, which have a row for each layer, are small and remain whole.
    is_split = not path[-2].key.endswith("norm")
    free = [n for n in range(leaf.ndim) if split[n] is None and is_split]
    free = [n for n in free if leaf.shape[n] % mesh.shape["data"] == 0]
    if free:
        split[max(free, key=lambda n: leaf.shape[n])] = "data"
    return NamedSharding(mesh, P(*split))


def make_step(
    recipe: str = "bf16_params",
    size: str = "llama-3-8b",
    gpus: int = 8,
    model: int = 1,
    sequences: int = 1,
    remat: str = "full",
) -> tuple[Any, ...]:
    """Returns the train step and the shapes of its arguments, with their shardings."""
    mesh = AbstractMesh((gpus // model, model), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    rows = NamedSharding(mesh, P("data"))
    shape = dataclasses.replace(llama.SIZES[size], remat=remat)
    constrain = jax.lax.with_sharding_constraint

    def gather(table_VD: jax.Array, dtype: Any) -> jax.Array:
        # Otherwise, XLA keeps the table in parts and gathers the tokens of all devices. The first
        # constraint lets the devices send the dtype after the cast.
        parts = P(("model", "data"), None) if model > 1 else P("data", None)
        table_VD = constrain(table_VD.astype(dtype), NamedSharding(mesh, parts))
        return constrain(table_VD, NamedSharding(mesh, P("model", None)))

    constrained = dataclasses.replace(
        shape, constrain=lambda x_BTD: constrain(x_BTD, rows), gather=gather
    )
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4, b2=0.95))
    init, _ = llama.linen_training(recipe, shape, tx)
    _, train_step = llama.linen_training(recipe, constrained, tx)

    state = jax.eval_shape(init)
    specs = jax.tree_util.tree_map_with_path(
        lambda *args: parameter_sharding(mesh, *args), state.params["params"]
    )
    shardings = jaxmp.state_shardings(state, {"params": specs})
    state = jax.tree.map(
        lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
        *(state, shardings),
    )
    tokens_BS = jax.ShapeDtypeStruct(
        (gpus // model * sequences, shape.max_length + 1), jnp.int32, sharding=rows
    )
    replicated = NamedSharding(mesh, P())
    step = jax.jit(train_step, donate_argnums=0, out_shardings=(shardings, replicated))
    return step, state, tokens_BS


def bytes_per_device(tree: Any) -> int:
    """Returns the bytes of the arrays of a tree on one device."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def plan(size: str, recipe: str, gpus: int, model: int, sequences: int) -> dict[str, Any]:
    """Compiles a step, and returns its row."""
    start = time.process_time()
    step, state, tokens_BS = make_step(recipe, size, gpus, model, sequences)
    report = jaxmp.audit(step, state, tokens_BS, recipe=recipe, target="h200")
    assert report.memory is not None
    sent: dict[str, Counter[str]] = {"sums": Counter(), "gathers": Counter(), "other": Counter()}
    kinds = {"all-reduce": "sums", "reduce-scatter": "sums", "all-gather": "gathers"}
    for row in report.collectives:
        sent[kinds.get(row.operation, "other")][row.dtype] += row.bytes
    return {
        "size": size,
        "recipe": recipe,
        "gpus": gpus,
        "model": model,
        "tokens": tokens_BS.shape[0] * (tokens_BS.shape[1] - 1),
        "parameters": bytes_per_device(state.params),
        "optimizer": bytes_per_device(state.opt_state),
        "arguments": report.memory.arguments,
        "temporary": report.memory.temporary,
        **{kind: dict(sorted(dtypes.items())) for kind, dtypes in sent.items()},
        "errors": [f"{finding.check}: {finding.module}" for finding in report.errors],
        "cpu_seconds": round(time.process_time() - start, 1),
    }


HEADER = (
    "| model | GPUs | mesh | tokens | parameters | optimizer | temporary | sums | gathers | other "
    "| CPU |\n| --- | ---: | --- | ---: | ---: | ---: | ---: | --- | --- | --- | ---: |"
)


def markdown(row: dict[str, Any]) -> str:
    """Returns one row of the table."""
    sizes = [f"{row[key] / 1e9:.2f}" for key in ("parameters", "optimizer", "temporary")]
    sent = [
        ", ".join(f"{size / 1e9:.2f} {dtype}" for dtype, size in row[kind].items() if size > 5e6)
        for kind in ("sums", "gathers", "other")
    ]
    mesh = f"{row['gpus'] // row['model']} x {row['model']}"
    cells = [row["size"], row["gpus"], mesh, f"{row['tokens']:,}", *sizes, *sent]
    return f"| {' | '.join(map(str, cells))} | {row['cpu_seconds']:.0f} s |"


def main(
    size: Annotated[str | None, typer.Option(help="llama-3-8b or llama-3-70b.")] = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="Number of GPUs.")] = None,
    model: Annotated[int, typer.Option(min=1, help="GPUs that share a sequence.")] = 1,
    recipe: Annotated[str, typer.Option(help="Name, policy string or .toml file.")] = "bf16_params",
    sequences: Annotated[int, typer.Option(min=1, help="Of 8,192 tokens, per group.")] = 1,
    out: Annotated[Path | None, typer.Option(help="JSON file for the results.")] = None,
) -> list[dict[str, Any]]:
    """Compiles Llama 3 for clusters of H200, and prints memory and communication."""
    try:
        jaxmp.load_recipe(recipe)
    except jaxmp.JaxmpError as error:
        raise typer.BadParameter(str(error)) from None
    single = [(size or "llama-3-8b", gpus or 8, model)]
    plans = PLANS if size is None and gpus is None else single
    if plans is PLANS and model > 1:
        raise typer.BadParameter(f"--model {model} requires --size and --gpus.")
    for name, count, group in plans:
        if name not in llama.SIZES:
            raise typer.BadParameter(f"--size {name} is none of {', '.join(llama.SIZES)}")
        if count % group or llama.SIZES[name].key_heads % group:
            heads = llama.SIZES[name].key_heads
            raise typer.BadParameter(
                f"--model {group} does not divide --gpus {count} and the {heads} key heads"
            )
        groups, width = count // group, llama.SIZES[name].width
        if width % groups:
            raise typer.BadParameter(
                f"--gpus {count} --model {group} makes {groups} groups, which cannot split the "
                f"width of {width} evenly; parameters would stay whole. Use a power of two."
            )
    if out is not None and not out.parent.is_dir():
        raise typer.BadParameter(f"--out {out}: the folder {out.parent} does not exist.")
    rows = []
    print(HEADER)
    for name, count, group in plans:
        rows.append(plan(name, recipe, count, group, sequences))
        print(markdown(rows[-1]), flush=True)
        if out is not None:
            report = {"target": "h200", "jax": jax.__version__, "rows": rows}
            out.write_text(json.dumps(report, indent=1) + "\n")
    return rows


if __name__ == "__main__":
    typer.run(main)
