"""Validates precisions on models of the examples, and records the verdicts.

    python benchmarks/validate_models.py                        # all experiments
    python benchmarks/validate_models.py --only byte_gpt digits
    python benchmarks/validate_models.py --out results --html pages    # folders to write to
    python benchmarks/validate_models.py --only small --steps 10 --seeds 2

Experiments:

    byte_gpt       byte-level GPT in Linen on real text: bf16, fp16 and fp8 against fp32
    byte_gpt_nnx   the same in NNX
    digits         CNN with batch statistics on handwritten digits
    small, large   the same GPT with 30,000 and with 670,000 parameters, healthy recipes and two
                   without a safeguard: the verdicts of the small one should be those of the large
    adam           training in FP16 throughout, with Adam's default epsilon and with two remedies
    clipping       scaled FP16 gradients that are clipped before they are unscaled, and after it
    clipping_large the same with 85.5 million parameters; about 75 CPU minutes

Each experiment writes OUT/validation_NAME_cpu.json: verdicts, comparisons and errors of gradients,
without the curves, which are in the HTML pages. Requires pip install -e ".[examples]".
"""

import argparse
import functools
import json
import math
import platform
import shlex
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import flax
import jax
import optax

import jaxmp
from jaxmp._validate._sections import figure_text
from validation_runs import (
    SMALL,
    adam_in_fp16,
    byte_gpt,
    byte_gpt_nnx,
    clipping_by_hand,
    digits,
    optimizer,
)

FP16 = jaxmp.load_recipe("fp16")
HEALTHY = {name: jaxmp.load_recipe(name) for name in ("bf16", "fp16", "fp8")}
UNSAFE = {
    "bf16, no masters": jaxmp.load_recipe("bf16_params").replace(master="none"),
    "fp16, no loss scale": FP16.replace(loss_scale="none"),
}
PURE_FP16 = jaxmp.load_recipe("fp16_params").replace(master="none", loss_scale="none")
ADAM = {
    "fp16, epsilon 1e-8": PURE_FP16.replace(name="fp16, epsilon 1e-8"),
    "fp16, epsilon 1e-4": PURE_FP16.replace(name="fp16, epsilon 1e-4"),
    "fp16_params": jaxmp.load_recipe("fp16_params"),
}

CLIPPING = {
    name: FP16.replace(name=name, loss_scale="none")
    for name in ("clip, then unscale", "unscale, then clip")
}

LARGE = dict(layers=3, width=128, heads=4, seq_len=64, batch_size=8, eval_batches=16)
# The layers of GPT-2 small, with a learning rate that suits their width.
LARGEST = dict(layers=12, width=768, heads=12, seq_len=128, batch_size=8, eval_batches=8)
LARGEST_RATE = 3e-4
# Of the small and the large GPT. Updates are a third of those of the other experiments, so that
# parameters in 16 bits lose more of them.
MODERATE_RATE = 1e-3


class Experiment(NamedTuple):
    """Run, candidates, and number of steps and seeds."""

    make_run: Any
    candidates: Mapping[str, jaxmp.Recipe]
    steps: int
    seeds: int


def of_size(size: Mapping[str, int]) -> Any:
    """Returns the function that makes runs of a GPT of this size."""
    return functools.partial(byte_gpt, **size, tx=optimizer(MODERATE_RATE))


EXPERIMENTS = {
    "byte_gpt": Experiment(byte_gpt, HEALTHY, 300, 3),
    "byte_gpt_nnx": Experiment(byte_gpt_nnx, HEALTHY, 300, 3),
    "digits": Experiment(digits, {k: HEALTHY[k] for k in ("bf16", "fp16")}, 210, 8),
    "small": Experiment(of_size(SMALL), HEALTHY | UNSAFE, 200, 3),
    "large": Experiment(of_size(LARGE), HEALTHY | UNSAFE, 200, 3),
    "adam": Experiment(adam_in_fp16, ADAM, 100, 3),
    "clipping": Experiment(clipping_by_hand, CLIPPING, 100, 3),
    "clipping_large": Experiment(
        functools.partial(clipping_by_hand, **LARGEST, learning_rate=LARGEST_RATE), CLIPPING, 40, 3
    ),
}


def run(name: str, steps: int | None, seeds: int | None) -> jaxmp.typing.ValidationReport:
    """Runs an experiment, with other numbers of steps and seeds if they are not None."""
    experiment = EXPERIMENTS[name]
    return jaxmp.validate(
        experiment.make_run,
        experiment.candidates,
        steps=steps or experiment.steps,
        seeds=seeds or experiment.seeds,
        progress=False,
    )


def summary(report: jaxmp.typing.ValidationReport) -> dict[str, Any]:
    """Returns a report as JSON data, without the curves and the rows of modules."""
    data: dict[str, Any] = report.to_dict()
    for candidate in data["candidates"]:
        modules = candidate.pop("modules")
        largest = max((row["gradient_error"] or 0.0 for row in modules), default=0.0)
        candidate["largest_module_error"] = largest
    seconds = sum(float(run["seconds"]) for run in data.pop("runs"))
    return data | {"training_seconds": round(seconds, 1)}


def table(name: str, report: Mapping[str, Any]) -> str:
    """Returns the results of an experiment as a Markdown table, for docs/validate.md."""
    metric, steps, seeds = report["metric"], report["steps"], len(report["seeds"])
    lines = [
        f"| {name}: {steps} steps, {seeds} seeds | verdict | held-out {metric['name']} | "
        "95 % interval | gradient error |",
        "|---|---|---:|---:|---:|",
    ]
    for candidate in report["candidates"]:
        checks = {check["name"]: check for check in candidate["checks"]}
        decisive = candidate["checks"][0]
        gradient = checks.get("gradient_error", {"value": "nan"})["value"]
        bounds = " to ".join(figure(decisive[bound], metric["scale"]) for bound in ("low", "high"))
        lines.append(
            f"| {candidate['name']} | {candidate['verdict']} | "
            f"{figure(decisive['value'], metric['scale'])} | {bounds} | "
            f"{figure(gradient, 'relative').lstrip('+')} |"
        )
    return "\n".join(lines)


def figure(value: float | str | None, scale: str) -> str:
    """Returns a figure of a comparison as text."""
    if value is None or not math.isfinite(float(value)):
        return "" if value is None else str(value)
    return figure_text(float(value), scale)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--only", nargs="+", choices=EXPERIMENTS, default=list(EXPERIMENTS))
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--out", type=Path, help="folder for JSON files")
    parser.add_argument("--html", type=Path, help="folder for HTML pages")
    options = parser.parse_args()
    command = shlex.join(["python", "benchmarks/validate_models.py", *sys.argv[1:]])
    for name in options.only:
        since = time.process_time()
        report = run(name, options.steps, options.seeds)
        print(f"== {name}\n{report}\n", flush=True)
        if options.html:
            options.html.mkdir(parents=True, exist_ok=True)
            (options.html / f"{name}.html").write_text(report.to_html(), encoding="utf-8")
        if options.out:
            options.out.mkdir(parents=True, exist_ok=True)
            head = {
                "command": command,
                "machine": f"{jax.default_backend()} ({platform.machine()})",
                "cpu_seconds": round(time.process_time() - since),
                "versions": {
                    "jax": jax.__version__,
                    "flax": flax.__version__,
                    "optax": optax.__version__,
                    "jaxmp": jaxmp.__version__,
                },
            }
            path = options.out / f"validation_{name}_cpu.json"
            path.write_text(json.dumps(head | summary(report), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
