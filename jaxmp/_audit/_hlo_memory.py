"""Memory of a compiled program, and the bytes that the kernels of the optimizer update move."""

from __future__ import annotations

from typing import Any

from jaxmp._audit._gpu_rows import MemoryRow
from jaxmp._core._hlo import Computation, Instruction, Program, Shape

_VIEWS = frozenset({"bitcast", "get-tuple-element"})
_FREE = frozenset({"tuple", "parameter", "constant", "while", "conditional"})


def memory_row(stats: Any, program: Program, fusions: int, in_optimizer: list[bool]) -> MemoryRow:
    """Returns the memory of a program.

    Args:
      stats: `CompiledMemoryStats`.
      program: the program.
      fusions: number of fused kernels.
      in_optimizer: for each argument, True if an optimizer state contains it.
    """
    parameters, moved, floor = _update(program, in_optimizer)
    return MemoryRow(
        arguments=stats.argument_size_in_bytes,
        outputs=stats.output_size_in_bytes,
        aliased=stats.alias_size_in_bytes,
        temporary=stats.temp_size_in_bytes,
        fusions=fusions,
        parameters=parameters,
        update_bytes=moved,
        update_floor=floor,
    )


def _update(program: Program, in_optimizer: list[bool]) -> tuple[int, int, int]:
    """Returns (parameters, bytes moved, minimum) of the kernels that write donated arrays."""
    entry = program.entry
    arguments = entry.parameters
    outputs = entry.root.operands if entry.root.opcode == "tuple" else (entry.root.name,)
    donated = {
        number: argument
        for number, argument in program.aliased.items()
        if number < len(outputs) and _is_floating_array(arguments[argument].shapes[0])
    }
    if not donated:
        return 0, 0, 0
    kernels: dict[str, Instruction] = {}
    for number in donated:
        _add_writers(entry, outputs[number], kernels)
    moved = 0
    inputs: dict[tuple[str, Shape], None] = {}
    for kernel in kernels.values():
        incoming = set(kernel.operands)
        moved += sum(shape.bytes for name in incoming for shape in entry.instructions[name].shapes)
        moved += sum(shape.bytes for shape in _written(program, kernel))
        for name in incoming:
            source = _source(entry, name)
            if source.opcode != "parameter" and source.name not in kernels:
                inputs |= {(name, shape): None for shape in _arrays(entry, name)}
    # Each donated array is read and written. Other arrays, such as gradients, are read.
    floor = sum(2 * arguments[argument].shapes[0].bytes for argument in donated.values())
    floor += sum(shape.bytes for _, shape in inputs)
    own = {a for a in donated.values() if a >= len(in_optimizer) or not in_optimizer[a]}
    return sum(arguments[a].shapes[0].elements for a in own), moved, floor


def _is_floating_array(shape: Shape) -> bool:
    return shape.dtype.startswith(("float", "bfloat")) and shape.elements > 1


def _arrays(entry: Computation, name: str) -> list[Shape]:
    return [shape for shape in entry.instructions[name].shapes if shape.elements > 1]


def _written(program: Program, kernel: Instruction) -> tuple[Shape, ...]:
    """Returns the arrays that a kernel writes.

    The start of an asynchronous kernel has its operands among its results.
    """
    inside = program.inside(kernel)
    return kernel.shapes if inside is None else inside.root.shapes


def _source(computation: Computation, name: str) -> Instruction:
    """Returns the instruction that computes a value, ignoring those that move no memory."""
    instruction = computation.instructions[name]
    while instruction.operands and (
        instruction.opcode in _VIEWS or instruction.opcode.endswith("-done")
    ):
        instruction = computation.instructions[instruction.operands[0]]
    return instruction


def _add_writers(entry: Computation, name: str, kernels: dict[str, Instruction]) -> None:
    """Adds the kernel that computes a result, and for a copy also the kernel of the original."""
    instruction = _source(entry, name)
    while instruction.opcode not in _FREE and instruction.name not in kernels:
        kernels[instruction.name] = instruction
        if instruction.opcode != "copy":
            return
        instruction = _source(entry, instruction.operands[0])
