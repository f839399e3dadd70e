"""Checks of what several devices send: sums in 16 bits, gathers and their sharding constraints."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from jax.sharding import PartitionSpec

from jaxmp import _core, _programs
from jaxmp._tools.audit import _auditor, _checks, _dataflow, _hlo_collectives, _labels
from jaxmp._tools.audit._check_compiled import finding, requires_16_bits
from jaxmp._tools.audit._check_ops import is_sum
from jaxmp._tools.audit._origins import fix_expression, fix_origins
from jaxmp._tools.audit._rows import CollectiveRow, Compilation, Finding
from jaxmp._tools.fixes import _rewrite
from jaxmp._tools.report import _section

ALL_REDUCE_16BIT = _checks.Check(
    id="all_reduce_16bit",
    explanation="Gradients of parameters are summed over devices in 16 bits where the recipe"
    " requires FP32 (a warning without policies), or statistics of the batch are averaged.",
    fix="grads = jax.lax.pmean(jax.tree.map(lambda g: g.astype(jnp.float32), grads), 'data')",
    needs_target="under `jit` with shardings; not for `shard_map` and `pmap`",
    includes_optimizer=True,
)

# The gradient of a gather in 16 bits is a sum over devices in 16 bits.
_FIX_GATHER_VJP = """\
Gather in 16 bits, and sum the gradient in FP32:
    @jax.custom_vjp
    def gather(w):
        return jax.lax.all_gather(w.astype(jnp.{dtype}), {name}, tiled=True)

    def gather_bwd(_, g):
        g = g.astype(jnp.float32)
        return (jax.lax.psum_scatter(g, {name}, tiled=True),)

    gather.defvjp(lambda w: (gather(w), None), gather_bwd)"""


@ALL_REDUCE_16BIT.on_operation(
    "psum", "psum_invariant", "reduce_scatter", passes=_checks.ALL_PASSES
)
def label_reductions(op: _checks.OpOccurrence) -> None:
    """Labels a sum over devices in 16 bits."""
    for operand, result in zip(op.operands, op.equation.outvars, strict=True):
        if _core.is_16bit(_checks.dtype_of(operand)) and operand.aval.size > 1:
            label = _labels.Reduction16Bit(op, _dataflow.GRADIENT in op.audit.flow.of(operand))
            op.audit.collected[_labels.Reduction16Bit].append(label)
            op.audit.flow.mark(result, label)


@ALL_REDUCE_16BIT.on_operation(*_programs.MATMULS, passes=[_programs.BACKWARD])
def label_activations(op: _checks.OpOccurrence) -> None:
    """Records that a matmul of the backward pass reads a sum, which is then an activation."""
    for label in op.labels(_labels.Reduction16Bit, *op.operands[:2]):
        label.is_activation = True


@ALL_REDUCE_16BIT.on(_checks.PROGRAM)
def report_reductions(audit: _auditor.Auditor) -> None:
    """Reports the sums over devices, after the walk."""
    for reduction in audit.collected[_labels.Reduction16Bit]:
        _report_reduction(reduction, audit)


def sum_note(dtype: str) -> str:
    """Returns the note about sums that require no change: a few terms, rounded as activations."""
    return f"activations are summed over devices in {dtype}, as in tensor parallelism"


def _report_reduction(reduction: _labels.Reduction16Bit, audit: _auditor.Auditor) -> None:
    op = reduction.op
    dtype = _checks.dtype_of(op.operands[0]).name
    names = _programs.mesh_axes_of(op.equation)
    name = repr(names[0]) if len(names) == 1 else repr(names)
    if op.is_forward and not reduction.is_gradient and is_sum(op):
        message = f"statistics of the batch are averaged over devices in {dtype} ({op.name})."
        fix = f"jax.lax.pmean(x.astype(jnp.float32), {name})"
        op.add(ALL_REDUCE_16BIT, message, fix_origins(op) or fix)
        return
    if not reduction.is_gradient or reduction.is_activation:
        audit.notes[sum_note(dtype)] = None
        return
    message = f"gradients are summed over devices in {dtype} ({op.name})."
    # A quotient after the sum stays, so that the code keeps the function.
    fix = fix_origins(op) or fix_expression("Sum in FP32", op)
    if "\n" not in fix:
        fix = f"jax.lax.pmean(jax.tree.map(lambda g: g.astype(jnp.float32), grads), {name})"
    if op.name == "reduce_scatter" and op.is_backward:
        fix = _FIX_GATHER_VJP.format(name=name, dtype=dtype)
    elif op.is_backward:
        fix = "Let JAX sum the gradient of the FP32 parameters, before the loss casts them:\n"
        fix += f"    params = jax.lax.pcast(params, {name}, to='varying')"
    severity = _checks.ERROR if audit.context.requires_fp32_reductions else _checks.WARNING
    op.add(ALL_REDUCE_16BIT, message, fix, severity=severity)


class Constraint(NamedTuple):
    """Sharding constraint of the forward pass, and the arguments of which it has elements."""

    op: _checks.OpOccurrence
    arguments: tuple[int, ...]


def gather_of(row: CollectiveRow, audit: _auditor.Auditor) -> Constraint | None:
    """Returns the constraint by which devices gather a weight; None if it is not known.

    XLA names many gathers after the arguments, without a line. Then the constraint has the same
    module and number of elements.
    """
    gathers = [
        each
        for each in audit.collected[Constraint]
        if audit.module_of(each.op.location.names) == row.module
        if not row.file or each.op.line == (row.file, row.line)
        if _split_of(each, audit) is not None
    ]
    elements = row.bytes // row.count // (8 if row.dtype == "float64" else 4)
    difference = lambda each: abs(each.op.operands[0].aval.size - elements)
    return min(gathers, key=difference, default=None)


def fix_of_gather(gather: Constraint, dtype: str, audit: _auditor.Auditor) -> str:
    """Returns the constraint with a 16-bit copy of the weight that is still split, or "".

    The code also runs for the other constraints of its line, which must be of weights that are
    split in the same way.
    """
    line = gather.op.line
    same = [c for c in audit.collected[Constraint] if c.op.line == line]
    if len({_split_of(constraint, audit) for constraint in same}) > 1:
        return ""
    spec = ", ".join(map(repr, _split_of(gather, audit) or ()))
    is_cast = _checks.half_of(gather.op.operands) is not None
    return _rewrite.with_split_copy(
        gather.op.expression,
        f"jax.sharding.PartitionSpec({spec})",
        "" if is_cast else dtype,
        has_mesh=_programs.is_in_mesh(gather.op.equation),
    )


def _split_of(constraint: Constraint, audit: _auditor.Auditor) -> PartitionSpec | None:
    """Returns the spec of the argument that a constraint gathers; None if it gathers none."""
    shape = constraint.op.operands[0].aval.shape
    result = _programs.sharding_of_result(constraint.op.equation)
    arrays = audit.traced.arrays
    for number in constraint.arguments:
        spec = getattr(getattr(arrays[number], "sharding", None), "spec", None)
        if spec is not None and arrays[number].shape == shape:
            return None if _axes_of(arrays[number].sharding) <= _axes_of(result) else spec
    return None


FP32_ALL_GATHER = _checks.Check(
    id="fp32_all_gather",
    explanation="Devices gather a weight of a matmul in FP32, and cast it to 16 bits or FP8. A"
    " warning without policies, and for updated FP32 parameters, which ZeRO-1 gathers.",
    fix="w = jax.lax.with_sharding_constraint(w.astype(jnp.bfloat16), sharding_of_w)\n"
    "w = jax.lax.with_sharding_constraint(w, gathered_sharding_of_w)",
    needs_target="yes",
)
ACTIVATION_ALL_GATHER = _checks.Check(
    id="activation_all_gather",
    severity=_checks.WARNING,
    explanation="Devices gather activations over a mesh axis that splits both the parameters and"
    " the batch: XLA made tensor parallelism of a program for FSDP.",
    fix="x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P('data')))",
    needs_target="yes",
)
KEPT_WEIGHTS = _checks.Check(
    id="kept_weights",
    severity=_checks.WARNING,
    explanation="Weights that were gathered for the forward pass remain in memory until the"
    " backward pass, instead of being gathered again.",
    fix="model = recipe.wrap(model, shardings=params_shardings)",
    needs_target="yes",
)
REDUCTION_PER_MICROBATCH = _checks.Check(
    id="reduction_per_microbatch",
    severity=_checks.WARNING,
    explanation="Gradients are summed over devices once in each microbatch, instead of once after"
    " all of them.",
    fix="grads_fn = jax.shard_map(grads_fn, mesh=mesh, in_specs=(P(), P('data')), out_specs=P(),"
    " axis_names={'data'})",
    needs_target="yes",
)

# Smaller arrays, such as those of norms and losses, may be sent in any dtype.
_SMALL = 4096  # bytes
# Smaller sums than this share of the gathered weights are not reported.
_FEW = 0.1
_HALF = ("bfloat16", "float16")
_WIDE = ("float32", "float64")

# Under `jit` the compiler sums the result of the gradient's matmul, in the dtype of that matmul.
_FIX_REDUCE = """\
Sum the gradients of parameters in FP32:
    loss, grads = jaxmp.value_and_grad(loss_fn)(params, batch)
