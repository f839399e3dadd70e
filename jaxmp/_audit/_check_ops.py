"""Judges of operations in 16 bits: softmax, loss, norm, sums, exponentials; of promotions."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from jaxmp._audit._checks import ERROR, WARNING
from jaxmp._audit._context import (
    Body,
    OpOccurrence,
    PendingFindings,
    PolicyContext,
    dtype_of,
    half_of,
    named,
)
from jaxmp._audit._dataflow import GRADIENT, Terms
from jaxmp._audit._labels import STREAM, ConditionalFinding, Flow, ForwardUse, Promotion
from jaxmp._core._compat import scan_counts
from jaxmp._core._dtypes import FLOAT32, FLOAT64, FLOATS_16BIT, is_16bit
from jaxmp._core._jaxprs import AUTOCAST, BACKWARD, FORWARD, equations, is_literal, sub_jaxprs
from jaxmp._core._locations import call_site

# Primitives that hand an array on, or its absolute value, as jnp's logsumexp does.
_LAYOUT = named(
    "convert_element_type reshape broadcast_in_dim abs squeeze transpose copy expand_dims"
    " stop_gradient reduce_precision"
)
_NEAR = _LAYOUT | {"mul", "div", "add", "sub", "select_n"}
_SUMS = frozenset({"reduce_sum", "cumsum"})
_REDUCTIONS = _SUMS | named(
    "reduce_prod cumprod cumlogsumexp reduce_window_sum scatter-add scatter-sub scatter-mul"
)
# Activation functions of `jax.nn` whose exponentials are those of negative numbers.
_BOUNDED = frozenset({"elu", "celu", "selu"})
# Of the last, tanh's derivative is made.
_POWERS = frozenset({"integer_pow", "square", "one_minus_square"})
_BINARY = named("add sub mul div max min pow rem atan2 select_n concatenate")
# Sums of fewer terms lose less than three bits.
_FEW = 8

_FIX_SOFTMAX = "jax.nn.softmax(x.astype(jnp.float32)).astype(x.dtype)"
_FIX_LOSS = "logits = logits.astype(jnp.float32)"
_FIX_SUMS = {
    "reduce_sum": "jnp.sum(x, axis, dtype=jnp.float32).astype(x.dtype)",
    "cumsum": "jnp.cumsum(x.astype(jnp.float32), axis).astype(x.dtype)",
    "cumprod": "jnp.cumprod(x.astype(jnp.float32), axis).astype(x.dtype)",
    "scatter-add": "total.astype(jnp.float32).at[index].add(x.astype(jnp.float32))",
}
_FIX_SUM = "Sum in FP32:\n    x = x.astype(jnp.float32)"
_FIX_GRADIENT = "jaxmp.autocast(jax.grad(loss_fn), policies) adds gradients up in FP32"
FIX_ACCUMULATOR = (
    "Start from zeros in FP32, and add in FP32:\n"
    "    total = jnp.zeros(p.shape, jnp.float32)\n"
    "    total = total + grads.astype(jnp.float32)"
)
_FIX_CARRY = (
    "Start from zeros in FP32, and cast the result after the loop:\n"
    "    total = jnp.zeros(shape, jnp.float32)"
)


def check_half(
    op: OpOccurrence, context: PolicyContext, findings: PendingFindings
) -> ConditionalFinding | None:
    """Judges an operation of the op table's FP32 rows that reads 16 bits.

    Returns:
      What is reported only if the result is used in the forward pass, with which to mark it.
    """
    dtype = half_of(op.equation.invars)
    if dtype is None or context.ops.category(op.name) != "fp32" or _is_unread(op):
        return None
    if op.name in _REDUCTIONS:
        _check_sum(op, dtype, findings)
    elif op.location.phase == BACKWARD:
        return None
    elif op.name in _POWERS:
        message = f"{op.name} of {dtype.name}; float16 overflows from 65504 on"
        return _forward_use(ForwardUse(op, message, "", WARNING), findings)
    elif op.name == "rsqrt":
        _add_norm(op, dtype, context, findings)
    else:
        return _check_exponential(op, dtype, context, findings)
    return None


def _is_unread(op: OpOccurrence) -> bool:
    """Whether nothing reads the result: derivatives leave such, and no compiler keeps them."""
    return not any(var in op.body.consumers for var in op.equation.outvars)


def check_root(op: OpOccurrence, context: PolicyContext, findings: PendingFindings) -> None:
    """A square root of 16 bits whose argument is a mean: a norm that is divided by."""
    dtype = half_of(op.equation.invars)
    if dtype is not None and op.location.phase != BACKWARD:
        makers = _made_of(op.equation.invars[0], op.body, _NEAR)
        if any(map(_holds_sum, makers)):
            _add_norm(op, dtype, context, findings)


def _holds_sum(equation: Any) -> bool:
    """Whether an equation, such as jnp.var's, adds up."""
    inside = (inner for jaxpr in sub_jaxprs(equation) for inner in equations(jaxpr))
    return any(found.primitive.name in _SUMS for found in (equation, *inside))


