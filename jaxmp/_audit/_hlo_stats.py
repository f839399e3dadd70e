"""What a compiled program runs: matrix products, attention kernels, collectives, memory."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from jaxmp._audit._compile import Compiled
from jaxmp._audit._gpu_rows import AttentionRow, CollectiveRow, Compilation, GemmRow, MemoryRow
from jaxmp._core._hlo import Computation, Instruction, Program, Shape, Step
from jaxmp._core._jaxprs import Path, phase_of
from jaxmp._core._locations import Lines, module_of
from jaxmp._core._matmuls import attention_flops

# ---------------------------------------------------------------------------
# Where an instruction comes from
# ---------------------------------------------------------------------------

_JIT = re.compile(r"\bjit\([^()]*\)(?:/|$)")
_TRANSFORM = re.compile(r"\b[\w.]+\(|\)")


class Origins:
    """Module, pass and line of instructions."""

    def __init__(self, program: Program, names: dict[Path, None], root: Path) -> None:
        self._program, self._known, self._root = program, names, root
        self._lines = Lines()

    def names(self, op_name: str) -> Path:
        """The scopes in a name stack that the traced program knows; XLA adds names of its own."""
        found: Path = ()
        parts = _TRANSFORM.sub("", _JIT.sub("", op_name)).split("/")
        # A backward pass inside a rematerialised region names the way there twice.
        for name in parts[:-1]:
            if (*found, name) in self._known:
                found = (*found, name)
        return found

    def of(self, instruction: Instruction) -> tuple[str, str, str, int]:
        """(module, phase, file, line)."""
        op_name = instruction.op_name
        file, line = self._lines.first_own(self._program.frames(instruction))
        return module_of(self.names(op_name), self._root), phase_of(op_name), file, line


# ---------------------------------------------------------------------------
# Matrix products
# ---------------------------------------------------------------------------

_CONVOLUTIONS = ("__cudnn$conv",)
_BLOCK_SCALED = "__cudnn$blockScaledDot"
_ALGORITHM = re.compile(r"dot_([a-z0-9]+)_", re.I)
_PLACED = frozenset({"bitcast", "copy", "transpose", "reshape", "convert"})
# What scales, clips or takes the sign of a quantised operand leaves it one.
_SCALED = frozenset({"multiply", "divide", "broadcast", "clamp", "select", "pad", "slice"})
_SCALED |= {"abs", "negate", "maximum", "minimum"}


class _Product(NamedTuple):
    lhs: str
    rhs: str
    out: str
    kernel: str
    was_fp8: str
    flops: int
    # What has the name stack.
    named: Instruction


def _parts(program: Program, step: Step) -> Iterator[tuple[Computation, Instruction]]:
    """A kernel, or what is inside of a fusion: library calls stand there too, beside slices."""
    one = step.instruction
    if one.opcode in ("fusion", "fusion-start"):
        yield from _fused(program, one)
    else:
        yield step.computation, one


def _fused(program: Program, fusion: Instruction) -> Iterator[tuple[Computation, Instruction]]:
    computation = program.inside(fusion)
    if computation is None:
        return
    for inner in computation.instructions.values():
        yield computation, inner
        if inner.opcode == "fusion":
            yield from _fused(program, inner)


def _product(
    program: Program, step: Step, inside: Computation, one: Instruction
) -> _Product | None:
    """The matrix product that an instruction is, if it is one."""
    target = one.attribute("custom_call_target") if one.opcode == "custom-call" else ""
    if target.startswith("__cublas$"):
        return _cublas(program, step, inside, one)
    if target.startswith(_CONVOLUTIONS):
        return _cudnn_convolution(inside, one, target)
    if target == _BLOCK_SCALED:
        return _block_scaled(inside, one)
    if one.opcode in ("dot", "convolution", "scaled-dot"):
        return _plain(program, step, inside, one)
    return None


def _kernel(holder: Instruction) -> str:
    """Who runs a product that is part of a fusion."""
    check = str(holder.config.get("fusion_backend_config", {}).get("check", ""))
    return "cudnn" if "cudnn" in check else "triton" if "triton" in check else "xla"


def _plain(program: Program, step: Step, inside: Computation, dot: Instruction) -> _Product:
    lhs, rhs = (_shape(inside, name) for name in dot.operands[:2])
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
    was = "" if _is_fp8(dtypes) else _was_fp8(program, step, dot, inside)
    named = dot if dot.op_name else step.instruction
    return _Product(*dtypes, out.dtype, _kernel(step.instruction), was, flops, named)


def _cublas(program: Program, step: Step, inside: Computation, one: Instruction) -> _Product:
    config = one.config.get("gemm_backend_config", {})
    lhs, rhs = (_shape(inside, name) for name in one.operands[:2])
    axes = config.get("dot_dimension_numbers", {}).get("lhs_contracting_dimensions", ())
    flops = 2 * one.shapes[0].elements * math.prod(lhs.sizes[int(axis)] for axis in axes)
    asked = config.get("precision_config", {})
    precision = ",".join(asked.get("operand_precision", ())).lower()
    algorithm = str(asked.get("algorithm", "")).lower().removeprefix("alg_")
    dtypes = _runs_in(lhs.dtype, precision, algorithm), _runs_in(rhs.dtype, precision, algorithm)
    fp8 = _is_fp8(dtypes)
    was = "" if fp8 else _was_fp8(program, step, one, inside)
    kernel = "cublas fp8" if fp8 else "cublas"
    return _Product(*dtypes, one.shapes[0].dtype, kernel, was, flops, one)


def _cudnn_convolution(inside: Computation, one: Instruction, target: str) -> _Product:
    """FLOPs of the forward pass's sums, which both backward passes have too."""
    first, second = (_shape(inside, name) for name in one.operands[:2])
    result = one.shapes[0]
    kernel, out = second, result
    if target.endswith("convBackwardInput"):
        out = first
    elif target.endswith("convBackwardFilter"):
        kernel, out = result, second
    labels = one.attribute("dim_labels").partition("_")[2].partition("-")[0]
    flops = 2 * out.elements * kernel.elements // max(1, kernel.sizes[labels.index("o")])
    dtypes = _runs_in(first.dtype, "", ""), _runs_in(second.dtype, "", "")
    return _Product(*dtypes, result.dtype, "cudnn", "", flops, one)


