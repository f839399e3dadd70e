"""`jaxmp show`."""

from __future__ import annotations

import tomllib
from typing import Annotated

import typer

from jaxmp._policies._op_table import CATEGORIES, OpTable
from jaxmp._recipe import load_recipe
from jaxmp.cli._arguments import JsonOption, RecipeArgument
from jaxmp.cli._output import console, escape, make_table, write_json


def show(
    recipe: RecipeArgument,
    ops: Annotated[
        bool, typer.Option("--ops", help="Print the whole table of operations, with reasons.")
    ] = False,
    json: JsonOption = None,
) -> None:
    """Print all settings of a recipe as a recipe file, with the reasons of its rules."""
    loaded = load_recipe(recipe)
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


def _print_ops(ops: OpTable) -> None:
    """Prints a table of the operations of each category."""
    for category, meaning in CATEGORIES.items():
        table = make_table("operation", "reason")
        for name in ops.names(category):
            op = ops.op(name)
            changed = "" if op.category == category else f"changed from {op.category}: "
            table.add_row(escape(name, "dim"), escape(f"{changed}{op.reason}"))
        console().print(escape(f"{category}: {meaning}", "bold cyan"))
        console().print(table)
