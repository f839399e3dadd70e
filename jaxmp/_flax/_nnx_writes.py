"""Writes of a function to Flax NNX objects, and their reversal in a skipped step."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterable
from typing import Any

import jax
from flax import nnx

from jaxmp._core import _trees
from jaxmp._core._typing import Array, PyTree
from jaxmp._flax._nnx_fp8 import OverwriteWithGradient


class Slot:
    """Location of a value in a Flax object: a Variable, or an array attribute."""

    def __init__(
        self, root: object, path: tuple[Any, ...], leaf: nnx.Variable[Any] | Array
    ) -> None:
        self.variable = leaf if isinstance(leaf, nnx.Variable) else None
        # A weak reference, because the object may contain the optimizer that stores its writes.
        self._root = None if self.variable is not None else weakref.ref(root)
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
        root = None if self._root is None else self._root()
        return next((v for path, v in nnx.iter_graph(root) if path == self._path), None)

    def set(self, value: PyTree) -> None:
        if self.variable is not None:
            self.variable.set_raw_value(value)
            return
        nested = value
        for name in reversed(self._path):
            nested = {name: nested}
        nnx.update(None if self._root is None else self._root(), nested)


@dataclasses.dataclass
class Write:
    """Record of one write of a forward pass.

    slot: the location.
    before, after: the values at the location before and after the call.
    """

    slot: Slot
    before: Any
    after: Any

    @property
    def is_restorable(self) -> bool:
        """True if a skipped step undoes this write.

        False for RNG state, intermediates, FP8 state, and changes of structure, shape or dtype.
        """
        excluded = (nnx.RngState, nnx.Intermediate, OverwriteWithGradient)
        return not isinstance(self.slot.variable, excluded) and describe_arrays(
            self.before
        ) == describe_arrays(self.after)


def describe_arrays(value: PyTree) -> tuple[object, list[tuple[object, object]]]:
    leaves, structure = jax.tree.flatten(value)
    return structure, [(getattr(x, "shape", None), getattr(x, "dtype", None)) for x in leaves]


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
    old, new = write.after, _trees.select(applied, write.after, write.before)
    for other in others:
        if same(other.after, write.before):
            other.after = new
    while (later := next((o for o in others if same(o.before, old)), None)) is not None:
        others.remove(later)
        later.before = new
        old, new = later.after, _trees.select(applied, later.after, write.before)
        later.after = new
    if same(write.slot.get(), old):
        write.slot.set(new)


def continued(write: Write, earlier: Write) -> Write:
    """Returns `write`, extended to an earlier call whose gradients were not applied.

    A skipped step then restores the value that the earlier call wrote, unless it is not finite:
    gradients can be accumulated over several calls, and a skipped step must not leave a NaN.
    """
    if not same(earlier.after, write.before):
        return write
    finite = _trees.all_finite(earlier.after)
    before = _trees.select(finite, earlier.after, earlier.before)
    return Write(write.slot, before, write.after)
