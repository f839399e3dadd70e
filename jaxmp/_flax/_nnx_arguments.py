"""Flax NNX objects among the arguments and results of a function."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import jax
from flax import nnx

from jaxmp import _gradients
from jaxmp._core._typing import PyTree
from jaxmp.errors import JaxmpError


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Ref:
    """Marker for the position of a Flax object in a tree of arguments or results."""

    index: int


def is_object(value: object) -> bool:
    return isinstance(value, nnx.Variable) or nnx.graphlib.is_graph_node(value)


def take_objects(tree: PyTree, objects: list[object]) -> PyTree:
    """Replaces each Flax object in `tree` by a `Ref`, and appends the object to `objects`."""

    def take(leaf: object) -> object:
        if not is_object(leaf):
            return leaf
        objects.append(leaf)
        return Ref(len(objects) - 1)

    return jax.tree.map(take, tree, is_leaf=is_object)


def put_objects(tree: PyTree, objects: Sequence[object]) -> PyTree:
    return jax.tree.map(
        lambda leaf: objects[leaf.index] if isinstance(leaf, Ref) else leaf, tree, is_leaf=is_ref
    )


def is_ref(value: object) -> TypeGuard[Ref]:
    return isinstance(value, Ref)


def ref_indices(tree: PyTree) -> list[int]:
    return [leaf.index for leaf in jax.tree.leaves(tree, is_leaf=is_ref) if is_ref(leaf)]


def by_position(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Converts keyword arguments to positional ones, to which argument numbers can refer."""
    if not kwargs:
        return args, kwargs
    try:
        bound = inspect.signature(fn).bind(*args, **kwargs)
    except (TypeError, ValueError):
        # No signature, or an invalid call, for which the function itself raises.
        return args, kwargs
    return bound.args, bound.kwargs


def count_argnums(name: str, numbers: int | Sequence[int] | None, count: int) -> tuple[int, ...]:
    """Returns argument numbers with negative ones counted from the end."""
    for number in _gradients.as_tuple(numbers):
        if name != "batch_argnums" and not -count <= number < count:
            raise JaxmpError(
                f"{name} names argument {number}, but the function was called with {count} "
                "positional argument(s)."
            )
    return tuple(n % count if -count <= n < 0 else n for n in _gradients.as_tuple(numbers))
