"""Rows of a compiled program: matmuls, attention kernels, collectives and memory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from jaxmp import _programs
from jaxmp._core import Target
from jaxmp._programs import Path
from jaxmp._tools.audit import _hlo, _hlo_collectives, _hlo_kernels, _hlo_matmuls, _rows
from jaxmp._tools.audit._compile import Compiled
from jaxmp._tools.audit._hlo_collectives import ArrayContents
from jaxmp._tools.report._section import bytes_text

_VIEWS = frozenset({"bitcast", "get-tuple-element"})
_FREE = frozenset({"tuple", "parameter", "constant", "while", "conditional"})


def _update(program: _hlo.Program, in_optimizer: list[bool]) -> tuple[int, int, int]:
    """Returns (parameters, bytes moved, minimum) of the kernels that write donated arrays."""
    entry = program.entry
    arguments = entry.parameters
    shape_of = lambda argument: arguments[argument].shapes[0]
    is_array = lambda argument: shape_of(argument).is_float and shape_of(argument).elements > 1
    outputs = entry.root.operands if entry.root.opcode == "tuple" else (entry.root.name,)
    aliased = {n: argument for n, argument in program.aliased.items() if n < len(outputs)}
    donated = {n: argument for n, argument in aliased.items() if is_array(argument)}
    kernels: dict[str, _hlo.Instruction] = {}
    for number in donated:
        _add_writers(entry, outputs[number], kernels)
    moved = 0
    inputs: dict[tuple[str, _hlo.Shape], None] = {}
    for kernel in kernels.values():
        moved += _hlo_kernels.accessed(program, _hlo.Step(kernel, entry, 1))
        for name in kernel.operands:
            source, shapes = source_of(entry, name), entry.instructions[name].shapes
            if source.opcode != "parameter" and source.name not in kernels:
                inputs |= {(name, shape): None for shape in shapes if shape.elements > 1}
    # Each donated array is read and written. Other arrays, such as gradients, are read.
    floor = sum(2 * shape_of(argument).bytes for argument in donated.values())
    floor += sum(shape.bytes for _, shape in inputs)
    own = {a for a in donated.values() if a >= len(in_optimizer) or not in_optimizer[a]}
    return sum(shape_of(argument).elements for argument in own), moved, floor


def source_of(computation: _hlo.Computation, name: str) -> _hlo.Instruction:
    """Returns the instruction that computes a value, ignoring those that move no memory."""
    instruction = computation.instructions[name]
    is_view = instruction.opcode in _VIEWS or instruction.opcode.endswith("-done")
    if is_view and instruction.operands:
        return source_of(computation, instruction.operands[0])
    return instruction


def _add_writers(entry: _hlo.Computation, name: str, kernels: dict[str, _hlo.Instruction]) -> None:
    """Adds the kernel that computes a result, and for a copy also the kernel of the original."""
    instruction = source_of(entry, name)
    while instruction.opcode not in _FREE and instruction.name not in kernels:
        kernels[instruction.name] = instruction
        if instruction.opcode != "copy":
            return
        instruction = source_of(entry, instruction.operands[0])


_UNKNOWN_LOOPS = (
    "{} loops of the compiled program have an unknown number of iterations; one is counted for each"
)

# ---------------------------------------------------------------------------
# Origins
# ---------------------------------------------------------------------------

_JIT = re.compile(r"\bjit\([^()]*\)(?:/|$)")


class Origins:
    """Finds module, pass and source line of instructions."""

    def __init__(self, program: _hlo.Program, names: dict[Path, None], root: Path) -> None:
        self.program, self._known, self._root = program, names, root
        self._lines = _programs.Lines()

    def names(self, op_name: str) -> Path:
        """Returns the scopes of a name stack that the traced program contains.

        XLA adds other names.
        """
        path: Path = ()
        # Backward passes inside of a recomputed region contain the scopes of the region twice.
        for name in _programs.scope_names(_JIT.sub("", op_name).rpartition("/")[0]):
            if (*path, name) in self._known:
                path = (*path, name)
        return path

    def of(self, instruction: _hlo.Instruction) -> dict[str, Any]:
        """Returns module, phase, file and line of an instruction, the fields of a row."""
        name = instruction.op_name
        file, line = self._lines.first_own(self.program.frames(instruction))
        module, phase = self.module(name), _programs.phase_of(name)
        return {"module": module, "phase": phase, "file": file, "line": line}

    def module(self, op_name: str) -> str:
        """Returns the module path of a name stack; "" for the root."""
        return _programs.module_of(self.names(op_name), self._root)


def _named_reader(
    origins: Origins, inside: _hlo.Computation, instruction: _hlo.Instruction, number: int
) -> _hlo.Instruction:
    """Returns the instruction whose name stack contains the module of an array.

    This is the collective, or the first reader of the array. XLA names many collectives after
    arguments, and combined collectives after all their arrays.
    """
    combined = len(instruction.operands) > 1
    waiting, seen, named = [instruction], 0, None
    while waiting and seen < 12:
        here = waiting.pop(0)
        seen += 1
        whole = combined and (here is instruction or here.opcode.endswith("-done"))
        if not whole and origins.names(here.op_name):
            named = named or here
            if origins.module(here.op_name):
                return here
        if _hlo_matmuls.is_matmul(here):
            continue
        for reader in inside.readers[here.name]:
            picks = whole and reader.opcode == "get-tuple-element"
            if not picks or reader.numbers("index") == (number,):
                waiting.append(reader)
    return named or instruction


# ---------------------------------------------------------------------------
# Rows
# ---------------------------------------------------------------------------


def read_program(
    compiled: Compiled,
    names: dict[Path, None],
    root: Path,
    in_optimizer: list[bool],
    is_weight: list[bool],
) -> _rows.Compilation:
    """Returns the rows of a compiled program.

    Args:
      compiled: the program.
      names: every scope of the traced program.
      root: the scope that is named after the root's class.
      in_optimizer: for each argument, True if an optimizer state contains it.
      is_weight: for each argument, True if it may be a parameter.
    """
    program = _hlo.Program(compiled.text)
    flow, origins = ArrayContents(program, is_weight), Origins(program, names, root)
    gemms: list[_rows.GemmRow] = []
    attention: list[_rows.AttentionRow] = []
    collectives: list[_rows.CollectiveRow] = []
    endless = 0
    for step in program.steps():
        endless += program.trips(step.instruction) is None
        for part in _hlo_matmuls.parts(program, step):
            matmul = _hlo_matmuls.matmul_of_instruction(flow, step, part)
            if matmul is not None:
                gemms.append(_gemm_row(matmul, step.times, origins, compiled))
            elif fused_attention(part.instruction):
                attention.append(_attention_row(part, origins))
            elif _hlo_collectives.collective_name(part.instruction):
                collectives += _collective_rows(part, origins, flow, compiled.mesh)
    parameters, moved, floor = _update(program, in_optimizer)
    memory = _rows.MemoryRow(
        arguments=compiled.memory.argument_size_in_bytes,
        outputs=compiled.memory.output_size_in_bytes,
        aliased=compiled.memory.alias_size_in_bytes,
        temporary=compiled.memory.temp_size_in_bytes,
        parameters=parameters,
        update_bytes=moved,
        update_floor=floor,
    )
    notes = [_UNKNOWN_LOOPS.format(endless)] if endless else []
    return _rows.Compilation(
        _rows.merged(gemms, "flops", "count"),
        _rows.merged(attention, "count", "flops"),
        _rows.merged(collectives, "bytes", "count"),
        memory,
        (*notes, *_chip_notes(compiled.chip, memory, gemms)),
        origins,
        compiled,
    )


def _chip_notes(chip: Target, memory: _rows.MemoryRow, gemms: list[_rows.GemmRow]) -> Iterator[str]:
    """Yields how a program exceeds what a chip has."""
    total = memory.required
    if total > chip.usable:
        has = f"{chip.kind} has {bytes_text(chip.memory)}"
        has += f", of which JAX allocates {bytes_text(chip.usable)}" * (chip.usable < chip.memory)
        missing = bytes_text(total - chip.usable)
        yield f"the program requires {bytes_text(total)} per device, {missing} too much: {has}"
    fp8 = {row.lhs for row in gemms if row.lhs.startswith("float8")} - set(chip.native)
    if fp8:
        yield f"{chip.kind} has no FP8 units, and multiplies FP8 operands as it does bfloat16"


def _collective_rows(
    part: _hlo.Step,
    origins: Origins,
    contents: _hlo_collectives.ArrayContents,
    mesh: dict[str, int],
) -> Iterator[_rows.CollectiveRow]:
    """Yields a row for each array that a collective sends."""
    for number, sent in enumerate(_hlo_collectives.sent_arrays(part)):
        reader = _named_reader(origins, part.computation, part.instruction, number)
        before, derivative, _ = reader.op_name.partition("jvp(")
        yield _rows.CollectiveRow(
            **origins.of(reader),
            **contents.of(part, number)._asdict(),
            operation=_hlo_collectives.collective_name(part.instruction),
            dtype=sent.dtype,
            bytes=sent.bytes * part.times,
            count=part.times,
            axes=_hlo_collectives.mesh_axes(part.instruction, mesh),
            # A loop outside of the differentiated function.
            in_outer_loop=bool(derivative) and "while/" in before,
        )


def _gemm_row(
    matmul: _hlo_matmuls.HloMatmul, times: int, origins: Origins, compiled: Compiled
) -> _rows.GemmRow:
    fields = matmul._asdict()
    place = origins.of(fields.pop("named"))
    # The dtype in which the chip multiplies FP32 operands.
    rounded = {"tf32": compiled.chip.rounded_fp32}
    fields |= {side: rounded.get(fields[side], fields[side]) for side in ("lhs", "rhs")}
    fields["flops"] *= times
    return _rows.GemmRow(**place, **fields, count=times)


# Matmuls of a kernel of a TPU.
_SPLASH = {"splash_mha_fwd": 2, "splash_mha_dkv": 4, "splash_mha_dq": 3}


def fused_attention(call: _hlo.Instruction) -> str:
    """Returns the name of a kernel of fused attention; "" for other instructions."""
    target = call.attribute("custom_call_target")
    if target == "tpu_custom_call":
        return next((name for name in _SPLASH if call.name.startswith(name)), "")
    return target if target.startswith("__cudnn$fmha") else ""


def _attention_row(part: _hlo.Step, origins: Origins) -> _rows.AttentionRow:
    call, kernel = part.instruction, fused_attention(part.instruction)
    # Kernels of TPUs have the structure of the mask before the queries.
    arrays = map(part.shape, range(len(call.operands)))
    query = next(shape for shape in arrays if len(shape.sizes) >= 4)
    place: dict[str, Any] = origins.of(call) | (
        {"phase": _programs.BACKWARD} if "Backward" in kernel else {}
    )
    return _rows.AttentionRow(
        **place,
        kernel=kernel,
        dtype=query.dtype,
        shape=query.sizes,
        count=part.times,
        flops=_attention_flops(part, kernel) * part.times,
    )


def _attention_flops(part: _hlo.Step, kernel: str) -> int:
    call = part.instruction
    if kernel in _SPLASH:
        arrays = map(part.shape, range(len(call.operands)))
        query, key = [shape for shape in arrays if len(shape.sizes) == 4][:2]
        pairs = query.elements * key.sizes[-2]
        # A mask that depends on positions is causal, as far as the program shows.
        is_causal = any("q_sequence" in name for name in call.operands)
        return 2 * _SPLASH[kernel] * pairs // (2 if is_causal else 1)
    config = call.config.get("cudnn_fmha_backend_config", {})
    logits = config.get("intermediate_tensor_shape", {}).get("dimensions", ())
    if len(logits) != 4:
        return 0
    return _programs.attention_flops(
        tuple(map(int, logits)),
        (part.shape(0).sizes[-1], part.shape(2).sizes[-1]),
        is_causal="CAUSAL" in str(config.get("mask_type")),
        window=int(config.get("sliding_window_length") or 0),
        backward="Backward" in kernel,
    )
