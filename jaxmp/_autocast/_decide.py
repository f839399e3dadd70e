"""Decides the dtype in which an equation runs, and why.

`decide` is the only place that knows it: the interpreter executes its decisions, and `explain`
prints those of matmuls.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from jax.core import AbstractValue

from jaxmp import _core, _programs
from jaxmp._autocast import _values
from jaxmp._autocast._resolve import ScopePolicy
from jaxmp._autocast._values import Priority, Value, is_castable_aval, widest
from jaxmp._core import Array, DTypeLike, _compat
from jaxmp._policies._resolve import narrow_reason
from jaxmp._programs import Frame, Use

# Arithmetic on two operands, which rounds its result to the dtype of the result.
ARITHMETIC = frozenset(("add", "add_any", "sub", "mul", "div", "rem", "atan2"))
# Operations of the category "follow" that round their result; all others are exact.
BOUNDED = frozenset(("tanh", "atan", "erf", "erfc", "logistic", "sqrt", "cbrt"))


def is_identity(equation: _compat.JaxprEqn) -> bool:
    """Returns True for a conversion to the recorded dtype, as `jnp.mean` contains."""
    is_conversion = equation.primitive.name == "convert_element_type"
    return is_conversion and _programs.array_aval(
        equation.invars[0]
    ).dtype == _programs.new_dtype_of(equation)


# ---------------------------------------------------------------------------
# Analyses of a jaxpr
# ---------------------------------------------------------------------------

# Equation -> its category in the op table.
Categories: TypeAlias = Callable[[_compat.JaxprEqn], str]


class _MadeInFp32(_programs.Forward):
    """For each variable, True for an array that is FP32 because an FP32 operation computes it.

    They are the results of FP32 operations and, transitively, of "widest" and "follow" operations
    with such an operand. Scalars are left out, since they do not promote arrays.
    """

    nothing = False

    def __init__(self, category: Categories) -> None:
        super().__init__()
        self._category = category
        self.kinds: list[str] = []

    def equation(self, equation: _compat.JaxprEqn, operands: list[Any], frame: Frame) -> list[Any]:
        kind = "follow" if is_identity(equation) else self._category(equation)
        self.kinds.append(kind)
        is_made = kind == "fp32" or (kind in ("widest", "follow") and any(operands))
        return [is_made and getattr(v.aval, "ndim", 0) > 0 for v in equation.outvars]


class _Read(NamedTuple):
    """Consumers of a variable.

    otherwise: True if an operation reads it that is not an FP32 operation, or the caller.
    otherwise_later: the same, but arithmetic and data movement count as FP32 operations if their
      results reach only FP32 operations.
    """

    otherwise: bool
    otherwise_later: bool


class Consumers(_programs.Backward):
    """Consumers of the variables of one jaxpr.

    Args:
      jaxpr: without its constants.
      category: equation -> its category in the op table.
    """

    def __init__(self, jaxpr: _compat.Jaxpr, category: Categories) -> None:
        made = _MadeInFp32(category)
        self._wide = made.frame(jaxpr, [False] * len(jaxpr.invars)).values
        self._kinds = made.kinds
        self._read = self.facts(jaxpr, [_Read(True, True)] * len(jaxpr.outvars))

    def join(self, first: _Read, second: _Read) -> _Read:
        return _Read(*map(any, zip(first, second, strict=True)))

    def equation(self, equation: _compat.JaxprEqn, results: list[Any], frame: Frame) -> list[Any]:
        kind = self._kinds[frame.index]
        later = kind == "fp32" or (
            kind in ("widest", "follow")
            and equation.primitive.name not in BOUNDED
            and all(read is not None and not read.otherwise_later for read in results)
        )
        # "widest" casts its other operands to FP32 if one is FP32.
        operands = (var for var in equation.invars if not _programs.is_literal(var))
        later = later or (kind == "widest" and any(self._wide[var] for var in operands))
        return [_Read(kind != "fp32", not later)] * len(equation.invars)

    def of(self, var: _compat.Var) -> _Read:
        """Returns the consumers of a variable; any others of one without consumers."""
        return self._read.get(var) or _Read(True, True)


class Environment:
    """State of one jaxpr: categories, consumers and uses of its variables, and a cache of casts.

    Args:
      category: equation -> its category in the op table.
      consumers: consumers of its variables.
      uses: variable -> its uses.
    """

    def __init__(self, category: Categories, consumers: Consumers, uses: Mapping[Any, int]) -> None:
        self.casts: dict[tuple[int, Any], Any] = {}
        self.category, self.consumers, self._uses = category, consumers, uses

    def uses_of(self, equation: _compat.JaxprEqn) -> tuple[Use, ...]:
        """Returns the uses of each result of an equation."""
        return tuple(Use(self._uses.get(var, 0)) for var in equation.outvars)

    def use_of(self, equation: _compat.JaxprEqn) -> Use:
        """Returns the uses of all results of an equation."""
        return functools.reduce(operator.or_, self.uses_of(equation), Use.NONE)

    def cast(self, value: Value, dtype: DTypeLike) -> Array:
        """Returns the array of a value in `dtype`; values that are not castable are unchanged."""
        if not value.castable or value.dtype == dtype:
            return value.array
        key = id(value.array), np.dtype(dtype)
        if key not in self.casts:
            # Storing the array prevents the reuse of its id. The scope marks the cast, so that an
            # audit does not report it as implicit promotion.
            with jax.named_scope(_programs.AUTOCAST):
                self.casts[key] = value.array, _values.to_16bit(value, dtype)
        return self.casts[key][1]

    def to_aval(self, value: Value, aval: AbstractValue) -> Array:
        """Returns the array of a value in the dtype of `aval`, the recorded type."""
        return self.cast(value, aval.dtype) if is_castable_aval(aval) else value.array

    def recorded(self, equation: _compat.JaxprEqn, values: list[Value]) -> list[Array]:
        """Returns the operands of an equation in the dtypes in which it was traced."""
        pairs = zip(equation.invars, values, strict=True)
        return [self.to_aval(value, var.aval) for var, value in pairs]


# ---------------------------------------------------------------------------
# Decisions
# ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Decision:
    """Dtypes in which an equation runs.

    Attributes:
      dtype: dtype to which floating operands are cast; None: the one in which each arrives, or the
        recorded one.
      priority: promotion priority of the results.
      reason: why.
      result: dtype of the result of a matmul that is cast, and of a gather from 16 bits; None for
        other operations.
      as_recorded: True if each operand is cast to the dtype in which it was traced.
    """

    dtype: Any
    priority: Priority
    reason: str
    result: Any = None
    as_recorded: bool = False


def decide(
    equation: _compat.JaxprEqn, values: list[Value], env: Environment, policy: ScopePolicy
) -> Decision:
    """Decides the dtype of an equation that contains no jaxprs which are entered.

    Args:
      equation: the equation.
      values: its operands.
      env: state of the jaxpr that contains it: categories and uses of its variables.
      policy: the policy of its scopes.
    """
    name, category = equation.primitive.name, env.category(equation)
    reason = f"the op table: {name} = {category!r}"
    floating = [value for value in values if value.castable]
    # Results of integer operations, such as a mask to multiply with, are weakly typed.
    priority = max((value.priority for value in floating), default=Priority.CONSTANT)
    weak, use = min(priority, Priority.NARROW), env.use_of(equation)
    if not floating:
        types = (getattr(var.aval, "dtype", None) for var in equation.invars)
        return Decision(None, priority, f"{next(types, None)} is never cast")
    if name == "convert_element_type":
        # Also that of the author, or of a `jnp.sum` in 16 bits, if a later operation decides.
        is_rounding = _core.is_16bit(_programs.new_dtype_of(equation)) and use & (
            _programs.SENSITIVE & ~Use.RESULT
        )
        if is_identity(equation) or (is_rounding and values[0].dtype == _core.FLOAT32):
            return Decision(None, weak if is_rounding else priority, reason)
        return Decision(_programs.new_dtype_of(equation), Priority.COMPUTED, reason)
    if category == "low":
        return _of_matmul(equation, values, env, policy, use)
    if category == "opaque":
        return Decision(None, priority, reason, as_recorded=True)
    if _programs.is_inner_product(equation):
        reason = "an inner product is a sum, in FP32"
    if category == "fp32" or policy.is_fp32 or _leads_to_fp32(equation, env):
        reason = reason if category == "fp32" else policy.reason
        return Decision(_core.FLOAT32, Priority.COMPUTED, reason)
    if _programs.is_outer_product(equation):
        reason = "an outer product, which sums nothing, keeps its wider operand"
    if (
        use & _programs.SENSITIVE
        and priority is not Priority.CONSTANT
        and (category == "widest" or name in BOUNDED)
    ):
        # Weakly typed, so that consumers that do not magnify the rounding compute in 16 bits.
        variable = [value for value in floating if value.priority is not Priority.CONSTANT]
        return Decision(
            _core.FLOAT32 if name in ARITHMETIC | BOUNDED else widest(variable), weak, reason
        )
    if name == "gather" and _core.is_16bit(values[0].dtype) and not _programs.is_unique(equation):
        # Its gradient sums all entries of an index. XLA fuses the casts with the gather.
        return Decision(_core.FLOAT32, priority, reason, values[0].dtype)
    dtype = _values.common_dtype(values) if category == "widest" else None
    return Decision(dtype, priority, reason)


def why_not_fp8(use: Use) -> str:
    """Returns why a matmul whose result has these uses does not run in FP8; "" if it may."""
    return _programs.why_wide(use & (Use.SOFTMAX | Use.ORDER))


def _of_matmul(
    equation: _compat.JaxprEqn, values: list[Value], env: Environment, policy: ScopePolicy, use: Use
) -> Decision:
    """Decides the dtypes of a matmul or convolution.

    FP32 operands with `precision=HIGHEST`, of a matmul with an operand from a solver, or whose
    result one reads, that is part of a squared distance or an angle, or by which a loss selects
    FP32 values, keep their recorded dtypes, and so does an operand that meets a complex one, which
    XLA converts to it. The dtype of the result is the first of these that applies:

    1. the `preferred_element_type`, if it differs from the recorded dtypes of the operands;
    2. FP32, if the recorded result is FP32 and only FP32 operations consume it;
    3. FP32 with the priority `NARROW`, if a softmax, a choice, a loss, or an operation that
       magnifies its rounding reads it, or if it is a linear layer with few outputs;
    4. the output dtype of the deciding rule, if it is wider than the compute dtype;
    5. the compute dtype.
    """
    recorded = [_programs.array_aval(v).dtype for v in equation.invars if is_castable_aval(v.aval)]
    options, dtype = _programs.arithmetic_of(equation), policy.dtype
    if any(np.iscomplexobj(value.array) for value in values):
        return Decision(
            None, Priority.COMPUTED, "a complex operand is never cast", as_recorded=True
        )
    if not _core.is_16bit(recorded[0]):
        why = "its author asked for precision=HIGHEST" if options and options.is_highest else ""
        exact = _programs.exact_uses(equation, use)
        if any(v.dtype != _core.FLOAT32 or v.priority is Priority.NARROW for v in values[:2]):
            exact &= ~Use.ANGLE  # a matmul in 16 bits has rounded the coordinates before
        why = why or _programs.why_wide(exact)
        why = why or ("a loss selects FP32 values by it" if _is_selection(values, use) else "")
        if why:
            # The product of data and an inverse does not promote a residual stream, and rotated
            # coordinates are data.
            priority = Priority.NARROW if exact == Use.SOLUTION else Priority.COMPUTED
            if not exact & ~(Use.ANGLE | Use.CHAINED):
                priority = max(value.priority for value in values[:2])
            return Decision(None, priority, why, as_recorded=True)
    preferred = None if options is None else options.result_dtype
    narrow = narrow_reason(policy.policy, _values.outputs_of(equation, values))
    reason = policy.reason
    if narrow and not policy.is_full_precision:
        reason += f"; {narrow}"
    if preferred is not None and any(preferred != operand_dtype for operand_dtype in recorded):
        return Decision(dtype, Priority.COMPUTED, reason, preferred)
    if _core.is_16bit(dtype) and _is_fp32_only(equation, env, dtype):
        return Decision(dtype, Priority.COMPUTED, reason, _core.FLOAT32)
    if policy.in_jvp_rule and all(map(_core.is_16bit, recorded)):
        # A tangent of a wide matmul: its transpose must meet a cotangent in 16 bits.
        return Decision(dtype, Priority.COMPUTED, reason, dtype)
    if _core.is_16bit(dtype) and use & _programs.SENSITIVE and not narrow:
        reason += f"; FP32 result: {_programs.why_wide(use)}"
    if narrow or use & _programs.SENSITIVE:
        return Decision(dtype, Priority.NARROW, reason, _core.FLOAT32)
    return Decision(dtype, Priority.COMPUTED, reason, policy.wide_output or dtype)


def _is_selection(values: list[Value], use: Use) -> bool:
    """Returns True if a loss reads a product of FP32 results, such as log-probabilities, with a
    constant or a mask, such as one-hot rows. The matmul itself rounds nothing.
    """
    fixed = [value.priority is Priority.CONSTANT for value in values[:2]]
    computed = [v.dtype == _core.FLOAT32 and v.priority > Priority.ARGUMENT for v in values[:2]]
    return Use.LOSS in use and any(fixed) and any(computed)


def _is_fp32_only(equation: _compat.JaxprEqn, env: Environment, dtype: np.dtype) -> bool:
    """Returns True if the recorded result is FP32 and only FP32 operations consume it.

    Rounding it to 16 bits would lose precision without benefit. In float16, arithmetic may lie
    in between, because a result beyond 65504 is infinite before a division makes it small.
    """
    read = env.consumers.of(equation.outvars[0])
    is_only = not read.otherwise
    if dtype == _core.FLOAT16 and _values.is_matmul(equation):
        is_only = is_only or not read.otherwise_later
    return _programs.array_aval(equation.outvars[0]).dtype == _core.FLOAT32 and is_only


def _leads_to_fp32(equation: _compat.JaxprEqn, env: Environment) -> bool:
    """Returns True for arithmetic whose result would be cast up again by all its consumers."""
    is_arithmetic = equation.primitive.name in ARITHMETIC
    return is_arithmetic and not env.consumers.of(equation.outvars[0]).otherwise_later
