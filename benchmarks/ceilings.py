"""Measures the rates of one GPU that limit a training step: matmuls in bf16 and FP8, and a copy.

    python benchmarks/ceilings.py --out ceilings.json
    python benchmarks/ceilings.py --toy      # small, on any machine

Matmuls are 8192 x 8192 x 8192 on random data; the copy reads and writes 1 GiB each. The series of
all three alternate, and each rate is given as the median and the values of its series.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

if "--toy" in sys.argv:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
from jax import lax

from gpu_record import environment, failure, gpu_state, rotated, write_json
from result_file import parser_of

REPEATS = 100  # 0.05 to 0.15 seconds on an H200
SERIES = 7
COPIED = 2**30  # bytes, many times the cache of a GPU
Call = Callable[[], jax.Array]


def seconds_of(call: Call) -> float:
    """Returns the seconds of a call, the mean of a series."""
    start = time.perf_counter()
    for _ in range(REPEATS):
        result = call()
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / REPEATS


def matmul(size: int, dtype: Any) -> Call:
    """Returns a square matmul with bf16 results."""
    draw = lambda seed: jax.random.normal(jax.random.key(seed), (size, size)).astype(dtype)
    multiply = jax.jit(
        lambda a, b: lax.dot_general(
            a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.bfloat16
        )
    )
    a, b = draw(0), draw(1)
    return lambda: multiply(a, b)


def copy(size: int) -> Call:
    """Returns a kernel that reads and writes `size` bytes each."""
    source = jnp.ones((size // 4,), jnp.float32)
    add = jax.jit(lambda x: x + 1)
    return lambda: add(source)


def copy_terabytes(size: int) -> float:
    """Returns the TB/s of a kernel that reads and writes `size` bytes each."""
    call = copy(size)
    jax.block_until_ready(call())
    return 2 * size / statistics.median(seconds_of(call) for _ in range(3)) / 1e12


def main() -> int:
    """Prints the rates; returns 1 if one could not be measured."""
    parser = parser_of(__doc__)
    parser.add_argument("--toy", action="store_true")
    options = parser.parse_args()
    size, copied = (256, 2**20) if options.toy else (8192, COPIED)
    work = 2 * size**3 / 1e12
    # Name -> (function that makes the call, its TFLOPs or TB).
    rates = {
        "bf16_tflops": (lambda: matmul(size, jnp.bfloat16), work),
        "fp8_tflops": (lambda: matmul(size, jnp.float8_e4m3fn), work),
        "copy_terabytes_per_second": (lambda: copy(copied), 2 * copied / 1e12),
    }
    report: dict[str, Any] = {
        "environment": environment(jax.devices()[0].device_kind),
        "size": size,
    }
    calls: dict[str, Call] = {}
    for name, (make, _) in rates.items():
        try:
            call = make()
            jax.block_until_ready(call())
        except Exception as error:  # the other rates are still of use
            report[name] = failure(error)
        else:
            calls[name] = call
    series: dict[str, list[float]] = {name: [] for name in calls}
    for index in range(SERIES):
        for name in rotated(list(calls), index):
            series[name].append(rates[name][1] / seconds_of(calls[name]))
    for name, values in series.items():
        median = statistics.median(values)
        report[name] = {"median": round(median, 3), "series": [round(v, 3) for v in values]}
    report["gpu"] = gpu_state()
    print(json.dumps(report, indent=2))
    write_json(options.out, report)
    return int(len(calls) < len(rates))


if __name__ == "__main__":
    raise SystemExit(main())