If this code computes them, the weight of this operation also depends on data. Then write a backward
pass (jax.custom_vjp) that makes the gradient of the weight in FP32:
    d_w = jnp.einsum("...i,...o->io", x, g, preferred_element_type=jnp.float32)"""
_SHARDINGS = """\
    model = recipe.wrap(model, shardings=params_shardings)
    params = jax.tree.map(jax.lax.with_sharding_constraint, params, params_shardings)"""
_CAST_SPLIT = "Cast the weight while it is split, and gather the copy:\n"
_FIX_GATHER = f"""\
{_CAST_SPLIT}\
    w = jax.lax.with_sharding_constraint(w.astype(jnp.{{dtype}}), sharding_of_w)
    w = jax.lax.with_sharding_constraint(w, gathered_sharding_of_w)
For all weights whose gradients jaxmp computes, pass their shardings to a Flax model, or constrain
them in the loss function:
{_SHARDINGS}"""
_FIX_UPDATE = """\
ZeRO-1 gathers parameters in the dtype in which they are stored. Store them in 16 bits, with FP32
masters in the optimizer state:
    recipe = jaxmp.load_recipe('bf16_params')"""
_FIX_ACTIVATIONS = """\
Constrain the activations of each block to the rows of the batch, so that XLA gathers weights:
    x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P({axis!r})))
