"""`jaxmp explain`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import jax
import typer
from rich.padding import Padding

import jaxmp
from jaxmp._policies._explanation import PolicyExplanation
from jaxmp._policies._policy import with_fields
from jaxmp._policies._required import check_required, explain_modules
from jaxmp._policies._resolve import PolicyMap
from jaxmp._policies._rules import rule_text
from jaxmp._recipe import load_recipe
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
    policies = load_recipe(recipe).policies
    explain_policies, paths = _load_model(function)
    try:
        check_required(policies, paths)
    except RuleError as error:
        _print(policies, explain_modules(policies, paths, {}), json)
        raise UnmatchedRuleError(str(error)) from None
    _print(policies, explain_policies(policies), json)


def _load_model(name: str) -> tuple[Callable[[PolicyMap], PolicyExplanation], dict[str, Any]]:
    """Calls the user's function, and returns a function that explains policies, and all paths."""
    make = load_function(
        name, "jaxmp explain my_package.model:make --recipe bf16", "model, example_input"
    )
    result = call(f"{name}()", make)
    model, *inputs = (result or [result]) if isinstance(result, (tuple, list)) else [result]
    if not inputs and not _is_nnx(model):
        raise JaxmpError(
            f"{name}() returned {type(result).__name__}, not a model and its example inputs. "
            "Return both:\n    return model, example_input"
        )
    description = f"the model of {name}"
    if _is_nnx(model):
        paths = call(description, lambda: jaxmp.nnx.module_paths(model))
        # An NNX model has paths without inputs. With inputs, its FLOPs can be counted.
        arrays = any(hasattr(leaf, "shape") for leaf in jax.tree.leaves(inputs))
        inputs = inputs if arrays else []
        explain_model = jaxmp.nnx.explain
    else:
        paths = call(description, lambda: jaxmp.linen.module_paths(model, *inputs))
        explain_model = jaxmp.linen.explain
    return lambda policies: call(
        description, lambda: explain_model(model, policies, *inputs)
    ), paths


def _is_nnx(model: object) -> bool:
    """Returns True for an NNX module, without importing Flax."""
    return any(cls.__module__ == "flax.nnx.module" for cls in type(model).__mro__)


def _print(policies: PolicyMap, explanation: PolicyExplanation, json: str | None) -> None:
    if write_json(json, explanation.to_json()):
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
