"""Loss scale of a recipe as plain data, and the parser of a [loss_scale] table."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax

from jaxmp import _core
from jaxmp._gradients import _loss_scale
from jaxmp._gradients._dynamic_loss_scale import DynamicLossScale, LossScaleLike, as_loss_scale
from jaxmp._policies import _toml
from jaxmp._policies._required import named_dtypes
from jaxmp._policies._resolve import Policies
from jaxmp._policies._schema import DYNAMIC, fix_line, read_contents
from jaxmp._policies._toml import Setting
from jaxmp.errors import LossScaleError, RecipeError


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossScaleData:
    """Loss scale as strings and numbers, without arrays."""

    # "none", "static" or "dynamic".
    kind: str = "none"
    # For "dynamic": the framework whose defaults it has, such as "torch"; "" for those of jaxmp.
    preset: str = ""
    # Arguments that differ from the preset's, sorted by name; for "static", `value`.
    arguments: tuple[tuple[str, float | int | str | None], ...] = ()

    def build(self) -> _loss_scale.LossScale:
        """Returns the loss scale with new arrays."""
        arguments: dict[str, Any] = dict(self.arguments)
        if self.kind == "none":
            return _loss_scale.NoLossScale()
        if self.kind == "static":
            return _loss_scale.StaticLossScale(arguments["value"])
        preset = functools.partial(DynamicLossScale.preset, self.preset)
        return preset(**arguments) if self.preset else DynamicLossScale(**arguments)


_KEYS_OF_KIND = {
    "none": ("kind",),
    "static": ("kind", "value"),
    "dynamic": ("kind", "preset", *DYNAMIC),
}


def loss_scale_data(
    value: LossScaleData | LossScaleLike | Mapping[str, object] | str, policies: Policies
) -> LossScaleData:
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
        return _from_object(as_loss_scale(value))
    document = _toml.Document("replace(loss_scale=...)", {"loss_scale": dict(value)})
    return read_loss_scale(read_contents(document).settings["loss_scale"], policies)


def _from_object(loss_scale: _loss_scale.LossScale) -> LossScaleData:
    if isinstance(loss_scale, _loss_scale.NoLossScale):
        return LossScaleData()
    scale = float(loss_scale.scale_value)
    if isinstance(loss_scale, _loss_scale.StaticLossScale):
        return LossScaleData(kind="static", arguments=(("value", scale),))
    settings = {name: getattr(loss_scale, name) for name in loss_scale.STATIC}
    arguments = {**settings, "init_scale": scale}
    return LossScaleData(kind="dynamic", arguments=tuple(sorted(arguments.items())))


def read_loss_scale(settings: Mapping[str, Setting], policies: Policies) -> LossScaleData:
    """Returns the loss scale that a [loss_scale] table specifies, with "auto" resolved.

    Args:
      settings: key -> setting. The type of each value has been checked.
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
            raise _contradiction(key, setting, kind)
    if kind == "none":
        return LossScaleData()
    if kind == "static" and "value" not in values:
        raise RecipeError(
            f"{settings['kind'].location}: a static loss scale requires a value. Write, for "
            f'example:\n    kind = "static"\n{fix_line("loss_scale", "value")}'
        )
    preset = values.pop("preset", "")
    data = LossScaleData(kind=kind, preset=preset, arguments=tuple(sorted(values.items())))
    try:
        jax.eval_shape(data.build)  # `eval_shape` does not initialize a device
    except LossScaleError as error:
        key = next((key for key in settings if f"{key}=" in str(error)), "value")
        raise RecipeError(
            f"{settings[key].location}: {key} = {_toml.describe(settings[key].value)} is not "
            f"allowed. {error} In TOML:\n{fix_line('loss_scale', key)}"
        ) from None
    return data


def automatic_kind(policies: Policies) -> str:
    """Returns the kind of "auto": "dynamic" if any dtype of any phase is float16, or "none"."""
    phases = (policies, *policies.others)
    dtypes = {dtype for each in phases for _, _, dtype in named_dtypes(each)}
    return "dynamic" if _core.FLOAT16 in dtypes else "none"


def _contradiction(key: str, setting: Setting, kind: str) -> RecipeError:
    required = "static" if key == "value" else "dynamic"
    line = f"{key} = {_toml.describe(setting.value)}"
    return RecipeError(
        f'{setting.location}: {line} requires kind = "{required}", but the kind of this loss scale '
        f'is "{kind}". Delete the key, or write:\n    [loss_scale]\n    kind = "{required}"\n'
        f"    {line}"
    )
