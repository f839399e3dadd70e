"""Checks of matmuls and lookups: their dtypes and sizes, and promotions that make them wide."""

from __future__ import annotations

import ast
import itertools
import math
from types import CodeType

import jax.numpy as jnp

from jaxmp import _core, _programs
from jaxmp._core import _compat
from jaxmp._programs import Atom, Equation
from jaxmp._tools.audit import _checks, _dataflow, _labels
from jaxmp._tools.audit._auditor import Auditor
from jaxmp._tools.audit._checks import Check, OpOccurrence
from jaxmp._tools.audit._origins import (
    apply_code,
    fix_casts,
    fix_wide,
    in_words,
    is_in_flax,
)
from jaxmp._tools.fixes import _rewrite
from jaxmp._tools.report import _section

IMPLICIT_PROMOTION = Check(
    id="implicit_promotion",
    explanation="A 16-bit array and an FP32 (or float64) array meet in an operation without an"
    " explicit cast, and the wide result is read by a matmul, promotes other 16-bit arrays, or is"
    " returned. A warning for a residual stream that is FP32 from the start.",
    fix="y = y.astype(x.dtype)",
)

_BINARY = _core.named("add sub mul div max min pow rem atan2 select_n concatenate")


class PromotedValue(_labels.ConditionalFinding, _labels.WideValue):
    """Label of the wide result of an implicit promotion.

    It is harmful if an FP32 matmul reads it, if it promotes another 16-bit array, or if the program
    returns it. A value that is cast back before that was promoted on purpose or at no cost.
    """

    check = IMPLICIT_PROMOTION


@IMPLICIT_PROMOTION.on_operation("convert_element_type")
def check_promotion(op: OpOccurrence) -> None:
    """Labels a cast to a wider dtype that JAX inserted because the other operand is wider.

    JAX casts and computes in one call, at one line of the source. A cast that the user wrote is a
    call of its own, and casts by autocast have a name scope.
    """
    if _programs.AUTOCAST in str(op.equation.source_info.name_stack):
        return
    (operand,), result = op.operands, op.result
    source, target = _checks.dtype_of(operand), op.dtype
    is_wider = {source, target} <= _checks.FLOATS and source.itemsize < target.itemsize
    if not is_wider or math.prod(operand.aval.shape) <= 1:
        return
    allowed = op.audit.context.allowed_dtypes(op.location.names)
    is_fp32_module = bool(allowed) and not any(_core.is_16bit(dtype) for dtype in allowed)
    if _dataflow.GRADIENT in op.audit.flow.of(operand) or is_fp32_module:
        return
    size = math.prod(op.body.source_of(operand, _checks.BROADCASTS).aval.shape)
    for reader in op.body.readers(result):
        # Promoting a small array, such as a bias beside an FP32 activation, costs nothing.
        if reader.primitive.name in _BINARY and 2 * size >= reader.outvars[0].aval.size:
            others = _wide_operands(reader, result, op)
            if others:
                _label_promotion(op, reader, others)


@IMPLICIT_PROMOTION.on(_checks.MATMUL)
def report_matmul(op: OpOccurrence, matmul: _programs.Matmul, flops: int) -> None:
    """Reports promotions that make a matmul wide; their fix is that of the matmul, too."""
    is_wide = bool({_core.FLOAT32, _core.FLOAT64} & {matmul.lhs, matmul.rhs})
    if not is_wide or not op.is_forward or _is_fp32_by_design(op, matmul):
        return
    harm = f", and the matmul at {op.where} ({op.name}) reads it"
    for label in op.labels(PromotedValue, *op.operands[:2]):
        label.report(harm, flops)
        is_here = label.op.line == op.line
        fix = label.fix if is_here else f"{label.fix}\nThis is the promotion at {label.op.where}."
        op.audit.promotion_fixes.setdefault((op.location.names, op.line), fix)


def promotion_fix(op: OpOccurrence) -> str:
    """Returns the fix of the promotion that makes a matmul or its gradient wide, or ""."""
    return op.audit.promotion_fixes.get((op.location.names, op.line), "")