def _add_norm(
    op: OpOccurrence, dtype: Any, context: PolicyContext, findings: PendingFindings
) -> None:
    message = f"{op.name} of {dtype.name}: a variance has {_digits(dtype)} there."
    fix = "Take mean and variance in FP32, and cast the result:\n    x = x.astype(jnp.float32)"
    fix = fix if findings.is_own_call(op.equation) else context.wrap_code
    findings.add("norm_16bit", op, message, fix)


def _digits(dtype: Any) -> str:
    return "8 bits of mantissa" if dtype.name == "bfloat16" else "no value below 6e-8"


def _check_sum(op: OpOccurrence, dtype: Any, findings: PendingFindings) -> None:
    terms = _terms(op.equation)
    if terms < _FEW or _counts_largest(op):
        return
    stall = "256 in bfloat16" if dtype.name == "bfloat16" else "2048 in float16"
    message = f"{op.name} of {terms:,} terms in {dtype.name}: a sum of ones stalls at {stall}."
    if op.location.phase == BACKWARD:
        message = f"gradient of a broadcast or of indexing: {message}"
        findings.add("reduction_16bit", op, message, _FIX_GRADIENT, severity=WARNING)
    elif op.name == "reduce_window_sum":
        findings.add("reduction_16bit", op, message, severity=WARNING)
    else:
        findings.add("reduction_16bit", op, message, _FIX_SUMS.get(op.name, _FIX_SUM))


def _counts_largest(op: OpOccurrence) -> bool:
    """Returns True for the number of largest elements, which divides a maximum's gradient."""
    for maker in _made_of(op.equation.invars[0], op.body, _LAYOUT):
        if maker.primitive.name == "eq":
            sides = (_made_of(var, op.body, _LAYOUT) for var in maker.invars)
            names = {found.primitive.name for side in sides for found in side}
            return bool(names & {"reduce_max", "reduce_min"})
    return False


def _terms(equation: Any) -> int:
    """How many numbers are added up into one, at most."""
    name, params = equation.primitive.name, equation.params
    operand = equation.invars[0].aval
    if "axes" in params:
        return math.prod(operand.shape[axis] for axis in params["axes"])
    if "axis" in params:
        return operand.shape[params["axis"]]
    if name == "reduce_window_sum":
        return math.prod(params["window_dimensions"])
    # A scatter: at most all indices are the same one.
    return math.prod(equation.invars[1].aval.shape[:-1])


def _check_exponential(
    op: OpOccurrence, dtype: Any, context: PolicyContext, findings: PendingFindings
) -> ConditionalFinding | None:
    if op.name in ("exp", "exp2"):
        sums = [e for e in _reads(op.equation, op.body) if e.primitive.name in _SUMS]
        if sums:
            logs = (e.primitive.name for total in sums for e in _reads(total, op.body))
            loss = "log" in logs
            check, words = ("loss_16bit", "log-sum-exp") if loss else ("softmax_16bit", "softmax")
            message = f"{words} in {dtype.name}: its weights have {_weight_digits(dtype)}."
            is_own = findings.is_own_call(op.equation)
            softmax = _FIX_SOFTMAX if is_own else context.wrap_code
            findings.add(check, op, message, _FIX_LOSS if loss else softmax)
            return None
    if op.name == "log" and _follows_sum_of_exp(op):
        findings.add("loss_16bit", op, f"log-sum-exp in {dtype.name}.", _FIX_LOSS)
        return None
    if op.enclosing and op.enclosing[0].params.get("name") in _BOUNDED:
        return None
    fix = f"Take {op.name} in FP32:\n    x = x.astype(jnp.float32)"
    severity = WARNING if _is_bounded(op.equation, op.body) else ERROR
    return _forward_use(ForwardUse(op, f"{op.name} of {dtype.name}", fix, severity), findings)


