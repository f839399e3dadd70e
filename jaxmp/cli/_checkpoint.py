"""`jaxmp checkpoint show` and `verify`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import jaxmp
from jaxmp.cli._arguments import JsonOption
from jaxmp.cli._output import console, escape, make_table, write_json

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
    _print_info(info)
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


def _print_info(info: CheckpointInfo) -> None:
    console().print(escape(f"{info.path}\n{info}"), soft_wrap=True)
