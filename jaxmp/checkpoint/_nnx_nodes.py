"""NNX modules and optimizers as pytrees of arrays, and back. Flax is never imported here."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import orbax.checkpoint as ocp

from jaxmp import _core
from jaxmp._core import Path, PyTree

if TYPE_CHECKING:
    from flax import nnx


def is_node(value: object) -> bool:
    """Returns True for NNX modules, optimizers, metrics and random states."""
    nnx: Any = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(value, nnx.Pytree)


def pure_state(node: nnx.Pytree) -> PyTree:
    """Returns the arrays of an NNX object as a pytree without Variables."""
    return sys.modules["flax.nnx"].as_pure(variables(node))


def variables(node: nnx.Pytree) -> PyTree:
    """Returns the Variables of an NNX object as a pytree; their classes determine their roles."""
    return sys.modules["flax.nnx"].state(node)


def update(node: nnx.Pytree, arrays: PyTree) -> nnx.Pytree:
    """Assigns the arrays of a tree like `pure_state(node)` to an NNX object; returns the object."""
    nnx = sys.modules["flax.nnx"]
    nnx.update(node, arrays)
    return node


def optimizer_states(node: nnx.Pytree) -> PyTree:
    """Returns the states of the optimizers in an NNX object as optax made them, in nested dicts."""
    pure = sys.modules["flax.nnx"].as_pure
    states = {
        (*path, "opt_state"): pure(part.opt_state)
        for path, part in _parts(node)
        if _core.has_fields(part, "opt_state")
    }
    return ocp.tree.from_flat_dict(states)


def trained_models(nodes: list[tuple[Path, nnx.Pytree]]) -> list[tuple[Path, Path]]:
    """Returns the path of each optimizer whose model is in the state, and the path of the model.

    Args:
      nodes: the NNX objects of a state with their paths.
    """
    adapter = sys.modules.get("jaxmp._flax._nnx_optimizer")
    if adapter is None:
        return []
    parts = [((*names, *path), part) for names, node in nodes for path, part in _parts(node)]
    paths = {id(part): path for path, part in parts}
    models = [(path, adapter.trained_model(part)) for path, part in parts]
    return [(path, paths[id(model)]) for path, model in models if id(model) in paths]


def _parts(node: nnx.Pytree) -> list[tuple[Path, Any]]:
    """Returns the NNX objects in an object, with their paths."""
    nnx = sys.modules["flax.nnx"]
    parts = [(tuple(map(str, path)), part) for path, part in nnx.iter_graph(node)]
    return [(path, part) for path, part in parts if isinstance(part, nnx.Pytree)]
