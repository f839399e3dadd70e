"""Compiles matmuls of aligned and misaligned widths for a GPU, and measures them on one.

    python benchmarks/alignment.py --out benchmarks/results/alignment_h200.json
    python benchmarks/alignment.py --measure --out alignment.json      # on a GPU: also the times

A matmul of 8,192 rows in bfloat16 with its gradients, for each width. The program is compiled for
an H200 that is not present: pip install -e ".[aot]". Counted are its kernels, the bytes that they
read and write, and temporary memory.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp

from gpt_programs import TARGET, count_step
from jaxmp._core._targets import get_target
from result_file import parser_of, write_result

ROWS = 8192
WIDTHS = (500, 504, 512)
ROUNDS, CALLS = 9, 50


def gradients(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the gradients of a mean square of a matmul."""
    loss = lambda w, x: jnp.square((x @ w).astype(jnp.float32)).mean()
    return jax.grad(loss, argnums=(0, 1))(w, x)


def compiled_row(width: int) -> dict[str, Any]:
    """Returns the counts of the program for a width."""
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.bfloat16)
    counts = count_step("", "", gradients, shape(width, width), shape(ROWS, width))
    names = ("kernels", "accessed", "temporary")
    return {"width": width, **{name: getattr(counts, name) for name in names}}


def milliseconds(width: int) -> float:
    """Returns the median time of a call on the present device."""
    step = jax.jit(gradients)
    w, x = (jnp.ones((rows, width), jnp.bfloat16) for rows in (width, ROWS))
    jax.block_until_ready(step(w, x))
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(CALLS):
            result = step(w, x)
        jax.block_until_ready(result)
        times.append((time.perf_counter() - start) / CALLS)
    return 1000 * statistics.median(times)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--measure", action="store_true", help="measure times on this GPU, too")
    options = parser.parse_args()
    rows = [compiled_row(width) for width in WIDTHS]
    target = f"{get_target(TARGET).kind} (compiled, nothing was run)"
    if options.measure:
        target = jax.devices()[0].device_kind
        rows = [row | {"milliseconds": milliseconds(row["width"])} for row in rows]
    for row in rows:
        print(row)
    write_result(options.out, target=target, rows=rows)


if __name__ == "__main__":
    main()
