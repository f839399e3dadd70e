"""Causes of values that are not finite, each from measured operands."""

from __future__ import annotations

import ast
import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxmp import _programs
from jaxmp._core import _compat
from jaxmp._tools.audit import _checks, _origins
from jaxmp._tools.fixes import _domains, _rewrite, _source
from jaxmp._tools.nonfinite._measure import ArgumentRow, ArrayRow, Measured, ScaleArgument
from jaxmp._tools.nonfinite._record import INFINITE, NAN
from jaxmp._tools.nonfinite._walk import MOVES, Operation, Origin, Walk

_LOGS = frozenset({"log", "log1p", "log2"})
_EXPONENTIALS = frozenset({"exp", "exp2", "expm1", "sinh", "cosh"})
_ROOTS = frozenset({"sqrt", "rsqrt", "pow", "cbrt"})
_IN_ONE = "Compute these steps in one function, which is finite"
# `scale_by_*` of optax -> the optimizer with its epsilon as an argument.
_OPTIMIZERS = {
    **{n: n for n in ("adam", "amsgrad", "adamax", "adan", "novograd", "yogi", "radam")},
    **{"belief": "adabelief", "rms": "rmsprop", "stddev": "rmsprop", "rss": "adagrad"},
}


class NonfiniteCause(NamedTuple):
    """Cause that a measurement shows.

    id: name of the cause, such as "division_by_zero"; "" if it is not known.
    message: the measurement, in one or two sentences.
    fix: the remedy: a sentence, and code in lines that are indented by four spaces.
    expression: the expression of the user's code that the code replaces; "" for other code.
    operation: the operation whose line is reported; None for that of the origin.
    edits: the expressions that were replaced.
    otherwise: the same cause with another fix, for the case that this one fails; None if none.
    """

    id: str
    message: str
    fix: str = ""
    expression: str = ""
    operation: Operation | None = None
    edits: tuple[_source.Edit, ...] = ()
    otherwise: NonfiniteCause | None = None


@dataclasses.dataclass(frozen=True)
class NonfiniteEvidence:
    """Measurements of an origin.

    Attributes:
      walk: the walk that ended there.
      origin: the origin, which is an operation.
      source: operands and results of the operation that made the value.
      shown: those of the operation that is reported.
      in_fp32: returns a walk over the whole step in FP32, and its first origin.
      scale: the loss scale among the arguments.
      passing_scale: returns the largest smaller power of two with which the step is finite; None
        if there is none.
      has_optimizer: True if the state of an optimizer is among the arguments.
    """

    walk: Walk
    origin: Origin
    source: Measured
    shown: Measured
    in_fp32: Callable[[], tuple[Walk, Origin | None]]
    scale: ScaleArgument | None
    passing_scale: Callable[[], float | None]
    has_optimizer: bool

    @property
    def operation(self) -> Operation:
        assert isinstance(self.origin.source, Operation)
        return self.origin.source

    @property
    def op(self) -> _checks.OpOccurrence:
        return self.operation.op

    @property
    def result(self) -> ArrayRow:
        return self.source.results[0]

    def value(self, operand: int) -> float:
        """Returns the operand at the first index where the result is not finite; NaN if unknown."""
        value = self.source.operands[operand].value
        return np.nan if value is None else value

    def made_by(self, operand: int, through: frozenset[str] = MOVES) -> dict[str, Operation]:
        """Returns name -> the operation that computes an operand, and those before `through`."""
        (variable,) = self.operation.variables([self.op.operands[operand]])
        return {each.op.name: each for each in self.walk.chain(variable, through)}

    @property
    def overflows_in_fp32(self) -> bool:
        """True if the whole step in FP32 overflows too."""
        walk, origin = self.in_fp32()
        return origin is not None and walk.is_overflow(origin)

    @property
    def is_rounded(self) -> bool:
        """True if the rounding of the operands is the cause."""
        return self.has_lost_constant or self.in_fp32()[0].is_finite(self.operation)

    @property
    def reads_nan_constant(self) -> bool:
        """True if the operation reads NaN that the program contains."""
        operands = self.walk.operands(self.operation)
        return any(code == NAN and self.walk.is_constant(each) for each, code in operands)

    @property
    def has_lost_constant(self) -> bool:
        """True if the user's code adds a number to an operand, and its dtype rounds it to 0."""
        before = MOVES | {"sqrt"}
        operands = self.operation.variables(self.op.operands)
        makers = (each.op for v in operands for each in self.walk.chain(v, before))
        sums = (op for op in makers if op.name == "add" and _checks.half_of(op.operands))
        is_zero = lambda var: _programs.is_literal(var) and not np.any(var.val)
        has_number = lambda node: any(
            isinstance(n, ast.Constant) and isinstance(n.value, float) and n.value
            for n in ast.walk(node)
        )
        return any(any(map(is_zero, op.operands)) and has_number(op.expression.node) for op in sums)

    def is_in(self, package: str) -> bool:
        """Returns True if a package, and not the user's own code, makes the operation."""
        files = [code.co_filename for code in self.op.codes]
        outside = (file for file in files if "/jax/" not in file and "/jaxmp/" not in file)
        return f"/{package}/" in next(outside, "")

    def cause(
        self, name: str, message: str, sentence: str, code: str, operation: Operation | None = None
    ) -> NonfiniteCause:
        """Returns a cause whose code replaces an expression; "" for a fix in words."""
        edits = tuple(self.op.findings.edits)
        if not code or not edits:
            return NonfiniteCause(name, message, f"{sentence}.", "", operation)
        if not edits[-1].is_at(*(operation or self.origin.operation).op.line):
            sentence = f"At {edits[-1].where}, {sentence[0].lower()}{sentence[1:]}"
        fix = f"{sentence}:\n    {code}"
        return NonfiniteCause(name, message, fix, edits[-1].old, operation, edits)