def _label_promotion(op: OpOccurrence, reader: Equation, others: list[Atom]) -> None:
    (operand,), result = op.operands, op.result
    source, target = _checks.dtype_of(operand).name, _checks.dtype_of(result).name
    here = op.sibling(reader)
    symbol = {"add": "+", "sub": "-", "mul": "*", "div": "/"}.get(here.name)
    what = f"{source} {symbol} {target}" if symbol else f"{here.name} of {source} and {target}"
    message = f"{what} is computed in {target}"
    earlier = op.labels(PromotedValue, *others)
    # The FP32 state of a recurrence, such as an LSTM's, times a 16-bit gate.
    is_gated = _labels.GATED in op.audit.flow.of_all(others)
    is_gated |= reader.primitive.name == "mul" and any(_is_carry(var, op) for var in others)
    if earlier:
        harm = f", and the result promotes another {source} array at {here.where}"
        # Parts of one expression, such as `mean + noise * std`, are one promotion.
        for promotion in earlier:
            is_own = here.is_own_call and promotion.op.is_own_call
            if not is_own or promotion.op.line != here.line:
                promotion.report(harm)
    elif is_gated:
        op.mark(_labels.GATED)
    elif any(_is_stream(var, operand, op) for var in others):
        op.mark(_labels.STREAM)
        index = next(n for n, var in enumerate(reader.invars) if var is not result)
        fix = fix_wide("Cast the stream at its start", here, [index], source)
        message = f"{message}: the residual stream or loop carry is {target} from its start."
        here.add(IMPLICIT_PROMOTION, message, fix, severity=_checks.WARNING)
    else:
        fix = _fix_promotion(here, result, others, source)
        op.mark(PromotedValue(here, message, fix))


def _fix_promotion(op: OpOccurrence, upcast: Atom, others: list[Atom], source: str) -> str:
    if not op.is_own_call and op.caller != "_where":
        if not is_in_flax(op):
            return in_words(op)
        layer = f"Set dtype=jnp.{source} in the layer, or cast its result"
        return f"{layer}:\n    y = y.astype(jnp.{source})"
    if op.name == "sub" and op.labels(_labels.LogProbability, *others):
        narrow = next(n for n, var in enumerate(op.operands) if var is upcast)
        return fix_wide("Cast the narrow operand of log-probabilities", op, [narrow], "float32")
    is_wide = lambda var: var is not upcast and _checks.dtype_of(var) == _checks.dtype_of(upcast)
    index = next(n for n, var in enumerate(op.operands) if is_wide(var))
    literals = [var for var in others if _programs.is_literal(var)]
    # Arrays are not joined with a number.
    if literals and op.name != "concatenate":
        number = str(float(literals[0].val))
        code = _rewrite.with_operand(op.expression, index, number) or number
        sentence = "Replace the array or NumPy number by a Python number, which does not promote"
        return f"{sentence}:\n    {code}"
    return fix_wide("Cast the wide operand", op, [index], source)


# ---------------------------------------------------------------------------
# Residual streams and carries
# ---------------------------------------------------------------------------


def _is_stream(var: Atom, operand: Atom, op: OpOccurrence) -> bool:
    """Returns True for a wide value, such as a residual stream, that `operand` is added to."""
    if _labels.STREAM in op.audit.flow.of(var) or _is_carry(var, op):
        return True
    is_other = operand is not var and not _programs.is_literal(var)
    return is_other and op.body.depends_on(operand, var)


def _is_carry(var: Atom, op: OpOccurrence) -> bool:
    """Returns True for a carry of the enclosing loop."""
    loop = None if op.outer is None else _programs.loop_of(op.outer.equation)
    return loop is not None and any(var is each for each in loop.incoming)


# ---------------------------------------------------------------------------
# Operands
# ---------------------------------------------------------------------------


def _wide_operands(reader: Equation, upcast: Atom, op: OpOccurrence) -> list[Atom]:
    """Returns the wide operands because of which JAX promotes `upcast`, before broadcasts."""
    call = _programs.call_site(op.equation)
    # The only casts of `jnp.where` are promotions.
    if call != _programs.call_site(reader) or not (call or op.caller == "_where"):
        return []
    wide = _checks.dtype_of(upcast)
    others = [var for var in reader.invars if var is not upcast and _checks.dtype_of(var) == wide]
    makers = (op.body.maker_through(var, _checks.BROADCASTS) for var in others)
    # If the same call made an operand, it widens on purpose.
    if call and any(maker and _programs.call_site(maker) == call for maker in makers):
        return []
    return [op.body.source_of(var, _checks.BROADCASTS) for var in others]


