"""`jaxmp memory`."""

from __future__ import annotations

import contextlib
from typing import Annotated

import typer

import jaxmp
from jaxmp._core._compat import unchecked_cuda
from jaxmp.cli._arguments import FUNCTION_HELP, HtmlOption, JsonOption, call, make_step
from jaxmp.cli._output import console, write_file, write_json


def memory(
    function: Annotated[
        str,
        typer.Argument(
            help=f"{FUNCTION_HELP} It takes the recipe, or nothing, and returns the step and its"
            " arguments, which may be shapes."
        ),
    ],
    recipe: Annotated[str | None, typer.Option(help="Recipe; the function receives it.")] = None,
    target: Annotated[
        str | None, typer.Option(help="Chip, such as h200 or v6e; it does not have to be present.")
    ] = None,
    exact: Annotated[
        bool, typer.Option("--exact", help="Compile for the target, and print XLA's figures too.")
    ] = False,
    json: JsonOption = None,
    html: HtmlOption = None,
) -> None:
    """Print the memory that a training step requires, by kind, and whether it fits a chip.

    The exit status is 1 if it does not fit.
    """
    with contextlib.nullcontext() if target is None else unchecked_cuda():
        step, *arguments = make_step(function, recipe)
        estimate = call(
            f"the step of {function}",
            lambda: jaxmp.estimate_memory(step, *arguments, target=target, exact=exact),
        )
    if not write_json(json, estimate.to_json()):
        console().print(estimate.to_rich(), soft_wrap=True)
    if html is not None:
        write_file(html, estimate.to_html())
    raise typer.Exit(int(estimate.fits is False))
