"""Assigns parameters from their masters, and casts them to their storage dtypes."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import jax
import numpy as np
import optax

from jaxmp._core import _trees
from jaxmp._core._dtypes import bits, is_16bit
from jaxmp._core._typing import Array, PyTree
from jaxmp._loss_scale._use import warn_user
from jaxmp._policies._resolve import Policies, storage_dtype
from jaxmp.errors import RecipeWarning
from jaxmp.optim import _master
from jaxmp.optim._master import (
    MasterParamsState,
    UnpackedMasters,
    UnpackedParameters,
    first_saturated,
    map_master_states,
    master_states,
    path_of,
    read_master,
)
from jaxmp.optim._rounding import StochasticRoundingState


def unpack_masters(state: PyTree, params: PyTree) -> PyTree:
    """Replaces each `MasterParamsState` by `UnpackedMasters`; `assign` undoes this.

    Args:
      state: an optimizer state.
      params: the parameters.
    """
    collections = _trees.has_collections(params)
    stored = {path_of(n, collections): leaf for n, leaf in _trees.leaves_with_path(params)}

    def unpack(node: MasterParamsState) -> MasterParamsState:
        full = [read_master(stored[path], value) for _, path, value in node.values()]
        masters = jax.tree.structure(node.masters).unflatten(full)
        return _unpacked(UnpackedMasters, node, masters)

    return map_master_states(unpack, state)


def unpack_parameters(state: PyTree, params: PyTree) -> PyTree:
    """Replaces each `MasterParamsState` by `UnpackedParameters`; `assign` undoes this.

    Args:
      state: an optimizer state, whose masters are those of `params` themselves.
      params: the parameters.
    """

    def unpack(node: MasterParamsState) -> MasterParamsState:
        leaves, treedef = jax.tree.flatten(params)
        stored = treedef.flatten_up_to(node.masters)
        full = [read_master(param, master) for param, master in zip(leaves, stored, strict=True)]
        return _unpacked(UnpackedParameters, node, treedef.unflatten(full))

    return map_master_states(unpack, state)


def _unpacked(
    cls: type[UnpackedMasters], node: MasterParamsState, masters: PyTree
) -> MasterParamsState:
    unpacked = cls(masters, node.overflow, node.fits, node.inner_state, node.layout)
    return dataclasses.replace(unpacked, overflow=first_saturated(unpacked))


def assign(params: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
    """Casts parameters from unpacked masters after an update, and packs the masters again.

    Args:
      params: the parameters; those without a value in `state` are returned unchanged.
      state: an optimizer state that `unpack_masters` or `unpack_parameters` returned, updated.

    Returns:
      The new parameters, and the optimizer state with `MasterParamsState`.
    """
    written: dict[str, Any] = {}

    def pack(node: MasterParamsState) -> MasterParamsState:
        masters = []
        for index, path, full in node.values():
            dtype = node.layout.dtype(index)
            if not node.layout.has_master(index):
                written[path] = full if dtype is None else _trees.cast(full, dtype)
                masters.append(optax.MaskedNode())
            elif node.layout.master == "packed":
                written[path], remainder = _master.pack(full)
                masters.append(remainder)
            else:
                written[path] = _trees.cast(full, dtype)
                masters.append(full)
        tree = jax.tree.structure(node.masters).unflatten(masters)
        return MasterParamsState(tree, node.overflow, node.fits, node.inner_state, node.layout)

    state = map_master_states(pack, state)
    collections = _trees.has_collections(params)
    write = lambda names, leaf: written.get(path_of(names, collections), leaf)
    return _trees.map_with_path(write, params), state


def store(params: PyTree, state: PyTree) -> PyTree:
    """Casts newly initialized parameters to the storage dtypes that `state` records."""
    storage = {
        path: (node.layout.dtype(i), node.layout.master)
        for node in master_states(state)
        for i, (path, name) in enumerate(node.layout.storage)
        if name
    }
    collections = _trees.has_collections(params)

    def cast_leaf(
        names: _trees.Path, leaf: Array | jax.ShapeDtypeStruct
    ) -> Array | jax.ShapeDtypeStruct:
        dtype, master = storage.get(path_of(names, collections), (None, "fp32"))
        return leaf if dtype is None else _master.to_storage(leaf, dtype, master)

    return _trees.map_with_path(cast_leaf, params)


def warn_without_masters(params: PyTree, state: PyTree, policies: Policies | None) -> None:
    """Warns of parameters stored in 16 bits whose optimizer keeps no masters of them.

    Args:
      params: the parameters that the optimizer trains.
      state: the optimizer state.
      policies: those of the model; None: a tree that has only 16-bit parameters is stored so.
    """
    is_transformed = lambda node: isinstance(node, (MasterParamsState, StochasticRoundingState))
    if any(map(is_transformed, jax.tree.leaves(state, is_leaf=is_transformed))):
        return
    dtypes = {
        np.dtype(storage_dtype(policies, _trees.rule_names(params, n)) if policies else leaf.dtype)
        for n, leaf in _trees.leaves_with_path(params)
        if _trees.is_castable(leaf)
    }
    halves = [dtype.name for dtype in dtypes if is_16bit(dtype)]
    if halves and (policies or len(halves) == len(dtypes)):
        warn_user(
            f"The recipe stores parameters in {halves[0]}, but the optimizer was not made with it: "
            "it neither casts them nor keeps FP32 masters, without which small updates are lost. "
            "Make it with the recipe: tx = recipe.optimizer(tx)."
        )


def warn_of_wide(params: PyTree, state: PyTree, fix: str, stacklevel: int) -> None:
    """Warns of parameters that the optimizer's policies store in fewer bits than they have.

    An optimizer casts the parameters that it trains; those that it does not train, such as the
    frozen ones of a model with LoRA, keep their dtype.

    Args:
      params: a tree of parameters.
      state: the optimizer state.
      fix: code that casts them.
      stacklevel: that of the caller's caller, as in `warnings.warn`.
    """
    maps = [node.layout.policies for node in master_states(state) if node.layout.policies]
    collections = _trees.has_collections(params)
    wide = []
    for names, leaf in _trees.leaves_with_path(params) if maps else ():
        is_param = not collections or names[0] == _trees.PARAMS
        if is_param and _trees.is_castable(leaf):
            rule_names = _trees.rule_names(params, names)
            dtypes = [np.dtype(storage_dtype(policies, rule_names)) for policies in maps]
            if all(bits(dtype) < bits(leaf.dtype) for dtype in dtypes):
                wide.append((_trees.parameter_path(rule_names), leaf, dtypes[0]))
    if not wide:
        return
    path, leaf, dtype = wide[0]
    size = sum(np.prod(leaf.shape) * leaf.dtype.itemsize for _, leaf, _ in wide)
    others = f" and {len(wide) - 1} other parameters are" if len(wide) > 1 else " is"
    warnings.warn(
        f"{path!r}{others} stored in {leaf.dtype} ({size / 1e6:,.1f} MB), and the recipe stores "
        f"them in {dtype}. The optimizer casts only the parameters that it trains. If the others "
        f"are frozen, cast them once before training: {fix}",
        RecipeWarning,
        stacklevel=stacklevel + 1,
    )
