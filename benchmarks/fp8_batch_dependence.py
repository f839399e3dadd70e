"""Measures how log-probabilities under FP8 depend on later tokens and on the rest of the batch.

    python benchmarks/fp8_batch_dependence.py
    python benchmarks/fp8_batch_dependence.py --out benchmarks/results/fp8_batch_dependence_cpu.json

One scale covers a tensor, so that its largest element affects the rounding of the others. The
script changes the last token of all examples and compares the positions before it; it multiplies
the embeddings of one example by 1.3 and by 4, or its activations in front of all linear layers,
which norms do not undo, and compares the other examples; and it computes each example alone. It
prints the share of the log-probabilities that change, the largest change, the number of runs with a
change, the share of the inputs of linear layers that are subnormal or zero in FP8 after the change,
and the error against FP32. `by amax` are scales without rounding to powers of two. In the rows
"delayed, next step", the change is in the batch of the step before.

The ratio of the errors of both varies with a standard deviation of 0.02 over seeds, so that another
command measures it with many seeds, and prints its mean and a 95 % interval:

    python benchmarks/fp8_batch_dependence.py --errors 400 --out fp8_errors.json

The models are causal language models with random parameters. On a CPU, operands are rounded to FP8
and multiplied in a wider dtype.
"""

import argparse
import functools
import json
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, cast

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxmp
from jaxmp import fp8

VOCABULARY, LENGTH, BATCH, LAYERS, WIDTH, HEADS = 256, 32, 32, 3, 128, 4
KINDS: dict[str, Any] = {"current": fp8.CurrentScaling, "delayed": fp8.DelayedScaling}

# ---------------------------------------------------------------------------
# Models. Each example has a gain of its embeddings and one of the inputs of all linear layers.
# ---------------------------------------------------------------------------


class Block(nn.Module):
    """Transformer block."""

    @nn.compact
    def __call__(self, x: jax.Array, gain: jax.Array) -> jax.Array:
        mask = nn.make_causal_mask(jnp.ones(x.shape[:2]))
        h = nn.LayerNorm()(x) * gain.astype(x.dtype)
        x = x + nn.MultiHeadDotProductAttention(HEADS, name="attention")(h, mask=mask)
        h = nn.LayerNorm()(x) * gain.astype(x.dtype)
        return x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(4 * WIDTH)(h)))


class Model(nn.Module):
    """Causal language model."""

    is_scanned: bool = False

    @nn.compact
    def __call__(self, tokens: jax.Array, gain: jax.Array) -> jax.Array:
        x, gain = nn.Embed(VOCABULARY, WIDTH)(tokens), gain[..., None, None]
        x, gain = x * gain[0].astype(x.dtype), gain[1]
        if self.is_scanned:
            scan = nn.scan(
                lambda block, x, gain: (block(x, gain), None),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                in_axes=cast("Any", nn.broadcast),
                length=LAYERS,
            )
            x, _ = scan(Block(), x, gain)
        else:
            for number in range(LAYERS):
                x = Block(name=f"block_{number}")(x, gain)
        logits = nn.Dense(VOCABULARY, name="lm_head")(nn.LayerNorm()(x))
        return nn.log_softmax(logits.astype(jnp.float32))


class NnxBlock(nnx.Module):
    """Transformer block."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norms = nnx.List([nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2)])
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array, gain: jax.Array) -> jax.Array:
        mask = nnx.make_causal_mask(jnp.ones(x.shape[:2]))
        x = x + self.attention(self.norms[0](x) * gain.astype(x.dtype), mask=mask)
        h = self.norms[1](x) * gain.astype(x.dtype)
        return x + self.down(nnx.gelu(self.up(h)))


class NnxModel(nnx.Module):
    """Causal language model."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.blocks = nnx.List([NnxBlock(rngs) for _ in range(LAYERS)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.lm_head = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, tokens: jax.Array, gain: jax.Array) -> jax.Array:
        x, gain = self.embed(tokens), gain[..., None, None]
        x = x * gain[0].astype(x.dtype)
        for block in self.blocks:
            x = block(x, gain[1])
        return nnx.log_softmax(self.lm_head(self.norm(x)).astype(jnp.float32))


# ---------------------------------------------------------------------------
# Variants: how a recipe is applied
# ---------------------------------------------------------------------------

Batch = tuple[jax.Array, jax.Array]


class Run(NamedTuple):
    """A model: `init(seed)` returns its variables, `log_probabilities(variables, tokens, gain)`."""

    init: Callable[[int], Any]
    log_probabilities: Callable[..., Any]


def linen_run(recipe: Any, *, is_scanned: bool = False) -> Run:
    """Returns a wrapped Linen model."""
    model = recipe.wrap(Model(is_scanned=is_scanned))
    return Run(jax.jit(lambda seed: model.init(jax.random.key(seed), *example(1))), model.apply)


def autocast_run(recipe: Any) -> Run:
    """Returns a Linen model under autocast."""
    model = Model()
    init = jax.jit(lambda seed: model.init(jax.random.key(seed), *example(1)))
    return Run(init, jaxmp.autocast(model.apply, recipe))


