"""Recipes as plain data: a name, a TOML file or a string becomes a frozen `RecipeData`.

`as_policy_map` serves every `policies=` argument of the library.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, Union

import numpy as np

from jaxmp._core._dtypes import canonical_dtype
from jaxmp._core._typing import DTypeLike
from jaxmp._policies._op_table import OpTable
from jaxmp._policies._policy import (
    ATTENTION_FIELDS,
    Policy,
    canonical_fields,
    get_policy,
    without_inputs,
)
from jaxmp._policies._recipe_names import recipe_names, shipped
from jaxmp._policies._rules import PolicyMap, Rule, named_dtypes, reads_policies
from jaxmp._recipe_files import _toml
from jaxmp._recipe_files._fp8_table import read_fp8
from jaxmp._recipe_files._loss_scale_table import (
    LossScaleData,
    automatic_kind,
    loss_scale_data,
    read_loss_scale,
)
from jaxmp._recipe_files._schema import TABLES, TOP, Setting, example, module_dtype, read_contents
from jaxmp.errors import PolicyError, RecipeError, did_you_mean
from jaxmp.fp8._scaling import as_scaling

if TYPE_CHECKING:
    from jaxmp._recipe import Recipe

# Everything that `policies=` and `load_recipe` accept: a recipe, policies, or the name, file,
# string, dtype or dict that specifies them.
RecipeLike: TypeAlias = Union[
    "Recipe", PolicyMap, Policy, Mapping[str, Any], str, os.PathLike[str], DTypeLike
]

_FLOAT16 = np.dtype("float16")

# Where a setting stands, for messages: (table, key) -> words.
Where = Callable[[str, str], str]

# ---------------------------------------------------------------------------
# Data
# ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecipeData:
    """All that a recipe says: strings, plain numbers and a `PolicyMap`."""

    name: str
    # One line for a person who chooses among recipes.
    summary: str = ""
    policies: PolicyMap
    loss_scale: LossScaleData = dataclasses.field(default_factory=LossScaleData)
    # Where the FP32 truth of 16-bit parameters is kept: "auto", "fp32", "packed" or "none".
    master: str = "auto"
    # How a step with a non-finite gradient is left out: "auto", "select", "cond" or "none".
    skip: str = "auto"
    # The dtypes in which gradients are added up, over microbatches and over the devices of an
    # `axis_name`.
    accumulate_dtype: str = "float32"
    reduce_dtype: str = "float32"
    # What autocast does with each operation.
    ops: OpTable = dataclasses.field(default_factory=OpTable)


# ---------------------------------------------------------------------------
# API
# ---------------------------------------------------------------------------


@reads_policies
def as_policy_map(policies: Any) -> PolicyMap:
    """The `PolicyMap` that any `policies=` argument stands for.

    Args:
      policies: a `PolicyMap`; a `Recipe`; a string or path, which is a shipped recipe's name first,
        a TOML file if it ends in `.toml`, a policy string otherwise; or anything else that
        `get_policy` takes.

    Returns:
      The policies.

    Raises:
      RecipeError: if a string names no recipe, or its file cannot be loaded.
      PolicyError: if it cannot be understood as a policy.

    Example:
      >>> as_policy_map("bf16").resolve("dense")
      Policy('p=f32,c=bf16,o=f32')
      >>> as_policy_map("bfloat16").default
      Policy('p=bf16,c=bf16,o=bf16')
    """
    if isinstance(policies, PolicyMap):
        return policies
    inner = getattr(policies, "policies", None)
    if isinstance(inner, PolicyMap):
        return inner
    if isinstance(policies, (str, os.PathLike)):
        return recipe_data(policies).policies
    return PolicyMap(get_policy(policies))


def as_op_table(policies: Any) -> OpTable:
    """The table of operations that comes with any `policies=` argument.

    Args:
      policies: what `as_policy_map` takes.

    Returns:
      The recipe's table where `policies` is a recipe, its name or its file; else the default one.

    Raises:
      RecipeError, PolicyError: as `as_policy_map`.

    Example:
      >>> as_op_table("bf16") == OpTable()
      True
    """
    return OpTable() if isinstance(policies, PolicyMap) else recipe_data(policies).ops


def recipe_data(recipe: Any) -> RecipeData:
    """The plain data of a recipe.

    Args:
      recipe: a recipe's name, a path that ends in `.toml`, a policy string, a `Recipe`, or anything
        else that `as_policy_map` takes.

    Returns:
      The data. What is no recipe gets a dynamic loss scale if any of its dtypes is float16, and
      automatic masters.

    Raises:
      RecipeError: with file, line, column and key where they can be known.
      PolicyError: if a policy string or a dtype cannot be understood.
    """
    if isinstance(recipe, RecipeData):
        return recipe
    if isinstance(getattr(recipe, "data", None), RecipeData):
        return recipe.data
    if isinstance(recipe, os.PathLike):
        return _from_file(os.fsdecode(recipe))
    if isinstance(recipe, str):
        return _from_string(recipe)
    return _from_policies(as_policy_map(recipe))


def changed(
    data: RecipeData,
    *,
    policies: Any = None,
    loss_scale: Any = None,
    ops: Any = None,
    fp8: Any = None,
    name: str | None = None,
    summary: str | None = None,
    **settings: Any,
) -> RecipeData:
    """`data` with some of it replaced; None leaves a thing as it is.

    A loss scale that was automatic is decided anew for other policies.

    Args:
      data: the recipe to start from.
      policies: anything that `as_policy_map` takes.
      loss_scale: anything that `loss_scale_data` takes.
      fp8: a scaling of `jaxmp.fp8`, or its name.
      ops: operation -> category, laid over the recipe's own table; or an `OpTable`, in its place.
      name: what to call it.
      summary: one line about it.
      **settings: `master`, `skip`, `accumulate_dtype` or `reduce_dtype`; `implementation`, `mask`
        or `window`, of attention layers.

    Raises:
      RecipeError: if a value is not allowed, or contradicts another.
      OpError: if an operation is unknown, or cannot have the category.
    """
    rules = data.policies if policies is None else as_policy_map(policies)
    rules = _with_attention(rules, {key: settings.pop(key, None) for key in ATTENTION_FIELDS})
    rules = rules if fp8 is None else dataclasses.replace(rules, fp8=as_scaling(fp8))
    if fp8 is not None and not rules.names_fp8:
        raise RecipeError(
            f"fp8={fp8!r} says how FP8 is scaled, and nothing in {data.name!r} multiplies in FP8. "
            "Start from a recipe that does, or say so: load_recipe('fp8').replace(fp8='rowwise'), "
            "recipe.replace(policies='p=f32,c=bf16,o=f32,matmul=fp8', fp8='rowwise')."
        )
    if loss_scale is None:
        automatic = data.loss_scale == LossScaleData(kind=automatic_kind(data.policies))
        loss_scale = "auto" if automatic else data.loss_scale
    given = {"name": name, "summary": summary, **settings}
    changes = {key: _change(key, value) for key, value in given.items() if value is not None}
    scale = loss_scale_data(loss_scale, rules)
    table = data.ops if ops is None else _only_edits(ops, data.ops)
    return checked(
        dataclasses.replace(data, policies=rules, loss_scale=scale, ops=table, **changes)
    )


def _with_attention(policies: PolicyMap, settings: dict[str, Any]) -> PolicyMap:
    """Policies whose default has other settings of attention; None leaves a setting as it is."""
    given = {key: value for key, value in settings.items() if value is not None}
    if not given:
        return policies
    try:
        fields = canonical_fields(given, within="")
        if "mask" in fields:  # the present window describes another mask
            fields = {"window": None, **fields}
        default = dataclasses.replace(policies.default, **fields)
    except PolicyError as error:
        words = ", ".join(f"{key}={value!r}" for key, value in given.items())
        raise RecipeError(f"replace({words}): {error}") from None
    return dataclasses.replace(policies, default=default)


def _only_edits(ops: Any, base: OpTable) -> OpTable:
    table = ops if isinstance(ops, OpTable) else base.replace(ops)
    if table.added:
        raise RecipeError(
            f"{table.added[0]!r} cannot be part of a recipe: its file holds edits of the known "
            "operations only. Give the row where it is used:\n"
            f"    autocast(fn, recipe, ops=OpTable(added={list(table.added)!r}))"
        )
    return table


_CHANGEABLE = {
    **{key: TOP[key] for key in ("name", "summary")},
    **TABLES["optimizer"],
    **TABLES["gradients"],
}


def _change(key: str, value: Any) -> Any:
    """A value given in Python, held to what a file may say."""
    if key not in _CHANGEABLE:
        names = ["policies", "loss_scale", "ops", "fp8", *ATTENTION_FIELDS, *_CHANGEABLE]
        raise RecipeError(
            f"A recipe has no {key!r} to replace.{did_you_mean(key, names)} Allowed: "
            f"{', '.join(names)}; for example recipe.replace(master='fp32')."
        )
    field = _CHANGEABLE[key]
    value = canonical_dtype(value).name if key.endswith("_dtype") else value
    if not field.accepts(value):
        raise RecipeError(
            f"replace({key}={value!r}): allowed is {field.allowed}; for example "
            f"recipe.replace({key}={field.example})."
        )
    try:
        return field.convert(value)
    except RecipeError as error:
        raise RecipeError(
            f"replace({key}={value!r}): {error} For example recipe.replace({key}={field.example})."
        ) from None


def shipped_text(name: str) -> str:
    """The TOML text, comments and all, of a shipped recipe."""
    return shipped()[name].read_text(encoding="utf-8")


# ---------------------------------------------------------------------------
# Names, paths and strings
# ---------------------------------------------------------------------------


@functools.lru_cache(maxsize=64)
def _from_name(name: str) -> RecipeData:
    return _build(_shipped_layers(name, ()))


def _from_file(file: str) -> RecipeData:
    if not file.endswith(".toml"):
        renamed = os.path.splitext(file)[0] + ".toml"
        raise RecipeError(
            f"{file!r} is not a recipe file: its name does not end in .toml. Rename it:\n"
            f"    load_recipe({renamed!r})"
        )
    return _build(_file_layers(file, ()))


def _from_string(text: str) -> RecipeData:
    name = text.strip().lower()
    if name in shipped():
        return _from_name(name)
    if text.endswith(".toml"):
        return _from_file(text)
    try:
        policy = get_policy(text)
    except PolicyError:
        if "=" in text or name.lstrip("u").startswith("int"):
            raise
        raise _unknown_name(text) from None
    return _from_policies(PolicyMap(policy))


def _unknown_name(text: str) -> RecipeError:
    what = "names no recipe and no policy" if text.strip() else "is an empty name"
    return RecipeError(
        f"{text!r} {what}.{did_you_mean(text.strip().lower(), recipe_names())} Recipes: "
        f"{', '.join(recipe_names())}; a file's path ends in .toml; a policy string is such as "
        "'p=f32,c=bf16,o=f32'. For example:\n    load_recipe('bf16')"
    )


def _from_policies(policies: PolicyMap) -> RecipeData:
    rules, default = len(policies.rules), without_inputs(policies.default)
    data = RecipeData(
        name=str(default) + (f" and {rules} rule{'s' * (rules > 1)}" if rules else ""),
        summary="made from policies",
        policies=policies,
        loss_scale=LossScaleData(kind=automatic_kind(policies)),
    )
    return checked(data)


# ---------------------------------------------------------------------------
# Files
# ---------------------------------------------------------------------------


class _Layers(NamedTuple):
    """What a file says, laid over what the files that it extends say."""

    name: str
    summary: str
    # (table, key) -> setting.
    settings: dict[tuple[str, str], Setting]
    rules: tuple[Rule, ...]


# Identities of the files that are being read: each extends the next.
_Chain = tuple[str, ...]


def _shipped_layers(name: str, chain: _Chain) -> _Layers:
    return _layers(_toml.read(f"{name}.toml", shipped()[name]), chain)


def _file_layers(file: str, chain: _Chain) -> _Layers:
    document = _toml.read(file, Path(file))
    chain = (*chain, os.path.realpath(file))
    if chain[-1] in chain[:-1]:
        raise RecipeError(
            f"{file!r} extends itself: {' -> '.join(map(repr, chain))}. Extend a shipped recipe:\n"
            + example("", "extends")
        )
    return _layers(document, chain)


def _layers(document: _toml.Document, chain: _Chain) -> _Layers:
    own = read_contents(document)
    extends = own.top.get("extends")
    if extends is None and not document.table.get("policy"):
        raise RecipeError(
            f"{document.where()} names no precision: it has no [policy], and extends nothing. Say "
            "what it builds on:\n" + example("", "extends")
        )
    base = _base(document, extends, chain) if extends is not None else _Layers("", "", {}, ())
    layers = _Layers(
        own.top.get("name", Path(document.file).name.removesuffix(".toml")),
        own.top.get("summary", f"extends {extends}" if extends is not None else ""),
        _laid_over(base.settings, own.settings),
        own.rules + base.rules,
    )
    scaling = [setting for key, setting in own.settings.items() if key[0] == "fp8"]
    matmul = layers.settings.get(("policy", "matmul"))
    in_fp8 = [matmul.value if matmul else None, *(rule.matmul for rule in layers.rules)]
    if scaling and "fp8" not in in_fp8:
        raise RecipeError(
            f"{scaling[0].where}: [fp8] says how FP8 is scaled, and nothing multiplies in FP8: "
            'neither [policy] nor a rule says matmul = "fp8". Write:\n    extends = "bf16"\n'
            '    [policy]\n    matmul = "fp8"'
        )
    return layers


def _base(document: _toml.Document, extends: str, chain: _Chain) -> _Layers:
    where = document.where("extends")
    if extends in shipped():
        return _shipped_layers(extends, chain)
    if not extends.endswith(".toml"):
        raise RecipeError(
            f"{where}: {extends!r} is no shipped recipe.{did_you_mean(extends, recipe_names())} "
            f"Allowed: {', '.join(recipe_names())}, or a file beside this one whose name ends in "
            ".toml. For example:\n" + example("", "extends")
        )
    try:
        return _file_layers(str(Path(document.file).parent / extends), chain)
    except RecipeError as error:
        raise RecipeError(f"{where}: {error}") from None


def _laid_over(
    base: dict[tuple[str, str], Setting], own: dict[tuple[str, str], Setting]
) -> dict[tuple[str, str], Setting]:
    """Own settings replace the base's; another loss scale or FP8 scaling replaces it as a whole."""
    if own.keys() & {("loss_scale", "kind"), ("loss_scale", "preset")}:
        base = {key: setting for key, setting in base.items() if key[0] != "loss_scale"}
    if ("fp8", "scaling") in own:
        base = {key: setting for key, setting in base.items() if key[0] != "fp8"}
    if ("attention", "mask") in own:  # the base's window describes another mask
        base = {key: setting for key, setting in base.items() if key != ("attention", "window")}
    # Own settings stand first: where two contradict each other, a message names the user's file.
    return {**own, **{key: setting for key, setting in base.items() if key not in own}}


