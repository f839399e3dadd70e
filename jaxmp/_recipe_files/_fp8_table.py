"""Converts the [fp8] table of a recipe file to a scaling of `jaxmp.fp8`, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxmp._recipe_files._toml import literal, quoted
from jaxmp.errors import RecipeError
from jaxmp.fp8._scaling import GEMMS, KINDS, CurrentScaling, Scaling, as_scaling

SCALINGS = tuple(KINDS)


def is_formats(value: Any) -> bool:
    """Returns True if a TOML value has the form of the formats of one matmul."""
    if isinstance(value, str):
        return True
    return isinstance(value, list) and len(value) == 2 and all(isinstance(v, str) for v in value)


def is_products(value: Any) -> bool:
    """Returns True for a list of matmul names, such as ["fprop", "dgrad"]."""
    return isinstance(value, list) and all(name in GEMMS for name in value)


def is_width(value: Any) -> bool:
    """Returns True if a TOML value is allowed for `min_width`."""
    return value == "auto" or (type(value) is int and 0 <= value < 2**31)


def frozen(value: Any) -> Any:
    """Converts a TOML list to a tuple; other values are unchanged."""
    return tuple(value) if isinstance(value, list) else value


def read_fp8(settings: Mapping[str, Any]) -> Scaling | None:
    """Returns the scaling that an [fp8] table specifies; None without settings.

    Args:
      settings: key -> `Setting`. The type and range of each value have been checked.

    Raises:
      RecipeError: if settings are not valid for the scaling, or contradict each other; the message
        contains file, line and key.
    """
    if not settings:
        return None
    values = {key: setting.value for key, setting in settings.items()}
    cls = KINDS[values.pop("scaling", CurrentScaling.kind)]
    known = {field.name for field in dataclasses.fields(cls)}
    for key in values:
        if key not in known:
            owners = [kind for kind, other in KINDS.items() if key in _names(other)]
            raise RecipeError(
                f"{settings[key].where}: {key} does not go with scaling = {quoted(cls.kind)}. "
                f'Write:\n    extends = "fp8"\n    [fp8]\n    scaling = {quoted(owners[0])}\n'
                f"    {key} = {_text(values[key])}"
            )
    try:
        return cls(**values)
    except RecipeError as error:
        at = next((key for key in values if f"{key}=" in str(error)), next(iter(settings)))
        raise RecipeError(f"{settings[at].where}: {error}") from None


def _names(cls: type[Scaling]) -> set[str]:
    return {field.name for field in dataclasses.fields(cls)}


def fp8_settings(scaling: Any) -> dict[str, str]:
    """Returns an [fp8] table for a scaling: its name and its non-default settings, as TOML text."""
    scaling = as_scaling(scaling)
    default = KINDS[scaling.kind]()
    changed = {
        field.name: _text(getattr(scaling, field.name))
        for field in dataclasses.fields(scaling)
        if getattr(scaling, field.name) != getattr(default, field.name)
    }
    return {"scaling": quoted(scaling.kind), **changed}


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(literal, value))}]"
    return literal(value)
