"""Measures the rates of one GPU that limit a training step: matmuls in bf16 and FP8, and a copy.

    python benchmarks/ceilings.py --out ceilings.json
    python benchmarks/ceilings.py --toy      # small, on any machine

Matmuls are 8192 x 8192 x 8192 on random data; the copy reads and writes 4 GiB each.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if "--toy" in sys.argv:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
from jax import lax

REPEATS = 20


def seconds_of(fn: Callable[..., jax.Array], *args: jax.Array) -> float:
    """Returns the median of the seconds of a call, in three series of calls."""
    jax.block_until_ready(fn(*args))
    series = []
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(REPEATS):
            result = fn(*args)
        jax.block_until_ready(result)
        series.append((time.perf_counter() - start) / REPEATS)
    return statistics.median(series)


def matmul_tflops(size: int, dtype: Any) -> float:
    """Returns the TFLOP/s of a square matmul with bf16 results."""
    draw = lambda seed: jax.random.normal(jax.random.key(seed), (size, size)).astype(dtype)
    multiply = jax.jit(
        lambda a, b: lax.dot_general(
            a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.bfloat16
        )
    )
    return 2 * size**3 / seconds_of(multiply, draw(0), draw(1)) / 1e12


def copy_terabytes(size: int) -> float:
    """Returns the TB/s of a kernel that reads and writes `size` bytes each."""
    source = jnp.ones((size // 4,), jnp.float32)
    return 2 * size / seconds_of(jax.jit(lambda x: x + 1), source) / 1e12


def main() -> None:
    """Prints the rates."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--out", type=Path, help="a JSON file to write")
    options = parser.parse_args()
    size = 256 if options.toy else 8192
    report = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "size": size,
        "bf16_tflops": round(matmul_tflops(size, jnp.bfloat16), 3),
        "fp8_tflops": round(matmul_tflops(size, jnp.float8_e4m3fn), 3),
        "copy_terabytes_per_second": round(copy_terabytes(2**20 if options.toy else 2**32), 3),
    }
    print(json.dumps(report, indent=2))
    if options.out:
        options.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
