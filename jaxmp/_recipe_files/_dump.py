"""Formats a recipe as a commented TOML file that `load_recipe` reads back."""

from __future__ import annotations

from collections.abc import Mapping

from jaxmp._policies._policy import ATTENTION_FIELDS, FIELD_NAMES, Policy
from jaxmp._policies._rules import Rule
from jaxmp._recipe_files._load import RecipeData
from jaxmp._recipe_files._loss_scale_table import LossScaleData
from jaxmp._recipe_files._scaling_table import TABLE, scaling_settings
from jaxmp._recipe_files._toml import literal

_HEAD = "# Recipe of jaxmp. Load it by the path of this file: jaxmp.load_recipe(path)."
_POLICY = "# Dtypes of all modules that no rule matches."
_LOSS_SCALE = {
    "none": "# Gradients are not scaled.",
    "static": "# Gradients are multiplied by a constant and divided by it in FP32.",
    "dynamic": "# Gradients are multiplied by the largest scale at which they stay finite, and\n"
    "# divided by it in FP32, before clipping and weight decay.",
}
_OPTIMIZER = (
    "# FP32 masters of parameters that are stored in 16 bits: fp32 (and auto) takes 4 more bytes\n"
    "# each, packed 2. With none, small updates are lost. A non-finite step changes only the loss\n"
    '# scale and counters, unless skip = "none"; select and cond are forms of the program.'
)
_ATTENTION = (
    "# Attention layers of Flax. auto: the fused kernel of cuDNN if it supports the call. A mask\n"
    "# other than array is declared: it replaces the array that the model passes."
)
_SCALING = '# Scaling of modules with matmul = "fp8". A CPU emulates it.'
_GRADIENTS = (
    "# Dtypes of the sums of gradients over microbatches and over devices. With regather, split\n"
    "# weights are gathered again in the backward pass."
)
_OPS = "# Operations whose category in autocast differs from the default table."
_RULES = "# Only the first rule that matches a module applies; other fields come from [policy]."


def recipe_text(data: RecipeData) -> str:
    """Returns a recipe as TOML text with comments.

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
        _block(f"{_HEAD}\n", "", {"name": data.name, "summary": data.summary}),
        _block(_POLICY, "[policy]", default),
        _block(_LOSS_SCALE[data.loss_scale.kind], "[loss_scale]", _loss_scale(data.loss_scale)),
        _block(_OPTIMIZER, "[optimizer]", {"master": data.master, "skip": data.skip}),
        _block(_ATTENTION, "[attention]", attention),
        *([] if scaling is None else [_block(_SCALING, f"[{TABLE}]", scaling_settings(scaling))]),
        _block(_GRADIENTS, "[gradients]", gradients),
        *([_block(_OPS, "[ops]", dict(data.ops.edits))] if data.ops.edits else []),
        *([_RULES] if policies.rules else []),
        *(_block("", "[[rules]]", _rule_fields(rule)) for rule in policies.rules),
    ]
    return "\n\n".join(blocks) + "\n"


def _block(comment: str, header: str, values: Mapping[str, object]) -> str:
    """Returns the lines of one table."""
    settings = [f"{key} = {literal(value)}" for key, value in values.items()]
    return "\n".join([line for line in (comment, header) if line] + settings)


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
