"""Checks of operations in 16 bits: softmax, losses, norms, sums and exponentials."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import jax.tree_util as jtu
import numpy as np

from jaxmp import _core, _programs
from jaxmp._tools.audit import _auditor, _checks, _dataflow, _labels, _origins, _rows
from jaxmp._tools.fixes import _rewrite

# ---------------------------------------------------------------------------
# Checks
# ---------------------------------------------------------------------------


SOFTMAX_16BIT = _checks.Check(
    id="softmax_16bit",
    explanation="A softmax is computed in 16 bits.",
    fix="jax.nn.softmax(x.astype(jnp.float32)).astype(x.dtype)",
    includes_optimizer=True,
)
LOSS_16BIT = _checks.Check(
    id="loss_16bit",
    explanation="A log-softmax, a log-sum-exp, the differences of a loss or a scalar result of"
    " the program are computed in 16 bits, or from probabilities and other outputs that a cast"
    " rounded to 16 bits before.",
    fix="logits = logits.astype(jnp.float32)",
    includes_optimizer=True,
)
NORM_16BIT = _checks.Check(
    id="norm_16bit",
    explanation="The statistics of a normalization are computed in 16 bits, or the power iteration"
    " of a spectral norm, whose gradient is a small difference, or a variance is the difference of"
    " two rounded means and a value is divided by it.",
    fix="x = x.astype(jnp.float32)",
    includes_optimizer=True,
)
REDUCTION_16BIT = _checks.Check(
    id="reduction_16bit",
    explanation="A sum, a product or a cumulative sum accumulates in 16 bits; the message estimates"
    " its error. A warning for pooling and for the sums of a backward pass, which JAX makes for"
    " values that were broadcast or gathered, if the estimate is at least 5 %.",
    fix="x = x.astype(jnp.float32)",
    includes_optimizer=True,
)
EXP_16BIT = _checks.Check(
    id="exp_16bit",
    explanation="An exponential, logarithm, power or trigonometric function of the forward pass is"
    " computed in 16 bits, or a parameter is rounded before its exponential or softplus. A warning"
    " for squares and other integer powers in float16, which overflow.",
    fix="x = x.astype(jnp.float32)",
)
ACCUMULATOR_16BIT = _checks.Check(
    id="accumulator_16bit",
    explanation="Gradients are accumulated in 16 bits over microbatches or steps, parameters are"
    " averaged, or other state is updated in 16 bits: counters, metrics, running statistics,"
    " decayed sums of loops and associative scans, and small steps of solvers and samplers.",
    fix="total = jnp.zeros(p.shape, jnp.float32)\ntotal = total + grads.astype(jnp.float32)",
    includes_optimizer=True,
)

_FIX_NORM = f"Compute mean and variance in FP32, and cast the result:\n    {NORM_16BIT.fix}"
_FIX_POWER = "Cast the matrix and the vectors before the iteration:\n    w = w.astype(jnp.float32)"
_NEAR = _checks.LAYOUT | _core.named("mul div add sub select_n")
_SUMS = _core.named("reduce_sum cumsum")
# Operations between an exponential and its sum, as that with a mask.
_WEIGHTS = _core.named("mul select_n")
_SQUARES = _core.named("square integer_pow")
# Functions with a finding of their own, whose derivatives divide by roots.
_ARCS = _core.named("asin acos asinh acosh")
REDUCTIONS = _SUMS | _core.named(
    "reduce_prod cumprod cumlogsumexp reduce_window_sum scatter-add scatter-sub scatter-mul"
)
# Activation functions of `jax.nn` that compute exponentials of negative numbers only.
_BOUNDED = frozenset({"elu", "celu", "selu"})
# Reductions and roots have checks of their own. `one_minus_square`, of a tanh, is at most 1.
_NO_EXPONENTIALS = REDUCTIONS | _core.named("rsqrt one_minus_square")


# ---------------------------------------------------------------------------
# Softmax and losses
# ---------------------------------------------------------------------------


@SOFTMAX_16BIT.on(_checks.HALF)
def check_softmax(op: _checks.OpOccurrence, dtype: np.dtype) -> None:
    """Reports the exponential of a softmax, and exponential and logarithm of a log-sum-exp."""
    role, text = _role_of_exponential(op), f"have {_PRECISION[dtype.name]}."
    if role == "softmax":
        is_own = op.is_own_call or not op.location.names
        fix = _origins.fix_operation(op, dtype.name) if is_own else _origins.apply_code(op)
        op.add(SOFTMAX_16BIT, f"softmax in {dtype.name}: its probabilities {text}", fix)
    elif role == "log-sum-exp":
        message = f"log-sum-exp in {dtype.name}: log-probabilities {text}"
        op.add(LOSS_16BIT, message, _origins.fix_operation(op))


@LOSS_16BIT.on(_checks.PROGRAM)
def check_results(audit: _auditor.Auditor) -> Iterable[_rows.Finding]:
    """Reports 16-bit scalars that the program returns alone or in tuples, such as losses.

    Those that a step adds to an argument, such as an FP32 master, are state, of which other
    checks report updates.
    """
    traced = audit.traced
    for (path, aval), var in zip(traced.results, audit.results, strict=False):
        is_returned = all(isinstance(key, jtu.SequenceKey) for key in path)
        is_loss = aval.shape == () and aval.dtype in _core.FLOATS_16BIT and is_returned
        updated = audit.flow.labels(_dataflow.Update, var) if audit.has_backward else ()
        # A loss may have a scalar parameter as a summand.
        updated = [x for x in updated if not x.op.location.differentiated]
        is_loss &= not any(
            x.has_gradient or traced.variables[x.number].aval.dtype == aval.dtype for x in updated
        )
        op = audit.maker_of(var) if is_loss else None
        # The gradient of a scalar parameter is not a loss.
        if op is not None and not op.is_backward:
            message = f"result{jtu.keystr(path)} is a scalar in {aval.dtype.name}."
            is_known = _rewrite.wide_code(op.expression)
            fix = "" if is_known else _origins.fix_origins(op)
            yield LOSS_16BIT.finding(message, fix or _origins.fix_operation(op), op)


def _role_of_exponential(op: _checks.OpOccurrence) -> str:
    """Returns "softmax" or "log-sum-exp" for an operation that is a part of one, or ""."""
    if op.is_backward:
        return ""
    if op.name in ("exp", "exp2"):
        readers = reads(op.equation, op.body, _checks.LAYOUT | _WEIGHTS)
        # The backward pass also sums what was broadcast.
        sums = [e for e in readers if e.primitive.name in _SUMS and _dataflow.is_forward(e)]
        after = (e.primitive.name for total in sums for e in reads(total, op.body))
        if "log" in after:
            return "log-sum-exp"
        # Attention in blocks divides by a carry of its loop.
        is_divided = any(_programs.Use.MAGNIFIED in op.audit.use_of(e.outvars[0]) for e in sums)
        return "softmax" if is_divided else ""
    return "log-sum-exp" if op.name == "log" and _follows_sum_of_exp(op) else ""


_PRECISION = {
    "bfloat16": "8 bits of precision",
    "float16": "11 bits of precision, and logits overflow beyond 65504",
}


def _follows_sum_of_exp(op: _checks.OpOccurrence) -> bool:
    through = _checks.LAYOUT | _WEIGHTS
    return any(
        maker.primitive.name == "exp"
        for total in made_of(op.operands[0], op.body, _checks.LAYOUT)
        if total.primitive.name in _SUMS
        for maker in made_of(total.invars[0], op.body, through)
    )


# ---------------------------------------------------------------------------
# Norms
# ---------------------------------------------------------------------------


@NORM_16BIT.on_operation("sqrt", "rsqrt", passes=_checks.NOT_BACKWARD)
def check_root(op: _checks.OpOccurrence) -> None:
    """Reports the root of a mean, by which a norm divides or multiplies."""
    dtype = _checks.half_of(op.operands)
    square, made = _square_of_vector(op), _origins.shapes_by_source(op.body)
    is_norm = square is not None or is_sum(op)
    is_derivative = any(_origins.call_and_type(op.equation, name) in made for name in _ARCS)
    is_other = op.name == "rsqrt" and not is_derivative
    if dtype is None or not (is_norm or is_other) or op.result not in op.body.consumers:
        return
    limit = "8 bits of precision" if dtype.name == "bfloat16" else "no values below 6e-8"
    operand = "the variance or sum of squares" if is_norm else "its operand"
    message = f"{op.name} in {dtype.name}: {operand} has {limit}."
    fix = _origins.fix_operation(op, dtype.name, _origins.SUMS)
    if square is not None:
        fix = _origins.fix_sums(f"At {square.where}, return the FP32 sums", square, "float32")
    elif op.location.names and not _rewrite.in_fp32(op.expression):
        fix = _origins.apply_code(op)
    op.add(NORM_16BIT, message, fix or _FIX_NORM)


@NORM_16BIT.on_operation("dot_general")
def check_power_iteration(op: _checks.OpOccurrence) -> None:
    """Reports a product of a power iteration in 16 bits."""
    dtype = _checks.half_of(op.operands)
    if dtype is not None and _dataflow.is_of_power_iteration(op):
        message = f"a power iteration multiplies in {dtype.name}, and the gradient of the norm is a"
        message += " difference of close numbers."
        op.add(NORM_16BIT, message, _origins.fix_operation(op) or _FIX_POWER)


@NORM_16BIT.on(_checks.PROGRAM)
def suggest_storage(audit: _auditor.Auditor) -> None:
    """Replaces the fix where Flax computes a norm of 16-bit weights, as in `nn.SpectralNorm`."""
    traced, has_policies = audit.traced, audit.context.policies is not None
    may_be_weights = traced.may_be_weights()
    for finding in (f for f in audit.findings if f.check is NORM_16BIT and has_policies):
        op, call = finding.op, _origins.call_and_type(finding.op.equation)
        here = _programs.equations(op.body.jaxpr, inside=False)
        alike = (e for e in here if _origins.call_and_type(e) == call)
        sources = (v for e in alike for var in e.invars for v in _dataflow.near(var, op.body))
        numbers = {label.number for label in audit.flow.labels(_dataflow.From, *sources)}
        stored = {n: traced.leaves[n].value.dtype for n in sorted(numbers) if may_be_weights[n]}
        paths = [traced.rule_path(n) for n, dtype in stored.items() if _core.is_16bit(dtype)]
        if paths and _origins.is_in_flax(op):
            code = audit.context.with_rule(", ".join(f"jaxmp.Rule({p!r}, 'p=f32')" for p in paths))
            finding.fix = f"Store the weights that the layer normalizes in FP32:\n    {code}"


def is_square(equation: _programs.Equation) -> bool:
    """Returns True for a square or a higher power of a value, and for its product with itself."""
    name, operands = equation.primitive.name, equation.invars
    is_product = name == "mul" and operands[0] is operands[1]
    return name == "square" or _programs.exponent_of(equation) > 1 or is_product


class OnePass(_labels.ConditionalFinding):
    """Label of a 16-bit difference of a mean of squares and of a squared mean."""

    check, survives = NORM_16BIT, _NEAR | _core.named("max")


@NORM_16BIT.on_operation("sub")
def label_variance(op: _checks.OpOccurrence) -> OnePass | None:
    """Labels a variance in one pass if a part of it was rounded after it was summed."""
    lhs, rhs = (list(made_of(var, op.body, _NEAR | _SQUARES)) for var in op.operands)
    is_one_pass = any(map(is_square, rhs))
    is_one_pass &= _dataflow.contains(lhs, _SUMS) and _dataflow.contains(rhs, _SUMS)
    dtype = _checks.half_of(var for e in (op.equation, *lhs, *rhs) for var in e.outvars)
    if not is_one_pass or dtype is None:
        return None
    message = f"a variance is the difference of two means that are rounded to {dtype.name}"
    return OnePass(op, message, _origins.fix_origins(op) or _FIX_NORM)


@NORM_16BIT.on_operation("sqrt", "rsqrt", "pow", "div", "reduce_sum")
def report_variance(op: _checks.OpOccurrence) -> None:
    """Reports a root of a rounded variance in FP32, a division by it, and its sum in a loss."""
    if op.name == "div":
        op.audit.report(OnePass, op.operands[1:], f", by which a value is divided at {op.where}")
    elif op.name == "reduce_sum":
        if op.location.differentiated and math.prod(op.result.aval.shape) == 1:
            op.report(OnePass, f", and a loss sums the results at {op.where}")
    elif op.dtype == _core.FLOAT32:
        op.report(OnePass, f", whose root is computed at {op.where}")


def is_sum(op: _checks.OpOccurrence) -> bool:
    """Returns True if an operation reads a sum or a mean, or the result of a call, as `jnp.var`."""
    return _dataflow.contains(made_of(op.operands[0], op.body, _NEAR), _SUMS)


def _square_of_vector(op: _checks.OpOccurrence) -> _checks.OpOccurrence | None:
    """Returns the matmul of an array and itself that an operation reads, as `jnp.vdot(x, x)`."""
    for maker in made_of(op.operands[0], op.body, _NEAR):
        sources = [op.body.source_of(var, _checks.LAYOUT) for var in maker.invars]
        if maker.primitive.name == "dot_general" and sources[0] is sources[1]:
            return op.sibling(maker)
    return None


# ---------------------------------------------------------------------------
# Exponentials
# ---------------------------------------------------------------------------


class ForwardUse(_labels.ConditionalFinding):
    """Label of a 16-bit exponential in a function that is differentiated.

    Any use in the forward pass is harmful. JAX computes some exponentials for derivatives alone:
    that of erf, in an exact GELU, is exp(-x**2).
    """

    check = EXP_16BIT


@EXP_16BIT.on(_checks.HALF)
def check_exponential(op: _checks.OpOccurrence, dtype: np.dtype) -> ForwardUse | None:
    """Reports the other operations of the op table's FP32 rows."""
    if op.name in _NO_EXPONENTIALS or not op.is_forward:
        return None
    message, severity = f"{op.name} in {dtype.name}", _checks.ERROR
    power = _dataflow.number_of(op.body.source_of(op.operands[-1], _checks.LAYOUT))
    if op.name in _SQUARES or (op.name == "pow" and power and power.is_integer()):
        if dtype.name != "float16":
            return None
        message, severity = f"{message}: results above 65504 overflow", _checks.WARNING
        # Rounded back, a power overflows again, but not an activation that computes one.
        function = _rewrite.known_function(op.expression)[0]
        back = dtype.name if function.startswith(("jax.nn.", "flax.")) else ""
        fix = _origins.fix_operation(op, back)
    else:
        # An argument that is rounded before its sine is a finding of its own.
        rounded = op.labels(_labels.RoundedInput, op.operands[0])
        if _role_of_exponential(op) or (rounded and op.name in _checks.PERIODIC):
            return None
        keep = keep_parameter(op)
        if not keep and (op.caller in _BOUNDED or _is_bounded(op.equation, op.body)):
            return None
        # A logarithm that is rounded again is reported where a loss sums it.
        back = "" if op.name in ("log", "log1p") and op.is_own_call else dtype.name
        in_words = f"Compute {op.name} in FP32: {EXP_16BIT.fix}"
        fix = keep or _origins.fix_operation(op, back) or in_words
    use = ForwardUse(op, message, fix, severity)
    if op.location.differentiated:
        return use  # It may be computed for a derivative alone.
    use.report("")
    return None


