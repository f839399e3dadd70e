"""Checks of losses and decisions: rounded logits, terms and results, and logarithms of rounded
probabilities.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from jaxmp import _core, _programs
from jaxmp._tools.audit import _checks, _dataflow, _labels
from jaxmp._tools.audit._auditor import Auditor
from jaxmp._tools.audit._check_matmuls import FP32_MATMUL, MIXED_OPERANDS
from jaxmp._tools.audit._check_ops import LOSS_16BIT, made_of
from jaxmp._tools.audit._checks import Check, OpOccurrence
from jaxmp._tools.audit._origins import (
    fix_cast,
    fix_expression,
    fix_operation,
    fix_sums,
    is_in_flax,
)
from jaxmp._tools.fixes import _domains
from jaxmp._tools.fixes._rewrite import with_sums

LOG_OF_ROUNDED = Check(
    id="log_of_rounded",
    explanation="The logarithm or arctanh of a sigmoid, a softmax, a tanh or a uniform random"
    " number that was rounded to 16 bits: probabilities above 0.996 are 1 in bfloat16, and the"
    " logarithm of 1 - p is -inf.",
    fix="log_p = jax.nn.log_sigmoid(x.astype(jnp.float32))",
)

_MOVES = _checks.LAYOUT | _core.named("slice gather select_n")
_ELEMENTWISE = _MOVES | _core.named(
    "add sub mul div neg max min clamp square integer_pow reduce_sum sqrt log1p exp"
)


class RoundedLoss(_labels.ConditionalFinding):
    """Label of a mean or sum that is a scalar in 16 bits."""

    check = LOSS_16BIT
    survives = _checks.LAYOUT | _core.named("add sub mul div neg log sqrt psum psum_invariant")


class RoundedTerm(_labels.ConditionalFinding):
    """Label of a term of a loss that was rounded to 16 bits."""

    check = LOSS_16BIT
    survives = _ELEMENTWISE


class RoundedDifference(RoundedTerm):
    """Label of a function of a 16-bit difference, which a softplus passes to `exp`."""

    survives = _checks.LAYOUT | _core.named(
        "add sub mul div min max clamp select_n square integer_pow reduce_sum sqrt"
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Probability(_labels.Fact):
    """Label of a 16-bit sigmoid, softmax, tanh or uniform random number, or a function of it.

    `_check_random.follow_probability` propagates it through arithmetic.
    """

    op: OpOccurrence
    name: str
    # Its values where the probability, or the tanh, has its least and its largest one.
    ends: tuple[float, float]
    survives = _MOVES - _core.named("convert_element_type abs") | _core.named("square integer_pow")


# ---------------------------------------------------------------------------
# Scalars
# ---------------------------------------------------------------------------


@LOSS_16BIT.on_operation("convert_element_type", "reduce_sum")
def label_loss(op: OpOccurrence) -> RoundedLoss | None:
    """Labels the 16-bit scalar to which a reduction of a differentiated function is rounded."""
    is_loss = op.location.differentiated and _core.is_16bit(op.dtype)
    if not is_loss or math.prod(op.result.aval.shape) != 1:
        return None
    through = _checks.LAYOUT | _core.named("mul div neg")
    total = op.made_by(op.operands[0], through) if op.name in _checks.CASTS else op
    if total is None or total.name != "reduce_sum" or total.operands[0].aval.size == 1:
        return None
    if _checks.dtype_of(op.body.source_of(total.operands[0], _checks.LAYOUT)) not in _checks.FLOATS:
        return None  # A count, such as that of the elements of a mask.
    message = f"the loss is rounded to {op.dtype.name} when its terms are summed"
    inputs = f"Compute the loss in FP32: cast its inputs before {op.where}:\n    {LOSS_16BIT.fix}"
    return RoundedLoss(op, message, fix_operation(total) or inputs)


@LOSS_16BIT.on(_checks.PROGRAM)
def report_losses(audit: Auditor) -> None:
    """Reports rounded losses that the program returns in FP32."""
    results = [v for v in audit.results if v.aval.size == 1 and _checks.half_of([v]) is None]
    audit.report(RoundedLoss, results, ", and the program returns it")


@LOSS_16BIT.on(_checks.PROGRAM)
def remove_matmuls(audit: Auditor) -> None:
    """Removes matmuls inside of a library's loss that another finding computes in FP32."""
    inside = [f for f in audit.findings if not (f.op.is_own_call or is_in_flax(f.op))]
    losses = {f.op.line for f in inside if f.check is LOSS_16BIT}
    for finding in inside:
        if finding.check in (FP32_MATMUL, MIXED_OPERANDS) and finding.op.line in losses:
            audit.findings.remove(finding)


