"""Trains a byte-level GPT on the source code of Python's standard library, with any recipe.

    python examples/train_lm.py --recipe bf16
    python examples/train_lm.py --recipe bf16 --framework nnx
    python examples/train_lm.py --recipe fp16 --steps 1000 --seq-len 128 --microbatches 2
    python examples/train_lm.py --recipe "p=bf16,c=bf16,o=f32" --checkpoint-dir checkpoints
    python examples/train_lm.py --recipe my.toml --width 256 --layers 6 --heads 8
    python examples/train_lm.py --help
    jaxmp audit examples/train_lm.py:make_step --recipe bf16

With --checkpoint-dir, the same command resumes a run that was stopped, and --migrate resumes it
under another recipe.
Install first: pip install -e ".[examples]".
"""

import contextlib
import dataclasses
import enum
import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import typer
from flax import nnx
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

import jaxmp
from byte_gpt import (
    GPT,
    NnxGPT,
    even_batches,
    in_nnx,
    random_batch,
    standard_library_text,
)
from command_line import Positive, RecipeName, Seed, check_divisible
from jaxmp.checkpoint import Checkpointer

# ---------------------------------------------------------------------------
# Linen: the same five lines for every recipe
# ---------------------------------------------------------------------------


def prepare(
    recipe: Any,
    model: GPT,
    tx: optax.GradientTransformation,
    *,
    seed: int = 0,
    microbatches: int = 1,
) -> tuple[jaxmp.TrainState, Callable[..., Any], Callable[..., jax.Array]]:
    """Returns the initial state, the jitted train step and the jitted loss of (params, tokens).

    The state contains everything that `init` returns: the parameters and, in some recipes, FP8
    state.
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
    """Returns the train step and its arguments, for `jaxmp audit`. The batch is a shape."""
    state, train_step, _ = prepare(recipe, GPT(), optax.adamw(3e-3))
    return train_step, state, jax.ShapeDtypeStruct((16, GPT.max_length + 1), jnp.int32)


def first_variables(model: GPT, seed: int) -> Any:
    """Returns the initial variables; every recipe starts from the same parameters."""
    tokens = jnp.zeros((1, model.max_length), jnp.int32)
    return jax.jit(model.init)(jax.random.key(seed), tokens)


def cross_entropy(logits_BTV: jax.Array, tokens_BS: jax.Array) -> jax.Array:
    """Returns the mean loss over all tokens except the first; S is T + 1."""
    logits_BTV = logits_BTV.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits_BTV, tokens_BS[:, 1:]).mean()


# ---------------------------------------------------------------------------
# NNX: the same recipe and the same initial parameters
# ---------------------------------------------------------------------------


def prepare_nnx(
    recipe: Any,
    model: GPT,
    tx: optax.GradientTransformation,
    *,
    seed: int = 0,
    microbatches: int = 1,
) -> tuple[NnxGPT, jaxmp.nnx.Optimizer, Callable[..., jax.Array], Callable[..., jax.Array]]:
    """Returns the model, its optimizer, and the train step and loss, which are not compiled."""
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
# One interface for both frameworks
# ---------------------------------------------------------------------------


class LinenTraining:
    """Training of a Linen model, whose train state is replaced at every step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Takes the arguments of `prepare`."""
        self.state, self._step, self._loss = prepare(*args, **kwargs)

    def step(self, tokens_BS: np.ndarray) -> jax.Array:
        """Trains on a batch, and returns its loss."""
        self.state, loss = self._step(self.state, tokens_BS)
        return loss

    def loss(self, tokens_BS: np.ndarray) -> jax.Array:
        """Returns the loss of a batch without training on it."""
        return self._loss(self.state.params, tokens_BS)

    def arrays(self) -> Any:
        """Returns all arrays."""
        return self.state

    def save(self, checkpoints: "Checkpoints", step: int) -> None:
        """Writes a checkpoint."""
        checkpoints.save(step, self.state)

    def restore(self, checkpoints: "Checkpoints") -> None:
        """Continues from the latest checkpoint."""
        self.state = checkpoints.restore(self.state)


class NnxTraining:
    """Training of an NNX model, which is split into arrays once and not at every call."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Takes the arguments of `prepare_nnx`."""
        *nodes, train_step, loss_fn = prepare_nnx(*args, **kwargs)
        self._loss = nnx.jit(loss_fn)
        self.nodes = tuple(nodes)
        self.step = nnx.cached_partial(nnx.jit(train_step), *nodes)

    @property
    def state(self) -> jaxmp.nnx.Optimizer:
        """Optimizer with masters, loss scale and skip counters."""
        return self.nodes[1]

    def loss(self, tokens_BS: np.ndarray) -> jax.Array:
        """Returns the loss of a batch without training on it."""
        return self._loss(self.nodes[0], tokens_BS)

    def arrays(self) -> Any:
        """Returns all arrays."""
        names = ("model", "optimizer")
        nodes = dict(zip(names, self.nodes, strict=True))
        return {name: nnx.as_pure(nnx.state(node)) for name, node in nodes.items()}

    def save(self, checkpoints: "Checkpoints", step: int) -> None:
        """Writes a checkpoint."""
        checkpoints.save(step, self.nodes)

    def restore(self, checkpoints: "Checkpoints") -> None:
        """Continues from the latest checkpoint."""
        checkpoints.restore(self.nodes)


