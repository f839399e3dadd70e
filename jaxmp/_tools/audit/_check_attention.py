"""Checks of attention in a traced program: kernels that are not fused, and masks."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from jaxmp import _core, _programs
from jaxmp._attention import ASKED, AttentionExplanation, _declared, choice_of, implementation_of
from jaxmp._attention._declared import Declaration
from jaxmp._attention._layer import layer_attention
from jaxmp._core import _compat
from jaxmp._tools.audit import _auditor, _checks, _labels
from jaxmp._tools.audit._checks import Check, OpOccurrence
from jaxmp._tools.report import _section

UNFUSED_ATTENTION = Check(
    id="unfused_attention",
    severity=_checks.NOTE,
    explanation="Attention does not run as a fused kernel: it is written as two matmuls and a"
    " softmax, or jaxmp's attention cannot use a fused kernel, for the reason in the message.",
    fix="jax.nn.dot_product_attention(query, key, value, implementation='cudnn')",
)

# Elements of one head's logits that a fused kernel computes as one block (64 queries, 64 keys). It
# saves nothing beyond that.
_BLOCK = 64 * 64
# Treatment of the logits by each implementation of jaxmp's attention.
_LOGITS = {
    "xla": "stores the logits of all pairs of positions in memory",
    "blockwise": "computes one block of keys after another in a loop",
}
_ON_GPU = "audit(..., target='h200') reports the choice for a GPU."


@UNFUSED_ATTENTION.on_operation("reduce_sum")
def collect_sums(op: OpOccurrence) -> None:
    """Collects the logits whose exponentials are summed; a softplus does not sum them."""
    labels = op.labels(_labels.Logits, op.operands[0])
    op.audit.collected[_labels.Logits] += [label for label in labels if label.normalized]


@UNFUSED_ATTENTION.on_operation("dot_general")
def check_matmuls(op: OpOccurrence) -> None:
    """Reports attention that is written as two matmuls around a softmax."""
    logits = _attention_logits(op)
    if logits is None or any(map(_checks.is_attention, op.enclosing)):
        return
    aval = logits.equation.outvars[0].aval
    size = math.prod(aval.shape) * aval.dtype.itemsize * logits.times
    message = f"{_why_unfused(logits)}; its logits have the shape {list(aval.shape)} and take"
    message += f" {_section.bytes_text(size)} of memory."
    flops = 2 * _programs.matmul_of(op.equation).flops * op.times
    logits.add(UNFUSED_ATTENTION, message, flops=flops)


@UNFUSED_ATTENTION.on_operation("jit")
def check_calls(op: OpOccurrence) -> None:
    """Reports calls of jaxmp's attention that do not run a fused kernel."""
    if not _checks.is_attention(op.equation):
        return
    name = _programs.name_of(op.equation)
    implementation, argument = implementation_of(name)
    if implementation == "cudnn":
        return
    choice = choice_of(name, [var.aval for var in op.operands])
    message, fix = _explain_choice(implementation, argument, choice)
    flops = sum(
        _programs.count_flops(inner.jaxpr).total() for inner in _programs.inners(op.equation)
    )
    op.add(UNFUSED_ATTENTION, message, fix, flops=flops * op.times)


def _attention_logits(op: OpOccurrence) -> OpOccurrence | None:
    """Returns the matmul q k^T if `op` multiplies the softmax of its result by the values."""
    values = _programs.dot_of(op.equation)
    for index, var in enumerate(op.operands[:2]):
        for logits in (label.op for label in op.labels(_labels.Logits, var) if label.normalized):
            shape = logits.result.aval.shape
            batches = len(_programs.dot_of(logits.equation).batch[0])
            is_one_axis = len(values.contracted[index]) == 1 and batches == len(values.batch[0])
            size, heads = math.prod(shape), math.prod(shape[:batches])
            summed = op.audit.collected[_labels.Logits]
            is_softmax = any(logits.equation is each.op.equation for each in summed)
            is_softmax &= size > _BLOCK * heads and (batches > 0 or not _is_layer(logits))
            if is_softmax and is_one_axis and size == math.prod(var.aval.shape):
                return logits
    return None


def _is_layer(matmul: OpOccurrence) -> bool:
    """Returns True for `x @ w` with an argument `w`: keys are computed, or transposed."""
    weight = matmul.body.source_of(matmul.equation.invars[1], _checks.CASTS)
    is_argument = matmul.body.maker(weight) is None
    return is_argument and _programs.dot_of(matmul.equation).contracted[1] == (0,)


def _why_unfused(logits: OpOccurrence) -> str:
    """Returns the reason why no fused kernel computes attention that is written as matmuls."""
    equation = logits.equation
    operand = equation.invars[0].aval
    head = math.prod(operand.shape[axis] for axis in _programs.dot_of(equation).contracted[0])
    if not _core.is_16bit(operand.dtype):
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
        return f"{message}; the reason is: {reason}.", _ON_GPU if argument == "device" else fix
    blockers = [f"{blocker.argument}: {blocker.reason}" for blocker in choice.rows]
    why = f". cuDNN's kernel cannot run ({'; '.join(blockers)})" if blockers else ""
    # The call cannot change the device, so other reasons come first.
    others = [blocker for blocker in choice.rows if blocker.argument != "device"]
    changes = [blocker.change for blocker in others or choice.rows]
    if choice.reason == ASKED:
        changes.insert(0, f"Remove {implementation!r}, so that attention is 'auto'.")
    if choice.rows and not others:
        changes.append(_ON_GPU)
    return f"{message} ({choice.reason}){why}.", " ".join(changes)


