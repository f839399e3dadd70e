"""Measures the overhead of a call of a compiled NNX step, with and without `recipe.wrap`.

    python benchmarks/nnx_dispatch.py                        # prints the table
    python benchmarks/nnx_dispatch.py --out dispatch.json    # also writes it

The workload is 75 `nnx.Linear(1, 1)` (150 parameters) under Adam, with 450 arrays and almost no
arithmetic. Times are wall seconds of one call until its result is available. The programs of a
ratio run alternately, in short blocks of calls. Because the speed of a shared machine varies,
adjacent blocks are compared, and the result is the median of their ratios.
"""

import argparse
import itertools
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import flax
import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jaxmp

LAYERS, POLICY, LIMIT = 75, "p=f32,c=bf16,o=f32", 1.05


class Chain(nnx.Module):
    """Model of small layers, whose call time is that of splitting and merging."""

    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(1, 1, rngs=rngs) for _ in range(LAYERS)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def shrink(model, optimizer, x):
    """Performs a step with one multiplication per array."""
    for _, param in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        param[...] = param[...] * 0.5
    for _, moment in nnx.to_flat_state(nnx.state(optimizer.opt_state)):
        moment[...] = moment[...] * jnp.ones((), moment[...].dtype)
    return x * 0.5


def arrays_of(nodes):
    """Returns the state of NNX objects as a flat dict of arrays."""
    flat = nnx.to_flat_state(nnx.state(nodes))
    return {"/".join(map(str, path)): variable[...] for path, variable in flat}


def on_a_dict():
    """Performs the same step as a plain function of a dict."""
    model = Chain(nnx.Rngs(0))
    nodes = model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    graphdef, state = nnx.split(nodes)
    names = list(arrays_of(nodes))
    leaves, structure = jax.tree.flatten(state)

    @jax.jit
    def step(values, x):
        nodes = nnx.merge(graphdef, structure.unflatten([values[name] for name in names]))
        out = shrink(*nodes, x)
        return out, dict(zip(names, jax.tree.leaves(nnx.state(nodes)), strict=True))

    values = dict(zip(names, leaves, strict=True))

    def call(x):
        nonlocal values
        out, values = step(values, x)
        return out

    return call


def compiled():
    model = Chain(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    return jaxmp.nnx.compile_step(shrink, model, optimizer, donate=False)


def jitted(wrapped):
    def make():
        model = Chain(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
        model = jaxmp.load_recipe(POLICY).wrap(model) if wrapped else model
        step = nnx.jit(shrink)
        return lambda x: step(model, optimizer, x)

    return make


COMPARISONS = [
    ("compile_step", compiled, "jax.jit on a dict", on_a_dict),
    ("nnx.jit, wrapped model", jitted(wrapped=True), "nnx.jit, plain model", jitted(False)),
    ("nnx.jit, plain model", jitted(wrapped=False), "jax.jit on a dict", on_a_dict),
]


def timed(calls, rounds, block):
    """Returns the microseconds per call of each program, one value per round."""
    x = jnp.ones(())
    for call in calls:
        for _ in range(3):
            jax.block_until_ready(call(x))
    times = [[] for _ in calls]
    for index in itertools.islice(itertools.cycle(range(len(calls))), rounds * len(calls)):
        start = time.perf_counter()
        for _ in range(block):
            jax.block_until_ready(calls[index](x))
        times[index].append((time.perf_counter() - start) / block * 1e6)
    return times


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=100, help="blocks per program")
    parser.add_argument("--block", type=int, default=5, help="calls per block")
    parser.add_argument("--out", type=Path, help="a JSON file to write")
    options = parser.parse_args()
    versions = {"jax": jax.__version__, "flax": flax.__version__, "jaxmp": jaxmp.__version__}
    arrays = len(jax.tree.leaves(nnx.state(Chain(nnx.Rngs(0))))) * 3
    print(f"{arrays} arrays and two counters; {versions}, {jax.default_backend()}")
    rows = []
    for name, make, base_name, base in COMPARISONS:
        ours, theirs = timed([make(), base()], options.rounds, options.block)
        paired = [a / b for a, b in zip(ours, theirs, strict=True)]
        quartiles = statistics.quantiles(paired, n=4)
        ratio, micros = quartiles[1], [statistics.median(ours), statistics.median(theirs)]
        print(
            f"{name} / {base_name}: {ratio:.3f}  (quartiles {quartiles[0]:.3f}, "
            f"{quartiles[2]:.3f}; {micros[0]:.0f} and {micros[1]:.0f} us)"
        )
        row = dict(program=name, base=base_name, ratio=ratio, quartiles=quartiles, micros=micros)
        rows.append(row)
    if options.out:
        report = {
            "command": "python " + " ".join(sys.argv),
            "hardware": {"machine": platform.machine(), "cpus": os.cpu_count()},
            "versions": {**versions, "python": platform.python_version()},
            "comparisons": rows,
        }
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 1 if any(row["ratio"] > LIMIT for row in rows[:2]) else 0


if __name__ == "__main__":
    sys.exit(main())
