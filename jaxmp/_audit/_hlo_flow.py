"""Data flow in a compiled program, through fusions, loops and asynchronous operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from jaxmp._core._hlo import Computation, Instruction, Program

# Instructions that execute a computation as a part of the program.
_CALLS = frozenset({"fusion", "fusion-start", "call", "async-start", "while", "conditional"})
# Library calls that are matmuls, convolutions or attention.
_LIBRARIES = ("__cublas$", "__cudnn$")
_MATMULS = frozenset({"dot", "convolution", "scaled-dot"})


class Value(NamedTuple):
    """Array that an instruction makes; `number` if the instruction makes several, else None."""

    computation: Computation
    instruction: Instruction
    number: int | None = None

    @property
    def key(self) -> tuple[str, str, int | None]:
        return self.computation.name, self.instruction.name, self.number

    @property
    def elements(self) -> int:
        """Number of elements; the largest one if the array is not known."""
        shapes = self.instruction.shapes
        if self.number is not None and self.number < len(shapes):
            return shapes[self.number].elements
        return max((shape.elements for shape in shapes), default=1)


class DataFlow:
    """The arrays that read an array of a program, and those that it is made from."""

    def __init__(self, program: Program) -> None:
        self.program = program
        # Computation -> the instructions that execute it, and the numbers of their branches.
        self._callers: dict[str, list[tuple[Computation, Instruction, int]]] = {}
        self.has_backward = False
        for computation in program.computations.values():
            for instruction in computation.instructions.values():
                self.has_backward |= "transpose(jvp(" in instruction.rest
                if instruction.opcode in _CALLS:
                    for branch, name in enumerate(_executed(instruction)):
                        caller = computation, instruction, branch
                        self._callers.setdefault(name, []).append(caller)

    # -- one step ---------------------------------------------------------------------------

    def readers(self, value: Value) -> Iterator[Value]:
        """Yields the arrays that are made from an array in one step."""
        computation, made, index = value
        for reader in self.program.readers(computation, made.name):
            yield from self._read(value, reader)
        if made.is_root:
            for outside, caller, _ in self._callers.get(computation.name, ()):
                if caller.opcode == "while":
                    yield from self._parameters(computation, 0, index)
                yield Value(outside, caller, index)

    def _read(self, value: Value, reader: Instruction) -> Iterator[Value]:
        computation, made, index = value
        positions = [n for n, name in enumerate(reader.operands) if name == made.name]
        opcode = reader.opcode
        if opcode == "get-tuple-element":
            if index is None or reader.numbers("index") == (index,):
                yield Value(computation, reader)
        elif opcode.endswith("-done"):
            yield Value(computation, reader, index if len(reader.shapes) > 1 else None)
        elif opcode == "while":
            body = self.program.computations[reader.attribute("body")]
            yield from self._parameters(body, 0, index)
        elif opcode in _CALLS:
            names = _executed(reader)
            for position in positions:
                if opcode == "conditional":
                    if position:
                        branch = self.program.computations[names[position - 1]]
                        yield from self._parameters(branch, 0, index)
                elif names:
                    called = self.program.computations[names[0]]
                    yield from self._parameters(called, position, index)
        elif opcode == "tuple" or _sends_several(reader):
            for position in positions:
                yield Value(computation, reader, position)
        else:
            yield Value(computation, reader)

    @staticmethod
    def _parameters(computation: Computation, number: int, index: int | None) -> Iterator[Value]:
        parameter = computation.parameters.get(number)
        if parameter is not None:
            yield Value(computation, parameter, index)

    def makers(self, value: Value) -> Iterator[tuple[Value, bool]]:
        """Yields (array, whether an earlier iteration of a loop made it) of each operand."""
        computation, made, index = value
        operands = [Value(computation, computation.instructions[name]) for name in made.operands]
        opcode = made.opcode
        if opcode == "parameter":
            yield from self._passed(value)
        elif opcode == "get-tuple-element":
            (position,) = made.numbers("index")
            yield operands[0]._replace(number=position), False
        elif opcode.endswith("-done"):
            yield operands[0]._replace(number=index), False
        elif opcode in _CALLS and _executed(made):
            for name in _executed(made):
                inside = self.program.computations[name]
                yield Value(inside, inside.root, index), False
        elif (opcode == "tuple" or _sends_several(made)) and index is not None:
            yield operands[index], False
        else:
            yield from ((operand, False) for operand in operands)

    def _passed(self, parameter: Value) -> Iterator[tuple[Value, bool]]:
        computation, instruction, index = parameter
        number = int(instruction.rest.partition(")")[0])
        for outside, caller, branch in self._callers.get(computation.name, ()):
            position = branch + 1 if caller.opcode == "conditional" else number
            passed = outside.instructions[caller.operands[position]]
            yield Value(outside, passed, index), False
            if caller.opcode == "while":
                yield Value(computation, computation.root, index), True

    # -- whole searches ---------------------------------------------------------------------

    def after(self, start: Value, follow: Callable[[Value], bool]) -> Iterator[Value]:
        """Yields the arrays that depend on `start`.

        Args:
          start: is not among them.
          follow: returns True for an array if those that depend on it are to be visited.
        """
        waiting, seen = [start], {start.key}
        while waiting:
            for value in self.readers(waiting.pop()):
                if value.key not in seen:
                    seen.add(value.key)
                    yield value
                    if follow(value):
                        waiting.append(value)

    def before(self, start: Value, follow: Callable[[Value], bool]) -> Iterator[Value]:
        """Yields the arrays that `start` is made from, except for scalars.

        A result of the optimizer in an earlier iteration of a loop is an argument of this one.

        Args:
          start: is among them.
          follow: returns True for an array if those that it is made from are to be visited.
        """
        waiting, seen = [start], {start.key}
        while waiting:
            here = waiting.pop()
            yield here
            for value, is_earlier in self.makers(here) if follow(here) else ():
                if value.key in seen or value.elements == 1:
                    continue
                if is_earlier and self._is_made_by_optimizer(value):
                    continue
                seen.add(value.key)
                waiting.append(value)

    def _is_made_by_optimizer(self, value: Value) -> bool:
        root, index = value.instruction, value.number
        if root.opcode != "tuple" or index is None:
            return False
        name = value.computation.instructions[root.operands[index]].op_name
        return self.has_backward and bool(name) and not is_differentiated(name)

    def op_name(self, value: Value) -> str:
        """Returns the name stack of an array, or of the fusion that contains it."""
        name = value.instruction.op_name
        for _, caller, _ in self._callers.get(value.computation.name, ())[:1]:
            if not name and caller.opcode.startswith("fusion"):
                return caller.op_name
        return name


# ---------------------------------------------------------------------------
# Types of instructions
# ---------------------------------------------------------------------------


def is_differentiated(op_name: str) -> bool:
    """Returns True for the name stack of an operation inside of a differentiated function."""
    return "jvp(" in op_name or "transpose(" in op_name


def is_matmul(instruction: Instruction) -> bool:
    """Returns True for a matmul, a convolution, and fused attention."""
    if instruction.opcode == "custom-call":
        return instruction.attribute("custom_call_target").startswith(_LIBRARIES)
    return instruction.opcode in _MATMULS


def _executed(instruction: Instruction) -> tuple[str, ...]:
    """Returns the computations whose parameters and results are arrays of the program."""
    if instruction.opcode == "while":
        return (instruction.attribute("body"),)
    return instruction.called


def _sends_several(instruction: Instruction) -> bool:
    """Returns True for a collective, which has a result for each operand."""
    name = instruction.opcode.removesuffix("-start")
    return len(instruction.operands) > 1 and name.startswith(
        ("all-", "reduce-scatter", "collective-", "ragged-")
    )
