"""Parser of optimized HLO programs: instructions, calls between computations, loop counts.

It reads XLA's text format, which is the only form in which XLA returns a program that was compiled
for a device that is not present on this machine.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

# ---------------------------------------------------------------------------
# Shapes
# ---------------------------------------------------------------------------

# XLA's names of the types of numbers -> NumPy's.
_KINDS = {"f": "float", "bf": "bfloat", "s": "int", "u": "uint", "c": "complex"}
# Type, bits, and the exponent and mantissa of formats with few bits, as in f8e4m3fn.
_TYPE = re.compile(r"([a-z]+)(\d+)(\w*)")
# `S(1)` in a layout is the vector memory of a TPU.
_SHAPE = re.compile(r"\b([a-z]+\d*\w*)\[([^\]]*)\](\{[^}]*S\(1\)\})?")


class Shape(NamedTuple):
    """Shape of one array: XLA's name of its dtype, and its sizes."""

    type: str
    sizes: tuple[int, ...]
    is_on_chip: bool = False

    @property
    def dtype(self) -> str:
        """NumPy's name of the dtype, such as `bfloat16`, `float8_e4m3fn` or `int32`."""
        match = _TYPE.match(self.type)
        if match is None:
            return "bool" if self.type == "pred" else self.type
        kind, bits, form = match.groups()
        return "_".join(filter(None, (_KINDS.get(kind, kind) + bits, form)))

    @property
    def is_float(self) -> bool:
        return self.dtype.startswith(("float", "bfloat"))

    @property
    def elements(self) -> int:
        return math.prod(self.sizes)

    @property
    def bytes(self) -> int:
        """Size in memory; 4-bit types are packed."""
        if self.type == "pred":
            return self.elements
        match = _TYPE.match(self.type)
        return -(-self.elements * int(match[2]) // 8) if match else 0


def _shapes(text: str) -> tuple[Shape, ...]:
    """Returns the shapes of the arrays in an HLO type; tuples are flattened."""
    arrays = (array for array in _SHAPE.findall(text) if array[0] != "token")
    sizes_of = lambda text: tuple(int(n.strip("<=? ")) for n in text.split(",") if n.strip())
    return tuple(Shape(name, sizes_of(sizes), bool(layout)) for name, sizes, layout in arrays)


# ---------------------------------------------------------------------------
# Instructions
# ---------------------------------------------------------------------------

_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_SOURCE = re.compile(r'source_file="((?:[^"\\]|\\.)*)"(?: source_line=(\d+))?')
_CONFIG = re.compile(r"backend_config=(?=\{)")


class Instruction(NamedTuple):
    """Instruction of a computation: one line of text."""

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...]
    # Text after the operands: attributes, metadata, backend configuration.
    rest: str
    is_root: bool

    def attribute(self, key: str) -> str:
        """Returns the value of `key=...` without braces, quotes or `%`; "" if it is missing."""
        match = re.search(rf"[ ,]{key}=(\{{[^}}]*\}}|\"[^\"]*\"|[^,\s]+)", self.rest)
        return match[1].strip('{}"%') if match else ""

    @property
    def value(self) -> str:
        """The number of a parameter, or the value of a constant."""
        return self.rest.partition(")")[0]

    def numbers(self, key: str) -> tuple[int, ...]:
        """Returns the integers in the value of `key={0,1}`."""
        return tuple(map(int, re.findall(r"\d+", self.attribute(key))))

    @property
    def op_name(self) -> str:
        """Name stack and primitive from JAX; "" if XLA dropped it."""
        match = _OP_NAME.search(self.rest)
        return match[1].replace("\\'", "'") if match else ""

    @property
    def config(self) -> dict[str, Any]:
        """Backend configuration; empty if there is none."""
        match = _CONFIG.search(self.rest)
        return json.JSONDecoder().raw_decode(self.rest, match.end())[0] if match else {}

    @property
    def called(self) -> tuple[str, ...]:
        """Names of the computations that it calls."""
        keys = ("calls", "to_apply", "body", "condition", "true_computation", "false_computation")
        single = [self.attribute(key) for key in keys]
        lists = map(self.attribute, ("branch_computations", "called_computations"))
        return (*filter(None, single), *re.findall(r"[\w.\-]+", " ".join(lists)))


