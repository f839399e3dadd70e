"""`jaxmp locate`."""

from __future__ import annotations

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
from jaxmp._nonfinite._arguments import last_step_was_skipped
from jaxmp.cli._arguments import FUNCTION_HELP, HtmlOption, JsonOption, call, load_function
from jaxmp.cli._checkpoint import open_run
from jaxmp.cli._output import console, write_file, write_json
from jaxmp.errors import JaxmpError

if TYPE_CHECKING:
    from jaxmp.checkpoint import CheckpointInfo


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
    if not write_json(json, report.to_json()):
        console().print(report.to_rich(), soft_wrap=True)
    if html is not None:
        write_file(html, report.to_html())
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
