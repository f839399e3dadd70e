"""Compares the declared masks of a model with those that it passes to its layers."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from jaxmp._attention._declared import Declaration, check_known, declaration_of
from jaxmp._core._compat import jaxpr_body
from jaxmp._core._jaxprs import Path
from jaxmp._core._locations import module_of, root_of
from jaxmp._core._static_values import Known, walk
from jaxmp._core._typing import PyTree
from jaxmp._policies._explanation import MaskRow
from jaxmp._policies._resolve import PolicyMap
from jaxmp.errors import RecipeWarning


def mask_rows(call: Callable[..., Any], policies: PolicyMap, *args: PyTree) -> tuple[MaskRow, ...]:
    """Lists the layers of a model with declared masks, and compares each mask if it is known.

    Args:
      call: `call(*args)` runs the model under `policies`.
      policies: the policies of the model; nothing is traced if they declare no mask.
      *args: pytrees of arrays, whose elements are known, or of shapes.

    Raises:
      AttentionError: if a mask contradicts its declaration.
    """
    declared = {policies.default.mask, *(rule.mask for rule in policies.rules)}
    if declared <= {None, "array"}:
        return ()
    leaves, structure = jax.tree.flatten(args)
    arrays = [index for index, leaf in enumerate(leaves) if hasattr(leaf, "shape")]

    def run(values: list[Any]) -> Any:
        filled = leaves.copy()
        for index, value in zip(arrays, values, strict=True):
            filled[index] = value
        out = call(*structure.unflatten(filled))
        return [leaf for leaf in jax.tree.leaves(out) if isinstance(leaf, jax.Array)]

    values = [leaves[index] for index in arrays]
    with warnings.catch_warnings():
        # Warnings about layers that ignore the recipe, which do not concern masks.
        warnings.simplefilter("ignore", RecipeWarning)
        closed = jax.make_jaxpr(run)(values)
    known = Known()
    known.bind(jaxpr_body(closed)[0].invars, map(_elements, values))
    declarations: dict[Path, tuple[Declaration, np.ndarray | None]] = {}
    scopes: dict[Path, None] = {}
    for equation, names in walk(closed, known):
        scopes.update(dict.fromkeys(names[:length] for length in range(len(names) + 1)))
        declared = declaration_of(str(equation.params.get("name", "")), "")
        if declared is not None:
            declarations[names] = declared, known.value(equation.invars[1])
    root = root_of(scopes)
    return tuple(_row(module_of(names, root), *each) for names, each in declarations.items())


def _row(path: str, declared: Declaration, mask: np.ndarray | None) -> MaskRow:
    if mask is not None:
        check_known(mask, Declaration(declared.mask, declared.window, path))
    return MaskRow(path, str(declared), mask is not None)


def _elements(value: Any) -> np.ndarray | None:
    """Returns the elements of an argument; None for a shape, a tracer or a key."""
    if isinstance(value, (jax.ShapeDtypeStruct, Tracer)) or not hasattr(value, "__array__"):
        return None
    is_key = jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)
    return None if is_key else np.asarray(value)
