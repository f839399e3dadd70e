"""Training steps on NNX objects that are split into arrays once, and not at every call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxmp._core._typing import Array, PyTree
from jaxmp.errors import CompositionError


class CompiledStep:
    """Step that `jaxmp.nnx.compile_step` returns. Its arguments are those of `fn` after the nodes.

    The state of the nodes is kept as a flat tuple of arrays from one call to the next. The nodes
    are updated when `nodes` is read, and at the end of a `with` block.
    """

    def __init__(
        self, fn: Callable[..., Any], nodes: tuple[Any, ...], donate: bool, options: dict[str, Any]
    ) -> None:
        self._fn, self._nodes = fn, nodes
        self._options = {"donate_argnums": 0, **options} if donate else options
        # The arrays of the nodes; None: the nodes are up to date.
        self._leaves: tuple[Any, ...] | None = None
        self._static: Any = None
        # A function for each (graphdef, tree structure) of the nodes.
        self._compiled: dict[Any, Callable[..., Any]] = {}

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Runs one step on the state after the last one."""
        if self._leaves is None:
            self._split()
        out, self._leaves = self._compiled[self._static](self._leaves, args, kwargs)
        return out

    @property
    def nodes(self) -> tuple[Any, ...]:
        """The nodes, with the state after the last call. The next call reads changes to them."""
        if self._leaves is not None:
            _, structure = self._static
            nnx.update(self._nodes, structure.unflatten(self._leaves))
            self._leaves = None
        return self._nodes

    def _split(self) -> None:
        graphdef, state = nnx.split(self._nodes)
        leaves, structure = jax.tree.flatten(nnx.as_pure(state))
        self._static, self._leaves = (graphdef, structure), _unaliased(leaves)
        if self._static not in self._compiled:
            run = functools.partial(_run, self._fn, self._static)
            self._compiled[self._static] = jax.jit(run, **self._options)

    def __enter__(self) -> CompiledStep:
        return self

    def __exit__(self, *_: object) -> None:
        _ = self.nodes


def _run(
    fn: Callable[..., PyTree],
    static: tuple[nnx.GraphDef[Any], Any],
    leaves: tuple[Array, ...],
    args: tuple[PyTree, ...],
    kwargs: dict[str, PyTree],
) -> tuple[PyTree, tuple[Array, ...]]:
    graphdef, structure = static
    nodes = nnx.merge(graphdef, structure.unflatten(leaves))
    out = fn(*nodes, *args, **kwargs)
    new_graphdef, state = nnx.split(nodes)
    new_leaves, new_structure = jax.tree.flatten(nnx.as_pure(state))
    if new_structure != structure or new_graphdef != graphdef:
        raise CompositionError(
            f"{getattr(fn, '__name__', 'The step')} adds, removes or changes attributes of its "
            "nodes, such as a sown nnx.Intermediate or a Python counter; compile_step passes only "
            "arrays on to the next step. Return such values from the step, or use nnx.jit(step)."
        )
    return out, tuple(new_leaves)


def _unaliased(leaves: list[Any]) -> tuple[Any, ...]:
    """Copies arrays that occur twice, because a buffer can be donated only once."""
    seen: set[int] = set()
    out = []
    for leaf in leaves:
        out.append(jnp.copy(leaf) if id(leaf) in seen else leaf)
        seen.add(id(leaf))
    return tuple(out)