def _is_bounded(equation: Any, body: Body) -> bool:
    """Returns True for an exponential of at most 0, as in ELU and softplus, and its logarithm.

    Its result is at most 1, and its error that of any other operation in 16 bits.
    """
    maker = body.maker(equation.invars[0])
    if maker is None:
        return False
    name = maker.primitive.name
    if equation.primitive.name == "log1p":
        return name in ("exp", "exp2") and _is_bounded(maker, body)
    if equation.primitive.name not in ("exp", "exp2", "expm1"):
        return False
    if name == "neg":
        positive = body.maker(maker.invars[0])
        return positive is not None and positive.primitive.name in ("abs", "square")
    is_choice = name in ("select_n", "min") or maker.params.get("name") == "_where"
    return is_choice and any(_is_zero(var, body) for var in maker.invars)


def _is_zero(var: Any, body: Body) -> bool:
    maker = body.maker(var)
    while maker is not None and maker.primitive.name in _LAYOUT:
        var = maker.invars[0]
        maker = body.maker(var)
    return is_literal(var) and var.aval.size == 1 and float(var.val) == 0


def _forward_use(conditional: ForwardUse, findings: PendingFindings) -> ConditionalFinding | None:
    """Reports an operation, unless it may serve a derivative alone: then that is to be seen."""
    if conditional.op.location.phase != FORWARD:
        # What is computed again was reported where it was computed first.
        return None
    if conditional.op.location.differentiated:
        return conditional
    conditional.report("", findings)
    return None


def _weight_digits(dtype: Any) -> str:
    return "8 bits" if dtype.name == "bfloat16" else "11 bits, and logits end at 65504"


def _follows_sum_of_exp(op: OpOccurrence) -> bool:
    makers = list(_made_of(op.equation.invars[0], op.body, _LAYOUT))
    return any(
        "exp" in (inner.primitive.name for inner in _made_of(maker.invars[0], op.body, _LAYOUT))
        for maker in makers
        if maker.primitive.name in _SUMS
    )


def _reads(equation: Any, body: Body) -> Iterator[Any]:
    """The equations that read a result, through casts and changes of shape."""
    waiting = list(equation.outvars)
    while waiting:
        for reader in body.readers(waiting.pop()):
            yield reader
            if reader.primitive.name in _LAYOUT:
                waiting += reader.outvars


def _made_of(var: Any, body: Body, through: frozenset[str], depth: int = 12) -> Iterator[Any]:
    """The equations that a value comes from, through those named."""
    waiting = [var]
    while waiting and depth:
        depth -= 1
        maker = body.maker(waiting.pop())
        if maker is not None:
            yield maker
            if maker.primitive.name in through:
                waiting += maker.invars


# ---------------------------------------------------------------------------
# Running sums in loops
# ---------------------------------------------------------------------------


def check_carry(
    op: OpOccurrence,
    loop: Body,
    carry: list[tuple[Any, Any]],
    findings: PendingFindings,
    flow: Flow,
) -> None:
    """A loop that adds to a carry in 16 bits what does not depend on that carry.

    A residual stream, whose addend is computed from the carry itself, is no running sum.

    Args:
      op: of the loop.
      loop: the loop's body.
      carry: (variable that comes in, variable that goes out) of each carry.
      findings: where findings go.
      flow: labels of the loop's variables.
    """
    for before, after in carry:
        if is_literal(after) or dtype_of(before) not in FLOATS_16BIT:
            continue
        for adding in _made_of(after, loop, _LAYOUT):
            if adding.primitive.name in ("add", "add_any", "sub") and _adds_to(
                adding, before, loop
            ):
                name = dtype_of(before).name
                message = f"a running sum over the steps of a loop in {name}."
                inner = op._replace(equation=adding, enclosing=(op.equation, *op.enclosing))
                if _is_after_gradient(op) and GRADIENT in flow.of(adding.outvars[0]):
                    message = f"gradients are added up over the steps of a loop in {name}."
                    findings.add("accumulator_16bit", inner, message, FIX_ACCUMULATOR)
                else:
                    findings.add("reduction_16bit", inner, message, _FIX_CARRY)
                break