def nnx_run(recipe: Any) -> Run:
    """Returns a wrapped NNX model."""
    make = lambda seed: nnx.split(recipe.wrap(NnxModel(nnx.Rngs(seed))))
    graph = make(0)[0]
    apply = lambda state, tokens, gain: nnx.merge(graph, state)(tokens, gain)
    return Run(lambda seed: make(seed)[1], apply)


def scanned_run(recipe: Any) -> Run:
    """Returns a wrapped Linen model whose blocks are scanned."""
    return linen_run(recipe, is_scanned=True)


# Name -> (recipe, function of a recipe).
VARIANTS: dict[str, tuple[str, Callable[..., Run]]] = {
    "Linen": ("fp8", linen_run),
    "NNX": ("fp8", nnx_run),
    "autocast": ("fp8", autocast_run),
    "scanned": ("fp8", scanned_run),
    "delayed, first step": ("fp8_delayed", linen_run),
    "delayed, next step": ("fp8_delayed", linen_run),
}


@functools.cache
def reference(make: Callable[..., Run], seed: int) -> np.ndarray:
    """Returns the log-probabilities in FP32."""
    run = make(jaxmp.load_recipe("fp32"))
    return np.asarray(jax.jit(run.log_probabilities)(run.init(seed), *example(BATCH)))


def example(batch: int) -> Batch:
    """Returns tokens and gains of 1."""
    tokens = jax.random.randint(jax.random.key(0), (batch, LENGTH), 0, VOCABULARY)
    return tokens, jnp.ones((2, batch))


# ---------------------------------------------------------------------------
# Measurements
# ---------------------------------------------------------------------------


def other_rows(values: jax.Array, row: int) -> jax.Array:
    """Returns the values of the other examples."""
    return jnp.delete(values, row, axis=0)


def multiplied(kind: int, factor: float) -> tuple[Callable[..., Batch], Callable[..., jax.Array]]:
    """Returns the change of one example, and the values that should not depend on it."""
    return (lambda tokens, gain, row: (tokens, gain.at[kind, row].multiply(factor))), other_rows


CHANGES: dict[str, tuple[Callable[..., Batch], Callable[..., jax.Array]]] = {
    "last token": (
        lambda tokens, gain, row: (
            tokens.at[:, -1].set((tokens[:, -1] + 1 + row) % VOCABULARY),
            gain,
        ),
        lambda values, row: values[:, :-1],
    ),
    "row x 1.3": multiplied(0, 1.3),
    "row x 4": multiplied(0, 4.0),
    "layers x 1.3": multiplied(1, 1.3),
    "layers x 4": multiplied(1, 4.0),
}


def below_normal(stats: dict[str, fp8._quantize.QuantizationStats]) -> float:
    """Returns the mean share of the inputs of linear layers that are subnormal or zero in FP8."""
    own = [each for name, each in stats.items() if ":input" in name]
    return float(np.mean([np.mean(each.subnormal + each.underflowed) for each in own]))


def rms(values: Any) -> float:
    """Returns the root of the mean square."""
    return float(np.sqrt(np.mean(np.square(np.asarray(values, np.float64)))))


def measure(variant: str, power_of_two: bool, seeds: int = 3) -> dict[str, Any]:
    """Returns the measurements of a variant: the largest value of all seeds; of errors the mean."""
    name, make = VARIANTS[variant]
    scaling = KINDS["delayed" if "delayed" in name else "current"](power_of_two=power_of_two)
    run = make(jaxmp.load_recipe(name).replace(fp8=scaling))
    fn, batch = jax.jit(fp8.with_stats(run.log_probabilities)), example(BATCH)

    @jax.jit
    def next_variables(variables: Any, tokens: jax.Array, gain: jax.Array) -> Any:
        loss = lambda variables: -run.log_probabilities(variables, tokens, gain).mean()
        _, grads = jaxmp.value_and_grad(loss)(variables)
        return {**variables, **{key: grads[key] for key in grads if key != "params"}}

    is_next = variant == "delayed, next step"
    changes: dict[str, list[list[float]]] = {change: [] for change in CHANGES}
    errors: list[float] = []
    for seed in range(seeds):
        variables = run.init(seed)
        before, _ = fn(next_variables(variables, *batch) if is_next else variables, *batch)
        errors.append(rms(before - reference(make, seed)))
        for change, (apply, others) in CHANGES.items():
            row = (5 + 7 * seed) % BATCH
            changed = apply(*batch, row)
            if is_next:
                after, stats = fn(next_variables(variables, *changed), *batch)
                difference = jnp.abs(after - before)
            else:
                after, stats = fn(variables, *changed)
                difference = jnp.abs(others(after, row) - others(before, row))
            share, largest = float(jnp.mean(difference > 0)), float(difference.max())
            changes[change].append([share, largest, below_normal(stats), share > 0])
    fields = ("share of log-probabilities", "largest change", "subnormal or zero inputs")
    runs = {change: int(sum(row[-1] for row in rows)) for change, rows in changes.items()}
    return {
        "variant": variant,
        "power_of_two": power_of_two,
        "changes": {
            change: dict(zip(fields, np.max(rows, axis=0).tolist(), strict=False))
            | {"runs with a change": runs[change]}
            for change, rows in changes.items()
        },
        "error": float(np.mean(errors)),
    }


