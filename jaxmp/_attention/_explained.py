"""Compares the declared masks of a model with those that it passes to its layers."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from jaxmp._attention._declared import Declaration, check_known, declaration_of, mask_operand
from jaxmp._core._jaxprs import FORWARD, equations, trace
from jaxmp._core._locations import Location, Locations, module_of, root_of
from jaxmp._core._static_values import Scope
from jaxmp._core._typing import PyTree
from jaxmp._policies._explanation import MaskRow
from jaxmp._recipe_files._load import PolicyMap
from jaxmp.errors import RecipeWarning


def mask_rows(
    call: Callable[..., Any],
    policies: PolicyMap,
    args: tuple[PyTree, ...],
    kwargs: dict[str, PyTree],
) -> tuple[MaskRow, ...]:
    """Lists the layers of a model with declared masks, and compares each mask if it is known.

    Args:
      call: runs the model under `policies`.
      policies: the policies of the model; nothing is traced if they declare no mask.
      args, kwargs: its arguments: arrays, whose elements are known, shapes or other values.

    Raises:
      AttentionError: if a mask contradicts its declaration.
    """
    declared = {policies.default.mask, *(rule.mask for rule in policies.rules)}
    if declared <= {None, "array"}:
        return ()
    with warnings.catch_warnings():
        # Warnings about layers that ignore the recipe, which do not concern masks.
        warnings.simplefilter("ignore", RecipeWarning)
        closed = trace(call, args, kwargs).closed
    arrays = [leaf for leaf in jax.tree.leaves((args, kwargs)) if hasattr(leaf, "shape")]
    masks = declared_masks(Scope(closed, list(map(_elements, arrays))))
    return tuple(MaskRow(mask.path, str(mask), is_known) for mask, is_known in masks)


def declared_masks(program: Scope) -> list[tuple[Declaration, bool]]:
    """Compares the declared masks in the forward pass of a program with their arrays.

    Returns:
      For each layer its declaration, and True if the elements of its mask are known.

    Raises:
      AttentionError: if a mask contradicts its declaration.
    """
    locations, masks = Locations(), {}

    def visit(scope: Scope, outer: Location) -> None:
        for equation in equations(scope.jaxpr, inside=False):
            location = locations.of(equation, outer)
            declared = declaration_of(str(equation.params.get("name", "")))
            mask = None if declared is None else mask_operand(equation)
            if mask is not None and location.phase == FORWARD:
                masks[location.names] = declared, scope.value(mask)
            for inside in scope.inside(equation):
                visit(inside, location)

    visit(program, Location())
    rows, root = [], root_of(locations.names)
    for names, (declared, mask) in masks.items():
        declaration = Declaration(declared.mask, declared.window, module_of(names, root))
        if mask is not None:
            check_known(mask, declaration)
        rows.append((declaration, mask is not None))
    return rows


def _elements(value: Any) -> np.ndarray | None:
    """Returns the elements of an argument; None for a shape, a tracer or a key."""
    if isinstance(value, (jax.ShapeDtypeStruct, Tracer)) or not hasattr(value, "__array__"):
        return None
    is_key = jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)
    return None if is_key else np.asarray(value)