def _block_scaled(inside: Computation, one: Instruction) -> _Product:
    """[B, M, K] and [B, N, K], with scales per block along K."""
    lhs, rhs = (_shape(inside, name) for name in one.operands[:2])
    flops = 2 * one.shapes[0].elements * lhs.sizes[-1]
    return _Product(lhs.dtype, rhs.dtype, one.shapes[0].dtype, "cudnn mx", "", flops, one)


def _shape(computation: Computation, name: str) -> Shape:
    return computation.instructions[name].shapes[0]


def _is_fp8(dtypes: tuple[str, str]) -> bool:
    return all(dtype.startswith("float8") for dtype in dtypes)


def _runs_in(dtype: str, precision: str, algorithm: str) -> str:
    """The dtype in which operands are multiplied.

    FP32 operands are rounded to TF32 by every card since the A100, unless the product asks for
    precision "highest" (XLA, `GemmConfig`); an algorithm says for itself.
    """
    asked = _ALGORITHM.match(algorithm)
    if asked:
        name = asked[1].lower()
        times = re.search(r"_(x\d)$", algorithm, re.I)
        plain = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}.get(name, name)
        return plain + (f"_{times[1].lower()}" if times else "")
    if dtype == "float32" and "highest" not in precision:
        return "tf32"
    return dtype


class _Value(NamedTuple):
    """A name in a computation; `holder` is the fusion of the step's computation around it."""

    computation: Computation
    name: str
    holder: Instruction | None


def _was_fp8(program: Program, step: Step, dot: Instruction, inside: Computation) -> str:
    """The FP8 dtype that an operand was cast up from, on its way through element-wise work."""
    holder = step.instruction if inside is not step.computation else None
    waiting = [_Value(inside, name, holder) for name in dot.operands[:2]]
    seen: set[tuple[str, str]] = set()
    while waiting and len(seen) < 200:
        value = waiting.pop()
        one = value.computation.instructions.get(value.name)
        if one is None or (value.computation.name, value.name) in seen:
            continue
        seen.add((value.computation.name, value.name))
        if len(one.shapes) == 1 and one.shapes[0].dtype.startswith("float8"):
            return one.shapes[0].dtype
        waiting += _sources(program, step, value, one)
    return ""


def _sources(program: Program, step: Step, value: _Value, one: Instruction) -> list[_Value]:
    """What a value is, in other numbers: nothing if a product, a sum or another device made it."""
    holder = value.holder
    if one.opcode == "parameter" and holder is not None:
        number = int(one.rest.partition(")")[0])
        if number < len(holder.operands) and holder.name in step.computation.instructions:
            return [_Value(step.computation, holder.operands[number], None)]
    elif one.opcode == "get-tuple-element":
        # Of several results, combined ones of other layers among them, only this one counts.
        (index,) = one.numbers("index")
        maker = value.computation.instructions[one.operands[0]]
        body = _simple_body(program, maker)
        if body is not None and body.root.opcode == "tuple":
            return [_Value(body, body.root.operands[index], maker)]
        if maker.opcode == "tuple":
            return [_Value(value.computation, maker.operands[index], holder)]
    elif one.opcode == "fusion":
        body = _simple_body(program, one)
        return [] if body is None else [_Value(body, body.root.name, one)]
    elif _is_elementwise(one):
        return [_Value(value.computation, operand, holder) for operand in one.operands]
    return []


