"""Carries of loops: what an iteration adds to them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple

from jax.extend.core import JaxprEqn

from jaxmp import _core, _programs
from jaxmp._programs import Frame
from jaxmp._tools.audit import _checks, _dataflow
from jaxmp._tools.audit._checks import OpOccurrence

_KEEPS = _checks.LAYOUT | _core.named(
    "neg select_n gather dynamic_slice slice scatter dynamic_update_slice"
)
_SUMS = _core.named("add add_any sub scatter-add scatter-sub")
# Selections of sums, as in a beam search and in Viterbi's algorithm.
_CHOICES = _core.named("max min reduce_max reduce_min top_k")
# Operations between the exponentials of a log-sum-exp and its largest operand.
_OF_EXPONENTIALS = _core.named("log log1p abs sign reduce_sum convert_element_type")


class Linear(NamedTuple):
    """Value `factor * carry + increment`, where neither depends on a carry of the loop."""

    # None if it is not a constant, 1 for a running sum, 0 for exponentials of differences.
    factor: float | None = 1.0
    # The last sum of the carry and an increment.
    addition: _programs.Equation | None = None
    # True for a difference of two running sums.
    is_difference: bool = False


def linear_carries(
    op: OpOccurrence, others: Literal[False] | None
) -> Iterator[tuple[_programs.Atom, Any]]:
    """Yields the 16-bit carries that a loop adds to and that are linear in their last value.

    Args:
      op: the loop.
      others: facts of the other carries: None for values that do not depend on a carry.
    """
    loop = op.loop
    carries = [var for var in loop.incoming if _checks.dtype_of(var) in _checks.FLOATS]
    for carry, result in zip(loop.incoming, loop.outgoing, strict=True):
        if _checks.dtype_of(carry) in _core.FLOATS_16BIT and not _programs.is_literal(result):
            carried = dict.fromkeys(carries, others) | {carry: Linear()}
            args = [carried.get(var) for var in loop.jaxpr.invars]
            linear = _Linearity().frame(loop.jaxpr, args).values.get(result)
            if linear and linear.addition is not None:
                yield carry, linear


class _Linearity(_programs.Forward):
    """Facts of values in a loop: `None` without a carry, `False` if they are not linear in it."""

    def equation(self, equation: JaxprEqn, operands: list[Any], frame: Frame) -> list[Any]:
        is_read = any(operand is not None for operand in operands)
        is_call = equation.primitive.name in _programs.CALLS | _programs.CUSTOM_DERIVATIVES
        if is_read and is_call and _programs.name_of(equation) != "_where":
            return self.enter(equation, operands, frame)
        results = [_linear_after(equation, operands) if is_read else None] * len(equation.outvars)
        # The indices of the largest sums are not linear.
        return [results[0], False] if equation.primitive.name == "top_k" else results


def _linear_after(equation: _programs.Equation, facts: list[Any]) -> Linear | Literal[False] | None:
    name, operands = equation.primitive.name, equation.invars
    name = "select_n" if _programs.name_of(equation) == "_where" else name
    rows = [fact for fact in facts if fact is not None]
    if name in ("is_finite", "ne"):
        return None  # It guards a log-sum-exp against infinity and NaN.
    if not all(rows):
        return False
    linear: Linear = max(rows, key=lambda row: row.addition is not None)
    is_first, factors = facts[0] is not None, {row.factor for row in rows}
    if (linear.is_difference and name == "exp") or (factors == {0} and name in _OF_EXPONENTIALS):
        return Linear(0.0)
    if name in _CHOICES:
        pairs = zip(operands, facts, strict=True)
        others = {_dataflow.number_of(var) for var, fact in pairs if fact is None}
        return linear if len(factors) == 1 and others <= {-math.inf, math.inf} else False
    if name in _KEEPS:
        return False if name == "select_n" and is_first else linear
    if name.startswith("scatter-") and not is_first:
        return False
    if name in _SUMS:
        is_single = len(rows) == 1 or factors == {0, 1}
        if name == "sub" and not is_single and factors == {1}:
            return Linear(None, is_difference=True)
        return Linear(max(factors) if is_single else None, equation)
    if len(rows) == 1 and (name == "mul" or (name == "div" and is_first)):
        constant = _dataflow.number_of(operands[1] if is_first else operands[0])
        if linear.factor is None or not constant:
            return Linear(None, linear.addition)
        factor = linear.factor * (constant if name == "mul" else 1 / constant)
        return linear._replace(factor=factor)
    return False


# Writes to a part of their first operand -> the operand that they write.
_WRITES = {"dynamic_update_slice": 1, "scatter": 2, "scatter-add": 2}


def share_of_terms(
    loop: _programs.Inner, carry: _programs.Atom, constants: Iterable[float | None] = ()
) -> float:
    """Returns the mean number of terms that an iteration adds to an element of a carry, at most 1.

    It is the part of the carry that an iteration writes at an index of its own, as the gradient of
    `x[i]` does, and 1 for any other sum.

    Args:
      loop: the loop.
      carry: the parameter of its body.
      constants: facts of the constants of the loop, as in `_Shares`; by default, `None`.
    """
    args = [*constants] or [None] * loop.carried.start
    args += [1.0] * (len(loop.jaxpr.invars) - len(args))
    args[loop.jaxpr.invars.index(carry)] = 0.0
    share = _Shares().run(loop.jaxpr, args)[loop.incoming.index(carry)]
    return 1.0 if share is None else min(1.0, share)


class _Shares(_programs.Forward):
    """Terms per element that an iteration adds; `None` for values of all iterations."""

    def join(self, first: Any, second: Any) -> Any:
        return max((share for share in (first, second) if share is not None), default=None)

    def equation(self, equation: JaxprEqn, operands: list[Any], frame: Frame) -> list[Any]:
        form, results = _programs.form_of(equation), [None] * len(equation.outvars)
        if all(operand is None for operand in operands):
            return results
        if form in (_programs.Form.CALL, _programs.Form.REMAT, _programs.Form.BRANCH):
            return self.enter(equation, operands, frame)
        if form is not _programs.Form.SCAN:
            return [_share_after(equation, operands)] * len(results)
        (inner,) = _programs.inners(equation)
        constants = operands[: inner.carried.start]
        sums = (inner.times * share_of_terms(inner, x, constants) for x in inner.incoming)
        starts = operands[inner.carried.start : inner.carried.stop]
        carried = [(first or 0.0) + new for first, new in zip(starts, sums, strict=True)]
        return carried + [1.0] * (len(results) - len(carried))


def _share_after(equation: _programs.Equation, shares: list[float | None]) -> float:
    name, known = equation.primitive.name, [share for share in shares if share is not None]
    if name in _WRITES:
        written = equation.invars[_WRITES[name]].aval.size / equation.outvars[0].aval.size
        indices = [share for n, share in enumerate(shares) if n not in (0, _WRITES[name])]
        is_varied = any(index is not None for index in indices)
        return (shares[0] or 0.0) + (written if is_varied else 1.0)
    if name in _SUMS:
        return sum(1.0 if share is None else share for share in shares)
    if name == "mul":
        return min(known)
    return max(known) if name in _KEEPS else 1.0
