"""Data flow and matmuls of a compiled program: their dtypes, FLOPs and kernels."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from jaxmp import _core
from jaxmp._tools.audit._hlo import SCALES, Computation, Instruction, Program, Step

_FUSIONS = frozenset({"fusion", "fusion-start"})
# Instructions that execute a computation as a part of the program.
_CALLS = _FUSIONS | {"call", "async-start", "while", "conditional"}
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

    @functools.cached_property
    def readers(self) -> dict[object, list[Value]]:
        """Key of an array -> the arrays that have it among their `makers`."""
        readers: dict[object, list[Value]] = {}
        for computation in self.program.computations.values():
            for instruction in computation.instructions.values():
                for number in _numbers(instruction):
                    value = Value(computation, instruction, number)
                    for maker, _ in self.makers(value):
                        readers.setdefault(maker.key, []).append(value)
        return readers

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
        number = int(instruction.value)
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
            for value in self.readers.get(waiting.pop().key, ()):
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
                is_updated = is_earlier and self._is_made_by_optimizer(value)
                if not (is_updated or value.key in seen or value.elements == 1):
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


def _numbers(instruction: Instruction) -> list[int | None]:
    """Returns the numbers of the arrays that an instruction makes."""
    if instruction.opcode == "tuple" or _sends_several(instruction):
        return [*range(len(instruction.operands))]
    count = len(instruction.shapes)
    return [None, *range(count)] if count > 1 else [None]


def _sends_several(instruction: Instruction) -> bool:
    """Returns True for a collective, which has a result for each operand."""
    name = instruction.opcode.removesuffix("-start")
    return len(instruction.operands) > 1 and name.startswith(
        ("all-", "reduce-scatter", "collective-", "ragged-")
    )


_CONVOLUTIONS = ("__cudnn$conv",)
_BLOCK_SCALED = "__cudnn$blockScaledDot"
_WINDOW = re.compile(r"[{ ](size|stride|pad|lhs_dilate|rhs_dilate)=([-\dx_]+)")
_ALGORITHM = re.compile(r"dot_([a-z0-9]+)_", re.I)
_MOVES = _core.named("bitcast copy transpose reshape convert broadcast pad slice")
_CONTAINERS = frozenset({"fusion", "tuple", "get-tuple-element", "parameter"})


class HloMatmul(NamedTuple):
    """Matmul or convolution of a compiled program."""

    lhs: str
    rhs: str
    out: str
    kernel: str
    was_fp8: str
    flops: int
    # The instruction with the name stack.
    named: Instruction


def parts(program: Program, step: Step) -> Iterator[Step]:
    """Yields a kernel, or the instructions of a fusion, which may contain library calls."""
    inside = program.inside(step.instruction)
    # `Program.steps` itself enters the other instructions that call a computation.
    if inside is None or step.instruction.opcode not in _FUSIONS:
        yield step
        return
    for inner in inside.instructions.values():
        part = step._replace(instruction=inner, computation=inside)
        yield part
        if inner.opcode == "fusion":
            yield from parts(program, part)


class _Kernel(NamedTuple):
    """Library and FLOPs of a matmul, and the settings that determine its dtypes."""

    name: str
    flops: int
    precision: str = ""
    algorithm: str = ""


def matmul_of_instruction(flow: DataFlow, step: Step, part: Step) -> HloMatmul | None:
    """Returns the matmul or convolution of a part of a step; None for other instructions."""
    instruction, kernel = part.instruction, _kernel_of(step, part)
    if kernel is None:
        return None
    settings = kernel.precision, kernel.algorithm
    lhs, rhs = (_runs_in(part.shape(n).dtype, *settings) for n in (0, 1))
    is_fp8 = lhs.startswith("float8") and rhs.startswith("float8")
    name = "cublas fp8" if is_fp8 and kernel.name == "cublas" else kernel.name
    was_fp8 = "" if is_fp8 else _was_fp8(flow, part)
    named = instruction if instruction.op_name else step.instruction
    return HloMatmul(lhs, rhs, instruction.shapes[0].dtype, name, was_fp8, kernel.flops, named)


def _kernel_of(step: Step, part: Step) -> _Kernel | None:
    instruction = part.instruction
    target, opcode = instruction.attribute("custom_call_target"), instruction.opcode
    if target.startswith("__cublas$"):
        return _cublas(part)
    if target.startswith(_CONVOLUTIONS):
        return _Kernel("cudnn", _convolution_flops(part, target))
    if target == _BLOCK_SCALED:
        # The operands are `[B, M, K]` and `[B, N, K]`, with scales per block along K.
        return _Kernel("cudnn mx", _dot_flops(part, [-1]))
    if opcode not in _MATMULS:
        return None
    if opcode == "convolution":
        flops = _convolution_flops(part, "")
    else:
        flops = _dot_flops(part, instruction.numbers("lhs_contracting_dims"))
    # The library that runs a matmul inside of a fusion.
    kind = str(step.instruction.config.get("fusion_backend_config", {}).get("kind", ""))
    name = "cudnn" if "cudnn" in kind else "triton" if "triton" in kind else "xla"
    settings = instruction.attribute("operand_precision"), instruction.attribute("algorithm")
    return _Kernel(name, flops, *settings)


def _cublas(part: Step) -> _Kernel:
    config = part.instruction.config.get("gemm_backend_config", {})
    axes = config.get("dot_dimension_numbers", {}).get("lhs_contracting_dimensions", ())
    settings = config.get("precision_config", {})
    precision = ",".join(settings.get("operand_precision", ())).lower()
    algorithm = str(settings.get("algorithm", "")).lower().removeprefix("alg_")
    return _Kernel("cublas", _dot_flops(part, map(int, axes)), precision, algorithm)


def _dot_flops(part: Step, contracted: Iterable[int]) -> int:
    sizes = part.shape(0).sizes
    return 2 * part.instruction.shapes[0].elements * math.prod(sizes[axis] for axis in contracted)


def _convolution_flops(part: Step, target: str) -> int:
    """Returns the FLOPs of a convolution; backward passes of cuDNN have those of the forward."""
    instruction, first, kernel = part.instruction, part.shape(0), part.shape(1)
    out = instruction.shapes[0]
    if target.endswith("convBackwardInput"):
        out = first
    elif target.endswith("convBackwardFilter"):
        kernel, out = out, kernel
    lhs, rhs, result = re.split("_|->", instruction.attribute("dim_labels"))
    flops = 2 * out.elements * kernel.elements // max(1, kernel.sizes[rhs.index("o")])
    if target:
        return flops
    # XLA for TPUs writes batch dimensions as spatial ones, and pads or dilates the input such that
    # each position of the result meets one position of the kernel.
    window = {key: text.split("x") for key, text in _WINDOW.findall(instruction.rest)}
    for axis, size in enumerate(map(int, window.get("size", ()))):
        label = str(axis)
        count = out.sizes[result.index(label)]
        stride, dilation, spread = (
            int(window[key][axis]) if key in window else 1
            for key in ("stride", "lhs_dilate", "rhs_dilate")
        )
        low = int(window["pad"][axis].partition("_")[0]) if "pad" in window else 0
        positions = np.add.outer(stride * np.arange(count) - low, spread * np.arange(size))
        last = dilation * (first.sizes[lhs.index(label)] - 1)
        met = (positions >= 0) & (positions <= last) & (positions % dilation == 0)
        flops //= size if met.sum() == count else 1
    return flops


def _runs_in(dtype: str, precision: str, algorithm: str) -> str:
    """Returns the dtype in which operands are multiplied.

    GPUs from the A100 on round FP32 operands to TF32, unless the matmul has precision "highest"
    (XLA, `GemmConfig`) or an algorithm, which specifies the dtype.
    """
    algorithm_match = _ALGORITHM.match(algorithm)
    if algorithm_match:
        name = algorithm_match[1].lower()
        times = re.search(r"_(x\d)$", algorithm, re.I)
        plain = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}.get(name, name)
        return plain + (f"_{times[1].lower()}" if times else "")
    if dtype == "float32" and "highest" not in precision:
        return "tf32"
    return dtype


def _was_fp8(flow: DataFlow, dot: Step) -> str:
    """Returns the FP8 dtype that an operand had before casts and elementwise operations, or ""."""
    for operand in dot.operands[1::-1]:
        # Not through a matmul, a sum or another device.
        is_copy = lambda value: value.instruction.opcode in _MOVES | SCALES | _CONTAINERS
        for value in flow.before(Value(dot.computation, operand), is_copy):
            shapes = value.instruction.shapes
            if len(shapes) == 1 and shapes[0].dtype.startswith("float8"):
                return shapes[0].dtype
    return ""
