"""Compares unedited models and ported training scripts of other projects with FP32.

    python benchmarks/compatibility.py                                # models of packages
    python benchmarks/compatibility.py --flax-examples ~/src/flax     # also of Flax's examples
    python benchmarks/compatibility.py --out table.json               # also writes JSON
    python benchmarks/compatibility.py --scripts ~/src --out scripts.json   # training scripts

The graph network of the Flax repository requires `pip install jraph`.

Models have small sizes and random weights, and run on the CPU; nothing is timed. Differences are |x
- x32| / |x32| in the 2-norm, computed in FP64, where x32 is the result of the original model in
FP32. They are computed for the outputs in evaluation mode (the largest of all outputs), and for the
gradients in training mode (the largest of all parameters, and all parameters together). Products
are the matmuls and convolutions of the gradient, including the forward pass. The loss is the mean
squared distance of the outputs to fixed random numbers, scaled by 1024 under every recipe. If the
norm of the FP32 gradient of a parameter is less than 1e-5 of that of the whole gradient, the
gradient consists of rounding errors, as for the bias of attention keys. Such parameters are counted
separately. The 16-bit share of the FLOPs of the products is computed with the recipe `bf16`, and
with `jaxmp.autocast` applied to the loss in addition.

`--scripts` expects a folder with checkouts named flax, nanodo, optax, ... It applies the edits in
`compatibility_scripts.py` to training scripts, and trains each original script and each recipe with
the same initial parameters and the same order of data for five seeds. Every variant runs in a
separate process; variants that the file already contains are not run again.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import flax
import jax
import jax.numpy as jnp
import numpy as np
from rich import progress

import jaxmp
from compatibility_models import FLAX_EXAMPLES, INSTALLED, Linen, Model, Nnx
from compatibility_scripts import PORTS
from jaxmp._core._wide import WIDENED_MATMUL
from result_file import commit_of, parser_of, table, write_result
from script_ports import AUTHOR_BF16, AUTHOR_FP16, PLAIN, Losses, Port, compare, lines_of

RECIPES = ("bf16", "fp16", "bf16_params")
# Replaces a recipe for the original model.
AUTHOR = SimpleNamespace(wrap=lambda model: model, cast_params=lambda params: params)
LOSS_SCALE = 1024.0
NOISE = 1e-5  # of the norm of the whole gradient

# ---------------------------------------------------------------------------
# One model under one recipe
# ---------------------------------------------------------------------------


# Nothing is timed, so optimizations are disabled; excess precision would omit roundings.
COMPILER = {"xla_backend_optimization_level": 0, "xla_allow_excess_precision": False}


def run(built: Linen | Nnx, recipe: Any) -> tuple[Any, Any]:
    """Returns `(outputs, gradients)` of a model under a recipe."""
    params, outputs = built.bind(recipe)
    both = lambda params: (outputs(params, False), gradient(outputs)(params))
    return jax.jit(both, compiler_options=COMPILER)(params)


def gradient(outputs: Callable[[Any, bool], Any]) -> Callable[[Any], Any]:
    """Returns the gradient of the mean squared distance of the outputs to fixed random numbers."""

    def loss(params: Any) -> jax.Array:
        random = np.random.default_rng(0)
        distances = [
            jnp.square(out.astype(jnp.float32) - random.normal(size=out.shape).astype("f4")).mean()
            for out in jax.tree.leaves(outputs(params, True))
        ]
        return jnp.stack(distances).mean()

    scale = jaxmp.StaticLossScale(LOSS_SCALE)
    return lambda params: jaxmp.value_and_grad(loss, loss_scale=scale)(params)[1]


def products(built: Linen | Nnx, recipe: Any) -> list[tuple[str, str, str]]:
    """Returns `(module path, dtype, dtype)` of each matmul and convolution of the gradient."""
    params, outputs = built.bind(recipe)
    jaxpr = jax.make_jaxpr(gradient(outputs))(params)
    return list(_products(jaxpr.jaxpr, ""))


def _products(jaxpr: Any, outer: str) -> Iterator[tuple[str, str, str]]:
    for equation in jaxpr.eqns:
        path = f"{outer}/{equation.source_info.name_stack}".strip("/")
        if equation.primitive.name in ("dot_general", "conv_general_dilated"):
            lhs, rhs = (str(operand.aval.dtype) for operand in equation.invars[:2])
            yield path, lhs, rhs
        if equation.params.get("name") == WIDENED_MATMUL:
            # XLA for CPU converts 16-bit operands of a matmul with an FP32 result in any case.
            yield path, *(str(operand.aval.dtype) for operand in equation.invars[:2])
            continue
        params = list(equation.params.values())
        for inner in jax.tree.leaves(params, is_leaf=lambda leaf: hasattr(leaf, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from _products(inner, path)


def is_16_bit(product: tuple[str, str, str]) -> bool:
    return set(product[1:]) in ({"bfloat16"}, {"float16"})


def shares(built: Linen | Nnx) -> dict[str, float]:
    """Returns the 16-bit share of the FLOPs under `bf16`, without and with `autocast`."""
    recipe = jaxmp.load_recipe("bf16")
    params, outputs = built.bind(recipe)
    loss_of = {"wrap": outputs, "wrap_and_autocast": jaxmp.autocast(outputs, recipe)}
    return {
        way: round(jaxmp.audit(gradient(fn), params).low_precision_share, 4)
        for way, fn in loss_of.items()
    }


# ---------------------------------------------------------------------------
# Differences
# ---------------------------------------------------------------------------


def norm(*leaves: Any) -> float:
    return float(np.sqrt(sum(np.square(np.asarray(leaf, np.float64)).sum() for leaf in leaves)))


def difference(value: Any, reference: Any) -> float:
    value, reference = (np.asarray(x, np.float64) for x in (value, reference))
    return norm(value - reference) / norm(reference)


def flat(tree: Any) -> np.ndarray:
    return np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(tree)])


def differences(built: Linen | Nnx, recipe: Any, reference: tuple[Any, Any]) -> dict[str, Any]:
    """Returns the differences of outputs and gradients to `reference`, and dtypes of products."""
    logits, grads = run(built, recipe)
    exact, structure = jax.tree.flatten_with_path(reference[1])
    smallest = NOISE * norm(*(leaf for _, leaf in exact))
    by_parameter = {
        jax.tree_util.keystr(path, simple=True, separator="/"): difference(grad, leaf)
        for (path, leaf), grad in zip(exact, structure.flatten_up_to(grads), strict=True)
        if norm(leaf) > smallest
    }
    worst = max(by_parameter, key=by_parameter.__getitem__)
    made = products(built, recipe)
    return {
        "logits": max(jax.tree.leaves(jax.tree.map(difference, logits, reference[0]))),
        "gradients": by_parameter[worst],
        "worst_parameter": worst,
        "gradients_together": difference(flat(grads), flat(reference[1])),
        "gradients_of_rounding": len(exact) - len(by_parameter),
        "products": len(made),
        "products_16_bit": sum(map(is_16_bit, made)),
        "other_products": dict(Counter(" ".join(p) for p in made if not is_16_bit(p))),
    }


def measure(model: Model, built: Linen | Nnx) -> dict[str, Any]:
    reference = run(built, AUTHOR)
    recipes = {name: differences(built, jaxmp.load_recipe(name), reference) for name in RECIPES}
    row = {
        "model": model.name,
        "source": model.source,
        "framework": model.framework,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(reference[1])),
        "low_precision_share": shares(built),
        "recipes": recipes,
    }
    if built.typed is not None:
        typed = built._replace(module=built.typed(jnp.bfloat16))
        row["author_bf16"] = differences(typed, AUTHOR, reference)
        row["author_bf16_and_recipe"] = differences(typed, jaxmp.load_recipe("bf16"), reference)
    return row


# ---------------------------------------------------------------------------
# The table
# ---------------------------------------------------------------------------


def versions(examples: Path | None) -> dict[str, str]:
    """Returns the versions of the measured and the measuring packages."""
    found = {"python": platform.python_version(), "jax": jax.__version__, "flax": flax.__version__}
    for source in sorted({model.source for model in INSTALLED}):
        found[source] = importlib.metadata.version(source)
    if examples is not None:
        found["flax examples"] = commit_of(examples)
    return found


HEADER = (
    *("model", "source", "framework"),
    *RECIPES,
    *("16-bit products", "16-bit FLOPs", "with `autocast`"),
)


def cells(row: dict[str, Any]) -> list[str]:
    measured = row["recipes"]
    differences = [f"{r['logits']:.1e} / {r['gradients']:.1e}" for r in measured.values()]
    products = f"{measured['bf16']['products_16_bit']} of {measured['bf16']['products']}"
    flops = [f"{share:.1%}" for share in row["low_precision_share"].values()]
    return [row["model"], row["source"], row["framework"], *differences, products, *flops]


AUTHORS_HEADER = (
    "model",
    "bf16",
    "author's dtype",
    "both",
    "16-bit products: bf16",
    "author's dtype",
    "both",
)


def authors_cells(row: dict[str, Any]) -> list[str]:
    """Returns the cells of the recipe `bf16`, of the author's dtype argument, and of both."""
    ways = row["recipes"]["bf16"], row["author_bf16"], row["author_bf16_and_recipe"]
    differences = [f"{way['logits']:.1e} / {way['gradients_together']:.1e}" for way in ways]
    products = [f"{way['products_16_bit']} of {way['products']}" for way in ways]
    return [row["model"], *differences, *products]


