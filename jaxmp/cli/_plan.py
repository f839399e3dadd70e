"""`jaxmp plan`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

import jaxmp
from jaxmp.cli._arguments import FUNCTION_HELP, HtmlOption, JsonOption, call, load_function
from jaxmp.cli._output import console, write_file, write_json

_EXAMPLE = "jaxmp plan run.py:make_step --recipes bf16,fp8 --targets a100,h100"


def plan(
    function: Annotated[
        str,
        typer.Argument(
            metavar="FUNCTION",
            help=f"{FUNCTION_HELP} It takes a recipe, and returns the step and its arguments,"
            " which may be shapes; for --batches and --remat, it also takes batch_size and remat.",
        ),
    ],
    targets: Annotated[
        str, typer.Option(help="Chips, separated by commas; they do not have to be present.")
    ],
    recipes: Annotated[str, typer.Option(help="Recipes, separated by commas.")] = "bf16,fp8",
    batches: Annotated[
        str | None,
        typer.Option(help='Batch sizes, separated by commas, or "largest" for the one that fits.'),
    ] = None,
    remat: Annotated[
        str | None, typer.Option(help="Values of the argument remat, such as false,true.")
    ] = None,
    cache: Annotated[
        str, typer.Option(metavar="FOLDER", help="Folder for compiled programs; empty for none.")
    ] = "~/.cache/jaxmp",
    json: JsonOption = None,
    html: HtmlOption = None,
) -> None:
    """Compile a training step for recipes and chips, and recommend a recipe for each chip.

    The exit status is 1 if no program fits one of the chips.
    """
    make_step = load_function(function, _EXAMPLE, "train_step, state, batch", "recipe")
    report = call(
        f"planning {function}",
        lambda: jaxmp.plan(
            make_step,
            recipes=_items(recipes),
            targets=_items(targets),
            batches=_values(batches),
            remat=_values(remat),
            cache=cache or None,
        ),
    )
    if not write_json(json, report.to_json()):
        console().print(report.to_rich(), soft_wrap=True)
    if html is not None:
        write_file(html, report.to_html())
    raise typer.Exit(0 if all(choice.recipe for choice in report.choices) else 1)


def _items(text: str) -> list[str]:
    return [item for item in text.split(",") if item]


def _values(text: str | None) -> Any:
    """Returns numbers, booleans and words; "largest" is not a list."""
    named: dict[str, Any] = {"true": True, "false": False}
    items = [named.get(x, int(x) if x.isdecimal() else x) for x in _items(text or "")]
    return text if text in (None, "largest") else items
