"""Measures the temporary memory of the compiled output layer and loss of a language model.

    python benchmarks/loss_memory.py                             # this machine's CPU
    python benchmarks/loss_memory.py --target h200               # cross-compiled for an H200
    python benchmarks/loss_memory.py --out loss_memory.json      # also write the figures

Three programs compute the same loss and gradients (of the last hidden states and of an FP32
kernel), with matmul operands in the dtype of the hidden states:

    plain                  logits in FP32 (the matmul, then `.astype(float32)`), optax
    softmax_cross_entropy  logits in the dtype of the hidden states, `jaxmp.losses`
    linear_cross_entropy   no stored logits: `jaxmp.losses`, a chunk of rows at a time

The bytes are those that XLA reports (`memory_analysis`) in addition to arguments and results.
Nothing is run. The H200 requires XLA's GPU compiler: pip install -e ".[aot]".
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
from jaxmp._audit._compile import GPUS, describe
from jaxmp._core import _compat
from result_file import parser_of, write_result


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
        (device,) = _compat.described_gpus(describe(GPUS[target]), 1)
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


def measure(target, *, tokens, features, classes, chunks=(None,)):
    """Measures all combinations of dtype, program and chunk size; returns a list of rows."""
    rows, reference = [], 0
    for dtype in ("float32", "bfloat16"):
        ways = [("plain", None), ("softmax_cross_entropy", None)]
        ways += [("linear_cross_entropy", chunk) for chunk in chunks]
        for name, chunk in ways:
            way = WAYS[name] if chunk is None else functools.partial(from_hidden, chunk=chunk)
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
                    "temp_bytes": found,
                    "of_plain": round(found / reference, 4),
                }
            )
    return rows


def main():
    parser = parser_of(__doc__)
    parser.add_argument("--target", default="cpu", choices=["cpu", *GPUS])
    options = parser.parse_args()
    sizes = {"tokens": 8192, "features": 768, "classes": 50257}
    rows = measure(options.target, **sizes, chunks=(None, 256, 1024, 2048))
    where = platform.machine() if options.target == "cpu" else GPUS[options.target].kind
    print(f"{where}; jax {jax.__version__}; " + ", ".join(f"{k} {v}" for k, v in sizes.items()))
    print(f"{'hidden':10}{'loss':24}{'chunk':>8}{'temp MB':>10}{'of plain':>10}")
    for row in rows:
        print(
            f"{row['dtype']:10}{row['way']:24}{row['chunk'] or '':>8}"
            f"{row['temp_bytes'] / 1e6:10.1f}{row['of_plain']:10.1%}"
        )
    target = where if options.target == "cpu" else f"{where} (compiled, nothing was run)"
    write_result(options.out, target=target, sizes=sizes, rows=rows)


if __name__ == "__main__":
    main()
