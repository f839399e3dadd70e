"""Converts the [fp8] table of a recipe file to a scaling of `jaxmp.fp8`, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxmp._recipe_files._schema import Setting, fix_line
from jaxmp._recipe_files._toml import literal, quoted
from jaxmp.errors import RecipeError
from jaxmp.fp8._scaling import KINDS, CurrentScaling, Scaling, as_scaling


def read_fp8(settings: Mapping[str, Setting]) -> Scaling:
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
    cls = KINDS[values.pop("scaling", CurrentScaling.kind)]
    for key, value in values.items():
        if key not in _field_names(cls):
            owner = next(kind for kind, other in KINDS.items() if key in _field_names(other))
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
            f"{settings[key].location}: {error} In TOML:\n{fix_line('fp8', key)}"
        ) from None


def _field_names(cls: type[Scaling]) -> set[str]:
    return {field.name for field in dataclasses.fields(cls)}


def fp8_settings(scaling: Scaling) -> dict[str, object]:
    """Returns the [fp8] table of a scaling: its name and its non-default settings."""
    scaling = as_scaling(scaling)
    default = KINDS[scaling.kind]()
    changed = {
        name: getattr(scaling, name)
        for name in (field.name for field in dataclasses.fields(scaling))
        if getattr(scaling, name) != getattr(default, name)
    }
    return {"scaling": scaling.kind, **changed}
