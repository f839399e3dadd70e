"""NNX modules and optimizers as pytrees of arrays, and back. Flax is never imported here."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import jax

from jaxmp._core._trees import Path, path_names
from jaxmp._core._typing import PyTree

if TYPE_CHECKING:
    from flax import nnx


def is_node(value: object) -> bool:
    """Returns True for NNX modules, optimizers, metrics and random states."""
    nnx: Any = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(value, nnx.Pytree)


def pure_state(node: nnx.Pytree) -> PyTree:
    """Returns the arrays of an NNX object as a pytree without Variables."""
    nnx = sys.modules["flax.nnx"]
    return nnx.as_pure(nnx.state(node))


def update(node: nnx.Pytree, arrays: PyTree) -> nnx.Pytree:
    """Assigns the arrays of a tree like `pure_state(node)` to an NNX object; returns the object."""
    nnx = sys.modules["flax.nnx"]
    nnx.update(node, arrays)
    return node


def optimizer_state(node: nnx.Pytree) -> PyTree:
    """Returns the optimizer state of an NNX object as optax made it; None for other objects."""
    nnx = sys.modules["flax.nnx"]
    opt_state = getattr(node, "opt_state", None)
    return None if opt_state is None else {"opt_state": nnx.as_pure(opt_state)}


def overwritten_paths(node: nnx.Pytree) -> set[Path]:
    """Returns the paths of the state of FP8 scaling."""
    nnx = sys.modules["flax.nnx"]
    adapter = sys.modules.get("jaxmp.nnx")
    if adapter is None:
        return set()
    state = nnx.as_pure(nnx.state(node, adapter.OverwriteWithGradient))
    flat, _ = jax.tree_util.tree_flatten_with_path(state)
    return {path_names(key_path) for key_path, _ in flat}
