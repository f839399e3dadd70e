"""Checks of losses: values rounded to 16 bits, and logarithms of rounded probabilities."""

from __future__ import annotations

import math

from jaxmp._audit._auditor import Auditor
from jaxmp._audit._check_ops import LOSS_16BIT
from jaxmp._audit._checks import ERROR, Check
from jaxmp._audit._expressions import expression_of, fix_operation, in_fp32
from jaxmp._audit._labels import ConditionalFinding, Fact, Logits
from jaxmp._audit._program import LAYOUT, OpOccurrence, dtype_of, half_of, named
from jaxmp._audit._trace import Traced
from jaxmp._core._dtypes import FLOAT32, is_16bit
from jaxmp._core._jaxprs import BACKWARD, FORWARD

LOG_OF_ROUNDED = Check(
    id="log_of_rounded",
    severity=ERROR,
    explanation="The logarithm of a sigmoid, a softmax or a tanh that was rounded to 16 bits:"
    " probabilities above 0.996 are 1 in bfloat16, and the logarithm of 1 - p is -inf.",
    fix="log_p = jax.nn.log_sigmoid(x.astype(jnp.float32))",
)

_MOVES = LAYOUT | named("slice gather select_n")
_ELEMENTWISE = _MOVES | named(
    "add sub mul div neg max min clamp square integer_pow reduce_sum sqrt log1p exp"
)


class RoundedLoss(ConditionalFinding):
    """Label of a mean or sum that is a scalar in 16 bits."""

    check = LOSS_16BIT
    survives = LAYOUT | named("add sub mul div neg log sqrt")


class RoundedTerm(ConditionalFinding):
    """Label of a term of a loss that was rounded to 16 bits."""

    check = LOSS_16BIT
    survives = _ELEMENTWISE


class RoundedDifference(RoundedTerm):
    """Label of the absolute value of a 16-bit difference, which a softplus passes to `exp`."""

    survives = LAYOUT | named("add mul div")


class LogProbability(Fact):
    """Label of an FP32 logarithm, and of differences of such."""

    survives = _MOVES | named("sub add neg mul")


class Probability(Fact):
    """Label of a 16-bit sigmoid, softmax or tanh."""

    survives = _MOVES | named("sub add max min clamp mul square integer_pow")

    def __init__(self, op: OpOccurrence, name: str) -> None:
        self.op, self.name = op, name


# ---------------------------------------------------------------------------
# Scalars
# ---------------------------------------------------------------------------


@LOSS_16BIT.on_operation("convert_element_type", "reduce_sum")
def label_loss(op: OpOccurrence, audit: Auditor) -> RoundedLoss | None:
    """Labels the 16-bit scalar to which a reduction of a differentiated function is rounded."""
    (result,) = op.equation.outvars
    is_loss = op.location.phase == FORWARD and op.location.differentiated
    if not is_loss or not is_16bit(dtype_of(result)) or math.prod(result.aval.shape) != 1:
        return None
    total = op.equation
    if op.name == "convert_element_type":
        total = op.body.maker_through(op.equation.invars[0], LAYOUT | named("mul div neg"))
    if total is None or total.primitive.name != "reduce_sum" or total.invars[0].aval.size == 1:
        return None
    dtype, where = dtype_of(result).name, audit.findings.where(op)
    message = f"the loss is rounded to {dtype} when its terms are summed"
    fix = f"Compute the loss in FP32: cast its inputs before {where}:\n    {LOSS_16BIT.fix}"
    return RoundedLoss(op, message, fix)


@LOSS_16BIT.on_program
def report_losses(audit: Auditor, traced: Traced) -> None:
    """Reports rounded losses that the program returns in FP32."""
    results = [v for v in traced.jaxpr.outvars if v.aval.size == 1 and half_of([v]) is None]
    audit.report(RoundedLoss, results, ", and the program returns it")


# ---------------------------------------------------------------------------
# Terms
# ---------------------------------------------------------------------------


@LOSS_16BIT.on_operation("log", "log1p")
def label_logarithm(op: OpOccurrence, audit: Auditor) -> LogProbability | None:
    """Labels FP32 logarithms."""
    del audit
    is_wide = dtype_of(op.equation.outvars[0]) == FLOAT32 and op.location.phase == FORWARD
    return LogProbability() if is_wide else None


