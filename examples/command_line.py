"""Options that the examples share. A value that is not allowed ends them with one sentence."""

from typing import Annotated

import typer

import jaxmp


def check_recipe(name: str) -> str:
    """Returns the name of a recipe; any other text is an error of the command line."""
    try:
        jaxmp.load_recipe(name)
    except jaxmp.JaxmpError as error:
        raise typer.BadParameter(str(error)) from None
    return name


def check_divisible(option: str, value: int, divisor: str, number: int) -> None:
    """Raises an error of the command line if an option is not divisible by another one."""
    if value % number:
        raise typer.BadParameter(f"{option} {value} is not divisible by {divisor} {number}.")


RecipeName = Annotated[
    str, typer.Option(help="Name, policy string or .toml file.", callback=check_recipe)
]
Positive = Annotated[int, typer.Option(min=1)]
Seed = Annotated[int, typer.Option(min=0)]
