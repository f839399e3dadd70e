"""Flax NNX objects among the arguments and results of a function, and what it writes to them."""

from __future__ import annotations

import dataclasses
import inspect
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeGuard

import jax
from flax import nnx

from jaxmp import _core
from jaxmp._core import Array, PyTree
from jaxmp._flax._nnx_layers import OverwriteWithGradient


class Slot:
    """Location of a value in a Flax object: a Variable, or an array attribute."""

    def __init__(
        self, root: object, path: tuple[Any, ...], leaf: nnx.Variable[Any] | Array
    ) -> None:
        self.variable = leaf if isinstance(leaf, nnx.Variable) else None
        # A weak reference, because the object may contain the optimizer that stores its writes.
        self._root = weakref.ref(root) if self.variable is None else lambda: None
        self._path = path

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Slot):
            return NotImplemented
        if self.variable is not None or other.variable is not None:
            return self.variable is other.variable
        return self._root == other._root and self._path == other._path

    def __hash__(self) -> int:
        return id(self.variable) if self.variable is not None else hash(self._path)

    def get(self) -> PyTree:
        """Returns the value at the location, or None if the location no longer exists."""
        if self.variable is not None:
            return self.variable.get_raw_value()
        return next((v for path, v in nnx.iter_graph(self._root()) if path == self._path), None)

    def set(self, value: PyTree) -> None:
        if self.variable is not None:
            self.variable.set_raw_value(value)
            return
        nnx.update(self._root(), nnx.from_flat_state([(self._path, value)]))


@dataclasses.dataclass
class Write:
    """Record of one write of a forward pass.

    slot: the location.
    before, after: the values at the location before and after the call.
    kept: the value at the location until `update` keeps or undoes the write.
    """

    slot: Slot
    before: Any
    after: Any
    kept: Any

    @property
    def is_restorable(self) -> bool:
        """True if a skipped step undoes this write.

        False for RNG state, intermediates, FP8 state, and changes of structure, shape or dtype.
        """
        excluded = (nnx.RngState, nnx.Intermediate, OverwriteWithGradient)
        is_excluded = isinstance(self.slot.variable, excluded)
        return not is_excluded and _core.are_alike(self.before, self.after)

    def keep_finite(self) -> None:
        """Keeps the old values of elements that are not finite.

        `update` undoes only the last of several calls whose gradients are accumulated, and none in
        a loop or compiled function that it is outside of. Another optimizer undoes nothing.
        """
        # `nnx.remat` returns the parameters, which a check would gather again. A metric shows the
        # user the value that is not finite.
        excluded = (nnx.Param, nnx.metrics.MetricState)
        if self.is_restorable and not isinstance(self.slot.variable, excluded):
            self.after = self.kept = _core.keep_finite(self.after, self.before)
            self.slot.set(self.kept)


def same(value: PyTree, other: PyTree) -> bool:
    """Returns True if two values consist of the same array objects."""
    leaves, other_leaves = jax.tree.leaves(value), jax.tree.leaves(other)
    return len(leaves) == len(other_leaves) and all(
        a is b for a, b in zip(leaves, other_leaves, strict=True)
    )


def undo(write: Write, others: Iterable[Write], applied: jax.Array) -> None:
    """Restores the value at a location before `write`, unless the step was applied.

    Args:
      write: a write of the call whose step is applied or skipped.
      others: pending writes of other optimizers. Later writes were computed from the value of
        `write`, so they are undone as well. An earlier write is updated to the restored value.
      applied: bool scalar.
    """
    others = [other for other in others if other.slot == write.slot]
    old, new = write.kept, _core.select(applied, write.after, write.before)
    for other in others:
        if same(other.kept, write.before):
            other.after = other.kept = new
    while (later := next((o for o in others if same(o.before, old)), None)) is not None:
        others.remove(later)
        later.before = new
        old, new = later.kept, _core.select(applied, later.kept, write.before)
        later.after = later.kept = new
    if same(write.slot.get(), old):
        write.slot.set(new)


# ---------------------------------------------------------------------------
# Arguments and results
# ---------------------------------------------------------------------------


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
    try:
        bound = inspect.signature(fn).bind(*args, **kwargs)
    except (TypeError, ValueError):
        # No signature, or an invalid call, for which the function itself raises.
        return args, kwargs
    return bound.args, bound.kwargs