@dataclasses.dataclass(frozen=True, eq=False)
class Computation:
    """Named list of instructions, in the order of execution."""

    name: str
    instructions: dict[str, Instruction]

    @property
    def root(self) -> Instruction:
        return next(each for each in self.instructions.values() if each.is_root)

    @property
    def parameters(self) -> dict[int, Instruction]:
        """Parameter number -> instruction."""
        own = self.instructions.values()
        return {int(each.value): each for each in own if each.opcode == "parameter"}

    @property
    def integers(self) -> dict[str, int]:
        """Name -> value of each constant that is one integer."""
        constants = (each for each in self.instructions.values() if each.opcode == "constant")
        return {each.name: int(each.value) for each in constants if each.value.isdecimal()}

    @functools.cached_property
    def readers(self) -> defaultdict[str, list[Instruction]]:
        """Name of a value -> the instructions that consume it, in order."""
        readers: defaultdict[str, list[Instruction]] = defaultdict(list)
        for instruction in self.instructions.values():
            for operand in dict.fromkeys(instruction.operands):
                readers[operand].append(instruction)
        return readers


# ---------------------------------------------------------------------------
# Programs
# ---------------------------------------------------------------------------

_CALLS = frozenset({"while", "conditional", "call", "async-start", "custom-call-start"})
# Quantization scales an array by a number or by one number for each row or column, and clips it.
SCALES = frozenset(("multiply", "divide", "clamp", "select", "abs", "negate", "maximum", "minimum"))
# Attributes of TPU kernels contain line breaks.
_CONTINUED = re.compile(r'\n(?="|\}\})')
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$")
_LINE = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r"\s*([\w\-]+)\(")
_ALIAS = re.compile(r"\{([\d, ]*)\}: \((\d+), \{([\d, ]*)\}")


class Step(NamedTuple):
    """Instruction that is executed by itself, or a part of a fusion."""

    instruction: Instruction
    computation: Computation
    # Number of executions; a loop whose length is not known counts once.
    times: int

    @property
    def operands(self) -> list[Instruction]:
        """The instructions that make its operands."""
        return [self.computation.instructions[name] for name in self.instruction.operands]

    def shape(self, operand: int) -> Shape:
        """Returns the shape of an operand, the first array of a tuple."""
        return self.computation.instructions[self.instruction.operands[operand]].shapes[0]


