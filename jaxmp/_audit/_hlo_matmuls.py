"""Matmuls and convolutions of a compiled program: their dtypes, FLOPs and kernels."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from jaxmp._audit._hlo_flow import DataFlow, Value
from jaxmp._core._hlo import Computation, Instruction, Program, Shape, Step

_CONVOLUTIONS = ("__cudnn$conv",)
_BLOCK_SCALED = "__cudnn$blockScaledDot"
_WINDOW = re.compile(r"[{ ](size|stride|pad|lhs_dilate|rhs_dilate)=([-\dx_]+)")
_ALGORITHM = re.compile(r"dot_([a-z0-9]+)_", re.I)
_MOVES = frozenset({"bitcast", "copy", "transpose", "reshape", "convert"})
# Scaling and clipping do not change that an operand is quantized.
_SCALES = frozenset({"multiply", "divide", "broadcast", "clamp", "select", "pad", "slice"})
_SCALES |= {"abs", "negate", "maximum", "minimum"}
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


def parts(program: Program, step: Step) -> Iterator[tuple[Computation, Instruction]]:
    """Yields a kernel, or the instructions of a fusion, which may contain library calls."""
    instruction = step.instruction
    if instruction.opcode in ("fusion", "fusion-start"):
        yield from fused(program, instruction)
    else:
        yield step.computation, instruction


def fused(program: Program, fusion: Instruction) -> Iterator[tuple[Computation, Instruction]]:
    computation = program.inside(fusion)
    if computation is None:
        return
    for inner in computation.instructions.values():
        yield computation, inner
        if inner.opcode == "fusion":
            yield from fused(program, inner)


class _Kernel(NamedTuple):
    """Library and FLOPs of a matmul, and the settings that determine its dtypes."""

    name: str
    flops: int
    precision: str = ""
    algorithm: str = ""


def matmul_of_instruction(
    flow: DataFlow, step: Step, inside: Computation, instruction: Instruction
) -> HloMatmul | None:
    """Returns the matmul or convolution of an instruction; None for other instructions."""
    kernel = _kernel_of(step, inside, instruction)
    if kernel is None:
        return None
    lhs, rhs = (
        _runs_in(shape_of(inside, name).dtype, kernel.precision, kernel.algorithm)
        for name in instruction.operands[:2]
    )
    is_fp8 = lhs.startswith("float8") and rhs.startswith("float8")
    name = "cublas fp8" if is_fp8 and kernel.name == "cublas" else kernel.name
    was_fp8 = "" if is_fp8 else _was_fp8(flow, inside, instruction)
    named = instruction if instruction.op_name else step.instruction
    result = instruction.shapes[0].dtype
    return HloMatmul(lhs, rhs, result, name, was_fp8, kernel.flops, named)


def _kernel_of(step: Step, inside: Computation, instruction: Instruction) -> _Kernel | None:
    target, opcode = instruction.attribute("custom_call_target"), instruction.opcode
    if target.startswith("__cublas$"):
        return _cublas(inside, instruction)
    if target.startswith(_CONVOLUTIONS):
        return _Kernel("cudnn", _convolution_flops(inside, instruction, target))
    if target == _BLOCK_SCALED:
        # The operands are `[B, M, K]` and `[B, N, K]`, with scales per block along K.
        inner = shape_of(inside, instruction.operands[0]).sizes[-1]
        return _Kernel("cudnn mx", 2 * instruction.shapes[0].elements * inner)
    if opcode not in ("dot", "convolution", "scaled-dot"):
        return None
    if opcode == "convolution":
        flops = _convolution_flops(inside, instruction, "")
    else:
        flops = _dot_flops(inside, instruction, instruction.numbers("lhs_contracting_dims"))
    # The library that runs a matmul inside of a fusion.
    kind = str(step.instruction.config.get("fusion_backend_config", {}).get("kind", ""))
    name = "cudnn" if "cudnn" in kind else "triton" if "triton" in kind else "xla"
    settings = instruction.attribute("operand_precision"), instruction.attribute("algorithm")
    return _Kernel(name, flops, *settings)


def _cublas(inside: Computation, instruction: Instruction) -> _Kernel:
    config = instruction.config.get("gemm_backend_config", {})
    axes = config.get("dot_dimension_numbers", {}).get("lhs_contracting_dimensions", ())
    settings = config.get("precision_config", {})
    precision = ",".join(settings.get("operand_precision", ())).lower()
    algorithm = str(settings.get("algorithm", "")).lower().removeprefix("alg_")
    flops = _dot_flops(inside, instruction, map(int, axes))
    return _Kernel("cublas", flops, precision, algorithm)


def _dot_flops(inside: Computation, instruction: Instruction, contracted: Iterable[int]) -> int:
    sizes = shape_of(inside, instruction.operands[0]).sizes
    return 2 * instruction.shapes[0].elements * math.prod(sizes[axis] for axis in contracted)


def _convolution_flops(inside: Computation, instruction: Instruction, target: str) -> int:
    """Returns the FLOPs of a convolution; backward passes of cuDNN have those of the forward."""
    first, kernel = (shape_of(inside, name) for name in instruction.operands[:2])
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


def shape_of(computation: Computation, name: str) -> Shape:
    return computation.instructions[name].shapes[0]


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


def _was_fp8(flow: DataFlow, inside: Computation, dot: Instruction) -> str:
    """Returns the FP8 dtype that an operand had before casts and elementwise operations, or ""."""
    for name in dot.operands[1::-1]:
        for value in flow.before(Value(inside, inside.instructions[name]), _is_scaled_copy):
            shapes = value.instruction.shapes
            if len(shapes) == 1 and shapes[0].dtype.startswith("float8"):
                return shapes[0].dtype
    return ""


def _is_scaled_copy(value: Value) -> bool:
    """Returns True unless a matmul, a sum or another device computes a value."""
    return value.instruction.opcode in _MOVES | _SCALES | _CONTAINERS