def _is_after_gradient(op: OpOccurrence) -> bool:
    """Returns True outside of derivatives: a gradient inside of a loss is an activation."""
    return op.location.phase == FORWARD and not op.location.differentiated


def check_terms(op: OpOccurrence, findings: PendingFindings, flow: Flow) -> None:
    """Three or more gradients that are summed in 16 bits, without a loop."""
    (result,) = op.equation.outvars
    if not _is_after_gradient(op):
        return
    if any(isinstance(label, Terms) and label.number > 2 for label in flow.of(result)):
        message = f"gradients of several microbatches are added up in {dtype_of(result).name}."
        findings.add("accumulator_16bit", op, message, FIX_ACCUMULATOR)


def _adds_to(adding: Any, before: Any, loop: Body) -> bool:
    sides = [_plain(var, loop) for var in adding.invars]
    if before not in sides:
        return False
    other = adding.invars[1 - sides.index(before)]
    return is_literal(other) or other not in _dependents(before, loop)


def _plain(var: Any, body: Body) -> Any:
    """The variable that `var` is a mere cast of."""
    maker = body.maker(var)
    while maker is not None and maker.primitive.name == "convert_element_type":
        var = maker.invars[0]
        maker = body.maker(var)
    return None if is_literal(var) else var


def _dependents(start: Any, body: Body) -> set[Any]:
    found = {start}
    for equation in body.jaxpr.eqns:
        if any(not is_literal(var) and var in found for var in equation.invars):
            found.update(equation.outvars)
    return found


# ---------------------------------------------------------------------------
# Silent promotion
# ---------------------------------------------------------------------------


def check_promotion(
    op: OpOccurrence, context: PolicyContext, findings: PendingFindings, flow: Flow
) -> None:
    """Marks a cast to a wider dtype that JAX inserted because the other operand is wider.

    JAX casts and computes in one call, at one line of the source; a cast that somebody wrote is a
    call of its own, and autocast marks those that it inserts. The promotion is reported where the
    wide value does harm (`Promotion`); a residual stream that was FP32 from the start is a note.
    """
    if AUTOCAST in str(op.equation.source_info.name_stack) or op.location.phase != FORWARD:
        return
    (operand,), (result,) = op.equation.invars, op.equation.outvars
    source, target = dtype_of(operand), dtype_of(result)
    if not _is_wider(source, target) or math.prod(operand.aval.shape) <= 1:
        return
    wanted = context.wanted(op.location)
    if GRADIENT in flow.of(operand) or (wanted and not any(is_16bit(dtype) for dtype in wanted)):
        return
    size = math.prod(_unbroadcast(operand, op.body).aval.shape)
    for reader in op.body.readers(result):
        # A small array, such as a bias beside an FP32 activation, costs nothing.
        if reader.primitive.name in _BINARY and 2 * size >= reader.outvars[0].aval.size:
            others = _wide_operands(reader, result, op)
            if others:
                _add_promotion(op, reader, others, findings, flow)


def _is_wider(source: Any, target: Any) -> bool:
    return (is_16bit(source) and target == FLOAT32) or (
        target == FLOAT64 and (is_16bit(source) or source == FLOAT32)
    )


def _add_promotion(
    op: OpOccurrence, reader: Any, others: list[Any], findings: PendingFindings, flow: Flow
) -> None:
    (operand,), (result,) = op.equation.invars, op.equation.outvars
    source, target = dtype_of(operand).name, dtype_of(result).name
    here = op._replace(equation=reader)
    message = f"{source} {_symbol(reader)} {target} gives {target}"
    earlier = [x for var in others for x in flow.of(var) if isinstance(x, Promotion)]
    if earlier:
        file, line = findings.line_of(here)
        location = f" at {file.rpartition('/')[2]}:{line}" if file else ""
        # One expression, such as `mean + noise * std`, does no harm to its own parts.
        own = _own_line(here, findings)
        for promotion in earlier:
            if own and _own_line(promotion.op, findings) == own:
                continue
            promotion.report(f", and it also promotes {source}{location}", findings)
    elif any(_is_stream(var, operand, op, flow) for var in others):
        flow.mark(result, STREAM)
        fix = f"Cast the stream where it starts:\n    x = x.astype(jnp.{source})"
        message = f"{message}: the residual stream or carry is {target} from its start on."
        findings.add("implicit_promotion", here, message, fix, severity=WARNING)
    else:
        flow.mark(result, Promotion(here, message, _fix_promotion(here, others, source, findings)))


