"""Parts of the arrays of a traced program on each device, from the shardings of its arguments."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

from jax.sharding import NamedSharding

from jaxmp._programs import _analysis, _constructs, _jaxprs, _operations

# The axes of the mesh that divide each dimension; None for arrays that depend on no argument, such
# as zeros, which XLA divides like the arrays that they are combined with.
Split: TypeAlias = tuple[frozenset[str], ...] | None


class Shards(_analysis.Forward):
    """Division of the arrays of a program among devices.

    An array of the size of a parameter is divided as it is, and another one as the batch is. Axes
    that divide parameters and not the batch, as in tensor parallelism, also divide the arrays to
    which operations pass them: a matmul passes those of the dimensions that it does not sum.

    Args:
      jaxpr: the program.
      arguments: array, sharding and kind, such as "parameters" or "inputs", of each argument.
    """

    consequence = "the memory of the operations inside is not counted"

    def __init__(self, jaxpr: Any, arguments: Sequence[tuple[Any, Any, str]]) -> None:
        super().__init__()
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
        splits = [self._split(sharding, array.ndim) for array, sharding, _ in arguments]
        # Size of a parameter -> parts of a gradient that is not summed over the batch yet.
        self._summands = {
            array.size: math.prod(self._devices[axis] for axis in frozenset[str]().union(*split))
            for (array, _, kind), split in zip(arguments, splits, strict=True)
            if kind == "parameters"
        }
        # Variable, and shape, -> the axes of the last array that they were passed to.
        self._splits = dict[Any, Split]()
        self._passed = dict[tuple[int, ...], Split]()
        self.run(jaxpr, splits)

    def size(self, var: Any, is_summed: bool = True) -> int:
        """Returns the bytes of an array on each device; XLA pads dimensions that it divides.

        Args:
          var: the array.
          is_summed: False for an array that may be a gradient, which XLA sums over the batch, and
            divides, after it is whole.
        """
        aval = var.aval
        # The arrays in a `shard_map`, which is not entered, are parts.
        if not _jaxprs.is_literal(var) and var not in self._splits:
            return bytes_of(aval)
        parts = (self._weights if is_summed else self._summands).get(getattr(aval, "size", 0), 0)
        if parts or not self._axes:
            return bytes_of(aval) // (parts or self._batch)
        lengths, used = list(_shape(var)), set[str]()
        for n, axes in enumerate(self._splits.get(var) or self._passed.get(tuple(lengths)) or ()):
            own = math.prod(self._devices[axis] for axis in axes - used)
            if own <= lengths[n]:
                lengths[n] = -(-lengths[n] // own)
                used |= axes
        return bytes_of(aval, lengths) // self._batch

    def frame(self, jaxpr: Any, args: Sequence[Any], place: Any = None, state: Any = None) -> Any:
        """Notes the splits of the variables of a jaxpr."""
        frame = super().frame(jaxpr, args, place, state)
        self._splits |= frame.values
        return frame

    def join(self, first: Split, second: Split) -> Split:
        """Returns the split of a carry, which may begin as zeros."""
        return first or second

    def row(self, fact: Split) -> Split:
        """Returns the split of a row, which lacks a dimension."""
        return fact and fact[1:]

    def equation(self, equation: Any, operands: list[Split], frame: Any) -> list[Split]:
        """Returns the axes that an operation passes from its operands to each result."""
        self.check_known(equation)
        shapes, name = list(map(_shape, equation.outvars)), equation.primitive.name
        is_entered = name in _constructs.CONSTRUCTS | _constructs.OPAQUE_CALLS
        is_mapped = _constructs.form_of(equation) is _constructs.Form.SHARDS
        if is_mapped or not (shapes and (is_entered or self._axes)):
            return [None] * len(shapes)
        if is_entered:
            splits = self.enter(equation, operands, frame)
            # Rows that a scan stacks have one dimension more.
            return [
                split and (frozenset(),) * (len(shape) - len(split)) + split
                for shape, split in zip(shapes, splits, strict=True)
            ]
        split: Split = None
        if name in ("sharding_constraint", "reshard"):
            split = self._split(_operations.sharding_of_result(equation), len(shapes[0]))
        else:
            sources = _sources(equation)
            if any(operands[n] is not None for pairs in sources for n, _ in pairs):
                known = [[(operands[n] or {k: ()})[k] for n, k in pairs] for pairs in sources]
                split = tuple(frozenset[str]().union(*axes) for axes in known)
        if split is not None:
            self._passed[shapes[0]] = split
        return [split if shape == shapes[0] else None for shape in shapes]

    def _split(self, sharding: Any, rank: int) -> tuple[frozenset[str], ...]:
        """Returns the axes of a sharding that operations pass."""
        return tuple(axes & self._axes for axes in _dimensions(sharding, rank))


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
