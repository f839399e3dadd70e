"""Estimates the temporary memory of a traced program from the lifetimes of its arrays.

Matmuls, convolutions, loops, reductions and library calls are kernels, which write their results
into memory. Another operation is computed in the kernels that read it, unless a library reads it,
or it has several readers, and writing its result moves fewer bytes than computing it again. An
array occupies memory from its kernel to its last reader. XLA decides more than that: the measured
errors are in `errors.toml`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from jaxmp._core._compat import jaxpr_body
from jaxmp._programs import _jaxprs
from jaxmp._programs._constructs import CONSTRUCTS, OPAQUE_CALLS, Form, inners
from jaxmp._tools.memory._shards import Shards

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
_MATMULS = frozenset({"conv_general_dilated", "dot_general", "ragged_dot", "scaled_matmul"})
_LIBRARY = (
    _MATMULS
    | {"custom_call", _APART}
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


class _Operation(NamedTuple):
    name: str
    # Those of a kernel are the arrays in memory that it reads.
    operands: Collection[Value]
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
        is_slow = sum(root.read for root in roots) * again > (again + 2) * result.bytes
        return again > 0 and (is_slow or self.name in _COSTLY)


def largest_use(jaxpr: Any, arguments: Sequence[Value], shards: Shards) -> int:
    """Returns the most bytes of temporary arrays that exist at once.

    Args:
      jaxpr: open or closed. Its results are not temporary.
      arguments: one for each argument of the program.
      shards: the division of arrays among devices, of which one is measured.
    """
    operations: list[_Operation] = []
    results = _flatten(jaxpr_body(jaxpr)[0], arguments, shards, operations)
    for value in results:
        value.is_result = True
    needed = set(results)
    kept: list[_Operation] = []
    for operation in reversed(operations):
        if not needed.isdisjoint(operation.results):
            kept.append(operation)
            needed.update(operation.operands)
            for value in dict.fromkeys(operation.operands):
                value.readers.append(operation)
    kernels: list[_Operation] = []
    for operation in reversed(kept):
        roots = frozenset[Value]().union(*(value.roots for value in operation.operands))
        if operation.is_kernel(roots):
            kernels.append(operation._replace(operands=roots))
        else:
            operation.results[0].roots = roots
    # XLA takes the order with the smallest peak.
    return min(_peak(_ordered(kernels, late)) for late in (False, True))


def _flatten(
    jaxpr: Any, arguments: Sequence[Value], shards: Shards, operations: list[_Operation]
) -> list[Value]:
    """Appends the operations of a jaxpr, with those of its calls, and returns its results."""
    values: dict[Any, Value] = dict(zip(jaxpr.invars, arguments, strict=True))

    def read(var: Any) -> Value:
        return Value(0) if _jaxprs.is_literal(var) else values.setdefault(var, Value(0))

    for equation in _jaxprs.equations(jaxpr, inside=False):
        name, operands = equation.primitive.name, [read(var) for var in equation.invars]
        inside = inners(equation) if name in CONSTRUCTS | OPAQUE_CALLS else []
        is_apart = any(
            inner.form is Form.BRANCH or (inner.is_loop and inner.length != 1) for inner in inside
        )
        if len(inside) == 1 and not is_apart:
            results = _flatten(inside[0].jaxpr, operands, shards, operations)
        elif name in _VIEWS:
            results = operands
        else:
            below, carried = 0, list[Value]()
            for inner in inside if is_apart else ():
                rows = zip(inner.jaxpr.invars, inner.indices, strict=True)
                sizes = [(shards.size(var), index) for var, index in rows]
                own = [Value(size * (index is None), read=size) for size, index in sizes]
                below = max(below, largest_use(inner.jaxpr, own, shards))
                outside = (inner.indices[n] for n in inner.carried)
                carried += [operands[n] for n in outside if n is not None]
            is_summed = not is_apart and name not in _MATMULS
            results = [Value(shards.size(var, is_summed)) for var in equation.outvars]
            name = _APART if is_apart else name
            operations.append(_Operation(name, operands, results, below, carried))
        values.update(zip(equation.outvars, results, strict=False))
    return [read(var) for var in jaxpr.outvars]


def _ordered(kernels: list[_Operation], late: bool) -> list[_Operation]:
    """Moves kernels of results behind their operands, and others to their first reader.

    Args:
      kernels: those of the program.
      late: True to move all generated kernels to their first reader; False for those of arguments.
    """
    made = {value: n for n, kernel in enumerate(kernels) for value in kernel.results}
    places = [float(n) for n in range(len(kernels))]
    first: dict[Value, float] = {}
    for n, kernel in reversed(list(enumerate(kernels))):
        read, results = kernel.operands, kernel.results
        if not kernel.is_library and all(value.is_result for value in results):
            places[n] = max((made[value] + 0.5 for value in read if value in made), default=n)
        elif (late and not kernel.is_library) or made.keys().isdisjoint(read):
            places[n] = min((first[value] - 0.5 for value in results if value in first), default=n)
        for value in read:
            first[value] = min(places[n], first.get(value, places[n]))
    return [kernels[n] for n in sorted(range(len(kernels)), key=lambda n: (places[n], n))]


def _peak(kernels: list[_Operation]) -> int:
    """Returns the largest number of bytes of arrays between their kernel and their last reader."""
    last = {value: n for n, kernel in enumerate(kernels) for value in kernel.operands}
    live: dict[Value, int] = {}
    largest = total = 0
    for n, kernel in enumerate(kernels):
        new = {
            value: value.bytes
            for value in kernel.results
            if not value.is_result and (value in last or kernel.is_library)
        }
        # Elementwise kernels and loops write into operands that nothing else reads.
        owned = kernel.carried if kernel.is_library else kernel.operands
        dying = sum(live.get(value, 0) for value in set(owned) if last.get(value) == n)
        live |= new
        total += sum(new.values())
        largest = max(largest, total - min(dying, sum(new.values())) + kernel.inside)
        for value in {*kernel.operands, *new}:
            if last.get(value, n) == n:
                total -= live.pop(value, 0)
    return largest
