"""Training runs of the examples, for `jaxmp.validate`.

    jaxmp validate benchmarks/validation_runs.py:byte_gpt --steps 300
    jaxmp validate benchmarks/validation_runs.py:byte_gpt_nnx --steps 300 --candidates fp8
    jaxmp validate benchmarks/validation_runs.py:digits --steps 210

A run is a function of (recipe, seed): the same seed gives the same parameters and batches.
"""

import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxmp
from byte_gpt import GPT, even_batches, in_nnx, random_batch, standard_library_text
from train_lm import cross_entropy
from vision_digits import CNN, handwritten_digits, shuffled_batches

LEARNING_RATE = 3e-3
WARMUP = 20  # steps
ADAM_RATE = 1e-3  # of `adam_in_fp16` and, unless given, `clipping_by_hand`

# ---------------------------------------------------------------------------
# Byte-level GPT
# ---------------------------------------------------------------------------


def optimizer(learning_rate: float = LEARNING_RATE) -> optax.GradientTransformation:
    """Returns AdamW with clipping and a short warm-up; it does not depend on the steps."""
    schedule = optax.linear_schedule(0.0, learning_rate, WARMUP)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95))


@functools.cache
def initializer(gpt: GPT) -> Any:
    """Returns the compiled `init` of a GPT, which all recipes and seeds share."""
    tokens = jnp.zeros((1, gpt.max_length), jnp.int32)
    return jax.jit(lambda seed: gpt.init(jax.random.key(seed), tokens))


def text_batches(seed: int, batch_size: int, seq_len: int) -> Iterator[np.ndarray]:
    """Yields batches of bytes without end."""
    text = standard_library_text().train
    return (random_batch(text, batch_size, seq_len, seed, step) for step in itertools.count())


@functools.cache
def held_out_batches(count: int, batch_size: int, seq_len: int) -> np.ndarray:
    """Returns int32 (count, B, S) windows of the held-out text."""
    return even_batches(standard_library_text().held_out, count, batch_size, seq_len)


def mean_loss(
    loss_fn: Callable[..., jax.Array], variables: Any, batches: np.ndarray
) -> dict[str, jax.Array]:
    """Returns the mean loss of equal batches, one after the other, as the metrics of a run."""
    losses = jax.lax.map(lambda batch: loss_fn(variables, batch), batches)
    return {"loss": jnp.mean(losses)}


def nnx_step(loss_fn: Callable[..., jax.Array]) -> Callable[..., dict[str, Any]]:
    """Returns the training step of an NNX model with a loss function."""

    def step(model: Any, tx: jaxmp.nnx.Optimizer, batch: Any) -> dict[str, Any]:
        loss, grads = tx.value_and_grad(loss_fn)(model, batch)
        tx.update(model, grads)
        return {"loss": loss, "grads": grads}

    return step


def byte_gpt(
    recipe: jaxmp.Recipe,
    seed: int,
    *,
    layers: int = 2,
    width: int = 64,
    heads: int = 4,
    seq_len: int = 64,
    batch_size: int = 16,
    eval_batches: int = 16,
    tx: optax.GradientTransformation | None = None,
) -> jaxmp.TrainingRun:
    """Returns a run of the GPT of the examples in Linen; `tx` replaces its optimizer."""
    gpt = GPT(layers, width, heads, seq_len)
    model = recipe.wrap(gpt)
    variables = initializer(gpt)(seed)
    tx = recipe.optimizer(optimizer() if tx is None else tx)
    state = jaxmp.TrainState.create(apply_fn=model.apply, params=variables, tx=tx)
    held_out = held_out_batches(eval_batches, batch_size, seq_len)

    def loss_fn(variables: Any, tokens_BS: jax.Array) -> jax.Array:
        return cross_entropy(model.apply(variables, tokens_BS[:, :-1]), tokens_BS)

    def step(state: jaxmp.TrainState, tokens_BS: jax.Array) -> Any:
        loss, grads = state.value_and_grad(loss_fn)(tokens_BS)
        return state.apply_gradients(grads=grads), {"loss": loss, "grads": grads}

    evaluate = lambda state: mean_loss(loss_fn, state.params, held_out)
    batches = text_batches(seed, batch_size, seq_len)
    return jaxmp.TrainingRun(state=state, step=step, batches=batches, evaluate=evaluate)


