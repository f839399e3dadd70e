"""Loads recipes as plain data: from a name, a TOML file, a policy string or policies."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeAlias, TypeVar, cast

import jax

from jaxmp import _core
from jaxmp._policies import _scaling_table, _toml
from jaxmp._policies._loss_scale_table import LossScaleData, automatic_kind, read_loss_scale
from jaxmp._policies._op_table import OpTable
from jaxmp._policies._phases import Phase, policies_of_phases, with_phases
from jaxmp._policies._policy import Policy, PolicyLike, complete_policy, get_policy, summarized
from jaxmp._policies._required import check_module_dtypes, named_dtypes
from jaxmp._policies._resolve import Policies, checked_rules
from jaxmp._policies._rules import Rule
from jaxmp._policies._schema import Contents, fix_line, read_contents
from jaxmp._policies._toml import Setting, recipe_names, shipped
from jaxmp.errors import RecipeError
from jaxmp.fp8._scaling import Scaling

# ---------------------------------------------------------------------------
# Data
# ---------------------------------------------------------------------------


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, init=False, eq=False, repr=False)
class PolicyMap(Policies):
    """Default policy and ordered rules. Only the first matching rule applies.

    Fields that this rule omits come from the default policy.

    Args:
      default: a recipe's name or file, a policy string, a `Policy`, or anything else that specifies
        policies. A recipe name means the recipe, as in every `policies=` argument:
        `PolicyMap("bf16", rules)` has the default policy of that recipe, and its rules after
        `rules`. `PolicyMap("bfloat16")` sets all three dtypes.
      rules: rules in order of precedence.
      fp8: the FP8 scaling of modules with `matmul = "fp8"`, such as `fp8.CurrentScaling()`. None:
        the scaling of the default, or `CurrentScaling()` if it has none.

    Raises:
      RuleError: if `rules` contains another object, or a rule has a window but no declared mask.
      PolicyError: if the default is not valid, or `fp8` is not a scaling.

    Example:
      >>> policies = PolicyMap("p=f32,c=bf16,o=f32", [Rule("head", "c=f32")])
      >>> str(policies.resolve("head"))
      'p=f32,c=f32,o=f32'
      >>> str(policies.resolve("body/dense"))
      'p=f32,c=bf16,o=f32'
    """

    def __init__(
        self, default: RecipeLike, rules: Iterable[Rule] | Rule = (), fp8: Scaling | None = None
    ) -> None:
        if isinstance(default, Policy):
            super().__init__(default, rules, fp8)
            return
        rules = checked_rules(rules)
        base = as_policy_map(default)
        super().__init__(base.default, rules + base.rules, base.fp8 if fp8 is None else fp8)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecipeData:
    """Content of a recipe: strings, plain numbers and a `PolicyMap`, without arrays."""

    name: str
    # Description in one line.
    summary: str = ""
    policies: PolicyMap
    loss_scale_data: LossScaleData = dataclasses.field(default_factory=LossScaleData)
    # Form of the FP32 masters of 16-bit parameters: "auto", "fp32", "packed" or "none".
    master: str = "auto"
    # How a step with a non-finite gradient is skipped: "auto", "select", "cond" or "none".
    skip: str = "auto"
    # Dtype in which the optimizer's moments are stored.
    moment_dtype: str = "float32"
    # Dtypes of the sums of gradients over microbatches and over the devices of an `axis_name`.
    accumulate_dtype: str = "float32"
    reduce_dtype: str = "float32"
    # Gather split weights again in the backward pass, instead of keeping them.
    regather: bool = True
    # Differentiate parameters that are stored in 16 bits as if they were FP32, on one device, too.
    widen_params: bool = False
    # Categories of the operations in `autocast`.
    ops: OpTable = dataclasses.field(default_factory=OpTable)
    # Keys that change at later steps. `policies` are those of the first steps.
    phases: tuple[Phase, ...] = ()
    # The recipe of which this one is a phase.
    whole: RecipeData | None = dataclasses.field(default=None, repr=False)


D = TypeVar("D", bound=RecipeData)
# Everything that `policies=` and `load_recipe` accept: a recipe, policies, or the name, file,
# string, dtype or dict that specifies them.
RecipeLike: TypeAlias = RecipeData | PolicyMap | PolicyLike | os.PathLike[str]


# ---------------------------------------------------------------------------
# Conversion
# ---------------------------------------------------------------------------


def as_policy_map(policies: RecipeLike) -> PolicyMap:
    """Converts any `policies=` argument to a `PolicyMap`.

    Args:
      policies: a `PolicyMap`; a `Recipe`; the name of a recipe; a path that ends in `.toml`; or
        anything that `get_policy` accepts. The name of a recipe always means the recipe.

    Returns:
      The policies; `policies` itself if it is a `PolicyMap`.

    Raises:
      RecipeError: if a string is not the name of a recipe, its file cannot be loaded, or the recipe
        has phases.
      PolicyError: if a policy or dtype is invalid.

    Example:
      >>> as_policy_map("bf16").resolve("dense").compute_dtype
      dtype(bfloat16)
      >>> as_policy_map("bfloat16").default
      Policy('p=bf16,c=bf16,o=bf16')
    """
    if isinstance(policies, PolicyMap):
        return policies
    data = as_recipe_data(policies)
    if data.phases:
        raise RecipeError(
            f"The recipe {data.name!r} has phases, of which each has other policies. Select that "
            "of the step on the host: recipe.phase(step). An audit replaces the recipe among the "
            "arguments by each: jaxmp.audit(train_step, recipe, state, batch, recipe=recipe)."
        )
    return data.policies


def as_op_table(policies: RecipeLike) -> OpTable:
    """Returns the table of operations that belongs to any `policies=` argument.

    Args:
      policies: any argument of `as_policy_map`.

    Returns:
      The table of the recipe, or the default table if `policies` is not a recipe.

    Raises:
      RecipeError, PolicyError: as `as_policy_map`.

    Example:
      >>> as_op_table("bf16") == OpTable()
      True
    """
    return OpTable() if isinstance(policies, PolicyMap) else as_recipe_data(policies).ops


def as_recipe_data(recipe: RecipeLike) -> RecipeData:
    """Converts a recipe, or anything that specifies one, to plain data.

    Args:
      recipe: the name of a recipe, a path that ends in `.toml`, a policy string, a `Recipe`, or
        any other argument of `as_policy_map`.

    Returns:
      The data. Policies that are not a recipe get automatic masters, and a dynamic loss scale if
      any of their dtypes is float16.

    Raises:
      RecipeError: with file, line, column and key where they are known.
      PolicyError: if a policy or dtype is invalid.
    """
    if isinstance(recipe, RecipeData):
        return recipe
    if isinstance(recipe, os.PathLike):
        return _load_file(os.fsdecode(recipe))
    if isinstance(recipe, PolicyMap):
        return _from_policies(recipe)
    if isinstance(recipe, str):
        name = recipe.strip().lower()
        if name in shipped():
            return _load_name(name)
        if recipe.endswith(".toml"):
            return _load_file(recipe)
        # `get_policy` explains pairs and integers.
        is_dtype = name in _core.DTYPE_NAMES or name.lstrip("u").startswith("int")
        if "=" not in recipe and not is_dtype:
            raise _unknown_name(recipe)
    return _from_policies(PolicyMap(get_policy(cast(PolicyLike, recipe))))


# Names of other frameworks -> the framework, and the recipe that does the same.
_FOREIGN_NAMES = {
    "mixed_bfloat16": ("Keras", "bf16"),
    "mixed_float16": ("Keras", "fp16"),
    "bf16-mixed": ("Lightning", "bf16"),
    "16-mixed": ("Lightning", "fp16"),
    "bf16-true": ("Lightning", "bf16_params"),
    "16-true": ("Lightning", "fp16_params"),
    "32-true": ("Lightning", "fp32"),
    "transformer-engine": ("Lightning", "fp8_delayed"),
    "amp": ("PyTorch", "fp16"),
    "o1": ("Apex", "fp16"),
    "o2": ("Apex", "fp16_params"),
}


def _unknown_name(text: str) -> RecipeError:
    if text.strip().lower() in _FOREIGN_NAMES:
        framework, name = _FOREIGN_NAMES[text.strip().lower()]
        raise RecipeError(f"{text!r} is a name of {framework}. Write load_recipe({name!r}).")
    problem = "is not a recipe or a policy" if text.strip() else "is an empty name"
    return RecipeError(
        f"{text!r} {problem}.{_core.did_you_mean(text.strip().lower(), recipe_names())} Recipes: "
        f"{', '.join(recipe_names())}. A file has a path that ends in .toml. A policy string "
        "has the form 'p=f32,c=bf16,o=f32'. For example:\n    load_recipe('bf16')"
    )


def _from_policies(policies: PolicyMap) -> RecipeData:
    policies = with_phases(policies, ())
    rules, default = len(policies.rules), summarized(policies.default)
    data = RecipeData(
        name=str(default) + (f" and {rules} rule{'s' * (rules > 1)}" if rules else ""),
        summary="made from policies",
        policies=policies,
        loss_scale_data=LossScaleData(kind=automatic_kind(policies)),
    )
    return check_recipe(data)


# ---------------------------------------------------------------------------
# Files
# ---------------------------------------------------------------------------


# Each call of `autocast` or `audit` may name a recipe, whose file is parsed and checked.
@functools.lru_cache(maxsize=64)
def _load_name(name: str) -> RecipeData:
    return _build(_read_layers(name))


def _load_file(file: str) -> RecipeData:
    if not file.endswith(".toml"):
        renamed = os.path.splitext(file)[0] + ".toml"
        raise RecipeError(
            f"{file!r} is not a recipe file: its name does not end in .toml. Rename it:\n"
            f"    load_recipe({renamed!r})"
        )
    return _build(_read_layers(file))


def parse_recipe(text: str) -> RecipeData:
    """Returns the recipe of a TOML text that extends no other.

    Raises:
      RecipeError: as `as_recipe_data`.
    """
    return _build(read_contents(_toml.parse("recipe.toml", text)))


def _read_layers(name: str, chain: tuple[str, ...] = ()) -> Contents:
    """Reads a file, merged with the files that it extends.

    Args:
      name: the name of an installed recipe, or a path.
      chain: real paths of the files that extend this one.
    """
    file = f"{name}.toml" if name in shipped() else name
    path = shipped().get(name, Path(name))
    document = _toml.parse(file, _toml.read_text(file, path))
    chain = (*chain, os.path.realpath(str(path)))
    if chain[-1] in chain[:-1]:
        raise RecipeError(
            f"{file!r} extends itself: {' -> '.join(map(repr, chain))}. Extend an installed "
            f"recipe:\n{fix_line('', 'extends')}"
        )
    own = read_contents(document)
    extends = own.settings[""].get("extends")
    if extends is None:
        if not document.table.get("policy"):
            raise RecipeError(
                f"{document.locate()} specifies no precision: it has no [policy] and extends no "
                f"recipe. Add a recipe to extend:\n{fix_line('', 'extends')}"
            )
        return own
    base = _read_base(document, extends, chain)
    merged = {
        table: _merge_settings(table, settings, base.settings[table])
        for table, settings in own.settings.items()
    }
    return Contents(document, merged, own.rules + base.rules, own.phases or base.phases)


def _read_base(document: _toml.Document, extends: Setting, chain: tuple[str, ...]) -> Contents:
    name = extends.value
    if name in shipped():
        return _read_layers(name, chain)
    if not name.endswith(".toml"):
        raise RecipeError(
            f"{extends.location}: {name!r} is not an installed recipe."
            f"{_core.did_you_mean(name, recipe_names())} Allowed: {', '.join(recipe_names())}, or "
            "a path ending in .toml, relative to this file. For example:\n"
            f"{fix_line('', 'extends')}"
        )
    try:
        return _read_layers(str(Path(document.file).parent / name), chain)
    except RecipeError as error:
        raise RecipeError(f"{extends.location}: {error}") from None


# Table -> keys that replace the whole table of an extended recipe.
_REPLACING = {"loss_scale": {"kind", "preset"}, _scaling_table.TABLE: {"scaling"}}


def _merge_settings(
    table: str, own: dict[str, Setting], base: dict[str, Setting]
) -> dict[str, Setting]:
    """Returns the settings of a table, with those of the extended recipe that apply beside them."""
    if not table or own.keys() & _REPLACING.get(table, set()):
        return own
    # The window of the extended recipe describes the mask of that recipe.
    replaced = {*own, "window"} if table == "attention" and "mask" in own else own
    # Own settings come first: if two contradict each other, the message names the user's file.
    return {**own, **{key: setting for key, setting in base.items() if key not in replaced}}


def _build(layers: Contents) -> RecipeData:
    """Returns the recipe that a file specifies.

    Raises:
      RecipeError: if settings contradict each other.
    """
    document, tables, rules, phases = layers
    values = {
        name: {key: setting.value for key, setting in table.items()}
        for name, table in tables.items()
    }
    default = {**values["policy"], **values["attention"]}
    if "window" in default and default.get("mask", "array") == "array":
        raise RecipeError(
            f"{tables['attention']['window'].location}: window requires a declared mask, and this "
            f'recipe declares none. Write:\n    mask = "causal"\n{fix_line("attention", "window")}'
        )
    policies = PolicyMap(complete_policy(default), rules)
    scaling = tables[_scaling_table.TABLE]
    policies = _scaling_table.with_scaling(policies, scaling, document, phases)
    try:
        policies = with_phases(policies, phases)
    except RecipeError as error:
        raise RecipeError(f"{document.locate('phases')}: {error}") from None
    stem = Path(document.file).name.removesuffix(".toml")
    extends = f"extends {values['']['extends']}" if "extends" in values[""] else ""
    data = RecipeData(
        name=values[""].get("name", stem),
        summary=values[""].get("summary", extends),
        policies=policies,
        loss_scale_data=read_loss_scale(tables["loss_scale"], policies),
        **values["optimizer"],
        **values["gradients"],
        ops=OpTable(values["ops"]),
        phases=phases,
    )
    return check_recipe(data, lambda table, key: tables[table][key].location)


# ---------------------------------------------------------------------------
# Phases
# ---------------------------------------------------------------------------


def first_steps(data: RecipeData) -> list[int]:
    """Returns the first step of each phase, beginning with 0; `[0]` for a recipe without phases."""
    return [0, *(phase.from_step for phase in data.phases)]


# Equal policies are one object for each phase, by which wrapped classes are found again.
@functools.lru_cache(maxsize=64)
def phase_data(data: D, number: int) -> D:
    """Returns phase `number` of a recipe as a recipe. The number 0 is the time before the first."""
    others = policies_of_phases(data.policies, data.phases)
    policies = others.pop(number).beside(others)
    name = f"{data.name}@{first_steps(data)[number]}"
    return dataclasses.replace(data, name=name, policies=policies, phases=(), whole=data)


# ---------------------------------------------------------------------------
# Contradictions
# ---------------------------------------------------------------------------


def check_recipe(data: D, locate: Callable[[str, str], str] | None = None) -> D:
    """Returns `data` if its settings do not contradict each other.

    Args:
      data: a recipe.
      locate: function that describes the location of a setting, by table and key.

    Raises:
      RecipeError: if they do.
      PolicyError: if a module would store or compute in fewer than 16 bits.
    """
    locate = locate or (lambda table, key: f"recipe {data.name!r}, key '{table}.{key}'")
    for policies in (data.policies, *data.policies.others):
        check_module_dtypes(policies)
    if data.master == "packed":
        for owner, field, dtype in named_dtypes(data.policies):
            if (field, dtype) == ("param_dtype", _core.FLOAT16):
                raise RecipeError(
                    f'{locate("optimizer", "master")}: master = "packed" stores the 16 bits of '
                    f"FP32 that bfloat16 drops, but {owner} stores parameters in float16. Write:\n"
                    + fix_line("optimizer", "master", '"fp32"')
                )
    if data.skip == "none" and data.loss_scale_data.kind == "dynamic":
        raise RecipeError(
            f'{locate("optimizer", "skip")}: skip = "none" applies every step, but a dynamic loss '
            "scale overflows regularly while it searches for the largest scale, and such a step "
            "would write NaN into the parameters. Write:\n"
            + fix_line("optimizer", "skip", '"auto"')
        )
    return data
