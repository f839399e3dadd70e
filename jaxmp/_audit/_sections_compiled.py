"""Sections about the program compiled for a GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from jaxmp._audit._gpu_rows import AttentionRow, CollectiveRow, GemmRow, MemoryRow
from jaxmp._report._section import (
    MAX_ROWS,
    PHASES,
    Section,
    abbreviate,
    grouped,
    left_out_text,
    numberless,
    pair_text,
)
from jaxmp._report._units import bytes_text, counted, flops_text, module_text, share_text


def compiled_matmuls(gemms: Iterable[GemmRow], attention: Iterable[AttentionRow]) -> Section:
    """Returns the FLOPs of the GPU's kernels by dtype."""

    def kernel_of(row: GemmRow | AttentionRow) -> tuple[str, str, str]:
        if isinstance(row, AttentionRow):
            return row.dtype, row.dtype, "fused attention"
        return pair_text(row.lhs, row.rhs), row.out, row.kernel

    groups = grouped((*gemms, *attention), kernel_of)
    flops = Counter({key: sum(row.flops for row in group) for key, group in groups.items()})
    rows = tuple(
        (
            *key,
            counted(sum(row.count for row in groups[key]), "launch"),
            flops_text(value),
            share_text(value, flops.total()),
        )
        for key, value in flops.most_common()
    )
    columns = ("multiplied in", "result", "kernel", "count", "FLOPs", "share")
    return Section("Matmuls in the compiled program", "", columns, rows)


def compiled_lines(gemms: Iterable[GemmRow]) -> Section:
    """Returns the GPU's matmuls by module and source line."""
    key_of = lambda row: (numberless(row.module), row.location, pair_text(row.lhs, row.rhs))
    rows = [
        (
            abbreviate(sorted({row.module for row in group})),
            location,
            dtypes,
            ", ".join(phase for phase in PHASES if phase in {row.phase for row in group}),
            flops_text(sum(row.flops for row in group)),
        )
        for (_, location, dtypes), group in grouped(gemms, key_of).items()
    ]
    columns = ("module", "line", "multiplied in", "passes", "FLOPs")
    text = left_out_text(rows, "gemms")
    return Section("Compiled matmuls by module", text, columns, tuple(rows[:MAX_ROWS]))


def attention_kernels(attention: Iterable[AttentionRow], gpu: str) -> Section:
    """Returns the fused attention kernels; "none" if a compiled program has no such kernel."""
    groups = grouped(
        attention, lambda x: (numberless(x.module), x.location, x.phase, x.kernel, x.dtype)
    )
    rows = tuple(
        (
            abbreviate(sorted({row.module for row in group})),
            *key[1:],
            counted(sum(row.count for row in group), "launch"),
            flops_text(sum(row.flops for row in group)),
        )
        for key, group in groups.items()
    )
    columns = ("module", "line", "pass", "kernel", "dtype", "count", "FLOPs")
    text = "none" if gpu and not rows else ""
    return Section("Fused attention kernels", text, columns if rows else (), rows)


def collectives(collectives: Iterable[CollectiveRow]) -> Section:
    """Returns the arrays that devices send to one another."""
    rows = [
        (
            row.operation,
            row.dtype,
            bytes_text(row.bytes),
            counted(row.count, "array"),
            row.content,
            ", ".join(row.axes),
            row.phase,
            module_text(row.module),
            row.location,
        )
        for row in collectives
    ]
    columns = ("collective", "dtype", "bytes", "count", "content", "axes", "pass", "module", "line")
    text = left_out_text(rows, "collectives")
    return Section("Collectives per device", text, columns, tuple(rows[:MAX_ROWS]))


def memory(memory: MemoryRow | None) -> Section:
    """Returns the memory of the program and the bytes that the optimizer update moves."""
    if memory is None:
        return Section("")
    rows = [
        ("arguments", bytes_text(memory.arguments)),
        ("results", bytes_text(memory.outputs)),
        ("results in donated arguments", bytes_text(memory.aliased)),
        ("temporary buffers", bytes_text(memory.temporary)),
        ("fusions in the program", counted(memory.fusions, "kernel")),
    ]
    if memory.update_bytes and memory.parameters:
        moved = memory.update_bytes / memory.parameters
        minimum = memory.update_floor / memory.parameters
        text = f"{moved:.1f} bytes per parameter (minimum {minimum:.1f})"
        rows.append(("memory traffic of the update", text))
    return Section("Memory per device", "", ("quantity", "value"), tuple(rows))
