"""`jaxmp show`."""

from __future__ import annotations

import tomllib
from typing import Annotated, Any

import typer
from rich.padding import Padding
from rich.text import Text

from jaxmp._recipe import Recipe, load_recipe
from jaxmp.cli._arguments import JsonOption, RecipeArgument
from jaxmp.cli._output import console, escape, make_grid, write_json
from jaxmp.cli._recipe_text import op_sections, recipe_sections


def show(
    recipe: RecipeArgument,
    ops: Annotated[
        bool, typer.Option("--ops", help="Print the whole table of operations, with reasons.")
    ] = False,
    json: JsonOption = None,
) -> None:
    """Print all settings of a recipe, with reasons."""
    loaded = load_recipe(recipe)
    if write_json(json, _settings(loaded, with_ops=ops)):
        return
    output = console()
    output.print(escape(loaded.name, "bold"), escape(loaded.summary, "dim"), sep="  ")
    for title, rows in op_sections(loaded.ops) if ops else recipe_sections(loaded):
        output.print()
        output.print(Text(title, style="bold cyan"))
        output.print(Padding(make_grid(rows), (0, 0, 0, 2)))


def _settings(recipe: Recipe, *, with_ops: bool) -> dict[str, Any]:
    """Returns the settings under the keys of a recipe file."""
    settings = tomllib.loads(recipe.to_toml())
    if with_ops:
        settings["ops"] = {op.name: recipe.ops.category(op.name) for op in recipe.ops}
    return settings
