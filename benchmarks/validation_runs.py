"""Training runs of the examples, for `jaxmp.validate`.

    jaxmp validate benchmarks/validation_runs.py:byte_gpt --steps 300
    jaxmp validate benchmarks/validation_runs.py:byte_gpt_nnx --steps 300 --recipes fp8
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
from flax import linen as nn
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


def gpt_loss(model: nn.Module) -> Callable[[Any, jax.Array], jax.Array]:
    """Returns the mean loss of the next bytes as a function of (variables, tokens_BS)."""
    return lambda variables, tokens_BS: cross_entropy(
        model.apply(variables, tokens_BS[:, :-1]), tokens_BS
    )


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
    loss_fn = gpt_loss(model)
    held_out = held_out_batches(eval_batches, batch_size, seq_len)

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
# Loops in FP16, written by hand
# ---------------------------------------------------------------------------

HAND_SCALE = 1024.0
SMALL = dict(layers=1, width=32, heads=2, seq_len=32, batch_size=8, eval_batches=16)


def cast(tree: Any, dtype: Any) -> Any:
    """Returns a tree of arrays in another dtype."""
    return jax.tree.map(lambda leaf: leaf.astype(dtype), tree)


def divided(scaled_grads: Any) -> Any:
    """Returns gradients of `loss * HAND_SCALE` without that scale."""
    return jax.tree.map(lambda g: g / HAND_SCALE, scaled_grads)


def run_by_hand(
    recipe: jaxmp.Recipe,
    seed: int,
    tx: optax.GradientTransformation,
    unscale: Callable[[Any], tuple[Any, Any]],
    dtype: Any,
    *,
    layers: int,
    width: int,
    heads: int,
    seq_len: int,
    batch_size: int,
    eval_batches: int,
) -> jaxmp.TrainingRun:
    """Returns a run of the GPT whose gradients are those of an FP16 copy of the parameters.

    Args:
      recipe: makes the model; the loop uses neither its optimizer nor its loss scale.
      seed: of parameters and batches.
      tx: the optimizer.
      unscale: receives the FP16 gradients of `loss * HAND_SCALE`, and returns the gradients to
        report and those that the optimizer receives.
      dtype: the dtype in which the parameters are stored.
      layers, width, heads, seq_len, batch_size, eval_batches: as in `byte_gpt`.
    """
    gpt = GPT(layers, width, heads, seq_len)
    loss_fn = gpt_loss(recipe.wrap(gpt))
    params = cast(initializer(gpt)(seed), dtype)
    held_out = held_out_batches(eval_batches, batch_size, seq_len)

    def scaled(variables: Any, tokens_BS: jax.Array) -> tuple[jax.Array, jax.Array]:
        loss = loss_fn(variables, tokens_BS)
        return loss * HAND_SCALE, loss

    def step(state: dict[str, Any], tokens_BS: jax.Array) -> Any:
        half = cast(state["params"], jnp.float16)
        (_, loss), scaled_grads = jax.value_and_grad(scaled, has_aux=True)(half, tokens_BS)
        grads, received = unscale(scaled_grads)
        updates, opt_state = tx.update(received, state["opt_state"], state["params"])
        state = {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}
        return state, {"loss": loss, "grads": grads}

    evaluate = lambda state: mean_loss(loss_fn, state["params"], held_out)
    state = {"params": params, "opt_state": tx.init(params)}
    batches = text_batches(seed, batch_size, seq_len)
    return jaxmp.TrainingRun(state=state, step=step, batches=batches, evaluate=evaluate)


def adam_in_fp16(recipe: jaxmp.Recipe, seed: int, **sizes: int) -> jaxmp.TrainingRun:
    """Returns a run with Adam, which a recipe without masters computes in FP16 throughout.

    Such a recipe stands for a loop written by hand: parameters, gradients and both moments are FP16
    arrays, with a static loss scale. Adam's default epsilon of 1e-8 is zero in FP16, and so are the
    squares of most gradients, so that updates are divided by zero. A recipe whose name contains
    1e-4 has that epsilon. `sizes` replaces some of `SMALL`.
    """
    sizes = SMALL | sizes
    if recipe.master != "none":
        return byte_gpt(recipe, seed, **sizes, tx=optax.adam(ADAM_RATE))
    tx = optax.adam(ADAM_RATE, eps=1e-4 if "1e-4" in recipe.name else 1e-8)

    def unscale(scaled_grads: Any) -> tuple[Any, Any]:
        grads = divided(scaled_grads)
        return grads, grads

    return run_by_hand(recipe, seed, tx, unscale, jnp.float16, **sizes)


def clipping_by_hand(
    recipe: jaxmp.Recipe, seed: int, *, learning_rate: float = ADAM_RATE, **sizes: int
) -> jaxmp.TrainingRun:
    """Returns a run with clipping and Adam; a recipe without loss scale is a loop by hand.

    The loop has FP32 parameters, an FP16 copy of them for the gradients, and a static loss scale.
    It divides the gradients by the scale and then clips them; or, if the recipe's name begins with
    "clip", it clips the scaled gradients first. The sum of their squares exceeds 65504, so that the
    norm is infinite and each update zero. `sizes` replaces some of `SMALL`.
    """
    sizes = SMALL | sizes
    clip, adam = optax.clip_by_global_norm(1.0), optax.adam(learning_rate)
    if "unscale" not in recipe.name:
        return byte_gpt(recipe, seed, **sizes, tx=optax.chain(clip, adam))

    def clipped(grads: Any) -> Any:
        return clip.update(grads, clip.init(grads))[0]

    def unscale(scaled_grads: Any) -> tuple[Any, Any]:
        grads = divided(cast(scaled_grads, jnp.float32))
        if recipe.name.startswith("clip"):
            return grads, divided(cast(clipped(scaled_grads), jnp.float32))
        return grads, clipped(grads)

    return run_by_hand(recipe, seed, adam, unscale, jnp.float32, **sizes)
