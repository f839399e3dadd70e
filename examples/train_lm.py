"""Trains a byte-level GPT on the sources of Python's standard library, in the precision you name.

    python examples/train_lm.py --recipe bf16
    python examples/train_lm.py --recipe fp16 --steps 1000 --seq-len 128 --microbatches 2
    python examples/train_lm.py --recipe "p=bf16,c=bf16,o=f32" --checkpoint-dir checkpoints
    python examples/train_lm.py --recipe my.toml --width 256 --layers 6 --heads 8
    python examples/train_lm.py --help

With --checkpoint-dir, a run that was stopped goes on where it was: run the same command again.
Install first: pip install "jaxmp[examples]".
"""

import dataclasses
import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

import jaxmp
from byte_gpt import GPT, even_batches, random_batch, standard_library_text

# ---------------------------------------------------------------------------
# The five lines, the same for every precision
# ---------------------------------------------------------------------------


def prepare(
    recipe: Any,
    model: GPT,
    tx: optax.GradientTransformation,
    *,
    seed: int = 0,
    microbatches: int = 1,
) -> tuple[jaxmp.TrainState, Callable[..., Any], Callable[..., jax.Array]]:
    """Returns the first state, the jitted train step and the jitted loss of (params, tokens)."""
    tokens = jnp.zeros((1, model.max_length), jnp.int32)
    params = jax.jit(model.init)(jax.random.key(seed), tokens)["params"]

    recipe = jaxmp.load_recipe(recipe)
    model = recipe.wrap(model)
    tx = recipe.optimizer(tx)
    state = jaxmp.TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    def loss_fn(params: Any, tokens_BS: jax.Array) -> jax.Array:
        logits_BTV = model.apply({"params": params}, tokens_BS[:, :-1]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits_BTV, tokens_BS[:, 1:]).mean()

    @functools.partial(jax.jit, donate_argnums=0)
    def train_step(state: jaxmp.TrainState, tokens_BS: jax.Array) -> Any:
        loss, grads = state.value_and_grad(loss_fn, microbatches=microbatches)(tokens_BS)
        return state.apply_gradients(grads=grads), loss

    return state, train_step, jax.jit(loss_fn)


# ---------------------------------------------------------------------------
# The loop around them
# ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run left behind: its last state, and the losses on the way."""

    state: jaxmp.TrainState
    train_losses: dict[int, float]  # step -> loss of that step's batch
    held_out_losses: dict[int, float]  # step -> mean loss of the held-out batches after it


def train(
    recipe: Annotated[str, typer.Option(help="Name, policy string or .toml file.")] = "bf16",
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
    text = standard_library_text()
    held_out = even_batches(text.held_out, eval_batches, batch_size, seq_len)
    print(f"{recipe}: {len(text.train):,} bytes to train on, {len(text.held_out):,} held out")

    model = GPT(layers=layers, width=width, heads=heads, max_length=seq_len)
    schedule = optax.warmup_cosine_decay_schedule(0.0, lr, max(1, steps // 10), steps)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95))
    state, train_step, loss_fn = prepare(recipe, model, tx, seed=seed, microbatches=microbatches)

    first = 0
    checkpoints = checkpoint_dir and Checkpoints(checkpoint_dir, recipe)
    if checkpoints:
        first, state = checkpoints.restore_latest(state)
    train_losses, held_out_losses = {}, {}
    with Meter(recipe, first, steps, batch_size * seq_len) as meter:
        for step in range(first + 1, steps + 1):
            state, loss = train_step(
                state, random_batch(text.train, batch_size, seq_len, seed, step)
            )
            train_losses[step] = loss
            if step % 10 == 0 or step == steps:
                jaxmp.check(state)  # raises if the loss scale sits at its floor and still overflows
                meter.show(step, loss, state)
            if step % eval_every == 0 or step == steps:
                losses = [loss_fn(state.params, batch) for batch in held_out]
                held_out_losses[step] = float(np.mean(losses))
                if checkpoints:
                    checkpoints.save(step, state)
                meter.restart_clock(step)
    if checkpoints:
        checkpoints.close()
    return Run(state, {step: float(loss) for step, loss in train_losses.items()}, held_out_losses)


class Meter:
    """A progress bar with the loss, tokens per second, the loss scale and skipped steps."""

    def __init__(self, name: str, first: int, steps: int, tokens_per_step: int) -> None:
        """Starts at step `first` of `steps`."""
        fields = ("loss {task.fields[loss]:.3f}", "{task.fields[speed]:,.0f} tokens/s")
        fields += ("scale {task.fields[scale]:g}", "skipped {task.fields[skipped]}")
        columns = (BarColumn(bar_width=8), MofNCompleteColumn(), *map(TextColumn, fields))
        self._progress = Progress(TextColumn(f"{name:<11}"), *columns)
        values = dict(loss=float("nan"), speed=0.0, scale=1.0, skipped=0)
        self._task = self._progress.add_task(name, total=steps, completed=first, **values)
        self._tokens_per_step = tokens_per_step
        self.restart_clock(first)

    def __enter__(self) -> "Meter":
        """Shows the bar."""
        self._progress.start()
        return self

    def __exit__(self, *_: Any) -> None:
        """Leaves its last values on the screen."""
        self._progress.stop()

    def restart_clock(self, step: int) -> None:
        """Leaves out what was done since the last `show`: an evaluation, say."""
        self._since, self._since_step = time.perf_counter(), step

    def show(self, step: int, loss: jax.Array, state: jaxmp.TrainState) -> None:
        """Waits for `step` to end and shows how it went."""
        values = dict(
            loss=float(loss),
            scale=float(jaxmp.get_loss_scale(state).scale_value),
            skipped=int(jaxmp.get_skip_stats(state).total),
        )
        tokens = (step - self._since_step) * self._tokens_per_step
        values["speed"] = tokens / (time.perf_counter() - self._since)
        self._progress.update(self._task, completed=step, **values)
        self.restart_clock(step)


class Checkpoints:
    """The whole train state on disk: parameters, masters, moments, loss scale, skip counters."""

    def __init__(self, directory: Path, recipe: str) -> None:
        """Keeps the latest checkpoint in `directory`, and the recipe beside it."""
        self._recipe = jaxmp.load_recipe(recipe).to_toml()
        options = ocp.CheckpointManagerOptions(max_to_keep=1)
        self._manager = ocp.CheckpointManager(directory.resolve(), options=options)

    def save(self, step: int, state: jaxmp.TrainState) -> None:
        """Writes `state` as it is after `step`."""
        args = ocp.args.Composite(
            state=ocp.args.StandardSave(state), recipe=ocp.args.JsonSave({"toml": self._recipe})
        )
        self._manager.save(step, args=args)

    def restore_latest(self, state: jaxmp.TrainState) -> tuple[int, jaxmp.TrainState]:
        """Returns the latest step and its state; (0, `state`) where none was saved."""
        step = self._manager.latest_step()
        if step is None:
            return 0, state
        saved = self._manager.restore(step, args=ocp.args.Composite(recipe=ocp.args.JsonRestore()))
        if saved["recipe"]["toml"] != self._recipe:
            raise typer.BadParameter(
                f"{self._manager.directory} was written with another recipe:\n"
                f"{saved['recipe']['toml']}\n"
                "Resume with that one, or name another --checkpoint-dir."
            )
        args = ocp.args.Composite(state=ocp.args.StandardRestore(state))
        return step, self._manager.restore(step, args=args)["state"]

    def close(self) -> None:
        """Waits until all is written."""
        self._manager.close()


if __name__ == "__main__":
    typer.run(train)
