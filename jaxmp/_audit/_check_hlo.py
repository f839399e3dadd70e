"""Checks of a program compiled for a GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from jaxmp._audit._auditor import Auditor
from jaxmp._audit._check_matmuls import FP32_MATMUL
from jaxmp._audit._checks import ERROR, WARNING, Check
from jaxmp._audit._gpu_rows import CollectiveRow, Compilation, GemmRow
from jaxmp._audit._rows import Finding
from jaxmp._core._dtypes import FLOAT32, is_16bit
from jaxmp._core._locations import Location

FP32_GEMM = Check(
    id="fp32_gemm",
    severity=ERROR,
    explanation="The GPU multiplies in FP32 or TF32 where the policies require 16 bits, although"
    " the traced program does not.",
    fix="y = jnp.dot(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16))",
    needs_target="yes",
)
UNDONATED_STATE = Check(
    id="undonated_state",
    severity=WARNING,
    explanation="No argument is donated, so the old and the new state are in memory at the same"
    " time.",
    fix="jax.jit(train_step, donate_argnums=0)",
    needs_target="yes",
)

_WIDE = ("float32", "tf32")


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
    """A compiled program and what the trace contains.

    Args:
      rows: matmuls, collectives and memory of the compiled program.
      traced: findings of the traced program, which are not repeated.
      fp8: (module, pass, file, line) of matmuls that were traced with FP8 operands -> the dtype.
        XLA may remove a cast to FP8 and back, so that the compiled program does not contain it.
      fsdp_axes: the mesh axes that split both parameters and the rows of the batch.
    """

    rows: Compilation
    traced: tuple[Finding, ...]
    fp8: Mapping[tuple[str, str, str, int], str]
    fsdp_axes: frozenset[str] = frozenset()


@FP32_GEMM.on_compiled
def check_gemms(program: CompiledProgram, audit: Auditor) -> Iterator[Finding]:
    """Reports matmuls in FP32 or TF32."""
    reported = {f.module for f in program.traced if f.check == FP32_MATMUL.id}
    for row in program.rows.gemms:
        is_wide = row.lhs in _WIDE or row.rhs in _WIDE
        if is_wide and row.module not in reported and requires_16_bits(audit, row.module):
            message = f"the GPU multiplies in {row.lhs} x {row.rhs}."
            yield finding(FP32_GEMM, row, message)


@UNDONATED_STATE.on_compiled
def check_donation(program: CompiledProgram, audit: Auditor) -> Iterator[Finding]:
    """Reports a program without donated arguments."""
    del audit
    if not program.rows.memory.aliased:
        message = "no argument is donated: the old and the new state are in memory together."
        yield UNDONATED_STATE.finding(message)


def requires_16_bits(audit: Auditor, module: str) -> bool:
    """Returns True if the policies allow only 16-bit dtypes for a module."""
    below = tuple(module.split("/")) if module else ()
    allowed = audit.context.allowed_dtypes(Location((*audit.root, *below)))
    return bool(allowed) and FLOAT32 not in allowed and all(map(is_16bit, allowed))


def finding(check: Check, row: GemmRow | CollectiveRow, message: str, fix: str = "") -> Finding:
    return check.finding(
        message,
        fix,
        module=row.module,
        primitive=row.operation if isinstance(row, CollectiveRow) else "dot",
        file=row.file,
        line=row.line,
        count=row.count,
        flops=row.flops if isinstance(row, GemmRow) else 0,
    )
