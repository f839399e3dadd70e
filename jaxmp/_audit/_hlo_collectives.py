"""Collectives of a compiled program: the arrays that they send, and the consumers of these."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxmp._audit._hlo_matmuls import fused
from jaxmp._core._hlo import Computation, Instruction, Program, Shape

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
    """Returns True if a matmul in the same computation reads an array that a collective made."""
    combined = len(instruction.operands) > 1
    waiting, seen = [instruction], {instruction.name}
    while waiting and len(seen) < 200:
        here = waiting.pop()
        whole = combined and (here is instruction or here.opcode.endswith("-done"))
        for reader in program.readers(inside, here.name):
            picks = whole and reader.opcode == "get-tuple-element"
            if reader.name in seen or (picks and reader.numbers("index") != (number,)):
                continue
            if _contains_matmul(program, reader):
                return True
            seen.add(reader.name)
            waiting.append(reader)
    return False


def _contains_matmul(program: Program, instruction: Instruction) -> bool:
    """Returns True for a matmul, and for a fusion that contains one."""
    if instruction.attribute("custom_call_target").startswith(_MATMUL_CALLS):
        return True
    if instruction.opcode in ("fusion", "fusion-start"):
        return any(_contains_matmul(program, inner) for _, inner in fused(program, instruction))
    return instruction.opcode in ("dot", "convolution", "scaled-dot")
