"""A recipe written as TOML: a file that a person can read, and `load_recipe` reads back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from jaxmp._policies._policy import ATTENTION_FIELDS, FIELD_NAMES
from jaxmp._policies._rules import Rule
from jaxmp._recipe_files._fp8_table import fp8_settings
from jaxmp._recipe_files._load import RecipeData
from jaxmp._recipe_files._loss_scale_table import LossScaleData
from jaxmp._recipe_files._toml import literal

_HEAD = "# A jaxmp recipe: load it with jaxmp.load_recipe, by the path of this file."
_POLICY = "# The dtypes of every module for which no rule below decides."
_LOSS_SCALE = {
    "none": "# Gradients are not scaled.",
    "static": "# Gradients are scaled by a constant, which is divided out in FP32.",
    "dynamic": "# Gradients are scaled as far as they stay finite; divided out in FP32.",
}
_OPTIMIZER = "# FP32 masters of 16-bit parameters, and how a step that is not finite is left out."
_ATTENTION = (
    "# Flax's attention layers: auto takes cuDNN's fused kernel where it fits; a mask other than\n"
    "# array is declared, and replaces the array that the model passes."
)
_FP8 = '# How modules with matmul = "fp8" are scaled.'
_GRADIENTS = (
    "# What gradients are added up in, over microbatches and over the devices of an axis_name."
)
_OPS = "# What autocast does otherwise than by its default table."
_RULES = "# The first rule that matches a module decides alone; the rest comes from [policy]."


def recipe_text(data: RecipeData) -> str:
    """The TOML text of a recipe, comments included.

    Args:
      data: the recipe.

    Returns:
      Text that loads as an equal recipe, its name included.

    Raises:
      RecipeError: if a text in it cannot be written as UTF-8.
    """
    head = [_HEAD, "", *_settings({"name": data.name, "summary": data.summary})]
    blocks = [
        head,
        [_POLICY, "[policy]", *_settings(_default_fields(data.policies.default))],
        [_LOSS_SCALE[data.loss_scale.kind], "[loss_scale]", *_settings(_scale(data.loss_scale))],
        [_OPTIMIZER, "[optimizer]", *_settings({"master": data.master, "skip": data.skip})],
        [_ATTENTION, "[attention]", *_settings(_attention(data))],
        *_fp8(data.policies.fp8),
        [_GRADIENTS, "[gradients]", *_settings(_gradients(data))],
        *[[_OPS, "[ops]", *_settings(dict(data.ops.edits))]] * bool(data.ops.edits),
        *[[_RULES]] * bool(data.policies.rules),
        *[["[[rules]]", *_settings(_rule_fields(rule))] for rule in data.policies.rules],
    ]
    return "\n\n".join("\n".join(block) for block in blocks) + "\n"


def _settings(values: Mapping[str, Any]) -> Iterable[str]:
    return [f"{key} = {literal(value)}" for key, value in values.items()]


def _policy_fields(holder: Any) -> dict[str, Any]:
    """The fields that a Policy or a Rule sets, dtypes by name."""
    values = {name: getattr(holder, name) for name in FIELD_NAMES}
    return {
        name: value.name if name.endswith("_dtype") else value
        for name, value in values.items()
        if value is not None
    }


def _default_fields(policy: Any) -> dict[str, Any]:
    """Without what has a table of its own."""
    fields = _policy_fields(policy)
    return {name: value for name, value in fields.items() if name not in ATTENTION_FIELDS}


def _attention(data: RecipeData) -> dict[str, Any]:
    fields = _policy_fields(data.policies.default)
    return {name: fields[name] for name in ATTENTION_FIELDS if name in fields}


def _fp8(scaling: Any) -> list[list[str]]:
    if scaling is None:
        return []
    return [[_FP8, "[fp8]", *(f"{key} = {text}" for key, text in fp8_settings(scaling).items())]]


def _rule_fields(rule: Rule) -> dict[str, Any]:
    selector = {"path": rule.path, "module_type": rule.module_type}
    fields = {key: value for key, value in selector.items() if value is not None}
    flags = {"subtree": True} if rule.subtree else {}
    why = {"why": rule.why} if rule.why else {}
    return {**fields, **flags, **_policy_fields(rule), "required": rule.required, **why}


def _scale(data: LossScaleData) -> dict[str, Any]:
    preset = {"preset": data.preset} if data.preset else {}
    bounds = {key: "none" if value is None else value for key, value in data.arguments}
    return {"kind": data.kind, **preset, **bounds}


def _gradients(data: RecipeData) -> dict[str, Any]:
    names = ("accumulate_dtype", "reduce_dtype")
    return {name: getattr(data, name) for name in names}