# ---------------------------------------------------------------------------
# Terms
# ---------------------------------------------------------------------------


@LOSS_16BIT.on_operation("log", "log1p")
def label_logarithm(op: OpOccurrence) -> _labels.LogProbability | None:
    """Labels FP32 logarithms, but not those of constant scalars."""
    is_value = op.dtype == _core.FLOAT32 and _dataflow.constant(op.operands[0], op) is None
    return _labels.LogProbability() if is_value else None


@LOSS_16BIT.on_operation("convert_element_type")
def label_rounding(op: OpOccurrence) -> RoundedTerm | None:
    """Labels log-probabilities that are rounded to 16 bits."""
    dtype = op.rounded
    if dtype is None or not op.labels(_labels.LogProbability):
        return None
    term = RoundedTerm(op, f"log-probabilities are rounded to {dtype.name}", lambda: fix_cast(op))
    if _programs.Use.ORDER in op.use:
        term.report(_ORDER_READS)
    return term


@LOSS_16BIT.on_operation("abs", "square", "integer_pow", "mul", "max", "min", *_programs.CALLS)
def label_difference(op: OpOccurrence) -> RoundedDifference | None:
    """Labels absolute values and squares of 16-bit differences, and one of two multiples."""
    is_choice = _programs.name_of(op.equation) == "_where"
    is_multiple = is_choice or op.name in ("max", "min")
    is_product = op.name == "mul" and op.operands[0] is not op.operands[1]
    if is_product or not (op.location.differentiated and (is_multiple or op.name in _EVEN)):
        return None
    through = _checks.LAYOUT | (_core.named("mul neg") if is_multiple else set())
    makers = (made_of(var, op.body, through) for var in op.operands[is_choice:])
    made = [next((e for e in row if e.primitive.name == "sub"), None) for row in makers]
    # A scan moves the constants of its body to calls without operands.
    if not made or made[0] is None or any(other is not made[0] for other in made):
        return None
    difference = op.sibling(made[0])
    labels = op.labels(_Difference, difference.result)
    is_reported = any(isinstance(label.rounded, UserCast) for label in labels)
    if is_reported or not _core.is_16bit(difference.dtype):
        return None
    fix = fix_expression("Subtract in FP32", difference) or LOSS_16BIT.fix
    message = f"the differences of a loss are rounded to {difference.dtype.name}"
    return RoundedDifference(difference, message, fix)


_EVEN = _core.named("abs square integer_pow mul")


# ---------------------------------------------------------------------------
# Logarithms of probabilities
# ---------------------------------------------------------------------------


# Arguments of a logarithm that are this far from 0 and from 1 have a relative error below 4 %.
_NEAR = 1 / 16
# Primitive or "softmax" -> name and fix.
_PROBABILITIES = {
    "logistic": ("sigmoid", "jax.nn.log_sigmoid(x.astype(jnp.float32))"),
    "tanh": ("tanh", "jnp.tanh(x.astype(jnp.float32))"),
    "softmax": ("softmax", "jax.nn.log_softmax(x.astype(jnp.float32))"),
    # Random bits become a number between 1 and 2.
    "bitcast_convert_type": ("uniform random number", "jax.random.uniform(key, x.shape)"),
}


