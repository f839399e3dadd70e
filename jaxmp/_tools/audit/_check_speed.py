"""Checks of speed: lookups and attention of a traced program, copies of a compiled one."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from jaxmp._attention import ASKED, AttentionExplanation, choice_of, implementation_of
from jaxmp._attention._declared import (
    Declaration,
    declaration_code,
    declared_masks,
    mask_operand,
    structure_of,
)
from jaxmp._attention._layer import layer_attention
from jaxmp._core._compat import is_within
from jaxmp._core._dtypes import FLOAT32, is_16bit
from jaxmp._core._targets import Target, default_target
from jaxmp._programs._constructs import inners
from jaxmp._programs._jaxprs import FORWARD, RECOMPUTE, Equation, phase_of
from jaxmp._programs._locations import module_of
from jaxmp._programs._matmuls import count_flops, matmul_of
from jaxmp._programs._operations import dot_of, name_of
from jaxmp._programs._static_values import Scope
from jaxmp._tools.audit._auditor import Auditor
from jaxmp._tools.audit._check_compiled import CompiledProgram
from jaxmp._tools.audit._checks import (
    LAYOUT,
    NOTE,
    WARNING,
    Check,
    OpOccurrence,
    dtype_of,
    is_attention,
    named,
)
from jaxmp._tools.audit._dataflow import From
from jaxmp._tools.audit._hlo_matmuls import is_matmul, parts, shape_of
from jaxmp._tools.audit._hlo_stats import fused_attention, required_bytes, source_of
from jaxmp._tools.audit._labels import Fact, Logits
from jaxmp._tools.audit._rows import Finding
from jaxmp._tools.audit._trace import Traced
from jaxmp._tools.hlo import Computation, Instruction, Program, Step
from jaxmp._tools.hlo._kernels import accessed, kernels, results, written
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

# The least share of the bytes of all kernels that a note is about, and the number of notes.
_LEAST_SHARE, _MOST_NOTES = 0.02, 3
_LEAST_CLASSES = 1024

# A check, the facts, and the instructions that the note is about with the bytes that they move.
Note = tuple[Check, str, list[tuple[int, Instruction]]]


@SPLIT_ATTENTION.on_compiled
def note_copies(program: CompiledProgram, audit: Auditor) -> Iterator[Finding]:
    """Reports the largest avoidable copies of a program for a GPU, the largest first."""
    del audit
    hlo, chip = program.rows.origins.program, program.chip
    run = list(kernels(hlo)) if chip.platform == "gpu" else []
    total = sum(step.times * accessed(hlo, step) for step in run)
    free = chip.usable - required_bytes(program.rows.memory)
    notes = [_copies(hlo, run), _repetitions(hlo, run, free), *_losses(hlo, run, chip)]
    size_of = lambda note: sum(size for size, _ in note[2])
    for note in sorted(notes, key=size_of, reverse=True)[:_MOST_NOTES]:
        (check, text, sizes), saved = note, size_of(note)
        if saved >= max(_LEAST_SHARE * total, 1):
            text += f" {bytes_text(saved)}, {share_text(saved, total)} of the bytes that all"
            place = program.rows.origins.of(max(sizes, key=lambda pair: pair[0])[1])
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
# Recomputation
# ---------------------------------------------------------------------------


def _repetitions(program: Program, run: list[Step], free: int) -> Note:
    """Returns the kernels that repeat the forward pass, if their results fit the free memory."""
    named = [(step, results(program, step.instruction)[0]) for step in run]
    again = [pair for pair in named if all(map(_repeats, results(program, pair[0].instruction)))]
    size = sum(written(program, step) for step, _ in again)
    has_matmul = any(is_matmul(part) for step, _ in again for _, part in parts(program, step))
    text = f"{counted(len(again), 'kernel')} repeat the forward pass. Their results would take"
    text += f" {bytes_text(size)} of memory, and {bytes_text(free)} are free. They move"
    sizes = [(step.times * accessed(program, step), first) for step, first in again]
    return RECOMPUTED_PASS, text, sizes if has_matmul and size <= free else []


def _repeats(value: Instruction) -> bool:
    is_in_loop = "while/" in value.op_name.partition("jvp(")[2]
    return phase_of(value.op_name) == RECOMPUTE and not is_in_loop


# ---------------------------------------------------------------------------
# Logits
# ---------------------------------------------------------------------------


def _losses(program: Program, run: list[Step], chip: Target) -> Iterator[Note]:
    """Yields the matmuls of the logits of losses, with the bytes that the losses could save."""
    values = ((step.times, *part) for step in run for part in parts(program, step))
    matmuls = {v[2].shapes[0].sizes: v for v in values if is_matmul(v[2])}
    matmuls = {n: v for n, v in matmuls.items() if len(n) == 2 and n[1] >= _LEAST_CLASSES}
    for sizes, (times, inside, part) in matmuls.items():
        moved = [(step, _touched(program, step, sizes)) for step in run]
        if any(size and _has_softmax(program, step, math.prod(sizes)) for step, size in moved):
            total = sum(size for _, size in moved)
            with default_target(chip.name):
                saved = total - _least(inside, part, times)
            text = f"kernels move {times * sizes[0]:,} x {sizes[1]:,} logits and their gradients:"
            text += f" {bytes_text(total)}. linear_cross_entropy saves"
            yield STORED_LOGITS, text, [(saved, part)]


def _touched(program: Program, step: Step, sizes: tuple[int, ...]) -> int:
    """Returns the bytes of logits and their gradients that a kernel reads and writes."""
    operands = [step.computation.instructions[name] for name in step.instruction.operands]
    shapes = [shape for value in (step.instruction, *operands) for shape in value.shapes]
    alike = [s for s in shapes if s.sizes[-1:] == sizes[1:] and s.elements == math.prod(sizes)]
    return step.times * min(sum(s.bytes for s in alike), accessed(program, step)) if alike else 0


def _has_softmax(program: Program, step: Step, elements: int) -> bool:
    """Returns True for a kernel with exponentials of logits minus their maximum."""
    exponentials = (pair for pair in parts(program, step) if pair[1].opcode == "exponential")
    return any(
        inside.instructions[part.operands[0]].opcode == "subtract"
        for inside, part in exponentials
        if part.shapes[0].elements == elements
    )


def _least(inside: Computation, logits: Instruction, times: int) -> int:
    """Returns the bytes that `linear_cross_entropy` moves where another loss moves logits."""
    rows, classes = logits.shapes[0].sizes
    lhs, rhs = (shape_of(inside, name) for name in logits.operands[:2])
    width = math.isqrt(lhs.elements * rhs.elements // (rows * classes))
    rows, size = rows * times, lhs.bytes // lhs.elements
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

    survives = LAYOUT | named("select_n")

    def __init__(self, op: OpOccurrence) -> None:
        self.op = op


@WIDE_GATHER.on_operation("gather")
def label_rows(op: OpOccurrence, audit: Auditor) -> TableRows | None:
    """Labels rows of an FP32 argument."""
    table = op.equation.invars[0]
    is_argument = bool(audit.flow.labels(From, table))
    is_lookup = dtype_of(table) == FLOAT32 and is_argument and op.location.differentiated
    return TableRows(op) if is_lookup and op.location.phase == FORWARD else None


@WIDE_GATHER.on_operation("convert_element_type")
def check_cast(op: OpOccurrence, audit: Auditor) -> None:
    """Reports looked-up rows that are cast to 16 bits, if to cast the table moves fewer bytes."""
    (operand,), (result,) = op.equation.invars, op.equation.outvars
    dtype = dtype_of(result)
    if not is_16bit(dtype):
        return
    for label in audit.flow.labels(TableRows, operand):
        table = label.op.equation.invars[0].aval
        # The lookup reads and writes FP32 or 16 bits; the cast reads FP32 and writes 16 bits.
        after = 14 * math.prod(result.aval.shape)
        before = 6 * math.prod(table.shape) + 4 * math.prod(result.aval.shape)
        if before < after:
            message = (
                f"the lookup moves {bytes_text(after)} in FP32 and casts the rows to {dtype.name};"
                f" to cast the table first moves {bytes_text(before)}."
            )
            code = f"x = table.astype(jnp.{dtype.name})[tokens]"
            if not audit.findings.is_own_call(label.op.equation):
                code = f"dtype=jnp.{dtype.name}"
            fix = f"Cast the table before the lookup:\n    {code}"
            audit.add(WIDE_GATHER, label.op, message, fix)


UNFUSED_ATTENTION = Check(
    id="unfused_attention",
    severity=NOTE,
    explanation="Attention does not run as a fused kernel: it is written as two matmuls and a"
    " softmax, or jaxmp's attention cannot use a fused kernel, for the reason in the message.",
    fix="jax.nn.dot_product_attention(query, key, value, implementation='cudnn')",
)

# Elements of one head's logits that a fused kernel computes as one block (64 queries, 64 keys). It
# saves nothing beyond that.
_BLOCK = 64 * 64
_CASTS = named("convert_element_type")
# Treatment of the logits by each implementation of jaxmp's attention.
_LOGITS = {
    "xla": "stores the logits of all pairs of positions in memory",
    "blockwise": "computes one block of keys after another in a loop",
}


class _Summed(NamedTuple):
    """Matmul whose exponentials are added up, as a softmax does and a softplus does not."""

    logits: Equation


@UNFUSED_ATTENTION.on_operation("reduce_sum")
def collect_sums(op: OpOccurrence, audit: Auditor) -> None:
    """Collects the matmuls of which a softmax is computed."""
    if op.location.phase == FORWARD:
        labels = audit.flow.labels(Logits, op.equation.invars[0])
        audit.collected[_Summed] += [_Summed(x.op.equation) for x in labels if x.normalized]


@UNFUSED_ATTENTION.on_operation("dot_general")
def check_matmuls(op: OpOccurrence, audit: Auditor) -> None:
    """Reports attention that is written as two matmuls around a softmax."""
    logits = _attention_logits(op, audit)
    if logits is None or any(map(is_attention, op.enclosing)):
        return
    aval = logits.equation.outvars[0].aval
    size = math.prod(aval.shape) * aval.dtype.itemsize * logits.times
    message = (
        f"{_why_unfused(logits)}; its logits have the shape {list(aval.shape)} and take"
        f" {bytes_text(size)} of memory."
    )
    flops = 2 * matmul_of(op.equation).flops * op.times
    audit.add(UNFUSED_ATTENTION, logits, message, flops=flops)


@UNFUSED_ATTENTION.on_operation("jit")
def check_calls(op: OpOccurrence, audit: Auditor) -> None:
    """Reports calls of jaxmp's attention that do not run a fused kernel."""
    if not is_attention(op.equation) or op.location.phase != FORWARD:
        return
    name = name_of(op.equation)
    implementation, argument = implementation_of(name)
    if implementation == "cudnn":
        return
    choice = choice_of(name, [var.aval for var in op.equation.invars])
    message, fix = _explain_choice(implementation, argument, choice)
    flops = sum(count_flops(inner.jaxpr).total() for inner in inners(op.equation)) * op.times
    audit.add(UNFUSED_ATTENTION, op, message, fix, flops=flops)


