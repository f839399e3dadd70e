"""Formats a recipe as a TOML file that `load_recipe` reads back."""

from __future__ import annotations

from collections.abc import Mapping

from jaxmp._policies._policy import ATTENTION_FIELDS, FIELD_NAMES, Policy
from jaxmp._policies._rules import Rule
from jaxmp._recipe_files._load import RecipeData
from jaxmp._recipe_files._loss_scale_table import LossScaleData
from jaxmp._recipe_files._scaling_table import TABLE, scaling_settings
from jaxmp._recipe_files._toml import literal

_HEAD = "# Recipe of jaxmp. Load it by the path of this file: jaxmp.load_recipe(path)."


def recipe_text(data: RecipeData) -> str:
    """Returns a recipe as TOML text.

    Args:
      data: the recipe.

    Returns:
      Text that loads as an equal recipe with the same name.

    Raises:
      RecipeError: if a string in the recipe cannot be written as UTF-8.
    """
    policies, scaling = data.policies, data.policies.fp8
    default = _policy_fields(policies.default)
    attention = {name: default.pop(name) for name in ATTENTION_FIELDS if name in default}
    gradients = {
        "accumulate_dtype": data.accumulate_dtype,
        "reduce_dtype": data.reduce_dtype,
        "regather": data.regather,
    }
    blocks = [
        _block(_HEAD, {"name": data.name, "summary": data.summary}),
        _block("[policy]", default),
        _block("[loss_scale]", _loss_scale(data.loss_scale_data)),
        _block("[optimizer]", {"master": data.master, "skip": data.skip}),
        _block("[attention]", attention),
        *([] if scaling is None else [_block(f"[{TABLE}]", scaling_settings(scaling))]),
        _block("[gradients]", gradients),
        *([_block("[ops]", dict(data.ops.edits))] if data.ops.edits else []),
        *(_block("[[rules]]", _rule_fields(rule)) for rule in policies.rules),
    ]
    return "\n\n".join(blocks) + "\n"


def _block(header: str, values: Mapping[str, object]) -> str:
    """Returns the lines of one table."""
    return "\n".join([header, *(f"{key} = {literal(value)}" for key, value in values.items())])


def _policy_fields(policy: Policy | Rule) -> dict[str, object]:
    """Returns the fields that a policy or rule sets, with dtypes by name."""
    values = {name: getattr(policy, name) for name in FIELD_NAMES}
    return {
        name: value.name if name.endswith("_dtype") else value
        for name, value in values.items()
        if value is not None
    }


def _rule_fields(rule: Rule) -> dict[str, object]:
    selector = {"path": rule.path, "module_type": rule.module_type}
    fields = {key: value for key, value in selector.items() if value is not None}
    why = {"why": rule.why} if rule.why else {}
    return {**fields, **_policy_fields(rule), "required": rule.required, **why}


def _loss_scale(data: LossScaleData) -> dict[str, object]:
    preset = {"preset": data.preset} if data.preset else {}
    return {"kind": data.kind, **preset, **dict(data.arguments)}