@LOG_OF_ROUNDED.on_operation(
    *_PROBABILITIES.keys() - {"softmax"},
    *("convert_element_type", "div"),
    passes=_checks.NOT_BACKWARD,
)
def label_probability(op: OpOccurrence) -> Probability | None:
    """Labels 16-bit sigmoids, softmaxes and random numbers."""
    if not _core.is_16bit(op.dtype):
        return None
    is_softmax = any(x.normalized for x in op.labels(_labels.Logits, op.operands[0]))
    # The argument of a tanh may contain the exponential of a matmul, as a standard deviation.
    name = "softmax" if is_softmax and op.name not in _PROBABILITIES else op.name
    ends = (-1.0, 1.0) if name == "tanh" else (0.0, 1.0)
    return Probability(op, name, ends) if name in _PROBABILITIES else None


@LOG_OF_ROUNDED.on_operation("log", "log1p", "log2", "atanh")
def check_logarithm(op: OpOccurrence) -> None:
    """Reports the logarithm or arctanh of a probability that was rounded to 16 bits.

    One such as `log(p + 0.5)`, whose argument is neither 0 nor 1 where p is, magnifies no rounding.
    """
    for label in op.labels(Probability, op.operands[0])[:1]:
        ends = [1 - abs(x) if op.name == "atanh" else x + (op.name == "log1p") for x in label.ends]
        singular = (0, 1) if op.name in ("log", "log2") else (0,)
        if not any(abs(x - value) < _NEAR for x in ends for value in singular):
            continue
        (name, code), where = _PROBABILITIES[label.name], label.op.where
        function = "arctanh" if op.name == "atanh" else "logarithm"
        message = f"the {function} of a {name} that is rounded to {label.op.dtype.name} at {where}."
        own = _domains.in_one_function(op.expression, in_fp32=True)
        if own:
            own = f"Compute these steps in one function, which is finite:\n    {own}"
        elif label.op.name == "convert_element_type":
            own = fix_expression(f"At {where}, do not round to 16 bits", label.op)
        elif label.op.is_own_call or label.op.name == "bitcast_convert_type":
            own = fix_operation(label.op).replace("Compute", f"At {where}, compute")
        fix = own or f"Compute it from the FP32 input of the {name}:\n    {code}"
        op.add(LOG_OF_ROUNDED, message, fix)


# ---------------------------------------------------------------------------
# Decisions
# ---------------------------------------------------------------------------


ROUNDED_OUTPUT = Check(
    id="rounded_output",
    explanation="A matmul rounds its result to 16 bits, or a cast a matrix, and a log-sum-exp,"
    " softmax, top-k, argmax, factorization, squared distance or difference of a loss is computed"
    " from it, in FP32 or not:"
    " the logits of a head or router, or a return of 300, which has steps of 2 in bfloat16. Not"
    " the softmax of attention, which a matmul reads.",
    fix="jnp.matmul(x, w, preferred_element_type=jnp.float32)",
)

_ORDER_READS = "; a top-k, argmax or sort compares it"
_SOLVED_READS = "; the condition of a matrix that is factorized or solved multiplies the error"
_SOFTMAX_READS = "; exponentials of it are summed, as in a softmax or a log-sum-exp"
# The consequences of a rounded matmul, the worst first.
_READS = {
    _programs.Use.SOFTMAX: _SOFTMAX_READS,
    _programs.Use.ORDER: _ORDER_READS,
    _programs.Use.SOLVED | _programs.Use.CHAINED: _SOLVED_READS,
    _programs.Use.DISTANCE: "; a squared distance is the difference of it and of norms, or an angle"
    " of it",
}
_KEEPS_ERROR = _programs.EXACT | _checks.LAYOUT | _core.named("add mul div tanh")
_CAST_ERROR = _KEEPS_ERROR | _core.named("cumsum sqrt")


class RoundingError(_labels.ConditionalFinding):
    """Label of a value that was rounded to 16 bits, and of values with its rounding error."""

    survives = _KEEPS_ERROR


