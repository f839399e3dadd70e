"""Assigns parameters from their masters, and casts them to their storage dtypes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
import optax
from jax.core import Tracer

from jaxmp import _core
from jaxmp._core import Array, PyTree
from jaxmp._policies._required import check_required
from jaxmp._policies._resolve import Policies, storage_dtype
from jaxmp.optim import _layout, _master
from jaxmp.optim._layout import (
    MasterParamsState,
    UnpackedMasters,
    UnpackedParameters,
    leaves_by_path,
    map_by_path,
    map_master_states,
    master_states,
)
from jaxmp.optim._master import first_saturated, read_master
from jaxmp.optim._rounding import StochasticRoundingState


def unpack_masters(state: PyTree, params: PyTree) -> PyTree:
    """Replaces each `MasterParamsState` by `UnpackedMasters`; `assign` undoes this.

    Args:
      state: an optimizer state.
      params: the parameters.
    """
    stored = leaves_by_path(params)

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
        stored = _layout.entries_of(node.masters, treedef)
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
                written[path] = full if dtype is None else _core.cast(full, dtype)
                masters.append(optax.MaskedNode())
            elif node.layout.master == "packed":
                written[path], remainder = _master.pack(full)
                masters.append(remainder)
            else:
                written[path] = _core.cast(full, dtype)
                masters.append(full)
        tree = node.layout.tree(jax.tree.structure(node.masters), masters)
        return MasterParamsState(tree, node.overflow, node.fits, node.inner_state, node.layout)

    state = map_master_states(pack, state)
    return map_by_path(written.get, params), state


def set_master_params(params: PyTree, opt_state: PyTree) -> tuple[PyTree, PyTree]:
    """Makes the values of FP32 parameters the masters of an optimizer state, exactly.

    Parameters in their storage dtypes are returned as they are, because each update takes those
    that were replaced as its masters. Moments, averages and counters do not change.

    `TrainState.replace(params=...)` and `jaxmp.nnx.Optimizer.update` call it. A plain optax loop
    calls it for FP32 values, such as pretrained weights.

    Args:
      params: a tree of parameters in FP32 or their storage dtypes.
      opt_state: the state of `recipe.optimizer(inner)`.

    Returns:
      The parameters in their storage dtypes, and the optimizer state.

    Example:
      >>> tx = jaxmp.load_recipe("bf16_params").optimizer(optax.sgd(0.1))
      >>> opt_state = tx.init({"w": jnp.zeros(2)})
      >>> params, opt_state = set_master_params({"w": jnp.full(2, 0.1)}, opt_state)
      >>> params["w"].dtype, jaxmp.get_master_params(opt_state)["w"]
      (dtype(bfloat16), Array([0.1, 0.1], dtype=float32))
    """
    stored = store(params, opt_state)
    leaves = zip(jax.tree.leaves(params), jax.tree.leaves(stored), strict=True)
    if all(old is new for old, new in leaves):
        return params, opt_state
    by_path = leaves_by_path(params)

    def take(node: MasterParamsState) -> MasterParamsState:
        masters = []
        for _, path, master in node.values():
            if not _core.is_16bit(by_path[path].dtype):
                new = _master.make_master(by_path[path], node.layout.master)
                is_placed = _master.is_committed(master) and not isinstance(new, Tracer)
                master = jax.device_put(new, master.sharding) if is_placed else new
            masters.append(master)
        tree = jax.tree.structure(node.masters).unflatten(masters)
        return dataclasses.replace(node, masters=tree)

    return stored, map_master_states(take, opt_state)


def keep_masters(applied: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    """Returns the state `new`, with the masters of `old` if the step was not applied."""
    before = iter(master_states(old))
    keep = lambda node: _core.select(applied, node.masters, next(before).masters)
    return map_master_states(lambda node: dataclasses.replace(node, masters=keep(node)), new)


def warn_of_replaced(pairs: Iterable[tuple[str, Array, Array]]) -> None:
    """Warns of 16-bit parameters that are not their rounded FP32 masters.

    Args:
      pairs: path, parameter and master.
    """
    paths = [
        path for path, param, full in pairs if full.dtype == _core.FLOAT32 and _differs(param, full)
    ]
    if paths:
        others = f" and {len(paths) - 1} other parameters differ" if paths[1:] else " differs"
        _core.warn_user(
            f"{paths[0]!r}{others} from the FP32 masters: values were replaced after the last "
            "step. The next step takes them as the masters; moments stay as they are. If only the "
            "parameters or only the optimizer state was restored, restore both. The masters are "
            "jaxmp.get_master_params(state.opt_state)."
        )


def _differs(param: Array, master: Array) -> bool:
    """Compares the parts on this process, because another one may not call `check`."""
    if not isinstance(param, jax.Array) or param.is_fully_addressable:
        return not _master.is_rounded(_master.placed_as(master, param), param)
    if not param.sharding.is_equivalent_to(master.sharding, param.ndim):
        return False
    parts = zip(param.addressable_shards, master.addressable_shards, strict=True)
    return not all(_master.is_rounded(full.data, part.data) for part, full in parts)


def store(params: PyTree, state: PyTree) -> PyTree:
    """Casts newly initialized parameters to the storage dtypes that `state` records."""
    storage = {
        path: (_core.canonical_dtype(name), node.layout.master)
        for node in master_states(state)
        for i, (path, name) in enumerate(node.layout.storage)
        if name
    }
    wide = {
        path: leaf
        for path, leaf in leaves_by_path(params).items()
        if path in storage and _core.dtype_of(leaf) != storage[path][0]
    }

    def cast_leaves(wide: dict[str, Any]) -> dict[str, Any]:
        return {path: _master.to_storage(leaf, *storage[path]) for path, leaf in wide.items()}

    cast = _core.in_one_program(cast_leaves, wide)
    return map_by_path(cast.get, params)


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
        np.dtype(storage_dtype(policies, _core.rule_names(params, n)) if policies else leaf.dtype)
        for n, leaf in _core.leaves_with_path(params)
        if _core.is_castable(leaf)
    }
    halves = [dtype.name for dtype in dtypes if _core.is_16bit(dtype)]
    if halves and (policies or len(halves) == len(dtypes)):
        _core.warn_user(
            f"The recipe stores parameters in {halves[0]}, but the optimizer was not made with it: "
            "it neither casts them nor keeps FP32 masters, without which small updates are lost. "
            "Make it with the recipe: tx = recipe.optimizer(tx).",
            repeats=True,
        )


def warn_of_wide(params: PyTree, state: PyTree, fix: str) -> None:
    """Warns of parameters that the optimizer's policies store in fewer bits than they have.

    An optimizer casts the parameters that it trains; those that it does not train, such as the
    frozen ones of a model with LoRA, keep their dtype.

    Args:
      params: a tree of parameters.
      state: the optimizer state.
      fix: code that casts them.
    """
    maps = [node.layout.policies for node in master_states(state) if node.layout.policies]
    wide = []
    for names, leaf in _core.leaves_with_path(params) if maps else ():
        dtypes = [_layout.stored_dtype(params, names, leaf, policies) for policies in maps]
        if all(each is not None and _core.bits(each) < _core.bits(leaf.dtype) for each in dtypes):
            path = _core.parameter_path(_core.rule_names(params, names))
            wide.append((path, leaf, dtypes[0]))
    if not wide:
        return
    path, leaf, dtype = wide[0]
    size = sum(np.prod(leaf.shape) * leaf.dtype.itemsize for _, leaf, _ in wide)
    others = f" and {len(wide) - 1} other parameters are" if len(wide) > 1 else " is"
    _core.warn_user(
        f"{path!r}{others} stored in {leaf.dtype} ({size / 1e6:,.1f} MB), and the recipe stores "
        f"them in {dtype}. The optimizer casts only the parameters that it trains. If the others "
        f"are frozen, cast them once before training: {fix}"
    )


def check_master_rules(opt_state: PyTree, params: PyTree) -> None:
    """Refuses required rules of masters that set `param_dtype` by path and match no parameter."""
    paths = set()
    for names, _ in _core.leaves_with_path(params):
        inside = _core.rule_names(params, names)
        paths.add(_core.parameter_path(inside))
        paths.update("/".join(inside[:i]) for i in range(len(inside)))
    for node in master_states(opt_state):
        policies = node.layout.policies
        if policies is not None:
            rules = [
                r for r in policies.rules if r.param_dtype is not None and r.module_type is None
            ]
            check_required(policies, dict.fromkeys(sorted(paths)), rules)
