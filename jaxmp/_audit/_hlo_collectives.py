"""Collectives of a compiled program: the arrays that they send, and the consumers of these."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxmp._audit._hlo_matmuls import fused
from jaxmp._core._hlo import Computation, Instruction, Program, Shape
from jaxmp._core._jaxprs import BACKWARD, phase_of

if TYPE_CHECKING:
    from jaxmp._audit._hlo_stats import Origins

_COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "ragged-all-to-all",
)


def collective_name(instruction: Instruction) -> str:
    """Returns the operation of a collective, such as "all-reduce"; "" for other instructions."""
    name = instruction.opcode.removesuffix("-start")
    return name if name in _COLLECTIVES else ""


def sent_arrays(instruction: Instruction, computation: Computation) -> list[Shape]:
    """Returns for each array that a collective sends the larger of operand and result.

    XLA combines collectives, so one of them may send several arrays. The start of an asynchronous
    collective has its operands among its results.
    """
    operands = [s for name in instruction.operands for s in computation.instructions[name].shapes]
    count = len(operands)
    results = (
        instruction.shapes[count:] if len(instruction.shapes) >= 2 * count else instruction.shapes
    )
    pairs = zip(operands, results, strict=False)
    return [max(pair, key=lambda shape: shape.bytes) for pair in pairs]


def named_reader(
    program: Program, origins: Origins, inside: Computation, instruction: Instruction, number: int
) -> Instruction:
    """Returns the instruction whose name stack contains the module of an array.

    This is the collective, or the first reader of the array. XLA names many collectives after
    arguments, and combined collectives after all their arrays.
    """
    combined = len(instruction.operands) > 1
    waiting, seen = [instruction], 0
    while waiting and seen < 8:
        here = waiting.pop(0)
        seen += 1
        whole = combined and (here is instruction or here.opcode.endswith("-done"))
        if not whole and origins.names(here.op_name):
            return here
        for reader in program.readers(inside, here.name):
            picks = whole and reader.opcode == "get-tuple-element"
            if not picks or reader.numbers("index") == (number,):
                waiting.append(reader)
    return instruction


_MATMUL_CALLS = ("__cublas$", "__cudnn$")


def is_read_by_matmul(
    program: Program, inside: Computation, instruction: Instruction, number: int
) -> bool:
    """Returns True if a matmul reads an array that a collective made.

    Outside of the computation of the collective, which may be the body of a loop, only matmuls of
    backward passes count: they read the gradient of an activation. The gradient of a weight passes
    through the optimizer, and then to matmuls of the forward pass of a next step. In a backward
    pass, a scatter counts as well: it adds up the gradients of an embedding.
    """
    combined = len(instruction.operands) > 1
    # Computation, instruction, and the index of the array in it, or None.
    waiting: list[tuple[Computation, Instruction, int | None]]
    waiting = [(inside, instruction, number if combined else None)]
    seen = set()
    while waiting and len(seen) < 1000:
        here, made, index = waiting.pop()
        if (here.name, made.name, index) in seen:
            continue
        seen.add((here.name, made.name, index))
        if made.is_root and made.opcode == "tuple" and index is not None:
            waiting += _next_iteration(program, here, index)
        for reader in program.readers(here, made.name):
            is_backward = phase_of(reader.op_name) == BACKWARD
            if is_backward and _contains(program, reader, ("scatter",)):
                return True
            if _contains_matmul(program, reader):
                if here is inside or is_backward:
                    return True
            elif reader.opcode == "get-tuple-element":
                if index is None or reader.numbers("index") == (index,):
                    waiting.append((here, reader, None))
            elif reader.opcode == "tuple":
                position = reader.operands.index(made.name)
                waiting.append((here, reader, position if index is None else None))
            elif reader.opcode == "while":
                body = program.computations[reader.attribute("body")]
                waiting += [(body, p, index) for p in body.parameters.values()]
                waiting.append((here, reader, index))
            else:
                waiting.append((here, reader, index if reader.opcode.endswith("-done") else None))
    return False


def _next_iteration(
    program: Program, body: Computation, index: int
) -> list[tuple[Computation, Instruction, int | None]]:
    """Returns where a carried array is after an iteration of a loop: in its body, and after it."""
    result: list[tuple[Computation, Instruction, int | None]] = []
    for computation in program.computations.values():
        for instruction in computation.instructions.values():
            if instruction.opcode == "while" and instruction.attribute("body") == body.name:
                result += [(body, p, index) for p in body.parameters.values()]
                result.append((computation, instruction, index))
    return result


def _contains_matmul(program: Program, instruction: Instruction) -> bool:
    """Returns True for a matmul, and for a fusion that contains one."""
    if instruction.attribute("custom_call_target").startswith(_MATMUL_CALLS):
        return True
    if instruction.opcode in ("fusion", "fusion-start"):
        return any(_contains_matmul(program, inner) for _, inner in fused(program, instruction))
    return instruction.opcode in ("dot", "convolution", "scaled-dot")


def _contains(program: Program, instruction: Instruction, opcodes: tuple[str, ...]) -> bool:
    """Returns True for an instruction with one of some opcodes, and for a fusion with one."""
    if instruction.opcode in ("fusion", "fusion-start"):
        inside = fused(program, instruction)
        return any(_contains(program, inner, opcodes) for _, inner in inside)
    return instruction.opcode in opcodes
