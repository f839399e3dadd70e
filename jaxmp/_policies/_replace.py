"""Changes the settings of a loaded recipe, checked like those of a file, and writes it to TOML."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, Unpack

from jaxmp import _core
from jaxmp._core import DTypeLike
from jaxmp._gradients._dynamic_loss_scale import LossScaleLike
from jaxmp._policies import _load
from jaxmp._policies._load import D, PolicyMap, RecipeData, RecipeLike
from jaxmp._policies._loss_scale_table import LossScaleData, automatic_kind, loss_scale_data
from jaxmp._policies._op_table import OpTable
from jaxmp._policies._phases import Phase, with_phases
from jaxmp._policies._policy import ATTENTION_FIELDS, FIELD_NAMES, Policy, canonical_fields
from jaxmp._policies._rules import POSITION, Rule
from jaxmp._policies._scaling_table import TABLE, replace_scaling, scaling_settings
from jaxmp._policies._schema import TABLES, TOP, read_contents
from jaxmp._policies._toml import Document, literal
from jaxmp.errors import PolicyError, RecipeError
from jaxmp.fp8._scaling import ScalingLike

# Settings of `replace` whose values are checked as in a file.
_REPLACEABLE = {
    **{key: TOP[key] for key in ("name", "summary")},
    **TABLES["optimizer"],
    **TABLES["gradients"],
}


class RecipeChanges(TypedDict, total=False):
    """Keyword arguments of `Recipe.replace`. None leaves a setting unchanged."""

    policies: RecipeLike | None
    loss_scale: LossScaleData | LossScaleLike | Mapping[str, object] | str
    # Operation -> category, merged into the recipe's table; or an `OpTable` that replaces it.
    ops: OpTable | Mapping[str, str] | None
    fp8: ScalingLike
    # Those of a recipe, or tables with the keys of [[phases]]; their rules may be `Rule` objects.
    phases: Sequence[Mapping[str, object] | Phase] | None
    # Attention layers.
    implementation: str | None
    mask: str | None
    window: int | Sequence[int] | None
    master: str | None
    skip: str | None
    moment_dtype: str | None
    accumulate_dtype: DTypeLike | None
    reduce_dtype: DTypeLike | None
    regather: bool | None
    widen_params: bool | None
    name: str | None
    summary: str | None


def replace_settings(data: D, **changes: Unpack[RecipeChanges]) -> D:
    """Returns a recipe with some settings replaced; see `Recipe.replace`.

    A loss scale that "auto" has chosen is chosen again for new policies.

    Raises:
      RecipeError: if a value is not allowed, or contradicts another.
      OpError: if an operation is unknown, or cannot have the category.
    """
    if data.whole is not None:
        raise RecipeError(
            f"{data.name!r} is one phase of {data.whole.name!r}. Change the whole recipe, then "
            "select the phase: recipe = recipe.replace(...); phase = recipe.phase(step)."
        )
    settings: dict[str, Any] = dict(changes)
    policies, loss_scale, ops, fp8, phases = (
        settings.pop(key, None) for key in ("policies", "loss_scale", "ops", "fp8", "phases")
    )
    new_phases = data.phases if phases is None else _read_phases(phases)
    new_policies = data.policies if policies is None else _load.as_policy_map(policies)
    attention = {key: settings.pop(key, None) for key in ATTENTION_FIELDS}
    new_policies = _replace_attention(new_policies, attention)
    new_policies = replace_scaling(new_policies, fp8, data.name, new_phases)
    new_policies = with_phases(new_policies, new_phases)
    if loss_scale is None:
        is_automatic = data.loss_scale_data == LossScaleData(kind=automatic_kind(data.policies))
        loss_scale = "auto" if is_automatic else data.loss_scale_data
    values = {key: _read_change(key, value) for key, value in settings.items() if value is not None}
    return _load.check_recipe(
        dataclasses.replace(
            data,
            policies=new_policies,
            loss_scale_data=loss_scale_data(loss_scale, new_policies),
            ops=data.ops if ops is None else _replace_ops(data.ops, ops),
            phases=new_phases,
            **values,
        )
    )


def _read_phases(phases: Sequence[Mapping[str, object] | Phase]) -> tuple[Phase, ...]:
    def table(phase: Mapping[str, object] | Phase) -> dict[str, Any]:
        keys: dict[str, Any] = phase.settings() if isinstance(phase, Phase) else dict(phase)
        rules = phase.rules if isinstance(phase, Phase) else keys.pop("rules", [])
        rules = [_rule_fields(each) if isinstance(each, Rule) else each for each in rules]
        return {**keys, **({"rules": rules} if rules else {})}

    are_tables = not isinstance(phases, Mapping) and all(
        isinstance(each, (Mapping, Phase)) for each in phases
    )
    if not are_tables:
        raise RecipeError(
            f"replace(phases={phases!r}) is not a list of dicts with the keys of [[phases]]. For "
            "example recipe.replace(phases=[{'from_step': 9000, 'matmul': 'default'}])."
        )
    tables = [table(each) for each in phases]
    return read_contents(Document("replace(phases=...)", {"phases": tables})).phases


def _replace_attention(policies: PolicyMap, settings: Mapping[str, Any]) -> PolicyMap:
    """Replaces settings of attention in the default policy; None leaves a setting unchanged."""
    changes = {key: value for key, value in settings.items() if value is not None}
    if not changes:
        return policies
    try:
        fields = canonical_fields(changes, within="")
        if "mask" in fields:  # the current window describes the current mask
            fields = {"window": None, **fields}
        default = dataclasses.replace(policies.default, **fields)
    except PolicyError as error:
        arguments = ", ".join(f"{key}={value!r}" for key, value in changes.items())
        raise RecipeError(f"replace({arguments}): {error}") from None
    return dataclasses.replace(policies, default=default)


def _replace_ops(current: OpTable, ops: OpTable | Mapping[str, str]) -> OpTable:
    table = ops if isinstance(ops, OpTable) else current.replace(ops)
    if table.added:
        raise RecipeError(
            f"{table.added[0]!r} cannot be part of a recipe, whose file can only change the "
            "categories of JAX's operations. Pass the new operation to autocast:\n"
            f"    autocast(fn, recipe, ops=OpTable(added={list(table.added)!r}))"
        )
    return table


def _read_change(key: str, value: object) -> object:
    """Converts a setting that was passed in Python, under the rules for files."""
    if key not in _REPLACEABLE:
        names = ["policies", "loss_scale", "ops", "fp8", "phases", *ATTENTION_FIELDS, *_REPLACEABLE]
        raise RecipeError(
            f"replace() has no argument {key!r}.{_core.did_you_mean(key, names)} Allowed: "
            f"{', '.join(names)}; for example recipe.replace(master='fp32')."
        )
    field = _REPLACEABLE[key]
    try:
        return field.read(_dtype_name(value) if key.endswith("_dtype") else value)
    except (PolicyError, RecipeError) as error:
        raise RecipeError(
            f"replace({key}={value!r}): {error} For example recipe.replace({key}={field.example})."
        ) from None


def _dtype_name(value: object) -> object:
    """Returns the full name of a floating dtype; any other value, which a file refuses, too."""
    try:
        return _core.canonical_dtype(value).name
    except PolicyError:
        return getattr(value, "name", getattr(value, "__name__", value))


# ---------------------------------------------------------------------------
# Text of a recipe
# ---------------------------------------------------------------------------

_HEAD = "# Recipe of jaxmp. Load it by the path of this file: jaxmp.load_recipe(path)."


def recipe_text(data: RecipeData) -> str:
    """Returns a recipe as TOML text.

    Args:
      data: the recipe.

    Returns:
      Text that loads as an equal recipe with the same name; for a phase, that of the whole recipe.

    Raises:
      RecipeError: if a string in the recipe cannot be written as UTF-8.
    """
    data = data.whole or data
    policies, scaling = data.policies, data.policies.fp8
    default = _policy_fields(policies.default)
    attention = {name: default.pop(name) for name in ATTENTION_FIELDS if name in default}
    of_data = lambda table: {key: getattr(data, key) for key in TABLES[table]}
    blocks = [
        _block(_HEAD, {"name": data.name, "summary": data.summary}),
        _block("[policy]", default),
        _block("[loss_scale]", _loss_scale(data.loss_scale_data)),
        _block("[optimizer]", of_data("optimizer")),
        _block("[attention]", attention),
        *([] if scaling is None else [_block(f"[{TABLE}]", scaling_settings(scaling))]),
        _block("[gradients]", of_data("gradients")),
        *([_block("[ops]", dict(data.ops.edits))] if data.ops.edits else []),
        *(_block("[[rules]]", _rule_fields(rule)) for rule in policies.rules),
        *(block for phase in data.phases for block in _phase_blocks(phase)),
    ]
    return "\n\n".join(blocks) + "\n"


def _block(header: str, values: Mapping[str, object]) -> str:
    """Returns the lines of one table."""
    return "\n".join([header, *(f"{key} = {literal(value)}" for key, value in values.items())])


def _phase_blocks(phase: Phase) -> list[str]:
    rules = [_block("[[phases.rules]]", _rule_fields(rule)) for rule in phase.rules]
    return [_block("[[phases]]", phase.settings()), *rules]


def _policy_fields(policy: Policy | Rule) -> dict[str, object]:
    """Returns the fields that a policy or rule sets, with dtypes by name."""
    values = {name: getattr(policy, name) for name in FIELD_NAMES}
    return {
        name: value.name if name.endswith("_dtype") else value
        for name, value in values.items()
        if value is not None
    }


def _rule_fields(rule: Rule) -> dict[str, object]:
    selector = {name: getattr(rule, name) for name in ("path", "module_type", *POSITION)}
    fields = {key: value for key, value in selector.items() if value is not None}
    why = {"why": rule.why} if rule.why else {}
    return {**fields, **_policy_fields(rule), "required": rule.required, **why}


def _loss_scale(data: LossScaleData) -> dict[str, object]:
    preset = {"preset": data.preset} if data.preset else {}
    return {"kind": data.kind, **preset, **dict(data.arguments)}
