"""Check of sums over devices in 16 bits, in the traced and in the compiled program."""

from __future__ import annotations

from jaxmp._audit._auditor import Auditor
from jaxmp._audit._checks import ERROR, WARNING, Check
from jaxmp._audit._dataflow import GRADIENT
from jaxmp._audit._expressions import fix_origins
from jaxmp._audit._labels import Reduction16Bit
from jaxmp._audit._program import OpOccurrence, dtype_of
from jaxmp._audit._trace import Traced
from jaxmp._core._dtypes import is_16bit
from jaxmp._core._jaxprs import BACKWARD
from jaxmp._core._matmuls import MATMULS
from jaxmp._core._programs._operations import mesh_axes_of

ALL_REDUCE_16BIT = Check(
    id="all_reduce_16bit",
    severity=ERROR,
    explanation="Gradients of parameters are summed over devices in 16 bits where the recipe"
    " requires FP32. A warning without policies.",
    fix="grads = jax.lax.pmean(jax.tree.map(lambda g: g.astype(jnp.float32), grads), 'data')",
    needs_target="under `jit` with shardings; not for `shard_map` and `pmap`",
    includes_optimizer=True,
)

# The gradient of a gather in 16 bits is a sum over devices in 16 bits.
_FIX_GATHER = """\
Gather in 16 bits, and sum the gradient in FP32:
    @jax.custom_vjp
    def gather(w):
        return jax.lax.all_gather(w.astype(jnp.{dtype}), {name}, tiled=True)

    def gather_bwd(_, g):
        g = g.astype(jnp.float32)
        return (jax.lax.psum_scatter(g, {name}, tiled=True),)

    gather.defvjp(lambda w: (gather(w), None), gather_bwd)"""


@ALL_REDUCE_16BIT.on_result("psum", "psum_invariant", "reduce_scatter")
def label_reductions(op: OpOccurrence, audit: Auditor) -> None:
    """Labels a sum over devices in 16 bits."""
    for operand, result in zip(op.equation.invars, op.equation.outvars, strict=True):
        if is_16bit(dtype_of(operand)) and operand.aval.size > 1:
            label = Reduction16Bit(op, GRADIENT in audit.flow.of(operand))
            audit.collected[Reduction16Bit].append(label)
            audit.flow.mark(result, label)


@ALL_REDUCE_16BIT.on_operation(*MATMULS)
def label_activations(op: OpOccurrence, audit: Auditor) -> None:
    """Records that a matmul of the backward pass reads a sum, which is then an activation."""
    if op.location.phase == BACKWARD:
        for label in audit.flow.of_all(op.equation.invars[:2]):
            if isinstance(label, Reduction16Bit):
                label.is_activation = True


@ALL_REDUCE_16BIT.on_program
def report_reductions(audit: Auditor, traced: Traced) -> None:
    """Reports the sums over devices, after the walk."""
    audit.collected[Traced].append(traced)
    for reduction in audit.collected[Reduction16Bit]:
        _report(reduction, audit)


def sum_note(dtype: str) -> str:
    """Returns the note about sums that require no change: a few terms, rounded as activations."""
    return f"activations are summed over devices in {dtype}, as in tensor parallelism"


def _report(reduction: Reduction16Bit, audit: Auditor) -> None:
    op = reduction.op
    dtype = dtype_of(op.equation.invars[0]).name
    names = mesh_axes_of(op.equation)
    name = repr(names[0]) if len(names) == 1 else repr(names)
    if not reduction.is_gradient or reduction.is_activation:
        audit.notes[sum_note(dtype)] = None
        return
    message = f"gradients are summed over devices in {dtype} ({op.name})."
    fix = fix_origins(op, audit.findings)
    fix = fix or f"jax.lax.pmean(jax.tree.map(lambda g: g.astype(jnp.float32), grads), {name})"
    if op.name == "reduce_scatter" and op.location.phase == BACKWARD:
        fix = _FIX_GATHER.format(name=name, dtype=dtype)
    elif op.location.phase == BACKWARD:
        fix = (
            "Let JAX sum the gradient of the FP32 parameters, before the loss casts them:\n"
            f"    params = jax.lax.pcast(params, {name}, to='varying')"
        )
    severity = ERROR if audit.context.requires_fp32_reductions else WARNING
    audit.add(ALL_REDUCE_16BIT, op, message, fix, severity=severity)
