"""Findings and counts of an audit, as plain data, and the tables of a compiled program."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple, TypeVar

from jaxmp._tools.report import _section

# Ends of notes about an operation.
NOT_INSPECTED, NOT_COUNTED = "are not inspected", "are not counted"
SEVERITIES = ERROR, WARNING, NOTE = "error", "warning", "note"

Row = TypeVar("Row", bound=Any)


def merged(rows: Iterable[Row], *sums: str) -> tuple[Row, ...]:
    """Returns one row for those that are equal except for some counts, the largest first.

    Args:
      rows: frozen dataclasses.
      *sums: the fields that are added up; the rows are sorted by the first of them.
    """
    key_of = lambda row: dataclasses.replace(row, **dict.fromkeys(sums, 0))
    totals = (
        dataclasses.replace(key, **{n: sum(getattr(row, n) for row in group) for n in sums})
        for key, group in _section.grouped(rows, key_of).items()
    )
    return tuple(sorted(totals, key=lambda row: -getattr(row, sums[0])))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding(_section.Located):
    """Result of one check of an audit, at one source line of the audited program.

    `AuditReport.findings` contains them; `docs/findings.md` explains every check.

    Args:
      check: id of the check, such as "fp32_matmul".
      severity: "error" for a defect that should be fixed, "warning" for a fact worth knowing,
        "note" for a form of the program that is faster.
      module: the module path; "" for the root and for code outside of modules.
      primitive: the operation, as a jaxpr prints it; "" for a finding about an argument or a rule.
      file: path of the user's source file; "" if it is not known.
      line: line number in `file`; 0 if it is not known.
      text: text of this line, without indentation; a baseline compares it instead of the number.
      message: the defect and its consequence.
      fix: the remedy: a sentence and its code in lines that are indented by four spaces, or one
        statement of code.
      trial: "works" if the function was traced with the code of the fix and lost the finding;
        "not tried" if that was not possible; "" for a fix without code.
      count: number of operations of the traced program that the finding covers, or of launches of
        the compiled program.
      flops: FLOPs of the matmuls among them in one step, including iterations of loops.

    Example:
      >>> x = jnp.ones((8, 8), jnp.bfloat16)
      >>> (finding,) = audit(lambda x: jax.nn.softmax(x), x).errors
      >>> finding.check, finding.severity
      ('softmax_16bit', 'error')
    """

    check: str
    severity: str = ERROR
    module: str = ""
    primitive: str = ""
    file: str = ""
    line: int = 0
    text: str = ""
    message: str = ""
    fix: str = ""
    trial: str = ""
    count: int = 1
    flops: int = 0

    @property
    def identity(self) -> tuple[str, ...]:
        """The values by which the same finding is known in another version of the program."""
        return self.check, self.module, self.text or self.message

    def __str__(self) -> str:
        where = " at ".join(part for part in (self.module or "(root)", self.location) if part)
        times = f" ({self.count} times)" if self.count > 1 and self.primitive else ""
        return f"{self.check} in {where}{times}: {self.message} Fix: {self.fix}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatmulRow:
    """The matmuls and convolutions of one module, pass and pair of operand dtypes."""

    module: str
    phase: str  # "forward", "backward" or "recompute"
    lhs: str
    rhs: str
    flops: int
    count: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class _CompiledRow(_section.Located):
    """Row about instructions of one module, pass and line of the compiled program."""

    module: str
    phase: str  # "forward", "backward" or "recompute"
    count: int
    file: str = ""
    line: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class GemmRow(_CompiledRow):
    """Matmuls or convolutions of one module, pass, line, kernel and pair of dtypes.

    Args:
      module: the module path; "" for the root and for code outside of modules.
      phase: "forward", "backward" or "recompute".
      lhs: the dtype in which the GPU multiplies the first operand; "tf32" if it rounds FP32
        operands to TF32.
      rhs: the dtype of the second operand.
      out: the dtype of the result.
      kernel: "cublas", "cublas fp8", "cudnn", "cudnn mx", "triton" or "xla". If the GPU is not
        present, there is no autotuning, and the GPU may use another kernel of the same dtypes.
      was_fp8: the FP8 dtype that an operand had before it was cast up for this matmul; "" if none.
      flops: FLOPs of all executions, per device.
      count: number of launches in one step; a kernel in a loop is launched once per iteration.
      file: path of the user's source file; "" if it is not known.
      line: line number in `file`.
    """

    lhs: str
    rhs: str
    out: str
    kernel: str
    was_fp8: str
    flops: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionRow(_CompiledRow):
    """Fused attention kernels of one module, pass and line.

    Args:
      module: the module path.
      phase: "forward", "backward" or "recompute".
      kernel: the custom call, such as "__cudnn$fmhaSoftmax".
      dtype: of queries, keys and values.
      shape: of the queries.
      count: number of launches in one step.
      file: path of the user's source file; "" if it is not known.
      line: line number in `file`.
      flops: FLOPs of all executions, per device; a causal mask halves them.
    """

    kernel: str
    dtype: str
    shape: tuple[int, ...]
    flops: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class CollectiveRow(_CompiledRow):
    """Collectives of one module, pass, line and dtype.

    Args:
      module: the module path.
      phase: "forward", "backward" or "recompute".
      operation: "all-gather", "all-reduce", "reduce-scatter", "all-to-all" or
        "collective-permute".
      dtype: of the arrays that are sent.
      bytes: the larger of operand and result, of all executions, per device.
      count: number of arrays that are sent in all executions; XLA may send several at once.
      file: path of the user's source file; "" if it is not known.
      line: line number in `file`.
      content: "weight", "gradient" (of a parameter), "activation" (or its gradient), "update" (of a
        parameter, as in ZeRO-1), or "" for other arrays, such as scalars and integers.
      axes: the mesh axes over which devices send; empty if they are not known.
      read_as: for weights, the dtype to which all operations cast the result; `dtype` if one does
        not.
      is_kept: True for a weight that the backward pass reads, too, so that it is in memory until
        then.
      in_matmul: True for a weight or an activation that is gathered for a matmul.
      in_outer_loop: True inside of a loop that contains the whole backward pass, as that over
        microbatches does.
    """

    operation: str
    dtype: str
    bytes: int
    content: str = ""
    axes: tuple[str, ...] = ()
    read_as: str = ""
    is_kept: bool = False
    in_matmul: bool = False
    in_outer_loop: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryRow:
    """Memory of a program per device, and the bytes that the optimizer update moves.

    Args:
      arguments: bytes of all arguments.
      outputs: bytes of all results.
      aliased: bytes of results that reuse the memory of donated arguments.
      temporary: bytes of temporary buffers.
      parameters: number of elements of the donated floating-point arrays outside of optimizer
        states.
      update_bytes: bytes that the kernels that write donated arrays read and write; 0 without
        donation.
      update_floor: the minimum of `update_bytes`: each such array is read and written once, and
        other inputs, such as gradients, are read once.
    """

    arguments: int
    outputs: int
    aliased: int
    temporary: int
    parameters: int = 0
    update_bytes: int = 0
    update_floor: int = 0

    @property
    def required(self) -> int:
        """Bytes that the program requires on each device."""
        return self.arguments + self.outputs - self.aliased + self.temporary


class Compilation(NamedTuple):
    """Rows of one compiled program."""

    gemms: tuple[GemmRow, ...]
    attention: tuple[AttentionRow, ...]
    collectives: tuple[CollectiveRow, ...]
    memory: MemoryRow
    notes: tuple[str, ...]
    # `Origins` and `Compiled` of the program, for the checks.
    origins: Any
    compiled: Any


# ---------------------------------------------------------------------------
# Tables of the compiled program
# ---------------------------------------------------------------------------


def _kernel_of(row: GemmRow | AttentionRow) -> tuple[str, str, str]:
    """Returns the dtypes of operands and result, and the kernel."""
    if isinstance(row, AttentionRow):
        return row.dtype, row.dtype, "fused attention"
    return _section.pair_text(row.lhs, row.rhs), row.out, row.kernel


def compiled_matmuls(kernels: Iterable[GemmRow | AttentionRow]) -> _section.Section:
    """Returns the FLOPs of the GPU's kernels by dtype."""
    groups = _section.grouped(kernels, _kernel_of)
    flops = Counter({key: sum(row.flops for row in group) for key, group in groups.items()})
    rows = tuple(
        (
            *key,
            _section.counted(sum(row.count for row in groups[key]), "launch"),
            _section.flops_text(value),
            _section.share_text(value, flops.total()),
        )
        for key, value in flops.most_common()
    )
    columns = ("multiplied in", "result", "kernel", "count", "FLOPs", "share")
    return _section.Section("Matmuls in the compiled program", "", columns, rows)


