"""Times the last layer and the loss of language models on one GPU, in each form that it can have.

    python benchmarks/loss_time.py --out loss_time.json
    python benchmarks/loss_time.py --toy      # small, on any machine

Shapes are those of GPT-2 and of eight layers of Llama 3 8B in benchmarks/workload_sizes.py, and
32,768 tokens of width 2,560 with 128,256 classes (marin#6596, which publishes 246,983 tokens/s for
an H100). Hidden states are bfloat16, and the kernel is FP32. The forms are those of
`jaxmp.losses.linear_cross_entropy`: rows of a chunk, the dtype of the logits, and whether the
maximum and the sum of exponentials take one pass over the logits or two. `stored` computes all
logits in bfloat16, and `softmax_cross_entropy` of them. The forms run in turn in each round.
"""

import functools
import os
import statistics
import sys
import unittest.mock
from collections.abc import Callable
from typing import Any

os.environ.setdefault("XLA_FLAGS", "")
os.environ["XLA_FLAGS"] += " --xla_gpu_enable_triton_gemm=false"  # as benchmarks/train_step.py

import jax
import jax.numpy as jnp

import loss_memory
from fp8_linear import seconds
from gpu_record import environment, failure, gpu_state, rotated, write_json
from jaxmp import losses
from jaxmp._core import _compat
from jaxmp.losses import _softmax
from result_file import parser_of
from workload_sizes import TOY, WORKLOADS

ROUNDS, REPEATS = 5, 4
# Name -> tokens, width and classes.
SHAPES = {
    name: (size.tokens, size.width, size.vocabulary)
    for name, size in WORKLOADS.items()
    if name in ("w1", "w5")
}
SHAPES["marin#6596"] = (32768, 2560, 128256)
TOYS = {name: (TOY["w1"].tokens, TOY["w1"].width, TOY["w1"].vocabulary) for name in SHAPES}


def two_passes(*args: Any, **options: Any) -> Any:
    """Computes the loss as on a CPU, where the sums take a pass of their own."""
    with _compat.context(target="cpu"):
        return loss_memory.from_hidden(*args, **options)


def in_groups_of_8(*args: Any, **options: Any) -> Any:
    """Computes the loss with exponentials of 8 classes, 16 bytes of bfloat16, added at a time."""
    with unittest.mock.patch.object(_softmax, "_GROUP", 8):
        return loss_memory.from_hidden(*args, **options)


def padded(hidden: Any, kernel: Any, labels: Any, *, by_bias: bool) -> Any:
    """Computes the loss of all classes but the last 47, which are those of GPT-2."""
    size = kernel.shape[1] - 47
    bias = jnp.where(jnp.arange(kernel.shape[1]) < size, 0.0, -jnp.inf)
    options: dict[str, Any] = {"bias": bias} if by_bias else {"num_classes": size}
    return losses.linear_cross_entropy(hidden, kernel, labels % size, **options)


def forms(name: str) -> dict[str, Callable[..., Any]]:
    """Returns the forms of the loss that are timed for a shape."""
    form = functools.partial
    most = 8192 if name == "w1" else 4096  # the rows of a chunk of FP32 logits by default
    one_pass = loss_memory.from_hidden
    found = {
        "float32, 1024 rows, two passes": form(two_passes, chunk=1024),
        f"float32, {most} rows, two passes": form(two_passes, chunk=most),
        f"float32, {most} rows": form(one_pass, chunk=most),
        f"bfloat16, {most} rows": form(one_pass, chunk=most, logits_dtype="bfloat16"),
        f"bfloat16, {2 * most} rows": form(one_pass, chunk=2 * most, logits_dtype="bfloat16"),
        f"bfloat16, {2 * most} rows, groups of 8": form(
            in_groups_of_8, chunk=2 * most, logits_dtype="bfloat16"
        ),
        f"bfloat16, {2 * most} rows, two passes": form(
            two_passes, chunk=2 * most, logits_dtype="bfloat16"
        ),
        f"float16, {most} rows": form(one_pass, chunk=most, logits_dtype="float16"),
    }
    if name == "w1":
        found["float32, 4096 rows"] = form(one_pass, chunk=4096)
        found["bfloat16, 4096 rows"] = form(one_pass, chunk=4096, logits_dtype="bfloat16")
        found["float32, 16384 rows"] = form(one_pass, chunk=16384)
        found["stored bfloat16"] = loss_memory.from_logits
        found["float32, padded by a bias"] = form(padded, by_bias=True)
        found["float32, padded by num_classes"] = form(padded, by_bias=False)
    return found


def main() -> int:
    """Prints and writes the milliseconds of each form; returns 1 if one failed."""
    parser = parser_of(__doc__, SHAPES)
    parser.add_argument("--toy", action="store_true")
    options = parser.parse_args()
    if jax.default_backend() != "gpu" and not options.toy:
        sys.exit("The benchmark requires a GPU. Without one, run it with --toy at small sizes.")
    report: dict[str, Any] = {"environment": environment(jax.devices()[0].device_kind), "rows": []}
    failed = False
    for name in options.only:
        tokens, width, classes = (TOYS if options.toy else SHAPES)[name]
        hidden = jax.random.normal(jax.random.key(0), (tokens, width), jnp.bfloat16)
        kernel = 0.02 * jax.random.normal(jax.random.key(1), (width, classes))
        args = hidden, kernel, jnp.arange(tokens) % classes
        steps = {way: jax.jit(jax.value_and_grad(fn, (0, 1))) for way, fn in forms(name).items()}
        times: dict[str, list[float]] = {}
        row: dict[str, Any] = {"workload": name, "tokens": tokens, "milliseconds": {}, "failed": {}}
        report["rows"].append(row)
        for index in range(ROUNDS):
            for way in rotated([*steps], index):
                if way in row["failed"]:
                    continue
                try:
                    times.setdefault(way, []).append(seconds(steps[way], args, REPEATS))
                except Exception as error:  # the other forms are still of use
                    row["failed"][way], failed = failure(error), True
                    continue
                median = statistics.median(times[way])
                row["milliseconds"][way] = round(1e3 * median, 3)
                row["gpu"] = gpu_state()
                write_json(options.out, report)
        print(row, flush=True)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
