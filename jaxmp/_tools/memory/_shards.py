"""Parts of the arrays of a traced program on each device, from the shardings of its arguments."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

from jax.sharding import NamedSharding

from jaxmp._programs import _operations

# The axes of the mesh that divide each dimension; None for arrays that depend on no argument, such
# as zeros, which XLA divides like the arrays that they are combined with.
Split: TypeAlias = tuple[frozenset[str], ...] | None


class Shards:
    """Division of arrays among devices.

    An array of the size of a parameter is divided as it is, and another one as the batch is. Axes
    that divide parameters and not the batch, as in tensor parallelism, also divide the arrays to
    which operations pass them: a matmul passes those of the dimensions that it does not sum.

    Args:
      arguments: array, sharding and kind, such as "parameters" or "inputs", of each argument of the
        program; none if no array is divided.
    """

    def __init__(self, arguments: Iterable[tuple[Any, Any, str]] = ()) -> None:
        self._weights, self._batch, self._devices = dict[int, int](), 1, dict[str, int]()
        axes = {"parameters": set[str](), "inputs": set[str]()}
        for array, sharding, kind in arguments:
            if kind == "parameters":
                self._weights[array.size] = parts_of(array, sharding)
            if kind == "inputs":
                self._batch = max(self._batch, parts_of(array, sharding))
            if isinstance(sharding, NamedSharding):
                self._devices |= sharding.mesh.shape
                axes.setdefault(kind, set()).update(*_dimensions(sharding, array.ndim))
        self._axes = (axes["parameters"] - axes["inputs"]) & self._devices.keys()
        # Shape -> the axes of the last array that they were passed to.
        self._passed: dict[tuple[int, ...], Split] = {}

    def size(self, aval: Any, split: Split = None) -> int:
        """Returns the bytes of an array on each device; XLA pads dimensions that it divides."""
        parts = self._weights.get(getattr(aval, "size", 0), 0)
        if parts or not self._axes:
            return bytes_of(aval) // (parts or self._batch)
        lengths, used = list(getattr(aval, "shape", ())), set[str]()
        for n, axes in enumerate(split or self._passed.get(tuple(lengths)) or ()):
            own = math.prod(self._devices[axis] for axis in axes - used)
            if own <= lengths[n]:
                lengths[n] = -(-lengths[n] // own)
                used |= axes
        return bytes_of(aval, lengths) // self._batch

    def split(self, sharding: Any, rank: int) -> Split:
        """Returns the axes of a sharding that operations pass."""
        return tuple(axes & self._axes for axes in _dimensions(sharding, rank))

    def passed(self, equation: Any, operands: Sequence[Split]) -> list[Split]:
        """Returns the axes that an operation passes from its operands to each result."""
        shapes = [_shape(var) for var in equation.outvars] if self._axes else []
        if not shapes:
            return [None] * len(equation.outvars)
        split: Split = None
        if equation.primitive.name in ("sharding_constraint", "reshard"):
            split = self.split(_operations.sharding_of_result(equation), len(shapes[0]))
        else:
            sources = _sources(equation)
            alike = [n for n, var in enumerate(equation.invars) if _shape(var) == shapes[0]]
            used = alike or [n for pairs in sources for n, _ in pairs]
            if any(operands[n] is not None for n in used):
                known = [[(operands[n] or {k: ()})[k] for n, k in pairs] for pairs in sources]
                split = tuple(frozenset[str]().union(*axes) for axes in known)
        if split is not None:
            self._passed[shapes[0]] = split
        return [split if shape == shapes[0] else None for shape in shapes]


def _sources(equation: Any) -> list[list[tuple[int, int]]]:
    """Returns for each dimension of a result the operands, and their dimensions, that it is of."""
    shapes, shape = list(map(_shape, equation.invars)), _shape(equation.outvars[0])
    name = equation.primitive.name
    if name == "dot_general":
        dot = _operations.dot_of(equation)
        together = [[(0, m), (1, n)] for m, n in zip(*dot.batch, strict=True)]
        gone = [{*a, *b} for a, b in zip(dot.contracted, dot.batch, strict=True)]
        free = [[(n, k)] for n in (0, 1) for k in range(len(shapes[n])) if k not in gone[n]]
        return [*together, *free]
    if name == "reshape":
        # The first one of dimensions that are joined, or into which one is parted.
        before = {math.prod(shapes[0][:k]): [(0, k)] for k in range(len(shapes[0]))}
        return [before.get(math.prod(shape[:k]), []) for k in range(len(shape))]
    if name.startswith(("reduce_", "arg")):
        gone = _operations.axes_of(equation)
        return [[(0, k)] for k in range(len(shapes[0])) if k not in gone]
    dimensions = _operations.dimensions_of(equation) if shapes else None
    if dimensions is not None:
        return [[] if k is None else [(0, k)] for k in dimensions]
    same = [n for n, other in enumerate(shapes) if len(other) == len(shape)]
    return [[(n, k) for n in same if shapes[n][k] == shape[k]] for k in range(len(shape))]


def _shape(var: Any) -> tuple[int, ...]:
    return getattr(var.aval, "shape", ())


def parts_of(array: Any, sharding: Any) -> int:
    """Returns the number of parts into which the devices split an array."""
    if not isinstance(sharding, NamedSharding) or not array.size:
        return 1
    return array.size // math.prod(sharding.shard_shape(array.shape))


def bytes_of(aval: Any, lengths: Iterable[int] | None = None) -> int:
    """Returns the bytes of an array, or one of other lengths; 0 for values that are none."""
    dtype = getattr(aval, "dtype", None)
    # Flax's dtype of FP8 scales has no size; they are FP32.
    itemsize = 0 if dtype is None else getattr(dtype, "itemsize", 4)
    return itemsize * math.prod(getattr(aval, "shape", ()) if lengths is None else lengths)


def _dimensions(sharding: Any, rank: int) -> list[frozenset[Any]]:
    """Returns the axes of the mesh that divide each dimension; those with None are none."""
    spec = sharding.spec if isinstance(sharding, NamedSharding) else ()
    parts = [*spec, *[None] * (rank - len(spec))]
    return [frozenset(part if isinstance(part, tuple) else (part,)) for part in parts]
