"""Measures the temporary memory of the compiled output layer and loss of a language model.

    python benchmarks/loss_memory.py                             # this machine's CPU
    python benchmarks/loss_memory.py --target h200               # cross-compiled for an H200
    python benchmarks/loss_memory.py --out loss_memory.json      # also write the figures

Three programs compute the same loss and gradients (of the last hidden states and of an FP32
kernel), with matmul operands in the dtype of the hidden states:

    plain                  logits in FP32 (the matmul, then `.astype(float32)`), optax
    softmax_cross_entropy  logits in the dtype of the hidden states, `jaxmp.losses`
    linear_cross_entropy   no stored logits: `jaxmp.losses`, a chunk of rows at a time

Sizes are those of GPT-2 and of Llama 3 8B in benchmarks/workload_sizes.py. A chunk of 512, 2,048,
4,096 or 8,192 rows is the default for GPT-2 on a CPU, and on GPUs with 8, 24, and 32 GB or more;
half of that for Llama, and twice as many where the logits are bfloat16. The bytes are those that
XLA reports (`memory_analysis`) in addition to arguments and results. Nothing is run. The H200
requires XLA's GPU compiler, which `pip install -e ".[aot]"` installs.
"""

import functools
import os
import platform

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import optax
from jax.sharding import SingleDeviceSharding

from jaxmp import losses
from jaxmp._core import _compat
from jaxmp._core._targets import get_target, targets
from jaxmp._tools.audit._compile import describe
from result_file import parser_of, write_result
from workload_sizes import WORKLOADS


def product(hidden, kernel):
    return hidden @ kernel.astype(hidden.dtype)


def plain(hidden, kernel, labels):
    logits = product(hidden, kernel).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def from_logits(hidden, kernel, labels):
    return losses.softmax_cross_entropy(product(hidden, kernel), labels)


def from_hidden(hidden, kernel, labels, **options):
    return losses.linear_cross_entropy(hidden, kernel, labels, **options)


WAYS = {
    "plain": plain,
    "softmax_cross_entropy": from_logits,
    "linear_cross_entropy": from_hidden,
}


def compiled(way, dtype, target, *, tokens, features, classes):
    """Compiles loss and gradients for "cpu" or a GPU."""
    device = jax.devices("cpu")[0]
    if target != "cpu":
        (device,) = _compat.described_gpus(describe(get_target(target)), 1)
    place = lambda shape, dtype: jax.ShapeDtypeStruct(
        shape, dtype, sharding=SingleDeviceSharding(device)
    )
    args = (
        place((tokens, features), dtype),
        place((features, classes), jnp.float32),
        place((tokens,), jnp.int32),
    )
    run = jax.jit(jax.value_and_grad(way, (0, 1)))
    if target == "cpu":
        return run.trace(*args).lower().compile()
    with _compat.context(target="gpu"):
        lowered = run.trace(*args).lower(lowering_platforms=("cuda",))
    # XLA cannot run candidates on a GPU that is not present.
    return lowered.compile(compiler_options={"xla_gpu_autotune_level": 0})


def variants(target, classes, dtype):
    """Returns the programs that are compiled: (way, chunk, dtype of the logits)."""
    rows = [("plain", None, None), ("softmax_cross_entropy", None, None)]
    default = [("linear_cross_entropy", None, None)]
    if target == "cpu" or dtype == "float32":
        return rows + default
    half = 1 if classes < 100_000 else 2
    rows += [("linear_cross_entropy", chunk // half, None) for chunk in (1024, 2048, 4096)]
    return rows + default + [(*default[0][:2], logits) for logits in ("float16", "bfloat16")]


def measure(target, *, tokens, features, classes):
    """Measures all combinations of dtype, program and chunk size; returns a list of rows."""
    rows, reference = [], 0
    for dtype in ("float32", "bfloat16"):
        for name, chunk, logits in variants(target, classes, dtype):
            way = WAYS[name]
            if name == "linear_cross_entropy":
                way = functools.partial(way, chunk=chunk, logits_dtype=logits)
            sizes = {"tokens": tokens, "features": features, "classes": classes}
            program = compiled(way, jnp.dtype(dtype), target, **sizes)
            found = program.memory_analysis().temp_size_in_bytes
            if name == "plain":
                reference = found
            rows.append(
                {
                    "dtype": dtype,
                    "way": name,
                    "chunk": chunk,
                    "logits": logits,
                    "temp_bytes": found,
                    "of_plain": round(found / reference, 4),
                }
            )
    return rows


def main():
    parser = parser_of(__doc__)
    parser.add_argument("--target", default="cpu", choices=["cpu", *targets()])
    options = parser.parse_args()
    where = platform.machine() if options.target == "cpu" else get_target(options.target).kind
    print(f"{where}; jax {jax.__version__}")
    workloads = {}
    for name in ("w1", "w5"):
        size = WORKLOADS[name]
        sizes = {"tokens": size.tokens, "features": size.width, "classes": size.vocabulary}
        rows = measure(options.target, **sizes)
        workloads[size.size] = {"sizes": sizes, "rows": rows}
        print(f"{size.size}: " + ", ".join(f"{k} {v}" for k, v in sizes.items()))
        print(f"{'hidden':10}{'loss':24}{'logits':10}{'chunk':>8}{'temp MB':>10}{'of plain':>10}")
        for row in rows:
            print(
                f"{row['dtype']:10}{row['way']:24}{row['logits'] or '':10}{row['chunk'] or '':>8}"
                f"{row['temp_bytes'] / 1e6:10.1f}{row['of_plain']:10.1%}"
            )
    target = where if options.target == "cpu" else f"{where} (compiled, nothing was run)"
    write_result(options.out, target=target, workloads=workloads)


if __name__ == "__main__":
    main()
