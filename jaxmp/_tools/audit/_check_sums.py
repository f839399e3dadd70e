"""Checks of sums in 16 bits: reductions, carries of loops, and state that steps update."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np

from jaxmp import _core, _programs
from jaxmp._core import _compat
from jaxmp._tools.audit import (
    _carries,
    _check_ops,
    _check_state,
    _checks,
    _dataflow,
    _labels,
    _origins,
)
from jaxmp._tools.audit._auditor import Auditor
from jaxmp._tools.audit._checks import OpOccurrence
from jaxmp._tools.audit._rows import Finding
from jaxmp._tools.fixes import _rewrite
from jaxmp._tools.report import _section

# Reductions that XLA divides into chunks; the others add one term after another.
_IN_CHUNKS = _core.named("reduce_sum cumsum reduce_prod cumprod cumlogsumexp reduce")
_BY_FUNCTION = _core.named("reduce reduce_window")
_WINDOWS = _core.named("reduce_window_sum reduce_window")

# Sums of fewer terms lose less than three bits.
_FEW_TERMS = 8
# Estimated error from which a sum of a backward pass is reported. That of a bias over a batch has
# less, and the rounding of its terms is of the same size.
_NOTABLE = 0.05
# Steps of a loop of unknown length.
_UNKNOWN_STEPS = 100


_FIX_TERMS = "Start from zeros in FP32, and add in FP32:\n"
_FIX_TERMS += textwrap.indent(_check_ops.ACCUMULATOR_16BIT.fix, "    ")


# ---------------------------------------------------------------------------
# Sums
# ---------------------------------------------------------------------------


@_check_ops.REDUCTION_16BIT.on(_checks.HALF)
def check_sum(op: OpOccurrence, dtype: np.dtype) -> None:
    """Reports a reduction of many terms."""
    terms = _terms(op) if op.name in _check_ops.REDUCTIONS or op.name in _BY_FUNCTION else 0
    if terms < _FEW_TERMS or _check_ops.counts_largest(op):
        return
    in_chunks = op.name in _IN_CHUNKS
    verb = "multiplies" if "prod" in op.name or op.name == "scatter-mul" else "adds"
    # All indices of a scatter may be equal.
    verb += " up to" * (op.name.startswith("scatter") and not op.is_backward)
    text = error_text(terms, dtype, in_chunks=in_chunks)
    message = f"{op.name} {verb} {terms:,} terms in {dtype.name} {text}."
    if not op.is_backward and op.name not in _WINDOWS:
        fix = _origins.fix_operation(op, dtype.name)
        op.add(_check_ops.REDUCTION_16BIT, message, fix)
    elif rounding_error(terms, dtype, in_chunks=in_chunks) >= _NOTABLE:
        fix = ""
        if op.is_backward:
            message = f"in the gradient of a broadcast or of indexing, {message}"
            code = f"grad = jaxmp.autocast(jax.grad(loss_fn), {op.audit.context.text})"
            fix = f"Accumulate the gradient in FP32:\n    {code}"
        op.add(_check_ops.REDUCTION_16BIT, message, fix, severity=_checks.WARNING)


@_check_ops.REDUCTION_16BIT.on_operation(*_BY_FUNCTION)
def check_own_reduction(op: OpOccurrence) -> None:
    """Reports a reduction by a function that adds or multiplies."""
    dtype = _checks.half_of(op.operands)
    names = {inner.primitive.name for inner in _programs.equations_inside(op.equation)}
    if dtype is not None and not names.isdisjoint(("add", "mul")):
        check_sum(op, dtype)


@_check_ops.REDUCTION_16BIT.on_operation(*_programs.LOOPS, passes=_checks.ALL_PASSES)
def check_loop(op: OpOccurrence) -> None:
    """Reports a loop that adds to a 16-bit carry what does not depend on that carry.

    A residual stream, whose summand is computed from the carry itself, is not an accumulator.
    """
    body = _programs.Body(op.loop.jaxpr)
    for carry, linear in _carries.linear_carries(op, None):
        is_other = linear.factor != 1 or _is_exact_count(op, carry, linear.addition)
        if not is_other and not _check_state.is_compensated(linear.addition, body):
            _report_carry(op, carry, linear.addition)


def _is_exact_count(op: OpOccurrence, carry: _programs.Atom, addition: _programs.Equation) -> bool:
    """Returns True for a count in steps of an integer, of which each value has its own number."""
    start = op.body.source_of(_start_of(op, carry), _checks.LAYOUT)
    first, numbers = _dataflow.number_of(start), map(_dataflow.number_of, addition.invars)
    step = next((number for number in numbers if number is not None), None)
    if first is None or step is None or op.loop.length is None:
        return False
    is_integer = first.is_integer() and step.is_integer()
    largest = _checks.stagnation(_checks.dtype_of(carry))
    return is_integer and abs(first) + abs(step) * op.loop.length <= largest


def _start_of(op: OpOccurrence, carry: _programs.Atom) -> _programs.Atom:
    """Returns the first value of a carry in front of its loop."""
    return op.loop.operands[op.loop.jaxpr.invars.index(carry)]


@_check_ops.ACCUMULATOR_16BIT.on_operation("add", "add_any")
def check_terms(op: OpOccurrence) -> None:
    """Reports a sum of three or more 16-bit gradients without a loop."""
    terms = op.labels(_dataflow.Terms, op.result) if _is_after_gradient(op) else ()
    if any(label.number > 2 for label in terms):
        message = f"gradients of several microbatches are summed in {op.dtype.name}."
        op.add(_check_ops.ACCUMULATOR_16BIT, message, _origins.fix_operation(op) or _FIX_TERMS)


def _terms(op: OpOccurrence) -> int:
    """Returns the largest number of elements that a reduction combines into one."""
    equation, operand = op.equation, op.operands[0].aval
    if op.name in _WINDOWS:
        return _programs.window_of(equation)
    if not op.name.startswith("scatter"):
        return math.prod(operand.shape[axis] for axis in _programs.axes_of(equation))
    indices, batch = op.audit.known.value(equation.invars[1]), _programs.batch_of(equation)
    *rows, width = equation.invars[1].aval.shape
    if indices is not None and indices.size:
        # Equal indices of two elements of a batch are different places.
        places = np.concatenate([*np.indices(rows)[[*batch]][..., None], indices], -1)
        places = places.reshape(-1, len(batch) + width)
        return int(np.unique(places, axis=0, return_counts=True)[1].max())
    if op.is_backward or _programs.is_unique(equation):
        # In the gradient of a lookup, the indices are those of different rows; the mean counts.
        return math.ceil(equation.invars[2].aval.size / max(operand.size, 1))
    return math.prod(size for axis, size in enumerate(rows) if axis not in batch)


def _report_carry(op: OpOccurrence, carry: _programs.Atom, addition: _programs.Equation) -> None:
    dtype, loop = _checks.dtype_of(carry), op.loop
    inner = op.in_body(addition)
    fix = fix_carry(op, carry, inner)
    if _is_after_gradient(op) and _dataflow.GRADIENT in op.audit.flow.of(addition.outvars[0]):
        message = f"a loop accumulates gradients in {dtype.name}."
        inner.add(_check_ops.ACCUMULATOR_16BIT, message, fix)
        return
    message = f"a loop adds terms in {dtype.name}."
    if loop.length is not None:
        # The gradient of a weight that all iterations share is one sum; that of an array which
        # each iteration indexes has fewer terms for an element.
        share = _carries.share_of_terms(loop, carry) if op.is_backward else 1
        terms = math.ceil(loop.length * share)
        if op.is_backward and rounding_error(terms, dtype, in_chunks=False) < _NOTABLE:
            return
        text = error_text(terms, dtype, in_chunks=False)
        message = f"a loop adds {terms:,} terms in {dtype.name} {text}."
    inner.add(_check_ops.REDUCTION_16BIT, message, fix)


def fix_carry(loop: OpOccurrence, carry: _programs.Atom, addition: OpOccurrence) -> str:
    """Returns the fix of a 16-bit carry: its first value and its summands in FP32.

    Args:
      loop: a scan or while.
      carry: the parameter of its body.
      addition: the operation in the body that adds to it.

    Returns:
      Sentences and code, or words alone if the code of the first value is not known.
    """
    where, array = loop.where, carry.aval.str_short()
    if loop.is_backward and _compat.is_in_custom_vjp(loop.equation.source_info):
        text = f"In the backward rule (`jax.custom_vjp`) of the function that {where} calls, start"
        return f"{text} the sum {array} in FP32, and cast it after the loop."
    if loop.is_backward:
        text = f"The backward pass of the loop at {where} sums the gradient {array} of an array"
        text += " that all iterations read, or of a running sum. Make that array or sum FP32, and"
        return f"{text} cast it where the loop computes with it."
    text = (
        f"Cast the first value of the carry to FP32 before the loop at {where}, which is {array},"
    )
    text += " add in FP32, and cast the result after the loop."
    made = loop.made_by(_start_of(loop, carry), _checks.LAYOUT - {"broadcast_in_dim"})
    code = "" if made is None else _rewrite.in_fp32(made.expression)
    if made is None or not code:
        # A number, an argument, or the result of another function.
        made, carries = loop, loop.loop.incoming
        number = carries.index(carry) - len(carries)
        code = _rewrite.with_fp32_start(loop.expression, number, len(carries))
    if not code:
        return text
    lines = [f"Start in FP32, at {made.where}:\n    {code}"]
    summand = None
    dependents = addition.body.dependents([carry])
    for index, var in enumerate(addition.equation.invars):
        cast = addition.body.maker(var)
        if cast is not None and cast.primitive.name == "convert_element_type":
            if not _dataflow.is_forward(cast):
                continue  # It is not in the code of the user.
            rounding = addition.sibling(cast)
            lines += _origins.without_rounding(rounding, _rewrite.in_fp32(rounding.expression))
        elif (
            _checks.half_of([var]) is not None
            and not _programs.is_literal(var)
            and var not in dependents
        ):
            summand = index
    code = _rewrite.with_fp32_summand(addition.expression, summand)
    return "\n".join([*lines, *_origins.without_rounding(addition, code)])


def _is_after_gradient(op: OpOccurrence) -> bool:
    """Returns True outside of derivatives: a gradient inside of a loss is an activation."""
    return op.is_forward and not op.location.differentiated


@_check_ops.REDUCTION_16BIT.on_operation(*_programs.CALLS)
def check_cumulation(op: OpOccurrence) -> None:
    """Reports a cumulative product in 16 bits whose derivative consists of single products."""
    name, dtype = _programs.name_of(op.equation), _checks.half_of(op.equation.outvars)
    is_cumulation = name in _IN_CHUNKS and not _dataflow.contains([op.equation], {name})
    if dtype is not None and is_cumulation:
        fix = _origins.fix_operation(op, dtype.name)
        op.add(_check_ops.REDUCTION_16BIT, f"{name} accumulates in {dtype.name}.", fix)


@_check_ops.ACCUMULATOR_16BIT.on_operation("add")
def check_associative_scan(op: OpOccurrence) -> None:
    """Reports `lax.associative_scan` with sums in 16 bits, which JAX traces as single additions."""
    dtype = _checks.half_of(op.equation.outvars)
    if dtype is not None and any(code.co_name == "associative_scan" for code in op.codes):
        message = f"an associative scan adds in {dtype.name}, in which a factor of 0.999 is 1."
        fix = f"Cast the {dtype.name} arrays to FP32 before `lax.associative_scan`, and its"
        fix += " results back after it."
        is_call = _rewrite.known_function(op.expression)[0] == "jax.lax.associative_scan"
        fix = _origins.fix_operation(op) if is_call else fix
        op.add(_check_ops.ACCUMULATOR_16BIT, message, fix)


@_check_ops.ACCUMULATOR_16BIT.on_operation(*_programs.LOOPS)
def check_recurrence(op: OpOccurrence) -> None:
    """Reports a 16-bit carry that is scaled and added to in each step.

    The gates of an LSTM or GRU depend on a carry, and a residual stream adds a function of the
    carry; both are not linear recurrences. A sum without a factor is a running sum, which
    `reduction_16bit` reports.
    """
    length = op.loop.length
    for carry, (factor, addition, _) in _carries.linear_carries(op, False):
        terms = length or 2**31
        if factor is not None and abs(factor) < 1:
            terms = min(terms, 1 / (1 - abs(factor)))
        if factor == 1 or terms < _FEW_TERMS:
            continue
        steps = "" if length is None else f" of {length:,} steps"
        decay = "" if factor is None else f" with the factor {factor:.4g}"
        message = f"a loop{steps} updates a decayed sum{decay} in {_checks.dtype_of(carry).name}:"
        message += " small summands are rounded away."
        inner = op.in_body(addition)
        inner.add(_check_ops.ACCUMULATOR_16BIT, message, fix_carry(op, carry, inner))


@_check_ops.ACCUMULATOR_16BIT.on_operation(*_programs.LOOPS)
def check_small_steps(op: OpOccurrence) -> None:
    """Reports a 16-bit carry to which a loop adds small multiples of functions of that carry.

    Solvers of differential equations and samplers do so. With the unit roundoff `u`, `n` steps of
    the size `c` have an error of about `sqrt(n) * u`, relative to a change of up to `n * c`.
    """
    length, body = op.loop.length or _UNKNOWN_STEPS, _programs.Body(op.loop.jaxpr)
    for carry, result in zip(op.loop.incoming, op.loop.outgoing, strict=True):
        dtype = _checks.half_of([carry])
        steps = [] if dtype is None else _steps_of(carry, result, body)
        factors = [abs(factor) for _, factor in steps if factor]
        if dtype is None or not factors or len(factors) < len(steps):
            continue
        size = max(factors)
        error = float(jnp.finfo(dtype).eps) / 2 / (size * math.sqrt(length))
        if error < _NOTABLE:
            continue
        message = f"a loop adds steps with the factor {size:.4g} to its {dtype.name} carry, with an"
        message += f" error of about {min(error, 1):.0%} of their sum."
        fix = f"Carry FP32 through the loop at {op.where}, and cast it where matmuls read it:\n"
        fix += "    carry = carry.astype(jnp.float32)  # before the loop\n"
        fix += f"    low = carry.astype(jnp.{dtype.name})  # in the loop"
        op.in_body(steps[-1][0]).add(_check_ops.ACCUMULATOR_16BIT, message, fix)


def _steps_of(
    carry: _programs.Atom, result: _programs.Atom, body: _programs.Body
) -> list[tuple[_programs.Equation, float | None]]:
    """Returns the additions by which a carry becomes its next value, and the factor of each step.

    Returns:
      [] if the carry is not one of the summands, or if no step depends on it; the last addition
      first. The factor is None if it is not a constant.
    """
    steps, dependents, depends = [], body.dependents([carry]), False
    var = body.source_of(result, _checks.LAYOUT)
    while var is not carry:
        addition = body.maker(var)
        if addition is None or addition.primitive.name not in ("add", "sub"):
            return []
        sides = [body.source_of(each, _checks.LAYOUT) for each in addition.invars]
        first, factor = body.maker(sides[0]), None
        is_sum = first is not None and first.primitive.name in ("add", "sub")
        spine = int(sides[0] is not carry and not is_sum)
        if spine and addition.primitive.name == "sub":
            return []
        step = sides[1 - spine]
        maker = body.maker(step)
        if maker is not None and maker.primitive.name in ("mul", "div"):
            factor = next(filter(None, map(_dataflow.number_of, maker.invars)), None)
            factor = 1 / factor if factor and maker.primitive.name == "div" else factor
        steps.append((addition, factor))
        depends |= not _programs.is_literal(step) and step in dependents
        var = sides[spine]
    return steps if depends else []


_CHANGES = _core.named("mul div add sub max min clamp")


@_check_ops.ACCUMULATOR_16BIT.on(_checks.PROGRAM)
def check_running_state(audit: Auditor) -> Iterator[Finding]:
    """Reports sums, counters, statistics and other averages that a step updates in 16 bits."""
    step = _check_state.step_of(audit)
    key_of = lambda update: (update.op.line, update.factor)
    for (_, factor), updates in _section.grouped(step.state_16bit(), key_of).items():
        text = "are updated in 16 bits: changes below {least} of a value are rounded away"
        if factor == _dataflow.PLUS:
            text = "are sums in 16 bits: a sum of ones stops at {limit}"
        literals = [abs(float(x.val)) for x in updates[0].op.operands if _programs.is_literal(x)]
        wide = "int32" if factor == _dataflow.PLUS and 1 in literals else "float32"
        fix = step.fix(updates[0], wide)
        yield from step.findings(_check_ops.ACCUMULATOR_16BIT, updates, text, fix)


# ---------------------------------------------------------------------------
# Copies of masters
# ---------------------------------------------------------------------------


class StateCopy(_labels.Fact):
    """Label of the 16-bit copy of an FP32 argument that the step updates with gradients."""

    survives = _checks.LAYOUT | _core.named("select_n sharding_constraint")

    def __init__(self, number: int, op: OpOccurrence) -> None:
        self.number, self.op = number, op


class ChangedCopy(_labels.ConditionalFinding):
    """Label of a 16-bit copy that was changed after its master was rounded."""

    check = _check_state.MISSING_MASTER
    survives = StateCopy.survives | _CHANGES


@_check_state.MISSING_MASTER.on_operation("convert_element_type")
def label_copy(op: OpOccurrence) -> None:
    """Labels the cast of an updated FP32 argument to 16 bits."""
    (operand,) = op.operands
    is_copy = op.rounded is not None and operand.aval.size > 1
    for label in op.labels(_dataflow.Update, operand) if is_copy else ():
        if label.has_gradient:
            op.mark(StateCopy(label.number, op))


@_check_state.MISSING_MASTER.on_operation(*_CHANGES)
def label_change(op: OpOccurrence) -> ChangedCopy | None:
    """Labels the result of an operation on a copy."""
    copies = op.labels(StateCopy)
    dtype = _checks.half_of(op.equation.outvars)
    if not copies or dtype is None or op.location.differentiated:
        return None
    # A sum with another argument is an average.
    if len({x.number for x in (*copies, *op.labels(_dataflow.From))}) > 1:
        return None
    message = f"copies of parameters are changed in {dtype.name} after the FP32 masters are cast"
    fix = f"Change the FP32 masters instead, before {copies[0].op.where}:\n"
    fix += "    master = jax.tree.map(change, master)"
    return ChangedCopy(op, message, fix)


@_check_state.MISSING_MASTER.on(_checks.PROGRAM)
def report_changes(audit: Auditor) -> None:
    """Reports changed copies that the step returns in place of its 16-bit parameters."""
    traced = audit.traced
    variables = [v for v in traced.variables if v.aval.size > 1 and _checks.half_of([v])]
    shapes = {(v.aval.shape, _checks.dtype_of(v)) for v in variables}

    def is_average(var: _programs.Atom) -> bool:
        sums = [x for x in audit.flow.of(var) if isinstance(x, (_dataflow.From, _dataflow.Update))]
        return any(_core.is_16bit(_checks.dtype_of(traced.variables[x.number])) for x in sums)

    outs = [v for v in audit.results if (v.aval.shape, _checks.dtype_of(v)) in shapes]
    results = [v for v in outs if _programs.is_literal(v) or not is_average(v)]
    audit.report(ChangedCopy, results, ", so that the masters do not have the change")


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
        return 1.0 if terms >= _checks.stagnation(dtype) else math.sqrt(terms) * unit
    levels = math.ceil(math.log(max(terms, 2), _CHUNK))
    return min(1.0, math.sqrt(min(terms, _CHUNK * levels)) * unit)


def error_text(terms: int, dtype: np.dtype, *, in_chunks: bool) -> str:
    """Returns the estimate as a part of a sentence."""
    error = rounding_error(terms, dtype, in_chunks=in_chunks)
    if error == 1:
        limit = _checks.stagnation(dtype)
        return f"one after another: a sum of equal terms stops growing at {limit:,}"
    text = f"with an error of up to about {error:.1%} of the sum of absolute values"
    return text if in_chunks else f"one after another, {text}"
