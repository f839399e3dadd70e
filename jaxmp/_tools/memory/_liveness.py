"""Predicts which values of a traced program occupy memory, and when, after the compiler's fusion.

The model of fusion: matmuls, convolutions, loops and library calls are kernels, which read arrays
and write arrays. Reductions are kernels that compute their operands themselves from other arrays.
Any other operation is computed in the kernels that read it, unless it has several readers, and
writing its result moves fewer bytes than computing it again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

from jaxmp._core._compat import jaxpr_body
from jaxmp._programs._constructs import CONSTRUCTS, OPAQUE_CALLS, Form, Inner, inners
from jaxmp._programs._jaxprs import BACKWARD, FORWARD, equations, is_literal, phase_of

# Operations whose result is the same array in memory. Matmuls read transposed operands.
_VIEWS = frozenset(
    {"copy", "expand_dims", "name", "pcast", "pvary", "reshape", "reshard", "squeeze"}
) | {"bitcast_convert_type", "sharding_constraint", "stop_gradient", "transpose"}
# Kernels that compute their operands themselves.
_REDUCTIONS = ("reduce", "arg", "scatter", "cum", "dynamic_update_slice", "concatenate")
_MATMULS = frozenset(("conv_general_dilated", "dot_general", "ragged_dot", "scaled_matmul"))
# Operations that take longer to compute again than to read.
_COSTLY = frozenset({"erf", "erfc", "erf_inv", "lgamma", "digamma"})
# Name of an operation for a loop or branches, whose jaxprs have their own memory.
_APART = "apart"
_LIBRARY = (
    frozenset({"cholesky", "eigh", "fft", "lu", "qr", "sort", "svd", "top_k", "triangular_solve"})
    | {"all_gather", "all_to_all", "ppermute", "psum", "psum_invariant", "reduce_scatter"}
    | {"pallas_call", "rng_bit_generator", _APART}
)


class Value:
    """An array of the program.

    Args:
      shape, dtype: those of the array.
      bytes: its size per device; 0 for arguments and results of the program.
      kind: the kind of state of an argument; of other values, "" until it is known.
    """

    def __init__(self, shape: tuple[int, ...], dtype: Any, size: int, kind: str = "") -> None:
        self.shape, self.dtype, self.bytes, self.kind = shape, dtype, size, kind
        self.elements = size // _itemsize(self)
        self.is_argument = bool(kind)
        # The arrays that a kernel reads to compute it; itself if it is in memory.
        self.roots: frozenset[Value] = frozenset((self,))
        self.readers: list[_Operation] = []
        self.is_result = False


class _Operation(NamedTuple):
    name: str
    operands: list[Value]
    results: list[Value]
    phase: str
    # Memory that the jaxprs inside require, by kind.
    inside: Counter[str]
    # The operands in whose memory a loop writes its carry.
    carried: list[Value]


# A kernel with the arrays that it reads.
_Kernel: TypeAlias = tuple[_Operation, set[Value]]


class Liveness:
    """The values and kernels of a jaxpr.

    Args:
      size_of: returns the bytes per device of an abstract array.
      weights: numbers of elements of the parameters, by which gradients are recognized.
    """

    def __init__(self, size_of: Callable[[Any], int], weights: Iterable[int]) -> None:
        self._size_of, self._weights = size_of, set(weights)
        self._operations: list[_Operation] = []
        # Number of elements of the logits: of the last matmul of the forward pass.
        self._logits = 0

    def peak(
        self, jaxpr: Any, arguments: Sequence[Value], phase: str = FORWARD, logits: int = 0
    ) -> Counter[str]:
        """Returns kind -> bytes at the largest use, without arguments and results of a jaxpr.

        Args:
          jaxpr: open or closed.
          arguments: a value for each argument.
          phase: the pass of the equation that contains it.
          logits: the number of elements of the logits, if it is known.
        """
        self._logits = logits
        results = self._add(jaxpr_body(jaxpr)[0], list(arguments), phase)
        needed = set(results)
        kept = []
        for operation in reversed(self._operations):
            if not needed.isdisjoint(operation.results):
                kept.append(operation)
                needed.update(operation.operands)
        self._operations = kept[::-1]
        self._logits = self._logits or self._size_of_logits()
        for value in results:
            value.is_result = True
        for operation in self._operations:
            for value in dict.fromkeys(operation.operands):
                value.readers.append(operation)
        kernels = self._kernels()
        # XLA takes the order with the smallest peak.
        orders = (self._ordered(kernels, late) for late in (False, True))
        return min(map(self._largest, orders), key=Counter.total)

    # -- from the jaxpr to operations ---------------------------------------------------------

    def _value(self, var: Any) -> Value:
        shape = tuple(getattr(var.aval, "shape", ()))
        return Value(shape, getattr(var.aval, "dtype", None), self._size_of(var.aval))

    def _add(self, jaxpr: Any, arguments: list[Value], phase: str) -> list[Value]:
        values: dict[Any, Value] = dict(zip(jaxpr.invars, arguments, strict=True))

        def read(var: Any) -> Value:
            if is_literal(var) or var not in values:
                new = Value((), None, 0, "constant")
                return new if is_literal(var) else values.setdefault(var, new)
            return values[var]

        for equation in equations(jaxpr, inside=False):
            name, operands = equation.primitive.name, [read(var) for var in equation.invars]
            own = phase_of(str(equation.source_info.name_stack), phase)
            inside = inners(equation) if name in CONSTRUCTS | OPAQUE_CALLS else []
            is_apart = any(inner.is_loop or inner.form is Form.BRANCH for inner in inside)
            if len(inside) == 1 and not is_apart:
                if inside[0].form is Form.REMAT and own != FORWARD:
                    # A barrier, so that the compiler does not use the values of the forward pass.
                    self._operations.append(_Operation("barrier", operands, [], own, Counter(), []))
                results = self._add(inside[0].jaxpr, operands, own)
            elif name in _VIEWS:
                results = operands[:1]
            elif name == "optimization_barrier":
                results = operands
            else:
                results = [self._value(var) for var in equation.outvars]
                below = self._inside(inside if is_apart else [], operands, own)
                carried = [inner.indices[n] for inner in inside for n in inner.carried]
                overwritten = [operands[n] for n in carried if n is not None]
                name = _APART if is_apart else name
                self._operations.append(
                    _Operation(name, operands, results, own, below, overwritten)
                )
            values.update(zip(equation.outvars, results, strict=True))

        return [read(var) for var in jaxpr.outvars]

    def _inside(self, inside: list[Inner], operands: list[Value], phase: str) -> Counter[str]:
        peaks = []
        for inner in inside:
            weights = {
                self._elements(var.aval)
                for var, n in zip(inner.jaxpr.invars, inner.indices, strict=True)
                if n is not None and operands[n].kind in ("parameters", "working copies")
            }
            arguments = [
                Value(var.aval.shape, var.aval.dtype, 0, operands[n].kind or "activations")
                if n is not None
                else self._value(var)
                for var, n in zip(inner.jaxpr.invars, inner.indices, strict=True)
            ]
            below = Liveness(self._size_of, self._weights | weights)
            peaks.append(below.peak(inner.jaxpr, arguments, phase, self._logits or 1))
        return max(peaks, key=Counter.total, default=Counter[str]())

    def _elements(self, aval: Any) -> int:
        return self._size_of(aval) // _itemsize(aval)

    def _size_of_logits(self) -> int:
        forward = [x for x in self._operations if x.name in _MATMULS and x.phase == FORWARD]
        has_backward = any(x.phase == BACKWARD for x in self._operations)
        return forward[-1].results[0].elements if forward and has_backward else 1

    # -- kernels --------------------------------------------------------------------------------

    def _kernels(self) -> list[_Kernel]:
        """Returns the kernels in the order of the program, each with the arrays that it reads."""
        kernels: list[_Kernel] = []
        for operation in self._operations:
            roots = frozenset().union(*(value.roots for value in operation.operands))
            self._set_kind(operation, roots)
            if operation.name == "barrier" or self._is_kernel(operation, roots):
                kernels.append((operation, set(roots)))
            else:
                operation.results[0].roots = roots
        return kernels

    def _is_kernel(self, operation: _Operation, roots: frozenset[Value]) -> bool:
        results = operation.results
        if _is_library(operation) or len(results) != 1 or operation.name.startswith(_REDUCTIONS):
            return True
        (result,) = results
        if result.is_result or any(_is_library(reader) for reader in result.readers):
            return True
        count = len(result.readers)
        if operation.name in _COSTLY and count > 1:
            return True
        read = sum(root.elements * _itemsize(root) for root in roots)
        return count > 1 and read * (count - 1) > (count + 1) * result.bytes

    def _set_kind(self, operation: _Operation, roots: frozenset[Value]) -> None:
        kinds = {value.kind for value in operation.operands} - {"constant"}
        is_backward = operation.phase == BACKWARD or "gradients" in kinds
        for result in operation.results:
            if result.elements == self._logits > 1:
                result.kind = "logits"
            elif kinds <= {"parameters", "working copies", "FP8 state"} and "parameters" in kinds:
                result.kind = "working copies"
            elif result.elements in self._weights and is_backward:
                result.kind = "gradients"
            else:
                result.kind = "activations"

    def _ordered(self, kernels: list[_Kernel], late: bool) -> list[_Kernel]:
        """Moves casts of arguments to their first reader, and updates behind their gradients.

        Args:
          kernels: those of the program.
          late: True to move all elementwise kernels to their first reader.
        """
        made = {value: n for n, (operation, _) in enumerate(kernels) for value in operation.results}
        places = [float(n) for n in range(len(kernels))]
        first: dict[Value, float] = {}
        for n, (operation, read) in reversed(list(enumerate(kernels))):
            results = operation.results
            if results and all(value.is_result for value in results):
                places[n] = max((made.get(value, -1) for value in read), default=n) + 0.25
            elif results and (
                (late and not _is_library(operation)) or all(value.is_argument for value in read)
            ):
                places[n] = min((first.get(value, n) for value in results), default=n) - 1e-6
            for value in read:
                first[value] = min(places[n], first.get(value, places[n]))
        order = sorted(range(len(kernels)), key=lambda n: (places[n], n))
        return [kernels[n] for n in order]

    def _largest(self, kernels: list[_Kernel]) -> Counter[str]:
        last: dict[Value, int] = {}
        for n, (_, read) in enumerate(kernels):
            last.update(dict.fromkeys(read, n))
        live: dict[Value, int] = {}
        largest, total, peak = -1, 0, Counter[str]()
        for n, (operation, read) in enumerate(kernels):
            # Elementwise kernels and loops write into operands that nothing else reads.
            owned = operation.carried if _is_library(operation) else read
            dying = sum(live.get(value, 0) for value in set(owned) if last.get(value) == n)
            new = {
                value: value.bytes
                for value in operation.results
                if not (value.is_result or _is_summand(operation, value))
                and (value in last or _is_library(operation))
            }
            reused = min(dying, sum(new.values()))
            live |= new
            total += sum(new.values())
            if total - reused + operation.inside.total() > largest:
                largest = total - reused + operation.inside.total()
                peak = Counter(operation.inside)
                for value, size in live.items():
                    peak[value.kind] += size
            for value in [value for value in (*read, *new) if last.get(value, n) == n]:
                total -= live.pop(value, 0)
        return peak


def _is_library(operation: _Operation) -> bool:
    name = operation.name
    return name in _MATMULS or name in _LIBRARY or "attention" in name or name == "custom_call"


def _is_summand(operation: _Operation, value: Value) -> bool:
    """Returns True for a product that is only added to a sum that becomes a result."""
    readers = value.readers
    return (
        operation.name in _MATMULS
        and len(readers) == 1
        and readers[0].name in ("add", "add_any")
        and readers[0].results[0].is_result
    )


def _itemsize(value: Any) -> int:
    # The dtype of the derivative of integers has no bytes.
    return getattr(value.dtype, "itemsize", 4) or 1
