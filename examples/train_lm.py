"""Trains a byte-level GPT on the sources of Python's standard library, in the precision you name.

    python examples/train_lm.py --recipe bf16
    python examples/train_lm.py --recipe bf16 --framework nnx
    python examples/train_lm.py --recipe fp16 --steps 1000 --seq-len 128 --microbatches 2
    python examples/train_lm.py --recipe "p=bf16,c=bf16,o=f32" --checkpoint-dir checkpoints
    python examples/train_lm.py --recipe my.toml --width 256 --layers 6 --heads 8
    python examples/train_lm.py --help
    jaxmp audit examples/train_lm.py:make_step --recipe bf16

With --checkpoint-dir, a run that was stopped goes on where it was: run the same command again.
Install first: pip install "jaxmp[examples]".
"""

import contextlib
import dataclasses
import enum
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import typer
from flax import nnx

import jaxmp
from byte_gpt import GPT, NnxGPT, even_batches, in_nnx, random_batch, standard_library_text
from options import RecipeName
from run_tools import Checkpoints, Meter

# ---------------------------------------------------------------------------
# Linen: the five lines, the same for every precision
# ---------------------------------------------------------------------------


def prepare(
    recipe: Any,
    model: GPT,
    tx: optax.GradientTransformation,
    *,
    seed: int = 0,
    microbatches: int = 1,
) -> tuple[jaxmp.TrainState, Callable[..., Any], Callable[..., jax.Array]]:
    """Returns the first state, the jitted train step and the jitted loss of (params, tokens).

    What is trained is all that `init` returns: with the parameters, in some recipes, FP8's state.
    """
    recipe = jaxmp.load_recipe(recipe)
    model = recipe.wrap(model)
    tx = recipe.optimizer(tx)
    params = first_variables(model, seed)
    state = jaxmp.TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    def loss_fn(params: Any, tokens_BS: jax.Array) -> jax.Array:
        return cross_entropy(model.apply(params, tokens_BS[:, :-1]), tokens_BS)

    @functools.partial(jax.jit, donate_argnums=0)
    def train_step(state: jaxmp.TrainState, tokens_BS: jax.Array) -> Any:
        loss, grads = state.value_and_grad(loss_fn, microbatches=microbatches)(tokens_BS)
        return state.apply_gradients(grads=grads), loss

    return state, train_step, jax.jit(loss_fn)


def make_step(recipe: str = "bf16") -> tuple[Any, ...]:
    """The train step and its arguments, for `jaxmp audit`; of the batch the shape will do."""
    state, train_step, _ = prepare(recipe, GPT(), optax.adamw(3e-3))
    return train_step, state, jax.ShapeDtypeStruct((16, GPT.max_length + 1), jnp.int32)


def first_variables(model: GPT, seed: int) -> Any:
    """What training starts from; under every recipe with the same parameters."""
    tokens = jnp.zeros((1, model.max_length), jnp.int32)
    return jax.jit(model.init)(jax.random.key(seed), tokens)


def cross_entropy(logits_BTV: jax.Array, tokens_BS: jax.Array) -> jax.Array:
    """Mean loss of predicting each token but the first; S is T + 1."""
    logits_BTV = logits_BTV.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits_BTV, tokens_BS[:, 1:]).mean()


# ---------------------------------------------------------------------------
# NNX: the same recipe, the same numbers to start from
# ---------------------------------------------------------------------------


def prepare_nnx(
    recipe: Any,
    model: GPT,
    tx: optax.GradientTransformation,
    *,
    seed: int = 0,
    microbatches: int = 1,
) -> tuple[NnxGPT, jaxmp.nnx.Optimizer, Callable[..., jax.Array], Callable[..., jax.Array]]:
    """Returns the model, its optimizer, and step and loss as functions of them, not compiled."""
    model = in_nnx(model, first_variables(model, seed)["params"])

    recipe = jaxmp.load_recipe(recipe)
    model = recipe.wrap(model)
    tx = recipe.optimizer(tx)
    optimizer = jaxmp.nnx.Optimizer(model, tx)

    def loss_fn(model: NnxGPT, tokens_BS: jax.Array) -> jax.Array:
        return cross_entropy(model(tokens_BS[:, :-1]), tokens_BS)

    def train_step(model: NnxGPT, optimizer: jaxmp.nnx.Optimizer, tokens_BS: jax.Array) -> Any:
        run = optimizer.value_and_grad(loss_fn, microbatches=microbatches)
        loss, grads = run(model, tokens_BS)
        optimizer.update(model, grads)
        return loss

    return model, optimizer, train_step, loss_fn


# ---------------------------------------------------------------------------
# What the loop asks of either
# ---------------------------------------------------------------------------


class LinenTraining:
    """A train state that is replaced at every step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Takes the arguments of `prepare`."""
        self.state, self._step, self._loss = prepare(*args, **kwargs)

    def step(self, tokens_BS: np.ndarray) -> jax.Array:
        """Trains on a batch; returns its loss."""
        self.state, loss = self._step(self.state, tokens_BS)
        return loss

    def loss(self, tokens_BS: np.ndarray) -> jax.Array:
        """The loss of a batch that is not trained on."""
        return self._loss(self.state.params, tokens_BS)

    def arrays(self) -> Any:
        """All that a checkpoint must hold."""
        return self.state

    def restore(self, arrays: Any) -> None:
        """Goes on from a checkpoint."""
        self.state = arrays