class Program:
    """Compiled program."""

    def __init__(self, text: str) -> None:
        """Parses a program.

        Args:
          text: the result of `jax.stages.Compiled.as_text`.
        """
        self.computations: dict[str, Computation] = {}
        self.entry = Computation("", {})
        self._header = text[: text.find("\n%")]
        self._read(_CONTINUED.sub("", text))

    def _read(self, text: str) -> None:
        current: Computation | None = None
        for line in text.splitlines():
            if current is None:
                head = _HEAD.match(line)
                if head:
                    current = Computation(head[2], {})
                    self.computations[current.name] = current
                    if head[1]:
                        self.entry = current
            elif line.startswith("}"):
                current = None
            else:
                instruction = _instruction(line)
                if instruction is not None:
                    current.instructions[instruction.name] = instruction

    @property
    def aliased(self) -> dict[int, int]:
        """Index of a result -> index of the donated argument whose memory it reuses."""
        _, _, rest = self._header.partition("input_output_alias={")
        body = rest[: rest.find(" }")] if rest else ""
        return {
            int(result.split(",")[0] or 0): int(argument)
            for result, argument, _ in _ALIAS.findall(body)
        }

    def steps(self, computation: Computation | None = None, times: int = 1) -> Iterator[Step]:
        """Yields all executed instructions in order, including those in loops and branches.

        Args:
          computation: which is executed; None: the whole program.
          times: number of its executions.
        """
        computation = computation or self.entry
        for instruction in computation.instructions.values():
            yield Step(instruction, computation, times)
            if instruction.opcode in _CALLS:
                inside = times * (self.trips(instruction) or 1)
                for called in map(self.computations.__getitem__, instruction.called):
                    yield from self.steps(called, inside)

    def trips(self, instruction: Instruction) -> int | None:
        """Returns the number of times that an instruction runs its computations.

        For loops that XLA does not count, it is the number of steps to the limit of the condition;
        None if that is not a constant.
        """
        if instruction.opcode != "while":
            return 1
        count = instruction.config.get("known_trip_count", {}).get("n")
        if count is not None:
            return int(count)
        names = map(instruction.attribute, ("condition", "body"))
        condition, body = map(self.computations.__getitem__, names)
        limits, steps = condition.integers, body.integers
        indices = [i.numbers("index") for i in condition.instructions.values() if i.shapes]
        counter = next(filter(None, indices), (0,))[0]
        if len(limits) != 1 or body.root.opcode != "tuple":
            return None
        added = body.instructions[body.root.operands[counter]].operands
        step = next((steps[name] for name in added if name in steps), 1)
        return -(-next(iter(limits.values())) // max(step, 1))

    def inside(self, instruction: Instruction) -> Computation | None:
        """Returns the computation of a fusion, or of the start of an asynchronous call, or None."""
        return self.computations.get(instruction.attribute("calls"))

    # -- lines ------------------------------------------------------------------------------

    def frames(self, instruction: Instruction) -> list[tuple[str, int]]:
        """Returns (file, line) of the Python frames of an instruction, innermost first."""
        match = _FRAME.search(instruction.rest)
        if match is None:
            source = _SOURCE.search(instruction.rest)
            return [(source[1], int(source[2] or 0))] if source else []
        frames, number = [], int(match[1])
        while number in self._frames:
            location, parent = self._frames[number]
            frames.append(self._locations[location])
            number = parent if parent < number else 0
        return frames

    @functools.cached_property
    def _frames(self) -> dict[int, tuple[int, int]]:
        rows = self._table("StackFrames", r"file_location_id=(\d+)(?: parent_frame_id=(\d+))?")
        frames = {number: (int(a), int(b or 0)) for number, (a, b) in rows.items()}
        # Some versions of XLA write parent + 1, and 1 for no parent. Then frame 1 appears to be its
        # own parent.
        shift = 1 if frames.get(1, (0, 0))[1] == 1 else 0
        return {number: (location, parent - shift) for number, (location, parent) in frames.items()}

    @functools.cached_property
    def _locations(self) -> dict[int, tuple[str, int]]:
        files = self._table("FileNames", r'"((?:[^"\\]|\\.)*)"()')
        rows = self._table("FileLocations", r"file_name_id=(\d+).*?\bline=(\d+)")
        return {n: (files[int(name)][0], int(line)) for n, (name, line) in rows.items()}

    def _table(self, title: str, row: str) -> dict[int, tuple[str, ...]]:
        _, _, rest = self._header.partition(f"\n{title}\n")
        pattern = re.compile(rf"(\d+) \{{?{row}")
        table: dict[int, tuple[str, ...]] = {}
        for line in rest.splitlines():
            match = pattern.match(line)
            if match is None:
                break
            table[int(match[1])] = match.groups()[1:]
        return table


def _instruction(line: str) -> Instruction | None:
    head = _LINE.match(line)
    if head is None:
        return None
    start = head.end()
    end = _closing(line, start) + 1 if line[start] == "(" else line.find(" ", start)
    opcode = _OPCODE.match(line, end)
    if opcode is None:
        return None
    close = _closing(line, opcode.end() - 1)
    inside = line[opcode.end() : close]
    # A parameter has its number instead of operands, and a constant its value; they are stored with
    # the attributes.
    has_text = opcode[1] in ("parameter", "constant")
    rest = f"{inside}){line[close + 1 :]}" if has_text else line[close + 1 :]
    operands = () if opcode[1] == "constant" else tuple(re.findall(r"%([\w.\-]+)", inside))
    shapes = _shapes(line[start:end])
    return Instruction(head[2], opcode[1], shapes, operands, rest, bool(head[1]))


def _closing(text: str, start: int) -> int:
    """Returns the index of the parenthesis that closes the one at `start`."""
    depth = 0
    for index in range(start, len(text)):
        if text[index] == "(":
            depth += 1
        elif text[index] == ")":
            depth -= 1
            if not depth:
                return index
    return len(text)
