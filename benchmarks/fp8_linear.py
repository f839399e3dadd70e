"""Times one linear layer in BF16 and in FP8, forward and backward, with the FP8 op of Flax.

    python benchmarks/fp8_linear.py --out fp8_linear.json  # on the GPU of this machine
    python benchmarks/fp8_linear.py --toy                  # small, on any machine

Shapes that --out contains are not timed again.
"""

import functools
import os
import statistics
import sys
import time

if "--toy" in sys.argv:
    os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
from flax.linen import fp8_ops
from jax import lax

from gpu_record import earlier_report, environment, failure, gpu_state, rotated, write_json
from jaxmp import fp8
from result_file import parser_of

LINEAR = (((1,), (0,)), ((), ()))
# Tokens, inputs, outputs: squares, and the layers of Llama 3 8B.
SHAPES = [(n, n, n) for n in (1024, 2048, 4096, 8192, 16384)] + [
    (16384, 4096, 1024),
    (16384, 4096, 14336),
    (16384, 14336, 4096),
]


def ours(recipe, x, w, state):
    return fp8.dot_general(recipe)(x, w, LINEAR, state=state)


def flax_direct(x, w, state):
    return fp8_ops.Fp8DirectDotGeneralOp().apply(state, x, w, LINEAR)


def schemes():
    """Returns name -> (matmul of x, w and a state; the initial state).

    Flax's op is absent if the installed version does not have it.
    """
    found = {"bf16": (lambda x, w, state: lax.dot_general(x, w, LINEAR), None)}
    for name in ("current", "delayed", "rowwise"):
        recipe = fp8._scaling.as_scaling(name)
        state = fp8.init_state(recipe) if recipe.is_stateful else None
        found[name] = (functools.partial(ours, recipe), state)
    uncalibrated = fp8.DelayedScaling(calibrate=False)
    found["delayed, uncalibrated"] = (functools.partial(ours, uncalibrated), fp8.init_state())
    if hasattr(fp8_ops, "Fp8DirectDotGeneralOp"):
        x = jnp.ones((16, 16), jnp.bfloat16)
        state = fp8_ops.Fp8DirectDotGeneralOp().init(jax.random.key(0), x, x, LINEAR)
        found["flax direct"] = (flax_direct, state)
    return found


def step(product):
    """Returns the result of one layer, the gradients of its operands, and the next state."""

    def run(x, w, g, state):
        y, backward = jax.vjp(product, x, w, state)
        return y, backward(g)

    return run


# ---------------------------------------------------------------------------
# Timed
# ---------------------------------------------------------------------------


def seconds(run, args, repeats):
    jax.block_until_ready(run(*args))
    start = time.perf_counter()
    for _ in range(repeats):
        out = run(*args)
    jax.block_until_ready(out)
    return (time.perf_counter() - start) / repeats


def timed(shape, rounds=7, repeats=10):
    """Returns the milliseconds of each scheme and the ratio to BF16, as medians of rounds.

    The schemes run in turn in each round, whose first scheme is another one each time.
    """
    m, k, n = shape
    keys = jax.random.split(jax.random.key(0), 3)
    x, w, g = (
        jax.random.normal(key, s, jnp.bfloat16)
        for key, s in zip(keys, ((m, k), (k, n), (m, n)), strict=True)
    )
    runs = {
        name: (jax.jit(step(product)), (x, w, g, state))
        for name, (product, state) in schemes().items()
    }
    times, failed = {name: [] for name in runs}, {}
    for index in range(rounds):
        for name in rotated(list(runs), index):
            if name in failed:
                continue
            try:
                times[name].append(seconds(*runs[name], repeats))
            except Exception as error:  # the other schemes are still of use
                failed[name] = failure(error)
    rows = []
    for name, found in times.items():
        row = {"scheme": name, "shape": shape}
        if name in failed:
            rows.append(row | failed[name])
            continue
        row["ms"] = round(1e3 * statistics.median(found), 4)
        if "bf16" not in failed:
            ratios = [bf16 / own for bf16, own in zip(times["bf16"], found, strict=True)]
            row["over_bf16"] = round(statistics.median(ratios), 3)
            row["range"] = [round(min(ratios), 3), round(max(ratios), 3)]
        rows.append(row)
    return rows


def time_shapes(shapes, out):
    """Times each shape that `out` does not contain, and writes it; returns 1 if a scheme failed."""
    report = {"environment": environment(jax.devices()[0].device_kind)}
    earlier = earlier_report(out, report["environment"]).get("shapes", [])
    report["shapes"] = [row for row in earlier if not is_to_repeat(row)]
    done = [row["shape"] for row in report["shapes"]]
    for shape in shapes:
        if list(shape) in done:
            continue
        rows = timed(shape)
        report["shapes"].append({"shape": list(shape), "gpu": gpu_state(), "rows": rows})
        show(rows)
        write_json(out, report)
    return int(any(map(is_to_repeat, report["shapes"])))


def is_to_repeat(shape):
    return any("repeat" in row for row in shape["rows"])


def show(rows):
    for row in rows:
        print("  ".join(f"{key}={value}" for key, value in row.items()), flush=True)


def main():
    parser = parser_of(__doc__)
    parser.add_argument("--toy", action="store_true", help="time a small layer on the CPU")
    parser.add_argument("--time", action="store_true", help="time layers, which is the default")
    options = parser.parse_args()
    if jax.default_backend() != "gpu" and not options.toy:
        sys.exit("The benchmark requires a GPU. Without one, run it with --toy at small sizes.")
    return time_shapes([(64, 64, 64)] if options.toy else SHAPES, options.out)


if __name__ == "__main__":
    raise SystemExit(main())