def _attention_logits(op: OpOccurrence, audit: Auditor) -> OpOccurrence | None:
    """Returns the matmul q k^T if `op` multiplies the softmax of its result by the values."""
    if op.location.phase != FORWARD:
        return None
    values = dot_of(op.equation)
    for index, var in enumerate(op.equation.invars[:2]):
        for label in audit.flow.labels(Logits, var):
            if not label.normalized:
                continue
            logits = label.op.equation
            batches = dot_of(logits).batch[0]
            is_one_axis = len(values.contracted[index]) == 1
            is_one_axis &= len(batches) == len(values.batch[0])
            size = math.prod(logits.outvars[0].aval.shape)
            is_softmax = any(logits is each.logits for each in audit.collected[_Summed])
            heads = math.prod(logits.outvars[0].aval.shape[: len(batches)])
            is_softmax &= size > _BLOCK * heads
            is_softmax &= bool(batches) or not _is_layer(label.op)
            if is_softmax and is_one_axis and size == math.prod(var.aval.shape):
                return label.op
    return None


def _is_layer(matmul: OpOccurrence) -> bool:
    """Returns True for `x @ w` with an argument `w`: keys are computed, or transposed."""
    weight = matmul.body.source_of(matmul.equation.invars[1], _CASTS)
    is_argument = matmul.body.maker(weight) is None
    return is_argument and dot_of(matmul.equation).contracted[1] == (0,)


