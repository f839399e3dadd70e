"""Counts the bytes that sharded training steps send, by dtype, compiled for 8 and 16 H200.

    python benchmarks/sharded_programs.py --out sharded.json        # a subset
    python benchmarks/sharded_programs.py --full --out all.json     # all programs
    python benchmarks/sharded_programs.py --recipes bf16 --layouts FSDP --devices 8 --forms scan

The subset contains each pair of recipe, framework, form and layout, for each number of GPUs. It is
compiled first. With a file that exists, the programs that it lacks are compiled, and with --memory
also those that it has without `needed`.

The model is an embedding, four residual blocks of two Dense layers, and a head. It is written in
Linen and in NNX; its blocks are a Python loop ("plain"), a scan, or a scan of rematerialized blocks
("remat"). The layouts are:

    FSDP         kernels and table split over the batch axis; activations constrained to it
    ZeRO-1       parameters replicated, masters and moments split
    FSDP x TP    kernels split over the batch axis and over a tensor-parallel axis of size 2

Each recipe is compiled with `value_and_grad` of jaxmp. For comparison, three steps without jaxmp
have the same model in bfloat16 with `jax.value_and_grad`: "plain JAX" casts the parameters in the
loss; "Flax dtype=bf16" sets the `dtype` of each layer; "MaxText's way" also constrains each
parameter to its sharding and casts the gradients to FP32 (its `dtype` and `grad_dtype`).

Nothing is run, and no GPU is required, but XLA's GPU compiler: pip install -e ".[aot]". Bytes are
per device and step, of arrays above 4 kB:

    sums_16_bit, sums_fp32      all-reduce and reduce-scatter of weight gradients
    gathered                    all-gather, by dtype
    weights                     elements of the weights that a device must gather per step
    gathered_weights            elements that are gathered in the compute dtype or in FP8
    kept                        gathered weights that the backward pass reads, too
    temporary                   memory that the program allocates beside arguments and results
    needed, needed_limit        with --memory: see `measure_memory`
"""

import json
import os
import platform
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp
from jaxmp._core._compat import described_gpus
from jaxmp._core._targets import get_target
from jaxmp._tools.audit._compile import _WITHOUT_GPU as WITHOUT_GPU
from jaxmp._tools.audit._compile import describe
from result_file import parser_of, table

FRAMEWORKS = ("Linen", "NNX")
FORMS = ("plain", "scan", "remat")
LAYOUTS = ("FSDP", "ZeRO-1", "FSDP x TP")
RECIPES = ("bf16", "bf16_params", "fp16", "fp16_params", "fp8", "fp8_delayed", "fp8_rowwise")
WAYS = ("plain JAX", "Flax dtype=bf16", "MaxText's way")
VOCABULARY, WIDTH, LAYERS, ROWS, LENGTH = 2048, 1024, 4, 64, 256

Constrain = Callable[[jax.Array], jax.Array]

# ---------------------------------------------------------------------------
# Models
# ---------------------------------------------------------------------------


class Block(nn.Module):
    """Residual block of two Dense layers."""

    constrain: Constrain
    dtype: Any = None

    @nn.compact
    def __call__(self, x_BTD: jax.Array, _: None) -> tuple[jax.Array, None]:
        """Returns x_BTD after the block."""
        h = nn.LayerNorm(name="norm", dtype=self.dtype)(x_BTD)
        h = nn.gelu(nn.Dense(4 * WIDTH, name="up", dtype=self.dtype)(h))
        h = nn.Dense(WIDTH, name="down", dtype=self.dtype)(h)
        return self.constrain(x_BTD + h), None


