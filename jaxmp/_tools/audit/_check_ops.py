"""Checks of operations in 16 bits: softmax, losses, norms, sums and exponentials."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from jaxmp._core._dtypes import FLOATS_16BIT
from jaxmp._programs._analysis import Body
from jaxmp._programs._constructs import LOOPS, loop_of, sub_jaxprs
from jaxmp._programs._jaxprs import BACKWARD, FORWARD, Atom, Equation, equations, is_literal
from jaxmp._programs._operations import axes_of, name_of, window_of
from jaxmp._tools.audit._auditor import Auditor
from jaxmp._tools.audit._checks import ERROR, WARNING, Check
from jaxmp._tools.audit._dataflow import GRADIENT, Terms
from jaxmp._tools.audit._expressions import expression_of, fix_operation, in_fp32, with_fp32_summand
from jaxmp._tools.audit._labels import REDUCES, ConditionalFinding, RoundedInput
from jaxmp._tools.audit._program import LAYOUT, PERIODIC, OpOccurrence, dtype_of, half_of, named
from jaxmp._tools.audit._rows import Finding
from jaxmp._tools.audit._trace import Traced

# ---------------------------------------------------------------------------
# Checks
# ---------------------------------------------------------------------------

SOFTMAX_16BIT = Check(
    id="softmax_16bit",
    explanation="A softmax is computed in 16 bits.",
    fix="jax.nn.softmax(x.astype(jnp.float32)).astype(x.dtype)",
    includes_optimizer=True,
)
LOSS_16BIT = Check(
    id="loss_16bit",
    explanation="A log-softmax, a log-sum-exp, the differences of an L1 loss or a scalar result of"
    " the program are computed in 16 bits.",
    fix="logits = logits.astype(jnp.float32)",
    includes_optimizer=True,
)
NORM_16BIT = Check(
    id="norm_16bit",
    explanation="The statistics of a normalization are computed in 16 bits.",
    fix="x = x.astype(jnp.float32)",
    includes_optimizer=True,
)
REDUCTION_16BIT = Check(
    id="reduction_16bit",
    explanation="A sum, a product or a cumulative sum accumulates in 16 bits; the message estimates"
    " its error. A warning for pooling and for the sums of a backward pass, which JAX makes for"
    " values that were broadcast or gathered, if the estimate is at least 5 %.",
    fix="x = x.astype(jnp.float32)",
    includes_optimizer=True,
)
EXP_16BIT = Check(
    id="exp_16bit",
    explanation="An exponential, logarithm, power or trigonometric function of the forward pass is"
    " computed in 16 bits. A warning for squares and other integer powers in float16, which"
    " overflow.",
    fix="x = x.astype(jnp.float32)",
)
ACCUMULATOR_16BIT = Check(
    id="accumulator_16bit",
    explanation="Gradients are accumulated in 16 bits over microbatches or steps, parameters are"
    " averaged, or other state is updated in 16 bits: counters, metrics, running statistics and"
    " decayed sums of loops.",
    fix="total = jnp.zeros(p.shape, jnp.float32)\ntotal = total + grads.astype(jnp.float32)",
    includes_optimizer=True,
)

_NEAR = LAYOUT | named("mul div add sub select_n")
_SUMS = named("reduce_sum cumsum")
_REDUCTIONS = _SUMS | named(
    "reduce_prod cumprod cumlogsumexp reduce_window_sum scatter-add scatter-sub scatter-mul"
)
# Activation functions of `jax.nn` that compute exponentials of negative numbers only.
_BOUNDED = frozenset({"elu", "celu", "selu"})
# `one_minus_square` is the derivative of tanh.
_POWERS = named("integer_pow square one_minus_square")
# Reductions that XLA divides into chunks; the others add one term after another.
_IN_CHUNKS = _SUMS | named("reduce_prod cumprod cumlogsumexp")
# Sums of fewer terms lose less than three bits.
_FEW_TERMS = 8
# Estimated error from which a sum of a backward pass is reported. That of a bias over a batch has
# less, and the rounding of its terms is of the same size.
_NOTABLE = 0.05

FIX_ACCUMULATOR = (
    "Start from zeros in FP32, and add in FP32:\n"
    "    total = jnp.zeros(p.shape, jnp.float32)\n"
    "    total = total + grads.astype(jnp.float32)"
)
_FIX_CARRY = (
    "Start from zeros in FP32, and cast the result after the loop:\n"
    "    total = jnp.zeros(shape, jnp.float32)"
)


# ---------------------------------------------------------------------------
# Softmax and losses
# ---------------------------------------------------------------------------


@SOFTMAX_16BIT.on_16_bits
def check_softmax(op: OpOccurrence, dtype: np.dtype, audit: Auditor) -> None:
    """Reports the exponential of a softmax."""
    if _role_of_exponential(op) == "softmax":
        is_own = audit.findings.is_own_call(op.equation) or not op.location.names
        fix = fix_operation(op, audit.findings, dtype.name) or SOFTMAX_16BIT.fix
        fix = fix if is_own else audit.context.wrap_code
        message = f"softmax in {dtype.name}: its probabilities have {_precision(dtype)}."
        audit.add(SOFTMAX_16BIT, op, message, fix)


@LOSS_16BIT.on_16_bits
def check_loss(op: OpOccurrence, dtype: np.dtype, audit: Auditor) -> None:
    """Reports the exponential or the logarithm of a log-sum-exp."""
    if _role_of_exponential(op) == "log-sum-exp":
        message = f"log-sum-exp in {dtype.name}: log-probabilities have {_precision(dtype)}."
        audit.add(LOSS_16BIT, op, message, fix_operation(op, audit.findings))


@LOSS_16BIT.on_program
def check_results(audit: Auditor, traced: Traced) -> Iterable[Finding]:
    """Reports 16-bit scalars that the program returns alone or in tuples, such as losses."""
    for (path, aval), var in zip(traced.results, traced.jaxpr.outvars, strict=False):
        is_returned = all(isinstance(key, jtu.SequenceKey) for key in path)
        is_loss = aval.shape == () and aval.dtype in FLOATS_16BIT and is_returned
        op = traced.maker_of(var) if is_loss else None
        if op is not None:
            file, line = audit.findings.line_of(op)
            message = f"result{jtu.keystr(path)} is a scalar in {aval.dtype.name}."
            fix = fix_operation(op, audit.findings)
            yield LOSS_16BIT.finding(message, fix, file=file, line=line)


def _role_of_exponential(op: OpOccurrence) -> str:
    """Returns "softmax" or "log-sum-exp" for an operation that is a part of one, or ""."""
    if op.location.phase == BACKWARD:
        return ""
    if op.name in ("exp", "exp2"):
        sums = [e for e in _reads(op.equation, op.body) if e.primitive.name in _SUMS]
        after = (e.primitive.name for total in sums for e in _reads(total, op.body))
        return ("log-sum-exp" if "log" in after else "softmax") if sums else ""
    return "log-sum-exp" if op.name == "log" and _follows_sum_of_exp(op) else ""


def _precision(dtype: np.dtype) -> str:
    if dtype.name == "bfloat16":
        return "8 bits of precision"
    return "11 bits of precision, and logits overflow beyond 65504"


def _follows_sum_of_exp(op: OpOccurrence) -> bool:
    makers = _made_of(op.equation.invars[0], op.body, LAYOUT)
    return any(
        "exp" in (inner.primitive.name for inner in _made_of(maker.invars[0], op.body, LAYOUT))
        for maker in makers
        if maker.primitive.name in _SUMS
    )


# ---------------------------------------------------------------------------
# Norms
# ---------------------------------------------------------------------------


@NORM_16BIT.on_16_bits
def check_inverse_root(op: OpOccurrence, dtype: np.dtype, audit: Auditor) -> None:
    """Reports an inverse square root, by which norms multiply."""
    if op.name == "rsqrt" and op.location.phase != BACKWARD:
        _report_norm(op, dtype, audit)


@NORM_16BIT.on_operation("sqrt")
def check_root(op: OpOccurrence, audit: Auditor) -> None:
    """Reports the square root of a mean, by which a norm divides."""
    dtype = half_of(op.equation.invars)
    if dtype is not None and op.location.phase != BACKWARD:
        makers = _made_of(op.equation.invars[0], op.body, _NEAR)
        if any(map(_contains_sum, makers)):
            _report_norm(op, dtype, audit)


def _contains_sum(equation: Equation) -> bool:
    """Returns True for a sum, and for a call, such as that of `jnp.var`, that contains one."""
    inside = (inner for jaxpr in sub_jaxprs(equation) for inner in equations(jaxpr))
    return any(other.primitive.name in _SUMS for other in (equation, *inside))


def _report_norm(op: OpOccurrence, dtype: np.dtype, audit: Auditor) -> None:
    limit = "8 bits of precision" if dtype.name == "bfloat16" else "no values below 6e-8"
    message = f"{op.name} in {dtype.name}: the variance has {limit}."
    fix = ""
    if not audit.findings.is_own_call(op.equation):
        code = in_fp32(expression_of(op, audit.findings), dtype.name)
        fix = f"Compute the norm in FP32:\n    {code}" if code else ""
        fix = audit.context.wrap_code if op.location.names else fix
    default = f"Compute mean and variance in FP32, and cast the result:\n    {NORM_16BIT.fix}"
    audit.add(NORM_16BIT, op, message, fix or default)


# ---------------------------------------------------------------------------
# Sums
# ---------------------------------------------------------------------------


@REDUCTION_16BIT.on_16_bits
def check_sum(op: OpOccurrence, dtype: np.dtype, audit: Auditor) -> None:
    """Reports a reduction of many terms."""
    if op.name not in _REDUCTIONS:
        return
    terms = _terms(op)
    if terms < _FEW_TERMS or counts_largest(op):
        return
    in_chunks = op.name in _IN_CHUNKS
    verb = "multiplies" if "prod" in op.name or op.name == "scatter-mul" else "adds"
    text = error_text(terms, dtype, in_chunks=in_chunks)
    message = f"{op.name} {verb} {terms:,} terms in {dtype.name} {text}."
    is_backward = op.location.phase == BACKWARD
    if not is_backward and op.name != "reduce_window_sum":
        fix = fix_operation(op, audit.findings, dtype.name)
        audit.add(REDUCTION_16BIT, op, message, fix)
    elif rounding_error(terms, dtype, in_chunks=in_chunks) >= _NOTABLE:
        fix = ""
        if is_backward:
            message = f"in the gradient of a broadcast or of indexing, {message}"
            fix = _fix_gradient(audit)
        audit.add(REDUCTION_16BIT, op, message, fix, severity=WARNING)


@REDUCTION_16BIT.on_result(*LOOPS)
def check_loop(op: OpOccurrence, audit: Auditor) -> None:
    """Reports a loop that adds to a 16-bit carry what does not depend on that carry.

    A residual stream, whose summand is computed from the carry itself, is not an accumulator.
    """
    loop = loop_of(op.equation)
    assert loop is not None
    body = Body(loop.jaxpr)
    for before, after in zip(loop.incoming, loop.outgoing, strict=True):
        if dtype_of(before) in FLOATS_16BIT and not is_literal(after):
            makers = _made_of(after, body, LAYOUT)
            addition = next((e for e in makers if _adds_to(e, before, body)), None)
            if addition is not None:
                _report_carry(op, before, addition, audit)


@ACCUMULATOR_16BIT.on_result("add", "add_any")
def check_terms(op: OpOccurrence, audit: Auditor) -> None:
    """Reports a sum of three or more 16-bit gradients without a loop."""
    (result,) = op.equation.outvars
    if not _is_after_gradient(op):
        return
    if any(label.number > 2 for label in audit.flow.labels(Terms, result)):
        message = f"gradients of several microbatches are summed in {dtype_of(result).name}."
        fix = fix_operation(op, audit.findings) or FIX_ACCUMULATOR
        audit.add(ACCUMULATOR_16BIT, op, message, fix)


def _terms(op: OpOccurrence) -> int:
    """Returns the largest number of elements that a reduction combines into one."""
    equation, operand = op.equation, op.equation.invars[0].aval
    if op.name == "reduce_window_sum":
        return window_of(equation)
    if not op.name.startswith("scatter"):
        return math.prod(operand.shape[axis] for axis in axes_of(equation))
    updates = math.prod(equation.invars[1].aval.shape[:-1])
    if op.location.phase == BACKWARD:
        # In the gradient of a lookup, the indices are those of different rows; the mean counts.
        return math.ceil(equation.invars[2].aval.size / max(operand.size, 1))
    # In a scatter of the forward pass, all indices may be equal.
    return updates


def _fix_gradient(audit: Auditor) -> str:
    """Returns code that accumulates a gradient in FP32."""
    code = f"grad = jaxmp.autocast(jax.grad(loss_fn), {audit.context.text})"
    return f"Accumulate the gradient in FP32:\n    {code}"


def counts_largest(op: OpOccurrence) -> bool:
    """Returns True for the number of largest elements, by which a maximum's gradient is divided."""
    for maker in _made_of(op.equation.invars[0], op.body, LAYOUT):
        if maker.primitive.name == "eq":
            sides = (_made_of(var, op.body, LAYOUT) for var in maker.invars)
            names = {other.primitive.name for side in sides for other in side}
            return bool(names & {"reduce_max", "reduce_min"})
    return False


