"""`jaxmp recipes`, `show`, `doctor` and `checkpoint`: recipes, the machine, and saved states."""

import dataclasses
import tomllib
from pathlib import Path
from typing import Annotated

import typer

import jaxmp
from jaxmp._policies import _op_table, _recipe
from jaxmp._policies._policy import summarized
from jaxmp._tools.cli import _arguments
from jaxmp._tools.cli._outputs import console, escape, make_table, write_json


def show_recipes(json: _arguments.JsonOption = None) -> None:
    """List the installed recipes."""
    table = make_table("recipe", "policy", "loss scale", "summary")
    rows: list[dict[str, str]] = []
    for recipe in map(_recipe.load_recipe, _recipe.list_recipes()):
        # `keep_inputs` is long; `jaxmp show` prints it.
        policy, loss_scale = summarized(recipe.policies.default), recipe.loss_scale_data.kind
        row = {"name": recipe.name, "policy": str(policy), "loss_scale": loss_scale}
        rows.append(row | {"summary": recipe.summary})
        # The three dtypes are on one line, and each other setting on a line below.
        dtypes, others = row["policy"].split(",")[:3], row["policy"].split(",")[3:]
        lines = "\n".join([",".join(dtypes), *others])
        table.add_row(escape(recipe.name, "bold"), lines, loss_scale, escape(recipe.summary))
    if not write_json(json, rows):
        console().print(table)


def show_recipe(
    recipe: Annotated[str, typer.Argument()],
    ops: Annotated[bool, typer.Option("--ops")] = False,
    json: _arguments.JsonOption = None,
) -> None:
    """Print all settings of a recipe as a recipe file, with the reasons of its rules.

    Args:
      recipe: Name of a recipe, path ending in .toml, or policy string such as p=f32,c=bf16,o=f32.
      ops: Print the whole table of operations, with reasons.
    """
    loaded = _recipe.load_recipe(recipe)
    # The keys of a recipe file.
    settings = tomllib.loads(loaded.to_toml())
    if ops:
        settings["ops"] = {op.name: loaded.ops.category(op.name) for op in loaded.ops}
    if write_json(json, settings):
        return
    if ops:
        _print_ops(loaded.ops)
    else:
        # Lines are not wrapped, so that the text can be saved as a file.
        console().print(escape(loaded.to_toml()), soft_wrap=True, end="")


def _print_ops(ops: _op_table.OpTable) -> None:
    """Prints a table of the operations of each category."""
    for category, meaning in _op_table.CATEGORIES.items():
        table = make_table("operation", "reason")
        for name in ops.names(category):
            op = ops.op(name)
            changed = "" if op.category == category else f"changed from {op.category}: "
            table.add_row(escape(name, "dim"), escape(f"{changed}{op.reason}"))
        console().print(escape(f"{category}: {meaning}", "bold cyan"))
        console().print(table)


def show_doctor(json: _arguments.JsonOption = None) -> None:
    """Describe this machine, the recipe that fits it, and what is wrong with its installation."""
    report = jaxmp.doctor()
    problems = [problem._asdict() for problem in report.problems]
    values = report._asdict() | {"machine": report.machine._asdict(), "problems": problems}
    if not write_json(json, values):
        console().print(escape(str(report)))
    if report.problems:
        raise typer.Exit(1)


checkpoint = typer.Typer(help="Show and verify checkpoints.", no_args_is_help=True)


@checkpoint.command("show")
def show_checkpoint(
    path: _arguments.PathArgument,
    step: _arguments.StepOption = None,
    leaves: Annotated[bool, typer.Option("--leaves")] = False,
    json: _arguments.JsonOption = None,
) -> None:
    """Print the recipe, the master layout and the leaves of a checkpoint.

    Args:
      leaves: List every leaf.
    """
    checkpointer, step = open_run(path, step)
    info = checkpointer.describe(step)
    if write_json(json, dataclasses.asdict(info) | {"steps": checkpointer.all_steps()}):
        return
    console().print(escape(f"{info.path}\n{info}"), soft_wrap=True)
    if leaves:
        table = make_table("leaf", "dtype", "shape", "role")
        for leaf in info.leaves:
            shape = ", ".join(map(str, leaf.shape))
            table.add_row(escape(leaf.path), leaf.dtype, escape(f"[{shape}]"), leaf.role)
        console().print(table)


@checkpoint.command()
def verify(
    path: _arguments.PathArgument,
    step: _arguments.StepOption = None,
    json: _arguments.JsonOption = None,
) -> None:
    """Read all files of a checkpoint and compare their checksums; exits with 2 if it is damaged."""
    checkpointer, step = open_run(path, step)
    info = checkpointer.verify(step)
    if not write_json(json, dataclasses.asdict(info) | {"intact": True}):
        console().print(escape(f"Step {info.step} is intact: {len(info.leaves)} leaves.", "green"))


def open_run(path: Path, step: int | None) -> "tuple[jaxmp.checkpoint.Checkpointer, int | None]":
    """Returns the checkpointer of a run and the step; `path` may be that of a step."""
    if step is None and path.name.isdigit() and (path / "state").is_dir():
        path, step = path.parent, int(path.name)
    return jaxmp.checkpoint.Checkpointer(path), step
