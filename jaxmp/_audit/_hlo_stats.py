"""Rows of a compiled program: matmuls, attention kernels, collectives and memory."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from jaxmp._audit._compile import Compiled
from jaxmp._audit._gpu_rows import AttentionRow, CollectiveRow, Compilation, GemmRow
from jaxmp._audit._hlo_collectives import (
    Contents,
    collective_name,
    mesh_axes,
    named_reader,
    sent_arrays,
)
from jaxmp._audit._hlo_matmuls import matmul_of_instruction, parts, shape_of
from jaxmp._audit._hlo_memory import memory_row
from jaxmp._core._hlo import Computation, Instruction, Program
from jaxmp._core._jaxprs import Path, phase_of
from jaxmp._core._locations import Lines, module_of
from jaxmp._core._matmuls import attention_flops

_UNKNOWN_LOOPS = (
    "{} loops of the compiled program have an unknown number of iterations; one is counted for each"
)

# ---------------------------------------------------------------------------
# Origins
# ---------------------------------------------------------------------------

_JIT = re.compile(r"\bjit\([^()]*\)(?:/|$)")
_TRANSFORM = re.compile(r"\b[\w.]+\(|\)")


class Origins:
    """Finds module, pass and source line of instructions."""

    def __init__(self, program: Program, names: dict[Path, None], root: Path) -> None:
        self._program, self._known, self._root = program, names, root
        self._lines = Lines()

    def names(self, op_name: str) -> Path:
        """Returns the scopes of a name stack that the traced program contains.

        XLA adds other names.
        """
        path: Path = ()
        parts = _TRANSFORM.sub("", _JIT.sub("", op_name)).split("/")
        # Backward passes inside of a recomputed region contain the scopes of the region twice.
        for name in parts[:-1]:
            if (*path, name) in self._known:
                path = (*path, name)
        return path

    def of(self, instruction: Instruction) -> tuple[str, str, str, int]:
        """Returns (module, pass, file, line)."""
        op_name = instruction.op_name
        file, line = self._lines.first_own(self._program.frames(instruction))
        return self.module(op_name), phase_of(op_name), file, line

    def module(self, op_name: str) -> str:
        """Returns the module path of a name stack; "" for the root."""
        return module_of(self.names(op_name), self._root)


# ---------------------------------------------------------------------------
# Rows
# ---------------------------------------------------------------------------


def read_program(
    compiled: Compiled,
    names: dict[Path, None],
    root: Path,
    in_optimizer: list[bool],
    is_weight: list[bool],
) -> Compilation:
    """Returns the rows of a compiled program.

    Args:
      compiled: the program.
      names: every scope of the traced program.
      root: the scope that is named after the root's class.
      in_optimizer: for each argument, True if an optimizer state contains it.
      is_weight: for each argument, True if it may be a parameter.
    """
    program = Program(compiled.text)
    contents = Contents(program, is_weight)
    origins = Origins(program, names, root)
    gemms: dict[tuple[Any, ...], list[int]] = {}
    attention: dict[tuple[Any, ...], list[int]] = {}
    collectives: dict[tuple[Any, ...], list[int]] = {}
    fusions, endless = 0, 0
    for step in program.steps():
        instruction = step.instruction
        fusions += instruction.opcode in ("fusion", "fusion-start")
        endless += instruction.opcode == "while" and "known_trip_count" not in instruction.config
        for inside, part in parts(program, step):
            matmul = matmul_of_instruction(program, step, inside, part)
            if matmul is not None:
                dtypes = [_actual(name, compiled) for name in matmul[:2]]
                key = (*origins.of(matmul.named), *dtypes, *matmul[2:5])
                _count(gemms, key, matmul.flops * step.times, step.times)
            elif part.attribute("custom_call_target").startswith("__cudnn$fmha"):
                flops = _attention_flops(inside, part) * step.times
                _count(attention, _attention_key(origins, inside, part), step.times, flops)
            elif collective_name(part):
                for number, sent in enumerate(sent_arrays(part, inside)):
                    reader = named_reader(program, origins, inside, part, number)
                    content = contents.of(inside, part, number)
                    key = (*origins.of(reader), collective_name(part), sent.dtype, *content)
                    key += mesh_axes(part, compiled.mesh), _is_in_outer_loop(reader.op_name)
                    _count(collectives, key, sent.bytes * step.times, step.times)
    notes = [_UNKNOWN_LOOPS.format(endless)] if endless else []
    return Compilation(
        _rows(GemmRow, ("lhs", "rhs", "out", "kernel", "was_fp8"), ("flops", "count"), gemms),
        _rows(AttentionRow, ("kernel", "dtype", "shape"), ("count", "flops"), attention),
        _rows(CollectiveRow, _COLLECTIVE_KEYS, ("bytes", "count"), collectives),
        memory_row(compiled.memory, program, fusions, in_optimizer),
        tuple(notes),
    )


_COLLECTIVE_KEYS = ("operation", "dtype", "content", "read_as", "is_kept", "in_matmul", "axes")
_COLLECTIVE_KEYS += ("in_outer_loop",)


def _actual(dtype: str, compiled: Compiled) -> str:
    """Returns the dtype in which the GPU multiplies an operand."""
    return "float32" if dtype == "tf32" and not compiled.has_tf32 else dtype


def _is_in_outer_loop(op_name: str) -> bool:
    """Returns True for a name stack with a loop outside of the differentiated function."""
    before, derivative, _ = op_name.partition("jvp(")
    return bool(derivative) and "while/" in before


def _attention_key(origins: Origins, inside: Computation, call: Instruction) -> tuple[Any, ...]:
    target, query = call.attribute("custom_call_target"), shape_of(inside, call.operands[0])
    module, phase, file, line = origins.of(call)
    phase = "backward" if "Backward" in target else phase
    return module, phase, file, line, target, query.dtype, query.sizes


def _attention_flops(inside: Computation, call: Instruction) -> int:
    config = call.config.get("cudnn_fmha_backend_config", {})
    logits = config.get("intermediate_tensor_shape", {}).get("dimensions", ())
    query, _, value = (shape_of(inside, name) for name in call.operands[:3])
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
    cls: Callable[..., Any],
    keys: tuple[str, ...],
    sums: tuple[str, ...],
    table: dict[tuple[Any, ...], list[int]],
) -> tuple[Any, ...]:
    names = ("module", "phase", "file", "line", *keys, *sums)
    rows = (cls(**dict(zip(names, (*key, *row), strict=True))) for key, row in table.items())
    return tuple(sorted(rows, key=lambda row: -getattr(row, sums[0])))
