"""Labels of values that are proportional to a power of a scalar argument, such as a loss scale."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from jaxmp._audit._program import OpOccurrence, dtype_of, named
from jaxmp._core._jaxprs import BACKWARD, Atom, is_literal
from jaxmp._core._programs._operations import exponent_of

_PRODUCTS = named("mul dot_general conv_general_dilated ragged_dot_general")
_JOINS = named(
    "add add_any sub max min select_n concatenate scatter-add dynamic_update_slice pad clamp"
)
_LINEAR = named(
    "neg abs reduce_sum reduce_max reduce_min cumsum convert_element_type reshape transpose"
    " broadcast_in_dim slice squeeze expand_dims copy copy_p rev gather dynamic_slice split"
    " reduce_precision stop_gradient optimization_barrier psum psum_invariant pvary pcast"
    " all_gather reduce_scatter sharding_constraint reduce_window_sum"
)
_ROOTS = {"sqrt": 0.5, "rsqrt": -0.5, "square": 2.0}


class Power(NamedTuple):
    """Label of a value that is proportional to a power of a scalar argument."""

    number: int
    # None: it depends on the argument in another way.
    exponent: float | None


def powers_after(op: OpOccurrence, labels_of: Callable[[Atom], Iterable[Any]]) -> frozenset[Power]:
    """Returns the powers of an equation's results, given the labels of its operands."""
    name, operands = op.name, op.equation.invars
    if getattr(dtype_of(op.equation.outvars[0]), "kind", "b") in "biu":
        return frozenset()
    if name == "select_n":
        operands = operands[1:]
    each = [powers_of(labels_of(var)) for var in operands]
    numbers = {number for row in each for number in row}
    powers = {n: _exponent(name, op, [row.get(n, 0.0) for row in each]) for n in numbers}
    return frozenset(Power(n, power) for n, power in powers.items() if power != 0)


def powers_of(labels: Iterable[Any]) -> dict[int, float | None]:
    """Returns scalar argument -> exponent; None if a value depends on it in another way."""
    powers: dict[int, float | None] = {}
    for label in labels:
        if isinstance(label, Power):
            same = label.exponent == powers.get(label.number, label.exponent)
            powers[label.number] = label.exponent if same else None
    return powers


def _exponent(name: str, op: OpOccurrence, exponents: list[float | None]) -> float | None:
    known = [exponent for exponent in exponents if exponent is not None]
    if len(known) < len(exponents):
        return None
    if name in _PRODUCTS:
        return sum(known)
    if name == "div":
        return known[0] - known[1]
    if name in _ROOTS or name == "integer_pow":
        return known[0] * (_ROOTS[name] if name in _ROOTS else exponent_of(op.equation))
    if name in _LINEAR:
        return known[0]
    if name in _JOINS:
        pairs = zip(op.equation.invars[-len(known) :], known, strict=True)
        others = {exponent for var, exponent in pairs if exponent or not _is_neutral(var, op)}
        return others.pop() if len(others) == 1 else None
    return None


def _is_neutral(var: Atom, op: OpOccurrence) -> bool:
    """Returns True for summands that leave a value proportional: 0, an epsilon, infinity and NaN.

    In a backward pass, such are all summands that are not proportional to the scale.
    """
    source = op.body.source_of(var, named("broadcast_in_dim square neg convert_element_type"))
    is_constant = is_literal(source) and not np.any(
        np.isfinite(source.val) & (np.abs(source.val) > 1e-3)
    )
    return op.location.phase == BACKWARD or is_constant
