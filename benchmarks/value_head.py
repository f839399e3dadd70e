"""Measures the error of a critic on returns of 300, with the recipes and with 16-bit results.

    python benchmarks/value_head.py
    python benchmarks/value_head.py --out benchmarks/results/value_head_jax_0.12.0.1_cpu.json

An MLP with two hidden layers of 64 and one output, as the value networks of reinforcement learning
have, regresses on returns of 300 +- 1. It starts with a bias of 300, like a critic after some
training. The rows are the mean squared error after training, its ratio to that of `fp32`, and the
number of distinct values for the 1,024 inputs; each is the mean over the seeds.

XLA may omit the rounding of a result to 16 bits, by default on a CPU, which hides the error. The
script therefore sets `--xla_allow_excess_precision=false`.

A stored bias in BF16 has steps of 2 around 300: 300 is one of them, and 301.3 is not, so the other
parameters must add the difference. `bf16_params` is therefore also measured on returns of 301.3.
"""

import argparse
import json
import os
import platform
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_allow_excess_precision=false"
).strip()

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxmp

HEAD = "hidden_2"
# Row -> (recipe, changes of its policies).
ROWS: dict[str, tuple[str, list[jaxmp.Rule]]] = {
    "fp32": ("fp32", []),
    "bf16": ("bf16", []),
    "fp16": ("fp16", []),
    "bf16_params": ("bf16_params", []),
    "bf16_params, head stored in FP32": ("bf16_params", [jaxmp.Rule(HEAD, "p=f32")]),
    "bf16, 16-bit results": ("bf16", [jaxmp.Rule("**", fp32_outputs_below=0)]),
    "fp16, 16-bit results": ("fp16", [jaxmp.Rule("**", fp32_outputs_below=0)]),
}
# Returns -> the rows that are measured on them.
RETURNS = {300.0: tuple(ROWS), 301.3: ("fp32", *(row for row in ROWS if "params" in row))}


class Critic(nn.Module):
    """MLP with one output, whose bias starts at `value`."""

    value: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for index in range(2):
            x = nn.relu(nn.Dense(64, name=f"hidden_{index}")(x))
        return nn.Dense(1, bias_init=nn.initializers.constant(self.value), name=HEAD)(x)


def train(name: str, seed: int, steps: int, value: float = 300.0) -> tuple[float, int]:
    """Returns the mean squared error and the number of distinct values after training."""
    recipe_name, rules = ROWS[name]
    recipe = jaxmp.load_recipe(recipe_name)
    if rules:
        recipe = recipe.replace(policies=jaxmp.PolicyMap(recipe, rules))
    rng = np.random.RandomState(seed)
    inputs = rng.randn(1024, 16).astype(np.float32)
    returns = (value + np.sin(2 * inputs[:, 0]) + 0.5 * inputs[:, 1]).astype(np.float32)
    critic = recipe.wrap(Critic(value))
    params = critic.init(jax.random.key(seed), inputs[:1])
    tx = recipe.optimizer(optax.adam(1e-3))
    state = jaxmp.TrainState.create(apply_fn=critic.apply, params=params, tx=tx)

    def loss_fn(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        values: Any = critic.apply(params, x)
        return jnp.mean((values[:, 0] - y) ** 2)

    def step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        loss, grads = state.value_and_grad(loss_fn)(*batch)
        return state.apply_gradients(grads=grads), loss

    rows = rng.randint(0, len(inputs), (steps, 128))
    state, _ = jax.jit(lambda s, x, y: jax.lax.scan(step, s, (x, y)))(
        state, inputs[rows], returns[rows]
    )
    values = np.asarray(jax.jit(critic.apply)(state.params, inputs))[:, 0]
    return float(np.mean((values - returns) ** 2)), len(np.unique(values))


def measure(seeds: int, steps: int, value: float) -> dict[str, Any]:
    """Returns error, ratio and distinct values of each row, for returns around a value."""
    result: dict[str, Any] = {}
    reference = 0.0
    for name in RETURNS[value]:
        runs = [train(name, seed, steps, value) for seed in range(seeds)]
        errors = [error for error, _ in runs]
        mean = float(np.mean(errors))
        reference = reference or mean
        result[name] = {
            "mean squared error": round(mean, 6),
            "of each seed": [round(error, 6) for error in errors],
            "ratio to fp32": round(mean / reference, 3),
            "distinct values": round(float(np.mean([count for _, count in runs])), 1),
        }
        print(value, name, result[name], flush=True)
    return result


def main() -> None:
    """Prints the rows; with --out, also writes them as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--out", type=Path, help="a JSON file to write")
    options = parser.parse_args()
    result = {
        "command": f"python benchmarks/value_head.py --out {options.out}",
        "machine": platform.machine(),
        "versions": {"jax": jax.__version__, "flax": flax.__version__, "optax": optax.__version__},
        "flags": os.environ["XLA_FLAGS"],
        "seeds": options.seeds,
        "steps": options.steps,
        "returns": {value: measure(options.seeds, options.steps, value) for value in RETURNS},
    }
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
