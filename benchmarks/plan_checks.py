"""Checks `jaxmp.plan` against published measurements and against exhaustive compilation.

    python benchmarks/plan_checks.py pairs --out benchmarks/results/plan_pairs.json
    python benchmarks/plan_checks.py timed --out benchmarks/results/plan_timed.json
    python benchmarks/plan_checks.py batches --out benchmarks/results/plan_batches.json
    python benchmarks/plan_checks.py time --out benchmarks/results/plan_time.json

Nothing is run, and no GPU is required, but XLA's GPU compiler: pip install -e ".[aot]". The exit
status is 1 if a limit is exceeded. Sections:

    pairs    the ratio of the bounds of two recipes, beside that of published tokens per second. For
             widths of 4,096 or more, they differ by at most 15 %; where the published ratio
             differs from 1 by more than 5 %, both are on the same side of it.
    timed    the ratio of the bounds of two recipes, beside that of the times that run_gpu.py
             measured on an H200, for the same steps. They differ by at most 15 %.
    batches  the largest batch that the search finds, and that of compiling each batch up to 3 more:
             the last one before one that does not fit. XLA computes arrays again in programs that
             exceed the memory, so that larger ones may fit, too; they are listed
    time     user CPU time of a plan of GPT-2 124M: 3 recipes on 3 GPUs, at most 300 s. With --tpu,
             the plan has a TPU, too, and requires libtpu: pip install -e ".[tpu-aot]"
"""

import argparse
import functools
import itertools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import jax
import jax.numpy as jnp

import gpt
import jaxmp
import plan_llama
import train_step
import workload_sizes
from gpu_record import archived
from jaxmp._core._targets import get_target, targets
from jaxmp._tools.plan._programs import Candidate
from result_file import write_result

# ---------------------------------------------------------------------------
# Published pairs
# ---------------------------------------------------------------------------


class Pair(NamedTuple):
    """Published speed of two recipes, bf16 and another, on H100s."""

    recipe: str
    published: tuple[float, float]  # in tokens or FLOPs per second, or the inverse of seconds
    source: str


class Workload(NamedTuple):
    """A training step, with the width of its layers and the bandwidth of its H100s."""

    name: str
    make_step: Callable[[Any], Any]
    width: int
    pairs: tuple[Pair, ...]
    bandwidth: float = get_target("h100").bandwidth


def llama_step(batch: int, remat: str) -> Callable[[Any], Any]:
    """Returns the function that makes the step of Llama 3 8B, with FSDP on 8 GPUs."""
    return lambda recipe: plan_llama.make_step(recipe, "llama-3-8b", 8, 1, batch, remat)


TORCHAO = "https://github.com/pytorch/ao/blob/main/torchao/float8/README.md"
TORCHTITAN = (
    "https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md"
)
DGX = "https://github.com/NVIDIA/dgxc-benchmarking/blob/main/llama3.1/README_8b.md"
# The H100s of torchao and torchtitan have 2.4 TB/s. In their two measurements, a part of the
# activations is computed again: selected matmuls, for which remat "none" and "mlp" stand.
META = 2.4e12
WORKLOADS = (
    Workload(
        "llama-3-8b, batch 1",
        llama_step(1, "none"),
        4096,
        (
            Pair("fp8", (6150, 7689.5), TORCHAO),
            Pair("fp8_rowwise", (6150, 6768), TORCHAO),
        ),
        META,
    ),
    Workload(
        "llama-3-8b, batch 1, 3.4 TB/s",
        llama_step(1, "none"),
        4096,
        (Pair("fp8_delayed", (1 / 12.91, 1 / 9.67), DGX),),
    ),
    Workload(
        "llama-3-8b, batch 2",
        llama_step(2, "mlp"),
        4096,
        (Pair("fp8", (6667, 8532), TORCHTITAN),),
        META,
    ),
    Workload(
        "gpt2-xl, batch 16",
        lambda recipe: gpt.make_step(recipe, gpt.SIZES["gpt2-xl"], 16),
        1600,
        (Pair("fp8_delayed", (492, 510), "https://github.com/pytorch/ao/issues/1297"),),
    ),
)


def check_pairs(options: argparse.Namespace) -> tuple[list[dict[str, Any]], bool]:
    """Returns a row for each pair, and True if all are within the limits."""
    rows, is_ok = [], True
    for work in WORKLOADS:
        recipes = ["bf16", *(pair.recipe for pair in work.pairs)]
        chip = get_target("h100")._replace(bandwidth=work.bandwidth)
        with mock.patch.dict(targets(), h100=chip):
            report = jaxmp.plan(
                work.make_step, recipes=recipes, targets=["h100"], cache=options.cache
            )
        bounds = {row.recipe: row.bound for row in report.rows}
        for pair in work.pairs:
            speed, published = 1 / bounds[pair.recipe], pair.published[1] / pair.published[0]
            error = speed / published - 1
            is_close = work.width < 4096 or abs(error) <= 0.15
            has_order = abs(published - 1) <= 0.05 or (speed > 1) == (published > 1)
            is_ok &= is_close and has_order
            rows.append(
                {
                    "model": work.name,
                    "recipe": pair.recipe,
                    "width": work.width,
                    "speed_over_bf16": round(speed, 3),
                    "published": round(published, 3),
                    "source": pair.source,
                }
            )
            print(
                f"{work.name}: {pair.recipe} {speed:.2f} times the speed of bf16, published "
                f"{published:.2f} ({error:+.0%}){'' if is_close and has_order else '  BEYOND'}",
                flush=True,
            )
    return rows, is_ok


