"""`jaxmp explain`."""

from __future__ import annotations

import importlib
from typing import Annotated, Any

import jax
import typer
from rich.padding import Padding

import jaxmp
from jaxmp._policies._policy import with_fields
from jaxmp._policies._required import check_required, explain_modules
from jaxmp._policies._rules import rule_text
from jaxmp._recipe import adapter_name, load_recipe
from jaxmp._recipe_files._load import PolicyMap
from jaxmp.cli._arguments import FUNCTION_HELP, JsonOption, call, load_function
from jaxmp.cli._output import console, escape, make_table, policy_lines, write_json
from jaxmp.errors import JaxmpError, RuleError


class UnmatchedRuleError(RuleError):
    """A required rule of the recipe matched nothing in the model."""


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
    description = f"the model of {function}"
    paths = call(description, lambda: _module_paths(model, inputs))
    try:
        check_required(loaded.policies, paths)
    except RuleError as error:
        partial = jaxmp.typing.Explanation(policies=explain_modules(loaded.policies, paths))
        _print(loaded.policies, partial, json)
        raise UnmatchedRuleError(str(error)) from None
    explained = call(description, lambda: jaxmp.explain(model, loaded)(*inputs))
    _print(loaded.policies, explained, json)


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


def _module_paths(model: Any, inputs: list[Any]) -> dict[str, Any]:
    """Returns the class of each module, and None for each parameter."""
    adapter = adapter_name(model)
    if adapter is None:
        raise JaxmpError(
            f"{type(model).__name__} is not a Flax module. Return a model and its example inputs:\n"
            "    return model, example_input"
        )
    module = importlib.import_module(adapter)
    return module.module_paths(model, *([] if _is_nnx(model) else inputs))


def _is_nnx(model: object) -> bool:
    """Returns True for an NNX module, without importing Flax."""
    return any(cls.__module__ == "flax.nnx.module" for cls in type(model).__mro__)


def _print(policies: PolicyMap, explained: jaxmp.typing.Explanation, json: str | None) -> None:
    explanation = explained.policies
    if write_json(json, explained.to_json()) or explanation is None:
        return
    output = console()
    table = make_table("path", "type", "policy", "rule")
    for row in explanation.rows:
        number = "default" if row.rule is None else str(row.rule + 1)
        path = escape(row.path or "(root)")
        policy = policy_lines(with_fields(row.policy, fp32_outputs_below=0))
        policy = "\n".join(filter(None, (policy, row.narrow.partition(": ")[0])))
        table.add_row(path, escape(row.module_type), policy, number)
    output.print(table)
    output.print(escape(explanation.summary))
    used = {row.rule for row in explanation.rows}
    for index, rule in enumerate(policies.rules):
        label, style = (f"rule {index + 1}", "bold")
        if index not in used:
            label, style = f"{label}, unused", "yellow"
        output.print(escape(label, style))
        lines = filter(None, (rule_text(rule, with_reason=False), rule.why))
        output.print(Padding(escape("\n".join(lines)), (0, 0, 0, 2)))
    for title, section in explained.sections():
        if title != "policies":
            output.print(escape(f"{title}\n{section}"))
