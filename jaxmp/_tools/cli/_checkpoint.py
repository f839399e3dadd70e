"""`jaxmp checkpoint show` and `verify`, and `jaxmp locate`."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import jax
import jax.numpy as jnp
import typer

import jaxmp
from jaxmp._core._trees import all_finite
from jaxmp._tools.cli._arguments import FUNCTION_HELP, HtmlOption, JsonOption, call, load_function
from jaxmp._tools.cli._output import console, escape, make_table, write_json, write_report
from jaxmp._tools.nonfinite._measure import last_step_was_skipped
from jaxmp.errors import JaxmpError

if TYPE_CHECKING:
    from jaxmp.checkpoint import Checkpointer, CheckpointInfo

checkpoint = typer.Typer(help="Show and verify checkpoints.", no_args_is_help=True)

_PathArgument = Annotated[
    Path, typer.Argument(help="Directory of a run, or of one of its steps.", metavar="PATH")
]
_StepOption = Annotated[int | None, typer.Option(help="The step; by default the latest.")]


@checkpoint.command()
def show(
    path: _PathArgument,
    step: _StepOption = None,
    leaves: Annotated[bool, typer.Option("--leaves", help="List every leaf.")] = False,
    json: JsonOption = None,
) -> None:
    """Print the recipe, the master layout and the leaves of a checkpoint."""
    checkpointer, step = open_run(path, step)
    info = checkpointer.describe(step)
    if write_json(json, _rows(info, steps=checkpointer.all_steps())):
        return
    console().print(escape(f"{info.path}\n{info}"), soft_wrap=True)
    if leaves:
        table = make_table("leaf", "dtype", "shape", "role")
        for leaf in info.leaves:
            shape = ", ".join(map(str, leaf.shape))
            table.add_row(escape(leaf.path), leaf.dtype, escape(f"[{shape}]"), leaf.role)
        console().print(table)


@checkpoint.command()
def verify(path: _PathArgument, step: _StepOption = None, json: JsonOption = None) -> None:
    """Read all files of a checkpoint and compare their checksums; exits with 2 if it is damaged."""
    checkpointer, step = open_run(path, step)
    info = checkpointer.verify(step)
    if not write_json(json, _rows(info, intact=True)):
        console().print(escape(f"Step {info.step} is intact: {len(info.leaves)} leaves.", "green"))


def open_run(path: Path, step: int | None) -> tuple[Checkpointer, int | None]:
    """Returns the checkpointer of a run and the step; `path` may be that of a step."""
    if step is None and path.name.isdigit() and (path / "state").is_dir():
        path, step = path.parent, int(path.name)
    return jaxmp.checkpoint.Checkpointer(path), step


def _rows(info: CheckpointInfo, **more: object) -> dict[str, Any]:
    return {**dataclasses.asdict(info), **more}


def locate(
    function: Annotated[
        str,
        typer.Argument(
            metavar="FUNCTION",
            help=f"{FUNCTION_HELP} It takes the description of the checkpoint, or nothing, and"
            " returns the step and its arguments: a state, and a batch or an iterator of batches.",
        ),
    ],
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Checkpoint of the state, or of a tuple of the first arguments, such as a model"
            " and its optimizer, that are restored.",
        ),
    ] = None,
    step: Annotated[int | None, typer.Option(help="Its step; by default the latest.")] = None,
    batches: Annotated[int, typer.Option(help="Largest number of batches to try.")] = 1000,
    json: JsonOption = None,
    html: HtmlOption = None,
) -> None:
    """Run a training step again and print where its first value that is not finite comes from.

    Exits with 1 if there is such a value, and with 0 if the step is finite.
    """
    if step is not None and checkpoint is None:
        raise JaxmpError("--step requires --checkpoint DIR, such as --checkpoint checkpoints.")
    checkpointer = info = None
    if checkpoint is not None:
        checkpointer, step = open_run(checkpoint, step)
        info = checkpointer.describe(step)
    example = "jaxmp locate run.py:make_step --checkpoint checkpoints"
    make = load_function(function, example, "train_step, state, batch", "info")
    takes_info = bool(inspect.signature(make).parameters)
    made = call(f"{function}()", lambda: make(info) if takes_info else make())
    if not isinstance(made, (tuple, list)) or len(made) < 2 or not callable(made[0]):
        raise JaxmpError(
            f"{function} returned {type(made).__name__}, not a function and its arguments. Return "
            "them:\n    return train_step, state, batch"
        )
    train_step, *arguments = made
    if checkpointer is not None and info is not None:
        count = _count(info, arguments[0])
        if count is None:
            arguments[0] = checkpointer.restore(arguments[0], step=step)
        else:
            restored = checkpointer.restore(tuple(arguments[:count]), step=step)
            arguments[:count] = restored
    state, *rest = arguments
    if rest and isinstance(rest[-1], Iterator):
        if len(rest) > 1:
            raise JaxmpError(
                f"{function} returned {len(rest)} states and an iterator of batches. An iterator "
                "requires a single state. Return the batch of the failed step instead:\n"
                "    return train_step, model, optimizer, batch"
            )
        state, rest = _failing(train_step, state, islice(rest[-1], batches))
    report = call(
        f"the step of {function}", lambda: jaxmp.locate_nonfinite(train_step, state, *rest)
    )
    write_report(report, json, html)
    raise typer.Exit(int(report.reproduced))


def _count(info: CheckpointInfo, first: object) -> int | None:
    """Returns the number of arguments that a checkpoint has as a tuple; None if it has the first.

    The paths of a tuple begin with a number.
    """
    keys = {leaf.path.split("/")[0] for leaf in info.leaves}
    is_tuple = not isinstance(first, (tuple, list)) and all(key.isdecimal() for key in keys)
    return 1 + max(map(int, keys)) if is_tuple and keys else None


def _failing(step: Callable[..., Any], state: Any, batches: Iterator[Any]) -> tuple[Any, list[Any]]:
    """Trains until a step is skipped or not finite, and returns its arguments, or the last ones."""
    batch = next(batches, None)
    if batch is None:
        raise JaxmpError(
            "The iterator has no batches. Return those after the checkpoint:\n"
            "    return train_step, state, iter(batches[info.step:])"
        )
    while True:
        # The step may donate its arguments.
        results = step(*jax.tree.map(jnp.copy, (state, batch)))
        following = next(batches, None)
        is_finite = bool(all_finite(results)) and not last_step_was_skipped(results)
        if following is None or not is_finite:
            return state, [batch]
        state = results[0] if type(results) in (tuple, list) else results
        batch = following