def cause_of(evidence: NonfiniteEvidence) -> NonfiniteCause:
    """Returns the first cause that the measurements show."""
    for check in _CHECKS:
        cause = check(evidence)
        if cause is not None:
            is_rounded = check in _OF_OPERANDS and evidence.is_rounded
            return _of_rounding(evidence, cause) if is_rounded else cause
    rows = ", ".join(f"{row.dtype} {_range(row)}" for row in evidence.source.operands)
    return NonfiniteCause("", f"{evidence.op.name} returns values that are not finite for {rows}.")


def _of_rounding(e: NonfiniteEvidence, cause: NonfiniteCause) -> NonfiniteCause:
    """Returns a cause that rounded operands have, with a fix that computes them in FP32."""
    lost = "A constant that is added before is 0 in 16 bits" * e.has_lost_constant
    message = f"{cause.message} {lost or 'It is finite in FP32'}: the precision is the cause."
    cause = cause._replace(message=message)
    fix = _origins.fix_operation(e.op) if _checks.half_of(e.op.operands) else ""
    fix = fix or _origins.fix_rounding(e.op)
    codes = _source.codes_of(fix)
    if cause.id == "optimizer_epsilon" or _IN_ONE[1:] in cause.fix or not codes:
        return cause
    edits = tuple(e.op.findings.edits)
    expression = next((edit.old for edit in edits if [edit.code] == codes), "")
    return cause._replace(fix=fix, expression=expression, edits=edits, otherwise=cause)


# ---------------------------------------------------------------------------
# Domains of functions
# ---------------------------------------------------------------------------


def _where_gradient(e: NonfiniteEvidence) -> NonfiniteCause | None:
    """Returns the cause of a `where` in the user's code, to which a second one can be added."""
    cause = _unused_branch(e)
    return cause if cause is not None and cause.edits else None


def _unused_branch(e: NonfiniteEvidence) -> NonfiniteCause | None:
    shown = e.origin.operation
    if not shown.op.is_backward:
        return None
    for row, variable in zip(e.shown.operands, shown.variables(shown.op.operands), strict=False):
        for select in e.walk.chain(variable, MOVES) if row.value == 0 else ():
            if select.op.name == "select_n" and select.op.is_backward:
                inner = shown.op.expression
                code = _domains.double_where(select.op.expression, inner)
                text = f"`{inner.text}`" if inner.text else shown.op.name
                kind = "NaN" if e.reads_nan_constant else "infinite"
                message = (
                    f"The forward pass discards the result of {text} here, so its gradient is "
                    f"zero, and the derivative is {kind}: their product is NaN."
                )
                sentence = "Replace the operand too where the branch is not used"
                return e.cause("where_gradient", message, sentence, code, select)
    return None


# Functions that are not finite at the ends of their domain, or whose derivatives are not, and these
# ends.
_INTERVALS = {
    **dict.fromkeys(("arccos", "arcsin", "acos", "asin", "arctanh", "erfinv", "erf_inv"), (-1, 1)),
    "logit": (0, 1),
    **dict.fromkeys(("arccosh", "acosh"), (1, None)),
    **dict.fromkeys(("gammaln", "lgamma", "digamma"), (0, None)),
}
# Factorizations and solvers -> the matrices for which they are not finite.
_MATRICES = {
    "cholesky": "is not positive definite",
    **dict.fromkeys(("custom_linear_solve", "lu", "triangular_solve"), "is singular"),
}