class RoundedOutput(RoundingError):
    """Label of a matmul's 16-bit result."""

    check = ROUNDED_OUTPUT


class UserCast(RoundingError):
    """Label of an FP32 value that the user's code casts to 16 bits."""

    check, survives = LOSS_16BIT, _CAST_ERROR


class _Computed(_labels.Fact):
    """Label of values that are computed from a matmul or an exponential: no targets, no noise."""

    survives = _ELEMENTWISE | _KEEPS_ERROR | _core.named("rsqrt pow erf logistic log cumsum")


_COMPUTED = _Computed()


@LOSS_16BIT.on_operation("dot_general", "conv_general_dilated", "exp", "exp2", "logistic", "tanh")
def label_computed(_: OpOccurrence) -> _Computed:
    """Labels the first functions from which outputs of a model are computed."""
    return _COMPUTED


@dataclasses.dataclass(frozen=True)
class _Difference(_labels.Fact):
    """Label of a function of the difference of a rounded result and of another value."""

    rounded: RoundingError
    survives = _ELEMENTWISE | _CAST_ERROR | _core.named("pow logistic log")


@LOSS_16BIT.on_operation("convert_element_type")
def label_cast(op: OpOccurrence) -> None:
    """Labels an FP32 value that the user casts to 16 bits, and reports it if a softmax reads it.

    The operations that compute a softmax in 16 bits have their own findings.
    """
    (operand,) = op.operands
    if _core.FLOAT32 not in (_checks.dtype_of(operand), op.dtype):
        return
    dtype, labels = op.rounded, op.audit.flow.labels
    is_output = labels(_Computed, operand) and not labels(_labels.LogProbability, operand)
    if dtype is None and _programs.Use.SOFTMAX in op.use:
        op.audit.report(UserCast, [operand], _SOFTMAX_READS)
    elif dtype is not None and with_sums(op.expression, "float32"):
        # jaxmp rounds the sums of a product of weights, which it computes in FP32.
        _label_result(op, dtype)
    elif dtype is not None and op.is_own_call and not op.is_within("/jax/_src/nn/"):
        message = f"an FP32 value is rounded to {dtype.name}"
        if _programs.Use.SOLVED in op.use:
            op.add(ROUNDED_OUTPUT, f"{message}{_SOLVED_READS}.", fix_cast(op))
        elif is_output:
            op.mark(UserCast(op, message, lambda: fix_cast(op)))


@ROUNDED_OUTPUT.on_operation(*_programs.MATMULS)
def label_output(op: OpOccurrence) -> None:
    """Labels a 16-bit result, and reports it if a softmax or a choice is computed from it."""
    dtype = _checks.half_of(op.operands[:2]) and _checks.half_of([op.result])
    is_own = any(map(_checks.is_attention, op.enclosing))
    # The user states the `logits_dtype` of jaxmp's losses.
    if dtype is not None and not is_own and not is_in_flax(op, "jaxmp/losses"):
        _label_result(op, dtype)


def _label_result(op: OpOccurrence, dtype: np.dtype) -> None:
    # The distance between numbers from 256 to 512.
    step = 512 / _checks.stagnation(dtype)
    message = f"the result is rounded to {dtype.name}, with steps of {step:g} around 300"
    output = RoundedOutput(op, message, lambda: _fix_output(op))
    op.mark(output)
    harm = next((text for use, text in _READS.items() if use & op.use), "")
    if harm:
        output.report(harm)


@ROUNDED_OUTPUT.on_operation("logistic")
def label_sigmoid(op: OpOccurrence) -> None:
    """Labels a 16-bit sigmoid of a rounded result, such as a box or a score."""
    for label in op.labels(RoundedOutput) if _core.is_16bit(op.dtype) else ():
        op.mark(label)