@LOSS_16BIT.on_operation("convert_element_type")
def label_rounding(op: OpOccurrence, audit: Auditor) -> RoundedTerm | None:
    """Labels log-probabilities that are rounded to 16 bits."""
    (operand,), (result,) = op.equation.invars, op.equation.outvars
    labels = audit.flow.of(operand)
    is_log = any(isinstance(label, LogProbability) for label in labels)
    if not is_log or dtype_of(operand) != FLOAT32 or not is_16bit(dtype_of(result)):
        return None
    dtype, where = dtype_of(result).name, audit.findings.where(op)
    message = f"log-probabilities are rounded to {dtype}"
    fix = f"Keep the log-probabilities in FP32: remove .astype(jnp.{dtype}) at {where}."
    return RoundedTerm(op, message, fix)


@LOSS_16BIT.on_operation("abs")
def label_difference(op: OpOccurrence, audit: Auditor) -> RoundedDifference | None:
    """Labels the absolute values of 16-bit differences, as in an L1 loss."""
    difference = op.body.maker_through(op.equation.invars[0], LAYOUT)
    is_loss = op.location.phase == FORWARD and op.location.differentiated
    if not is_loss or difference is None or difference.primitive.name != "sub":
        return None
    dtype = half_of(difference.outvars)
    if dtype is None:
        return None
    sub = op._replace(equation=difference)
    code = in_fp32(expression_of(sub, audit.findings)) or "x.astype(jnp.float32) - y"
    message = f"the differences of an L1 loss are rounded to {dtype.name}"
    return RoundedDifference(sub, message, f"Subtract in FP32:\n    {code}")


@LOSS_16BIT.on_operation("reduce_sum")
def report_terms(op: OpOccurrence, audit: Auditor) -> None:
    """Reports rounded terms that are summed to a scalar."""
    if op.location.phase == FORWARD and math.prod(op.equation.outvars[0].aval.shape) == 1:
        harm = f", and a loss sums the results at {audit.findings.where(op)}"
        audit.report(RoundedTerm, op.equation.invars, harm)


# ---------------------------------------------------------------------------
# Logarithms of probabilities
# ---------------------------------------------------------------------------


# Primitive or "softmax" -> name and fix.
_PROBABILITIES = {
    "logistic": ("sigmoid", "jax.nn.log_sigmoid(x.astype(jnp.float32))"),
    "tanh": ("tanh", "jnp.tanh(x.astype(jnp.float32))"),
    "softmax": ("softmax", "jax.nn.log_softmax(x.astype(jnp.float32))"),
}


@LOG_OF_ROUNDED.on_operation("logistic", "tanh", "convert_element_type", "div")
def label_probability(op: OpOccurrence, audit: Auditor) -> Probability | None:
    """Labels 16-bit sigmoids and softmaxes."""
    if not is_16bit(dtype_of(op.equation.outvars[0])) or op.location.phase == BACKWARD:
        return None
    labels = audit.flow.of(op.equation.invars[0])
    is_softmax = any(isinstance(label, Logits) and label.normalized for label in labels)
    name = "softmax" if is_softmax else op.name
    return Probability(op, name) if name in _PROBABILITIES else None


@LOG_OF_ROUNDED.on_operation("log", "log1p")
def check_logarithm(op: OpOccurrence, audit: Auditor) -> None:
    """Reports the logarithm of a probability that was rounded to 16 bits."""
    labels = audit.flow.of(op.equation.invars[0]) if op.location.phase == FORWARD else ()
    for label in [x for x in labels if isinstance(x, Probability)][:1]:
        dtype, where = dtype_of(label.op.equation.outvars[0]), audit.findings.where(label.op)
        name, code = _PROBABILITIES[label.name]
        message = f"the logarithm of a {name} that is rounded to {dtype.name} at {where}."
        fix = f"Compute it from the FP32 input of the {name}:\n    {code}"
        if label.op.name == "convert_element_type":
            own = in_fp32(expression_of(label.op, audit.findings))
            fix = f"At {where}, do not round to 16 bits:\n    {own}" if own else fix
        elif audit.findings.is_own_call(label.op.equation):
            own = fix_operation(label.op, audit.findings).replace("Compute", f"At {where}, compute")
            fix = own or fix
        audit.add(LOG_OF_ROUNDED, op, message, fix)
