"""Estimates the temporary memory of a traced program from the lifetimes of its arrays.

Matmuls, convolutions, loops, reductions and library calls are kernels, which write their results
into memory. Another operation is computed in the kernels that read it, unless a library reads it,
or it has several readers, and writing its result moves fewer bytes than computing it again. An
array occupies memory from its kernel to its last reader. XLA decides more than that: the measured
errors are in `errors.toml`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxmp._core._compat import jaxpr_body
from jaxmp._programs import _jaxprs
from jaxmp._programs._constructs import CONSTRUCTS, OPAQUE_CALLS, Form, Inner, inners
from jaxmp._tools.memory._shards import Shards, Split

# Operations whose results are the same arrays in memory. Matmuls read transposed operands.
_VIEWS = frozenset(
    {"copy", "expand_dims", "name", "pcast", "pvary", "reshape", "reshard", "squeeze"}
    | {"bitcast_convert_type", "sharding_constraint", "stop_gradient", "transpose"}
    | {"optimization_barrier"}
)
# Kernels that compute their operands themselves.
_REDUCTIONS = ("reduce", "arg", "scatter", "cum", "dynamic_update_slice", "concatenate")
# Operations that take longer to compute again than to read.
_COSTLY = frozenset({"erf", "erfc", "erf_inv", "lgamma", "digamma"})
# Name of an operation for a loop or branches, whose jaxprs have their own memory.
_APART = "apart"
_LIBRARY = frozenset(
    {"conv_general_dilated", "dot_general", "ragged_dot", "scaled_matmul", "custom_call", _APART}
    | {"cholesky", "eigh", "fft", "lu", "qr", "sort", "svd", "top_k", "triangular_solve"}
    | {"all_gather", "all_to_all", "ppermute", "psum", "psum_invariant", "reduce_scatter"}
    | {"pallas_call", "rng_bit_generator"}
)


class Value:
    """An array in memory.

    Args:
      size: bytes of temporary memory on each device; 0 for arguments of the program.
      read: bytes that a kernel reads; None for `size`.
    """

    def __init__(self, size: int, read: int | None = None) -> None:
        self.bytes, self.read = size, size if read is None else read
        # The arrays in memory that a kernel reads to compute it; itself if it is in memory.
        self.roots: frozenset[Value] = frozenset((self,))
        self.readers: list[_Operation] = []
        self.is_result = False


class View(NamedTuple):
    """An array of the program: a value, and the axes of the mesh that divide its dimensions."""

    value: Value
    split: Split = None


def _split_as(views: Sequence[View], splits: Sequence[Split]) -> list[View]:
    return [View(value, split) for (value, _), split in zip(views, splits, strict=True)]


class _Operation(NamedTuple):
    name: str
    operands: list[Value]
    results: list[Value]
    inside: int  # bytes that the jaxprs inside require
    # The operands in whose memory a loop writes its carry.
    carried: Sequence[Value]

    @property
    def is_library(self) -> bool:
        """True for a kernel that is not generated for its operands and readers."""
        return self.name in _LIBRARY or "attention" in self.name

    def is_kernel(self, roots: frozenset[Value]) -> bool:
        """Returns True if the results are written into memory."""
        if self.is_library or len(self.results) != 1 or self.name.startswith(_REDUCTIONS):
            return True
        (result,) = self.results
        if result.is_result or any(reader.is_library for reader in result.readers):
            return True
        again = len(result.readers) - 1
        if again and self.name in _COSTLY:
            return True
        return again > 0 and sum(root.read for root in roots) * again > (again + 2) * result.bytes


class _Kernel(NamedTuple):
    operation: _Operation
    read: frozenset[Value]


def largest_use(jaxpr: Any, arguments: Sequence[View], shards: Shards) -> tuple[int, list[Split]]:
    """Returns the most bytes of temporary arrays that exist at once, and the splits of the results.

    Args:
      jaxpr: open or closed. Its results are not temporary.
      arguments: one for each argument of the program.
      shards: the division of arrays among devices, of which one is measured.
    """
    operations: list[_Operation] = []
    results = _flatten(jaxpr_body(jaxpr)[0], arguments, shards, operations)
    for value, _ in results:
        value.is_result = True
    needed = {value for value, _ in results}
    kept: list[_Operation] = []
    for operation in reversed(operations):
        if not needed.isdisjoint(operation.results):
            kept.append(operation)
            needed.update(operation.operands)
            for value in dict.fromkeys(operation.operands):
                value.readers.append(operation)
    kernels: list[_Kernel] = []
    for operation in reversed(kept):
        roots = frozenset[Value]().union(*(value.roots for value in operation.operands))
        if operation.is_kernel(roots):
            kernels.append(_Kernel(operation, roots))
        else:
            operation.results[0].roots = roots
    # XLA takes the order with the smallest peak.
    peak = min(_peak(_ordered(kernels, late)) for late in (False, True))
    return peak, [split for _, split in results]


def _flatten(
    jaxpr: Any, arguments: Sequence[View], shards: Shards, operations: list[_Operation]
) -> list[View]:
    """Appends the operations of a jaxpr, with those of its calls, and returns its results."""
    views: dict[Any, View] = dict(zip(jaxpr.invars, arguments, strict=True))

    def read(var: Any) -> View:
        return View(Value(0)) if _jaxprs.is_literal(var) else views.setdefault(var, View(Value(0)))

    for equation in _jaxprs.equations(jaxpr, inside=False):
        name, operands = equation.primitive.name, [read(var) for var in equation.invars]
        inside = inners(equation) if name in CONSTRUCTS | OPAQUE_CALLS else []
        is_apart = any(
            inner.form is Form.BRANCH or (inner.is_loop and inner.length != 1) for inner in inside
        )
        splits = [view.split for view in operands]
        if len(inside) == 1 and not is_apart:
            arguments = _split_as(operands, _splits_inside(inside[0], splits))
            # The arrays in a `shard_map` are parts.
            own = Shards() if inside[0].form is Form.SHARDS else shards
            ends = _flatten(inside[0].jaxpr, arguments, own, operations)
            results = _split_as(ends, _splits_outside(inside[0], [view.split for view in ends]))
        elif name in _VIEWS:
            results = _split_as(operands, shards.passed(equation, splits))
        else:
            below, carried = 0, list[Value]()
            passed = [] if is_apart else shards.passed(equation, splits)
            for inner in inside if is_apart else ():
                arguments = []
                entering = zip(inner.jaxpr.invars, _splits_inside(inner, splits), strict=True)
                for (var, split), index in zip(entering, inner.indices, strict=True):
                    size = shards.size(var.aval, split)
                    arguments.append(View(Value(size * (index is None), read=size), split))
                peak, ends = largest_use(inner.jaxpr, arguments, shards)
                below, passed = max(below, peak), _splits_outside(inner, ends)
                outside = (inner.indices[n] for n in inner.carried)
                carried += [operands[n].value for n in outside if n is not None]
            pairs = zip(equation.outvars, passed, strict=True)
            results = [View(Value(shards.size(v.aval, split)), split) for v, split in pairs]
            read_values, made = ([view.value for view in each] for each in (operands, results))
            name = _APART if is_apart else name
            operations.append(_Operation(name, read_values, made, below, carried))
        views.update(zip(equation.outvars, results, strict=False))
    return [read(var) for var in jaxpr.outvars]


def _splits_inside(inner: Inner, splits: Sequence[Split]) -> list[Split]:
    """Returns the splits of the arguments of a jaxpr. Rows of scanned arrays lack a dimension."""
    known = [None if n is None else splits[n] for n in inner.indices]
    first = inner.carried.stop if inner.form is Form.SCAN else len(known)
    return [split and split[n >= first :] for n, split in enumerate(known)]


def _splits_outside(inner: Inner, splits: Sequence[Split]) -> list[Split]:
    """Returns the splits of the results of an equation, given those of its jaxpr."""
    first = len(inner.carried) if inner.form is Form.SCAN else len(splits)
    return [split and (frozenset(),) * (n >= first) + split for n, split in enumerate(splits)]


def _ordered(kernels: list[_Kernel], late: bool) -> list[_Kernel]:
    """Moves kernels of results behind their operands, and others to their first reader.

    Args:
      kernels: those of the program.
      late: True to move all generated kernels to their first reader; False for those of arguments.
    """
    made = {value: n for n, (operation, _) in enumerate(kernels) for value in operation.results}
    places = [float(n) for n in range(len(kernels))]
    first: dict[Value, float] = {}
    for n, (operation, read) in reversed(list(enumerate(kernels))):
        results = operation.results
        if not operation.is_library and all(value.is_result for value in results):
            places[n] = max((made[value] + 0.5 for value in read if value in made), default=n)
        elif (late and not operation.is_library) or made.keys().isdisjoint(read):
            places[n] = min((first[value] - 0.5 for value in results if value in first), default=n)
        for value in read:
            first[value] = min(places[n], first.get(value, places[n]))
    return [kernels[n] for n in sorted(range(len(kernels)), key=lambda n: (places[n], n))]


def _peak(kernels: list[_Kernel]) -> int:
    """Returns the largest number of bytes of arrays between their kernel and their last reader."""
    last = {value: n for n, (_, read) in enumerate(kernels) for value in read}
    live: dict[Value, int] = {}
    largest = total = 0
    for n, (operation, read) in enumerate(kernels):
        new = {
            value: value.bytes
            for value in operation.results
            if not value.is_result and (value in last or operation.is_library)
        }
        # Elementwise kernels and loops write into operands that nothing else reads.
        owned = operation.carried if operation.is_library else read
        dying = sum(live.get(value, 0) for value in set(owned) if last.get(value) == n)
        live |= new
        total += sum(new.values())
        largest = max(largest, total - min(dying, sum(new.values())) + operation.inside)
        for value in {*read, *new}:
            if last.get(value, n) == n:
                total -= live.pop(value, 0)
    return largest
