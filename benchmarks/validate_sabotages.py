"""Counts which of 22 planted faults `jaxmp.validate` names in its first line.

    python benchmarks/validate_sabotages.py                 # all faults, three seeds each
    python benchmarks/validate_sabotages.py --only labels clip_by_value
    python benchmarks/validate_sabotages.py --out benchmarks/results

Each fault is planted in the candidate of a small training; the reference is a correct FP32 run. The
expectation of each was written before its first run: regular expressions that the first line has
to match up to its figures and, for a fault in one operation, the source line that it has to name,
which is marked with a comment "fault: NAME". The result of a fault is

    right     the candidate fails or differs, and its first line is as expected
    vague     it fails or differs, and the first line states where the error was measured
    wrong     the first line names another cause
    missed    the candidate passes or is inconclusive

Requires pip install -e ".[examples]" and takes about three minutes on one core.
"""

import dataclasses
import platform
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxmp
from result_file import parser_of, write_result

BF16, FP16, FP32 = jnp.bfloat16, jnp.float16, jnp.float32
FAULT = "fault"
SEEDS = 3
CLASSES = 8
# Causes that state a measurement instead of a cause.
MEASURED = ("update", "module", "unknown")

Batch = dict[str, np.ndarray]
Batches = Callable[[int], Iterator[Batch]]


class Fault(NamedTuple):
    """Planted fault, and what the first line is expected to contain.

    Args:
      make: `make(recipe, seed, is_faulty)` returns a run.
      steps: number of training steps.
      expected: regular expressions that the first line matches.
      at_line: True if it has to name a marked source line, too.
      recipe: recipe of the candidate.
    """

    make: Callable[[jaxmp.Recipe, int, bool], jaxmp.TrainingRun]
    steps: int
    expected: tuple[str, ...]
    at_line: bool
    recipe: jaxmp.Recipe


FAULTS: dict[str, Fault] = {}


def fault(
    *expected: str, steps: int = 80, at_line: bool = False, recipe: str = "bf16", **changes: Any
) -> Callable[[Any], Any]:
    """Registers a function that makes runs, with its expectation, under its name."""

    def register(make: Any) -> Any:
        loaded = jaxmp.load_recipe(recipe).replace(name=FAULT, **changes)
        FAULTS[make.__name__] = Fault(make, steps, expected, at_line, loaded)
        return make

    return register


# ---------------------------------------------------------------------------
# Data, models and runs
# ---------------------------------------------------------------------------


class State(jaxmp.TrainState):
    """Train state with batch statistics, an average of the parameters, and a counter."""

    batch_stats: Any = None
    ema: Any = None
    counter: Any = None


def labelled(seed: int, *, size: int = 64, scale: float = 1.0, offset: float = 0.0) -> Iterator:
    """Yields inputs of width 16 and the class that a fixed noisy linear teacher gives them."""
    teacher = np.random.default_rng(123).normal(size=(16, CLASSES))
    rng = np.random.default_rng(1000 + seed)
    while True:
        x = rng.normal(size=(size, 16))
        y = np.argmax(x @ teacher + 0.5 * rng.normal(size=(size, CLASSES)), axis=-1)
        yield {"x": (scale * x + offset).astype(np.float32), "y": y.astype(np.int32)}


class Perceptron(nn.Module):
    """Two hidden layers."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.gelu(nn.Dense(32, name="fc1")(x))
        x = nn.gelu(nn.Dense(32, name="fc2")(x))
        return nn.Dense(CLASSES, name="head")(x)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns the loss of each example."""
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(FP32), labels)


