"""Checks `jaxmp.plan` against published measurements and against exhaustive compilation.

    python benchmarks/plan_checks.py pairs --out benchmarks/results/plan_pairs.json
    python benchmarks/plan_checks.py timed --out benchmarks/results/plan_timed.json
    python benchmarks/plan_checks.py batches --out benchmarks/results/plan_batches.json
    python benchmarks/plan_checks.py time --out benchmarks/results/plan_time.json
    python benchmarks/plan_checks.py calibrate

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
    calibrate
             writes jaxmp/_tools/plan/measured.toml: the shares of the peaks, from the rates in the
             archives of benchmarks/results/gpu, and the cases, from the results of pairs and timed,
             which are to be made again if the shares have changed. Each case must be inside of the
             interval that is made without it, except for one; no interval of a chip that was timed
             is wider than 25 %. It compiles nothing.
"""

import argparse
import functools
import itertools
import json
import os
import re
import sys
import tomllib
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
from jaxmp._core._targets import find_target, get_target, targets
from jaxmp._tools.plan import _bound
from jaxmp._tools.plan._bound import error_of, shares_of
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


# Workloads whose programs are not those that were timed: FP32 attention computes larger blocks now.
STALE = ("w1s",)


def check_timed(options: argparse.Namespace) -> tuple[list[dict[str, Any]], bool]:
    """Returns the ratios of bounds and of measured times, and True if all are within the limits."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    reports = archived(Path(__file__).parent / "results" / "gpu", "step_*.json")
    for timed in sorted(reports, key=lambda one: one["runs"][-1]["environment"]["date"]):
        if timed["workload"] in STALE:
            continue
        size = workload_sizes.WORKLOADS[timed["workload"]]
        measured = {
            recipe: timed["summary"][f"jaxmp-{recipe}"]["rate_over_jaxmp-bf16"]
            for recipe in jaxmp.list_recipes()
            if "rate_over_jaxmp-bf16" in timed["summary"].get(f"jaxmp-{recipe}", {})
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
            # The last measurement of each.
            rows[timed["workload"], recipe] = row | {"measured": measured[recipe]}
            print(row | {"measured": measured[recipe]}, flush=True)
    errors = (abs(row["speed_over_bf16"] / row["measured"] - 1) for row in rows.values())
    return [*rows.values()], all(error <= 0.15 for error in errors)


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
        largest = program.largest().batch
        tried = range(1, largest + 4)
        fits = [batch for batch in tried if program.measure(batch).fits]
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


# ---------------------------------------------------------------------------
# Calibration
# ---------------------------------------------------------------------------

RESULTS = Path(__file__).parent / "results"
FILE = Path(_bound.__file__).with_name("measured.toml")


def timed_shares() -> dict[str, dict[str, Any]]:
    """Returns chip -> the shares of its peaks, from the rates that run_gpu.py measured."""
    shares: dict[str, dict[str, Any]] = {}
    for rates in archived(RESULTS / "gpu", "ceilings.json"):
        chip = find_target(rates["environment"]["device"])
        shares[chip.name] = {
            "matmuls": rates["bf16_tflops"]["median"] * 1e12 / chip.peak["bfloat16"],
            "float8": rates["fp8_tflops"]["median"] * 1e12 / chip.peak["float8_e4m3fn"],
            "memory": rates["copy_terabytes_per_second"]["median"] * 1e12 / chip.bandwidth,
        }
    for report in archived(RESULTS / "gpu", "attention.json"):
        chip = find_target(report["environment"]["device"])
        shares[chip.name] |= attention_shares(report["speed"], chip.peak["bfloat16"])
    for own in shares.values():
        own["source"] = "benchmarks/results/gpu: ceilings.py and attention_gpu.py"
    return shares


def attention_shares(rows: list[dict[str, Any]], peak: float) -> dict[str, float]:
    """Returns the shares of causal attention at 8,192 positions, and that of small heads."""
    rates = {
        (row["heads"][-1], row["pass"]): row["jaxmp_tflops"]["median"] * 1e12
        for row in rows
        if row["causal"]
    }
    length = next(row["length"] for row in rows)
    scale = (length / 8192) ** shares_of(get_target("h100"))["growth"]
    forward, both = (rates[128, name] for name in ("forward", "forward+backward"))
    # The backward pass has 2.5 times the FLOPs of the forward pass.
    backward = 2.5 / (3.5 / both - 1 / forward)
    return {
        "attention_forward": forward / peak / scale,
        "attention_backward": backward / peak / scale,
        "small_head": rates[64, "forward"] / forward,
    }


def cases() -> list[dict[str, Any]]:
    """Returns the measured ratios in the results of the sections pairs and timed."""
    read = lambda name: json.loads((RESULTS / name).read_text("utf-8"))["rows"]
    rows = [
        {"chip": "h100", "measured": row["published"], **row} for row in read("plan_pairs.json")
    ]
    for row in read("plan_timed.json"):
        size = workload_sizes.WORKLOADS[row["workload"]]
        more = {"chip": "h200", "width": size.width, "source": "benchmarks/results/gpu: run_gpu.py"}
        rows.append({"model": f"{size.size}, {size.layers} layers", **more, **row})
    keys = ("chip", "model", "recipe", "width", "bound", "measured", "source")
    return [{key: {"bound": row["speed_over_bf16"], **row}[key] for key in keys} for row in rows]


def measured_toml() -> str:
    """Returns the text of the file: its own comments and defaults, then shares and cases."""
    head = re.split(r"\n\[shares\.(?!default)|\n\[\[cases", FILE.read_text("utf-8"))[0]
    tables = [(f"[shares.{name}]", own) for name, own in timed_shares().items()]
    tables += [("[[cases]]", case) for case in cases()]
    lines = [head.rstrip()]
    for title, table in tables:
        rounded = ((k, round(v, 3) if isinstance(v, float) else v) for k, v in table.items())
        lines += ["", title, *(f"{key} = {json.dumps(value)}" for key, value in rounded)]
    return "\n".join(lines) + "\n"


def check_calibration(options: argparse.Namespace) -> tuple[list[dict[str, Any]], bool]:
    """Writes the file, and returns each case with the interval that is made without it."""
    del options
    FILE.write_text(measured_toml(), "utf-8")
    _bound.MEASURED.update(tomllib.loads(FILE.read_text("utf-8")))
    rows = []
    for number, case in enumerate(known := _bound.MEASURED["cases"]):
        others = [*known[:number], *known[number + 1 :]]
        narrow = case["width"] < 4096
        low, high = (case["bound"] * f for f in error_of(case["chip"], narrow, others))
        is_inside = low <= case["measured"] <= high
        row = {key: case[key] for key in ("model", "recipe", "bound", "measured")}
        rows.append(row | {"interval": [round(low, 3), round(high, 3)], "inside": is_inside})
        print(rows[-1], flush=True)
    widths = [high - low for low, high in (error_of("h100", n, known) for n in (False, True))]
    print("width of an interval:", widths)
    is_ok = sum(row["inside"] for row in rows) >= len(rows) - 1 and max(widths) <= 0.25
    return rows, is_ok


SECTIONS = {
    "calibrate": check_calibration,
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