def _report_carry(op: OpOccurrence, carry: Atom, addition: Equation, audit: Auditor) -> None:
    dtype, loop = dtype_of(carry), loop_of(op.equation)
    assert loop is not None
    length = loop.length
    inner = op._replace(equation=addition, body=Body(loop.jaxpr), outer=op)
    fix = fix_carry(op, carry, inner, audit)
    if _is_after_gradient(op) and GRADIENT in audit.flow.of(addition.outvars[0]):
        message = f"a loop accumulates gradients in {dtype.name}."
        audit.add(ACCUMULATOR_16BIT, inner, message, fix or FIX_ACCUMULATOR)
        return
    message = f"a loop adds terms in {dtype.name}."
    if length is not None:
        # The gradient of a weight that all iterations share is one sum.
        is_small = rounding_error(length, dtype, in_chunks=False) < _NOTABLE
        if op.location.phase == BACKWARD and is_small:
            return
        text = error_text(length, dtype, in_chunks=False)
        message = f"a loop adds {length:,} terms in {dtype.name} {text}."
    audit.add(REDUCTION_16BIT, inner, message, fix or _FIX_CARRY)


def fix_carry(loop: OpOccurrence, carry: Atom, addition: OpOccurrence, audit: Auditor) -> str:
    """Returns the fix of a 16-bit carry: its first value and its summands in FP32.

    Args:
      loop: a scan or while.
      carry: the parameter of its body.
      addition: the operation in the body that adds to it.
      audit: for the lines of the source.

    Returns:
      Sentences and code, or "" if the code of the first value is not known.
    """
    inside = addition.body.jaxpr
    first = loop.equation.invars[len(loop.equation.invars) - len(inside.invars) :]
    start = first[inside.invars.index(carry)]
    maker = loop.body.maker_through(start, LAYOUT - {"broadcast_in_dim"})
    if maker is None:
        return ""
    made = loop._replace(equation=maker)
    code = in_fp32(expression_of(made, audit.findings))
    if not code:
        return ""
    where = audit.findings.where(made)
    lines = [f"Start in FP32, at {where}:\n    {code}"]
    summand = None
    dependents = addition.body.dependents([carry])
    for index, var in enumerate(addition.equation.invars):
        cast = addition.body.maker(var)
        if cast is not None and cast.primitive.name == "convert_element_type":
            rounding = addition._replace(equation=cast)
            code = in_fp32(expression_of(rounding, audit.findings))
            where = audit.findings.where(rounding)
            lines += [f"At {where}, do not round to 16 bits:\n    {code}"] * bool(code)
        elif half_of([var]) is not None and not is_literal(var) and var not in dependents:
            summand = index
    code = with_fp32_summand(expression_of(addition, audit.findings), summand)
    where = audit.findings.where(addition)
    lines += [f"At {where}, do not round to 16 bits:\n    {code}"] * bool(code)
    return "\n".join(lines)