class Stack(nn.Module):
    """Blocks between an embedding and a head, in Linen."""

    constrain: Constrain
    form: str
    dtype: Any = None

    @nn.compact
    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        """Returns the logits of tokens_BT."""
        x_BTD = nn.Embed(VOCABULARY, WIDTH, name="embed", dtype=self.dtype)(tokens_BT)
        x_BTD = self.constrain(x_BTD)
        if self.form == "plain":
            for n in range(LAYERS):
                x_BTD, _ = Block(self.constrain, self.dtype, name=f"block_{n}")(x_BTD, None)
        else:
            block = nn.remat(Block) if self.form == "remat" else Block
            axes = {"params": 0, "_overwrite_with_gradient": 0}
            scan = nn.scan(block, axes, split_rngs={"params": True}, length=LAYERS)
            x_BTD, _ = scan(self.constrain, self.dtype, name="blocks")(x_BTD, None)
        return nn.Dense(VOCABULARY, name="lm_head", dtype=self.dtype)(x_BTD)


class NnxBlock(nnx.Module):
    """Residual block of two Linear layers."""

    def __init__(self, constrain: Constrain, rngs: nnx.Rngs) -> None:
        self.constrain = constrain
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """Returns x_BTD after the block."""
        return self.constrain(x_BTD + self.down(nnx.gelu(self.up(self.norm(x_BTD)))))


class NnxStack(nnx.Module):
    """Blocks between an embedding and a head, in NNX."""

    def __init__(self, constrain: Constrain, form: str, rngs: nnx.Rngs) -> None:
        self.constrain, self.form = constrain, form
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.lm_head = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)
        if form == "plain":
            self.blocks: Any = nnx.List([NnxBlock(constrain, rngs) for _ in range(LAYERS)])
        else:
            make = lambda rngs: NnxBlock(constrain, rngs)
            stacked = nnx.vmap(make, in_axes=0, out_axes=0)
            self.blocks = nnx.split_rngs(splits=LAYERS)(stacked)(rngs)

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        """Returns the logits of tokens_BT."""
        x_BTD = self.constrain(self.embed(tokens_BT))
        if self.form == "plain":
            for block in self.blocks:
                x_BTD = block(x_BTD)
        else:
            call = lambda x, block: block(x)
            call = nnx.remat(call) if self.form == "remat" else call
            x_BTD = nnx.scan(call, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x_BTD, self.blocks)
        return self.lm_head(x_BTD)


# ---------------------------------------------------------------------------
# Layouts
# ---------------------------------------------------------------------------


