"""Times the last layer and the loss of GPT-2 and Llama on one GPU, over the rows of a chunk.

    python benchmarks/loss_time.py --out loss_time.json
    python benchmarks/loss_time.py --toy      # small, on any machine

The programs are those of benchmarks/loss_memory.py, with the shapes of benchmarks/workload_sizes.py
and hidden states in bfloat16. They run in turn in each round; a row has the medians.
"""

import functools
import statistics
import sys

import jax
import jax.numpy as jnp

import loss_memory
from fp8_linear import seconds
from gpu_record import environment, gpu_state, rotated, write_json
from result_file import parser_of
from workload_sizes import TOY, WORKLOADS

ROUNDS, REPEATS, CHUNKS = 5, 4, (512, 1024, 2048, 4096, 8192)


def main() -> None:
    """Prints and writes the milliseconds of each program."""
    parser = parser_of(__doc__)
    parser.add_argument("--toy", action="store_true")
    options, ways = parser.parse_args(), {"stored logits": loss_memory.from_logits}
    if jax.default_backend() != "gpu" and not options.toy:
        sys.exit("The benchmark requires a GPU. Without one, run it with --toy at small sizes.")
    ways |= {f"chunk of {n}": functools.partial(loss_memory.from_hidden, chunk=n) for n in CHUNKS}
    report = {"environment": environment(jax.devices()[0].device_kind), "rows": []}
    for name in ("w1", "w5"):
        size, times = (TOY if options.toy else WORKLOADS)[name], {}
        hidden = jax.random.normal(jax.random.key(0), (size.tokens, size.width), jnp.bfloat16)
        kernel = 0.02 * jax.random.normal(jax.random.key(1), (size.width, size.vocabulary))
        args = hidden, kernel, jnp.arange(size.tokens) % size.vocabulary
        steps = {way: jax.jit(jax.value_and_grad(fn, (0, 1))) for way, fn in ways.items()}
        for index in range(ROUNDS):
            for way in rotated([*steps], index):
                times.setdefault(way, []).append(seconds(steps[way], args, REPEATS))
        rows = {way: round(1e3 * statistics.median(found), 3) for way, found in times.items()}
        report["rows"].append({"workload": name, "gpu": gpu_state(), "milliseconds": rows})
        print(report["rows"][-1], flush=True)
        write_json(options.out, report)


if __name__ == "__main__":
    main()