def _own_line(op: OpOccurrence, findings: PendingFindings) -> tuple[str, int] | None:
    """The line of an operation that the user's own code calls; None for a layer's."""
    return findings.line_of(op) if findings.is_own_call(op.equation) else None


def _fix_promotion(
    op: OpOccurrence, others: list[Any], source: str, findings: PendingFindings
) -> str:
    if not findings.is_own_call(op.equation):
        words = f"Set the layer's dtype=jnp.{source}, or cast its result"
        return f"{words}:\n    y = y.astype(jnp.{source})"
    numbers = [var for var in others if is_literal(var)]
    if numbers:
        words = "Write a Python number in place of an array or a NumPy number"
        return f"{words}:\n    {float(numbers[0].val)}"
    return f"Cast the other operand:\n    y = y.astype(jnp.{source})"


def _derives(var: Any, source: Any, body: Body) -> bool:
    """Returns True if `var` is computed from `source` within one jaxpr."""
    if is_literal(var) or is_literal(source):
        return False
    first = body.positions.get(source, -1)
    waiting, seen = [var], set()
    while waiting:
        maker = body.maker(waiting.pop())
        for operand in () if maker is None else maker.invars:
            if operand is source:
                return True
            if not is_literal(operand) and operand not in seen:
                seen.add(operand)
                if body.positions.get(operand, -1) > first:
                    waiting.append(operand)
    return False


def _is_stream(var: Any, operand: Any, op: OpOccurrence, flow: Flow) -> bool:
    """Returns True for a stream, such as a residual one, to which a branch in 16 bits is added."""
    if STREAM in flow.of(var) or _is_carry(var, op):
        return True
    return _derives(operand, var, op.body)


def _is_carry(var: Any, op: OpOccurrence) -> bool:
    """Returns True for a value that the enclosing loop carries from step to step."""
    if not op.enclosing or is_literal(var):
        return False
    loop = op.enclosing[0]
    if loop.primitive.name == "scan":
        consts, carried = scan_counts(loop.params)
    elif loop.primitive.name == "while":
        consts, carried = loop.params["body_nconsts"], len(loop.outvars)
    else:
        return False
    return var in op.body.jaxpr.invars[consts : consts + carried]


def _symbol(equation: Any) -> str:
    return {"add": "+", "sub": "-", "mul": "*", "div": "/"}.get(equation.primitive.name, "and")


def _wide_operands(reader: Any, upcast: Any, op: OpOccurrence) -> list[Any]:
    """The wide operands that made JAX promote `upcast` for `reader`, without broadcasts of them."""
    call = call_site(op.equation)
    if call != call_site(reader) or not (call or _is_where(op)):
        return []
    wide = dtype_of(upcast)
    others = [var for var in reader.invars if var is not upcast and dtype_of(var) == wide]
    plain = [_unbroadcast(var, op.body) for var in others]
    return [] if any(_is_of_call(var, call, op.body) for var in others) else plain


def _unbroadcast(var: Any, body: Body) -> Any:
    maker = body.maker(var)
    while maker is not None and maker.primitive.name in ("broadcast_in_dim", "reshape"):
        var = maker.invars[0]
        maker = body.maker(var)
    return var


def _is_where(op: OpOccurrence) -> bool:
    """Whether an equation is inside jnp.where, which promotes and does nothing else."""
    return bool(op.enclosing) and op.enclosing[0].params.get("name") == "_where"


def _is_of_call(var: Any, call: Any, body: Body) -> bool:
    """Whether an operand is made within the same call: then the call upcast on purpose."""
    maker = body.maker(var)
    while maker is not None and maker.primitive.name in ("broadcast_in_dim", "reshape"):
        maker = body.maker(maker.invars[0])
    return maker is not None and call is not None and call_site(maker) == call