def _simple_body(program: Program, fusion: Instruction) -> Computation | None:
    """The computation of a fusion that neither multiplies matrices nor sums."""
    body = program.inside(fusion) if fusion.opcode == "fusion" else None
    if body is None or any(one.opcode in ("dot", "reduce") for one in body.instructions.values()):
        return None
    return body


def _is_elementwise(one: Instruction) -> bool:
    return one.opcode in _PLACED | _SCALED


# ---------------------------------------------------------------------------
# Everything else
# ---------------------------------------------------------------------------

_COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "ragged-all-to-all",
)


def _collective(one: Instruction) -> str:
    name = one.opcode.removesuffix("-start")
    return name if name in _COLLECTIVES else ""


def read(compiled: Compiled, names: dict[Path, None], root: Path, held: list[bool]) -> Compilation:
    """Rows of a compiled program.

    Args:
      compiled: the program.
      names: every scope of the traced program.
      root: the scope that is named after the root's class.
      held: for each argument, whether an optimizer state or a loss scale holds it.
    """
    program = Program(compiled.text)
    origins = Origins(program, names, root)
    gemms: dict[tuple[Any, ...], list[int]] = {}
    attention: dict[tuple[Any, ...], list[int]] = {}
    collectives: dict[tuple[Any, ...], list[int]] = {}
    fusions, endless = 0, 0
    for step in program.steps():
        one = step.instruction
        fusions += one.opcode in ("fusion", "fusion-start")
        endless += one.opcode == "while" and "known_trip_count" not in one.config
        for inside, part in _parts(program, step):
            found = _product(program, step, inside, part)
            if found is not None:
                key = (*origins.of(found.named), *found[:5])
                _count(gemms, key, found.flops * step.times, 1)
            elif part.attribute("custom_call_target").startswith("__cudnn$fmha"):
                flops = _attention_flops(inside, part) * step.times
                _count(attention, _attention_key(origins, inside, part), step.times, flops)
            elif _collective(part):
                for number, sent in enumerate(_sent(part, inside)):
                    reader = _reader(program, origins, inside, part, number)
                    used = _is_multiplied(program, inside, part, number)
                    key = (*origins.of(reader), _collective(part), sent.dtype, used)
                    _count(collectives, key, sent.bytes * step.times, step.times)
    notes = [f"{endless} loops end by a test: each is counted once"] if endless else []
    return Compilation(
        _rows(GemmRow, ("lhs", "rhs", "out", "kernel", "was_fp8"), ("flops", "count"), gemms),
        _rows(AttentionRow, ("kernel", "dtype", "shape"), ("count", "flops"), attention),
        _rows(CollectiveRow, ("operation", "dtype", "in_matmul"), ("bytes", "count"), collectives),
        _memory(compiled.memory, program, fusions, held),
        tuple(notes),
    )


def _attention_key(origins: Origins, inside: Computation, call: Instruction) -> tuple[Any, ...]:
    target, query = call.attribute("custom_call_target"), _shape(inside, call.operands[0])
    module, phase, file, line = origins.of(call)
    phase = "backward" if "Backward" in target else phase
    return module, phase, file, line, target, query.dtype, query.sizes


def _attention_flops(inside: Computation, call: Instruction) -> int:
    config = call.config.get("cudnn_fmha_backend_config", {})
    logits = config.get("intermediate_tensor_shape", {}).get("dimensions", ())
    query, _, value = (_shape(inside, name) for name in call.operands[:3])
    if len(logits) != 4:
        return 0
    target = call.attribute("custom_call_target")
    return attention_flops(
        tuple(map(int, logits)),
        (query.sizes[-1], value.sizes[-1]),
        is_causal="CAUSAL" in str(config.get("mask_type")),
        window=int(config.get("sliding_window_length") or 0),
        backward="Backward" in target,
    )


def _count(table: dict[tuple[Any, ...], list[int]], key: tuple[Any, ...], *amounts: int) -> None:
    row = table.setdefault(key, [0] * len(amounts))
    for index, amount in enumerate(amounts):
        row[index] += amount


def _rows(
    cls: Any, keys: tuple[str, ...], sums: tuple[str, ...], table: dict[tuple[Any, ...], list[int]]
) -> tuple[Any, ...]:
    names = ("module", "phase", "file", "line", *keys, *sums)
    rows = (cls(**dict(zip(names, (*key, *row), strict=True))) for key, row in table.items())
    return tuple(sorted(rows, key=lambda row: -getattr(row, sums[0])))


