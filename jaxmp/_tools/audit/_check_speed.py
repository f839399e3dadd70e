"""Checks of speed: copies of a compiled program, and lookups of a traced one."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

from jaxmp import _core, _programs
from jaxmp._tools.audit import _checks
from jaxmp._tools.audit._auditor import Auditor
from jaxmp._tools.audit._checks import LAYOUT, NOTE, Check, OpOccurrence, dtype_of
from jaxmp._tools.audit._dataflow import From
from jaxmp._tools.audit._hlo import Instruction, Program, Step
from jaxmp._tools.audit._hlo_kernels import accessed, kernels, results, written
from jaxmp._tools.audit._hlo_matmuls import is_matmul, parts
from jaxmp._tools.audit._hlo_stats import fused_attention, source_of
from jaxmp._tools.audit._labels import Fact
from jaxmp._tools.audit._origins import fix_wide
from jaxmp._tools.audit._rows import Compilation, Finding
from jaxmp._tools.report._section import bytes_text, counted, share_text
from jaxmp.losses._linear import chunk_rows

_NoteCheck = functools.partial(Check, severity=NOTE, needs_target="yes")
SPLIT_ATTENTION = _NoteCheck(
    id="split_attention",
    explanation="The queries, keys and values of cuDNN's attention are copied out of one array.",
    fix="query, key, value = (nn.Dense(width, name=name)(x) for name in ('query', 'key', 'value'))",
)
RECOMPUTED_PASS = _NoteCheck(
    id="recomputed_pass",
    explanation="`nn.remat` repeats matmuls outside of loops, although the GPU has enough memory.",
    fix="# Remove nn.remat, or save results that checkpoint_name names:\n"
    "nn.remat(Block, policy=jax.checkpoint_policies.save_only_these_names('qkv', 'mlp'))",
)
STORED_LOGITS = _NoteCheck(
    id="stored_logits",
    explanation="A loss stores logits of 1,024 or more classes, which several kernels read.",
    fix="loss = jaxmp.losses.linear_cross_entropy(hidden, kernel, labels)",
)
RESIDUAL_COPY = _NoteCheck(
    id="residual_copy",
    explanation="A matmul adds its result to an array that XLA has to copy before, because it has"
    " more than two dimensions.",
    fix="shape = x.shape\nx = x.reshape(-1, shape[-1])  # before the layers that are added to it\n"
    "x = x.reshape(shape)  # after them",
)

# The least share of the bytes of all kernels that a note is about, and the number of notes.
_LEAST_SHARE, _MOST_NOTES = 0.02, 3
_LEAST_CLASSES = 1024

# A check, the facts, and the instructions that the note is about with the bytes that they move.
Note = tuple[Check, str, list[tuple[int, Instruction]]]


@SPLIT_ATTENTION.on(_checks.COMPILED)
def note_copies(program: Compilation, _: Auditor) -> Iterator[Finding]:
    """Reports the largest avoidable copies of a program for a GPU, the largest first."""
    hlo, chip = program.origins.program, program.compiled.chip
    run = list(kernels(hlo)) if chip.platform == "gpu" else []
    total = sum(step.times * accessed(hlo, step) for step in run)
    free = chip.usable - program.memory.required
    notes = [_copies(hlo, run), _residuals(hlo, run), _repetitions(hlo, run, free)]
    notes += _losses(hlo, run, chip)
    size_of = lambda note: sum(size for size, _ in note[2])
    for note in sorted(notes, key=size_of, reverse=True)[:_MOST_NOTES]:
        (check, text, sizes), saved = note, size_of(note)
        if saved >= max(_LEAST_SHARE * total, 1):
            text += f" {bytes_text(saved)}, {share_text(saved, total)} of the bytes that all"
            place = program.origins.of(max(sizes, key=lambda pair: pair[0])[1])
            del place["phase"]
            yield check.finding(f"{text} kernels move.", count=len(sizes), **place)


# ---------------------------------------------------------------------------
# Queries, keys and values
# ---------------------------------------------------------------------------

# Operations of a fusion that move values.
_MOVES = frozenset({"add", "bitcast", "convert", "copy", "reshape", "transpose"})


def _copies(program: Program, run: list[Step]) -> Note:
    """Returns the kernels that split arrays before attention or join gradients after it."""
    calls = [step for step in run if fused_attention(step.instruction)]
    sources = [source_of(c.computation, o) for c in calls for o in c.instruction.operands[:3]]
    copies = []
    for kernel, inside, times in run:
        makers = (fused_attention(source_of(inside, name)) for name in kernel.operands)
        joins = any("Backward" in maker for maker in makers)
        if joins or kernel in sources:
            size = times * _copied(program, kernel, joins)
            copies += [(size, results(program, kernel)[0])] * bool(size)
    text = "kernels beside cuDNN's attention copy parts of one array, or join gradients. They move"
    return SPLIT_ATTENTION, text, copies


def _copied(program: Program, kernel: Instruction, joins: bool) -> int:
    """Returns the bytes that a kernel reads and writes to split an array or to join several."""
    inside = program.inside(kernel)
    # XLA merges small matmuls and splits the result, but names these parts after the matmul.
    names = ("concatenate", "pad") if joins else ("slice", "split")
    values = () if inside is None else inside.instructions.values()
    splits = {v.name: v for v in values if v.op_name.rpartition("/")[2] in names}
    # A part of an array that is not used otherwise is not one of queries, keys and values.
    if inside is None or sum(len(v.operands) - (v.opcode == "pad") for v in splits.values()) < 2:
        return 0

    def moved(value: Instruction, is_part: bool = False) -> int:
        is_split = value.name in splits
        if value.opcode == "parameter" or not (is_split or value.opcode in _MOVES):
            return value.shapes[0].bytes * (is_part and value.opcode == "parameter")
        operands = (inside.instructions[name] for name in value.operands)
        return min(value.shapes[0].bytes, sum(moved(o, is_part or is_split) for o in operands))

    sizes = [moved(result) for result in results(program, kernel)]
    # A kernel that also sums gradients has to read them.
    return sum(sizes) * (2 if all(sizes) else 1)


# ---------------------------------------------------------------------------
# Residuals
# ---------------------------------------------------------------------------


def _residuals(program: Program, run: list[Step]) -> Note:
    """Returns the matmuls that add their results to a copy, in the memory of the copy."""
    copies = []
    for step in run:
        inside = (part.instruction for part in parts(program, step))
        sums = [m for m in inside if is_matmul(m) and "output_to_operand_aliasing" in m.rest]
        made = [source_of(step.computation, name) for name in step.instruction.operands]
        copied = (value.shapes[0] for value in made if value.opcode == "copy")
        copies += [(2 * step.times * c.bytes, m) for c in copied for m in sums if c == m.shapes[0]]
    return RESIDUAL_COPY, "matmuls add their results to copies of arrays. The copies move", copies


# ---------------------------------------------------------------------------
# Recomputation
# ---------------------------------------------------------------------------


def _repetitions(program: Program, run: list[Step], free: int) -> Note:
    """Returns the kernels that repeat the forward pass, if their results fit the free memory."""
    named = [(step, results(program, step.instruction)[0]) for step in run]
    again = [pair for pair in named if all(map(_repeats, results(program, pair[0].instruction)))]
    size = sum(written(program, step) for step, _ in again)
    inside = (part.instruction for step, _ in again for part in parts(program, step))
    has_matmul = any(map(is_matmul, inside))
    text = f"{counted(len(again), 'kernel')} repeat the forward pass. Their results would take"
    text += f" {bytes_text(size)} of memory, and {bytes_text(free)} are free. They move"
    sizes = [(step.times * accessed(program, step), first) for step, first in again]
    return RECOMPUTED_PASS, text, sizes if has_matmul and size <= free else []


def _repeats(value: Instruction) -> bool:
    is_in_loop = "while/" in value.op_name.partition("jvp(")[2]
    return _programs.phase_of(value.op_name) == _programs.RECOMPUTE and not is_in_loop


# ---------------------------------------------------------------------------
# Logits
# ---------------------------------------------------------------------------


def _losses(program: Program, run: list[Step], chip: _core.Target) -> Iterator[Note]:
    """Yields the matmuls of the logits of losses, with the bytes that the losses could save."""
    made = [part for step in run for part in parts(program, step)]
    matmuls = {v.instruction.shapes[0].sizes: v for v in made if is_matmul(v.instruction)}
    matmuls = {n: v for n, v in matmuls.items() if len(n) == 2 and n[1] >= _LEAST_CLASSES}
    for sizes, matmul in matmuls.items():
        moved = [(step, _touched(program, step, sizes)) for step in run]
        if any(size and _has_softmax(program, step, math.prod(sizes)) for step, size in moved):
            total = sum(size for _, size in moved)
            with _core.default_target(chip.name):
                saved = total - _least(matmul)
            text = f"kernels move {matmul.times * sizes[0]:,} x {sizes[1]:,} logits and their"
            text += f" gradients: {bytes_text(total)}. linear_cross_entropy saves"
            yield STORED_LOGITS, text, [(saved, matmul.instruction)]


def _touched(program: Program, step: Step, sizes: tuple[int, ...]) -> int:
    """Returns the bytes of logits and their gradients that a kernel reads and writes."""
    shapes = [shape for value in (step.instruction, *step.operands) for shape in value.shapes]
    alike = [s for s in shapes if s.sizes[-1:] == sizes[1:] and s.elements == math.prod(sizes)]
    return step.times * min(sum(s.bytes for s in alike), accessed(program, step)) if alike else 0


def _has_softmax(program: Program, step: Step, elements: int) -> bool:
    """Returns True for a kernel with exponentials of logits minus their maximum."""
    made = (part for part in parts(program, step) if part.instruction.opcode == "exponential")
    exponentials = (part for part in made if part.instruction.shapes[0].elements == elements)
    return any(part.operands[0].opcode == "subtract" for part in exponentials)


def _least(logits: Step) -> int:
    """Returns the bytes that `linear_cross_entropy` moves where another loss moves logits."""
    (rows, classes), lhs, rhs = logits.instruction.shapes[0].sizes, logits.shape(0), logits.shape(1)
    width = math.isqrt(lhs.elements * rhs.elements // (rows * classes))
    rows, size = rows * logits.times, lhs.bytes // lhs.elements
    chunks = -(-rows // chunk_rows(None, rows, classes))
    # FP32 logits are written once and read twice, as are gradients in the dtype of the operands.
    passes = 3 * (4 + size) * rows * classes
    # In a loop, each chunk reads and writes the FP32 gradient of the kernel, and two matmuls read
    # the kernel again. Hidden states are sliced, and their FP32 gradients made and updated.
    kernel = (8 * chunks + 2 * size * (chunks - 1)) * width * classes
    return passes + (kernel + (12 + 2 * size) * rows * width) * (chunks > 1)


# ---------------------------------------------------------------------------
# Lookups
# ---------------------------------------------------------------------------


WIDE_GATHER = Check(
    id="wide_gather",
    severity=NOTE,
    explanation="More rows of an FP32 table are looked up than it has, and they are cast to 16 bits"
    " afterwards. To cast the table first moves fewer bytes.",
    fix="x = table.astype(jnp.bfloat16)[tokens]",
)


class TableRows(Fact):
    """Label of the rows that were looked up in an FP32 parameter."""

    survives = LAYOUT | _core.named("select_n")

    def __init__(self, op: OpOccurrence) -> None:
        self.op = op


@WIDE_GATHER.on_operation("gather")
def label_rows(op: OpOccurrence) -> TableRows | None:
    """Labels rows of an FP32 argument."""
    table = op.operands[0]
    is_argument = bool(op.labels(From, table))
    is_lookup = dtype_of(table) == _core.FLOAT32 and is_argument and op.location.differentiated
    return TableRows(op) if is_lookup else None


@WIDE_GATHER.on_operation("convert_element_type")
def check_cast(op: OpOccurrence) -> None:
    """Reports looked-up rows that are cast to 16 bits, if to cast the table moves fewer bytes."""
    dtype, result = op.rounded, op.result
    if dtype is None:
        return
    for label in op.labels(TableRows):
        table = label.op.operands[0].aval
        # The lookup reads and writes FP32 or 16 bits; the cast reads FP32 and writes 16 bits.
        after = 14 * math.prod(result.aval.shape)
        before = 6 * math.prod(table.shape) + 4 * math.prod(result.aval.shape)
        if before < after:
            message = f"the lookup moves {bytes_text(after)} in FP32 and casts the rows to"
            message += f" {dtype.name}; to cast the table first moves {bytes_text(before)}."
            sentence = "Cast the table before the lookup"
            fix = fix_wide(sentence, label.op, [0], dtype.name)
            if "\n" not in fix and not label.op.is_own_call:  # a layer
                fix = f"{sentence}:\n    dtype=jnp.{dtype.name}"
            label.op.add(WIDE_GATHER, message, fix)