FP32_MATMUL = Check(
    id="fp32_matmul",
    explanation="A matmul or convolution reads FP32 where the policies require 16 bits. Without"
    " policies: it reads FP32 that was cast up from 16 bits. A note of speed in the second"
    " derivative of a matmul with an FP32 result.",
    fix="model = jaxmp.load_recipe('bf16').wrap(model)\nfn = jaxmp.autocast(fn, 'bf16')",
)
OFF_POLICY_MATMUL = Check(
    id="off_policy_matmul",
    explanation="A matmul or convolution reads a 16-bit dtype that the policies do not allow for"
    " its module.",
    fix="model = jaxmp.load_recipe('bf16').wrap(model)",
)
MIXED_OPERANDS = Check(
    id="mixed_operands",
    explanation="The operands of a matmul or convolution have two dtypes, so it runs in the wider"
    " one. A note of speed in the backward pass of a matmul with an FP32 result.",
    fix="y = y.astype(x.dtype)",
)

# ---------------------------------------------------------------------------
# Dtypes
# ---------------------------------------------------------------------------


@MIXED_OPERANDS.on(_checks.MATMUL)
def check_operands(op: OpOccurrence, matmul: _programs.Matmul, flops: int) -> None:
    """Reports operands of two dtypes. Complex matmuls have no form in 16 bits."""
    dtypes = matmul.lhs, matmul.rhs
    is_float = bool(_checks.FLOATS & set(dtypes)) and "c" not in (x.kind for x in dtypes)
    if dtypes[0] == dtypes[1] or not is_float or _is_fp32_by_design(op, matmul):
        return
    narrow, wide = sorted(dtypes, key=lambda dtype: dtype.itemsize)
    message = f"{op.name} of {dtypes[0].name} and {dtypes[1].name} runs in {wide.name}"
    severity, precision = _severity_of(op) if op.is_forward else (_checks.NOTE, "")
    fix = fix_wide("Cast the wide operand", op, [dtypes.index(wide)], narrow.name)
    if not op.is_forward:
        # The cotangent of a matmul with a wider preferred_element_type is wide. Its FP32 result is
        # worth keeping, for a log-softmax in particular, so that only time is lost.
        fix = op.audit.context.gradient_fix
        op.audit.collected[MIXED_OPERANDS].append(_programs.call_site(op.equation))
    elif "\n" in fix:
        # The gradients of this matmul are as wide.
        op.audit.promotion_fixes.setdefault((op.location.names, op.line), fix)
    fix = promotion_fix(op) or fix
    op.add(MIXED_OPERANDS, f"{message}{precision}.", fix, severity=severity, flops=flops)


@FP32_MATMUL.on(_checks.MATMUL)
def check_fp32(op: OpOccurrence, matmul: _programs.Matmul, flops: int) -> None:
    """Reports FP32 operands where 16 bits are required, or where they were 16 bits before."""
    if not (matmul.lhs == matmul.rhs == _core.FLOAT32) or _is_fp32_by_design(op, matmul):
        return
    allowed = op.audit.context.allowed_dtypes(op.location.names)
    was_16_bits = _labels.WAS_16_BITS in op.audit.flow.of_all(op.operands[:2])
    call, calls = _programs.call_site(op.equation), op.audit.collected[_labels.WideValue]
    calls += [(call, None if _is_router(op) else was_16_bits)] * op.is_forward
    # The cotangent of a layer in FP32 is cast up where its result was cast to 16 bits.
    origins = {origin for site, origin in calls if site == call}
    is_wide = was_16_bits and (op.is_forward or origins - {None} != {False})
    is_wide &= _programs.FULL_PRECISION not in op.location.names
    if _is_router(op) or origins == {None}:
        op.audit.notes[f"the FP32 matmul at {op.where} chooses experts or classes"] = None
    elif _core.FLOAT32 not in allowed and (allowed or is_wide):
        _report_fp32(op, min((dtype.name for dtype in allowed), default=""), flops)