def train(
    recipe: jaxmp.Recipe,
    seed: int,
    model: nn.Module,
    *,
    batches: Batches = labelled,
    loss: Callable[..., jax.Array] | None = None,
    tx: optax.GradientTransformation | None = None,
    step: Callable[..., Any] | None = None,
    evaluate: Callable[..., jax.Array] | None = None,
    **fields: Any,
) -> jaxmp.TrainingRun:
    """Returns a run; the arguments replace parts of a correct one.

    Args:
      recipe: its recipe.
      seed: of parameters and batches.
      model: the model, without the recipe.
      batches: seed -> batches.
      loss: (apply, params, batch) -> mean loss.
      tx: the optimizer.
      step: (state, batch, loss of parameters and batch) -> (state, metrics).
      evaluate: (state, loss of parameters and batch, held-out batch) -> held-out loss.
      fields: functions from the parameters to further fields of the state.
    """
    held_out = next(batches(77))
    wrapped: Any = recipe.wrap(model)
    params = model.init(jax.random.key(seed), held_out["x"])
    state = State.create(
        apply_fn=wrapped.apply,
        params=params,
        tx=recipe.optimizer(optax.adam(3e-3) if tx is None else tx),
        **{name: make(params) for name, make in fields.items()},
    )

    def loss_of(params: Any, batch: Any) -> jax.Array:
        if loss is not None:
            return loss(wrapped.apply, params, batch)
        return cross_entropy(wrapped.apply(params, batch["x"]), batch["y"]).mean()

    def default_step(state: State, batch: Any) -> Any:
        value, grads = state.value_and_grad(loss_of)(batch)
        return state.apply_gradients(grads=grads), {"loss": value, "grads": grads}

    def default_evaluate(state: State) -> dict[str, jax.Array]:
        return {"loss": loss_of(state.params, held_out)}

    return jaxmp.TrainingRun(
        state=state,
        step=default_step if step is None else lambda s, b: step(s, b, loss_of),
        batches=batches(seed),
        evaluate=default_evaluate
        if evaluate is None
        else lambda s: {"loss": evaluate(s, loss_of, held_out)},
    )


def cast(tree: Any, dtype: Any) -> Any:
    """Returns a tree with its floating-point leaves in a dtype."""
    change = lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x
    return jax.tree.map(change, tree)


# ---------------------------------------------------------------------------
# Data and loss
# ---------------------------------------------------------------------------


@fault(r"'y'", r"round|bfloat16", at_line=True)
def labels(recipe: jaxmp.Recipe, seed: int, is_faulty: bool) -> jaxmp.TrainingRun:
    """Class numbers up to 511 pass through bfloat16, which rounds those above 256."""
    count = 512

    class Table(nn.Module):
        @nn.compact
        def __call__(self, tokens: jax.Array) -> jax.Array:
            x = nn.Embed(count, 64, name="embed")(tokens)
            return nn.Dense(count, name="head")(nn.gelu(nn.Dense(64, name="fc")(x)))

    def batches(seed: int) -> Iterator[Batch]:
        rng = np.random.default_rng(seed)
        while True:
            x = rng.integers(0, count, 256).astype(np.int32)
            yield {"x": x, "y": (3 * x + 7) % count}

    def loss(apply: Any, params: Any, batch: Any) -> jax.Array:
        y = batch["y"]
        if is_faulty:
            y = y.astype(BF16).astype(jnp.int32) % count  # fault: labels
        return cross_entropy(apply(params, batch["x"]), y).mean()

    def evaluate(state: State, loss_of: Any, held_out: Any) -> jax.Array:
        del loss_of
        logits = state.apply_fn(state.params, held_out["x"])
        return cross_entropy(logits, held_out["y"]).mean()

    tx = optax.adam(1e-2)
    return train(recipe, seed, Table(), batches=batches, loss=loss, tx=tx, evaluate=evaluate)


@fault(r"'x'", r"round|bfloat16", at_line=True)
def inputs(recipe: jaxmp.Recipe, seed: int, is_faulty: bool) -> jaxmp.TrainingRun:
    """An input with a mean of 500 is rounded before the mean is subtracted."""

    def loss(apply: Any, params: Any, batch: Any) -> jax.Array:
        x = batch["x"]
        if is_faulty:
            x = x.astype(BF16).astype(FP32)  # fault: inputs
        return cross_entropy(apply(params, x - 500.0), batch["y"]).mean()

    batches = lambda seed: labelled(seed, offset=500.0)
    return train(recipe, seed, Perceptron(), batches=batches, loss=loss)


@fault(r"loss", r"bfloat16", at_line=True)
def loss_sum(recipe: jaxmp.Recipe, seed: int, is_faulty: bool) -> jaxmp.TrainingRun:
    """The losses of 1,024 examples are added one after the other in bfloat16."""

    def loss(apply: Any, params: Any, batch: Any) -> jax.Array:
        losses = cross_entropy(apply(params, batch["x"]), batch["y"])
        if not is_faulty:
            return losses.mean()
        add = lambda total, x: (total + x.astype(BF16), None)  # fault: loss_sum
        total, _ = jax.lax.scan(add, jnp.zeros((), BF16), losses)
        return total.astype(FP32) / losses.size

    batches = lambda seed: labelled(seed, size=1024)
    return train(recipe, seed, Perceptron(), batches=batches, loss=loss)


