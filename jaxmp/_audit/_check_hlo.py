"""Checks of a program compiled for a GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping

from jaxmp._audit._auditor import Auditor
from jaxmp._audit._check_collectives import ALL_REDUCE_16BIT
from jaxmp._audit._check_matmuls import FP32_MATMUL
from jaxmp._audit._checks import ERROR, WARNING, Check
from jaxmp._audit._gpu_rows import CollectiveRow, Compilation, GemmRow
from jaxmp._audit._rows import Finding
from jaxmp._audit._units import bytes_text
from jaxmp._core._dtypes import FLOAT32, is_16bit
from jaxmp._core._jaxprs import BACKWARD
from jaxmp._core._locations import Location

FP32_GEMM = Check(
    id="fp32_gemm",
    severity=ERROR,
    explanation="The GPU multiplies in FP32 or TF32 where the policies require 16 bits, although"
    " the traced program does not.",
    fix="y = jnp.dot(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16))",
    needs_target="yes",
)
FP32_ALL_GATHER = Check(
    id="fp32_all_gather",
    severity=ERROR,
    explanation="Devices gather an array in FP32 where the policies require 16 bits.",
    fix="w = jax.lax.with_sharding_constraint(w.astype(jnp.bfloat16), sharding_of_w)",
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

# Smaller arrays, such as those of norms and losses, may be gathered in any dtype.
_SMALL = 4096  # bytes
_WIDE = ("float32", "tf32")
_HALF = ("bfloat16", "float16")
# Under `jit` the compiler sums the result of the gradient's matmul, in the dtype of that matmul.
_FIX_REDUCE = "loss, grads = jaxmp.value_and_grad(loss_fn)(params, batch)"


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
    """A compiled program and what the trace contains.

    Args:
      rows: matmuls, collectives and memory of the compiled program.
      traced: findings of the traced program, which are not repeated.
      fp8: (module, pass, file, line) of matmuls that were traced with FP8 operands -> the dtype.
        XLA may remove a cast to FP8 and back, so that the compiled program does not contain it.
    """

    rows: Compilation
    traced: tuple[Finding, ...]
    fp8: Mapping[tuple[str, str, str, int], str]


@FP32_GEMM.on_compiled
def check_gemms(program: CompiledProgram, audit: Auditor) -> Iterator[Finding]:
    """Reports matmuls in FP32 or TF32."""
    reported = {f.module for f in program.traced if f.check == FP32_MATMUL.id}
    for row in program.rows.gemms:
        is_wide = row.lhs in _WIDE or row.rhs in _WIDE
        if is_wide and row.module not in reported and _requires_16_bits(audit, row.module):
            message = f"the GPU multiplies in {row.lhs} x {row.rhs}."
            yield finding(FP32_GEMM, row, message)


@FP32_ALL_GATHER.on_compiled
def check_gathers(program: CompiledProgram, audit: Auditor) -> Iterator[Finding]:
    """Reports arrays that devices gather in FP32."""
    for row in _large(program.rows.collectives):
        is_wide = row.operation == "all-gather" and row.dtype == "float32"
        if is_wide and row.module and _requires_16_bits(audit, row.module):
            yield finding(FP32_ALL_GATHER, row, f"{bytes_text(row.bytes)} are gathered in float32.")


@ALL_REDUCE_16BIT.on_compiled
def check_reductions(program: CompiledProgram, audit: Auditor) -> Iterator[Finding]:
    """Reports sums over devices in 16 bits that the compiler inserted."""
    reported = {(f.file, f.line) for f in program.traced if f.check == ALL_REDUCE_16BIT.id}
    for row in _large(program.rows.collectives):
        is_sum = row.operation in ("all-reduce", "reduce-scatter") and row.dtype in _HALF
        if not is_sum or (row.file, row.line) in reported:
            continue
        is_gradient = row.phase == BACKWARD and not row.in_matmul
        name = "gradients" if is_gradient else "activations"
        size = bytes_text(row.bytes)
        message = f"{size} of {name} are summed over devices in {row.dtype} ({row.operation})."
        fix = _FIX_REDUCE if is_gradient else "No change is required for activations."
        is_error = is_gradient and audit.context.requires_fp32_reductions
        reduction = finding(ALL_REDUCE_16BIT, row, message, fix)
        yield dataclasses.replace(reduction, severity=ERROR if is_error else WARNING)


@UNDONATED_STATE.on_compiled
def check_donation(program: CompiledProgram, audit: Auditor) -> Iterator[Finding]:
    """Reports a program without donated arguments."""
    del audit
    if not program.rows.memory.aliased:
        message = "no argument is donated: the old and the new state are in memory together."
        fix = UNDONATED_STATE.fix
        yield Finding(check=UNDONATED_STATE.id, severity=WARNING, message=message, fix=fix)


def _large(rows: Iterable[CollectiveRow]) -> Iterator[CollectiveRow]:
    return (row for row in rows if row.bytes >= _SMALL * row.count)


def _requires_16_bits(audit: Auditor, module: str) -> bool:
    """Returns True if the policies allow only 16-bit dtypes for a module."""
    below = tuple(module.split("/")) if module else ()
    allowed = audit.context.allowed_dtypes(Location((*audit.root, *below)))
    return bool(allowed) and FLOAT32 not in allowed and all(map(is_16bit, allowed))


def finding(check: Check, row: GemmRow | CollectiveRow, message: str, fix: str = "") -> Finding:
    return Finding(
        check=check.id,
        severity=check.severity,
        module=row.module,
        primitive=row.operation if isinstance(row, CollectiveRow) else "dot",
        file=row.file,
        line=row.line,
        message=message,
        fix=fix or check.fix,
        count=row.count,
        flops=row.flops if isinstance(row, GemmRow) else 0,
    )