def _why_unfused(logits: OpOccurrence) -> str:
    """Returns the reason why no fused kernel computes attention that is written as matmuls."""
    equation = logits.equation
    operand = equation.invars[0].aval
    head = math.prod(operand.shape[axis] for axis in dot_of(equation).contracted[0])
    if not is_16bit(operand.dtype):
        return f"the operands are {operand.dtype.name}, and cuDNN's fused kernel requires 16 bits"
    if head % 8 or head > 256:
        return (
            f"the head size is {head}, and cuDNN's fused kernel requires a multiple of 8 up to 128"
            " (up to 256 on H100 and later)"
        )
    return "attention is written as two matmuls and a softmax, and XLA stores the logits"


def _explain_choice(
    implementation: str, argument: str, choice: AttentionExplanation | None
) -> tuple[str, str]:
    """Returns message and fix for a call of jaxmp's attention.

    Args:
      implementation: "xla" or "blockwise".
      argument: the argument that prevents the fused kernel; "" if none does.
      choice: the reasons for the implementation, if they are known.
    """
    message = f"attention runs as {implementation!r}, which {_LOGITS[implementation]}"
    if choice is None:
        reason = argument or "the requested implementation"
        fix = "jaxmp.explain(jaxmp.dot_product_attention)(query, key, value)"
        return f"{message}; the reason is: {reason}.", fix
    blockers = [f"{blocker.argument}: {blocker.reason}" for blocker in choice.rows]
    why = f". cuDNN's kernel cannot run ({'; '.join(blockers)})" if blockers else ""
    # The call cannot change the device, so other reasons come first.
    others = [blocker for blocker in choice.rows if blocker.argument != "device"]
    changes = [blocker.change for blocker in others or choice.rows]
    if choice.reason == ASKED:
        changes.insert(0, f"Remove {implementation!r}, so that attention is 'auto'.")
    if choice.rows and not others:
        changes.append("audit(..., target='h200') reports the choice for a GPU.")
    return f"{message} ({choice.reason}){why}.", " ".join(changes)


