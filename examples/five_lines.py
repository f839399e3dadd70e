"""A plain Flax training loop, and the same loop with the recipe bf16, in Linen and in NNX.

    python examples/five_lines.py

Each pair differs only in the lines between `loss_fn` and the loop, which README shows.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.training.train_state import TrainState

import jaxmp

STEPS = 200


class LinenClassifier(nn.Module):
    """Perceptron in Linen."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns ten logits for each row of x."""
        return nn.Dense(10, name="logits")(nn.relu(nn.Dense(256, name="hidden")(x)))


class NnxClassifier(nnx.Module):
    """Perceptron in NNX."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        """Makes layers for rows of 20 features."""
        self.hidden = nnx.Linear(20, 256, rngs=rngs)
        self.logits = nnx.Linear(256, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns ten logits for each row of x."""
        return self.logits(nnx.relu(self.hidden(x)))


def cross_entropy(logits: jax.Array, batch: dict[str, jax.Array]) -> jax.Array:
    """Returns the mean loss of a batch."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


# ---------------------------------------------------------------------------
# Linen
# ---------------------------------------------------------------------------


def linen_before(model: LinenClassifier, params: Any, batch: dict[str, jax.Array]) -> float:
    """Trains with Flax and optax in FP32, and returns the last loss."""

    def loss_fn(params, batch):
        return cross_entropy(model.apply({"params": params}, batch["x"]), batch)

    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(3e-4))

    @jax.jit
    def train_step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
        return state.apply_gradients(grads=grads), loss

    for _ in range(STEPS):
        state, loss = train_step(state, batch)
    return float(loss)


def linen_after(model: LinenClassifier, params: Any, batch: dict[str, jax.Array]) -> float:
    """Trains with the recipe bf16; another recipe changes only the name."""

    def loss_fn(params, batch):
        return cross_entropy(model.apply({"params": params}, batch["x"]), batch)

    recipe = jaxmp.load_recipe("bf16")
    model = recipe.wrap(model)
    tx = recipe.optimizer(optax.adamw(3e-4))
    state = jaxmp.TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    @jax.jit
    def train_step(state, batch):
        loss, grads = state.value_and_grad(loss_fn)(batch)
        return state.apply_gradients(grads=grads), loss

    for _ in range(STEPS):
        state, loss = train_step(state, batch)
    return float(loss)


# ---------------------------------------------------------------------------
# NNX
# ---------------------------------------------------------------------------


def nnx_before(model: NnxClassifier, batch: dict[str, jax.Array]) -> float:
    """Trains with Flax and optax in FP32, and returns the last loss."""

    def loss_fn(model, batch):
        return cross_entropy(model(batch["x"]), batch)

    optimizer = nnx.Optimizer(model, optax.adamw(3e-4), wrt=nnx.Param)

    @nnx.jit
    def train_step(model, optimizer, batch):
        loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
        optimizer.update(model, grads)
        return loss

    for _ in range(STEPS):
        loss = train_step(model, optimizer, batch)
    return float(loss)


def nnx_after(model: NnxClassifier, batch: dict[str, jax.Array]) -> float:
    """Trains with the recipe bf16; another recipe changes only the name."""

    def loss_fn(model, batch):
        return cross_entropy(model(batch["x"]), batch)

    recipe = jaxmp.load_recipe("bf16")
    model = recipe.wrap(model)
    tx = recipe.optimizer(optax.adamw(3e-4))
    optimizer = jaxmp.nnx.Optimizer(model, tx)

    @nnx.jit
    def train_step(model, optimizer, batch):
        loss, grads = optimizer.value_and_grad(loss_fn)(model, batch)
        optimizer.update(model, grads)
        return loss

    for _ in range(STEPS):
        loss = train_step(model, optimizer, batch)
    return float(loss)


def main() -> None:
    """Prints the last loss of each loop."""
    x = jax.random.normal(jax.random.key(0), (128, 20))
    batch = {"x": x, "label": jnp.argmax(x[:, :10], axis=-1)}
    linen_model = LinenClassifier()
    params = linen_model.init(jax.random.key(1), x)["params"]
    losses = {
        "Linen": (
            linen_before(linen_model, params, batch),
            linen_after(linen_model, params, batch),
        ),
        # Two models with the same seed: a wrapped model shares the Variables of its original.
        "NNX": tuple(loop(NnxClassifier(nnx.Rngs(1)), batch) for loop in (nnx_before, nnx_after)),
    }
    print(f"loss after {STEPS} steps   before   with bf16")
    for framework, (before, after) in losses.items():
        print(f"{framework:<20} {before:9.4f} {after:11.4f}")


if __name__ == "__main__":
    main()