class NnxTraining:
    """A model and an optimizer whose compiled step keeps their arrays until asked for them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Takes the arguments of `prepare_nnx`."""
        *self._nodes, train_step, loss_fn = prepare_nnx(*args, **kwargs)
        self._loss = nnx.jit(loss_fn)
        self.step = jaxmp.nnx.compile_step(train_step, *self._nodes)

    @property
    def state(self) -> jaxmp.nnx.Optimizer:
        """The optimizer: masters, loss scale and skip counters are in it."""
        return self.step.write_back()[1]

    def loss(self, tokens_BS: np.ndarray) -> jax.Array:
        """The loss of a batch that is not trained on."""
        return self._loss(self.step.write_back()[0], tokens_BS)

    def arrays(self) -> Any:
        """All that a checkpoint must hold."""
        names = ("model", "optimizer")
        nodes = dict(zip(names, self.step.write_back(), strict=True))
        return {name: nnx.as_pure(nnx.state(node)) for name, node in nodes.items()}

    def restore(self, arrays: Any) -> None:
        """Goes on from a checkpoint."""
        for node, values in zip(self._nodes, arrays.values(), strict=True):
            nnx.update(node, values)
        self.step.read_back()


class Framework(enum.StrEnum):
    """What the model is written in."""

    linen = "linen"
    nnx = "nnx"


TRAININGS = {"linen": LinenTraining, "nnx": NnxTraining}

# ---------------------------------------------------------------------------
# The loop around them
# ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run left behind: its last state, and the losses on the way."""

    state: Any  # the TrainState, or NNX's Optimizer
    arrays: Any  # what a checkpoint holds
    train_losses: dict[int, float]  # step -> loss of that step's batch
    held_out_losses: dict[int, float]  # step -> mean loss of the held-out batches after it


def train(
    recipe: RecipeName = "bf16",
    framework: Framework = Framework.linen,
    steps: int = 400,
    seq_len: int = 64,
    batch_size: int = 16,
    layers: int = 3,
    width: int = 128,
    heads: int = 4,
    lr: Annotated[float, typer.Option(help="Peak, after warm-up and before cosine decay.")] = 3e-3,
    seed: int = 0,
    microbatches: Annotated[int, typer.Option(help="Parts of a batch, added in FP32.")] = 1,
    eval_every: Annotated[int, typer.Option(help="Steps between held-out losses.")] = 50,
    eval_batches: int = 16,
    checkpoint_dir: Annotated[Path | None, typer.Option(help="Save here, and resume.")] = None,
) -> Run:
    """Trains a byte-level GPT on the sources of Python's standard library."""
    # With other `steps` a run may go on: it follows the new schedule from there.
    fixed = dict(seq_len=seq_len, batch_size=batch_size, layers=layers, width=width, heads=heads)
    fixed |= dict(lr=lr, seed=seed, framework=framework)
    checkpoints = checkpoint_dir and Checkpoints(checkpoint_dir, recipe, **fixed)
    text = standard_library_text()
    held_out = even_batches(text.held_out, eval_batches, batch_size, seq_len)
    print(f"{recipe}: {len(text.train):,} bytes to train on, {len(text.held_out):,} held out")

    model = GPT(layers=layers, width=width, heads=heads, max_length=seq_len)
    schedule = optax.warmup_cosine_decay_schedule(0.0, lr, max(1, steps // 10), steps)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95))
    training = TRAININGS[framework](recipe, model, tx, seed=seed, microbatches=microbatches)

    first = 0
    if checkpoints:
        first = checkpoints.restore_latest(training)
        if first >= steps:
            print(f"{checkpoint_dir} holds step {first} of {steps}: there is nothing left to do")
    train_losses, held_out_losses = {}, {}
    # Stopped by an error, or by Ctrl-C, a run still ends the writing that it began.
    written = contextlib.closing(checkpoints) if checkpoints else contextlib.nullcontext()
    with written, Meter(recipe, first, steps, batch_size * seq_len) as meter:
        for step in range(first + 1, steps + 1):
            loss = training.step(random_batch(text.train, batch_size, seq_len, seed, step))
            train_losses[step] = loss
            if step % 10 == 0 or step == steps:
                state = training.state
                jaxmp.check(state)  # raises if the loss scale sits at its floor and still overflows
                meter.show(step, loss, state)
            if step % eval_every == 0 or step == steps:
                held_out_losses[step] = float(np.mean([training.loss(b) for b in held_out]))
                if checkpoints:
                    checkpoints.save(step, training.arrays())
                meter.restart_clock(step)
    train_losses = {step: float(loss) for step, loss in train_losses.items()}
    return Run(training.state, training.arrays(), train_losses, held_out_losses)


if __name__ == "__main__":
    typer.run(train)