def compiled_lines(kernels: Iterable[GemmRow | AttentionRow]) -> _section.Section:
    """Returns the GPU's matmuls by module and source line."""
    key_of = lambda row: (_section.numberless(row.module), row.location, *_kernel_of(row))
    rows = [
        (
            _section.abbreviate(sorted({row.module for row in group})),
            location,
            dtypes,
            kernel,
            ", ".join(phase for phase in _section.PHASES if phase in {row.phase for row in group}),
            _section.flops_text(sum(row.flops for row in group)),
        )
        for (_, location, dtypes, _, kernel), group in _section.grouped(kernels, key_of).items()
    ]
    columns = ("module", "line", "multiplied in", "kernel", "passes", "FLOPs")
    return _section.largest_rows("Compiled matmuls by module", columns, rows, "gemms")


def collectives(collectives: Iterable[CollectiveRow]) -> _section.Section:
    """Returns the arrays that devices send to one another."""
    rows = [
        (
            row.operation,
            row.dtype,
            _section.bytes_text(row.bytes),
            _section.counted(row.count, "array"),
            row.content,
            ", ".join(row.axes),
            row.phase,
            _section.module_text(row.module),
            row.location,
        )
        for row in collectives
    ]
    columns = ("collective", "dtype", "bytes", "count", "content", "axes", "pass", "module", "line")
    return _section.largest_rows("Collectives per device", columns, rows, "collectives")


def memory(memory: MemoryRow | None) -> _section.Section:
    """Returns the memory of the program and the bytes that the optimizer update moves."""
    if memory is None:
        return _section.Section("")
    rows = [
        ("arguments", _section.bytes_text(memory.arguments)),
        ("results", _section.bytes_text(memory.outputs)),
        ("results in donated arguments", _section.bytes_text(memory.aliased)),
        ("temporary buffers", _section.bytes_text(memory.temporary)),
    ]
    if memory.update_bytes and memory.parameters:
        moved = memory.update_bytes / memory.parameters
        minimum = memory.update_floor / memory.parameters
        text = f"{moved:.1f} bytes per parameter (minimum {minimum:.1f})"
        rows.append(("memory traffic of the update", text))
    return _section.Section("Memory per device", "", ("quantity", "value"), tuple(rows))