If they are constrained already, pass the shardings of the weights to a Flax model, or constrain the
parameters in a loss function whose gradients jaxmp computes:
"""
_FIX_ACTIVATIONS += _SHARDINGS
_FIX_KEPT = f"""\
Gather weights again in the backward pass, which requires jaxmp's gradients, activations that are
constrained to the rows of the batch, and the shardings of the weights. Pass them to a Flax model,
or constrain the parameters in the loss function:
{_SHARDINGS}
Or compute each block again in the backward pass (nn.remat and nnx.remat in Flax):
    block = jax.checkpoint(block)"""
_FIX_KEPT_IN_LOOP = """\
They are gathered once, before the loop over microbatches, and remain in memory in all of it. If
this memory is not available, compute the gradients without jax.shard_map: then XLA gathers weights,
and sums gradients, in each microbatch."""
_FIX_REGATHER = """\
The recipe has regather=False. Gather weights again in the backward pass:
    recipe = recipe.replace(regather=True)"""
_FIX_MICROBATCHES = """\
Compute the gradients in jax.shard_map over the axis of the batch; other axes remain automatic:
    def grads_fn(params, batch):
        run = jaxmp.value_and_grad(loss_fn, microbatches={length}, axis_name={axis!r})
        return run(params, batch)

    grads_fn = jax.shard_map(
        grads_fn, mesh=mesh, in_specs=(P(), P({axis!r})), out_specs=P(), axis_names={{{axis!r}}}
    )