def _is_after_gradient(op: OpOccurrence) -> bool:
    """Returns True outside of derivatives: a gradient inside of a loss is an activation."""
    return op.location.phase == FORWARD and not op.location.differentiated


def _adds_to(addition: Equation, before: Atom, loop: Body) -> bool:
    """Returns True for a sum of a carry of a loop and a value that does not depend on it."""
    if addition.primitive.name not in ("add", "add_any", "sub"):
        return False
    casts = named("convert_element_type")
    sides = [loop.source_of(var, casts) for var in addition.invars]
    positions = [n for n, side in enumerate(sides) if side is before]
    if not positions:
        return False
    other = addition.invars[1 - positions[0]]
    return is_literal(other) or other not in loop.dependents([before])


# ---------------------------------------------------------------------------
# Exponentials
# ---------------------------------------------------------------------------


class ForwardUse(ConditionalFinding):
    """Label of a 16-bit exponential in a function that is differentiated.

    Any use in the forward pass is harmful. JAX computes some exponentials for derivatives alone:
    that of erf, in an exact GELU, is exp(-x**2).
    """

    check = EXP_16BIT


@EXP_16BIT.on_16_bits
def check_exponential(op: OpOccurrence, dtype: np.dtype, audit: Auditor) -> ForwardUse | None:
    """Reports the other operations of the op table's FP32 rows."""
    if op.name in _REDUCTIONS or op.name == "rsqrt" or op.location.phase == BACKWARD:
        return None
    if op.name in _POWERS:
        if dtype.name != "float16":
            return None
        message = f"{op.name} in float16: results above 65504 overflow"
        return _report_forward_use(ForwardUse(op, message, "", WARNING), audit)
    # An argument that is rounded before its sine is a finding of its own.
    is_rounded = op.name in PERIODIC and audit.flow.labels(RoundedInput, op.equation.invars[0])
    if _role_of_exponential(op) or is_rounded:
        return None
    if op.caller in _BOUNDED or _is_bounded(op.equation, op.body):
        return None
    # A logarithm that is rounded again is reported where a loss sums it.
    back = "" if op.name in ("log", "log1p") and audit.findings.is_own_call(op.equation) else dtype
    fix = fix_operation(op, audit.findings, back and dtype.name)
    fix = fix or f"Compute {op.name} in FP32:\n    x = x.astype(jnp.float32)"
    return _report_forward_use(ForwardUse(op, f"{op.name} in {dtype.name}", fix, ERROR), audit)