def check_timed(options: argparse.Namespace) -> tuple[list[dict[str, Any]], bool]:
    """Returns the ratios of bounds and of measured times, and True if all are within the limits."""
    rows = []
    for timed in archived(Path(__file__).parent / "results" / "gpu", "step_*.json"):
        size = workload_sizes.WORKLOADS[timed["workload"]]
        measured = {
            arm.removeprefix("jaxmp-"): row["rate_over_jaxmp-bf16"]
            for arm, row in timed["summary"].items()
            if arm.startswith("jaxmp-") and "rate_over_jaxmp-bf16" in row
        }
        if len(measured) < 2:
            continue

        def make_step(recipe: Any, size: workload_sizes.Sizes = size) -> Any:
            arm = train_step.jaxmp_arm(recipe, size)
            tokens = jax.ShapeDtypeStruct((size.batch, size.length + 1), jnp.int32)
            return arm.step, jax.eval_shape(arm.init), tokens

        report = jaxmp.plan(make_step, recipes=[*measured], targets=["h200"], cache=options.cache)
        bounds = {row.recipe: row.bound for row in report.rows}
        for recipe in measured.keys() - {"bf16"}:
            row = {"workload": timed["workload"], "recipe": recipe}
            row["speed_over_bf16"] = round(bounds["bf16"] / bounds[recipe], 3)
            rows.append(row | {"measured": measured[recipe]})
            print(rows[-1], flush=True)
    return rows, all(abs(row["speed_over_bf16"] / row["measured"] - 1) <= 0.15 for row in rows)


# ---------------------------------------------------------------------------
# Largest batch
# ---------------------------------------------------------------------------


def large_gpt(recipe: Any, batch_size: int = 2) -> Any:
    """Returns the step of GPT-2 large."""
    return gpt.make_step(recipe, gpt.SIZES["gpt2-large"], batch_size)


def perceptron(recipe: Any, batch_size: int = 2) -> Any:
    """Returns a step of 8 layers of width 8,192; an example of the batch has 4,096 rows."""
    dtype = recipe.policies.default.compute_dtype

    def loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        for weight in weights:
            x = jnp.tanh(x @ weight.astype(dtype))
        return jnp.mean(jnp.square(x.astype(jnp.float32)))

    @functools.partial(jax.jit, donate_argnums=0)
    def step(weights: list[jax.Array], x: jax.Array) -> list[jax.Array]:
        gradients = jax.grad(loss)(weights, x)
        return [w - 1e-3 * g for w, g in zip(weights, gradients, strict=True)]

    weights = [jax.ShapeDtypeStruct((8192, 8192), jnp.float32)] * 8
    return step, weights, jax.ShapeDtypeStruct((4096 * batch_size, 8192), dtype)


SEARCHES = ((large_gpt, "bf16", "l4"), (perceptron, "bf16", "rtx4090"))


def check_batches(options: argparse.Namespace) -> tuple[list[dict[str, Any]], bool]:
    """Returns the largest batch of the search and of exhaustive compilation, for two programs."""
    rows: list[dict[str, Any]] = []
    for make_step, recipe, chip in SEARCHES:
        program = Candidate(
            make_step, jaxmp.load_recipe(recipe), get_target(chip), None, options.cache
        )
        largest = program.largest().row.batch
        tried = range(1, largest + 4)
        fits = [batch for batch in tried if program.measure(batch).row.fits]
        rows.append(
            {
                "model": make_step.__name__,
                "recipe": recipe,
                "target": chip,
                "search": largest,
                "exhaustive": len(list(itertools.takewhile(fits.__contains__, tried))),
                "compiled": len(tried),
                "larger_that_fit": [batch for batch in fits if batch > largest],
            }
        )
        print(rows[-1], flush=True)
    return rows, all(row["search"] == row["exhaustive"] for row in rows)


# ---------------------------------------------------------------------------
# Time
# ---------------------------------------------------------------------------


def user_time() -> float:
    """Returns the user CPU seconds of this process and of NVIDIA's assembler, which XLA starts."""
    times = os.times()
    return times.user + times.children_user


def check_time(options: argparse.Namespace) -> tuple[list[dict[str, Any]], bool]:
    """Returns the CPU time of the plan of GPT-2 124M, without a cache."""
    recipes, targets = ["bf16", "bf16_params", "fp8"], ["a100", "h100", "b200"]
    targets += ["v6e"] * options.tpu
    before = user_time()
    report = jaxmp.plan(gpt.make_step, recipes=recipes, targets=targets, cache=None)
    user = user_time() - before
    row = {"recipes": recipes, "targets": targets, "user_cpu_seconds": round(user, 1)}
    print(report, row, sep="\n", flush=True)
    return [row], user <= 300


SECTIONS = {
    "pairs": check_pairs,
    "timed": check_timed,
    "batches": check_batches,
    "time": check_time,
}


def main() -> int:
    """Prints the rows of one section, and returns 1 if a limit is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("section", choices=SECTIONS)
    parser.add_argument("--tpu", action="store_true", help="a TPU in the section time")
    parser.add_argument("--cache", type=Path, help="a folder for compiled programs")
    parser.add_argument("--out", type=Path, help="a JSON file to write")
    options = parser.parse_args()
    rows, is_ok = SECTIONS[options.section](options)
    write_result(options.out, target="compiled, nothing was run", rows=rows)
    return 0 if is_ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