def _sent(one: Instruction, computation: Computation) -> list[Shape]:
    """Of each array that a collective sends, the larger of operand and result.

    XLA combines collectives, so that one of them sends many. The start of an asynchronous one has
    its operands among its results.
    """
    operands = [s for name in one.operands for s in computation.instructions[name].shapes]
    count = len(operands)
    results = one.shapes[count:] if len(one.shapes) >= 2 * count else one.shapes
    pairs = zip(operands, results, strict=False)
    return [max(pair, key=lambda shape: shape.bytes) for pair in pairs]


def _reader(
    program: Program, origins: Origins, inside: Computation, one: Instruction, number: int
) -> Instruction:
    """Who names a module: the collective, or the first reader of one of its arrays.

    XLA names many collectives after arguments, and combined ones after all their arrays.
    """
    combined = len(one.operands) > 1
    waiting, seen = [one], 0
    while waiting and seen < 8:
        here = waiting.pop(0)
        seen += 1
        whole = combined and (here is one or here.opcode.endswith("-done"))
        if not whole and origins.names(here.op_name):
            return here
        for reader in program.readers(inside, here.name):
            picks = whole and reader.opcode == "get-tuple-element"
            if not picks or reader.numbers("index") == (number,):
                waiting.append(reader)
    return one


_MATMUL_CALLS = ("__cublas$", "__cudnn$")


def _is_multiplied(program: Program, inside: Computation, one: Instruction, number: int) -> bool:
    """Returns True if a matmul in the same computation reads an array that a collective made."""
    combined = len(one.operands) > 1
    waiting, seen = [one], {one.name}
    while waiting and len(seen) < 200:
        here = waiting.pop()
        whole = combined and (here is one or here.opcode.endswith("-done"))
        for reader in program.readers(inside, here.name):
            picks = whole and reader.opcode == "get-tuple-element"
            if reader.name in seen or (picks and reader.numbers("index") != (number,)):
                continue
            if _multiplies(program, reader):
                return True
            seen.add(reader.name)
            waiting.append(reader)
    return False


def _multiplies(program: Program, one: Instruction) -> bool:
    """Returns True for a matmul, and for a fusion that holds one."""
    if one.attribute("custom_call_target").startswith(_MATMUL_CALLS):
        return True
    if one.opcode in ("fusion", "fusion-start"):
        return any(_multiplies(program, inner) for _, inner in _fused(program, one))
    return one.opcode in ("dot", "convolution", "scaled-dot")


# ---------------------------------------------------------------------------
# Memory, and what the update moves
# ---------------------------------------------------------------------------

_VIEWS = frozenset({"bitcast", "get-tuple-element"})
_FREE = frozenset({"tuple", "parameter", "constant", "while", "conditional"})


def _memory(stats: Any, program: Program, fusions: int, held: list[bool]) -> MemoryRow:
    parameters, moved, floor = _update(program, held)
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


def _update(program: Program, held: list[bool]) -> tuple[int, int, int]:
    """(parameters, bytes moved, bytes to move at least) of what writes donated arrays."""
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
    moved = floor = 0
    read: dict[tuple[str, Shape], None] = {}
    for kernel in kernels.values():
        incoming = set(kernel.operands)
        moved += sum(shape.bytes for name in incoming for shape in entry.instructions[name].shapes)
        moved += sum(shape.bytes for shape in _written(program, kernel))
        for name in incoming:
            source = _source(entry, name)
            if source.opcode != "parameter" and source.name not in kernels:
                read |= {(name, shape): None for shape in _arrays(entry, name)}
    # Each donated array is read and written; gradients and the like come from elsewhere.
    floor = sum(2 * arguments[argument].shapes[0].bytes for argument in donated.values())
    floor += sum(shape.bytes for _, shape in read)
    own = {a for a in donated.values() if a >= len(held) or not held[a]}
    return sum(arguments[a].shapes[0].elements for a in own), moved, floor


def _is_floating_array(shape: Shape) -> bool:
    return shape.dtype.startswith(("float", "bfloat")) and shape.elements > 1


def _arrays(entry: Computation, name: str) -> list[Shape]:
    return [shape for shape in entry.instructions[name].shapes if shape.elements > 1]


def _written(program: Program, kernel: Instruction) -> tuple[Shape, ...]:
    """What a kernel writes; the start of an asynchronous one lists its operands too."""
    inside = program.inside(kernel)
    return kernel.shapes if inside is None else inside.root.shapes


def _source(computation: Computation, name: str) -> Instruction:
    """What computes a value, seen through what moves no memory."""
    one = computation.instructions[name]
    while one.operands and (one.opcode in _VIEWS or one.opcode.endswith("-done")):
        one = computation.instructions[one.operands[0]]
    return one


def _add_writers(entry: Computation, name: str, kernels: dict[str, Instruction]) -> None:
    """The kernel that makes a result; of a copy, what is copied too."""
    one = _source(entry, name)
    while one.opcode not in _FREE and one.name not in kernels:
        kernels[one.name] = one
        if one.opcode != "copy":
            return
        one = _source(entry, one.operands[0])
