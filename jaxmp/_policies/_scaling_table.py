"""The [fp8] table of a recipe file: its keys, its reader and its writer."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from jaxmp._policies import _toml
from jaxmp._policies._phases import Phase
from jaxmp._policies._resolve import Policies, matmul_scaling
from jaxmp._policies._toml import BOOLEAN, COUNT, Document, Field, Setting, choice, literal, quoted
from jaxmp.errors import RecipeError
from jaxmp.fp8 import _scaling

TABLE = "fp8"

_Policies = TypeVar("_Policies", bound=Policies)

_FORMATS = Field('a format, a list of two, or "high"', '["e4m3fn", "e5m2"]', (str, list))

# The scalings of `jaxmp.fp8` check the ranges of these settings when the recipe is built.
FIELDS = {
    "scaling": choice(*_scaling.KINDS),
    "fprop": _FORMATS._replace(example='["e4m3fn", "e4m3fn"]'),
    "dgrad": _FORMATS._replace(example='["e5m2", "e4m3fn"]'),
    "wgrad": _FORMATS,
    "margin": COUNT._replace(example="1"),
    "power_of_two": BOOLEAN,
    "fast_accumulation": Field(
        'a list of matmuls among "fprop", "dgrad" and "wgrad"', '["fprop"]', (list,)
    ),
    "min_width": _toml.NATURAL._replace(
        allowed='"auto" or a nonnegative integer', example="2048", names={"auto": "auto"}
    ),
    "tokens": COUNT._replace(example="8192"),
    "emulate": BOOLEAN,
    "amax_history_len": COUNT._replace(example="1024"),
    "amax_compute": choice("max", "most_recent"),
    "calibrate": BOOLEAN,
    "rounding": choice("up", "down"),
}


def with_scaling(
    policies: _Policies,
    settings: Mapping[str, Setting],
    document: Document,
    phases: Iterable[Phase],
) -> _Policies:
    """Returns policies with the scaling that the table specifies.

    Args:
      policies: the default policy and the rules of the recipe.
      settings: key -> setting of the table, also those of the recipes that the file extends.
      document: the file.
      phases: the phases of the recipe, which may have FP8 matmuls if the policies have none.

    Raises:
      RecipeError: if the file has the table, but no policy sets `matmul = "fp8"`; or as in
        `read_scaling`.
    """
    if matmul_scaling(policies) is not None or any(phase.sets_fp8 for phase in phases):
        return dataclasses.replace(policies, fp8=read_scaling(settings) if settings else None)
    own = [setting for setting in settings.values() if setting.document is document]
    if own:
        raise RecipeError(
            f"{own[0].location}: [fp8] specifies the scaling of FP8 matmuls, but neither [policy] "
            'nor a rule of this recipe sets matmul = "fp8". Write:\n    [policy]\n'
            '    matmul = "fp8"'
        )
    return policies


def replace_scaling(
    policies: _Policies, scaling: _scaling.ScalingLike, recipe: str, phases: Iterable[Phase]
) -> _Policies:
    """Returns policies with another scaling.

    Args:
      policies: the policies.
      scaling: a scaling or its name; None: `policies` is returned unchanged.
      recipe: name of the recipe, for the error message.
      phases: as in `with_scaling`.

    Raises:
      RecipeError: if no policy sets `matmul = "fp8"`, or `scaling` is not a scaling.
    """
    if scaling is None:
        return policies
    policies = dataclasses.replace(policies, fp8=_scaling.as_scaling(scaling))
    if matmul_scaling(policies) is None and not any(phase.sets_fp8 for phase in phases):
        raise RecipeError(
            f"fp8={scaling!r} specifies the scaling of FP8 matmuls, but no policy or rule of "
            f"{recipe!r} sets matmul='fp8'. Start from a recipe with FP8 matmuls, or add "
            "them: load_recipe('fp8').replace(fp8='rowwise'), "
            "recipe.replace(policies='p=f32,c=bf16,o=f32,matmul=fp8', fp8='rowwise')."
        )
    return policies


def read_scaling(settings: Mapping[str, Setting]) -> _scaling.Scaling:
    """Returns the scaling that an [fp8] table specifies.

    Args:
      settings: key -> setting. The type of each value has been checked.

    Raises:
      RecipeError: if settings are not valid for the scaling, or contradict each other; the message
        contains file, line and key.
    """
    values: dict[str, Any] = {
        key: tuple(setting.value) if isinstance(setting.value, list) else setting.value
        for key, setting in settings.items()
    }
    cls = _scaling.KINDS[values.pop("scaling", _scaling.CurrentScaling.kind)]
    for key, value in values.items():
        if key not in _field_names(cls):
            owner = next(
                kind for kind, other in _scaling.KINDS.items() if key in _field_names(other)
            )
            raise RecipeError(
                f"{settings[key].location}: {key} requires scaling = {quoted(owner)}, but this "
                f"recipe has scaling = {quoted(cls.kind)}. Delete the key, or write:\n    [fp8]\n"
                f"    scaling = {quoted(owner)}\n    {key} = {literal(value)}"
            )
    try:
        return cls(**values)
    except RecipeError as error:
        key = next((key for key in values if f"{key}=" in str(error)), next(iter(settings)))
        raise RecipeError(
            f"{settings[key].location}: {error} In TOML:\n    {key} = {FIELDS[key].example}"
        ) from None


def _field_names(cls: type[_scaling.Scaling]) -> set[str]:
    return {field.name for field in dataclasses.fields(cls)}


def scaling_settings(scaling: _scaling.Scaling) -> dict[str, object]:
    """Returns the [fp8] table of a scaling: its name and its non-default settings."""
    scaling = _scaling.as_scaling(scaling)
    default = _scaling.KINDS[scaling.kind]()
    settings = vars(scaling).items()
    changed = {name: value for name, value in settings if value != getattr(default, name)}
    return {"scaling": scaling.kind, **changed}
