"""Trains a GPT-2-sized model in every recipe on one NVIDIA GPU: loss, speed and peak memory.

    python benchmarks/gpu_smoke.py               # writes benchmarks/results/gpu_smoke-DEVICE.json
    python benchmarks/gpu_smoke.py --recipes bf16,fp16 --steps 20
    python benchmarks/gpu_smoke.py --toy         # small run on any machine, writes nothing

Requires pip install -e ".[examples,cuda13]" (or cuda12). All recipes use the same initial weights
and batches. Each runs in a separate process, because the peak memory of a device is counted from
the start of the process. A recipe that fails does not stop the others; the exit status is then 1. A
later run with --out adds the recipes that the file does not contain.
"""

import concurrent.futures
import dataclasses
import functools
import json
import multiprocessing
import os
import platform
import re
import shlex
import statistics
import sys
import time
import traceback
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import optax
import typer

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import jaxmp
from byte_gpt import GPT, even_batches, random_batch, standard_library_text
from gpu_record import earlier_report, environment, failure, gpu_state, versions_of, write_json
from train_lm import prepare

RECIPES = "fp32,tf32,bf16,bf16_params,fp16,fp16_params"
RESULTS = Path(__file__).parent / "results"


@dataclasses.dataclass(frozen=True)
class Size:
    """Sizes of the model and the batch, and the duration of the training."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    seq_len: int = 1024
    batch_size: int = 64
    microbatches: int = 8
    steps: int = 60
    steps_per_round: int = 10
    eval_batches: int = 8
    lr: float = 6e-4


TOY = Size(
    layers=2,
    width=64,
    heads=4,
    seq_len=32,
    batch_size=8,
    microbatches=2,
    steps=6,
    steps_per_round=2,
    eval_batches=2,
)


@dataclasses.dataclass(frozen=True)
class Result:
    """Measurements of one recipe."""

    recipe: str
    steps: int  # fewer than requested if the time was over
    held_out_loss: float
    skipped_steps: int
    compile_seconds: float  # the first step: trace, compile, run
    tokens_per_second: dict[str, float]  # median, min and max over rounds
    peak_bytes: int | None  # None if the device does not report it
    parameters: int


def main(
    recipes: Annotated[str, typer.Option(help="Names, separated by commas.")] = RECIPES,
    steps: Annotated[
        int | None, typer.Option(help="Training steps; default: those of the size.")
    ] = None,
    seconds: Annotated[
        float, typer.Option(help="Time limit of the timed steps of a recipe.")
    ] = 90.0,
    toy: Annotated[bool, typer.Option("--toy", help="Small sizes; runs on any machine.")] = False,
    out: Annotated[Path | None, typer.Option(help="JSON file to write.")] = None,
) -> None:
    """Trains a GPT-2-sized model in every recipe on one NVIDIA GPU: loss, speed and peak memory."""
    hardware = in_own_process(describe_hardware)
    size = TOY if toy else Size()
    size = dataclasses.replace(size, steps=steps or size.steps)
    file = file_for(hardware, toy, out)
    report: dict[str, Any] = {**header(hardware, size), "results": [], "failed": {}}
    earlier = earlier_report(out, report["environment"])
    if earlier.get("size") == report["size"]:
        report["results"] = earlier["results"]
    done = [row["recipe"] for row in report["results"]]
    for recipe in recipes.split(","):
        if recipe in done:
            continue
        try:
            result = in_own_process(functools.partial(measure, recipe, size, seconds))
        except Exception as error:  # the other recipes are still of use
            traceback.print_exc()
            report["failed"][recipe] = failure(error)
        else:
            report["results"].append({**dataclasses.asdict(result), "gpu": gpu_state()})
            print(json.dumps(report["results"][-1]), flush=True)
        write_json(file, report)  # after each recipe, so that an interrupted run keeps its results
    if file:
        print(f"Written: {file}")
    raise typer.Exit(any("repeat" in row for row in report["failed"].values()))


def in_own_process(job: Any) -> Any:
    """Runs `job` in a new process, and returns its result."""
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(max_workers=1, mp_context=spawn) as pool:
        return pool.submit(job).result()


# ---------------------------------------------------------------------------
# Separate process
# ---------------------------------------------------------------------------


def describe_hardware() -> dict[str, Any]:
    """Returns the device and its driver."""
    device = jax.devices()[0]
    return {
        "platform": device.platform,
        "device": device.device_kind,
        "runtime": device.client.platform_version.strip(),
        "host": f"{platform.machine()}, {os.cpu_count()} CPUs",
    }


def measure(recipe: str, size: Size, seconds: float) -> Result:
    """Trains for `size.steps` steps or at most `seconds`, and times rounds of steps."""
    text = standard_library_text()
    batch = functools.partial(random_batch, text.train, size.batch_size, size.seq_len, 0)
    model = GPT(size.layers, size.width, size.heads, size.seq_len)
    schedule = optax.warmup_cosine_decay_schedule(0.0, size.lr, max(1, size.steps // 5), size.steps)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95))
    state, train_step, loss_fn = prepare(recipe, model, tx, microbatches=size.microbatches)

    start = time.perf_counter()
    state, _ = jax.block_until_ready(train_step(state, batch(0)))
    compile_seconds = time.perf_counter() - start
    speeds, done = [], 1
    while done < size.steps and (time.perf_counter() - start - compile_seconds < seconds):
        tokens = [batch(done + k) for k in range(min(size.steps_per_round, size.steps - done))]
        since = time.perf_counter()
        for tokens_BS in tokens:
            state, loss = train_step(state, tokens_BS)
        loss.block_until_ready()
        done += len(tokens)
        speeds.append(len(tokens) * size.batch_size * size.seq_len / (time.perf_counter() - since))
    jaxmp.check(state)
    rows = size.batch_size // size.microbatches
    held_out = even_batches(text.held_out, size.eval_batches, rows, size.seq_len)
    stats = jax.devices()[0].memory_stats() or {}
    return Result(
        recipe=recipe,
        steps=done,
        held_out_loss=float(np.mean([loss_fn(state.params, tokens) for tokens in held_out])),
        skipped_steps=int(jaxmp.get_skip_stats(state).total),
        compile_seconds=compile_seconds,
        tokens_per_second=spread(speeds),
        peak_bytes=stats.get("peak_bytes_in_use"),
        parameters=sum(leaf.size for leaf in jax.tree.leaves(state.params)),
    )


def spread(values: list[float]) -> dict[str, float]:
    """Returns median, minimum, maximum and number of values."""
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "rounds": len(values),
    }


# ---------------------------------------------------------------------------
# Report
# ---------------------------------------------------------------------------


def file_for(hardware: dict[str, Any], toy: bool, out: Path | None) -> Path | None:
    """Returns the file to write; ends the program if it requires a GPU and there is none."""
    script = Path(sys.argv[0]).stem
    if hardware["platform"] != "gpu" and not toy:
        sys.exit(
            f"JAX sees no NVIDIA GPU here, only {hardware['device']}. On a machine with one, run\n"
            '    pip install -e ".[examples,cuda13]"\n'
            "For a small run without one, run\n"
            f"    python benchmarks/{script}.py --toy"
        )
    name = re.sub(r"[^a-z0-9]+", "-", hardware["device"].lower()).strip("-")
    return out if out or toy else RESULTS / f"{script}-{name}.json"


def header(hardware: dict[str, Any], size: Any) -> dict[str, Any]:
    """Returns everything that is required to reproduce the figures, without results."""
    versions = {"python": platform.python_version(), "jaxmp": jaxmp.__version__}
    versions |= versions_of(("jax", "jaxlib", "flax", "optax"))
    return {
        "command": shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "hardware": hardware,
        "versions": versions,
        "environment": environment(hardware["device"]),
        "size": dataclasses.asdict(size),
    }


if __name__ == "__main__":
    typer.run(main)