def _build(layers: _Layers) -> RecipeData:
    tables: dict[str, dict[str, Setting]] = {}
    for (table, key), setting in layers.settings.items():
        tables.setdefault(table, {})[key] = setting
    attention = tables.get("attention", {})
    default = {**_values(tables.get("policy", {})), **_values(attention)}
    if "window" in attention and default.get("mask", "array") == "array":
        raise RecipeError(
            f"{attention['window'].where}: a window belongs to a declared mask, and nothing "
            "declares one. Write:\n" + example("attention", "window")
        )
    fp8 = read_fp8(tables.get("fp8", {}))
    policies = PolicyMap(get_policy(default), layers.rules, fp8)
    if not policies.names_fp8:
        # A file that it extends may say how, where this one says that there is none.
        policies = dataclasses.replace(policies, fp8=None)
    data = RecipeData(
        name=layers.name,
        summary=layers.summary,
        policies=policies,
        loss_scale=read_loss_scale(tables.get("loss_scale", {}), policies),
        **_values(tables.get("optimizer", {})),
        **_values(tables.get("gradients", {})),
        ops=OpTable(_values(tables.get("ops", {}))),
    )
    return checked(data, lambda *key: layers.settings[key].where)


def _values(settings: Mapping[str, Setting]) -> dict[str, Any]:
    return {key: setting.value for key, setting in settings.items()}


