"""`jaxmp explain`."""

from __future__ import annotations

from typing import Annotated, Any

import jax
import typer

import jaxmp
from jaxmp._recipe import load_recipe
from jaxmp.cli._arguments import FUNCTION_HELP, JsonOption, call, load_function
from jaxmp.cli._output import console, escape, write_json
from jaxmp.errors import JaxmpError


def explain(
    function: Annotated[
        str,
        typer.Argument(
            metavar="FUNCTION",
            help=f"{FUNCTION_HELP} It returns a Linen model and example inputs, or an NNX model.",
        ),
    ],
    recipe: Annotated[
        str, typer.Option(help="Name of a recipe, path ending in .toml, or policy string.")
    ],
    json: JsonOption = None,
) -> None:
    """Print the rule that applies to each module of a model, and the rules that are unused."""
    loaded = load_recipe(recipe)
    model, inputs = _load_model(function)
    explained = call(f"the model of {function}", lambda: jaxmp.explain(model, loaded)(*inputs))
    if not write_json(json, explained.to_json()):
        console().print(escape(str(explained)), soft_wrap=True)


def _load_model(name: str) -> tuple[Any, list[Any]]:
    """Calls the user's function, and returns its model and the inputs."""
    make = load_function(
        name, "jaxmp explain my_package.model:make --recipe bf16", "model, example_input"
    )
    result = call(f"{name}()", make)
    model, *inputs = (result or [result]) if isinstance(result, (tuple, list)) else [result]
    if _is_nnx(model):
        # An NNX model has paths without inputs. With inputs, its FLOPs can be counted.
        arrays = any(hasattr(leaf, "shape") for leaf in jax.tree.leaves(inputs))
        return model, inputs if arrays else []
    if not inputs:
        raise JaxmpError(
            f"{name}() returned {type(result).__name__}, not a model and its example inputs. "
            "Return both:\n    return model, example_input"
        )
    return model, inputs


def _is_nnx(model: object) -> bool:
    """Returns True for an NNX module, without importing Flax."""
    return any(cls.__module__ == "flax.nnx.module" for cls in type(model).__mro__)