def byte_gpt_nnx(
    recipe: jaxmp.Recipe,
    seed: int,
    *,
    layers: int = 2,
    width: int = 64,
    heads: int = 4,
    seq_len: int = 64,
    batch_size: int = 16,
    eval_batches: int = 16,
) -> jaxmp.TrainingRun:
    """Returns the same run in NNX."""
    gpt = GPT(layers, width, heads, seq_len)
    model = recipe.wrap(in_nnx(gpt, initializer(gpt)(seed)["params"]))
    tx = jaxmp.nnx.Optimizer(model, recipe.optimizer(optimizer()))
    held_out = held_out_batches(eval_batches, batch_size, seq_len)

    def loss_fn(model: Any, tokens_BS: jax.Array) -> jax.Array:
        return cross_entropy(model(tokens_BS[:, :-1]), tokens_BS)

    def evaluate(model: Any, tx: jaxmp.nnx.Optimizer) -> dict[str, jax.Array]:
        del tx
        losses = [loss_fn(model, jnp.asarray(tokens_BS)) for tokens_BS in held_out]
        return {"loss": jnp.mean(jnp.stack(losses))}

    batches = text_batches(seed, batch_size, seq_len)
    step = nnx_step(loss_fn)
    return jaxmp.TrainingRun(state=(model, tx), step=step, batches=batches, evaluate=evaluate)


# ---------------------------------------------------------------------------
# Handwritten digits
# ---------------------------------------------------------------------------