def _interval(e: NonfiniteEvidence) -> NonfiniteCause | None:
    old = e.op.expression
    name = _rewrite.known_function(old)[0].rpartition(".")[2]
    if name not in _INTERVALS:
        return None
    low, high = _INTERVALS[name]
    ends = f"{low}" if high is None else f"{low} and {high}"
    message = f"`{old.text}` or its derivative is not finite at {ends} or beyond."
    code = _domains.within(old, low, high)
    return e.cause("outside_domain", message, "Keep the operand within the domain", code)


def _matrix(e: NonfiniteEvidence) -> NonfiniteCause | None:
    if e.op.name not in _MATRICES or any(row.nonfinite for row in e.source.operands):
        return None
    message = f"{e.op.name} returns values that are not finite: its matrix {_MATRICES[e.op.name]}."
    fix = "Add a multiple of the identity to the matrix, such as 1e-6 times its largest element."
    return NonfiniteCause("singular_matrix", message, fix)


def _nan_constant(e: NonfiniteEvidence) -> NonfiniteCause | None:
    if not e.reads_nan_constant:
        return None
    fix = (
        "Put a number in its place. If it stands for a missing value, also keep a mask. A later "
        "`where` that discards the result is not enough: the gradient is still NaN."
    )
    return NonfiniteCause("bad_constant", f"{e.op.name} reads a constant that is NaN.", fix)


def _constant(e: NonfiniteEvidence) -> NonfiniteCause | None:
    literals = [v.val for v in e.op.operands if _programs.is_literal(v)]
    dtype = e.result.dtype
    if not any(np.ndim(x) == 0 and np.isinf(np.asarray(x, np.float32)) for x in literals):
        return None
    code = _rewrite.with_finite_numbers(e.op.expression, dtype) if dtype == "float16" else ""
    message = f"{e.op.name} reads a constant that is infinite in {dtype}."
    sentence = "Use the largest number of the dtype in place of the constant"
    return e.cause(f"{dtype}_range", message, sentence, code) if code else None


def _masked_softmax(e: NonfiniteEvidence) -> NonfiniteCause | None:
    position = {"div": 1, "log": 0}.get(e.op.name)
    makers = {} if position is None else e.made_by(position)
    exp = makers.get("exp") if "reduce_sum" in makers else None
    of_sum = exp is not None and INFINITE in (code for _, code in e.walk.operands(exp))
    if not of_sum and not e.walk.is_masked_softmax(e.operation):
        return None
    row = list(e.result.index[:-1] or e.result.index)
    if e.value(0) > 0:
        message = f"Logits of row {row} are inf: they are beyond the range of their dtype."
        fix = "Compute the logits in FP32, or scale the queries before their matmul."
        return NonfiniteCause("float16_range", message, fix)
    code = _domains.at_least(e.op.expression, _domains.LOWEST, "softmax")
    message = f"All logits of row {row} are -inf: the mask hides every element of this row."
    sentence = "Bound the logits, so that such a row has equal weights"
    return e.cause("masked_softmax", message, sentence, code)


def _logarithm(e: NonfiniteEvidence) -> NonfiniteCause | None:
    if e.op.name not in _LOGS:
        return None
    x = e.value(0) + (e.op.name == "log1p")
    return _of_log(e, x, e.source.operands[0]) if x <= 0 else None


def _of_log(e: NonfiniteEvidence, x: float, row: ArrayRow) -> NonfiniteCause:
    old = e.op.expression
    name = "log_of_negative" if x < 0 else "log_of_zero"
    message = f"The logarithm reads {x:g} ({row.zero:.1%} of the {row.dtype} operand is zero)."
    # The gradient at the smallest normal number may overflow.
    keep, cause = "Keep the operand positive", None
    for bound in (_domains.EPS, _domains.TINY):
        code = _domains.at_least(old, bound, "log")
        cause = e.cause(name, message, keep, code)._replace(otherwise=cause)
    stable = _domains.in_one_function(old)
    return e.cause(name, message, _IN_ONE, stable)._replace(otherwise=cause) if stable else cause