def keep_parameter(op: _checks.OpOccurrence) -> str:
    """Returns the rule that keeps a parameter in FP32, which a policy rounds before the operation.

    Returns:
      "" if the operation reads no parameter of its module, or if no policy casts it.
    """
    if not op.location.names or op.audit.context.policies is None:
        return ""
    path = op.rule_path
    names = tuple(path.split("/"))
    for label in op.labels(_labels.Summand):
        owner = label.owner
        is_root = not owner or owner[-1] in _ROOTS or owner[-1].isdigit()
        if owner[-len(names) :] == names or (not path and is_root):
            # Read in FP32 alone, it would be what the policy rounded to store it.
            is_stored = _core.is_16bit(op.audit.context.policies.default.param_dtype)
            dtypes = "p=f32," * is_stored + "c=f32"
            rule = op.audit.context.with_rule(f"jaxmp.Rule('**:{label.name}', '{dtypes}')")
            return f"Read the parameter in FP32, by a rule:\n    {rule}"
    return ""


class RoundedParameter(_labels.ConditionalFinding):
    """Label of a parameter of a user's own module that was rounded to 16 bits."""

    check, survives = EXP_16BIT, _labels.Summand.survives


@EXP_16BIT.on_operation("convert_element_type")
def label_parameter(op: _checks.OpOccurrence) -> RoundedParameter | None:
    """Labels a parameter that a policy rounds, or stores in 16 bits."""
    is_rounded = _checks.half_of([*op.operands, *op.equation.outvars]) is not None
    fix = keep_parameter(op) if is_rounded else ""
    return RoundedParameter(op, "a parameter is rounded to 16 bits", fix) if fix else None


