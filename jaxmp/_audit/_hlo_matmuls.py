"""Matmuls and convolutions of a compiled program: their dtypes, FLOPs and kernels."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

from jaxmp._audit._hlo_flow import DataFlow, Value
from jaxmp._core._hlo import Computation, Instruction, Program, Shape, Step

_CONVOLUTIONS = ("__cudnn$conv",)
_BLOCK_SCALED = "__cudnn$blockScaledDot"
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


def matmul_of_instruction(
    flow: DataFlow, step: Step, inside: Computation, instruction: Instruction
) -> HloMatmul | None:
    """Returns the matmul or convolution of an instruction; None for other instructions."""
    target = (
        instruction.attribute("custom_call_target") if instruction.opcode == "custom-call" else ""
    )
    if target.startswith("__cublas$"):
        return _cublas(flow, inside, instruction)
    if target.startswith(_CONVOLUTIONS):
        return _cudnn_convolution(inside, instruction, target)
    if target == _BLOCK_SCALED:
        return _block_scaled(inside, instruction)
    if instruction.opcode in ("dot", "convolution", "scaled-dot"):
        return _plain(flow, step, inside, instruction)
    return None


def _kernel(holder: Instruction) -> str:
    """Returns the library that runs a matmul inside of a fusion."""
    kind = str(holder.config.get("fusion_backend_config", {}).get("kind", ""))
    return "cudnn" if "cudnn" in kind else "triton" if "triton" in kind else "xla"


def _plain(flow: DataFlow, step: Step, inside: Computation, dot: Instruction) -> HloMatmul:
    lhs, rhs = (shape_of(inside, name) for name in dot.operands[:2])
    out = dot.shapes[0]
    if dot.opcode == "convolution":
        labels = dot.attribute("dim_labels").partition("_")[2].partition("-")[0]
        flops = 2 * out.elements * rhs.elements // max(1, rhs.sizes[labels.index("o")])
    else:
        inner = math.prod(lhs.sizes[axis] for axis in dot.numbers("lhs_contracting_dims"))
        flops = 2 * out.elements * inner
    precision = dot.attribute("operand_precision")
    algorithm = dot.attribute("algorithm")
    dtypes = _runs_in(lhs.dtype, precision, algorithm), _runs_in(rhs.dtype, precision, algorithm)
    was_fp8 = "" if _is_fp8(dtypes) else _was_fp8(flow, inside, dot)
    named = dot if dot.op_name else step.instruction
    return HloMatmul(*dtypes, out.dtype, _kernel(step.instruction), was_fp8, flops, named)


def _cublas(flow: DataFlow, inside: Computation, instruction: Instruction) -> HloMatmul:
    config = instruction.config.get("gemm_backend_config", {})
    lhs, rhs = (shape_of(inside, name) for name in instruction.operands[:2])
    axes = config.get("dot_dimension_numbers", {}).get("lhs_contracting_dimensions", ())
    flops = 2 * instruction.shapes[0].elements * math.prod(lhs.sizes[int(axis)] for axis in axes)
    settings = config.get("precision_config", {})
    precision = ",".join(settings.get("operand_precision", ())).lower()
    algorithm = str(settings.get("algorithm", "")).lower().removeprefix("alg_")
    dtypes = _runs_in(lhs.dtype, precision, algorithm), _runs_in(rhs.dtype, precision, algorithm)
    fp8 = _is_fp8(dtypes)
    was_fp8 = "" if fp8 else _was_fp8(flow, inside, instruction)
    kernel = "cublas fp8" if fp8 else "cublas"
    return HloMatmul(*dtypes, instruction.shapes[0].dtype, kernel, was_fp8, flops, instruction)


def _cudnn_convolution(inside: Computation, instruction: Instruction, target: str) -> HloMatmul:
    """Returns a convolution of cuDNN. Its backward passes have the FLOPs of the forward pass."""
    first, second = (shape_of(inside, name) for name in instruction.operands[:2])
    result = instruction.shapes[0]
    kernel, out = second, result
    if target.endswith("convBackwardInput"):
        out = first
    elif target.endswith("convBackwardFilter"):
        kernel, out = result, second
    labels = instruction.attribute("dim_labels").partition("_")[2].partition("-")[0]
    flops = 2 * out.elements * kernel.elements // max(1, kernel.sizes[labels.index("o")])
    dtypes = _runs_in(first.dtype, "", ""), _runs_in(second.dtype, "", "")
    return HloMatmul(*dtypes, result.dtype, "cudnn", "", flops, instruction)


def _block_scaled(inside: Computation, instruction: Instruction) -> HloMatmul:
    """Returns a matmul of `[B, M, K]` and `[B, N, K]` with scales per block along K."""
    lhs, rhs = (shape_of(inside, name) for name in instruction.operands[:2])
    flops = 2 * instruction.shapes[0].elements * lhs.sizes[-1]
    return HloMatmul(
        lhs.dtype, rhs.dtype, instruction.shapes[0].dtype, "cudnn mx", "", flops, instruction
    )


def shape_of(computation: Computation, name: str) -> Shape:
    return computation.instructions[name].shapes[0]


def _is_fp8(dtypes: tuple[str, str]) -> bool:
    return all(dtype.startswith("float8") for dtype in dtypes)


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
