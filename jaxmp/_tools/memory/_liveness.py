"""Estimates the temporary memory of a traced program from the lifetimes of its arrays.

Matmuls, convolutions, loops, reductions and library calls are kernels, which write their results
into memory in the order of the program. Another operation is computed in the kernels that read it,
or in the first of them, which writes its result for the others if that is long to compute, or
smaller than what it is computed from. A library reads its operands from memory, into which a kernel
writes them before. An array occupies memory from its kernel to its last reader. XLA decides more
than that: the measured errors are in `errors.toml`.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxmp import _programs
from jaxmp._core import _compat, axis_names, named
from jaxmp._programs import Form, Inner

# Axes of the mesh that divide an array; None for one that depends on no argument, such as zeros,
# which XLA divides like the arrays that they are combined with.
Axes: TypeAlias = frozenset[str] | None
_NO_AXES = frozenset[Any]()

# Operations whose results are the same arrays in memory. Matmuls read transposed operands.
_VIEWS = named(
    "copy expand_dims name pcast pvary reshape squeeze stop_gradient bitcast_convert_type"
    " optimization_barrier transpose"
)
_PLACEMENTS = ("reshard", "sharding_constraint")
# Prefixes of the primitives that are kernels: those that compute their operands themselves, and
# collectives.
_KERNELS = ("reduce", "arg", "scatter", "cum", "dynamic_update_slice", "concatenate", "dot_general")
_KERNELS += ("all_", "ppermute", "psum")
# Operations of many instructions, which no second kernel computes again. XLA would compute `exp`
# and `logistic` again.
_LONG = ("tanh", "erf", "erfc")
# Nor does a second kernel compute an array again for which it reads this multiple of its bytes.
_LARGER = 1.5
# Primitives besides matmuls with one result that libraries compute, which read their operands from
# memory.
_LIBRARY = ("cholesky", "custom_call", "fft", "pallas_call", "sort", "triangular_solve")


class ShardedArgument(NamedTuple):
    """An array among the arguments of a program, its sharding, and its kind in the report."""

    array: Any
    sharding: NamedSharding | None
    kind: str
    is_donated: bool

    @property
    def parts(self) -> int:
        """Number of parts into which the devices split the array."""
        if self.sharding is None or not self.array.size:
            return 1
        return self.array.size // math.prod(self.sharding.shard_shape(self.array.shape))

    @property
    def bytes(self) -> int:
        """Bytes on each device."""
        return _bytes_of(self.array) // self.parts


@dataclasses.dataclass(eq=False)
class _Array:
    """An array of a program.

    Args:
      bytes: its bytes on each device.
      axes: those of tensor parallelism that divide it.
      sources: None for an array in memory; otherwise the arrays from which its readers compute it.
      name: the operation that computes it.
      first_reader: number of the first kernel that reads it.
      is_scattered: whether it was scattered into zeros, or is a sum with such an array.
    """

    bytes: int
    axes: Axes
    sources: Sequence[_Array] | None = None
    name: str = ""
    first_reader: int = 2**63  # none
    is_scattered: bool = False


class _Kernel(NamedTuple):
    """A kernel, the arrays in memory that it reads, and those that it writes."""

    reads: set[_Array]
    writes: list[_Array]
    inside: int = 0  # bytes that the jaxprs inside require
    after: frozenset[_Array] = frozenset()  # other arrays that exist before


class Liveness(_programs.Forward):
    """Kernels of a program on one of its devices.

    An array with as many elements as a parameter is divided as the parameter is, and others as the
    batch is. Axes that divide parameters and not the batch, as in tensor parallelism, also divide
    the arrays to which operations pass them.
    """

    consequence = "the memory of the operations inside is not counted"
    nothing = _Array(0, None, ())

    def __init__(self, arguments: Sequence[ShardedArgument]) -> None:
        super().__init__()
        self._kernels: list[_Kernel] = []
        # Operands of the function that is computed again, which a barrier keeps together.
        self._barrier = frozenset[_Array]()
        parameters, inputs = (
            [each for each in arguments if each.kind == kind] for kind in ("parameters", "inputs")
        )
        # Axis -> devices, number of elements of a parameter -> its parts, and those of the batch.
        shardings = [each.sharding for each in arguments if each.sharding]
        self._devices = dict(collections.ChainMap(*(each.mesh.shape for each in shardings)))
        self._parameters = {each.array.size: each.parts for each in parameters}
        self._batch = max((each.parts for each in inputs), default=1)
        of_inputs = _NO_AXES.union(*(_axes_of(each.sharding) for each in inputs))
        of_parameters = _NO_AXES.union(*(_axes_of(each.sharding) for each in parameters))
        auto = _NO_AXES.union(*(each.mesh.auto_axes for each in shardings))
        self._axes, self._shared = of_parameters - of_inputs, of_parameters & of_inputs & auto
        self._arguments = [
            _Array(each.bytes, _axes_of(each.sharding) & self._axes) for each in arguments
        ]
        # Array, shape -> the same with zeros.
        self._padded = dict[tuple[_Array, tuple[int, ...]], _Array]()
        # Stacked result of an unrolled loop -> its rows.
        self._rows = dict[_Array, list[_Array]]()
        # Shape -> the axes of the last array of this shape.
        self._passed = dict[tuple[int, ...], frozenset[str]]()

    def measure(self, jaxpr: Any) -> tuple[int, int]:
        """Returns the most bytes of temporary arrays that exist at once, and those of results."""
        names = _programs.primitives(jaxpr)
        if names.isdisjoint(_programs.SHARD_MAPS):
            # XLA may divide arrays along their features, as FSDP does parameters, and gather the
            # batch; it gathers the rows of a batch to sort them by their groups.
            if self._shared and "sharding_constraint" not in names:
                self.unknown.add("arrays without sharding constraints")
            if self._batch > 1 and "ragged_dot_general" in names:
                self.unknown.add("ragged_dot on several devices")
        results = self.run(jaxpr, self._arguments)
        rows = zip(_compat.jaxpr_body(jaxpr)[0].outvars, results, strict=True)
        return self._required(results), sum(self._size(var.aval, each.axes) for var, each in rows)

    def equation(self, equation: Any, operands: list[Any], frame: Any) -> list[Any]:
        """Adds the kernel of an operation, if it has one, and returns its results."""
        self.check_known(equation)
        name = equation.primitive.name
        has_inside = name in _programs.CONSTRUCTS | _programs.OPAQUE_CALLS
        inside = _programs.inners(equation) if has_inside else []
        if inside and inside[0].is_unrolled:
            return self._unrolled(equation, inside[0], operands)
        is_apart = any(inner.form is Form.BRANCH or inner.is_loop for inner in inside)
        if inside and not is_apart:
            return self._analysis_inside(inside[0].form, operands).enter(equation, operands, frame)
        axes = [self._axes_of_result(equation, operands)] * len(equation.outvars)
        below = 0  # bytes that the jaxprs inside require
        if name == "transpose" and operands[0] in self._arguments:
            # XLA chooses the layouts of other arrays.
            return [_Array(operands[0].bytes, operands[0].axes, operands, name)]
        if name in _VIEWS or (name in _PLACEMENTS and axes[0] == operands[0].axes):
            return operands
        for inner in inside:
            axes_inside, size = self._measure_inside(inner, operands)
            axes = axes_inside if len(axes_inside) == len(axes) else axes
            below = max(below, size)
        for n, shape in _programs.copied_shapes(equation):
            # If the weights are reversed, as in a gradient, XLA calls cuDNN's gradient instead.
            if operands[1].name != "rev":
                zeros, own = equation.invars[n].aval.update(shape=shape), operands[n]
                padded = _Array(self._size(zeros, own.axes), own.axes, [own])
                # The gradient reads the same array again.
                operands[n] = self._padded.setdefault((own, shape), padded)
                # XLA transposes the rows of groups.
                below = padded.bytes if name == "ragged_dot_general" and n == 0 else 0
        # XLA computes a product with vectors as a sum.
        is_vector = name == "dot_general" and not _programs.matmul_of(equation).widths
        is_matmul = name in _programs.MATMULS and not is_vector
        is_whole = is_apart or is_matmul
        rows = zip(equation.outvars, axes, strict=True)
        results = [
            _Array(self._size(var.aval, each, not is_whole), each, name=name) for var, each in rows
        ]
        is_library = is_whole or name in _LIBRARY or "attention" in name
        for operand in operands:
            if name in ("add", "add_any") and operand.is_scattered:
                # XLA scatters into the other operand of the sum instead of zeros.
                operand.bytes *= operand.sources is not None
                results[0].is_scattered = True
            elif operand.sources and (is_library or operand.is_scattered):
                reads = self._reads([operand])
                # XLA makes constants, such as the zeros of a sum, in place.
                if reads and not (is_matmul and operand.name == "transpose"):
                    self._kernels.append(_Kernel(reads, [operand], after=self._barrier))
                    operand.sources = None
        if name.startswith("scatter"):
            results[0].is_scattered = not self._reads(operands[:1])
        if is_library or len(results) != 1 or name.startswith(_KERNELS):
            reads = self._reads(operands)
            self._kernels.append(_Kernel(reads, results, below, self._barrier))
        else:
            results[0].sources = operands
        return results

    def _reads(self, arrays: Sequence[_Array]) -> set[_Array]:
        """Returns the arrays in memory that the next kernel reads to compute some arrays.

        The first reader of an array writes it for the next one, which would otherwise compute it
        again, if it is smaller than what is read to compute it, or long to compute.
        """
        while any([self._is_written_now(array) for array in _sources(arrays)]):
            pass
        return {array for array in _sources(arrays) if array.sources is None}

    def _is_written_now(self, array: _Array) -> bool:
        """Lets the first reader write an array if the next one must not compute it again."""
        array.first_reader = min(array.first_reader, len(self._kernels))
        if array.sources is None or array.first_reader == len(self._kernels):
            return False
        read = sum(each.bytes for each in _sources(array.sources) if each.sources is None)
        if array.name in _LONG or read > _LARGER * array.bytes:
            self._kernels[array.first_reader].writes.append(array)
            array.sources = None
        return array.sources is None

    def _analysis_inside(self, form: Form | None, operands: list[_Array]) -> Liveness:
        """Returns the analysis of a function inside of an equation."""
        own = copy.copy(self)
        own._barrier = frozenset(_sources(operands)) if form is Form.REMAT else self._barrier
        if form is Form.SHARDS:  # Arrays are parts already.
            own._parameters, own._batch, own._devices = {}, 1, dict.fromkeys(self._devices, 1)
        return own

    def _unrolled(self, equation: Any, body: Inner, operands: list[_Array]) -> list[_Array]:
        """Adds the kernels of all iterations of a loop, and returns its results."""
        args = [operands[n] for n in body.indices if n is not None]
        scanned = [self._rows.get(each, [each] * body.times) for each in args[body.carried.stop :]]
        saved = dict[int, list[_Array]]()
        for n in range(body.times)[:: body.step]:
            args[body.carried.stop :] = [rows[n] for rows in scanned]
            results = self.run(body.jaxpr, args)
            args[body.carried.start : body.carried.stop] = results[: len(body.carried)]
            saved[n] = results[len(body.carried) :]
        results = [args[n] for n in body.carried]
        rows_of_each = zip(*(saved[n] for n in sorted(saved)), strict=True)
        for var, rows in zip(equation.outvars[len(results) :], rows_of_each, strict=True):
            stack = _Array(self._size(var.aval, rows[0].axes), rows[0].axes, rows)
            self._rows[stack] = list(rows)
            results.append(stack)
        return results

    def _measure_inside(self, inner: Inner, operands: list[_Array]) -> tuple[list[Axes], int]:
        """Returns the axes of the results of a loop or branch, and the bytes that it requires."""
        body = copy.copy(self)
        body._kernels, body._barrier = [], frozenset()
        own = [_Array(0, None if n is None else operands[n].axes) for n in inner.indices]
        results = body.run(inner.jaxpr, own)
        return [each.axes for each in results], body._required(results)

    def _axes_of_result(self, equation: Any, operands: list[_Array]) -> Axes:
        """Returns the axes that an operation passes from its operands to its results."""
        name, axes = equation.primitive.name, [operand.axes for operand in operands]
        sharding = _programs.sharding_of_result(equation) if name in _PLACEMENTS else None
        # A constraint that leaves dimensions to XLA keeps the axes.
        if isinstance(sharding, NamedSharding) and PartitionSpec.UNCONSTRAINED not in sharding.spec:
            return _axes_of(sharding) & self._axes
        has_batch = name == "dot_general" and bool(_programs.dot_of(equation).batch[0])
        if name in _programs.MATMULS and not has_batch:
            # If they divide both operands, they divide the dimension that is summed.
            return (axes[0] or _NO_AXES) ^ (axes[1] or _NO_AXES)
        # A scatter passes the axes of the array that it updates, a gather those of its indices.
        known = axes[:1] if name.startswith("scatter") else axes[1:] if name == "gather" else axes
        known = [each for each in known if each is not None]
        return _NO_AXES.union(*known) if known else None

    def _size(self, aval: Any, axes: Axes, is_summed: bool = True) -> int:
        """Returns the bytes of an array on each device.

        Args:
          aval: its type.
          axes: those that divide it.
          is_summed: False for an array that may be a gradient: XLA computes it whole, and then sums
            it over the batch and divides it.
        """
        shape, size = getattr(aval, "shape", ()), getattr(aval, "size", 0)
        axes = self._passed.get(shape, _NO_AXES) if axes is None else axes
        self._passed[shape] = axes
        parts = math.prod(self._devices[axis] for axis in axes)
        if size not in self._parameters:
            parts *= self._batch
        elif is_summed:
            parts = self._parameters[size]
        return _bytes_of(aval) // parts

    def _required(self, results: list[_Array]) -> int:
        """Returns the most bytes of temporary arrays that exist at once.

        XLA executes most kernels in the order of the program, and some as soon as their operands
        exist: if parameters are read twice, or results are computed again. The weights of these
        orders were fitted to the committed programs.
        """
        late, levels = self._peak(results), dict[_Array, int]()
        for kernel in self._kernels:
            before = (levels.get(array, 0) for array in kernel.reads | kernel.after)
            levels |= dict.fromkeys(kernel.writes, 1 + max(before, default=0))
        self._kernels.sort(key=lambda each: max(map(levels.__getitem__, each.writes), default=0))
        return int(late**0.8 * self._peak(results) ** 0.2)

    def _peak(self, results: list[_Array]) -> int:
        """Returns the most bytes of the arrays of all kernels that exist at once, in this order."""
        reads_of_results = [self._reads([result]) for result in results]
        first = {array: n for n, each in enumerate(self._kernels) for array in each.writes}
        temporary, waiting = first.keys() - set(results), collections.defaultdict(set[_Array])
        # A result without a kernel is computed as soon as its operands exist.
        for reads in reads_of_results:
            waiting[max((first.get(array, 0) for array in reads), default=0)] |= reads
        alive, size, most = set[_Array](), 0, 0  # arrays that are read later, and their bytes
        for n, kernel in reversed([*enumerate(self._kernels)]):
            size += _bytes_in((waiting[n] & temporary) - alive)
            alive |= waiting[n] & temporary
            now = (kernel.reads.union(kernel.writes) & temporary) - alive
            most = max(most, size + _bytes_in(now) + kernel.inside)
            size -= _bytes_in(alive.intersection(kernel.writes))
            alive.difference_update(kernel.writes)
            size += _bytes_in((kernel.reads & temporary) - alive)
            alive |= kernel.reads & temporary
        return most


def _bytes_in(arrays: Iterable[_Array]) -> int:
    return sum(array.bytes for array in arrays)


def _sources(arrays: Iterable[_Array]) -> Iterator[_Array]:
    """Yields arrays and all from which a kernel computes them."""
    known, waiting = set[_Array](), list(arrays)
    while waiting:
        array = waiting.pop()
        if array not in known:
            known.add(array)
            yield array
            waiting += array.sources or ()


def _axes_of(sharding: NamedSharding | None) -> frozenset[str]:
    """Returns the axes of the mesh that divide an array."""
    return axis_names(() if sharding is None else sharding.spec)


def _bytes_of(aval: Any) -> int:
    """Returns the bytes of an array; 0 for values that are none."""
    dtype = getattr(aval, "dtype", np.dtype("V"))
    # Flax's dtype of FP8 scales has no size; they are FP32. XLA packs types of 4 bits.
    is_number = jnp.issubdtype(dtype, np.number)
    bits = jax.dtypes.itemsize_bits(dtype) if is_number else 8 * getattr(dtype, "itemsize", 4)
    return -(-bits * math.prod(getattr(aval, "shape", ())) // 8)