def mesh_of(layout: str, devices: int) -> Mesh:
    """Returns a mesh of GPUs that are not present on this machine."""
    gpus = np.array(described_gpus(describe(get_target("h200")), devices))
    if layout == "FSDP x TP":
        gpus = gpus.reshape(devices // 2, 2)
        return Mesh(gpus, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    return Mesh(gpus, ("data",), axis_types=(AxisType.Auto,))


def spec_of(path: tuple[str, ...], ndim: int, layout: str) -> P:
    """Returns the partition spec of a parameter. A scan adds a leading dimension."""
    if layout == "ZeRO-1" or path[-1] in ("bias", "scale"):
        return P()
    tensor = "model" if layout == "FSDP x TP" else None
    spec = {"down": (tensor, "data"), "embed": ("data", None)}.get(path[-2], ("data", tensor))
    return P(*(None,) * (ndim - 2), *spec)


def params_shardings(params: Any, mesh: Mesh, layout: str) -> Any:
    """Returns a NamedSharding for each parameter."""

    def sharding(key_path: Any, leaf: Any) -> NamedSharding:
        names = [str(getattr(key, "key", getattr(key, "name", key))) for key in key_path]
        path = tuple(name for name in names if name not in ("value", "raw_value"))
        return NamedSharding(mesh, spec_of(path, leaf.ndim, layout))

    return jax.tree_util.tree_map_with_path(sharding, params)


def weights_to_gather(params: Any, mesh: Mesh, layout: str) -> int:
    """Returns the elements that a device must gather: kernels twice, the table once."""
    if layout == "ZeRO-1":
        return 0
    total = 0
    for key_path, leaf in jax.tree_util.tree_leaves_with_path(params):
        text = jax.tree_util.keystr(key_path)
        if "kernel" in text:
            total += 2 * leaf.size // mesh.shape.get("model", 1)
        elif "embedding" in text:
            total += leaf.size
    return total


# ---------------------------------------------------------------------------
# Steps
# ---------------------------------------------------------------------------


def placed(tree: Any, shardings: Any) -> Any:
    """Returns shapes with shardings."""
    shape = lambda leaf, at: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at)
    return jax.tree.map(shape, tree, shardings)


def token_loss(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Returns the mean cross-entropy."""
    return jaxmp.losses.softmax_cross_entropy(logits, tokens).mean()


def linen_step(recipe: jaxmp.Recipe, form: str, layout: str, mesh: Mesh) -> tuple[Any, ...]:
    """Returns step, state, shardings of the state, and parameters."""
    batch = NamedSharding(mesh, P("data"))
    plain = Stack(lambda x: x, form)
    tokens = jnp.zeros((1, 8), jnp.int32)
    params = jax.eval_shape(lambda: plain.init(jax.random.key(0), tokens))["params"]
    where = params_shardings(params, mesh, layout)
    model = Stack(lambda x: jax.lax.with_sharding_constraint(x, batch), form)
    model = recipe.wrap(model, shardings=where)

    def init() -> jaxmp.TrainState:
        variables = recipe.wrap(plain).init(jax.random.key(0), tokens)
        tx = recipe.optimizer(optax.adamw(1e-3))
        return jaxmp.TrainState.create(apply_fn=model.apply, params=variables, tx=tx)

    def step(state: jaxmp.TrainState, tokens: jax.Array) -> Any:
        loss_fn = lambda params, tokens: token_loss(model.apply(params, tokens), tokens)
        loss, grads = state.value_and_grad(loss_fn)(tokens)
        return state.apply_gradients(grads=grads), loss

    state = jax.eval_shape(init)
    optimizer = "data" if layout == "ZeRO-1" else "like_params"
    shardings = jaxmp.state_shardings(state, {"params": where}, optimizer=optimizer)
    return step, placed(state, shardings), shardings, params


def nnx_step(recipe: jaxmp.Recipe, form: str, layout: str, mesh: Mesh) -> tuple[Any, ...]:
    """Returns step, state, shardings of the state, and parameters."""
    batch = NamedSharding(mesh, P("data"))
    constrain = lambda x: jax.lax.with_sharding_constraint(x, batch)
    graph: Any = None

    def init(shardings: Any) -> Any:
        nonlocal graph
        model = recipe.wrap(NnxStack(constrain, form, nnx.Rngs(0)), shardings=shardings)
        optimizer = jaxmp.nnx.Optimizer(model, recipe.optimizer(optax.adamw(1e-3)))
        graph, state = nnx.split((model, optimizer))
        return state

    abstract = nnx.eval_shape(lambda: NnxStack(constrain, form, nnx.Rngs(0)))
    params = nnx.to_pure_dict(nnx.state(abstract, nnx.Param))
    where = params_shardings(params, mesh, layout)

    def step(state: Any, tokens: jax.Array) -> Any:
        model, optimizer = nnx.merge(graph, state)
        loss_fn = lambda model, tokens: token_loss(model(tokens), tokens)
        loss, grads = optimizer.value_and_grad(loss_fn)(model, tokens)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), loss

    state = jax.eval_shape(lambda: init(where))
    optimizer = "data" if layout == "ZeRO-1" else "like_params"
    shardings = jaxmp.state_shardings(state, where, optimizer=optimizer)
    return step, placed(state, shardings), shardings, params


def other_step(way: str, form: str, layout: str, mesh: Mesh) -> tuple[Any, ...]:
    """Returns step, state, shardings of the state, and parameters, without jaxmp."""
    batch = NamedSharding(mesh, P("data"))
    constrain = lambda x: jax.lax.with_sharding_constraint(x, batch)
    dtype = None if way == "plain JAX" else jnp.bfloat16
    plain, model = Stack(lambda x: x, form, dtype), Stack(constrain, form, dtype)
    tokens, tx = jnp.zeros((1, 8), jnp.int32), optax.adamw(1e-3)

    def init() -> Any:
        params = plain.init(jax.random.key(0), tokens)["params"]
        return {"params": params, "opt_state": tx.init(params)}

    state = jax.eval_shape(init)
    where = params_shardings(state["params"], mesh, layout)

    def loss_fn(params: Any, tokens: jax.Array) -> jax.Array:
        if way == "plain JAX":
            params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
        elif way == "MaxText's way":
            params = jax.lax.with_sharding_constraint(params, where)
        logits = model.apply({"params": params}, tokens).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()

    def step(state: Any, tokens: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], tokens)
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state}, loss

    optimizer = "data" if layout == "ZeRO-1" else "like_params"
    shardings = jaxmp.state_shardings(state, where, optimizer=optimizer)
    return step, placed(state, shardings), shardings, state["params"]


# ---------------------------------------------------------------------------
# Measurement
# ---------------------------------------------------------------------------


def measure(
    recipe: str, framework: str, form: str, layout: str, devices: int, **changes: Any
) -> dict[str, Any]:
    """Compiles one step and returns its row.

    Args:
      recipe: the name of a recipe, or one of WAYS.
      framework: one of FRAMEWORKS.
      form: one of FORMS.
      layout: one of LAYOUTS.
      devices: number of GPUs.
      **changes: arguments of `Recipe.replace`.
    """
    mesh = mesh_of(layout, devices)
    if recipe in WAYS:
        policies = None
        step, state, shardings, params = other_step(recipe, form, layout, mesh)
    else:
        policies = jaxmp.load_recipe(recipe).replace(**changes)
        make = linen_step if framework == "Linen" else nnx_step
        step, state, shardings, params = make(policies, form, layout, mesh)
    batch = NamedSharding(mesh, P("data"))
    tokens = jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32, sharding=batch)
    jitted = jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))
    report = jaxmp.audit(jitted, state, tokens, recipe=policies, target="h200")
    sums: Counter[str] = Counter()
    gathered: Counter[str] = Counter()
    gathered_weights = kept = 0
    for row in report.collectives:
        if row.bytes < 4096 * row.count:
            continue
        is_sum = row.operation in ("all-reduce", "reduce-scatter")
        if is_sum and row.content == "gradient":
            sums["fp32" if row.dtype == "float32" else "16-bit"] += row.bytes
        elif row.operation == "all-gather":
            gathered[row.dtype] += row.bytes
            kept += row.bytes if row.is_kept else 0
            if row.dtype != "float32":
                gathered_weights += row.bytes // (1 if row.dtype.startswith("float8") else 2)
    return {
        "recipe": recipe,
        "framework": framework,
        "form": form,
        "layout": layout,
        "devices": devices,
        "sums_16_bit": sums["16-bit"],
        "sums_fp32": sums["fp32"],
        "gathered": dict(sorted(gathered.items())),
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(params)),
        "weights": weights_to_gather(params, mesh, layout),
        "gathered_weights": gathered_weights,
        "kept": kept,
        "temporary": report.memory.temporary,
    }


def measure_memory(
    recipe: str, framework: str, form: str, layout: str, devices: int, **changes: Any
) -> dict[str, int]:
    """Returns the temporary memory that a program needs, and the limit for it.

    XLA's latency-hiding scheduler delays reductions as long as memory is free, so the program is
    compiled without it here. Keeping the gathered weights of all layers until the backward pass
    must need more than the limit:

      plain, scan    The same program is compiled with `regather=False`. The limit is its memory,
                     less half of the weights that it gathers.
      remat          The same program is compiled with twice as many layers. For each further layer,
                     the limit adds the saved input of its block in 16 bits, its part of the FP32
                     gradients, and half of its gathered weights. It also adds 1 % of all.

    Args:
      recipe, framework, form, layout, devices: as in `measure`; a layout with split parameters.
      **changes: arguments of `Recipe.replace`.
    """
    global LAYERS
    program = recipe, framework, form, layout, devices
    in_order = {"xla_gpu_enable_latency_hiding_scheduler": False}
    with mock.patch.dict(WITHOUT_GPU, in_order):
        row = measure(*program, **changes)
        if form != "remat":
            kept = measure(*program, **{**changes, "regather": False})
            limit = kept["temporary"] - sum(kept["gathered"].values()) // 2
            return {"needed": row["temporary"], "needed_limit": limit}
        LAYERS *= 2
        try:
            deeper = measure(*program, **changes)
        finally:
            LAYERS //= 2
    # Both passes gather the weights of the layers; the rest is the same in both programs.
    gathered = sum(deeper["gathered"].values()) - sum(row["gathered"].values())
    gradients = 4 * (deeper["parameters"] - row["parameters"]) // devices
    parts = devices // 2 if layout == "FSDP x TP" else devices
    inputs = 2 * LAYERS * (ROWS // parts) * LENGTH * WIDTH
    limit = int(1.01 * row["temporary"]) + inputs + gradients + gathered // 4
    return {"needed": deeper["temporary"], "needed_limit": limit}


def programs(
    recipes: Sequence[str], forms: Sequence[str], layouts: Sequence[str], devices: int
) -> Iterator[tuple[str, str, str, str, int]]:
    """Yields the arguments of `measure` for the whole matrix."""
    for layout in layouts:
        for recipe in recipes:
            for framework in FRAMEWORKS:
                if recipe in WAYS and framework == "NNX":
                    continue
                for form in forms:
                    yield recipe, framework, form, layout, devices


def pairwise(rows: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Returns a subset that contains each pair of values of two columns that occurs in `rows`."""

    def pairs(row: tuple[Any, ...]) -> set[tuple[Any, ...]]:
        columns = range(len(row))
        return {(i, row[i], j, row[j]) for i in columns for j in columns if i < j}

    missing = set().union(*map(pairs, rows))
    chosen = []
    while missing:
        best = max(rows, key=lambda row: len(pairs(row) & missing))
        chosen.append(best)
        missing -= pairs(best)
    return chosen


def violations(row: dict[str, Any]) -> list[str]:
    """Returns the limits that the program of a recipe exceeds, as text.

    Weight gradients are summed in FP32. Under FSDP, the elements that are gathered in 16 bits and
    in FP8 are those of the weights, once per pass, and only small arrays are gathered in FP32. The
    backward pass reads none of the arrays that the forward pass gathered, except for the table. The
    memory that a program needs excludes that all gathered layers are kept; see `measure_memory`.
    """
    limits = {"sums_16_bit": row["sums_16_bit"] == 0}
    if row["layout"] == "ZeRO-1":
        # The updated parameters are gathered in the dtype in which they are stored.
        stored = 2 if row["recipe"].endswith("_params") else 4
        own = sum(row["gathered"].values())
        limits["gathered"] = own <= 1.01 * stored * row["parameters"]
    else:
        limits["gathered_weights"] = abs(row["gathered_weights"] / row["weights"] - 1) <= 0.01
        limits["gathered"] = row["gathered"].get("float32", 0) <= 0.01 * row["weights"]
        limits["kept"] = row["kept"] <= 0.1 * sum(row["gathered"].values())
    if "needed" in row:
        limits["needed"] = row["needed"] <= row["needed_limit"]
    return [f"{name}: {row[name]}" for name, is_within in limits.items() if not is_within]


# ---------------------------------------------------------------------------
# Table
# ---------------------------------------------------------------------------

HEADER = ("layout", "step", "programs", "sums in 16 bits", "sums in FP32", "gathered")
HEADER += ("gathered / weights", "kept", "temporary")


def _range(values: list[float], digits: int = 1) -> str:
    low, high = (f"{value:.{digits}f}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def cells_of(rows: list[dict[str, Any]]) -> list[str]:
    """Returns one line of the table for all programs of a recipe and a layout, in MB."""
    first = rows[0]
    dtypes = sorted({dtype for row in rows for dtype in row["gathered"]})
    gathered = [
        f"{_range([row['gathered'].get(dtype, 0) / 1e6 for row in rows])} {dtype}"
        for dtype in dtypes
    ]
    ratios = [row["gathered_weights"] / row["weights"] for row in rows if row["weights"]]
    sums = (_range([row[key] / 1e6 for row in rows]) for key in ("sums_16_bit", "sums_fp32"))
    cells = [first["layout"], first["recipe"], str(len(rows)), *sums, ", ".join(gathered) or "0.0"]
    cells.append(_range(ratios, 3) if ratios else "")
    cells += [_range([row[key] / 1e6 for row in rows]) for key in ("kept", "temporary")]
    return cells


def table_of(rows: list[dict[str, Any]], devices: int) -> str:
    """Returns the table of the programs for a number of GPUs."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    order = lambda row: (LAYOUTS.index(row["layout"]), (*WAYS, *RECIPES).index(row["recipe"]))
    for row in sorted(rows, key=order):
        if row["devices"] == devices:
            groups.setdefault((row["layout"], row["recipe"]), []).append(row)
    return table(HEADER, map(cells_of, groups.values()))


def versions() -> dict[str, str]:
    """Returns the versions on which the programs depend."""
    installed = {"jax": jax.__version__, "flax": flax.__version__}
    return {**installed, "python": platform.python_version()}


def recorded_rows(path: Path | None) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Returns program -> row of an earlier run with the same versions, which is continued."""
    if path is None or not path.exists():
        return {}
    report = json.loads(path.read_text())
    if report["versions"] != versions():
        return {}
    names = ("recipe", "framework", "form", "layout", "devices")
    return {tuple(row[name] for name in names): row for row in report["rows"]}


def main() -> None:
    """Prints a line for each program and the table, and writes both as JSON."""
    parser = parser_of(__doc__)
    parser.add_argument("--recipes", nargs="+", default=[*WAYS, *RECIPES])
    parser.add_argument("--forms", nargs="+", default=["plain", "remat"], choices=FORMS)
    parser.add_argument("--layouts", nargs="+", default=LAYOUTS)
    parser.add_argument("--devices", nargs="+", type=int, default=[8, 16])
    parser.add_argument("--full", action="store_true", help="all programs instead of a subset")
    parser.add_argument("--memory", action="store_true", help="also measure `needed`")
    args = parser.parse_args()
    chosen: list[tuple[Any, ...]] = []
    others: list[tuple[Any, ...]] = []
    for count in args.devices:
        all_programs = list(programs(args.recipes, args.forms, args.layouts, count))
        subset = pairwise(all_programs)
        chosen += subset
        others += [program for program in all_programs if program not in subset]
    if args.full:
        chosen += others
    recorded = recorded_rows(args.out)
    rows = list(recorded.values())
    for number, program in enumerate(chosen, 1):
        is_limited = args.memory and program[0] in RECIPES and program[3] != "ZeRO-1"
        row = recorded.get(program)
        if row is not None and (not is_limited or "needed" in row):
            continue
        if row is None:
            row = measure(*program)
            rows.append(row)
        if is_limited:
            row |= measure_memory(*program)
        exceeded = "" if row["recipe"] in WAYS else "; ".join(violations(row))
        print(f"{number}/{len(chosen)} {json.dumps(row)} {exceeded}", flush=True)
        if args.out:
            report = {"target": get_target("h200").kind, "versions": versions(), "rows": rows}
            args.out.write_text(json.dumps(report, indent=1) + "\n")
    for count in args.devices:
        print(f"\n{count} GPUs\n{table_of(rows, count)}")


if __name__ == "__main__":
    main()