@fault(r"float16", at_line=True, recipe="fp16")
def temperature(recipe: jaxmp.Recipe, seed: int, is_faulty: bool) -> jaxmp.TrainingRun:
    """The exponential of cosines over a temperature of 0.07 exceeds 65,504."""
    dtype = FP16 if is_faulty else FP32

    def loss(apply: Any, params: Any, batch: Any) -> jax.Array:
        z = apply(params, batch["x"])
        z = (z / (jnp.linalg.norm(z, axis=-1, keepdims=True) + 1e-6)).astype(dtype)
        weights = jnp.exp(z / jnp.asarray(0.07, dtype))  # fault: temperature
        share = jnp.take_along_axis(weights, batch["y"][:, None], -1)[:, 0] / weights.sum(-1)
        return -jnp.mean(jnp.log(share.astype(FP32) + 1e-9))

    return train(recipe, seed, Perceptron(), loss=loss)


# ---------------------------------------------------------------------------
# Layers
# ---------------------------------------------------------------------------


class Rotary(nn.Module):
    """One head of attention with rotary embeddings of positions up to 8,191."""

    is_faulty: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        tokens, at = x[..., 0], x[..., 1]
        width, dtype = 32, BF16 if self.is_faulty else FP32
        hidden = nn.Embed(17, width, name="embed")(tokens)
        position = jnp.arange(8192, dtype=dtype)  # fault: rope
        rates = jnp.asarray(1 / 100 ** (np.arange(width // 2) / (width // 2)), dtype)
        angles = position[:, None] * rates  # fault: rope
        cos, sin = (f(angles).astype(FP32)[at] for f in (jnp.cos, jnp.sin))  # fault: rope

        def rotate(x: jax.Array) -> jax.Array:
            a, b = jnp.split(x.astype(FP32), 2, -1)
            return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1).astype(x.dtype)

        q, k, v = (nn.Dense(width, name=name)(hidden) for name in ("query", "key", "value"))
        logits = jnp.einsum("btd,bsd->bts", rotate(q), rotate(k)).astype(FP32) / width**0.5
        mask = jnp.where(np.tril(np.ones((x.shape[1], x.shape[1]), bool)), 0.0, -1e9)
        weights = jax.nn.softmax(logits + mask, -1).astype(v.dtype)
        mixed = jnp.concatenate([weights @ v, hidden], -1)
        return nn.Dense(17, name="head")(nn.gelu(nn.Dense(64, name="fc")(mixed)))


@fault(r"bfloat16", steps=150, at_line=True)
def rope(recipe: jaxmp.Recipe, seed: int, is_faulty: bool) -> jaxmp.TrainingRun:
    """Positions and angles of rotary embeddings are computed in bfloat16."""

    def batches(seed: int) -> Iterator[Batch]:
        rng = np.random.default_rng(50 + seed)
        while True:
            tokens = rng.integers(0, 16, (16, 64)).astype(np.int32)
            at = rng.integers(0, 8192 - 64, (16, 1)).astype(np.int32) + np.arange(64)
            x = np.stack([tokens, at], -1).astype(np.int32)
            yield {"x": x, "y": np.roll(tokens, 1, axis=1)}

    return train(recipe, seed, Rotary(is_faulty), batches=batches, tx=optax.adam(1e-2))


class Masked(nn.Module):
    """Attention over four tokens with a mask that excludes all keys of some queries."""

    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = nn.Dense(16, name="in")(x.reshape(-1, 4, 4))
        q, k, v = (nn.Dense(16, name=name)(hidden) for name in ("query", "key", "value"))
        logits = jnp.einsum("btd,bsd->bts", q, k).astype(self.dtype)
        allowed = (x[:, None, :4] > -2.5) & (x[:, :1, None] < 1.5)
        mask = jnp.where(allowed, 0.0, -1e9).astype(self.dtype)  # fault: mask
        weights = jax.nn.softmax(logits + mask, -1).astype(v.dtype)  # fault: mask
        return nn.Dense(CLASSES, name="head")((weights @ v).reshape(x.shape[0], -1))


@fault(r"float16", steps=40, at_line=True, recipe="fp16")
def mask(recipe: jaxmp.Recipe, seed: int, is_faulty: bool) -> jaxmp.TrainingRun:
    """A mask of -1e9 is minus infinity in float16, and rows without a key are NaN."""
    return train(recipe, seed, Masked(FP16 if is_faulty else FP32))


class Normalized(nn.Module):
    """Perceptron with a normalization written by hand."""

    is_one_pass: bool
    dtype: Any
    gain: float
    shift: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Dense(32, name="fc1")(x) * self.gain + self.shift
        y = x.astype(self.dtype)
        mean = y.mean(-1, keepdims=True)
        if self.is_one_pass:
            variance = (y * y).mean(-1, keepdims=True) - mean * mean  # fault: one_pass_variance
            variance = jnp.maximum(variance, 0)
        else:
            variance = jnp.square(y - mean).mean(-1, keepdims=True)  # fault: layer_norm
        x = ((y - mean) * jax.lax.rsqrt(variance + jnp.asarray(1e-3, y.dtype))).astype(x.dtype)
        return nn.Dense(CLASSES, name="head")(nn.gelu(nn.Dense(32, name="fc2")(x)))


@fault(r"float16", at_line=True, recipe="fp16")
def layer_norm(recipe: jaxmp.Recipe, seed: int, is_faulty: bool) -> jaxmp.TrainingRun:
    """Squares of activations of 400 overflow in a variance in float16."""
    return train(recipe, seed, Normalized(False, FP16 if is_faulty else FP32, 400.0, 0.0))


@fault(r"bfloat16", at_line=True)
def one_pass_variance(recipe: jaxmp.Recipe, seed: int, is_faulty: bool) -> jaxmp.TrainingRun:
    """A variance of activations with a mean of 12 is a difference of two rounded numbers."""
    return train(recipe, seed, Normalized(True, BF16 if is_faulty else FP32, 1.0, 12.0))


@fault(r"round|bfloat16", steps=150, at_line=True)
def position_index(recipe: jaxmp.Recipe, seed: int, is_faulty: bool) -> jaxmp.TrainingRun:
    """Positions pass through bfloat16 before they select rows of an embedding."""
    length = 1024

    class Positions(nn.Module):
        @nn.compact
        def __call__(self, at: jax.Array) -> jax.Array:
            if is_faulty:
                at = at.astype(BF16).astype(jnp.int32)  # fault: position_index
            at = jnp.minimum(at, length - 1)
            x = nn.Embed(length, 32, name="positions")(at)
            return nn.Dense(CLASSES, name="head")(nn.gelu(nn.Dense(32, name="fc")(x)))

    def batches(seed: int) -> Iterator[Batch]:
        rng = np.random.default_rng(seed)
        while True:
            x = rng.integers(0, length, 256).astype(np.int32)
            yield {"x": x, "y": x % CLASSES}

    return train(recipe, seed, Positions(), batches=batches, tx=optax.adam(1e-2))


class Dropped(nn.Module):
    """Perceptron with dropout."""

    @nn.compact
    def __call__(self, x: jax.Array, is_training: bool = False) -> jax.Array:
        x = nn.gelu(nn.Dense(32, name="fc1")(x))
        x = nn.Dropout(0.3, deterministic=not is_training)(x)
        return nn.Dense(CLASSES, name="head")(x)


@fault(r"Dropout_0")
def dropout_keys(recipe: jaxmp.Recipe, seed: int, is_faulty: bool) -> jaxmp.TrainingRun:
    """The candidate draws other dropout masks than the reference."""

    def step(state: State, batch: Any, loss_of: Any) -> Any:
        del loss_of
        key = jax.random.fold_in(jax.random.key(999 if is_faulty else 0), state.step)

        def loss(params: Any) -> jax.Array:
            logits = state.apply_fn(params, batch["x"], True, rngs={"dropout": key})
            return cross_entropy(logits, batch["y"]).mean()

        value, grads = state.value_and_grad(loss)()
        return state.apply_gradients(grads=grads), {"loss": value, "grads": grads}

    return train(recipe, seed, Dropped(), step=step)


# ---------------------------------------------------------------------------
# Gradients
# ---------------------------------------------------------------------------


@fault(r"unscaled twice", recipe="fp16", loss_scale=jaxmp.StaticLossScale(1024.0))
def double_unscaling(recipe: jaxmp.Recipe, seed: int, is_faulty: bool) -> jaxmp.TrainingRun:
    """Gradients are divided by the loss scale once more."""

    def step(state: State, batch: Any, loss_of: Any) -> Any:
        value, grads = state.value_and_grad(loss_of)(batch)
        grads = jax.tree.map(lambda g: g / 1024 if is_faulty else g, grads)
        return state.apply_gradients(grads=grads), {"loss": value, "grads": grads}

    return train(recipe, seed, Perceptron(), step=step, tx=optax.sgd(0.3))


@fault(r"gradient", r"\b4 times")
def sum_of_microbatches(recipe: jaxmp.Recipe, seed: int, is_faulty: bool) -> jaxmp.TrainingRun:
    """The gradients of four microbatches are added instead of averaged."""

    def step(state: State, batch: Any, loss_of: Any) -> Any:
        parts = jax.tree.map(lambda x: x.reshape(4, -1, *x.shape[1:]), batch)
        grad = jax.value_and_grad(loss_of)
        values, grads = jax.lax.map(lambda part: grad(state.params, part), parts)
        reduce = jnp.sum if is_faulty else jnp.mean
        grads = jax.tree.map(lambda g: reduce(g, 0), grads)
        return state.apply_gradients(grads=grads), {"loss": values.mean(), "grads": grads}

    return train(recipe, seed, Perceptron(), step=step, tx=optax.sgd(0.03))


@fault(r"underflow", steps=60, recipe="fp16", loss_scale="none")
def no_loss_scale(recipe: jaxmp.Recipe, seed: int, is_faulty: bool) -> jaxmp.TrainingRun:
    """Each example has a weight of 1e-8, and there is no loss scale."""
    del is_faulty

    def loss(apply: Any, params: Any, batch: Any) -> jax.Array:
        return 1e-5 * cross_entropy(apply(params, batch["x"]), batch["y"]).mean()

    batches = lambda seed: labelled(seed, size=1024)
    tx = optax.adam(3e-3, eps=1e-15)
    return train(recipe, seed, Perceptron(), batches=batches, loss=loss, tx=tx)


@fault(r"fc1", r"gradient", r"zero")
def frozen_layer(recipe: jaxmp.Recipe, seed: int, is_faulty: bool) -> jaxmp.TrainingRun:
    """The gradient of the first layer is stopped."""

    def loss(apply: Any, params: Any, batch: Any) -> jax.Array:
        if is_faulty:
            layers = params["params"]
            layers = {**layers, "fc1": jax.lax.stop_gradient(layers["fc1"])}
            params = {"params": layers}
        return cross_entropy(apply(params, batch["x"]), batch["y"]).mean()

    return train(recipe, seed, Perceptron(), loss=loss)


# ---------------------------------------------------------------------------
# Updates
# ---------------------------------------------------------------------------


@fault(r"learning rate", r"0\.33")
def learning_rate(recipe: jaxmp.Recipe, seed: int, is_faulty: bool) -> jaxmp.TrainingRun:
    """The learning rate is a third of that of the reference."""
    return train(recipe, seed, Perceptron(), tx=optax.adam(1e-3 if is_faulty else 3e-3))


@fault(r"clip")
def clip_by_value(recipe: jaxmp.Recipe, seed: int, is_faulty: bool) -> jaxmp.TrainingRun:
    """The optimizer receives gradients that are clipped to 0.01."""
    clip = optax.clip(0.01) if is_faulty else optax.identity()
    return train(recipe, seed, Perceptron(), tx=optax.chain(clip, optax.sgd(0.3)))


@fault(r"weight decay")
def weight_decay(recipe: jaxmp.Recipe, seed: int, is_faulty: bool) -> jaxmp.TrainingRun:
    """The candidate has no weight decay."""
    decay = optax.add_decayed_weights(0.0 if is_faulty else 0.1)
    return train(recipe, seed, Perceptron(), tx=optax.chain(decay, optax.sgd(0.1)))


# ---------------------------------------------------------------------------
# State
# ---------------------------------------------------------------------------


class BatchNormalized(nn.Module):
    """Perceptron with batch normalization."""

    @nn.compact
    def __call__(self, x: jax.Array, is_training: bool = False) -> jax.Array:
        x = nn.Dense(32, name="fc1")(x)
        x = nn.BatchNorm(use_running_average=not is_training, momentum=0.9, name="bn")(x)
        return nn.Dense(CLASSES, name="head")(nn.gelu(x))


@fault(r"batch_stats", r"not change|unchanged|not updated")
def statistics(recipe: jaxmp.Recipe, seed: int, is_faulty: bool) -> jaxmp.TrainingRun:
    """The running statistics keep their initial values."""
    batches = lambda seed: labelled(seed, scale=0.3)
    wrapped: Any = recipe.wrap(BatchNormalized())
    model = BatchNormalized()
    held_out = next(batches(77))
    variables = model.init(jax.random.key(seed), held_out["x"])
    state = State.create(
        apply_fn=wrapped.apply,
        params=variables["params"],
        tx=recipe.optimizer(optax.adam(3e-3)),
        batch_stats=variables["batch_stats"],
    )

    def loss(params: Any, stats: Any, batch: Any) -> Any:
        collections = {"params": params, "batch_stats": stats}
        logits, new = wrapped.apply(collections, batch["x"], True, mutable=["batch_stats"])
        return cross_entropy(logits, batch["y"]).mean(), new["batch_stats"]

    def step(state: State, batch: Any) -> Any:
        old = state.batch_stats
        (value, new), grads = state.value_and_grad(loss, has_aux=True)(old, batch)
        state = state.apply_gradients(grads=grads).replace(batch_stats=old if is_faulty else new)
        return state, {"loss": value, "grads": grads}

    def evaluate(state: State) -> dict[str, jax.Array]:
        collections = {"params": state.params, "batch_stats": state.batch_stats}
        logits = wrapped.apply(collections, held_out["x"])
        return {"loss": cross_entropy(logits, held_out["y"]).mean()}

    return jaxmp.TrainingRun(state=state, step=step, batches=batches(seed), evaluate=evaluate)


@fault(r"\bema\b", r"bfloat16", steps=120)
def average(recipe: jaxmp.Recipe, seed: int, is_faulty: bool) -> jaxmp.TrainingRun:
    """An average of the parameters, which is evaluated, is stored in bfloat16."""
    dtype = BF16 if is_faulty else FP32

    def step(state: State, batch: Any, loss_of: Any) -> Any:
        value, grads = state.value_and_grad(loss_of)(batch)
        state = state.apply_gradients(grads=grads)
        move = lambda old, new: old + jnp.asarray(0.005, dtype) * (new.astype(dtype) - old)
        state = state.replace(ema=jax.tree.map(move, state.ema, state.params))
        return state, {"loss": value, "grads": grads}

    def evaluate(state: State, loss_of: Any, held_out: Any) -> jax.Array:
        return loss_of(cast(state.ema, FP32), held_out)

    ema = lambda params: cast(params, dtype)
    return train(recipe, seed, Perceptron(), step=step, evaluate=evaluate, ema=ema)


@fault(r"\bcounter\b", r"bfloat16", steps=400)
def step_counter(recipe: jaxmp.Recipe, seed: int, is_faulty: bool) -> jaxmp.TrainingRun:
    """The counter of a linear schedule is stored in bfloat16 and stays at 256."""
    dtype = BF16 if is_faulty else FP32

    def step(state: State, batch: Any, loss_of: Any) -> Any:
        value, grads = state.value_and_grad(loss_of)(batch)
        rate = 3e-2 * jnp.maximum(0.0, 1 - state.counter.astype(FP32) / 400)
        state = state.replace(opt_state=optax.tree.set(state.opt_state, learning_rate=rate))
        counter = state.counter + jnp.ones((), dtype)
        state = state.apply_gradients(grads=grads).replace(counter=counter)
        return state, {"loss": value, "grads": grads}

    tx = optax.inject_hyperparams(optax.adam)(learning_rate=3e-2)
    counter = lambda params: jnp.zeros((), dtype)
    return train(recipe, seed, Perceptron(), step=step, tx=tx, counter=counter)


@fault(r"\bnu\b", r"bfloat16", steps=400)
def second_moment(recipe: jaxmp.Recipe, seed: int, is_faulty: bool) -> jaxmp.TrainingRun:
    """Adam's second moment is stored in bfloat16, and does not decay from large gradients."""
    adam: Any = optax.scale_by_adam(b2=0.998)
    dtype = BF16 if is_faulty else FP32

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        wide = state._replace(nu=cast(state.nu, FP32))
        updates, new = adam.update(updates, wide, params)
        return updates, new._replace(nu=cast(new.nu, dtype))

    def init(params: Any) -> Any:
        state = adam.init(params)
        return state._replace(nu=cast(state.nu, dtype))

    def batches(seed: int) -> Iterator[Batch]:
        for number, batch in enumerate(labelled(seed)):
            # The held-out batch, whose seed is 77, has the weight of the later ones.
            weight = 100.0 if number < 5 and seed != 77 else 1.0
            yield {**batch, "weight": np.asarray(weight, np.float32)}

    def loss(apply: Any, params: Any, batch: Any) -> jax.Array:
        losses = cross_entropy(apply(params, batch["x"]), batch["y"])
        return batch["weight"] * losses.mean()

    tx = optax.chain(optax.GradientTransformation(init, update), optax.scale(-3e-3))
    return train(recipe, seed, Perceptron(), batches=batches, loss=loss, tx=tx)


@fault(r"trace", r"not change|unchanged|not updated")
def momentum(recipe: jaxmp.Recipe, seed: int, is_faulty: bool) -> jaxmp.TrainingRun:
    """The step returns the optimizer's state that it received."""

    def step(state: State, batch: Any, loss_of: Any) -> Any:
        value, grads = state.value_and_grad(loss_of)(batch)
        new = state.apply_gradients(grads=grads)
        new = new.replace(opt_state=state.opt_state) if is_faulty else new
        return new, {"loss": value, "grads": grads}

    return train(recipe, seed, Perceptron(), step=step, tx=optax.sgd(0.02, momentum=0.9))


# ---------------------------------------------------------------------------
# Results
# ---------------------------------------------------------------------------


def marked_lines(name: str) -> list[str]:
    """Returns the locations that a report may name for a fault, as "file.py:12"."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    numbers = [n for n, line in enumerate(lines, 1) if line.endswith(f"# fault: {name}")]
    return [f"{Path(__file__).name}:{number}" for number in numbers]


@dataclasses.dataclass(frozen=True)
class Result:
    """Outcome of a fault: "right", "vague", "wrong" or "missed", and the first line."""

    name: str
    outcome: str
    verdict: str
    headline: str
    causes: tuple[str, ...]
    cpu_seconds: float


def measure(name: str, seeds: int = SEEDS) -> Result:
    """Trains reference and candidate, and compares the first line with the expectation."""
    planted, since = FAULTS[name], time.process_time()
    report = jaxmp.validate(
        lambda recipe, seed: planted.make(recipe, seed, recipe.name == FAULT),
        {FAULT: planted.recipe},
        steps=planted.steps,
        seeds=seeds,
        progress=False,
    )
    candidate = report[FAULT]
    causes = tuple(cause.id for cause in candidate.causes)
    return Result(
        name=name,
        outcome=outcome(name, candidate.verdict, candidate.headline, causes),
        verdict=candidate.verdict,
        headline=candidate.headline,
        causes=causes,
        cpu_seconds=round(time.process_time() - since, 1),
    )


def outcome(name: str, verdict: str, headline: str, causes: tuple[str, ...]) -> str:
    """Compares a first line, up to its figures, with the expectation of a fault."""
    if verdict not in ("fail", "differs"):
        return "missed"
    cause = headline.partition("; ")[0] if causes else ""
    planted = FAULTS[name]
    is_expected = all(re.search(pattern, cause) for pattern in planted.expected)
    if planted.at_line:
        is_expected &= any(re.search(rf"{line}\b", cause) for line in marked_lines(name))
    if is_expected:
        return "right"
    return "vague" if not causes or causes[0] in MEASURED else "wrong"


def main() -> None:
    parser = parser_of(__doc__, FAULTS)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    options = parser.parse_args()
    results = []
    for name in options.only:
        results.append(measure(name, options.seeds))
        print(f"{results[-1].outcome}: {name}: {results[-1].headline}", flush=True)
    counts = Counter(result.outcome for result in results)
    print(", ".join(f"{counts[key]} {key}" for key in ("right", "vague", "wrong", "missed")))
    if options.out:
        write_result(
            options.out / "validate_sabotages_cpu.json",
            machine=f"{jax.default_backend()} ({platform.machine()})",
            counts=counts,
            faults=[dataclasses.asdict(result) for result in results],
        )


if __name__ == "__main__":
    main()