def digits(
    recipe: jaxmp.Recipe, seed: int, *, width: int = 8, batch_size: int = 64
) -> jaxmp.TrainingRun:
    """Returns a run of the CNN of the examples, with batch statistics and dropout, in NNX."""
    data = handwritten_digits()
    model = recipe.wrap(CNN(width, rngs=nnx.Rngs(seed)))
    schedule = optax.linear_schedule(0.0, LEARNING_RATE, WARMUP)
    tx = jaxmp.nnx.Optimizer(model, recipe.optimizer(optax.adamw(schedule)))
    images, labels = jnp.asarray(data.test_images), jnp.asarray(data.test_labels)

    def loss_fn(model: CNN, batch: dict[str, jax.Array]) -> jax.Array:
        logits = model(batch["image"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    def evaluate(model: CNN, tx: jaxmp.nnx.Optimizer) -> dict[str, jax.Array]:
        del tx
        logits = nnx.view(model, use_running_average=True, deterministic=True)(images)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        accuracy = jnp.mean((jnp.argmax(logits, -1) == labels).astype(jnp.float32))
        return {"loss": losses.mean(), "accuracy": accuracy}

    rng = np.random.default_rng(seed)
    epochs = (
        shuffled_batches(data.train_images, data.train_labels, batch_size, rng)
        for _ in itertools.count()
    )
    batches = itertools.chain.from_iterable(epochs)
    step = nnx_step(loss_fn)
    return jaxmp.TrainingRun(state=(model, tx), step=step, batches=batches, evaluate=evaluate)


# ---------------------------------------------------------------------------
# FP16 throughout, with Adam
# ---------------------------------------------------------------------------

HAND_SCALE = 1024.0


def adam_in_fp16(
    recipe: jaxmp.Recipe,
    seed: int,
    *,
    layers: int = 1,
    width: int = 32,
    heads: int = 2,
    seq_len: int = 32,
    batch_size: int = 8,
    eval_batches: int = 16,
) -> jaxmp.TrainingRun:
    """Returns a run with Adam, which a recipe without masters computes in FP16 throughout.

    Such a recipe stands for a loop written by hand: parameters, gradients and both moments are FP16
    arrays, with a static loss scale. Adam's default epsilon of 1e-8 is zero in FP16, and so are the
    squares of most gradients, so that updates are divided by zero. A recipe whose name contains
    1e-4 has that epsilon.
    """
    if recipe.master != "none":
        sizes = dict(layers=layers, width=width, heads=heads, seq_len=seq_len)
        sizes |= dict(batch_size=batch_size, eval_batches=eval_batches)
        return byte_gpt(recipe, seed, **sizes, tx=optax.adam(ADAM_RATE))
    gpt = GPT(layers, width, heads, seq_len)
    model = recipe.wrap(gpt)
    tx = optax.adam(ADAM_RATE, eps=1e-4 if "1e-4" in recipe.name else 1e-8)
    params = jax.tree.map(lambda p: p.astype(jnp.float16), initializer(gpt)(seed))
    held_out = held_out_batches(eval_batches, batch_size, seq_len)

    def loss_fn(variables: Any, tokens_BS: jax.Array) -> jax.Array:
        return cross_entropy(model.apply(variables, tokens_BS[:, :-1]), tokens_BS)

    def scaled(variables: Any, tokens_BS: jax.Array) -> tuple[jax.Array, jax.Array]:
        loss = loss_fn(variables, tokens_BS)
        return loss * HAND_SCALE, loss

    def step(state: dict[str, Any], tokens_BS: jax.Array) -> Any:
        (_, loss), grads = jax.value_and_grad(scaled, has_aux=True)(state["params"], tokens_BS)
        grads = jax.tree.map(lambda g: g / jnp.float16(HAND_SCALE), grads)
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
        state = {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}
        return state, {"loss": loss, "grads": grads}

    evaluate = lambda state: mean_loss(loss_fn, state["params"], held_out)
    state = {"params": params, "opt_state": tx.init(params)}
    batches = text_batches(seed, batch_size, seq_len)
    return jaxmp.TrainingRun(state=state, step=step, batches=batches, evaluate=evaluate)


# ---------------------------------------------------------------------------
# Clipping of scaled FP16 gradients
# ---------------------------------------------------------------------------


def clipping_by_hand(
    recipe: jaxmp.Recipe,
    seed: int,
    *,
    layers: int = 1,
    width: int = 32,
    heads: int = 2,
    seq_len: int = 32,
    batch_size: int = 8,
    eval_batches: int = 16,
    learning_rate: float = ADAM_RATE,
) -> jaxmp.TrainingRun:
    """Returns a run with clipping and Adam; a recipe without loss scale is a loop by hand.

    The loop has FP32 parameters, an FP16 copy of them for the gradients, and a static loss scale.
    It divides the gradients by the scale and then clips them; or, if the recipe's name begins with
    "clip", it clips the scaled gradients first. The sum of their squares exceeds 65504, so that the
    norm is infinite and each update zero.
    """
    clip, adam = optax.clip_by_global_norm(1.0), optax.adam(learning_rate)
    if "unscale" not in recipe.name:
        sizes = dict(layers=layers, width=width, heads=heads, seq_len=seq_len)
        sizes |= dict(batch_size=batch_size, eval_batches=eval_batches)
        return byte_gpt(recipe, seed, **sizes, tx=optax.chain(clip, adam))
    gpt = GPT(layers, width, heads, seq_len)
    model = recipe.wrap(gpt)
    params = initializer(gpt)(seed)
    held_out = held_out_batches(eval_batches, batch_size, seq_len)
    cast = lambda tree, dtype: jax.tree.map(lambda leaf: leaf.astype(dtype), tree)

    def loss_fn(variables: Any, tokens_BS: jax.Array) -> jax.Array:
        return cross_entropy(model.apply(variables, tokens_BS[:, :-1]), tokens_BS)

    def scaled(variables: Any, tokens_BS: jax.Array) -> tuple[jax.Array, jax.Array]:
        loss = loss_fn(variables, tokens_BS)
        return loss * HAND_SCALE, loss

    def clipped(grads: Any) -> Any:
        return clip.update(grads, clip.init(params))[0]

    def step(state: dict[str, Any], tokens_BS: jax.Array) -> Any:
        half = cast(state["params"], jnp.float16)
        (_, loss), scaled_grads = jax.value_and_grad(scaled, has_aux=True)(half, tokens_BS)
        unscale = lambda tree: jax.tree.map(lambda g: g / HAND_SCALE, cast(tree, jnp.float32))
        grads = unscale(scaled_grads)
        is_clipped_first = recipe.name.startswith("clip")
        received = unscale(clipped(scaled_grads)) if is_clipped_first else clipped(grads)
        updates, opt_state = adam.update(received, state["opt_state"])
        state = {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}
        return state, {"loss": loss, "grads": grads}

    def evaluate(state: dict[str, Any]) -> dict[str, jax.Array]:
        losses = jax.lax.map(lambda tokens_BS: loss_fn(state["params"], tokens_BS), held_out)
        return {"loss": jnp.mean(losses)}

    state = {"params": params, "opt_state": adam.init(params)}
    batches = text_batches(seed, batch_size, seq_len)
    return jaxmp.TrainingRun(state=state, step=step, batches=batches, evaluate=evaluate)
