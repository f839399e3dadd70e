"""Loss scale of a recipe as plain data, and the parser of a [loss_scale] table."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxmp._loss_scale import (
    DynamicLossScale,
    LossScale,
    NoLossScale,
    StaticLossScale,
    as_loss_scale,
)
from jaxmp._policies._rules import PolicyMap, named_dtypes
from jaxmp._recipe_files import _toml
from jaxmp._recipe_files._schema import DYNAMIC, Setting, example, read_contents, shown
from jaxmp.errors import LossScaleError, RecipeError

_FLOAT16 = np.dtype("float16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossScaleData:
    """Loss scale as strings and numbers, without arrays."""

    # "none", "static" or "dynamic".
    kind: str = "none"
    # For "dynamic": the framework whose defaults it has, such as "torch"; "" for those of jaxmp.
    preset: str = ""
    # Arguments that differ from the preset's, sorted by name; for "static", `value`.
    arguments: tuple[tuple[str, float | int | str | None], ...] = ()

    def build(self) -> LossScale:
        """Returns the loss scale with new arrays."""
        arguments: dict[str, Any] = dict(self.arguments)
        if self.kind == "none":
            return NoLossScale()
        if self.kind == "static":
            return StaticLossScale(arguments["value"])
        make = getattr(DynamicLossScale, self.preset) if self.preset else DynamicLossScale
        return make(**arguments)


_KEYS_OF_KIND = {
    "none": ("kind",),
    "static": ("kind", "value"),
    "dynamic": ("kind", "preset", *DYNAMIC),
}


def loss_scale_data(value: Any, policies: PolicyMap) -> LossScaleData:
    """Converts a loss scale to plain data.

    Args:
      value: a dict with the keys of the [loss_scale] table, a kind as a string, or any argument of
        `as_loss_scale`, of which the settings and the scale are stored.
      policies: the dtype policies, which decide the kind "auto".

    Raises:
      RecipeError: if the keys of a dict contradict each other.
      LossScaleError: if `value` is not a loss scale.
    """
    if isinstance(value, LossScaleData):
        return value
    if isinstance(value, str):
        value = {"kind": value}
    if not isinstance(value, Mapping):
        return _of_object(as_loss_scale(value))
    table = _toml.Document("Recipe", {"loss_scale": dict(value)}, {})
    settings = {key: setting for (_, key), setting in read_contents(table).settings.items()}
    return read_loss_scale(settings, policies)


def _of_object(loss_scale: LossScale) -> LossScaleData:
    if isinstance(loss_scale, NoLossScale):
        return LossScaleData()
    scale = float(loss_scale.scale_value)
    if isinstance(loss_scale, StaticLossScale):
        return LossScaleData(kind="static", arguments=(("value", scale),))
    arguments = {name: getattr(loss_scale, name) for name in loss_scale.STATIC}
    return LossScaleData(kind="dynamic", arguments=_sorted({**arguments, "init_scale": scale}))


def _sorted(arguments: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(arguments.items()))


def read_loss_scale(settings: Mapping[str, Setting], policies: PolicyMap) -> LossScaleData:
    """Returns the loss scale that a [loss_scale] table specifies, with "auto" resolved.

    Args:
      settings: key -> `Setting`. The type and range of each value have been checked.
      policies: the dtype policies, which decide the kind "auto".

    Raises:
      RecipeError: if a setting contradicts the others; the message contains its location.
    """
    values = {key: setting.value for key, setting in settings.items()}
    kind = values.pop("kind", "auto")
    if kind == "auto":
        dynamic = values.keys() & {"preset", *DYNAMIC}
        kind = "dynamic" if dynamic else automatic_kind(policies)
    for key, setting in settings.items():
        if key not in _KEYS_OF_KIND[kind]:
            raise _wrong_kind(key, setting, kind)
    if kind == "static" and "value" not in values:
        raise RecipeError(
            f"{settings['kind'].where}: a static loss scale needs a value. For example:\n"
            + example("loss_scale", "value")
        )
    data = LossScaleData(kind=kind, preset=values.pop("preset", ""), arguments=_sorted(values))
    return _tried(data, settings)


def automatic_kind(policies: PolicyMap) -> str:
    """Returns the kind of "auto": "dynamic" if any dtype is float16, otherwise "none"."""
    return "dynamic" if _FLOAT16 in [dtype for _, _, dtype in named_dtypes(policies)] else "none"


def _wrong_kind(key: str, setting: Setting, kind: str) -> RecipeError:
    right = "static" if key == "value" else "dynamic"
    line = f"{key} = {shown(setting.value)}"
    return RecipeError(
        f'{setting.where}: {line} goes with kind = "{right}", but this loss scale is "{kind}". '
        'Delete it, or change the kind:\n    extends = "bf16"\n    [loss_scale]\n'
        f'    kind = "{right}"\n    {line}'
    )


def _tried(data: LossScaleData, settings: Mapping[str, Setting]) -> LossScaleData:
    """Returns `data` if it can be built, and raises RecipeError otherwise.

    `jax.eval_shape` builds it without initializing a device.
    """
    try:
        jax.eval_shape(data.build)
    except LossScaleError as error:
        key = next((key for key in settings if f"{key}=" in str(error)), "value")
        raise RecipeError(
            f"{settings[key].where}: {key} = {shown(settings[key].value)} is refused. {error} "
            f"In TOML:\n{example('loss_scale', key)}"
        ) from None
    return data