# ---------------------------------------------------------------------------
# Settings that contradict each other
# ---------------------------------------------------------------------------


def checked(data: RecipeData, where: Where | None = None) -> RecipeData:
    """`data`, if nothing in it contradicts the rest.

    Raises:
      RecipeError: naming the place of a setting by `where`.
    """
    where = where or (lambda table, key: f"recipe {data.name!r}, key '{table}.{key}'")
    for who, field, dtype in named_dtypes(data.policies):
        try:
            module_dtype(dtype)
        except RecipeError as error:
            raise RecipeError(f"Recipe {data.name!r}, {field} of {who}: {error}") from None
        if data.master == "packed" and (field, dtype) == ("param_dtype", _FLOAT16):
            raise _packed_float16(where("optimizer", "master"), who)
    if data.skip == "none" and data.loss_scale.kind == "dynamic":
        raise RecipeError(
            f'{where("optimizer", "skip")}: skip = "none" applies every step, but a dynamic loss '
            "scale overflows on purpose: it would write NaN into the parameters. Write:\n"
            + example("optimizer", "skip", '"auto"')
        )
    return data


def _packed_float16(where: str, who: str) -> RecipeError:
    return RecipeError(
        f'{where}: master = "packed" keeps the 16 bits of FP32 that bfloat16 drops, but {who} '
        "stores parameters in float16. Write:\n" + example("optimizer", "master", '"fp32"')
    )
