"""What a traced function writes to Flax NNX objects in its arguments. Flax is not imported here.

A trace replaces these objects by copies, so the new values are further results of the function.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxmp import _core
from jaxmp._core import PyTree

# Index of an object, and the path of a leaf in it.
Place = tuple[int, tuple[Any, ...]]


def flax_objects(tree: PyTree) -> list[Any]:
    """Returns the modules, Variables and other objects of Flax NNX in a tree."""
    nnx: Any = sys.modules.get("flax.nnx")
    if nnx is None:
        return []
    is_object = lambda node: isinstance(node, (nnx.Pytree, nnx.Variable))
    return [node for node in jax.tree.leaves(tree, is_leaf=is_object) if is_object(node)]


class Writing:
    """A function that also returns the values that it writes to Flax objects in its arguments.

    Args:
      fn: the function.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn
        self.places: list[Place] = []
        self.count = 0  # Number of the arrays that it writes.

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> tuple[PyTree, list[PyTree]]:
        objects = flax_objects((args, kwargs))
        before = {place: _value(leaf) for place, leaf in _leaves(objects).items()}
        out = self.fn(*args, **kwargs)
        after = {place: _value(leaf) for place, leaf in _leaves(objects).items()}
        if new := [path for _, path in after.keys() - before.keys()]:
            name = "/".join(_core.path_names(new[0]))
            _core.warn_user(
                f"The function adds {name!r} to a Flax object, and autocast updates only what "
                "exists. Return the value, or create it before the call.",
                repeats=False,
            )
        self.places = [p for p, value in before.items() if after.get(p, value) is not value]
        values = [after[place] for place in self.places]
        self.count = len(jax.tree.leaves(values))
        return out, values

    def write(self, objects: Sequence[Any], values: Sequence[PyTree]) -> None:
        """Writes the values to the objects of the caller."""
        leaves = _leaves(objects)
        for (index, path), value in zip(self.places, values, strict=True):
            if _is_variable(variable := leaves[index, path]):
                variable.set_raw_value(value)
                continue
            for key in reversed(path):  # An array that is an attribute of a module.
                value = {getattr(key, "name", None) or key.key: value}
            sys.modules["flax.nnx"].update(objects[index], value)


def _leaves(objects: Sequence[Any]) -> dict[Place, Any]:
    return {
        (index, path): leaf
        for index, node in enumerate(objects)
        for path, leaf in jax.tree_util.tree_leaves_with_path(node, is_leaf=_is_variable)
    }


def _is_variable(leaf: object) -> bool:
    return isinstance(leaf, sys.modules["flax.nnx"].Variable)


def _value(leaf: Any) -> Any:
    return leaf.get_raw_value() if _is_variable(leaf) else leaf
