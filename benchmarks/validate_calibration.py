"""Counts wrong verdicts of a validation over repetitions with other seeds.

    python benchmarks/validate_calibration.py
    python benchmarks/validate_calibration.py --json calibration.json
    python benchmarks/validate_calibration.py --repetitions 5 --steps 40 --recipes bf16

A byte-level GPT is trained from many seeds in FP32 and with each candidate:

    bf16, fp16   healthy recipes, which must not fail
    bf16 + 1 %   the records of bf16 with 1 % added to each held-out loss, which must be found; the
                 same for fp16
    slow         FP32 with a smaller learning rate, whose loss is larger for a real reason

The seeds are divided into groups, and each group is judged by the test of `jaxmp.validate`, with
its budget of 0.5 %. Groups of two and three seeds are compared, after different numbers of steps.
The gradients, which `validate` compares for one seed, are not part of these verdicts.
All seeds of a recipe train in one vmapped program. Requires pip install -e ".[examples]".
"""

import argparse
import dataclasses
import json
import platform
import shlex
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxmp
from jaxmp._validate._budget import Budget, choose_metrics, choose_training
from jaxmp._validate._compare import compare_metrics, compare_training, overall
from jaxmp._validate._rows import TrainingRecord
from validation_runs import LEARNING_RATE, byte_gpt, optimizer, text_batches

SIZE = dict(layers=1, width=32, heads=2, seq_len=32, batch_size=8, eval_batches=32)
PLANTED = 0.01
SLOW = 0.93  # of the learning rate
GROUPS = (2, 3)  # seeds
HEALTHY = ("bf16", "fp16")


def train(
    name: str, recipe: str, learning_rate: float, seeds: Sequence[int], steps: int, evals: int
) -> list[TrainingRecord]:
    """Trains all seeds in one vmapped program, and returns a record for each."""
    recipe_ = jaxmp.load_recipe(recipe)
    tx = optimizer(learning_rate)
    runs = [byte_gpt(recipe_, seed, **SIZE, tx=tx) for seed in seeds]
    streams = [text_batches(seed, SIZE["batch_size"], SIZE["seq_len"]) for seed in seeds]
    leaves = zip(*(jax.tree.leaves(run.state) for run in runs), strict=True)
    structure = jax.tree.structure(runs[0].state)
    states = jax.tree.unflatten(structure, [jnp.stack(leaf) for leaf in leaves])
    step = runs[0].step

    def loss_and_state(state: Any, batch: jax.Array) -> Any:
        state, metrics = step(state, batch)
        return state, metrics["loss"]

    advance = jax.jit(jax.vmap(loss_and_state), donate_argnums=0)
    evaluate = jax.jit(jax.vmap(runs[0].evaluate))
    eval_steps = [round(steps * n / evals) for n in range(evals + 1)]
    losses, held_out = [], []
    for number in range(steps + 1):
        if number in eval_steps:
            held_out.append(np.asarray(evaluate(states)["loss"]))
        if number < steps:
            states, loss = advance(states, np.stack([next(stream) for stream in streams]))
            losses.append(loss)
    by_seed = np.stack([np.asarray(loss) for loss in losses], axis=1)
    return [
        TrainingRecord(
            name=name,
            seed=seed,
            losses=tuple(map(float, by_seed[index])),
            loss_scales=(1.0,) * steps,
            eval_steps=tuple(eval_steps),
            evaluations={"loss": tuple(float(row[index]) for row in held_out)},
            weight_norms=(1.0,) * len(eval_steps),
        )
        for index, seed in enumerate(seeds)
    ]


def plant(record: TrainingRecord, difference: float) -> TrainingRecord:
    """Returns a record whose held-out losses are larger by a factor."""
    losses = tuple(loss * (1 + difference) for loss in record.evaluations["loss"])
    return dataclasses.replace(record, evaluations={"loss": losses})


