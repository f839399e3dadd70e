"""The [fp8] table of a recipe: a scaling of `jaxmp.fp8` in TOML, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxmp._toml import literal, quoted
from jaxmp.errors import RecipeError
from jaxmp.fp8._recipes import GEMMS, KINDS, CurrentScaling, Scaling, as_recipe

SCALINGS = tuple(KINDS)


def is_formats(value: Any) -> bool:
    """Whether a TOML value may name the formats of one product."""
    if isinstance(value, str):
        return True
    return isinstance(value, list) and len(value) == 2 and all(isinstance(v, str) for v in value)


def is_products(value: Any) -> bool:
    """Whether a TOML value is a list of products."""
    return isinstance(value, list) and all(name in GEMMS for name in value)


def is_width(value: Any) -> bool:
    """Whether a TOML value may stand for `min_width`."""
    return value == "auto" or (type(value) is int and 0 <= value < 2**31)


def frozen(value: Any) -> Any:
    """A list of TOML as a tuple."""
    return tuple(value) if isinstance(value, list) else value


def read_fp8(settings: Mapping[str, Any]) -> Scaling | None:
    """The scaling that an [fp8] table stands for; None where there is no such table.

    Args:
      settings: key -> `Setting`, each value checked by itself.

    Raises:
      RecipeError: if settings do not go with the scaling, or with each other; naming the place.
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
    """An [fp8] table, its values as TOML text: the scaling, and what is not its default."""
    scaling = as_recipe(scaling)
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