def _root(e: NonfiniteEvidence) -> NonfiniteCause | None:
    if e.op.name not in _ROOTS or not e.value(0) <= 0:
        return None
    x = e.value(0)
    message = f"The root reads {x:g}; its operand is {_range(e.source.operands[0])}."
    return _of_root(e, "root_of_negative" if x < 0 else "root_of_zero", message)


def _of_root(e: NonfiniteEvidence, name: str, message: str) -> NonfiniteCause:
    old = e.op.expression
    bound = _domains.EPS if "rsqrt" in old.text.partition("(")[0] else _domains.TINY
    code = _domains.norm(old) or _domains.at_least(old, bound, "root")
    return e.cause(name, message, "Keep the operand positive", code)


def _optimizer_of(e: NonfiniteEvidence) -> str:
    """Returns the optimizer of optax that contains the operation, such as "adam"."""
    functions = (code.co_qualname.partition(".")[0] for code in e.op.codes)
    scales = (name.removeprefix("scale_by_") for name in functions)
    return next((_OPTIMIZERS[scale] for scale in scales if scale in _OPTIMIZERS), "adam")


def _quotient(e: NonfiniteEvidence) -> NonfiniteCause | None:
    if e.op.name not in ("div", "rem", "integer_pow"):
        return None
    position = int(e.op.name != "integer_pow")
    x, row = e.value(position), e.source.operands[position]
    if x != 0 and not (np.isnan(x) and row.zero):
        return None
    made = e.made_by(position, MOVES | {"add", "sub"})
    differentiated = e.op.location.differentiated
    old = e.op.expression
    is_call = isinstance(old.node, ast.Call)
    if is_call and old.text.partition("(")[0].rpartition(".")[2] in _LOGS:
        return _of_log(e, 0.0, row)
    if is_call and made.keys() & _ROOTS and differentiated:
        return _of_root(e, "root_of_zero", "The root reads 0, where its derivative is infinite.")
    if "sqrt" in made and not differentiated and e.is_in("optax"):
        # The smallest power of ten that is a normal number of the dtype.
        least = 10.0 ** math.ceil(math.log10(float(jnp.finfo(row.dtype).tiny)))
        message = (
            "The optimizer divides by the root of a second moment that is zero, and its epsilon is "
            "zero in this dtype."
        )
        fix = f"Set an epsilon that is a normal number of {row.dtype}:\n"
        fix += f"    tx = optax.{_optimizer_of(e)}(learning_rate, eps={max(1e-8, least):g})"
        return NonfiniteCause("optimizer_epsilon", message, fix)
    message = f"{row.zero:.1%} of the denominators are zero; they are {_range(row)}."
    stable = _domains.in_one_function(old)
    code = stable or _domains.divided(old)
    if not code and _compat.is_in_custom_vjp(e.op.equation.source_info):
        fix = (
            "JAX records only the line that calls the custom_vjp function. In its rule, replace "
            "such denominators:\n    denominator = jnp.where(denominator == 0, 1, denominator)"
        )
        return NonfiniteCause("division_by_zero", message, fix)
    sentence = _IN_ONE if stable else "Replace such denominators"
    return e.cause("division_by_zero", message, sentence, code)


def _exponential(e: NonfiniteEvidence) -> NonfiniteCause | None:
    if e.op.name not in _EXPONENTIALS or not np.isfinite(e.value(0)):
        return None
    dtype = e.result.dtype
    bound = float(np.floor(np.log(float(jnp.finfo(dtype).max))))
    message = (
        f"The exponential reads up to {e.source.operands[0].high:g}; {bound:g} is the largest "
        f"integer with a result in {dtype}."
        f"{' The step overflows in FP32 too.' * e.overflows_in_fp32}"
    )
    stable = _domains.in_one_function(e.op.expression)
    code = stable or _domains.at_most(e.op.expression, bound, "exp")
    return e.cause("exp_overflow", message, _IN_ONE if stable else "Bound the operand", code)


# ---------------------------------------------------------------------------
# Ranges of formats
# ---------------------------------------------------------------------------


def _loss_scale(e: NonfiniteEvidence) -> NonfiniteCause | None:
    passing_scale = e.passing_scale()
    if e.scale is None or passing_scale is None:
        return None
    message = (
        f"The loss scale {e.scale.value:.9g} is too high for these gradients: with "
        f"{passing_scale:.9g}, the step is finite."
    )
    kind = "DynamicLossScale" if e.scale.is_dynamic else "StaticLossScale"
    sentence = "Start with this scale, before recipe.optimizer"
    if e.scale.is_dynamic:
        sentence += " (a dynamic scale also reaches it by itself, after some skipped steps)"
    # All bits: a rounded number may be below the minimum scale.
    code = f"recipe = recipe.replace(loss_scale=jaxmp.{kind}({passing_scale:.17g}))"
    return NonfiniteCause("loss_scale", message, f"{sentence}:\n    {code}")


