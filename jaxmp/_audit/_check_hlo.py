"""Judges of a program compiled for a GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from jaxmp._audit._checks import CHECKS, ERROR, WARNING
from jaxmp._audit._context import PolicyContext
from jaxmp._audit._gpu_rows import CollectiveRow, Compilation, GemmRow
from jaxmp._audit._report import Finding
from jaxmp._audit._sections import bytes_words
from jaxmp._core._dtypes import FLOAT32, is_16bit
from jaxmp._core._jaxprs import BACKWARD, Path
from jaxmp._core._locations import Location

# Smaller arrays, such as norms and losses, are gathered in whatever dtype they have.
_SMALL = 4096  # bytes
_WIDE = ("float32", "tf32")
_HALF = ("bfloat16", "float16")
# Under `jit` the compiler sums what the matmul of a gradient emits. `shard_map` leaves the sum to
# the user's code.
_FIX_REDUCE = """\
def gradients(params, batch):
    grads = jax.grad(loss_fn)(params, batch)
    return jax.lax.pmean(jax.tree.map(lambda g: g.astype(jnp.float32), grads), 'data')

specs = dict(in_specs=(P(), P('data')), out_specs=P(), check_vma=False)
grads = jax.shard_map(gradients, mesh=mesh, **specs)(params, batch)"""


def program_findings(
    compilation: Compilation,
    context: PolicyContext,
    root: Path,
    known: Iterable[Finding],
    fp8: Mapping[tuple[str, str, str, int], str],
) -> Iterator[Finding]:
    """What is wrong with a compiled program.

    Args:
      compilation: its rows.
      context: of the policies.
      root: the scope that is named after the root's class.
      known: findings of the traced program, which are not said again.
      fp8: (module, phase, file, line) of products that were traced with FP8 operands -> the dtype.
        XLA may take a cast to FP8 and back away, so that the compiled program shows none.
    """
    known = list(known)
    said = {finding.module for finding in known if finding.check == "fp32_matmul"}
    reduced = {(f.file, f.line) for f in known if f.check == "all_reduce_16bit"}
    for row in compilation.gemms:
        was = row.was_fp8 or fp8.get((row.module, row.phase, row.file, row.line), "")
        if was and not (row.lhs.startswith("float8") and row.rhs.startswith("float8")):
            message = f"operands pass through {was}; the product runs in {row.lhs} x {row.rhs}."
            yield _finding("fp8_fallback", row, message)
        wide = row.lhs in _WIDE or row.rhs in _WIDE
        if wide and row.module not in said and _is_half_wanted(context, row.module, root):
            yield _finding("fp32_gemm", row, f"the GPU multiplies in {row.lhs} x {row.rhs} here.")
    for row in compilation.collectives:
        if (row.file, row.line) not in reduced or row.operation == "all-gather":
            yield from _check_collective(row, context, root)
    if not compilation.memory.aliased:
        check = "undonated_state"
        message = "no argument is donated: old and new state are in memory together."
        yield Finding(
            check=check, severity=CHECKS[check].severity, message=message, fix=CHECKS[check].fix
        )


def _check_collective(row: CollectiveRow, context: PolicyContext, root: Path) -> Iterator[Finding]:
    if row.bytes < _SMALL * row.count:
        return
    size = bytes_words(row.bytes)
    if row.operation == "all-gather" and row.dtype == "float32":
        if row.module and _is_half_wanted(context, row.module, root):
            fix = (
                "cast the shard first: jax.lax.with_sharding_constraint(w.astype(jnp.bfloat16),"
                " sharding_of_w)"
            )
            yield _finding("fp32_all_gather", row, f"{size} are gathered in float32.", fix)
    elif row.operation in ("all-reduce", "reduce-scatter") and row.dtype in _HALF:
        is_gradient = row.phase == BACKWARD and not row.in_matmul
        what = "gradients" if is_gradient else "activations"
        message = f"{size} of {what} are summed over devices in {row.dtype} ({row.operation})."
        fix = (
            _FIX_REDUCE
            if is_gradient
            else "None is needed: activations are summed in the compute dtype."
        )
        finding = _finding("all_reduce_16bit", row, message, fix)
        is_fault = is_gradient and context.wants_wide_reduces
        yield dataclasses.replace(finding, severity=ERROR if is_fault else WARNING)


def _is_half_wanted(context: PolicyContext, module: str, root: Path) -> bool:
    """Whether the policies say 16 bits, and nothing else, for a module."""
    below = tuple(module.split("/")) if module else ()
    wanted = context.wanted(Location((*root, *below)))
    return bool(wanted) and FLOAT32 not in wanted and all(map(is_16bit, wanted))


def _finding(check: str, row: GemmRow | CollectiveRow, message: str, fix: str = "") -> Finding:
    what: Any = row
    return Finding(
        check=check,
        severity=CHECKS[check].severity,
        module=row.module,
        primitive=getattr(what, "operation", "dot"),
        file=row.file,
        line=row.line,
        message=message,
        fix=fix or CHECKS[check].fix,
        count=row.count,
        flops=getattr(what, "flops", 0),
    )
