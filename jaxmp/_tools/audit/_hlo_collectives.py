"""Collectives of a compiled program: the arrays that they send, and what these contain."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxmp import _core, _programs
from jaxmp._tools.audit._hlo import SCALES, Instruction, Program, Shape, Step
from jaxmp._tools.audit._hlo_matmuls import DataFlow, Value, is_differentiated, is_matmul

_COLLECTIVES = _core.named(
    "all-gather all-reduce reduce-scatter all-to-all collective-permute ragged-all-to-all"
)
_SUMS = ("all-reduce", "reduce-scatter")
# Contents of arrays.
WEIGHT, WEIGHT_GRADIENT, ACTIVATION, UPDATE = "weight", "gradient", "activation", "update"

# Instructions, besides matmuls, that combine elements of a gradient. Only gradients of activations
# are read by them.
_COMBINES = _core.named("scatter reduce reduce-window sort gather")
# Instructions besides matmuls whose result is an activation, whatever their operands are.
_MIXES = _core.named("scatter rng-bit-generator")
# Instructions after which an array is still the same weight, in another layout or dtype.
_LAYOUT = _core.named(
    "bitcast copy transpose reshape convert dynamic-slice dynamic-update-slice slice tuple"
    " get-tuple-element while call conditional fusion fusion-start parameter optimization-barrier"
    " opt-barrier copy-start copy-done async-start async-done all-gather all-gather-start"
    " all-gather-done concatenate pad"
)


def collective_name(instruction: Instruction) -> str:
    """Returns the operation of a collective, such as "all-reduce"; "" for other instructions."""
    name = instruction.opcode.removesuffix("-start")
    return name if name in _COLLECTIVES else ""


def sent_arrays(part: Step) -> list[Shape]:
    """Returns for each array that a collective sends the larger of operand and result.

    XLA combines collectives, so one of them may send several arrays. The start of an asynchronous
    collective has its operands among its results.
    """
    operands = [shape for operand in part.operands for shape in operand.shapes]
    count, shapes = len(operands), part.instruction.shapes
    pairs = zip(operands, shapes[count:] if len(shapes) >= 2 * count else shapes, strict=False)
    return [max(pair, key=lambda shape: shape.bytes) for pair in pairs]


# ---------------------------------------------------------------------------
# Contents
# ---------------------------------------------------------------------------


class Content(NamedTuple):
    """Content of an array that devices send.

    content: "weight", "gradient", "activation", "update" (of a parameter), or "".
    read_as: for weights, the dtype to which all readers cast the array, or that of the array if
      one of them reads it without a cast.
    is_kept: True for a weight that a forward and a backward pass read.
    in_matmul: True for a weight or an activation that a matmul reads.
    """

    content: str = ""
    read_as: str = ""
    is_kept: bool = False
    in_matmul: bool = False


class ArrayContents(DataFlow):
    """Tells weights, gradients and activations of a program apart."""

    def __init__(self, program: Program, is_weight: Sequence[bool]) -> None:
        """Prepares the analysis of a program.

        Args:
          program: the compiled program.
          is_weight: for each argument, True if it may be a parameter or a part of the optimizer
            state.
        """
        super().__init__(program)
        self._is_weight = is_weight

    def of(self, collective: Step, number: int) -> Content:
        """Returns the content of an array that a collective sends.

        Args:
          collective: the collective.
          number: of the array among its operands.
        """
        instruction, inside, _ = collective
        shape = collective.shape(number)
        if shape.elements == 1 or not shape.is_float:
            return Content()
        result = Value(inside, instruction, number if len(instruction.operands) > 1 else None)
        if collective_name(instruction) in _SUMS:
            return self._of_sum(result)
        return self._of_moved(Value(inside, collective.operands[number]), result)

    def _of_sum(self, result: Value) -> Content:
        op_name = result.instruction.op_name
        if not self.has_backward:
            return Content(ACTIVATION)
        phase = _programs.phase_of(op_name)
        if op_name and not is_differentiated(op_name):
            sources = self.before(result, lambda value: not self._mixes(value))
            names = (self.op_name(value) for value in sources if self._mixes(value))
            is_gradient = any(_programs.phase_of(name) == _programs.BACKWARD for name in names)
            return Content(WEIGHT_GRADIENT if is_gradient else "")
        return Content(ACTIVATION if self._is_read_by_model(result, phase) else WEIGHT_GRADIENT)

    def _is_read_by_model(self, result: Value, phase: str) -> bool:
        """Returns True if a differentiated operation combines the elements of an array.

        Between the sum of a weight's gradient and the optimizer, there are only elementwise
        operations. The gradient of an activation is multiplied with weights, scattered into the
        table of an embedding, or summed for a bias or a scale.
        """
        readers = filter(self._belongs_to_model, self.after(result, self._belongs_to_model))
        is_later = lambda v: _programs.phase_of(self.op_name(v)) != _programs.FORWARD
        return any(
            is_matmul(value.instruction) or value.instruction.opcode in _COMBINES
            for value in readers
            if phase != _programs.BACKWARD or is_later(value)
        )

    def _belongs_to_model(self, value: Value) -> bool:
        """Returns True for an operation of a differentiated function, or of an unknown one."""
        name = self.op_name(value)
        return not name or is_differentiated(name)

    def _of_moved(self, operand: Value, result: Value) -> Content:
        has_weight = mixes = False
        for value in self.before(operand, lambda value: not self._mixes(value)):
            mixes |= self._mixes(value)
            if (
                value.instruction.opcode == "parameter"
                and value.computation.name == self.program.entry.name
                and value.elements > 1
            ):
                # Rows of a table are activations if the batch selects them.
                is_float = any(shape.is_float for shape in value.instruction.shapes)
                is_weight = is_float and self._is_weight[int(value.instruction.value)]
                has_weight |= is_weight
                mixes |= not is_weight
        if has_weight and not mixes:
            return self._of_weight(result)
        is_of_model = not self.has_backward
        passes = lambda value: not self._mixes(value) and self._belongs_to_model(value)
        for value in self.after(result, passes):
            if is_matmul(value.instruction) and self._belongs_to_model(value):
                return Content(ACTIVATION, in_matmul=True)
            # The end of a combined collective has the names of all its arrays.
            if result.number is None or not value.instruction.opcode.endswith("-done"):
                is_of_model |= is_differentiated(self.op_name(value))
        return Content(ACTIVATION if is_of_model else UPDATE)

    @staticmethod
    def _mixes(value: Value) -> bool:
        """Returns True for an operation whose result is an activation or a gradient."""
        return is_matmul(value.instruction) or value.instruction.opcode in _MIXES

    def _of_weight(self, result: Value) -> Content:
        readers = self.after(result, self._is_same_weight)
        matmuls = (value for value in readers if is_matmul(value.instruction))
        phases = {_programs.phase_of(self.op_name(value)) for value in matmuls}
        is_kept = _programs.FORWARD in phases and not phases.isdisjoint(
            (_programs.BACKWARD, _programs.RECOMPUTE)
        )
        return Content(WEIGHT, self._read_as(result), is_kept, bool(phases))

    def _read_as(self, result: Value) -> str:
        """Returns the dtype to which all readers cast a weight; see `Content.read_as`."""
        shape = result.instruction.shapes[-1 if result.number is None else result.number]
        if len([size for size in shape.sizes if size > 1]) < 2:
            return shape.dtype
        casts: set[str] = set()
        is_moved = lambda value: self._is_same_weight(value) and not _casts_down(value)
        for value in self.after(result, is_moved):
            if _casts_down(value):
                casts.add(value.instruction.shapes[0].dtype)
            elif not self._is_same_weight(value):
                return shape.dtype
        return min(casts) if casts else shape.dtype

    def _is_same_weight(self, value: Value) -> bool:
        """Returns True if an operation moves, casts or scales a weight."""
        instruction = value.instruction
        if instruction.opcode in _LAYOUT:
            return True
        if instruction.opcode not in SCALES:
            return False
        operands = [value.computation.instructions[name] for name in instruction.operands]
        arrays = [operand for operand in operands if operand.shapes[0].elements > 1]
        return sum(operand.opcode not in ("broadcast", "constant") for operand in arrays) <= 1


def _casts_down(value: Value) -> bool:
    """Returns True for a cast to 16 bits or FP8."""
    dtype = value.instruction.shapes[0].dtype if value.instruction.shapes else ""
    is_narrow = dtype.startswith("float8") or dtype in ("bfloat16", "float16")
    return value.instruction.opcode == "convert" and is_narrow


# ---------------------------------------------------------------------------
# Mesh axes
# ---------------------------------------------------------------------------

_NAMED = re.compile(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}")
_IOTA = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_LISTED = re.compile(r"replica_groups=\{(\{[\d,{}]*\})?\}")


def mesh_axes(instruction: Instruction, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """Returns the mesh axes over which a collective sends; empty if they are not known.

    Args:
      instruction: the collective.
      mesh: axis -> size, in the order of the devices.
    """
    sizes = tuple(mesh.values())
    groups = groups_of(instruction, math.prod(sizes))
    if groups is None or groups.size == 0:
        return ()
    coordinates = np.unravel_index(groups, sizes)
    pairs = zip(mesh, coordinates, strict=True)
    return tuple(name for name, along in pairs if (along != along[:, :1]).any())


def groups_of(instruction: Instruction, devices: int) -> np.ndarray | None:
    """Returns the groups of devices that send arrays to one another, each in a row."""
    text = instruction.rest
    match = _NAMED.search(text)
    if match:
        sizes = {key: int(size) for key, size in re.findall(r"'([^']+)'=(\d+)", match[1])}
        # A part of an axis, such as 'data':(1)2, counts as the axis.
        own = [list(sizes).index(key) for key in re.findall(r"'([^']+)'", match[2])]
        shape = tuple(sizes.values())
        ids = np.moveaxis(np.arange(math.prod(shape)).reshape(shape), own, range(-len(own), 0))
        ids = ids.reshape(-1, math.prod(shape[axis] for axis in own))
        return ids if ids.size == devices else None
    match = _IOTA.search(text)
    if match:
        shape = tuple(map(int, match[3].split(",")))
        ids = np.arange(math.prod(shape)).reshape(shape)
        ids = ids.transpose(tuple(map(int, match[4].split(",")))) if match[4] else ids
        return ids.reshape(-1, int(match[2])) if ids.size == devices else None
    match = _LISTED.search(text)
    if match is None:
        return None
    rows = [list(map(int, row.split(","))) for row in re.findall(r"\{([\d,]+)\}", match[1] or "")]
    if not rows:
        return np.arange(devices)[None]
    is_known = len({len(row) for row in rows}) == 1 and max(map(max, rows)) < devices
    return np.array(rows) if is_known else None