@FP32_MATMUL.on_operation("custom_linear_solve", "call_hi_primitive", passes=_checks.ALL_PASSES)
def collect_solver(op: OpOccurrence) -> None:
    """Collects the matmuls of a linear solve or a root, which keep their dtype under autocast."""
    inside = _programs.equations_inside(op.equation)
    matmuls = (e for e in inside if e.primitive.name in _programs.MATMULS)
    # Derivatives of the solver call them, too, in other scopes.
    op.audit.collected[FP32_MATMUL] += {((), _programs.call_site(e)) for e in matmuls}


def _is_fp32_by_design(op: OpOccurrence, matmul: _programs.Matmul) -> bool:
    """Returns True for matmuls of attention, of a matrix that is factorized, of the result, and of
    its norm, of squared distances, and for those by which a loss selects values, such as
    log-probabilities.

    Autocast computes the factorized one in FP32, because its condition multiplies each rounding
    error, and the selected values, which the matmul itself does not round. The power iteration of
    a spectral norm requires FP32, too, and has few operations.
    """
    exact = op.audit.collected[FP32_MATMUL]
    key = op.location.names, op.line
    is_exact = _programs.exact_uses(op.equation, op.use) or _dataflow.is_of_power_iteration(op)
    is_collected = ((), _programs.call_site(op.equation)) in exact
    if is_exact or is_collected or _is_selection(op):
        exact.append(key)
    function = _jax_function(op) if _severity_of(op)[1] else None
    is_of_jax = function is not None and "precision" not in function.co_varnames
    if function is not None and is_of_jax:
        text = f"`{function.co_name}` of JAX itself multiplies with precision=HIGHEST at {op.where}"
        op.audit.notes[text] = None
    return is_of_jax or _checks.is_internal_matmul(op, matmul) or key in exact


def _jax_function(op: OpOccurrence) -> CodeType | None:
    """Returns the function of JAX that the user's expression calls without a `precision`.

    None if it calls another function, as of a layer of Flax, whose author sets the precision.
    """
    own = op.expression
    if not isinstance(own.node, ast.Call) or "precision" in own.text:
        return None
    name = ast.unparse(own.node.func).rpartition(".")[2]
    return next((code for code in own.called if code.co_name == name), None)


def _is_selection(op: OpOccurrence) -> bool:
    """Returns True for values of a loss times a mask, one-hot rows or another constant."""
    is_loss = _programs.Use.LOSS in op.use
    for values, constant in itertools.permutations(op.operands[:2]):
        if _checks.dtype_of(values) != _core.FLOAT32:
            continue
        # A step that takes the gradient alone does not return its loss.
        is_log = bool(op.labels(_labels.LogProbability, values))
        is_computed = is_loss and not _dataflow.is_argument(op.audit.flow.of(values))
        if (is_log or is_computed) and _dataflow.is_constant(constant, op):
            return True
    return False


def _is_router(op: OpOccurrence) -> bool:
    """Returns True for scores that a top-k or argmax compares, of fewer classes than features."""
    is_narrow = op.result.aval.size < op.operands[0].aval.size
    return op.is_forward and is_narrow and _programs.Use.ORDER in op.use


@OFF_POLICY_MATMUL.on(_checks.MATMUL)
def check_policy(op: OpOccurrence, matmul: _programs.Matmul, flops: int) -> None:
    """Reports a 16-bit dtype that the policies do not allow."""
    dtype, allowed = matmul.lhs, op.audit.context.allowed_dtypes(op.location.names)
    if dtype != matmul.rhs or dtype == _core.FLOAT32 or dtype not in _core.CASTABLE:
        return
    if not allowed or dtype in allowed or _checks.is_internal_matmul(op, matmul):
        return
    names = " or ".join(sorted(dtype.name for dtype in allowed))
    message = f"{op.name} of {dtype.name}, but the policies require {names}."
    fix = f"Remove casts by hand, and apply the policies:\n    {apply_code(op)}"
    op.add(OFF_POLICY_MATMUL, message, fix, flops=flops)


@FP32_MATMUL.on(_checks.PROGRAM)
def suggest_autocast(audit: Auditor) -> None:
    """Replaces the fix where the model is wrapped already, and wrapping does not reach a matmul."""
    rows, context = audit.matmuls, audit.context
    if any(names and _core.is_16bit(jnp.dtype(lhs)) for names, _, lhs, _ in rows):
        for finding in audit.findings:
            if finding.check in (FP32_MATMUL, OFF_POLICY_MATMUL):
                finding.fix = finding.fix.replace(context.wrap_code, context.autocast_code)


