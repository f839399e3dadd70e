"""Measures the temporary memory of compiled causal attention over the sequence length T.

    python benchmarks/attention_memory.py                   # this machine's CPU
    python benchmarks/attention_memory.py --target h200     # cross-compiled for an H200
    python benchmarks/attention_memory.py --out attention_memory.json     # also write the figures

The programs compute the result and the gradients of query, key and value with three
implementations:

    auto       the default of `jaxmp.dot_product_attention`: cuDNN's kernel on a GPU
    blockwise  online softmax over blocks
    xla        the logits of all pairs in memory

There are two layouts. In `fixed`, the number of tokens is constant, so only memory that grows
faster than T increases. In `single`, there is one sequence, so memory that is linear in T grows
linearly. The bytes are those that XLA reports (`memory_analysis`) in addition to arguments and
results, without the workspace of cuDNN. For a GPU, the rows also have the kernels of both passes
and the bytes that they read and write. Nothing is run. The H200 requires XLA's GPU compiler: pip
install -e ".[aot]".
"""

import os
import platform
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp

import jaxmp
from jaxmp._core import _compat
from jaxmp._core._targets import get_target, targets
from jaxmp._tools.audit._compile import compile_for
from jaxmp._tools.audit._hlo import Program
from jaxmp._tools.audit._hlo_kernels import accessed, kernels
from jaxmp._tools.audit._trace import trace
from result_file import parser_of, write_result

WAYS = ("auto", "blockwise", "xla")
LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)


def gradients(implementation):
    """Returns a function of query, key and value `[B, T, N, H]`: loss and gradients."""

    def loss(query, key, value):
        out = jaxmp.dot_product_attention(
            query, key, value, is_causal=True, implementation=implementation
        )
        return out.astype(jnp.float32).sum()

    return jax.value_and_grad(loss, (0, 1, 2))


def taken(implementation, query, target):
    """Returns the row of the program compiled for "cpu" or a GPU."""
    fn = gradients(implementation)
    if target == "cpu":
        memory: Any = jax.jit(fn).trace(query, query, query).lower().compile().memory_analysis()
        choice = jaxmp.explain(jaxmp.dot_product_attention)(
            query, query, query, is_causal=True, implementation=implementation
        ).attention[0]
        return {"ran": choice.implementation, "temp_bytes": memory.temp_size_in_bytes}
    chip = get_target(target)
    with _compat.context(target="gpu", capability=chip.capability, chip=chip):
        compiled = compile_for(target, trace(jax.jit(fn), (query, query, query), {}))
    program = Program(compiled.text)
    steps = list(kernels(program))
    calls = " ".join(step.instruction.attribute("custom_call_target") for step in steps)
    return {
        "ran": "cudnn" if "fmha" in calls else "unfused",
        "temp_bytes": compiled.memory.temp_size_in_bytes,
        "kernels": sum(step.times for step in steps),
        "accessed": sum(step.times * accessed(program, step) for step in steps),
    }


def measure(target, *, tokens, heads, size, dtype):
    """Measures all combinations of layout, implementation and length; returns a list of rows."""
    rows = []
    for layout in ("fixed", "single"):
        for implementation in WAYS:
            for length in LENGTHS:
                batch = max(1, tokens // length) if layout == "fixed" else 1
                query = jax.ShapeDtypeStruct((batch, length, heads, size), jnp.dtype(dtype))
                found = taken(implementation, query, target)
                row = {"layout": layout, "implementation": implementation, "length": length}
                rows.append({**row, "batch": batch, **found})
                line = f"{layout:8}{implementation:11}T {length:6} B {batch:3}"
                line += f"{found['temp_bytes'] / 2**20:12,.1f} MiB"
                if "kernels" in found:
                    line += f"{found['kernels']:8,} kernels{found['accessed'] / 1e9:8.1f} GB"
                print(f"{line}  {found['ran']}", flush=True)
    return rows


def main():
    parser = parser_of(__doc__)
    parser.add_argument("--target", default="cpu", choices=["cpu", *targets()])
    options = parser.parse_args()
    # Tokens of a batch in `fixed`, and heads.
    sizes = {"tokens": 32768, "heads": 16, "size": 128, "dtype": "bfloat16"}
    where = platform.machine() if options.target == "cpu" else get_target(options.target).kind
    print(f"{where}; jax {jax.__version__}; " + ", ".join(f"{k} {v}" for k, v in sizes.items()))
    rows = measure(options.target, **sizes)
    target = where if options.target == "cpu" else f"{where} (compiled, nothing was run)"
    write_result(options.out, target=target, sizes=sizes, rows=rows)


if __name__ == "__main__":
    main()
