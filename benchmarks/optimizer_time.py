"""Times the optimizer step alone on one GPU, in each layout of parameters, over its byte limit.

    python benchmarks/optimizer_time.py --out optimizer_time.json
    python benchmarks/optimizer_time.py --toy      # small, on any machine

The step is AdamW with donated state and FP32 gradients, with and without clipping and the check for
non-finite gradients; benchmarks/optimizer_bytes.py counts its bytes. The limit is the time in which
a copy on the same GPU moves that many bytes.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jaxmp
from ceilings import REPEATS, copy_terabytes, time

# Parameters, in leaves of 1024 columns and up to 32,768 rows.
SIZES = {"124M": 124_000_000, "1.3B": 1_300_000_000, "3B": 3_000_000_000}
RECIPES = {
    "fp32 parameters": jaxmp.load_recipe("bf16"),
    "bf16 + FP32 masters": jaxmp.load_recipe("bf16_params"),
    "bf16, packed": jaxmp.load_recipe("bf16_params").replace(master="packed"),
}
FLOORS = {"fp32 parameters": 28, "bf16 + FP32 masters": 30, "bf16, packed": 28}


def seconds_of_step(recipe: Any, parameters: int) -> float:
    """Returns the seconds of an update, the median of three series."""
    rows, columns = max(parameters // 1024, 64), 1024
    leaf = min(32768, max(rows // 4, 1))
    params = {str(i): jnp.ones((leaf, columns)) for i in range(max(rows // leaf, 1))}
    grads = jax.tree.map(lambda p: p * 1e-3, params)
    tx = recipe.optimizer(optax.adamw(1e-3))
    state = jaxmp.TrainState.create(apply_fn=lambda *_: None, params=params, tx=tx)
    del params
    update = lambda state, grads: state.apply_gradients(grads=grads)
    step = jax.jit(update, donate_argnums=0)
    state, series = jax.block_until_ready(step(state, grads)), []
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(REPEATS):
            state = step(state, grads)
        jax.block_until_ready(state)
        series.append((time.perf_counter() - start) / REPEATS)
    return sorted(series)[1]


def main() -> None:
    """Prints and writes a row for each size, layout and setting of the check."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--out", type=Path, help="a JSON file to write")
    options = parser.parse_args()
    if not options.toy and jax.default_backend() != "gpu":
        sys.exit("The benchmark requires a GPU. Without one, run it with --toy at small sizes.")
    rate = copy_terabytes(2**20 if options.toy else 2**32) * 1e12
    rows: list[dict[str, Any]] = []
    for name, parameters in ({"toy": 1_000_000} if options.toy else SIZES).items():
        for layout, recipe in RECIPES.items():
            for skip in ("none", "auto"):
                count = FLOORS[layout] + 4 * (skip == "auto")
                limit = parameters * count / rate
                row = {"parameters": name, "layout": layout, "skip": skip, "bytes": count}
                try:
                    seconds = seconds_of_step(recipe.replace(skip=skip), parameters)
                except jax.errors.JaxRuntimeError as error:  # too little memory is a result too
                    row |= {"failed": str(error).splitlines()[0]}
                else:
                    row |= {
                        "milliseconds": round(1e3 * seconds, 3),
                        "over_limit": round(seconds / limit, 3),
                    }
                rows.append(row)
                print(json.dumps(row), flush=True)
                if options.out:
                    report = {
                        "device": jax.devices()[0].device_kind,
                        "jax": jax.__version__,
                        "copy_terabytes_per_second": rate / 1e12,
                        "rows": rows,
                    }
                    options.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