@FP32_MATMUL.on(_checks.PROGRAM)
def report_bytes(audit: Auditor) -> None:
    """Adds the share of bytes to the messages about matmuls that leave 16 bits."""
    for finding in audit.findings:
        if finding.check in (FP32_MATMUL, MIXED_OPERANDS):
            size = finding.bytes
            share = f"{size / max(audit.matmul_bytes, 1):.0%} of the bytes of all matmuls"
            message = finding.message.removesuffix(".")
            finding.message = f"{message}; it moves {_section.bytes_text(size)}, {share}."


def _report_fp32(op: OpOccurrence, required: str, flops: int) -> None:
    severity, precision = _severity_of(op)
    reason = f"but the policies require {required}"
    reason = reason if required else "and an operand was cast up from 16 bits"
    message = f"{op.name} of float32, {reason}{precision}."
    mixed = op.audit.collected[MIXED_OPERANDS]
    is_second = not op.is_forward and _programs.call_site(op.equation) in mixed
    own = op.audit.context.gradient_fix if is_second else _fix_rule(op) or fix_casts(op)
    # With it, autocast keeps FP32 operands.
    sentence = f"{_remove_precision(op)}, and apply" if precision else "Apply"
    promoted, code = promotion_fix(op), apply_code(op)
    # A rule for the root would reach its own operations alone.
    path = op.rule_path
    has_rule = bool(required and path) and not promoted
    code = f"{sentence} the policies:\n    " * (has_rule or bool(precision)) + code
    fix = promoted or own or code
    if has_rule:
        code = op.audit.context.with_rule(f"jaxmp.Rule({path!r}, 'c=f32')")
        fix += f"\nOr keep the module in FP32 by a rule:\n    {code}"
    severity = _checks.NOTE if is_second else severity
    op.add(FP32_MATMUL, message, fix, severity=severity, flops=flops)


def _severity_of(op: OpOccurrence) -> tuple[str, str]:
    """Returns the severity of FP32 operands, and a reason that is the choice of the author."""
    options = _programs.arithmetic_of(op.equation)
    if options is None or not options.is_highest:
        return _checks.ERROR, ""
    return _checks.WARNING, "; the code sets precision=HIGHEST"


def _remove_precision(op: OpOccurrence) -> str:
    """Returns the first part of the fix of `precision=HIGHEST`."""
    if "precision" in op.expression.text:
        return "Remove precision=HIGHEST"
    function, context = _jax_function(op), "jax.default_matmul_precision('highest')"
    if function is None:
        return f"Remove precision=HIGHEST or {context}"
    return f"Call `{function.co_name}` with precision=None outside of {context}"


def _fix_rule(op: OpOccurrence) -> str:
    """Returns the fix of a matmul of a `custom_vjp` function or its rules; "" for another one.

    The equations of such a rule have the line at which its function is called, but not those of a
    function that it calls, such as that of a differential equation.
    """
    is_rule = op.is_backward and _programs.call_site(op.equation) not in op.audit.matmul_calls
    is_of_rule = lambda equation: _compat.is_in_custom_vjp(equation.source_info)
    is_custom_vjp = lambda e: e.primitive.name == "custom_vjp_call" or is_of_rule(e)
    is_forward_rule = is_of_rule(op.equation) and not fix_casts(op)
    if is_rule or is_forward_rule:
        was_16_bits = lambda var: _labels.WAS_16_BITS in op.audit.flow.of(var)
        wide = min(op.operands[:2], key=was_16_bits).aval.str_short()
        line, fix = "calls", f"In the rule, cast {wide} to 16 bits before the matmul."
    elif any(map(is_custom_vjp, op.enclosing)) and not op.is_within("/flax/"):
        line, fix = "is in", f"Apply it inside:\n    {op.audit.context.autocast_code}"
    else:
        return ""
    return (
        f"This line {line} a function with a backward rule (`jax.custom_vjp`), which policies and"
        f" `autocast` do not change. {fix}"
    )


# ---------------------------------------------------------------------------
# Sizes
# ---------------------------------------------------------------------------