def tables(report: dict[str, Any]) -> tuple[str, str]:
    """Returns the two tables of docs/compatibility.md."""
    rows = report["models"]
    typed = [row for row in rows if "author_bf16" in row]
    return table(HEADER, map(cells, rows)), table(AUTHORS_HEADER, map(authors_cells, typed))


# ---------------------------------------------------------------------------
# Training scripts
# ---------------------------------------------------------------------------

# One core for each run, minimal optimization, and no omitted roundings.
XLA_FLAGS = (
    "--xla_cpu_multi_thread_eigen=false --xla_backend_optimization_level=0 "
    "--xla_allow_excess_precision=false --xla_force_host_platform_device_count="
)


def train(
    port: Port, checkouts: Path, seeds: int, variants: Sequence[str]
) -> Iterator[tuple[str, list[list[float]]]]:
    """Yields `(variant, losses)` of variants of a script, from a separate process."""
    script = Path(__file__).with_name("compatibility_scripts.py")
    command = [sys.executable, str(script), str(checkouts), port.name, str(seeds), *variants]
    with tempfile.TemporaryDirectory() as cache, tempfile.TemporaryFile("w+") as log:
        environment = os.environ | {
            "XLA_FLAGS": f"{XLA_FLAGS}{port.devices}",
            "JAX_COMPILATION_CACHE_DIR": cache,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                yield from json.loads(line).items()
        if process.returncode:
            log.seek(0)
            print(f"{port.name} failed: {log.read()[-2000:]}", file=sys.stderr)


def train_all(checkouts: Path, only: str, seeds: int, out: Path | None) -> dict[str, Any]:
    """Trains the variants that `out` does not contain, and writes it after each variant."""
    report: dict[str, Any] = {
        "versions": versions(None)
        | {name: importlib.metadata.version(name) for name in ("optax", "equinox", "scikit-learn")},
        "device": f"CPU: {platform.machine()}, {os.cpu_count()} cores; one thread for matmuls",
        "xla_flags": XLA_FLAGS,
        "scripts": {},
    }
    if out is not None and out.exists():
        report["scripts"] = json.loads(out.read_text())["scripts"]
    for port in PORTS.values():
        if only not in port.name + port.checkout or not (checkouts / port.checkout).exists():
            continue
        entry = {
            "source": port.source,
            "commit": commit_of(checkouts / port.checkout),
            "framework": port.framework,
            "data": port.data,
            "lines_changed": lines_of(port, checkouts),
        }
        before = report["scripts"].get(port.name, {})
        same = before.get("commit") == entry["commit"]
        entry["variants"] = before["variants"] if same else {}
        report["scripts"][port.name] = entry
        variants = entry["variants"]
        missing = [
            variant
            for variant in port.variants
            if variant not in variants
            or len(variants[variant]["losses"]) < seeds
            or variants[variant]["edits"] != port.digest(variant)
        ]
        start = time.monotonic()
        for variant, losses in train(port, checkouts, seeds, missing) if missing else ():
            variants[variant] = {
                "losses": losses,
                "edits": port.digest(variant),
                "seconds": round(time.monotonic() - start, 1),
                "jaxmp": commit_of(Path(__file__).parent),
            }
            start = time.monotonic()
            print(port.name, variant, losses, flush=True)
            write_result(out, **summarized(report))
    return summarized(report)


def reference_of(variants: dict[str, Any], recipe: str) -> str:
    """Returns the reference: the author's 16-bit variant if there is one, otherwise FP32."""
    author = AUTHOR_FP16 if recipe == "fp16" else AUTHOR_BF16
    return author if author in variants else PLAIN


def summarized(report: dict[str, Any]) -> dict[str, Any]:
    """Returns the report with differences and standard errors."""
    for entry in report["scripts"].values():
        variants = entry["variants"]
        for recipe in RECIPES:
            reference = reference_of(variants, recipe)
            if recipe not in variants or reference not in variants:
                continue
            variants[recipe]["reference"] = reference
            pairs = variants[recipe]["losses"], variants[reference]["losses"]
            for position, loss in enumerate(Losses._fields):
                result = compare(*([run[position] for run in runs] for runs in pairs))
                variants[recipe][loss] = result._asdict() | {"close": result.close}
    return report


SCRIPTS_HEADER = (
    "script",
    "file",
    "framework",
    "lines changed",
    "loss",
    "plain FP32",
    "author's bf16",
    *RECIPES,
)


def script_rows(report: dict[str, Any]) -> Iterator[list[str]]:
    """Yields rows of mean losses; for recipes, mean differences and their standard errors."""
    for name, entry in report["scripts"].items():
        variants = entry["variants"]
        for position, loss in enumerate(Losses._fields):
            first = position == 0
            cells = [name, entry["source"], entry["framework"], str(entry["lines_changed"])]
            row = cells if first else [""] * len(cells)
            row.append({"train": "training", "heldout": "held-out"}[loss])
            for variant in (PLAIN, AUTHOR_BF16, *RECIPES):
                row.append(script_cell(variants.get(variant), position, loss))
            yield row


def script_cell(variant: dict[str, Any] | None, position: int, loss: str) -> str:
    if variant is None:
        return "-"
    if loss not in variant:
        return f"{np.mean([run[position] for run in variant['losses']]):.4g}"
    measured = variant[loss]
    cell = (
        f"{measured['mean']:+.1e} ± {measured['error']:.1e} ({100 * measured['relative']:+.2f} %)"
    )
    return cell if measured["close"] else f"**{cell}**"


def scripts_table(report: dict[str, Any]) -> str:
    """Returns the table of training scripts in docs/compatibility.md."""
    return table(SCRIPTS_HEADER, script_rows(report))


# ---------------------------------------------------------------------------


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--flax-examples", type=Path, help="a checkout of the Flax repository")
    parser.add_argument("--only", default="", help="models whose name or source contains this")
    parser.add_argument("--scripts", type=Path, help="folder of checkouts: flax, nanodo, ...")
    parser.add_argument("--seeds", type=int, default=5, help="seeds of each training script")
    args = parser.parse_args()
    if args.scripts:
        report = train_all(args.scripts.resolve(), args.only, args.seeds, args.out)
        print(scripts_table(report))
        return
    makers = [(model, model.make) for model in INSTALLED]
    if args.flax_examples:
        folder = args.flax_examples / "examples"
        makers += [(model, lambda make=model.make: make(folder)) for model in FLAX_EXAMPLES]
    chosen = [pair for pair in makers if args.only in pair[0].name + pair[0].source]
    models = []
    for model, make in progress.track(chosen):
        models.append(measure(model, make()))
        found = versions(args.flax_examples)
        write_result(args.out, versions=found, loss_scale=LOSS_SCALE, models=models)
    print("\n\n".join(tables({"models": models})))


if __name__ == "__main__":
    main()
