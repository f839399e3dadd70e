"""Checks and conversions of the arguments of a `Checkpointer`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxmp._core._dtypes import canonical_dtype, is_16bit, short_name
from jaxmp._core._typing import ArrayLike
from jaxmp._loss_scale import NoLossScale
from jaxmp._policies._resolve import storage_dtype
from jaxmp._recipe import Recipe
from jaxmp.checkpoint._description import Description
from jaxmp.checkpoint._manifest import parse_recipe
from jaxmp.errors import CheckpointError


def check_directory(directory: object) -> None:
    """Refuses to write below a name that orbax reads as a pattern, such as `lr=[0.1]`.

    Orbax collects the files of a step with glob. In a directory with such a name it finds none, or
    those of another directory, and reports success.

    Raises:
      CheckpointError: if the path contains `*`, `?` or `[`.
    """
    name = str(directory)
    plain = re.sub(r"[*?\[\]]", "_", name)
    if plain != name.replace("]", "_"):
        raise CheckpointError(
            f"{name!r} contains '*', '?' or '[', which orbax reads as a pattern, so the files of a "
            f"step would be lost. Save into another directory: Checkpointer({plain!r})."
        )


def as_step(step: ArrayLike) -> int:
    """Converts the number of a step to an integer."""
    number = step if isinstance(step, int) else np.asarray(step).item()
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        raise CheckpointError(f"step={step!r} is not the number of a step: 0, 1, 2, ...")
    return number


def as_metrics(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """Converts metrics to a dict from name to float."""
    try:
        return {str(name): float(value) for name, value in (metrics or {}).items()}
    except (TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"metrics={metrics!r} must map names to numbers, such as {{'loss': 2.5}}: {error}."
        ) from error


def as_json(extra: object) -> Any:
    """Returns a copy of JSON data; refuses keys that JSON would convert to strings."""
    try:
        copy = json.loads(json.dumps(extra))
        _check_keys(extra)
        return copy
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"extra cannot be written as JSON: {error}. Put arrays into the state: "
            "save(step, {'train': state, 'data': arrays}, ...)."
        ) from error


def _check_keys(extra: object) -> None:
    if isinstance(extra, dict):
        for key in extra:
            if not isinstance(key, str):
                raise TypeError(f"the key {key!r} is not a string, and would become {str(key)!r}")
    if isinstance(extra, (dict, list, tuple)):
        for value in extra.values() if isinstance(extra, dict) else extra:
            _check_keys(value)


def check_recipe(description: Description, recipe: Recipe, name: str) -> None:
    """Checks that a recipe stores parameters as the state does.

    Raises:
      CheckpointError: with the first parameter that differs.
    """
    for masters in description.masters:
        for parameter in masters.parameters:
            path = parameter.path.replace(":", "/").lstrip("/")
            dtype = storage_dtype(recipe.policies, tuple(path.split("/")))
            form = "none"
            if is_16bit(dtype):
                form = {"auto": "fp32"}.get(recipe.master, recipe.master)
            stored = masters.layout if parameter.master else "none"
            if short_name(dtype) != parameter.storage or form != stored:
                raise CheckpointError(
                    f"{name} was not made with the recipe {recipe.name!r}: it stores "
                    f"{parameter.path!r} in {canonical_dtype(parameter.storage).name} (master: "
                    f"{stored}), and the recipe in {np.dtype(dtype).name} (master: {form}). Pass "
                    "the recipe whose optimizer made the state."
                )


def is_same_recipe(text: str, recipe: Recipe) -> bool:
    """Returns True if the text of a TOML file specifies the same settings as a recipe."""
    if text == recipe.to_toml():
        return True
    unnamed = recipe.replace(name="recipe", summary="")
    return parse_recipe(text).replace(name="recipe", summary="") == unnamed


def initial_scale(recipe: Recipe | None) -> dict[str, Any] | None:
    """Returns field -> value of the initial loss scale of a recipe; None: it has none."""
    scale = None if recipe is None else recipe.loss_scale
    if scale is None or isinstance(scale, NoLossScale):
        return None
    flat, _ = jax.tree_util.tree_flatten_with_path(scale)
    return {str(path[-1]).lstrip("."): np.asarray(leaf) for path, leaf in flat}
