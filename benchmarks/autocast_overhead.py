"""Measures the cost of autocast while a training step is traced and lowered.

    python benchmarks/autocast_overhead.py                   # prints the ratios
    python benchmarks/autocast_overhead.py --out file.json   # also writes them

The workload is that of step_counts: a byte-level GPT (12 layers, width 256), Flax Linen, AdamW,
recipe bf16. One step applies `jaxmp.autocast` to the loss of the unwrapped model. The other step
wraps the model with the module-level policies of the recipe. The rest of both steps is the same,
including attention: the model uses jaxmp's attention function, with which policies replace that of
Flax. Nothing is run. Times are CPU seconds of tracing and lowering, alternating between the steps.
Calls of Python functions are also counted, because they do not depend on the machine.
"""

import argparse
import json
import os
import platform
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import jaxmp
import step_counts

LIMITS = {"stablehlo_ops": 1.02, "trace_lower": 1.20}


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, mask):
        attend = jaxmp.linen.attention_fn(implementation="xla")
        h = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(step_counts.HEADS, attention_fn=attend)(
            h, mask=mask
        )
        h = nn.LayerNorm()(x)
        h = nn.gelu(nn.Dense(4 * step_counts.WIDTH)(h))
        return x + nn.Dense(step_counts.WIDTH)(h)


class GPT(nn.Module):
    """The GPT of step_counts with the same parameters, and jaxmp's attention function."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(step_counts.VOCABULARY, step_counts.WIDTH)(tokens)
        positions = jnp.arange(tokens.shape[1])[None]
        x = x + nn.Embed(step_counts.LENGTH, step_counts.WIDTH)(positions)
        mask = nn.make_causal_mask(tokens, dtype=bool)
        for _ in range(step_counts.LAYERS):
            x = Block()(x, mask)
        x = nn.LayerNorm()(x)
        return nn.Dense(step_counts.VOCABULARY, use_bias=False)(x)


def make_step(loss_fn, recipe):
    """Returns `(step, state)`, like the functions of step_counts."""

    def step(state, tokens):
        loss, grads = state.value_and_grad(loss_fn)(tokens)
        return state.apply_gradients(grads=grads), loss

    tx = recipe.optimizer(step_counts.TX)
    params = step_counts.init_params()
    return step, jaxmp.TrainState.create(apply_fn=None, params=params, tx=tx)


def by_autocast():
    recipe = jaxmp.load_recipe("bf16")
    return make_step(jaxmp.autocast(step_counts.loss_of(GPT().apply), recipe), recipe)


def by_module():
    recipe = jaxmp.load_recipe("bf16")
    return make_step(step_counts.loss_of(recipe.wrap(GPT()).apply), recipe)


def operations(make):
    """Returns the number of lowered operations of a step."""
    lowered, _ = step_counts.lower(make)
    return len(step_counts._STABLEHLO_OP.findall(lowered.as_text()))


def counts():
    """Returns the reproducible metrics as `{metric: {"ratio", "counts"}}`."""
    measured = {
        "stablehlo_ops": [operations(make) for make in (by_autocast, by_module)],
        "python_calls": [step_counts.python_calls(make) for make in (by_autocast, by_module)],
    }
    return {
        name: {"ratio": ours / theirs, "counts": [ours, theirs]}
        for name, (ours, theirs) in measured.items()
    }


def measure(pairs):
    """Returns `counts`, and the ratio of CPU seconds."""
    timed = step_counts.timed(by_autocast, by_module, pairs, step_counts.lowering_seconds)
    return {**counts(), "trace_lower": timed}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--pairs", type=int, default=12, help="alternations for the time ratio")
    parser.add_argument("--out", type=Path, help="a JSON file to write")
    options = parser.parse_args()
    versions = {"jax": jax.__version__, "flax": flax.__version__}
    workload = (
        f"GPT {step_counts.LAYERS}x{step_counts.WIDTH}, B{step_counts.BATCH} "
        f"T{step_counts.LENGTH}, AdamW, recipe bf16"
    )
    print(f"{workload}; {versions}, {jax.default_backend()}\nautocast / module-level policies")
    ratios, failed = measure(options.pairs), False
    for metric, row in ratios.items():
        limit = LIMITS.get(metric)
        over = limit is not None and row["ratio"] > limit
        failed |= over
        detail = (
            "{:.3f} to {:.3f}; {} pairs".format(*row["interval"], row["pairs"])
            if "pairs" in row
            else "{} / {}".format(*row["counts"])
        )
        mark = "" if limit is None else f"  limit {limit:g}{'  OVER' if over else ''}"
        print(f"    {metric:14s} {row['ratio']:.3f} ({detail}){mark}")
    if options.out:
        report = {
            "command": " ".join(["python benchmarks/autocast_overhead.py", *sys.argv[1:]]),
            "hardware": {
                "machine": platform.machine(),
                "cpus": os.cpu_count(),
                "backend": jax.default_backend(),
            },
            "versions": {**versions, "python": platform.python_version(), "numpy": np.__version__},
            "workload": workload,
            "limits": LIMITS,
            "autocast_over_module_level": ratios,
        }
        options.out.write_text(json.dumps(report, indent=2) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