"""
_CALL_WITH_WHOLE = "    loss, grads = grads_fn(params, batch)"
# Otherwise, `shard_map` gathers the weights in FP32.
_CALL_WITH_SPLIT = """\
    low = jax.tree.map(
        lambda p, sharding: jax.lax.with_sharding_constraint(p.astype(jnp.{dtype}), sharding),
        params,
        params_shardings,
    )
    loss, grads = grads_fn(low, batch)"""


@ALL_REDUCE_16BIT.on(_checks.COMPILED)
def check_reductions(program: Compilation, audit: _auditor.Auditor) -> Iterator[Finding]:
    """Reports sums over devices in 16 bits that the compiler inserted."""
    reported = {f.op.line for f in audit.findings if f.check is ALL_REDUCE_16BIT}
    for row in _large(program):
        is_sum = row.operation in ("all-reduce", "reduce-scatter") and row.dtype in _HALF
        if not is_sum or (row.file, row.line) in reported:
            continue
        if row.content != _hlo_collectives.WEIGHT_GRADIENT:
            audit.notes[sum_note(row.dtype)] = None
            continue
        size = _section.bytes_text(row.bytes)
        message = f"{size} of gradients are summed over devices in {row.dtype} ({row.operation})."
        severity = _checks.ERROR if audit.context.requires_fp32_reductions else _checks.WARNING
        yield finding(ALL_REDUCE_16BIT, row, message, _FIX_REDUCE, severity=severity)


@FP32_ALL_GATHER.on_operation("sharding_constraint")
def collect_constraints(op: _checks.OpOccurrence) -> None:
    """Collects the constraints of the forward pass, of which some gather weights."""
    numbers = (label.number for label in op.labels(_dataflow.From, op.operands[0]))
    op.audit.collected[Constraint].append(Constraint(op, tuple(numbers)))


@FP32_ALL_GATHER.on(_checks.COMPILED)
def check_gathers(program: Compilation, audit: _auditor.Auditor) -> Iterator[Finding]:
    """Reports weights that devices gather in a wider dtype than operations read."""
    updates: list[CollectiveRow] = []
    has_policies = audit.context.policies is not None
    for row in _large(program, operation="all-gather"):
        is_allowed = has_policies and not requires_16_bits(audit, row.module)
        if row.dtype not in _WIDE or is_allowed:
            continue
        if row.content == _hlo_collectives.UPDATE and has_policies:
            updates.append(row)
        elif row.content == _hlo_collectives.WEIGHT and row.in_matmul and row.read_as not in _WIDE:
            size = _section.bytes_text(row.bytes)
            message = f"{size} of weights are gathered in {row.dtype} and read in {row.read_as}."
            dtype, gather = _half_dtype([row]), gather_of(row, audit)
            fix = _FIX_GATHER.format(dtype=dtype)
            if gather is not None:
                code = fix_of_gather(gather, dtype, audit)
                fix = f"{_CAST_SPLIT}    {code}" if code else fix
                file, line = gather.op.line
                row = dataclasses.replace(row, file=file, line=line)
            severity = _checks.ERROR if has_policies else _checks.WARNING
            yield finding(FP32_ALL_GATHER, row, message, fix, severity=severity)
    if updates:
        message = f"updated parameters are gathered in {updates[0].dtype}."
        yield _whole(FP32_ALL_GATHER, updates, message, _FIX_UPDATE)


@ACTIVATION_ALL_GATHER.on(_checks.COMPILED)
def check_activations(program: Compilation, audit: _auditor.Auditor) -> Iterator[Finding]:
    """Reports activations that devices gather where they could gather weights."""
    activations = _large(program, _hlo_collectives.ACTIVATION, "all-gather")
    axes = _fsdp_axes(program, audit)
    rows = [row for row in activations if row.in_matmul and not axes.isdisjoint(row.axes)]
    weights = _large(program, _hlo_collectives.WEIGHT, "all-gather")
    if _bytes(rows) > _FEW * _bytes(weights):
        axis = next(name for name in rows[0].axes if name in axes)
        message = f"activations are gathered over the axis {axis!r}, which splits the parameters"
        message += " and the batch, instead of weights."
        yield _whole(ACTIVATION_ALL_GATHER, rows, message, _FIX_ACTIVATIONS.format(axis=axis))


@KEPT_WEIGHTS.on(_checks.COMPILED)
def check_kept_weights(program: Compilation, audit: _auditor.Auditor) -> Iterator[Finding]:
    """Reports gathered weights that the backward pass reads."""
    weights = _large(program, _hlo_collectives.WEIGHT, "all-gather")
    rows = [row for row in weights if row.is_kept]
    # The backward pass reads the last weights, such as those of the head, at once.
    if _bytes(rows) > _FEW * _bytes(weights):
        recipe = audit.context.recipe
        fix = _FIX_REGATHER if recipe is not None and not recipe.regather else _FIX_KEPT
        if audit.collected[REDUCTION_PER_MICROBATCH] and not any(row.in_outer_loop for row in rows):
            fix = _FIX_KEPT_IN_LOOP
        yield _whole(KEPT_WEIGHTS, rows, "gathered weights are kept until the backward pass.", fix)


@REDUCTION_PER_MICROBATCH.on_operation(*_programs.LOOPS)
def collect_loops(op: _checks.OpOccurrence) -> None:
    """Collects the lengths of loops over microbatches.

    A loop over training steps updates its arguments.
    """
    if op.location.differentiated:
        return
    body = op.loop.jaxpr
    stacks = (str(equation.source_info.name_stack) for equation in _programs.equations(body))
    is_backward = any(_programs.phase_of(stack) == _programs.BACKWARD for stack in stacks)
    if is_backward and not op.audit.flow.labels(_dataflow.Update, *body.outvars):
        op.audit.collected[REDUCTION_PER_MICROBATCH].append(op.loop.length)


@REDUCTION_PER_MICROBATCH.on(_checks.COMPILED)
def check_microbatches(program: Compilation, audit: _auditor.Auditor) -> Iterator[Finding]:
    """Reports sums of gradients in a loop over microbatches."""
    lengths = audit.collected[REDUCTION_PER_MICROBATCH]
    gradients = _large(program, _hlo_collectives.WEIGHT_GRADIENT)
    rows = [row for row in gradients if row.in_outer_loop and row.axes]
    if lengths and rows:
        length = lengths[0]
        count = length or "an unknown number of"
        message = f"gradients are summed over devices in a loop over {count} microbatches, once in"
        message += " each of them."
        axis = rows[0].axes[0]
        fix = _FIX_MICROBATCHES.format(length=length or "k", axis=axis)
        if axis in _fsdp_axes(program, audit):
            weights = _large(program, _hlo_collectives.WEIGHT, at_least=0)
            fix += _CALL_WITH_SPLIT.format(dtype=_half_dtype(weights))
        else:
            fix += _CALL_WITH_WHOLE
        yield _whole(REDUCTION_PER_MICROBATCH, rows, message, fix)


def _fsdp_axes(program: Compilation, audit: _auditor.Auditor) -> set[str]:
    """Returns the mesh axes that split both parameters and the first dimension of the batch."""
    traced = audit.traced
    of_weights, of_batch, batch = set[str](), set[str](), set[_programs.Atom]()
    rows = zip(traced.variables, program.compiled.shardings, traced.may_be_weights(), strict=True)
    for var, sharding, is_weight in rows:
        if is_weight:
            of_weights |= _axes_of(sharding)
        else:
            of_batch |= _axes_of(sharding, 1)
            batch.add(var)
    # The program may constrain the rows of its batch.
    for op, _ in audit.collected[Constraint]:
        if _dataflow.through_calls(op.operands[0], op)[0] in batch:
            of_batch |= _axes_of(_programs.sharding_of_result(op.equation), 1)
    return of_weights & of_batch


def _axes_of(sharding: object, dimensions: int | None = None) -> frozenset[str]:
    """Returns the mesh axes that split the first dimensions of an array; None: all of them."""
    return _core.axis_names(getattr(sharding, "spec", ())[:dimensions])


def _half_dtype(rows: Iterable[CollectiveRow]) -> str:
    """Returns the 16-bit dtype in which weights are read; "bfloat16" if there is none."""
    return next((row.read_as for row in rows if row.read_as in _HALF), "bfloat16")


def _large(
    program: Compilation, content: str = "", operation: str = "", at_least: int = _SMALL
) -> list[CollectiveRow]:
    """Returns the collectives whose arrays have a least number of bytes.

    Args:
      program: the program.
      content, operation: those of the collectives; "" for any.
      at_least: the number of bytes.
    """
    return [
        row
        for row in program.collectives
        if content in ("", row.content) and operation in ("", row.operation)
        if row.bytes >= at_least * row.count
    ]


def _bytes(rows: list[CollectiveRow]) -> int:
    return sum(row.bytes for row in rows)


def _whole(check: _checks.Check, rows: list[CollectiveRow], message: str, fix: str) -> Finding:
    """Returns a warning about the bytes of several rows, at the location of the largest."""
    largest, count = max(rows, key=lambda row: row.bytes), sum(row.count for row in rows)
    message = f"{_section.bytes_text(_bytes(rows))} of {message}"
    return finding(check, largest, message, fix, severity=_checks.WARNING, count=count)
