"""Kernels of a compiled program, and the bytes that they read and write."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from jaxmp._tools.audit._hlo import Computation, Instruction, Program, Shape, Step

_NO_KERNEL = frozenset(
    ("after-all", "bitcast", "call", "conditional", "constant", "get-tuple-element", "parameter")
) | {"tuple", "while"}
_SLICES = ("dynamic-slice", "gather", "slice")


def kernels(program: Program) -> Iterator[Step]:
    """Yields the kernels that the program starts, including those in loops and branches."""
    for step in program.steps():
        opcode = step.instruction.opcode
        if opcode not in _NO_KERNEL and not opcode.endswith("-done"):
            yield step


def accessed(program: Program, step: Step) -> int:
    """Returns the bytes that one run of a kernel reads and writes, without the effect of caches.

    If a kernel slices an array or updates it in place, only the accessed part counts.
    """
    kernel = step.instruction
    if kernel.opcode in ("copy-start", "slice-start"):
        # Of a TPU, between its memories. The results are the target, the source and a context.
        return min(shape.bytes for shape in kernel.shapes[:2])
    operands = step.operands
    inside = program.inside(kernel)
    if inside is None:
        return sum(_bytes(operand.shapes) for operand in operands) + written(program, step)
    arguments = inside.parameters
    reads = sum(_read(program, inside, arguments[n]) for n in range(len(operands)))
    return reads + written(program, step)


def written(program: Program, step: Step) -> int:
    """Returns the bytes that one run of a kernel writes."""
    inside = program.inside(step.instruction) or step.computation
    return sum(_written(inside, result) for result in results(program, step.instruction))


def results(program: Program, kernel: Instruction) -> list[Instruction]:
    """Returns the instructions that compute the results of a kernel: of a fusion, those inside."""
    inside = program.inside(kernel)
    if inside is None or inside.root.opcode != "tuple":
        return [kernel if inside is None else inside.root]
    return [inside.instructions[name] for name in inside.root.operands]


def _read(program: Program, inside: Computation, value: Instruction) -> int:
    """Returns the bytes of an argument of a fused kernel that the kernel reads."""
    parts = 0
    for reader in inside.readers[value.name]:
        if reader.opcode == "bitcast":
            parts += _read(program, inside, reader)
        elif reader.opcode in _SLICES and reader.operands[0] == value.name:
            parts += _bytes(reader.shapes)
        elif reader.opcode == "fusion" and (nested := program.inside(reader)) is not None:
            numbers = (n for n, name in enumerate(reader.operands) if name == value.name)
            parts += sum(_read(program, nested, nested.parameters[n]) for n in numbers)
        elif reader.opcode != "dynamic-update-slice" or reader.operands[0] != value.name:
            return _bytes(value.shapes)
    return min(parts, _bytes(value.shapes))


def _written(inside: Computation, result: Instruction) -> int:
    """Returns the bytes of a result that are written, without the workspace of library calls."""
    if result.opcode in ("bitcast", "get-tuple-element"):
        source = inside.instructions[result.operands[0]]
        return _written(inside, source) if source.opcode != "tuple" else _bytes(result.shapes)
    if result.opcode == "dynamic-update-slice":
        return _bytes(inside.instructions[result.operands[1]].shapes)
    if result.opcode == "custom-call" and len(result.shapes) > 1:
        return _bytes(shape for shape in result.shapes if shape.dtype not in ("int8", "uint8"))
    return _bytes(result.shapes)


def _bytes(shapes: Iterable[Shape]) -> int:
    return sum(shape.bytes for shape in shapes if not shape.is_on_chip)
