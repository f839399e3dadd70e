"""Checks of a program compiled for a GPU, of matmuls in FP8, and of rules without a module."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from jaxmp import _core, _programs
from jaxmp._core import is_fp8
from jaxmp._policies import _rules
from jaxmp._tools.audit import _check_matmuls, _checks, _fp8_forms
from jaxmp._tools.audit._auditor import Auditor
from jaxmp._tools.audit._checks import Check, OpOccurrence
from jaxmp._tools.audit._dataflow import From
from jaxmp._tools.audit._rows import CollectiveRow, Compilation, Finding, GemmRow
from jaxmp.fp8 import _explain

FP32_GEMM = Check(
    id="fp32_gemm",
    explanation="The GPU multiplies in FP32 or TF32 where the policies require 16 bits, although"
    " the traced program does not.",
    fix="y = jnp.dot(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16))",
    needs_target="yes",
)
UNDONATED_STATE = Check(
    id="undonated_state",
    severity=_checks.NOTE,
    explanation="No argument is donated, so the old and the new state are in memory at the same"
    " time.",
    fix="jax.jit(train_step, donate_argnums=0)",
    needs_target="yes",
)

# `jax.pmap` contains a `shard_map`, too.
_FIX_MAPPED = (
    "Donate the state to `jax.pmap`, or to `jax.jit` outside of `jax.shard_map`:\n"
    "    jax.pmap(train_step, donate_argnums=0)\n    jax.jit(train_step, donate_argnums=0)"
)
_WIDE = ("float32", "tf32")
_WIDE_CONVOLUTION = (
    "{}: cuDNN has no convolution of 16-bit operands with an FP32 result, so XLA multiplies in {}, "
    "which is slower and not less precise"
)


@FP32_GEMM.on(_checks.COMPILED)
def check_gemms(program: Compilation, audit: Auditor) -> Iterator[Finding]:
    """Reports matmuls in FP32 or TF32."""
    reported = {
        audit.module_of(f.op.location.names)
        for f in audit.findings
        if f.check is _check_matmuls.FP32_MATMUL
    }
    for row in program.gemms:
        is_wide = row.lhs in _WIDE or row.rhs in _WIDE
        if is_wide and row.module not in reported and requires_16_bits(audit, row.module):
            if row.kernel == "cudnn" and row.out == "float32":
                audit.notes[_WIDE_CONVOLUTION.format(row.module or "(root)", row.lhs)] = None
                continue
            yield finding(FP32_GEMM, row, f"the GPU multiplies in {row.lhs} x {row.rhs}.")


@UNDONATED_STATE.on(_checks.COMPILED)
def check_donation(program: Compilation, audit: Auditor) -> Iterator[Finding]:
    """Reports a program without donated arguments."""
    if not program.memory.aliased:
        message = "no argument is donated: the old and the new state are in memory together."
        count = len(audit.traced.nnx_objects)
        numbers = ", ".join(map(str, range(count))) + "," * (count == 1)
        # Without `nnx.jit`, the new state does not reach the objects.
        fix = f"nnx.jit(train_step, donate_argnums=({numbers}))" if numbers else ""
        forms = map(_programs.form_of, _programs.equations(audit.traced.jaxpr))
        fix = _FIX_MAPPED if _programs.Form.SHARDS in forms and not numbers else fix
        yield UNDONATED_STATE.finding(message, fix)


def requires_16_bits(audit: Auditor, module: str) -> bool:
    """Returns True if the policies allow only 16-bit dtypes for a module."""
    below = tuple(module.split("/")) if module else ()
    allowed = audit.context.allowed_dtypes((*audit.root, *below))
    return bool(allowed) and _core.FLOAT32 not in allowed and all(map(_core.is_16bit, allowed))


def finding(
    check: Check, row: GemmRow | CollectiveRow, message: str, fix: str = "", **fields: Any
) -> Finding:
    """Returns a finding about a row of the compiled program; see `Check.finding`."""
    own = {name: getattr(row, name) for name in ("module", "file", "line", "count")}
    is_gemm = isinstance(row, GemmRow)
    own |= {"primitive": "dot" if is_gemm else row.operation, "flops": row.flops if is_gemm else 0}
    return check.finding(message, fix, **own | fields)


NOT_FP8 = Check(
    id="not_fp8",
    severity=_checks.WARNING,
    explanation="A linear layer multiplies in 16 bits where the policies require FP8, because its"
    " dimensions are not multiples of 16, because it is too narrow for a gain, or because FP8 is"
    " not applied to it, as to convolutions, `ragged_dot` and stacked kernels.",
    fix="jaxmp.Rule('**/head', 'matmul=default')",
)
FP8_FALLBACK = Check(
    id="fp8_fallback",
    explanation="Operands are rounded to FP8 but multiplied in a wider dtype. FP8 matmuls require"
    " an H100 or a later GPU.",
    fix="y = jax.lax.dot_general(x_fp8, w_fp8, dimension_numbers)",
    needs_target="yes",
)


@NOT_FP8.on(_checks.MATMUL)
def check_layers(op: OpOccurrence, matmul: _programs.Matmul, flops: int) -> None:
    """Reports a linear layer in 16 bits for which the policies require FP8."""
    if not op.is_forward or not op.audit.context.requires_fp8(op.location):
        return
    if is_fp8(matmul.lhs) and is_fp8(matmul.rhs):
        _note_tokens(op)
    if not (_core.is_16bit(matmul.lhs) and _core.is_16bit(matmul.rhs)):
        return
    casts = filter(None, map(op.body.maker, op.operands[:2]))
    is_by_autocast = any(_programs.AUTOCAST in str(e.source_info.name_stack) for e in casts)
    if is_by_autocast and op.use & (_programs.Use.SOFTMAX | _programs.Use.ORDER):
        op.audit.notes[f"autocast leaves the logits at {op.where} in 16 bits, not FP8"] = None
        return
    form, reason = _fp8_forms.excluded_form(op.equation)
    fix, context = _exclude(op), op.audit.context
    if form == _fp8_forms.FORMS["dot_general"][0] and not op.labels(From, *op.operands[:2]):
        return  # The batched matmuls of attention have no kernel.
    if not form and op.name == "dot_general":
        sizes, scaling = _note_tokens(op), context.scaling
        explained = all(sizes) and _explain.explain_exclusion(*sizes, scaling, context.target)
        reason = explained or "the matmul is not that of a Flax layer, or the layer sets its own"
        if "narrow" in reason or "min_width" in reason:
            toml = "    [fp8]\n    min_width = 0"
            fix = f"Use FP8 for narrow layers, too, in the recipe file:\n{toml}\n{fix}"
    if reason:
        message = f"{form or op.name} of {matmul.lhs.name}, but the policies require FP8: {reason}."
        op.add(NOT_FP8, message, fix, flops=flops)


def _note_tokens(op: OpOccurrence) -> tuple[int, int]:
    """Returns the input and output features of a dot, and notes a decision for other tokens."""
    _, contracted = _programs.dot_of(op.equation).contracted
    rows, shape = (math.prod(var.aval.shape) for var in op.operands[:2])
    k = math.prod(op.operands[1].aval.shape[axis] for axis in contracted)
    n, tokens = shape // max(k, 1), rows // max(k, 1)
    scaling, target = op.audit.context.scaling, op.audit.context.target
    if not scaling.emulate and _explain.decides_otherwise(k, n, scaling, tokens, target):
        op.audit.notes[_explain.other_tokens("/".join(op.location.names), tokens, 1)] = None
    return k, n


def _exclude(op: OpOccurrence) -> str:
    path = op.rule_path if op.location.names else "excluded"
    code = op.audit.context.with_rule(f"jaxmp.Rule({path!r}, 'matmul=default')")
    if op.location.names:
        return f"Exclude the module by a rule:\n    {code}"
    scope = "    with jax.named_scope('excluded'):\n        y = x @ w"
    return f"Give the matmul a scope, and exclude it by a rule:\n{scope}\n    {code}"


# A note and not a warning, because there is nothing to correct.
_ONE_SCALE = (
    "FP8 matmuls have one scale for a tensor, so that results can depend on the other examples of"
    " the batch and on later tokens; with fp8.RowwiseScaling(), each row has a separate scale"
)


@NOT_FP8.on_operation("jit", passes=_checks.ALL_PASSES)
def note_scales(op: OpOccurrence) -> None:
    """Notes once in a program that tensors are quantized with one scale."""
    is_quantization = _programs.name_of(op.equation).startswith(_programs.QUANTIZE)
    if is_quantization and any(var.aval.shape == () for var in op.equation.outvars):
        op.audit.notes[_ONE_SCALE] = None


@FP8_FALLBACK.on(_checks.COMPILED)
def check_fallback(program: Compilation, audit: Auditor) -> Iterator[Finding]:
    """Reports matmuls of FP8 values in a wider dtype."""
    # XLA may remove a cast to FP8 and back, so that the compiled program does not contain it.
    rows = audit.fp8.items()
    traced = {(audit.module_of(names), phase, *line): name for (names, phase, line), name in rows}
    for row in program.gemms:
        line = row.module, row.phase, row.file, row.line
        dtype = row.was_fp8 or traced.get(line, "")
        is_fp8 = row.lhs.startswith("float8") and row.rhs.startswith("float8")
        if dtype and not is_fp8:
            message = f"operands are rounded to {dtype} and multiplied in {row.lhs} x {row.rhs}."
            yield finding(FP8_FALLBACK, row, message)


UNUSED_RULE = Check(
    id="unused_rule",
    explanation="A required rule decides for no module of the program.",
    fix="jaxmp.Rule('decoder/**', 'c=f32', required=False)",
)


@UNUSED_RULE.on(_checks.PROGRAM)
def check_rules(audit: Auditor) -> Iterator[Finding]:
    """Reports required rules without a module."""
    policies = audit.context.policies
    if policies is None:
        return
    modules: dict[str, None] = {}
    decisive: set[_rules.Rule | None] = set()
    for names in audit.locations.names:
        if _programs.FULL_PRECISION not in names:
            modules[audit.module_of(names)] = None
            decisive.add(audit.context.resolve(names).rule)
    # A program contains no module types and parameters.
    for rule in dict.fromkeys(policies.rules):
        is_checked = rule.required and rule.module_type is None and not rule.addresses_parameter
        if is_checked and rule not in decisive:
            text = _rules.rule_text(rule, with_reason=False)
            message = f"the required rule {text} decides for no module of this program."
            fix = f"Correct the path, or allow it to match nothing:\n    jaxmp.{rule!r}"
            hint = _core.did_you_mean(str(rule.path), filter(None, modules))
            yield UNUSED_RULE.finding(message + hint, f"{fix[:-1]}, required=False)")