@ROUNDED_OUTPUT.on_operation("log1p")
def label_softplus(op: OpOccurrence) -> None:
    """Labels `log1p(exp(-abs(x)))`, by which losses write a softplus, as a difference from zero."""
    exponential = op.made_by(op.operands[0], _checks.LAYOUT)
    if exponential is not None and exponential.name == "exp":
        power = op.body.source_of(exponential.operands[0], _checks.LAYOUT | {"neg", "abs"})
        for rounded in op.labels(RoundedOutput, power):
            op.mark(_Difference(rounded))


def _fix_output(op: OpOccurrence) -> str:
    context, path = op.audit.context, op.rule_path
    # The rule does not help where a policy returns FP32 already, but does not reach the layer, or
    # where the line of the user contains the matmul itself.
    has_rule = context.policies is not None and context.resolve(op.location.names).wide_output
    is_wrapped = op.is_within("/jaxmp/_flax/")
    if path and not has_rule and is_wrapped and not with_sums(op.expression, "float32"):
        rule = context.with_rule(f"jaxmp.Rule({path!r}, 'o=f32')")
        return f"Return the FP32 sums of this layer, by a rule of the recipe:\n    {rule}"
    sums = fix_sums("Return the FP32 sums", op, "float32")
    return f"{sums}\nWith `{context.loss_code}`, their gradients are multiplied in 16 bits."


@ROUNDED_OUTPUT.on_operation("sub")
def label_difference_of_output(op: OpOccurrence) -> None:
    """Labels the difference of a rounded result and of a value that does not depend on it."""
    lhs, rhs = op.operands
    for var, other in ((lhs, rhs), (rhs, lhs)):
        for rounded in op.labels(RoundingError, var):
            if isinstance(rounded, UserCast) and _is_zero(other, op):
                continue  # A softplus, which rounds no more than its operand.
            is_made_of = any(_has_error(rounded.op, x) for x in _dataflow.near(other, op.body))
            is_made_of |= other in _dataflow.near(var, op.body, _STATISTICS)
            if not is_made_of or _are_slices(rounded.op, var, other, op):
                op.mark(_Difference(rounded))


# Operations of a mean or a running maximum, from which a model subtracts the same values.
_STATISTICS = _programs.EXACT | _checks.LAYOUT | _core.named("reduce_sum mul div")


def _is_zero(var: _programs.Atom, op: OpOccurrence) -> bool:
    value = op.audit.known.value(op.body.source_of(var, _checks.LAYOUT))
    return value is not None and not np.any(value)


def _are_slices(
    rounding: OpOccurrence,
    var: _programs.Atom,
    other: _programs.Atom,
    op: OpOccurrence,
) -> bool:
    """Returns True for different slices of a rounded value: the values of two time steps.

    A rotation or a cross product subtracts products of both slices, not the slices.
    """

    def is_slice(source: _programs.Atom) -> bool:
        maker = op.body.maker(source)
        if maker is None or maker.primitive.name not in _SLICES:
            return False
        return _has_error(rounding, maker.invars[0])

    slices = lambda *through: [
        set(filter(is_slice, _dataflow.near(each, op.body, *through))) for each in (var, other)
    ]
    first, second = slices()
    is_summand = any(slices(_KEEPS_ERROR - {"mul"}))
    return is_summand and bool(first - second and second - first)


_SLICES = _core.named("slice dynamic_slice gather split broadcast_in_dim")


def _has_error(rounding: OpOccurrence, var: _programs.Atom) -> bool:
    labels = (*rounding.labels(RoundingError, var), *rounding.labels(_labels.Logits, var))
    return any(label.op.equation is rounding.equation for label in labels)


@LOSS_16BIT.on_operation("reduce_sum")
def report_sum(op: OpOccurrence) -> None:
    """Reports rounded terms that a loss sums, and rounded results if it sums their differences."""
    if op.result.aval.size == 1:
        op.report(RoundedTerm, f", and a loss sums the results at {op.where}")
        for label in op.labels(_Difference):
            label.rounded.report(f"; the loss at {op.where} subtracts it from other values")