def _diverged(e: NonfiniteEvidence) -> NonfiniteCause | None:
    if not e.walk.is_overflow(e.origin) or not e.overflows_in_fp32:
        return None
    message = (
        f"{e.op.name} overflows {e.result.dtype}, and the same step in FP32 overflows too: the "
        "precision is not the cause."
    )
    if not e.has_optimizer:
        rows = ", ".join(f"{row.dtype} {_range(row)}" for row in e.source.operands)
        fix = f"Look for the cause in the values that {e.op.name} reads: {rows}. Scale them down."
        return NonfiniteCause("diverged", message, fix)
    fix = (
        "Restart from an earlier checkpoint with a smaller learning rate, or clip the gradients:\n"
        "    tx = optax.chain(optax.clip_by_global_norm(1.0), tx)"
    )
    return NonfiniteCause("diverged", message, fix)


def _range_exceeded(e: NonfiniteEvidence) -> NonfiniteCause | None:
    wide = e.source.in_fp32
    if not wide or wide[0].nonfinite or e.origin.from_infinite:
        return None
    dtype = e.result.dtype
    largest = float(jnp.finfo(dtype).max)
    size = max(abs(wide[0].low), abs(wide[0].high))
    if size <= largest:
        return None
    message = (
        f"The result reaches {size:g} in FP32, {size / largest:.3g} times the largest {dtype} "
        f"number, {largest:g}."
    )
    module = e.walk.module(e.operation)
    if not module or not e.is_in("flax"):
        code = _rewrite.in_fp32(e.op.expression)
        return e.cause(f"{dtype}_range", message, "Compute the operation in FP32", code)
    fix = (
        "Compute this module in FP32, before recipe.wrap:\n"
        f"    rules = [jaxmp.Rule({module!r}, 'c=f32,o=f32')]\n"
        "    recipe = recipe.replace(policies=jaxmp.PolicyMap(recipe.policies, rules))"
    )
    return NonfiniteCause(f"{dtype}_range", message, fix)


def _range(row: ArrayRow) -> str:
    return f"from {row.low:g} to {row.high:g}"


# Causes that may come from the rounding of operands.
_OF_OPERANDS = (_interval, _logarithm, _root, _quotient, _exponential)
_CHECKS: tuple[Callable[[NonfiniteEvidence], NonfiniteCause | None], ...] = (
    *(_where_gradient, _nan_constant, _matrix, _constant, _masked_softmax),
    *(*_OF_OPERANDS, _loss_scale, _diverged, _range_exceeded, _unused_branch),
)


# ---------------------------------------------------------------------------
# Arguments
# ---------------------------------------------------------------------------

# The other arguments are parameters, or copies of them.
_OF_ROLE = {
    **dict.fromkeys(("moment", "counter", "loss scale"), "poisoned_moment"),
    "FP8 state": "fp8_scale",
    "input": "bad_input",
}


def cause_of_argument(row: ArgumentRow, *, is_first: bool) -> NonfiniteCause:
    """Returns the cause of an argument that is not finite.

    Args:
      row: the argument.
      is_first: True if no step has changed the state yet.
    """
    message = (
        f"Before the {'first ' * is_first}step, elements of the {row.role} {row.name} are not "
        f"finite ({row.count}); the first is {row.value:g} at {list(row.index)}."
    )
    root = row.name.partition("[")[0].partition(".")[0]
    fix = (
        "An earlier step wrote it. Restart from a checkpoint before that step:\n"
        f"    {root} = checkpointer.restore({root})"
    )
    if is_first:
        option = "jax_debug_nans" if math.isnan(row.value) else "jax_debug_infs"
        fix = (
            "Its initialization made it, or it was loaded so. JAX raises an error where an "
            "operation makes it, with this line in front of the initialization:\n"
            f'    jax.config.update("{option}", True)'
        )
    if row.role == "input":
        where = f" (row {row.index[0]} of the batch)" if row.index else ""
        fix = (
            f"Remove such elements{where} from the data, or replace them:\n"
            f"    {row.name} = jnp.where(jnp.isfinite({row.name}), {row.name}, 0)"
        )
    return NonfiniteCause(_OF_ROLE.get(row.role, "poisoned_parameter"), message, fix)
