"""Follows values that are not finite from the results of a step back to their origins.

An operation is an *origin* if its result is not finite and its operands are, or if its result has
NaN elements and its operands are only infinite, as in `inf - inf`. In the second case the
infinities are followed too: if an operation made them from finite values, it is the origin.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmp import _core, _programs
from jaxmp._tools.audit import _checks
from jaxmp._tools.nonfinite import _record
from jaxmp._tools.nonfinite._record import FINITE, INFINITE, NAN, Region

At = tuple[int, ...]
# Operations that move, scale or add the elements of an operand.
MOVES = _core.named(
    "add_any broadcast_in_dim convert_element_type copy expand_dims max mul neg"
    " optimization_barrier pcast pvary reduce_sum reshape squeeze stop_gradient transpose"
)
# Functions that are infinite at finite operands other than large ones, and unknown functions.
NO_OVERFLOWS = _core.named(
    "div log log1p log2 rsqrt atanh erf_inv tan rem custom_partitioning ffi_call io_callback"
    " pallas_call pure_callback"
)


class Operation(NamedTuple):
    """An equation at one iteration of each enclosing loop, on one device of a `shard_map`."""

    region: Region
    at: At
    number: int

    @property
    def op(self) -> _checks.OpOccurrence:
        """The equation with its location."""
        return self.region.operations[self.number]

    def variables(self, atoms: Iterable[_programs.Atom]) -> list[Variable]:
        """Returns variables of the jaxpr of the equation at the same iterations, on the device."""
        return [Variable(self.region, self.at, atom) for atom in atoms]

    def repeats(self) -> list[tuple[Region, int]]:
        """Returns (region, iteration or device) of each enclosing loop and `shard_map`."""
        return list(zip((r for r in self.region.chain if r.is_repeated), self.at, strict=True))

    @property
    def time(self) -> tuple[Any, ...]:
        """Position in the order of execution; devices come last."""
        numbers, order, devices = iter(self.at), list[int](), list[int]()
        for region in self.region.chain:
            n = next(numbers) if region.is_repeated else 0
            if region.is_on_devices:
                devices.append(n)
                n = 0
            elif region.inner is not None and region.inner.step < 0:
                n = region.count() - 1 - n
            order += [region.key[-1][0], n]
        return (*order, self.number), devices


class Variable(NamedTuple):
    """A variable at one iteration of each enclosing loop, on one device of a `shard_map`."""

    region: Region
    at: At
    var: _programs.Atom


class Argument(NamedTuple):
    """Argument of the program, by its number."""

    number: int


@dataclasses.dataclass(frozen=True)
class Origin:
    """Operation or argument that made a value that is not finite.

    Attributes:
      source: the operation or argument that made it.
      via: the last operation of the backward pass on the way from the source to the results; None
        if the forward pass returns the value too.
      from_infinite: True for a NaN that was made from infinities of constants.
    """

    source: Operation | Argument
    via: Operation | None = None
    from_infinite: bool = False

    @property
    def operation(self) -> Operation:
        """The operation to report: a derivative belongs to the backward pass that reads it."""
        assert isinstance(self.source, Operation)
        is_residual = self.via is not None and not self.source.op.is_backward
        return self.via if self.via is not None and is_residual else self.source


class Walk:
    """Walk over the recorded values of one run.

    Args:
      recorder: the recorder of the run.
      side: key of a region -> codes, with an axis for each enclosing loop and `shard_map`.
    """

    def __init__(self, recorder: _record.Recorder, side: dict[_record.Key, _core.Array]) -> None:
        # A branch that was not taken has no codes.
        self.regions = {key: region for key, region in recorder.regions.items() if key in side}
        self._codes = jax.device_get(side)
        self._names = recorder.locations.names

    def module(self, operation: Operation) -> str:
        """Returns the path of the module of an operation; "" for the root."""
        return _programs.module_of(operation.op.location.names, _programs.root_of(self._names))

    def code(self, variable: Variable) -> int:
        """Returns the code of a variable, `FINITE` for zeros."""
        region, at, var = variable
        if not _programs.is_literal(var):
            return max(int(self._codes[region.key][at][region.slots[var]]), FINITE)
        is_float = jnp.issubdtype(np.asarray(var.val).dtype, jnp.inexact)
        return max(int(_record.code_of(jnp.asarray(var.val))), FINITE) if is_float else FINITE

    def results_code(self, operation: Operation) -> int:
        """Returns the largest code of the results of an operation."""
        return max(map(self.code, operation.variables(operation.op.equation.outvars)))

    def is_finite(self, operation: Operation) -> bool:
        """Returns True if an operation of another run of the program has finite results here."""
        region = self.regions.get(operation.region.key)
        if region is None or operation.at not in self.positions(region):
            return False
        return self.results_code(operation._replace(region=region)) == FINITE

    def operations(self) -> Iterator[tuple[Region, _checks.OpOccurrence]]:
        """Yields each equation of the program and the region that contains it."""
        for region in self.regions.values():
            yield from ((region, op) for op in region.operations)

    def positions(self, region: Region) -> Iterator[At]:
        """Yields the iterations and devices at which a jaxpr ran."""
        yield from (tuple(map(int, at)) for at in np.argwhere(self._codes[region.key][..., -1]))

    def broken(self, choose: Callable[[_checks.OpOccurrence], list[Any]]) -> list[Variable]:
        """Returns the values that are not finite, of the variables that a function chooses.

        Args:
          choose: equation -> variables.
        """
        values = []
        for region, op in self.operations():
            chosen = choose(op)
            for at in self.positions(region) if chosen else ():
                values += [Variable(region, at, var) for var in chosen]
        return list(filter(self.code, values))

    def are_gradients_zero(self) -> bool:
        """Returns True if the program has gradients, and all of their elements are zero."""
        codes: set[int] = set()
        for region in self.regions.values():
            phases = [op.location.phase for op in region.operations]
            construct = region.construct
            outer = _programs.FORWARD if construct is None else construct.location.phase
            variables = _programs.gradients_of(region.body, phases, outer)
            slots = [region.slots[var] for var in variables if _core.is_float(var.aval)]
            rows = self._codes[region.key]
            codes |= set(np.unique(rows[rows[..., -1] == 1][..., slots]))
        return codes == {_record.ZERO}

    # -- navigation --------------------------------------------------------------------------

    def makers(self, variable: Variable) -> Iterator[Operation | Variable | Argument]:
        """Yields the operation that computes a variable, or variables with the same values."""
        region, at, var = variable
        if _programs.is_literal(var) or var in region.body.constvars:
            return
        index = region.index.positions.get(var)
        if index is None:
            yield from self._outside(region, at, region.body.invars.index(var))
        elif region.operations[index].name in _programs.CONSTRUCTS:
            yield from self._inside(Operation(region, at, index), var)
        else:
            yield Operation(region, at, index)

    def is_constant(self, variable: Variable) -> bool:
        """Returns True for a literal or constant of the program, also behind calls."""
        waiting: list[Operation | Variable | Argument] = [variable]
        while waiting:
            each = waiting.pop()
            if not isinstance(each, Variable):
                return False
            if not _programs.is_literal(each.var) and each.var not in each.region.body.constvars:
                waiting += self.makers(each)
        return True

    def _outside(self, region: Region, at: At, number: int) -> Iterator[Variable | Argument]:
        """Yields the arguments and outer variables that a parameter of a jaxpr receives."""
        outer, inner = region.outer, region.inner
        if outer is None or inner is None:
            yield Argument(number)
            return
        above = at[:-1] if region.is_repeated else at
        if number in inner.carried:
            before = at[-1] - inner.step
            if 0 <= before < region.count():
                result = inner.outgoing[number - inner.carried.start]
                yield Variable(region, (*above, before), result)
                return
        yield Variable(outer, above, inner.operands[number])

    def _inside(self, operation: Operation, var: _programs.Atom) -> Iterator[Variable]:
        """Yields the variables inside of a construct that become its result."""
        region, at, index = operation
        number = list(operation.op.equation.outvars).index(var)
        for below in self.regions.values():
            if below.outer is not region or below.key[-1][0] != index:
                continue
            assert below.inner is not None
            repeated = ((*at, n) for n in range(below.count())) if below.is_repeated else (at,)
            positions = [each for each in repeated if self._codes[below.key][each][-1]]
            if number < len(below.inner.carried):
                last = slice(1) if below.inner.step < 0 else slice(-1, None)
                if not positions:
                    yield Variable(region, at, below.inner.operands[below.inner.carried[number]])
                positions = positions[last]
            for each in positions:
                yield Variable(below, each, below.body.outvars[number])

    def operands(self, operation: Operation) -> list[tuple[Variable, int]]:
        """Returns (operand, code) of an operation; of a collective, on all devices."""
        region, at, index = operation
        result = []
        for n, var in enumerate(operation.op.operands):
            if (index, n) in region.slots:
                code = self.code(Variable(region, at, (index, n)))
                result.append((Variable(region, at, var), code))
                continue
            for each in self._devices(operation):
                variable = Variable(region, each, var)
                result.append((variable, self.code(variable)))
        return result

    def _devices(self, operation: Operation) -> Iterator[At]:
        yield operation.at
        if not any(isinstance(axis, str) for axis in _programs.mesh_axes_of(operation.op.equation)):
            return
        for position, (region, _) in enumerate(operation.repeats()):
            if region.is_on_devices:
                for n in range(region.count()):
                    if n != operation.at[position]:
                        yield (*operation.at[:position], n, *operation.at[position + 1 :])

    # -- origins -----------------------------------------------------------------------------

    def origin(self, roots: list[Variable], loss: list[Variable]) -> Origin | None:
        """Returns the first origin, in the order of execution, of results that are not finite.

        Args:
          roots: results of the step.
          loss: results of the forward pass that are not returned. An origin that they have in
            common with the results belongs to the forward pass.
        """
        origins = self._origins(roots)
        if not origins:
            return None
        first = min(origins, key=_order)
        if first.via is not None and loss:
            forward = {o.source: o for o in self._origins(loss) if o.via is None}
            first = min((forward.get(o.source, o) for o in origins), key=_order)
        return first

    def _origins(self, roots: list[Variable]) -> list[Origin]:
        origins = []
        for origin in self._ends(roots, follow_infinite=False):
            source = origin.source
            if isinstance(source, Argument) or not origin.from_infinite:
                origins.append(origin)
                continue
            operands = [v for v, code in self.operands(source) if code == INFINITE]
            via = source if source.op.is_backward else origin.via
            deeper = self._ends(operands, follow_infinite=True, via=via)
            # A mask is a constant, which may be cast; other infinite logits are an overflow.
            if self.is_masked_softmax(source):
                deeper = [o for o in deeper if self.is_overflow(o) and not _is_cast(o.source)]
            origins += [o for o in deeper if not o.from_infinite] or [origin]
        return origins

    def _ends(
        self, roots: list[Variable], *, follow_infinite: bool, via: Operation | None = None
    ) -> list[Origin]:
        waiting: list[tuple[Any, Operation | None]] = [(root, via) for root in roots]
        seen: set[tuple[Any, bool]] = set()
        ends = []
        while waiting:
            node, via = waiting.pop()
            is_literal_value = isinstance(node, Variable) and _programs.is_literal(node.var)
            if is_literal_value or (node, via is None) in seen:
                continue
            seen.add((node, via is None))
            if isinstance(node, Argument):
                ends.append(Origin(node, via))
            elif isinstance(node, Variable):
                if self.code(node):
                    waiting += [(maker, via) for maker in self.makers(node)]
            else:
                below = node if node.op.is_backward else via
                result, operands = self.results_code(node), self.operands(node)
                nan = [v for v, code in operands if code == NAN]
                infinite = [v for v, code in operands if code == INFINITE]
                if result == FINITE:
                    continue
                made = [v for v in nan if not self.is_constant(v)]
                if made and (result == NAN or not infinite):
                    waiting += [(v, below) for v in made]
                elif infinite and (result == INFINITE or follow_infinite):
                    waiting += [(v, below) for v in infinite]
                else:
                    ends.append(Origin(node, via, from_infinite=bool(infinite)))
        return ends

    def is_overflow(self, origin: Origin) -> bool:
        """Returns True for an infinity that an operation made from finite operands.

        Functions such as a quotient by zero, and kernels, are excluded.
        """
        source = origin.source
        if isinstance(source, Argument) or source.op.name in NO_OVERFLOWS:
            return False
        return self.results_code(source) == INFINITE and not origin.from_infinite

    def is_masked_softmax(self, operation: Operation) -> bool:
        """Returns True for the difference of infinite logits and their infinite maximum."""
        if operation.op.name != "sub":
            return False
        (_, first), (largest, second) = self.operands(operation)[:2]
        if first != INFINITE or second != INFINITE:
            return False
        return any(each.op.name == "reduce_max" for each in self.chain(largest, MOVES))

    # -- makers through other operations -----------------------------------------------------

    def maker(self, variable: Variable) -> Operation | None:
        """Returns the operation that computes a variable, inside or outside of its jaxpr."""
        node: Any = variable
        while isinstance(node, Variable):
            node = next(self.makers(node), None)
        return node if isinstance(node, Operation) else None

    def chain(self, variable: Variable, through: frozenset[str]) -> Iterator[Operation]:
        """Yields the operation that computes a value, and those before operations in `through`."""
        waiting, seen = [variable], set()
        while waiting:
            operation = self.maker(waiting.pop(0))
            if operation is None or operation in seen:
                continue
            seen.add(operation)
            yield operation
            if operation.op.name in through:
                waiting += operation.variables(operation.op.operands)


def _is_cast(source: Operation | Argument) -> bool:
    return isinstance(source, Operation) and source.op.name == "convert_element_type"


def _order(origin: Origin) -> tuple[Any, ...]:
    """Returns the position of an origin; paths through the forward pass alone come first."""
    if isinstance(origin.source, Argument):
        return 0, (), [origin.source.number], origin.via is not None
    return 1, *origin.source.time, origin.via is not None
