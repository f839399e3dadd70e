"""Trains the byte-level GPT of the examples in BF16 and in FP8, and compares held-out losses.

    python benchmarks/fp8_training.py                      # 400 steps, about the example's defaults
    python benchmarks/fp8_training.py --steps 200 --seeds 3 --out fp8_training.json
    python benchmarks/fp8_training.py --steps 200 --only delayed    # and BF16

Requires pip install -e ".[examples]". On a CPU, the matmuls are emulated: operands are rounded to
FP8 and multiplied in FP32. The losses are meaningful, and the times are not. All runs of a seed use
the same initial weights and batches.
"""

import argparse
import json
import platform
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import flax
import jax
import optax

from jaxmp import PolicyMap, Rule, fp8, load_recipe
from train_lm import Framework, train

BF16 = load_recipe("bf16")
HEAD = Rule("lm_head", "o=f32,matmul=default", why="the last layer", required=False)
SCALINGS = {
    "current": fp8.CurrentScaling(),
    "current, scales by amax": fp8.CurrentScaling(power_of_two=False),
    "delayed": fp8.DelayedScaling(),
    "current, high-precision wgrad": fp8.CurrentScaling(wgrad="high"),
    "rowwise": fp8.RowwiseScaling(),
}


def recipe(scaling):
    default = "p=f32,c=bf16,o=f32,matmul=fp8"
    return load_recipe(PolicyMap(default, [HEAD], scaling)).replace(name=f"fp8, {scaling.kind}")


# Scalings that are trained in both frameworks; the others are trained in Linen.
BOTH = ("current", "delayed")


def runs(only):
    """Returns (name, recipe, framework) of every run, with BF16 first in each framework."""
    for framework in Framework:
        names = [name for name in SCALINGS if framework is Framework.linen or name in BOTH]
        names = [name for name in names if name in only]
        if names:
            yield "bf16", BF16, framework
        for name in names:
            yield name, recipe(SCALINGS[name]), framework


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--only", nargs="+", default=list(SCALINGS), choices=list(SCALINGS))
    parser.add_argument("--out", type=Path, help="a JSON file to write")
    options = parser.parse_args()
    rows, bf16, folder = [], {}, Path(tempfile.mkdtemp())
    for name, one, framework in runs(options.only):
        file = folder / f"{name}.toml"
        file.write_text(one.to_toml())
        losses = []
        for seed in range(options.seeds):
            fixed = {"steps": options.steps, "seed": seed, "eval_every": options.steps}
            run = train(str(file), framework, **fixed)
            losses.append(run.held_out_losses[options.steps])
        reference = bf16.setdefault(framework, losses)
        over = [loss / own - 1 for loss, own in zip(losses, reference, strict=True)]
        rows.append(
            {"scaling": name, "framework": framework.value, "losses": losses, "over_bf16": over}
        )
        print(f"{name:30} {framework.value:6}", *(f"{each:+.2%}" for each in over), flush=True)
    if options.out:
        report = {
            "command": "python " + " ".join(sys.argv),
            "device": f"{jax.default_backend()} ({platform.machine()}), FP8 products emulated",
            "versions": {
                "jax": jax.__version__,
                "flax": flax.__version__,
                "optax": optax.__version__,
            },
            "steps": options.steps,
            "rows": rows,
        }
        options.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
