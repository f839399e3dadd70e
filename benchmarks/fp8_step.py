"""Times complete training steps in BF16 and in FP8, at the widths of GPT-2 1.5B and Llama 3 8B.

    python benchmarks/fp8_step.py                    # on the GPU of this machine
    python benchmarks/fp8_step.py --workload w2      # one of the two models
    python benchmarks/fp8_step.py --toy              # small run on any machine, writes nothing
    python benchmarks/fp8_step.py --workload w5 --count   # bytes and kernels, compiled for an H200

Runs the programs of benchmarks/train_step.py in BF16 and under each FP8 recipe, and writes
benchmarks/results/fp8_step-WORKLOAD-DEVICE.json. A later run adds its rounds to that file.
"""

import argparse
import importlib
import os
import re
import sys
from pathlib import Path

if "--toy" in sys.argv or "--count" in sys.argv:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp

import train_step
import workload_sizes

RESULTS = Path(__file__).parent / "results"
WORKLOADS = ("w2", "w5")
ARMS = ("jaxmp-bf16", "jaxmp-fp8", "jaxmp-fp8_delayed", "jaxmp-fp8_rowwise")


def print_counts(workload: str) -> None:
    """Compiles the step of three recipes for an H200, and prints its bytes and kernels."""
    count_step = importlib.import_module("gpt_programs").count_step  # which selects the CPU
    size = workload_sizes.WORKLOADS[workload]
    tokens = jax.ShapeDtypeStruct((size.batch, size.length + 1), jnp.int32)
    for name in ARMS[:3]:
        arm = train_step.arms()[name](size)
        row = count_step(name, "linen", arm.step, jax.eval_shape(arm.init), tokens)
        moved = f"{row.accessed / 1e9:8.1f} GB{row.kernels:7,} kernels"
        print(f"{workload} {name:20}{moved}{row.temporary / 1e9:7.1f} GB temporary", flush=True)


def main() -> int:
    """Times each model; returns 1 if a program failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--workload", nargs=1, choices=WORKLOADS, default=WORKLOADS)
    parser.add_argument("--rounds", default="5")
    parser.add_argument("--steps", default="10", help="timed steps per round")
    parser.add_argument("--toy", action="store_true", help="small sizes, on the CPU")
    parser.add_argument("--count", action="store_true", help="compile for an H200, and count")
    options = parser.parse_args()
    if options.count:
        for name in options.workload:
            print_counts(name)
        return 0
    device = re.sub(r"[^a-z0-9]+", "-", jax.devices()[0].device_kind.lower()).strip("-")
    failed = 0
    for name in options.workload:
        out = ["--out", str(RESULTS / f"fp8_step-{name}-{device}.json")]
        arguments = [name, "--rounds", options.rounds, "--steps", options.steps, "--arms", *ARMS]
        failed |= train_step.main([*arguments, *(["--toy"] if options.toy else out)])
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
