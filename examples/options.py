"""Options that several examples take."""

from typing import Annotated

import typer

import jaxmp


def known_recipe(name: str) -> str:
    """Returns `name`; refuses one that names no recipe as typer refuses any wrong option."""
    try:
        jaxmp.load_recipe(name)
    except jaxmp.JaxmpError as error:
        raise typer.BadParameter(str(error)) from None
    return name


RecipeName = Annotated[
    str, typer.Option(help="Name, policy string or .toml file.", callback=known_recipe)
]
