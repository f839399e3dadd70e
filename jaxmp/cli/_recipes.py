"""`jaxmp recipes`."""

from __future__ import annotations

from jaxmp._policies._policy import summarized
from jaxmp._recipe import list_recipes, load_recipe
from jaxmp.cli._arguments import JsonOption
from jaxmp.cli._output import console, escape, make_table, policy_lines, write_json


def recipes(json: JsonOption = None) -> None:
    """List the installed recipes."""
    table = make_table("recipe", "policy", "loss scale", "summary")
    rows: list[dict[str, str]] = []
    for recipe in map(load_recipe, list_recipes()):
        # `keep_inputs` is long; `jaxmp show` prints it.
        policy, loss_scale = summarized(recipe.policies.default), recipe.data.loss_scale.kind
        table.add_row(
            escape(recipe.name, "bold"), policy_lines(policy), loss_scale, escape(recipe.summary)
        )
        rows.append(
            {
                "name": recipe.name,
                "policy": str(policy),
                "loss_scale": loss_scale,
                "summary": recipe.summary,
            }
        )
    if not write_json(json, rows):
        console().print(table)
