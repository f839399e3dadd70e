"""Leaves the sums of gradients over devices to the caller, on explicit mesh axes.

A matmul over a dimension that is split over devices, such as that of a weight gradient over the
rows of a batch, ends with a sum over devices. Linear operations apply to each term of the sum, so
that the terms of many such sums are added first, and summed over devices once.

`delay_sums` finds the results of a traced function that linear operations compute from such sums;
see `_unreduced.py` for the function that it returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from jaxmp._core._compat import jaxpr_body
from jaxmp._core._jaxprs import equations, without_unused
from jaxmp._core._programs._analysis import Body
from jaxmp._core._programs._bind import scatter_of
from jaxmp._core._programs._constructs import CALLS, call_of, scan_of
from jaxmp._core._programs._operations import axes_of, dot_of
from jaxmp._gradients._unreduced import (
    FACTORS,
    MERGES,
    NO_AXES,
    RUN_INNER,
    SUMS,
    UNARY,
    AddedRows,
    Axes,
    Delayed,
    entries_of,
    kind_of,
    sharding_of,
    unreduced_axes,
)


def delay_sums(closed: ClosedJaxpr, asked: Sequence[bool]) -> Delayed:
    """Returns a traced function that leaves results unreduced where this is possible.

    A result remains as it was recorded if an operation that JAX does not define for unreduced
    arrays computes it, or if it is not in FP32 or wider.

    Args:
      closed: the function.
      asked: for each result, True if it may be unreduced.
    """
    return _delay({}, closed, tuple(asked), {})


# ---------------------------------------------------------------------------
# Analysis
# ---------------------------------------------------------------------------


# (id of a jaxpr, results that may be unreduced, arguments) -> the jaxpr, and the function that
# replaces it. It stores the jaxpr so that its id is not used again.
_Known: TypeAlias = dict[Any, tuple[Any, Delayed]]


def _delay(
    known: _Known,
    closed: ClosedJaxpr | Jaxpr,
    asked: tuple[bool, ...],
    arguments: Mapping[int, Axes],
) -> Delayed:
    """Returns the function that replaces a jaxpr, which equal calls share."""
    key = id(closed), asked, frozenset(arguments.items())
    if key not in known:
        known[key] = closed, _choose(known, closed, asked, arguments)
    return known[key][1]


def _choose(
    known: _Known,
    closed: ClosedJaxpr | Jaxpr,
    asked: tuple[bool, ...],
    arguments: Mapping[int, Axes],
) -> Delayed:
    """Chooses the variables of a jaxpr that are unreduced.

    Args:
      known: functions that replace other jaxprs.
      closed: the jaxpr.
      asked: for each result, True if it may be unreduced.
      arguments: index of an argument -> mesh axes over which it may be unreduced.

    Returns:
      A function whose unreduced arguments are all among `arguments`.
    """
    jaxpr, consts = jaxpr_body(closed)
    body = Body(without_unused(jaxpr))
    jaxpr = body.jaxpr
    numbered = list(enumerate(equations(jaxpr, inside=False)))
    pairs = list(zip(jaxpr.outvars, asked, strict=True))
    wanted = {var for var, flag in pairs if flag and isinstance(var, Var)}
    wanted -= {var for var, flag in pairs if not flag and isinstance(var, Var)}
    chain = body.sources(wanted, _may_be_linear)
    banned: set[Var] = set()
    while True:
        possible = {jaxpr.invars[n]: axes for n, axes in arguments.items()}
        possible = {var: axes for var, axes in possible.items() if var not in banned}
        for _, equation in numbered:
            if chain.isdisjoint(equation.outvars):
                continue
            results = _axes_of_results(known, equation, possible, body)
            named = zip(equation.outvars, results, strict=True)
            possible |= {v: axes for v, axes in named if axes and v in chain and v not in banned}
        # The ancestors of results, and how equations with a jaxpr run it.
        chosen = wanted & possible.keys()
        inner: dict[int, Delayed] = {}
        used: set[tuple[int, int]] = set()
        for index, equation in reversed(numbered):
            if chosen.isdisjoint(equation.outvars):
                continue
            flags = tuple(var in chosen for var in equation.outvars)
            before = _operands_in(equation, possible)
            if kind_of(equation) in RUN_INNER:
                inner[index] = _INNER[kind_of(equation)](known, equation, flags, before)
                entering = inner[index].operands
                before = {n: axes for n, axes in before.items() if entering[n] == axes}
            elif equation.primitive.name in SUMS and not _linear(equation, before):
                before = {}
            used |= {(id(equation), n) for n in before}
            chosen |= {_var(equation.invars[n]) for n in before}
        wrong = {v for v in chosen if not _all_used(v, body, used, wanted)}
        for index, plan in inner.items():
            pairs = list(zip(numbered[index][1].outvars, plan.results, strict=True))
            wrong |= {v for v, axes in pairs if v in chosen and axes != possible[v]}
        if not wrong:
            added = {
                n: _added_rows(equation, body)
                for n, equation in numbered
                if not chosen.isdisjoint(equation.outvars)
            }
            rows = {n: each for n, each in added.items() if each is not None}
            axes = {var: possible[var] for var in chosen}
            return Delayed(jaxpr, consts, axes, inner, rows)
        banned |= wrong


def _may_be_linear(equation: JaxprEqn) -> bool:
    """Returns True for linear operations and calls."""
    return equation.primitive.name in UNARY | MERGES | FACTORS | CALLS | {"reduce_sum", "reshard"}


def _all_used(var: Var, body: Body, used: set[tuple[int, int]], wanted: set[Var]) -> bool:
    """Returns True if all equations that read a variable accept it unreduced."""
    return all(
        var in wanted
        if reader is None
        else all(
            (id(reader), n) in used for n, operand in enumerate(reader.invars) if operand is var
        )
        for reader in body.consumers.get(var, [])
    )


def _axes_of_results(
    known: _Known, equation: JaxprEqn, possible: Mapping[Var, Axes], body: Body
) -> list[Axes]:
    """Returns for each result of an equation the mesh axes over which it can be unreduced."""
    before = _operands_in(equation, possible)
    if kind_of(equation) in RUN_INNER:
        every = tuple(_is_wide(var) for var in equation.outvars)
        return _INNER[kind_of(equation)](known, equation, every, before).results
    if len(equation.outvars) > 1 or not _is_wide(equation.outvars[0]):
        return [NO_AXES] * len(equation.outvars)
    added = _added_rows(equation, body)
    if added is not None:
        return [_split(added.rows)]
    return [_linear(equation, before) or _summed(equation, before)]


def _linear(equation: JaxprEqn, before: Mapping[int, Axes]) -> Axes:
    """Returns the mesh axes over which the result of a linear operation can be unreduced."""
    name = equation.primitive.name
    if len(set(before.values())) != 1 or any(map(_has_sum_type, equation.invars)):
        return NO_AXES
    (axes,) = set(before.values())
    if not axes.isdisjoint(_split(equation.outvars[0])):
        return NO_AXES
    if name in MERGES and all(axes.isdisjoint(_split(var)) for var in equation.invars):
        return axes
    is_first = before.keys() == {0}
    if name == "reshard":
        source, (result,) = equation.invars[0], equation.outvars
        is_same = _mesh(source) == _mesh(result) and entries_of(source) == entries_of(result)
        return axes if is_same else NO_AXES
    if name == "pad" and not _is_zero(equation.invars[1]):
        return NO_AXES
    if name in UNARY or (name == "reduce_sum" and not _reduced_axes(equation)):
        return axes if is_first else NO_AXES
    if name in FACTORS and len(before) == 1 and (is_first or name == "mul"):
        other = equation.invars[1 - next(iter(before))]
        return axes if axes.isdisjoint(_split(other)) else NO_AXES
    return NO_AXES


def _summed(equation: JaxprEqn, before: Mapping[int, Axes]) -> Axes:
    """Returns the mesh axes over which an operation sums."""
    name, (out,) = equation.primitive.name, equation.outvars
    if name == "reshard":  # of an array that is unreduced in the function itself
        source, result = (sharding_of(var) for var in (equation.invars[0], out))
        if source is None or result is None or unreduced_axes(result):
            return NO_AXES
        is_sum = source.spec.partitions == result.spec.partitions
        return unreduced_axes(source) if is_sum and not source.spec.reduced else NO_AXES
    if name not in SUMS or before or any(map(_has_sum_type, [*equation.invars, out])):
        return NO_AXES
    axes = _reduced_axes(equation)
    return axes if axes.isdisjoint(_split(out)) else NO_AXES


def _added_rows(equation: JaxprEqn, body: Body) -> AddedRows | None:
    """Returns the addition of rows that an equation passes on, if each device can add its rows.

    If rows of a table are read with `.at[...].get(out_sharding=...)`, JAX gathers their gradients
    on automatic axes, and adds them on all devices.
    """

    def definition(var: Var | Literal, name: str) -> JaxprEqn | None:
        producer = body.maker(var)
        return producer if producer is not None and producer.primitive.name == name else None

    scatter = definition(equation.invars[0], "scatter-add") if equation.invars else None
    if equation.primitive.name != "reshard" or scatter is None:
        return None
    zeros, gather = (
        definition(scatter.invars[n], name) for n, name in ((0, "broadcast_in_dim"), (2, "reshard"))
    )
    indices, numbers = scatter.invars[1], scatter_of(scatter)["dimension_numbers"]
    if zeros is None or gather is None or not isinstance(indices, Var):
        return None
    rows, (table,) = _var(gather.invars[0]), equation.outvars
    arrays = (*scatter.invars, *scatter.outvars, table)
    is_local = (
        _is_zero(zeros.invars[0])
        and not any(_split(var) or _has_sum_type(var) for var in arrays)
        and not (_has_sum_type(rows) or _split(rows, numbers.update_window_dims))
        and _mesh(rows) == _mesh(table)
        and not numbers.operand_batching_dims
    )
    return AddedRows(scatter, indices, rows) if is_local and _split(rows) else None


def _is_zero(var: Var | Literal) -> bool:
    return isinstance(var, Literal) and not np.any(var.val)


def _reduced_axes(equation: JaxprEqn) -> Axes:
    """Returns the mesh axes that split the dimensions over which an operation sums."""
    if equation.primitive.name == "reduce_sum":
        return _split(equation.invars[0], axes_of(equation))
    lhs, rhs = dot_of(equation).contracted
    sides = list(zip(equation.invars, (lhs, rhs), strict=True))
    entries = [[entries_of(var)[n] for n in dims] for var, dims in sides]
    if entries[0] != entries[1]:
        return NO_AXES
    return _split(equation.invars[0], lhs)


# ---------------------------------------------------------------------------
# Types
# ---------------------------------------------------------------------------


def _operands_in(equation: JaxprEqn, variables: Mapping[Var, Axes]) -> dict[int, Axes]:
    """Returns index of an operand -> its mesh axes, for the operands that are among variables."""
    variable = [(n, var) for n, var in enumerate(equation.invars) if isinstance(var, Var)]
    return {n: variables[var] for n, var in variable if var in variables}


def _var(var: Var | Literal) -> Var:
    assert isinstance(var, Var)
    return var


def _is_wide(var: Var | Literal) -> bool:
    """Returns True for a floating-point array of 32 bits or more."""
    dtype = getattr(var.aval, "dtype", None)
    is_dtype = isinstance(dtype, np.dtype)
    return is_dtype and dtype.itemsize >= 4 and bool(jnp.issubdtype(dtype, jnp.inexact))


def _mesh(var: Var | Literal) -> object:
    sharding = sharding_of(var)
    return None if sharding is None else sharding.mesh


def _split(var: Var | Literal, dimensions: Iterable[int] | None = None) -> Axes:
    """Returns the mesh axes that split (some) dimensions of an array."""
    entries = entries_of(var)
    chosen = entries if dimensions is None else [entries[n] for n in dimensions]
    names = (entry if isinstance(entry, tuple) else (entry,) for entry in chosen)
    return frozenset(name for group in names for name in group if name is not None)


def _has_sum_type(var: Var | Literal) -> bool:
    """Returns True for an array that the function itself makes `unreduced` or `reduced`."""
    sharding = sharding_of(var)
    return sharding is not None and bool(sharding.spec.unreduced or sharding.spec.reduced)


# ---------------------------------------------------------------------------
# Operations that contain a jaxpr
# ---------------------------------------------------------------------------


def _delay_call(
    known: _Known, equation: JaxprEqn, asked: tuple[bool, ...], before: Mapping[int, Axes]
) -> Delayed:
    return _delay(known, call_of(equation).jaxpr, asked, before)


def _delay_remat(
    known: _Known, equation: JaxprEqn, asked: tuple[bool, ...], before: Mapping[int, Axes]
) -> Delayed:
    return _delay(known, call_of(equation).jaxpr, asked, {})


def _delay_scan(
    known: _Known, equation: JaxprEqn, asked: tuple[bool, ...], before: Mapping[int, Axes]
) -> Delayed:
    """Chooses results of a scan. A carried sum is unreduced in all iterations or in none."""
    loop = scan_of(equation)
    num_consts, num_carry = loop.consts, loop.carry
    carried = frozenset(range(num_carry))
    while True:
        flags = tuple(flag and (n in carried or n >= num_carry) for n, flag in enumerate(asked))
        first = _delay(known, loop.jaxpr, flags, {})
        axes = {n: first.results[n] for n in carried if first.results[n]}
        plan = _delay(
            known,
            loop.jaxpr,
            tuple(f and (n in axes or n >= num_carry) for n, f in enumerate(flags)),
            {num_consts + n: each for n, each in axes.items()},
        )
        _, entering, _ = loop.split(plan.operands)
        equal = {n for n, each in axes.items() if entering[n] == plan.results[n] == each}
        if equal == axes.keys():
            return plan
        carried = frozenset(equal)


_INNER: dict[str, Callable[[_Known, JaxprEqn, tuple[bool, ...], Mapping[int, Axes]], Delayed]] = {
    "call": _delay_call,
    "remat": _delay_remat,
    "scan": _delay_scan,
}