@EXP_16BIT.on_operation(*REDUCES)
def report_reduced(op: OpOccurrence, audit: Auditor) -> None:
    """Reports exponentials that a reduction of the forward pass reads."""
    if op.location.phase == FORWARD:
        audit.report(ForwardUse, op.equation.invars, "")


@EXP_16BIT.on_program
def report_results(audit: Auditor, traced: Traced) -> None:
    """Reports exponentials that the program returns."""
    audit.report(ForwardUse, traced.jaxpr.outvars, "")


def _report_forward_use(use: ForwardUse, audit: Auditor) -> ForwardUse | None:
    """Reports an operation, or returns a label if it may be computed for a derivative alone."""
    if use.op.location.phase != FORWARD:
        # An operation of a recomputed region was reported in the forward pass.
        return None
    if use.op.location.differentiated:
        return use
    use.report("", audit.findings)
    return None


def _is_bounded(equation: Equation, body: Body) -> bool:
    """Returns True for an exponential of at most 0, as in ELU and softplus, and for its logarithm.

    Its result is at most 1, with the rounding error of any other 16-bit operation.
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
    is_choice = name in ("select_n", "min") or name_of(maker) == "_where"
    return is_choice and any(_is_zero(var, body) for var in maker.invars)


def _is_zero(var: Atom, body: Body) -> bool:
    source = body.source_of(var, LAYOUT)
    return is_literal(source) and source.aval.size == 1 and float(source.val) == 0


# ---------------------------------------------------------------------------
# Producers and consumers
# ---------------------------------------------------------------------------


def _reads(equation: Equation, body: Body) -> Iterator[Equation]:
    """Yields the equations that read a result, directly or after changes of layout."""
    waiting = list(equation.outvars)
    while waiting:
        for reader in body.readers(waiting.pop()):
            yield reader
            if reader.primitive.name in LAYOUT:
                waiting += reader.outvars


def _made_of(
    var: Atom, body: Body, primitives: frozenset[str], depth: int = 12
) -> Iterator[Equation]:
    """Yields the equations that compute a value, and the operands of the named primitives."""
    waiting = [var]
    while waiting and depth:
        depth -= 1
        maker = body.maker(waiting.pop())
        if maker is not None:
            yield maker
            if maker.primitive.name in primitives:
                waiting += maker.invars


# ---------------------------------------------------------------------------
# Estimates of the rounding error of sums
# ---------------------------------------------------------------------------

# XLA divides a reduction into chunks: on a CPU into windows of 32 elements, on a GPU among the
# threads, and for long arrays in two levels.
_CHUNK = 32


def rounding_error(terms: int, dtype: np.dtype, *, in_chunks: bool) -> float:
    """Returns the largest error to expect of a sum, relative to the sum of absolute values.

    The bound of any order of summation is `h * u`, where `h` is the largest number of additions
    that a term passes through and `u` the unit roundoff (Higham, "Accuracy and Stability of
    Numerical Algorithms", section 4.2). Rounding errors of both signs cancel, so that the error
    grows as `sqrt(h) * u` (Higham and Mary, "A New Approach to Probabilistic Rounding Error
    Analysis", 2019), until a sequential sum is so large that further terms do not change it.

    Args:
      terms: the number of summands.
      dtype: in which the sum accumulates.
      in_chunks: False for a loop or a scatter, which adds one term after another.
    """
    unit = float(jnp.finfo(dtype).eps) / 2
    if not in_chunks:
        return 1.0 if terms >= stagnation(dtype) else math.sqrt(terms) * unit
    levels = math.ceil(math.log(max(terms, 2), _CHUNK))
    return min(1.0, math.sqrt(min(terms, _CHUNK * levels)) * unit)


def stagnation(dtype: np.dtype) -> int:
    """Returns the number of equal terms after which a sequential sum stops growing."""
    return round(2 / float(jnp.finfo(dtype).eps))


def error_text(terms: int, dtype: np.dtype, *, in_chunks: bool) -> str:
    """Returns the estimate as a part of a sentence."""
    error = rounding_error(terms, dtype, in_chunks=in_chunks)
    if error == 1:
        return f"one after another: a sum of equal terms stops growing at {stagnation(dtype):,}"
    text = f"with an error of up to about {error:.1%} of the sum of absolute values"
    return text if in_chunks else f"one after another, {text}"