DENSE_MASK = Check(
    id="dense_mask",
    severity=_checks.WARNING,
    explanation="Attention reads a mask as an array, although the mask is causal, a window or full"
    " for every input. A kernel cannot skip the masked blocks of an array.",
    fix="recipe = recipe.replace(mask='causal')",
)


@DENSE_MASK.on_operation("jit")
def collect_mask(op: OpOccurrence) -> None:
    """Collects declarations, and the mask of a call of attention in the forward pass."""
    declared = _declared.declaration_of(_programs.name_of(op.equation))
    # Its shape is [B, N, T, S].
    is_mask = lambda var: _checks.dtype_of(var) == np.bool_ and var.aval.ndim == 4
    mask = next((v for v in op.operands if is_mask(v) and not _programs.is_literal(v)), None)
    if mask is not None and declared is not None:
        op.audit.collected[Declaration].append((op, mask, declared))
    if mask is not None and _checks.is_attention(op.equation) and mask.aval.shape[-2] > 1:
        # The elements are None if the mask depends on the program's inputs.
        op.audit.collected[DENSE_MASK].append((op, op.audit.known.value(mask)))


@DENSE_MASK.on(_checks.PROGRAM)
def check_masks(audit: _auditor.Auditor) -> None:
    """Compares masks with their declarations, and reports masks that could be declared.

    Raises:
      AttentionError: if a mask contradicts its declaration.
    """
    declared = _declared_masks(audit)
    unknown = dict.fromkeys(mask.path or "the model" for mask, is_known in declared if not is_known)
    if unknown:
        names = _paths_text(list(unknown))
        note = f"the declared masks of {names} depend on the program's inputs and were not compared"
        audit.notes[f"{note}; pass arrays instead of shapes"] = None
    # Once for each array.
    known = {id(mask): mask for _, mask in audit.collected[DENSE_MASK] if mask is not None}
    structure_of = {key: _declared.structure_of(mask) for key, mask in known.items()}
    passed = [(op, structure_of.get(id(mask))) for op, mask in audit.collected[DENSE_MASK]]
    in_layer = lambda op: _compat.is_within(op.equation.source_info, layer_attention)
    structures = {actual for op, actual in passed if in_layer(op)} | {mask for mask, _ in declared}
    for op, actual in passed:
        if actual is None:
            continue
        window = " with a window of {} and {}".format(*actual.window) if actual.window else ""
        message = f"attention reads its mask as an array, and the mask is {actual.mask}{window}"
        message += " for every input."
        path = audit.module_of(op.location.names) if len(structures) > 1 else None
        fix = _fix_declaration(actual, path) if in_layer(op) else _fix_argument(actual)
        op.add(DENSE_MASK, message, fix)


def _declared_masks(audit: _auditor.Auditor) -> list[tuple[Declaration, bool]]:
    """Compares the declared masks in the forward pass of a program with their arrays.

    Returns:
      For each layer its declaration, and True if the elements of its mask are known.

    Raises:
      AttentionError: if a mask contradicts its declaration.
    """
    program = _programs.Scope(audit.traced.closed, audit.traced.arrays)
    layers, rows = {each[0].location.names: each for each in audit.collected[Declaration]}, []
    for names, (op, mask, declared) in layers.items():
        declaration = dataclasses.replace(declared, path=audit.module_of(names))
        elements = _scope_of(op, program).value(mask)
        if elements is not None:
            _declared.check_known(elements, declaration)
        rows.append((declaration, elements is not None))
    return rows


def _scope_of(op: OpOccurrence, program: _programs.Scope) -> _programs.Scope:
    """Returns the scope of the jaxpr that contains an operation."""
    if op.outer is None:
        return program
    scopes = _scope_of(op.outer, program).inside(op.outer.equation)
    return next(scope for scope in scopes if scope.jaxpr is op.body.jaxpr)


# ---------------------------------------------------------------------------
# Texts
# ---------------------------------------------------------------------------


def _paths_text(paths: list[str]) -> str:
    more = [f"{len(paths) - 2} more layers"] if len(paths) > 2 else []
    return " and ".join([*map(repr, paths[:2]), *more])


def _fix_declaration(actual: Declaration, path: str | None) -> str:
    """Returns the declaration in a recipe, for all attention layers or for the one at `path`."""
    python, toml = _declared.declaration_code(actual, path)
    if path is not None:
        rules = f"policies = jaxmp.PolicyMap(recipe, [{python}])"
        python = f"{rules}; recipe = recipe.replace(policies=policies)"
    intro = "Declare the mask in the recipe; the model is not edited"
    code = "\n".join(f"    {line}" for line in toml)
    return f"{intro}:\n    {python}\nOr in the recipe file:\n{code}"


def _fix_argument(actual: Declaration) -> str:
    """Returns the declaration in a call of `jaxmp.dot_product_attention`."""
    arguments = ["query, key, value"] + ["is_causal=True"] * actual.is_causal
    if actual.window is not None:
        arguments.append(f"local_window_size={actual.window}")
    return f"Replace the argument mask:\n    jaxmp.dot_product_attention({', '.join(arguments)})"