class Framework(enum.StrEnum):
    """Library in which the model is written."""

    linen = "linen"
    nnx = "nnx"


TRAININGS = {"linen": LinenTraining, "nnx": NnxTraining}

# ---------------------------------------------------------------------------
# Progress and checkpoints
# ---------------------------------------------------------------------------


class Meter:
    """Progress bar with loss, tokens per second, loss scale and number of skipped steps."""

    def __init__(self, name: str, first: int, steps: int, tokens_per_step: int) -> None:
        """Starts after step `first` of `steps`."""
        fields = ("loss {task.fields[loss]:.3f}", "{task.fields[speed]:,.0f} tokens/s")
        fields += ("scale {task.fields[scale]:g}", "skipped {task.fields[skipped]}")
        columns = (BarColumn(bar_width=8), MofNCompleteColumn(), *map(TextColumn, fields))
        self._progress = Progress(TextColumn(f"{name:<11}"), *columns)
        values = dict(loss=float("nan"), speed=0.0, scale=1.0, skipped=0)
        self._task = self._progress.add_task(
            name, total=steps, completed=first, visible=first < steps, **values
        )
        self._tokens_per_step = tokens_per_step
        self.restart_clock(first)

    def __enter__(self) -> "Meter":
        """Shows the bar."""
        self._progress.start()
        return self

    def __exit__(self, *_: Any) -> None:
        """Stops; the last values remain on the screen."""
        self._progress.stop()

    def restart_clock(self, step: int) -> None:
        """Excludes the time since the last `show`, such as that of an evaluation."""
        self._since, self._since_step = time.perf_counter(), step

    def show(self, step: int, loss: jax.Array, state: Any) -> None:
        """Waits for a step to end, and shows its loss and the state after it."""
        # Warns once if 10 or more consecutive steps were skipped.
        stats = jaxmp.get_skip_stats(state)
        in_a_row = f" ({stats.consecutive} in a row)" if stats.consecutive > 1 else ""
        values = dict(
            loss=float(loss),
            scale=float(jaxmp.get_loss_scale(state).scale_value),
            skipped=f"{stats.total}{in_a_row}",
        )
        tokens = (step - self._since_step) * self._tokens_per_step
        values["speed"] = tokens / (time.perf_counter() - self._since)
        self._progress.update(self._task, completed=step, **values)
        self.restart_clock(step)


class Checkpoints:
    """Latest state of a run on disk. A run resumes with the options that it started with."""

    def __init__(self, directory: Path, recipe: str, *, migrate: bool, **options: Any) -> None:
        """Opens `directory`; raises an error if it was written with other options."""
        self._recipe, self._migrate = jaxmp.load_recipe(recipe), migrate
        self._options = {name: str(value) for name, value in options.items()}
        self._checkpointer = Checkpointer(directory, keep=1)
        self.latest_step = self._checkpointer.latest_step() or 0
        if self.latest_step:
            self._check(self._checkpointer.describe(self.latest_step).extra)

    def save(self, step: int, state: Any) -> None:
        """Writes the state of a run after `step`. Batches depend on the step alone."""
        self._checkpointer.save(step, state, recipe=self._recipe, extra=self._options)

    def restore(self, state: Any) -> Any:
        """Returns the latest state."""
        try:
            return self._checkpointer.restore(state, recipe=self._recipe, migrate=self._migrate)
        except jaxmp.errors.CheckpointError as error:
            hint = "" if self._migrate else " With this script: --migrate."
            raise typer.BadParameter(f"{error}{hint}") from None

    def _check(self, written_with: dict[str, str]) -> None:
        for name, value in self._options.items():
            if written_with.get(name) != value:
                raise typer.BadParameter(
                    f"{self._checkpointer.directory} was written with another {name}:\n"
                    f"{written_with.get(name)}\n"
                    "Resume with the same options, or name another --checkpoint-dir."
                )

    def close(self) -> None:
        """Waits until everything is written."""
        self._checkpointer.close()