MISALIGNED_MATMUL = Check(
    id="misaligned_matmul",
    severity=_checks.NOTE,
    explanation="A dimension of a matmul is not a multiple of 16 bytes (8 elements in 16 bits, 4 in"
    " FP32, 16 in FP8). An error if the padding of larger dimensions costs a quarter of all FLOPs.",
    fix="width = -(-width // 8) * 8",
)


@MISALIGNED_MATMUL.on(_checks.MATMUL)
def check_sizes(op: OpOccurrence, matmul: _programs.Matmul, flops: int) -> None:
    """Reports innermost dimensions that are not multiples of 16 bytes."""
    # A step that does not follow its policies yet is padded for their dtype.
    allowed = op.audit.context.allowed_dtypes(op.location.names)
    dtype = min((matmul.lhs, *allowed), key=lambda dtype: dtype.itemsize)
    multiple = _programs.multiple_of(dtype) if matmul.lhs != _core.FLOAT64 else 1
    # The gradient of a kernel sums over the batch; its widths are those of the forward pass.
    is_summed = op.is_backward and op.name == "conv_general_dilated"
    roles = "K" * op.is_forward if _is_mapped(op) else "KMN"[is_summed:]
    sizes = {r: n for r, n in matmul.widths.items() if n % multiple and r in roles}
    if not sizes or _has_sizes_of_data(op):
        return
    paddings = {role: _programs.padded(size, multiple) for role, size in sizes.items()}
    text = ", ".join(f"{role} = {size} (pad to {paddings[role]})" for role, size in sizes.items())
    cost = math.prod(paddings[role] / size for role, size in sizes.items()) - 1
    plural = "is not a multiple" if len(sizes) == 1 else "are not multiples"
    message = f"{text} {plural} of {multiple}; padding costs {cost:.1%}."
    classes = _classes_of(op)
    if [*sizes.values()] == [classes]:
        fix = _fix_classes(classes, *paddings.values())
    else:
        fix = "Round the width up, unless it is one of the data, such as a number of channels:"
        fix += "".join(f"\n    width = {n}" for n in sorted(set(paddings.values())))
    finding = op.add(MISALIGNED_MATMUL, message, fix, flops=flops)
    if classes:
        op.audit.collected[MISALIGNED_MATMUL].append((op.line, classes))
    # Smaller sizes, such as three channels or one output, are those of the data, as are classes.
    outputs = op.audit.collected[MISALIGNED_MATMUL]
    is_data = lambda n: n < multiple or (finding.op.line, n) in outputs
    waste = math.prod(paddings[role] / n for role, n in sizes.items() if not is_data(n)) - 1
    finding.harmed_flops += waste * flops


# Libraries without layers, and files of JAX whose functions contain matmuls.
_OF_DATA = ("/optax/", "/rlax/", "/distrax/", "/diffrax/", "/lineax/", "/_src/image/", "linalg.py")


def _has_sizes_of_data(op: OpOccurrence) -> bool:
    """Returns True for a matmul inside of a loss or a factorization, whose sizes are data."""
    inside = itertools.takewhile(lambda c: not op.findings.lines.is_own(c.co_filename), op.codes)
    files = [code.co_filename.replace("\\", "/") for code in inside]
    return any(part in file for file in files for part in _OF_DATA)


def _is_mapped(op: OpOccurrence) -> bool:
    """Returns True for a matmul in `jax.vmap` without batch dimensions.

    The mapped axis is one of its free dimensions, and the gradient of the kernel sums over it.
    """
    if op.name != "dot_general" or _programs.dot_of(op.equation).batch[0]:
        return False
    return any("vmap(" in str(e.source_info.name_stack) for e in (op.equation, *op.enclosing))


def _classes_of(op: OpOccurrence) -> int:
    """Returns the number of classes of a matmul of logits; 0 for other matmuls."""
    is_head = bool(op.use & (_programs.Use.SOFTMAX | _programs.Use.ORDER))
    return op.result.aval.shape[-1] if is_head and op.is_forward else 0


def _fix_classes(classes: int, width: int) -> str:
    """Returns the fix of a head whose number of classes is not aligned."""
    masked = f"jnp.where(jnp.arange({width}) < {classes}, logits, jnp.finfo(logits.dtype).min)"
    return (
        f"If {classes} is the number of classes, it may stay as it is. To align it, compute {width}"
        f" logits, and mask those without a class:\n    logits = {masked}"
    )