@EXP_16BIT.on_operation("exp", "exp2", "expm1", passes=_checks.NOT_BACKWARD)
def check_parameter(op: _checks.OpOccurrence) -> None:
    """Reports an exponential in FP32 of a rounded parameter, such as a softplus, but no softmax."""
    if _checks.half_of(op.operands) is None and not _role_of_exponential(op):
        harm = f" before its {op.name} at {op.where}, which magnifies the rounding"
        op.report(RoundedParameter, harm)


# Keys of the parameters of a root module, besides the number of an argument.
_ROOTS = ("params", "model")


@EXP_16BIT.on_operation(*_labels.REDUCES)
def report_reduced(op: _checks.OpOccurrence) -> None:
    """Reports exponentials that a reduction of the forward pass reads."""
    op.report(ForwardUse, "")


@EXP_16BIT.on(_checks.PROGRAM)
def report_results(audit: _auditor.Auditor) -> None:
    """Reports exponentials that the program returns."""
    audit.report(ForwardUse, audit.results, "")


def _is_bounded(equation: _programs.Equation, body: _programs.Body) -> bool:
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
    is_choice = name in ("select_n", "min") or _programs.name_of(maker) == "_where"
    sources = (body.source_of(var, _checks.LAYOUT) for var in maker.invars)
    return is_choice and any(_dataflow.number_of(source) == 0 for source in sources)