# ---------------------------------------------------------------------------
# Command
# ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Run:
    """Result of a run: the final state, and the losses."""

    state: Any  # the TrainState, or NNX's Optimizer
    arrays: Any  # all of them
    train_losses: dict[int, float]  # step -> loss of that step's batch
    held_out_losses: dict[int, float]  # step -> mean loss of the held-out batches after it


def train(
    recipe: RecipeName = "bf16",
    framework: Framework = Framework.linen,
    steps: Positive = 400,
    seq_len: Positive = 64,
    batch_size: Positive = 16,
    layers: Positive = 3,
    width: Positive = 128,
    heads: Positive = 4,
    lr: Annotated[float, typer.Option(help="Peak learning rate.")] = 3e-3,
    seed: Seed = 0,
    microbatches: Annotated[
        int, typer.Option(min=1, help="Parts of a batch; gradients are summed in FP32.")
    ] = 1,
    eval_every: Annotated[
        int, typer.Option(min=1, help="Steps between evaluations on held-out text.")
    ] = 50,
    eval_batches: Positive = 16,
    checkpoint_dir: Annotated[
        Path | None,
        typer.Option(file_okay=False, help="Folder to save checkpoints in and resume from."),
    ] = None,
    migrate: Annotated[
        bool, typer.Option("--migrate", help="Convert the checkpoint of another recipe.")
    ] = False,
) -> Run:
    """Trains a byte-level GPT on the source code of Python's standard library."""
    check_divisible("--width", width, "--heads", heads)
    check_divisible("--batch-size", batch_size, "--microbatches", microbatches)
    # A run may resume with a different number of steps, and then follows the new schedule.
    fixed = dict(seq_len=seq_len, batch_size=batch_size, layers=layers, width=width, heads=heads)
    fixed |= dict(lr=lr, seed=seed, framework=framework)
    checkpoints = checkpoint_dir and Checkpoints(checkpoint_dir, recipe, migrate=migrate, **fixed)
    text = standard_library_text()
    held_out = even_batches(text.held_out, eval_batches, batch_size, seq_len)
    print(f"{recipe}: {len(text.train):,} bytes of training text, {len(text.held_out):,} held out")

    model = GPT(layers=layers, width=width, heads=heads, max_length=seq_len)
    schedule = optax.warmup_cosine_decay_schedule(0.0, lr, max(1, steps // 10), steps)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95))
    training = TRAININGS[framework](recipe, model, tx, seed=seed, microbatches=microbatches)

    first = 0
    if checkpoints and checkpoints.latest_step:
        first = checkpoints.latest_step
        training.restore(checkpoints)
        if first >= steps:
            print(f"{checkpoint_dir} contains step {first} of {steps}: the run is complete")
    train_losses, held_out_losses = {}, {}
    # A checkpoint that is being written is completed even after an error or Ctrl-C.
    written = contextlib.closing(checkpoints) if checkpoints else contextlib.nullcontext()
    with written, Meter(recipe, first, steps, batch_size * seq_len) as meter:
        for step in range(first + 1, steps + 1):
            loss = training.step(random_batch(text.train, batch_size, seq_len, seed, step))
            train_losses[step] = loss
            if step % 10 == 0 or step == steps:
                state = training.state
                jaxmp.check(state)  # raises if gradients overflow at the smallest loss scale
                meter.show(step, loss, state)
            if step % eval_every == 0 or step == steps:
                held_out_losses[step] = float(np.mean([training.loss(b) for b in held_out]))
                if checkpoints:
                    training.save(checkpoints, step)
                meter.restart_clock(step)
    train_losses = {step: float(loss) for step, loss in train_losses.items()}
    return Run(training.state, training.arrays(), train_losses, held_out_losses)


if __name__ == "__main__":
    typer.run(train)
