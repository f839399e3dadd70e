"""Estimates the temporary memory of a traced program from the lifetimes of its arrays.

Matmuls, convolutions, loops, reductions and library calls are kernels, which write their results
into memory. Another operation is computed in the kernels that read it, unless a library reads it,
or it has several readers, and writing its result moves fewer bytes than computing it again. An
array occupies memory from its kernel to its last reader. XLA decides more than that: the measured
errors are in `errors.toml`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

from jaxmp._core._compat import jaxpr_body
from jaxmp._programs._constructs import CONSTRUCTS, OPAQUE_CALLS, Form, inners
from jaxmp._programs._jaxprs import equations, is_literal

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
_SizeOf: TypeAlias = Callable[[Any], int]


class Value:
    """An array of the program.

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
    operands: list[Value]
    results: list[Value]
    # Bytes that the jaxprs inside require.
    inside: int = 0
    # The operands in whose memory a loop writes its carry.
    carried: Sequence[Value] = ()

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


# A kernel with the arrays that it reads.
_Kernel: TypeAlias = tuple[_Operation, frozenset[Value]]


def largest_use(jaxpr: Any, arguments: Sequence[Value], size_of: _SizeOf) -> int:
    """Returns the largest number of bytes of temporary arrays that exist at once on a device.

    Args:
      jaxpr: open or closed. Its results are not temporary.
      arguments: a value for each argument.
      size_of: returns the bytes per device of an abstract array.
    """
    operations: list[_Operation] = []
    results = _flatten(jaxpr_body(jaxpr)[0], arguments, size_of, operations)
    needed = set(results)
    kept = []
    for operation in reversed(operations):
        if not needed.isdisjoint(operation.results):
            kept.append(operation)
            needed.update(operation.operands)
    for value in results:
        value.is_result = True
    for operation in kept:
        for value in dict.fromkeys(operation.operands):
            value.readers.append(operation)
    kernels: list[_Kernel] = []
    for operation in reversed(kept):
        roots = frozenset[Value]().union(*(value.roots for value in operation.operands))
        if operation.is_kernel(roots):
            kernels.append((operation, roots))
        else:
            operation.results[0].roots = roots
    # XLA takes the order with the smallest peak.
    return min(_peak(_ordered(kernels, late)) for late in (False, True))


def _flatten(
    jaxpr: Any,
    arguments: Sequence[Value],
    size_of: _SizeOf,
    operations: list[_Operation],
) -> list[Value]:
    """Appends the operations of a jaxpr, with those of its calls, and returns its results."""
    values: dict[Any, Value] = dict(zip(jaxpr.invars, arguments, strict=True))

    def read(var: Any) -> Value:
        return Value(0) if is_literal(var) else values.setdefault(var, Value(0))

    for equation in equations(jaxpr, inside=False):
        name, operands = equation.primitive.name, [read(var) for var in equation.invars]
        inside = inners(equation) if name in CONSTRUCTS | OPAQUE_CALLS else []
        is_apart = any(inner.is_loop or inner.form is Form.BRANCH for inner in inside)
        if len(inside) == 1 and not is_apart:
            results = _flatten(inside[0].jaxpr, operands, size_of, operations)
        elif name in _VIEWS:
            results = operands
        else:
            results, below, carried = [Value(size_of(v.aval)) for v in equation.outvars], 0, []
            for inner in inside if is_apart else ():
                pairs = zip(inner.jaxpr.invars, inner.indices, strict=True)
                sizes = [(size_of(var.aval), n is None) for var, n in pairs]
                own_arguments = [Value(size * is_new, read=size) for size, is_new in sizes]
                below = max(below, largest_use(inner.jaxpr, own_arguments, size_of))
                outside = (inner.indices[n] for n in inner.carried)
                carried += [operands[n] for n in outside if n is not None]
            operations.append(
                _Operation(_APART if is_apart else name, operands, results, below, carried)
            )
        values.update(zip(equation.outvars, results, strict=False))
    return [read(var) for var in jaxpr.outvars]


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
