"""Values that a traced function writes to Flax NNX objects. Flax is not imported here.

A trace replaces the objects by copies, so the new values are further results of the function.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxmp import _core
from jaxmp._core import PyTree

# Types of attributes such as that of `Module.eval`.
_PYTHON = bool, int, float, str, type(None)


@dataclasses.dataclass(frozen=True)
class _Position:
    """Marker of an object in a tree of arguments or results, at a path of the arguments."""

    path: tuple[Any, ...]


class Writing:
    """A call of a function, which also returns the values that it writes to Flax objects.

    Args:
      fn: the function.
      args, kwargs: its arguments.
    """

    def __init__(
        self, fn: Callable[..., Any], args: tuple[PyTree, ...], kwargs: dict[str, PyTree]
    ) -> None:
        self.fn = fn
        self.nnx: Any = sys.modules.get("flax.nnx")
        self.objects: list[Any] = []
        arguments = jax.tree.map(self._take, (args, kwargs), is_leaf=self._is_object)
        # Objects that share Variables are split together.
        self.graphdef, state = self.nnx.split(tuple(self.objects)) if self.objects else (None, None)
        self.arguments: tuple[Any, ...] = state, *arguments
        # Paths of the values, and the number of their arrays.
        self.paths: list[tuple[Any, ...]] = []
        self.count = 0

    def _is_object(self, node: object) -> bool:
        return self.nnx is not None and isinstance(node, (self.nnx.Pytree, self.nnx.Variable))

    def _take(self, leaf: Any) -> Any:
        if not self._is_object(leaf):
            return leaf
        self.objects.append(leaf)
        return _Position((len(self.objects) - 1,))

    def __call__(
        self, state: PyTree, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]
    ) -> tuple[PyTree, list[PyTree]]:
        if not self.objects:
            return self.fn(*args, **kwargs), []
        objects = self.nnx.merge(self.graphdef, state)
        put = lambda leaf: objects[leaf.path[0]] if isinstance(leaf, _Position) else leaf
        args, kwargs = jax.tree.map(put, (args, kwargs))
        nodes = list(self.nnx.iter_graph(tuple(objects)))
        before, settings = self._values(objects), self._leaves(objects, _PYTHON)
        out = self.fn(*args, **kwargs)
        after = self._values(objects)
        lost = [("adds {!r} to", path) for path in after if path not in before]
        for path, new in self._leaves(objects, _PYTHON).items():
            old = settings.get(path)
            lost += [("changes {!r} of", path)] if new is not old and new != old else []
        for text, path in lost[:1]:
            name = "/".join(map(str, path[1:]))
            _core.warn_user(
                f"The function {text.format(name)} a Flax object, and autocast updates only arrays "
                "that exist. Return the value, or write it before the call."
            )
        self.paths = [path for path, old in before.items() if after.get(path, old) is not old]
        values = [after[path] for path in self.paths]
        self.count = len(jax.tree.leaves(values))
        # A result that is an argument, or a part of one, is the caller's object.
        own = {id(node): path for path, node in nodes}
        mark = lambda x: _Position(own[id(x)]) if self._is_object(x) and id(x) in own else x
        return jax.tree.map(mark, out, is_leaf=self._is_object), values

    def _leaves(
        self, objects: Sequence[Any], kinds: tuple[type, ...] = ()
    ) -> dict[tuple[Any, ...], Any]:
        kinds = kinds or (self.nnx.Variable, jax.Array, np.ndarray)
        graph = self.nnx.iter_graph(tuple(objects))
        return {path: leaf for path, leaf in graph if isinstance(leaf, kinds)}

    def _values(self, objects: Sequence[Any]) -> dict[tuple[Any, ...], Any]:
        leaves = self._leaves(objects).items()
        is_variable = lambda leaf: isinstance(leaf, self.nnx.Variable)
        return {path: leaf.get_raw_value() if is_variable(leaf) else leaf for path, leaf in leaves}

    def write(self, out: PyTree, values: Sequence[PyTree]) -> PyTree:
        """Writes the values to the objects of the caller, and returns the result with these."""
        if not self.objects:
            return out
        own = dict(self.nnx.iter_graph(tuple(self.objects)))
        for path, value in zip(self.paths, values, strict=True):
            if isinstance(variable := own[path], self.nnx.Variable):
                variable.set_raw_value(value)
            else:  # An array that is an attribute of a module.
                state = self.nnx.from_flat_state([(path[1:], value)])
                self.nnx.update(self.objects[path[0]], state)
        put = lambda x: own[x.path] if isinstance(x, _Position) else x
        return jax.tree.map(put, out, is_leaf=self._is_object)
