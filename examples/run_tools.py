"""What a training run needs around it: a progress bar, and checkpoints on disk."""

import time
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

import jaxmp


class Meter:
    """A progress bar with the loss, tokens per second, the loss scale and skipped steps."""

    def __init__(self, name: str, first: int, steps: int, tokens_per_step: int) -> None:
        """Starts at step `first` of `steps`."""
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
        """Leaves its last values on the screen."""
        self._progress.stop()

    def restart_clock(self, step: int) -> None:
        """Leaves out what was done since the last `show`: an evaluation, say."""
        self._since, self._since_step = time.perf_counter(), step

    def show(self, step: int, loss: jax.Array, state: Any) -> None:
        """Waits for `step` to end and shows how it went."""
        # Warns once if the last 10 steps or more were skipped.
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
    """A whole run on disk: parameters, masters, moments, loss scale, skip counters."""

    def __init__(self, directory: Path, recipe: str, **options: Any) -> None:
        """Keeps the latest checkpoint in `directory`; refuses one that was made with others."""
        recipe = jaxmp.load_recipe(recipe).to_toml()
        self._made_with = {"recipe": recipe} | {name: str(v) for name, v in options.items()}
        latest = ocp.CheckpointManagerOptions(max_to_keep=1)
        self._manager = ocp.CheckpointManager(directory.resolve(), options=latest)
        if (step := self._manager.latest_step()) is not None:
            made_with = ocp.args.Composite(made_with=ocp.args.JsonRestore())
            self._check(self._manager.restore(step, args=made_with)["made_with"])

    def save(self, step: int, arrays: Any) -> None:
        """Writes the arrays of a training as they are after `step`."""
        args = ocp.args.Composite(
            arrays=ocp.args.StandardSave(arrays), made_with=ocp.args.JsonSave(self._made_with)
        )
        self._manager.save(step, args=args)

    def restore_latest(self, training: Any) -> int:
        """Puts `training` where the latest checkpoint was; returns its step, 0 if there is none."""
        step = self._manager.latest_step()
        if step is None:
            return 0
        args = ocp.args.Composite(arrays=ocp.args.StandardRestore(training.arrays()))
        training.restore(self._manager.restore(step, args=args)["arrays"])
        return step

    def _check(self, made_with: dict[str, str]) -> None:
        for name, value in self._made_with.items():
            if made_with.get(name) != value:
                raise typer.BadParameter(
                    f"{self._manager.directory} was written with another {name}:\n"
                    f"{made_with.get(name)}\n"
                    "Resume with that one, or name another --checkpoint-dir."
                )

    def close(self) -> None:
        """Waits until all is written."""
        self._manager.close()