def cut(record: TrainingRecord, index: int) -> TrainingRecord:
    """Returns the record of a run that ends with an earlier evaluation."""
    return dataclasses.replace(
        record,
        losses=record.losses[: record.eval_steps[index]],
        eval_steps=record.eval_steps[: index + 1],
        evaluations={name: row[: index + 1] for name, row in record.evaluations.items()},
        weight_norms=record.weight_norms[: index + 1],
    )


def judge(reference: list[TrainingRecord], candidate: list[TrainingRecord]) -> str:
    """Returns the verdict of `validate` on these seeds, from losses alone."""
    checks, _, _ = compare_metrics(reference, candidate, choose_metrics(reference), Budget())
    compare_training(reference, candidate, choose_training(reference, candidate))
    return overall(checks).verdict


def measure(
    repetitions: int, steps: int, recipes: Sequence[str] = HEALTHY, evals: int = 2
) -> dict[str, Any]:
    """Trains everything, and counts the verdicts of each candidate, group size and length."""
    seeds = range(repetitions * max(GROUPS))
    settings = {"fp32": ("fp32", 1.0), "slow": ("fp32", SLOW)}
    settings |= {recipe: (recipe, 1.0) for recipe in recipes}
    runs, seconds = {}, {}
    for name, (recipe, factor) in settings.items():
        since = time.process_time()
        runs[name] = train(name, recipe, factor * LEARNING_RATE, seeds, steps, evals)
        seconds[name] = round(time.process_time() - since, 1)
        print(f"{name}: {len(seeds)} seeds in {seconds[name]} s of CPU time", flush=True)
    for recipe in recipes:
        runs[f"{recipe} + 1 %"] = [plant(record, PLANTED) for record in runs[recipe]]
    reference = runs.pop("fp32")
    rows = []
    for name, index, group in (
        (name, index, group) for name in runs for index in range(1, evals + 1) for group in GROUPS
    ):
        first, second = ([cut(r, index) for r in records] for records in (reference, runs[name]))
        verdicts = Counter(
            judge(first[start : start + group], second[start : start + group])
            for start in range(0, repetitions * group, group)
        )
        ratios = [
            np.log(b.evaluations["loss"][-1] / a.evaluations["loss"][-1])
            for a, b in zip(first, second, strict=True)
        ]
        rows.append(
            {
                "candidate": name,
                "steps": first[0].eval_steps[-1],
                "seeds": group,
                **{verdict: verdicts[verdict] for verdict in ("pass", "inconclusive", "fail")},
                "mean_difference": float(np.expm1(np.mean(ratios))),
                "deviation": float(np.std(ratios, ddof=1)),
            }
        )
    final = np.array([record.evaluations["loss"][-1] for record in reference])
    return {
        "repetitions": repetitions,
        "size": SIZE,
        "planted": PLANTED,
        "slow_learning_rate": SLOW,
        "reference": {"loss": float(final.mean()), "deviation": float(np.log(final).std(ddof=1))},
        "cpu_seconds": seconds,
        "rows": rows,
    }


def table(report: dict[str, Any]) -> str:
    """Returns the counts as a Markdown table, for docs/validate.md."""
    lines = [
        "| candidate | mean difference | steps | seeds | passes | inconclusive | fails |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in report["rows"]:
        counts = " | ".join(str(row[verdict]) for verdict in ("pass", "inconclusive", "fail"))
        lines.append(
            f"| {row['candidate']} | {row['mean_difference']:+.2%} ± {row['deviation']:.2%} | "
            f"{row['steps']} | {row['seeds']} | {counts} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--recipes", nargs="+", default=list(HEALTHY), help="healthy recipes")
    parser.add_argument("--json", type=Path, help="a JSON file to write")
    options = parser.parse_args()
    report = measure(options.repetitions, options.steps, options.recipes)
    print(table(report))
    if options.json:
        head = {
            "command": shlex.join(["python", "benchmarks/validate_calibration.py", *sys.argv[1:]]),
            "machine": f"{jax.default_backend()} ({platform.machine()})",
            "versions": {
                "jax": jax.__version__,
                "flax": flax.__version__,
                "optax": optax.__version__,
                "jaxmp": jaxmp.__version__,
            },
        }
        options.json.write_text(json.dumps(head | report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
