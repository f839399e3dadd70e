"""Migrates a checkpoint to another recipe without a model, for the command line."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmp._core._dtypes import canonical_dtype, is_16bit, short_name
from jaxmp._loss_scale import LossScale
from jaxmp._policies._resolve import storage_dtype
from jaxmp._recipe import Recipe
from jaxmp.checkpoint._convert import stored_shape
from jaxmp.checkpoint._description import (
    FP8,
    LOSS_SCALE,
    MASTER,
    REMAINDER,
    Description,
    FlatState,
    Leaf,
    Masters,
    Parameter,
    Scale,
)
from jaxmp.checkpoint._settle import refuse
from jaxmp.errors import CheckpointError


def describe_under(recipe: Recipe, source: Description) -> Description:
    """Describes the state of a checkpoint as it would be under another recipe.

    Raises:
      CheckpointError: if that cannot be known without the model.
    """
    if not source.masters:
        raise CheckpointError(
            "The checkpoint contains no optimizer of jaxmp, so it is not known which leaves are "
            "parameters. Restore it into a state: restore(state, recipe=recipe, migrate=True)."
        )
    has_fp8 = any(leaf.role == FP8 for leaf in source.leaves)
    keeps_fp8 = recipe.fp8 is not None and recipe.fp8.is_stateful
    if keeps_fp8 and not has_fp8:
        raise CheckpointError(
            f"The recipe {recipe.name!r} keeps the state of FP8 scaling beside its layers, and "
            "which layers have it depends on the model. Restore the checkpoint into a state of "
            "that recipe: restore(state, recipe=recipe, migrate=True)."
        )
    masters = tuple(_masters_under(recipe, row) for row in source.masters)
    for row, new in zip(source.masters, masters, strict=True):
        if len(row.candidates) > 1 and new.parameters != row.parameters:
            refuse(row)
    dtypes = {
        parameter.leaf: canonical_dtype(parameter.storage).name
        for row in masters
        for parameter in row.parameters
    }
    replaced = (MASTER, REMAINDER, LOSS_SCALE) + (() if keeps_fp8 else (FP8,))
    leaves = [
        dataclasses.replace(leaf, dtype=dtypes.get(leaf.path, leaf.dtype))
        for leaf in source.leaves
        if leaf.role not in replaced
    ]
    shapes = {leaf.path: leaf.shape for leaf in source.leaves}
    leaves += [leaf for row in masters for leaf in _master_leaves(row, shapes)]
    scale = recipe.loss_scale
    leaves += [leaf for row in source.scales for leaf in _scale_leaves(row, scale)]
    scales = tuple(Scale(row.path, type(scale).__name__) for row in source.scales)
    return Description(tuple(leaves), masters, scales, source.optimizers)


def _masters_under(recipe: Recipe, row: Masters) -> Masters:
    form = {"auto": "fp32"}.get(recipe.master, recipe.master)
    parameters = []
    for parameter in row.parameters:
        names = tuple(parameter.path.replace(":", "/").lstrip("/").split("/"))
        dtype = storage_dtype(recipe.policies, names)
        has_master = is_16bit(dtype) and form != "none"
        path = f"{row.path}/{form}_masters/{parameter.inside}".lstrip("/") if has_master else ""
        parameters.append(dataclasses.replace(parameter, storage=short_name(dtype), master=path))
    layout = form if any(parameter.master for parameter in parameters) else "no"
    return Masters(row.path, layout, tuple(parameters), row.candidates)


def _master_leaves(row: Masters, shapes: dict[str, tuple[int, ...]]) -> Iterator[Leaf]:
    dtype, role = ("int16", REMAINDER) if row.layout == "packed" else ("float32", MASTER)
    for parameter in row.parameters:
        if parameter.master:
            yield Leaf(parameter.master, dtype, shapes[_stored_leaf(parameter)], role)


def _stored_leaf(parameter: Parameter) -> str:
    if not parameter.leaf:
        raise CheckpointError(
            f"The checkpoint contains the optimizer, but not the parameter {parameter.path!r}."
        )
    return parameter.leaf


def _scale_leaves(row: Scale, scale: LossScale) -> Iterator[Leaf]:
    flat, _ = jax.tree_util.tree_flatten_with_path(scale)
    for path, leaf in flat:
        name = str(path[-1]).lstrip(".")
        yield Leaf(f"{row.path}/{name}".lstrip("/"), np.dtype(leaf.dtype).name, (), LOSS_SCALE)


def abstract_state(description: Description) -> FlatState:
    """Returns a state of shapes as a flat dict of its leaves."""
    values: list[Any] = [_abstract_leaf(leaf) for leaf in description.leaves]
    paths = [leaf.path for leaf in description.leaves]
    return FlatState(values, description, lambda new: dict(zip(paths, new, strict=True)))


def _abstract_leaf(leaf: Leaf) -> jax.ShapeDtypeStruct:
    if leaf.is_key:
        return jax.ShapeDtypeStruct(leaf.shape, jnp.uint32)
    return stored_shape(leaf)
