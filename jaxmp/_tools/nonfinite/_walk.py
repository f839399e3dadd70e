"""Follows values that are not finite from the results of a step back to their origins.

An operation is an *origin* if its result is not finite and its operands are, or if its result has
NaN elements and its operands are only infinite, as in `inf - inf`. In the second case the
infinities are followed too: if an operation made them from finite values, it is the origin.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

from jaxmp import _core, _programs
from jaxmp._tools.nonfinite._record import FINITE, INFINITE, NAN, Recorded, Region

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
    def equation(self) -> Any:
        return self.region.equations[self.number]

    @property
    def name(self) -> str:
        return self.equation.primitive.name

    @property
    def is_backward(self) -> bool:
        return self.region.locations[self.number].phase == _programs.BACKWARD

    @property
    def enclosing(self) -> tuple[Any, ...]:
        """The equation and those that contain it, innermost first."""
        return (self.equation, *self.region.enclosing)

    def repeats(self) -> list[tuple[Region, int]]:
        """Returns (region, iteration or device) of each enclosing loop and `shard_map`."""
        return list(zip((r for r in self.region.chain if r.is_repeated), self.at, strict=True))

    @property
    def time(self) -> tuple[Any, ...]:
        """Position in the order of execution; devices come last."""
        numbers = dict((id(region), n) for region, n in self.repeats())
        order: list[int] = []
        devices = []
        for region in self.region.chain:
            n = numbers.get(id(region), 0)
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
        is_residual = self.via is not None and not self.source.is_backward
        return self.via if self.via is not None and is_residual else self.source


class Walk:
    """Walk over the recorded values of one run."""

    def __init__(self, recorded: Recorded) -> None:
        self.recorded = recorded

    def code(self, variable: Variable) -> int:
        return self.recorded.code(*variable)

    # -- navigation --------------------------------------------------------------------------

    def makers(self, variable: Variable) -> Iterator[Operation | Variable | Argument]:
        """Yields the operation that computes a variable, or variables with the same values."""
        region, at, var = variable
        if _programs.is_literal(var) or var in region.body.constvars:
            return
        index = region.index.positions.get(var)
        if index is None:
            yield from self._outside(region, at, region.body.invars.index(var))
        elif region.equations[index].primitive.name in _programs.CONSTRUCTS:
            yield from self._inside(Operation(region, at, index), var)
        else:
            yield Operation(region, at, index)

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
        number = list(operation.equation.outvars).index(var)
        for below in self.recorded.inside(region, index):
            assert below.inner is not None
            repeated = ((*at, n) for n in range(below.count())) if below.is_repeated else (at,)
            positions = [each for each in repeated if self.recorded.ran(below, each)]
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
        for n, var in enumerate(operation.equation.invars):
            if (index, n) in region.selected:
                code = self.recorded.selected(region, at, index, n)
                result.append((Variable(region, at, var), code))
                continue
            for each in self._devices(operation):
                variable = Variable(region, each, var)
                result.append((variable, self.code(variable)))
        return result

    def _devices(self, operation: Operation) -> Iterator[At]:
        yield operation.at
        if not any(isinstance(axis, str) for axis in _programs.mesh_axes_of(operation.equation)):
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
            via = source if source.is_backward else origin.via
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
                below = node if node.is_backward else via
                result = max(
                    self.code(Variable(node.region, node.at, v)) for v in node.equation.outvars
                )
                operands = self.operands(node)
                nan = [v for v, code in operands if code == NAN]
                infinite = [v for v, code in operands if code == INFINITE]
                if result == FINITE:
                    continue
                if nan and (result == NAN or not infinite):
                    waiting += [(v, below) for v in nan]
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
        if isinstance(source, Argument) or source.name in NO_OVERFLOWS:
            return False
        codes = [self.code(Variable(source.region, source.at, v)) for v in source.equation.outvars]
        return max(codes) == INFINITE and not origin.from_infinite

    def is_masked_softmax(self, operation: Operation) -> bool:
        """Returns True for the difference of infinite logits and their infinite maximum."""
        if operation.name != "sub":
            return False
        (_, first), (largest, second) = self.operands(operation)[:2]
        if first != INFINITE or second != INFINITE:
            return False
        return any(op.name == "reduce_max" for op in self.chain(largest, MOVES))

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
            if operation.name in through:
                waiting += [
                    Variable(operation.region, operation.at, v) for v in operation.equation.invars
                ]


def _is_cast(source: Operation | Argument) -> bool:
    return isinstance(source, Operation) and source.name == "convert_element_type"


def _order(origin: Origin) -> tuple[Any, ...]:
    """Returns the position of an origin; paths through the forward pass alone come first."""
    if isinstance(origin.source, Argument):
        return 0, (), [origin.source.number], origin.via is not None
    return 1, *origin.source.time, origin.via is not None