def error_ratio(variant: str, seeds: int) -> dict[str, Any]:
    """Returns the error with powers of two, relative to scales by amax, and its 95 % interval."""
    name, make = VARIANTS[variant]
    recipe, batch = jaxmp.load_recipe(name), example(BATCH)
    by_amax = recipe.replace(fp8=fp8.CurrentScaling(power_of_two=False))
    runs = [make(each) for each in (recipe, by_amax, jaxmp.load_recipe("fp32"))]
    fns = [(run.init, jax.jit(run.log_probabilities)) for run in runs]
    errors = []
    for seed in range(seeds):
        rounded, unrounded, exact = (np.asarray(fn(init(seed), *batch)) for init, fn in fns)
        errors.append([rms(rounded - exact), rms(unrounded - exact)])
    ratios = np.divide(*np.transpose(errors))
    mean, margin = ratios.mean(), 1.96 * ratios.std(ddof=1) / seeds**0.5
    interval = [float(mean - margin), float(mean + margin)]
    print(f"{variant}: error {mean:.4f} times ({interval[0]:.4f} to {interval[1]:.4f})", flush=True)
    return {"variant": variant, "seeds": seeds, "ratio": float(mean), "interval": interval}


def alone(recipe: Any) -> float:
    """Returns the largest difference between an example alone and the same one in a batch."""
    run, (tokens, gain) = linen_run(recipe), example(BATCH)
    fn, variables = jax.jit(run.log_probabilities), run.init(0)
    each = [fn(variables, tokens[i : i + 1], gain[:, i : i + 1]) for i in range(BATCH)]
    return float(jnp.abs(jnp.concatenate(each) - fn(variables, tokens, gain)).max())


def layer_errors(width: int) -> dict[str, float]:
    """Returns the relative errors of a linear layer with the initial kernels of Flax."""
    x = jax.random.normal(jax.random.key(0), (512, width))
    w = nn.initializers.lecun_normal()(jax.random.key(1), (width, 512))
    exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    errors = {}
    for name, power_of_two in (("power of two", True), ("by amax", False)):
        product = fp8.dot_general(fp8.CurrentScaling(power_of_two=power_of_two))
        errors[name] = rms(product(x, w, (((1,), (0,)), ((), ()))) - exact) / rms(exact)
    return {"width": width, **errors}


def main() -> None:
    """Prints the tables; with --out, also writes them as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--errors", type=int, default=0, help="seeds; measures errors only")
    parser.add_argument("--out", type=Path, help="a JSON file to write")
    options = parser.parse_args()
    if options.errors:
        # In its first step, delayed scaling has the scales of current scaling.
        only = [variant for variant in options.only if VARIANTS[variant][0] == "fp8"]
        write(options, {"rows": [error_ratio(variant, options.errors) for variant in only]})
        return
    rows = []
    for variant in options.only:
        for power_of_two in (True, False):
            row = measure(variant, power_of_two, options.seeds)
            rows.append(row)
            print(f"{variant}, {'power of two' if power_of_two else 'by amax'}:")
            for change, values in row["changes"].items():
                share, largest, small, runs = values.values()
                print(f"    {change:12} {share:8.2%} change by up to {largest:.1e}", end=" ")
                print(f"in {runs} runs, {small:.3%} subnormal or zero", flush=True)
        print(f"    error {rows[-2]['error']:.4f}, with scales by amax {rows[-1]['error']:.4f}")
    fp8_recipe = jaxmp.load_recipe("fp8")
    recipes = {
        "bf16": jaxmp.load_recipe("bf16"),
        "fp8": fp8_recipe,
        "fp8, by amax": fp8_recipe.replace(fp8=fp8.CurrentScaling(power_of_two=False)),
        "fp8_rowwise": jaxmp.load_recipe("fp8_rowwise"),
    }
    singles = {name: alone(recipe) for name, recipe in recipes.items()}
    print("an example alone and in the batch:", singles)
    layers = [layer_errors(width) for width in (64, 96, 128, 192, 256, 512, 768, 1024, 2048, 4096)]
    for each in layers:
        ratio = each["power of two"] / each["by amax"]
        print(f"layer of width {each['width']}: {each['power of two']:.5f}, {ratio:.3f} times")
    report = {
        "seeds": options.seeds,
        "models": rows,
        "alone, largest change": singles,
        "layers": layers,
    }
    write(options, report)


def write(options: argparse.Namespace, results: dict[str, Any]) -> None:
    """Writes results as JSON, if `--out` is given."""
    if options.out:
        report = {
            "command": "python " + " ".join(sys.argv),
            "machine": platform.machine(),
            "versions": {"jax": jax.__version__, "flax": flax.__version__},
            "sizes": {"batch": BATCH, "length": LENGTH, "layers": LAYERS, "width": WIDTH},
            **results,
        }
        options.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