DENSE_MASK = Check(
    id="dense_mask",
    severity=WARNING,
    explanation="Attention reads a mask as an array, although the mask is causal, a window or full"
    " for every input. A kernel cannot skip the masked blocks of an array.",
    fix="recipe = recipe.replace(mask='causal')",
)


class _PassedMask(NamedTuple):
    """Mask that attention receives as an array."""

    op: OpOccurrence
    # None if the mask depends on the program's inputs.
    elements: np.ndarray | None


@DENSE_MASK.on_operation("jit")
def collect_mask(op: OpOccurrence, audit: Auditor) -> None:
    """Collects the mask of a call of attention in the forward pass."""
    if not is_attention(op.equation) or op.location.phase != FORWARD:
        return
    mask = mask_operand(op.equation)
    if mask is not None and mask.aval.shape[-2] > 1:
        audit.collected[_PassedMask].append(_PassedMask(op, audit.known.value(mask)))


@DENSE_MASK.on_program
def check_masks(audit: Auditor, traced: Traced) -> None:
    """Compares masks with their declarations, and reports masks that could be declared.

    Raises:
      AttentionError: if a mask contradicts its declaration.
    """
    declared = declared_masks(Scope(traced.closed, traced.arrays))
    unknown = dict.fromkeys(mask.path or "the model" for mask, is_known in declared if not is_known)
    if unknown:
        audit.notes[
            f"the declared masks of {_paths_text(list(unknown))} depend on the program's inputs and"
            " were not compared; pass arrays instead of shapes"
        ] = None
    passed = _with_structures(audit.collected[_PassedMask])
    in_layer = lambda op: is_within(op.equation.source_info, layer_attention)
    structures = {actual for op, actual in passed if in_layer(op)} | {mask for mask, _ in declared}
    for op, actual in passed:
        if actual is None:
            continue
        message = (
            f"attention reads its mask as an array, and the mask is {_structure_text(actual)}"
            " for every input."
        )
        path = module_of(op.location.names, audit.root) if len(structures) > 1 else None
        fix = _fix_declaration(actual, path) if in_layer(op) else _fix_argument(actual)
        audit.add(DENSE_MASK, op, message, fix)


def _with_structures(passed: list[_PassedMask]) -> list[tuple[OpOccurrence, Declaration | None]]:
    """Determines the structure of each mask, once for each array; None if it is not known."""
    structures: dict[int, Declaration | None] = {}
    for _, elements in passed:
        if elements is not None and id(elements) not in structures:
            structures[id(elements)] = structure_of(elements)
    return [(op, structures.get(id(elements))) for op, elements in passed]


# ---------------------------------------------------------------------------
# Texts
# ---------------------------------------------------------------------------


def _structure_text(actual: Declaration) -> str:
    window = "" if actual.window is None else " with a window of {} and {}".format(*actual.window)
    return f"{actual.mask}{window}"


def _paths_text(paths: list[str]) -> str:
    more = [f"{len(paths) - 2} more layers"] if len(paths) > 2 else []
    return " and ".join([*map(repr, paths[:2]), *more])


def _fix_declaration(actual: Declaration, path: str | None) -> str:
    """Returns the declaration in a recipe, for all attention layers or for the one at `path`."""
    python, toml = declaration_code(actual, path)
    if path is not None:
        rules = f"policies = jaxmp.PolicyMap(recipe, [{python}])"
        python = f"{rules}; recipe = recipe.replace(policies=policies)"
    return (
        "Declare the mask in the recipe; the model is not edited:\n"
        f"    {python}\nOr in the recipe file:\n" + "\n".join(f"    {line}" for line in toml)
    )


def _fix_argument(actual: Declaration) -> str:
    """Returns the declaration in a call of `jaxmp.dot_product_attention`."""
    arguments = ["query, key, value"] + ["is_causal=True"] * actual.is_causal
    if actual.window is not None:
        arguments.append(f"local_window_size={actual.window}")
    return f"Replace the argument mask:\n    jaxmp.dot_product_attention({', '.join(arguments)})"