def counts_largest(op: _checks.OpOccurrence) -> bool:
    """Returns True for the number of largest elements, by which a maximum's gradient is divided."""
    if op.name == "scatter-add":
        made, extremes = _origins.shapes_by_source(op.body), ("scatter-max", "scatter-min")
        return any(_origins.call_and_type(op.equation, name) in made for name in extremes)
    for maker in made_of(op.operands[0], op.body, _checks.LAYOUT):
        if maker.primitive.name == "eq":
            sides = (made_of(var, op.body, _checks.LAYOUT) for var in maker.invars)
            names = {other.primitive.name for side in sides for other in side}
            return bool(names & {"reduce_max", "reduce_min"})
    return False


# ---------------------------------------------------------------------------
# Producers and consumers
# ---------------------------------------------------------------------------


def reads(
    equation: _programs.Equation,
    body: _programs.Body,
    through: frozenset[str] = _checks.LAYOUT,
) -> Iterator[_programs.Equation]:
    """Yields the equations that read a result, directly or after the named primitives."""
    waiting = list(equation.outvars)
    while waiting:
        for reader in body.readers(waiting.pop()):
            yield reader
            if reader.primitive.name in through:
                waiting += reader.outvars


def made_of(
    var: _programs.Atom, body: _programs.Body, primitives: frozenset[str]
) -> Iterator[_programs.Equation]:
    """Yields the equations that compute a value, and the operands of the named primitives."""
    makers = map(body.maker, _dataflow.near(var, body, primitives))
    return (maker for maker in makers if maker is not None)
