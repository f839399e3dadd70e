"""Leaves the sums of gradients over devices to the caller, on explicit mesh axes.

A matmul over a dimension that is split over devices, such as that of a weight gradient over the
rows of a batch, ends with a sum over devices. On explicit mesh axes, JAX has a type for the terms
of this sum: an array that is `unreduced` over mesh axes is the sum of one part per device. Linear
operations apply to each part, so that many such arrays are added before one sum over devices.

`delay_sums` finds the results of a traced function that linear operations compute from such sums,
and `Delayed.run` runs the function so that these results are unreduced. All other results are
computed as they were recorded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jax.sharding import NamedSharding, PartitionSpec

from jaxmp._core._compat import jaxpr_body, jaxpr_like, scan_counts
from jaxmp._core._jaxprs import consumers, without_unused
from jaxmp._core._replay import OF_SCATTER, SCATTERS, as_recorded, bind
from jaxmp._core._typing import Array

# Mesh axes over which an array is unreduced; empty: it is an ordinary array.
Axes: TypeAlias = frozenset[Any]

_CALLS = frozenset({"closed_call", "core_call", "jit", "pjit"})
_REMATS = frozenset({"checkpoint", "remat2"})
# Linear operations of one array.
_UNARY = frozenset(
    {"broadcast_in_dim", "convert_element_type", "copy", "expand_dims", "neg", "pad", "reshape"}
    | {"slice", "squeeze", "transpose"}
)
# Linear operations of several arrays, of which some may be ordinary.
_MERGES = frozenset({"add", "add_any", "concatenate", "sub"})
_FACTORS = frozenset({"div", "mul"})
_SUMS = frozenset({"dot_general", "reduce_sum"})
NO_AXES: Axes = frozenset()


class AddedRows(NamedTuple):
    """Addition of rows to a table of zeros: the gradient of a table from which rows were read."""

    scatter: JaxprEqn
    indices: Var
    # The rows before they were gathered.
    rows: Var


@dataclasses.dataclass(frozen=True)
class Delayed:
    """Traced function, some results of which are unreduced.

    jaxpr: the jaxpr.
    consts: its constants.
    axes: for each unreduced variable, its mesh axes.
    inner: index of an equation that contains a jaxpr -> how that is run.
    rows: index of an equation whose result is a table to which rows were added -> the addition.
    """

    jaxpr: Jaxpr
    consts: tuple[Any, ...]
    axes: Mapping[Var, Axes]
    inner: Mapping[int, Delayed]
    rows: Mapping[int, AddedRows]

    @property
    def results(self) -> list[Axes]:
        """For each result, the mesh axes over which it is unreduced."""
        return [self.of(var) for var in self.jaxpr.outvars]

    @property
    def shardings(self) -> list[NamedSharding | None]:
        """For each result, its sharding if it is unreduced; otherwise None.

        This includes results that the function itself leaves unreduced.
        """
        pairs = zip(self.jaxpr.outvars, self.results, strict=True)
        return [_with_axes(var, axes or _own_axes(var)) for var, axes in pairs]

    @property
    def operands(self) -> list[Axes]:
        """For each argument, the mesh axes over which it must be unreduced."""
        return [self.of(var) for var in self.jaxpr.invars]

    def of(self, var: Var | Literal) -> Axes:
        """Returns the mesh axes over which a variable is unreduced."""
        return NO_AXES if isinstance(var, Literal) else self.axes.get(var, NO_AXES)

    def run(self, *args: Array) -> list[Array]:
        """Runs the function."""
        values: dict[Var, Any] = dict(zip(self.jaxpr.constvars, self.consts, strict=True))
        values |= zip(self.jaxpr.invars, args, strict=True)
        read = lambda var: var.val if isinstance(var, Literal) else values[var]
        for index, equation in enumerate(self.jaxpr.eqns):
            operands = [read(var) for var in equation.invars]
            added = self.rows.get(index)
            if added is not None:
                operands = [values[added.indices], values[added.rows]]
            with as_recorded(equation):
                out = self._equation(index, equation, operands)
            results = out if isinstance(out, (list, tuple)) else [out]
            values |= zip(equation.outvars, results, strict=True)
        return [read(var) for var in self.jaxpr.outvars]

    def _equation(self, index: int, equation: JaxprEqn, operands: list[Array]) -> Any:
        if index in self.inner:
            return _RUN_INNER[_kind(equation)](equation, operands, self.inner[index])
        axes = self.of(equation.outvars[0]) if equation.outvars else NO_AXES
        if index in self.rows:
            return _add_rows(equation, operands, self.rows[index], axes)
        return _run_linear(equation, operands, axes) if axes else bind(equation, operands)


def delay_sums(closed: ClosedJaxpr, asked: Sequence[bool]) -> Delayed:
    """Returns a traced function, those of whose results `asked` for are unreduced, if possible.

    A result remains as it was recorded if an operation that JAX does not define for unreduced
    arrays computes it, or if it is not in FP32 or wider.
    """
    return _delay(closed, tuple(asked), {})


# ---------------------------------------------------------------------------
# Analysis
# ---------------------------------------------------------------------------


def _delay(
    closed: ClosedJaxpr | Jaxpr, asked: tuple[bool, ...], arguments: Mapping[int, Axes]
) -> Delayed:
    """Chooses the variables of a jaxpr that are unreduced.

    Args:
      closed: the jaxpr.
      asked: for each result, True if it may be unreduced.
      arguments: index of an argument -> mesh axes over which it may be unreduced.

    Returns:
      A function whose unreduced arguments are all among `arguments`.
    """
    jaxpr, consts = jaxpr_body(closed)
    jaxpr = without_unused(jaxpr)
    definitions = {var: equation for equation in jaxpr.eqns for var in equation.outvars}
    pairs = list(zip(jaxpr.outvars, asked, strict=True))
    wanted = {var for var, flag in pairs if flag and isinstance(var, Var)}
    wanted -= {var for var, flag in pairs if not flag and isinstance(var, Var)}
    chain = _linear_ancestors(jaxpr, wanted)
    readers = consumers(jaxpr)
    banned: set[Var] = set()
    while True:
        possible = {jaxpr.invars[n]: axes for n, axes in arguments.items()}
        possible = {var: axes for var, axes in possible.items() if var not in banned}
        for equation in jaxpr.eqns:
            if chain.isdisjoint(equation.outvars):
                continue
            results = _axes_of_results(equation, possible, definitions)
            named = zip(equation.outvars, results, strict=True)
            possible |= {v: axes for v, axes in named if axes and v in chain and v not in banned}
        # The ancestors of results, and how equations with a jaxpr run it.
        chosen = wanted & possible.keys()
        inner: dict[int, Delayed] = {}
        used: set[tuple[int, int]] = set()
        for index, equation in reversed([*enumerate(jaxpr.eqns)]):
            if chosen.isdisjoint(equation.outvars):
                continue
            flags = tuple(var in chosen for var in equation.outvars)
            before = _operands_in(equation, possible)
            if _kind(equation) in _RUN_INNER:
                inner[index] = _INNER[_kind(equation)](equation, flags, before)
                entering = inner[index].operands
                before = {n: axes for n, axes in before.items() if entering[n] == axes}
            elif equation.primitive.name in _SUMS and not _linear(equation, before):
                before = {}
            used |= {(id(equation), n) for n in before}
            chosen |= {_var(equation.invars[n]) for n in before}
        wrong = {v for v in chosen if not _all_used(v, readers, used, wanted)}
        for index, plan in inner.items():
            pairs = list(zip(jaxpr.eqns[index].outvars, plan.results, strict=True))
            wrong |= {v for v, axes in pairs if v in chosen and axes != possible[v]}
        if not wrong:
            added = {
                n: _added_rows(equation, definitions)
                for n, equation in enumerate(jaxpr.eqns)
                if not chosen.isdisjoint(equation.outvars)
            }
            rows = {n: each for n, each in added.items() if each is not None}
            axes = {var: possible[var] for var in chosen}
            return Delayed(jaxpr, consts, axes, inner, rows)
        banned |= wrong


def _linear_ancestors(jaxpr: Jaxpr, wanted: set[Var]) -> set[Var]:
    """Returns the variables from which linear operations and calls may compute results."""
    chain = set(wanted)
    for equation in reversed(jaxpr.eqns):
        name = equation.primitive.name
        is_linear = name in _UNARY | _MERGES | _FACTORS | {"reduce_sum", "reshard"}
        if (is_linear or name in _CALLS) and not chain.isdisjoint(equation.outvars):
            chain |= {var for var in equation.invars if isinstance(var, Var)}
    return chain


def _all_used(
    var: Var, readers: Mapping[Any, list[Any]], used: set[tuple[int, int]], wanted: set[Var]
) -> bool:
    """Returns True if all equations that read a variable accept it unreduced."""
    return all(
        var in wanted
        if reader is None
        else all(
            (id(reader), n) in used for n, operand in enumerate(reader.invars) if operand is var
        )
        for reader in readers.get(var, [])
    )


def _axes_of_results(
    equation: JaxprEqn, possible: Mapping[Var, Axes], definitions: Mapping[Var, JaxprEqn]
) -> list[Axes]:
    """Returns for each result of an equation the mesh axes over which it can be unreduced."""
    before = _operands_in(equation, possible)
    if _kind(equation) in _RUN_INNER:
        every = tuple(_is_wide(var) for var in equation.outvars)
        return _INNER[_kind(equation)](equation, every, before).results
    if len(equation.outvars) > 1 or not _is_wide(equation.outvars[0]):
        return [NO_AXES] * len(equation.outvars)
    added = _added_rows(equation, definitions)
    if added is not None:
        return [_split(added.rows)]
    return [_linear(equation, before) or _summed(equation, before)]


def _linear(equation: JaxprEqn, before: Mapping[int, Axes]) -> Axes:
    """Returns the mesh axes over which the result of a linear operation can be unreduced."""
    name = equation.primitive.name
    if len(set(before.values())) != 1 or any(map(_has_own, equation.invars)):
        return NO_AXES
    (axes,) = set(before.values())
    if not axes.isdisjoint(_split(equation.outvars[0])):
        return NO_AXES
    if name in _MERGES and all(axes.isdisjoint(_split(var)) for var in equation.invars):
        return axes
    is_first = before.keys() == {0}
    if name == "reshard":
        source, (result,) = equation.invars[0], equation.outvars
        is_same = _mesh(source) == _mesh(result) and _entries(source) == _entries(result)
        return axes if is_same else NO_AXES
    if name == "pad" and not _is_zero(equation.invars[1]):
        return NO_AXES
    if name in _UNARY or (name == "reduce_sum" and not _reduced_axes(equation)):
        return axes if is_first else NO_AXES
    if name in _FACTORS and len(before) == 1 and (is_first or name == "mul"):
        other = equation.invars[1 - next(iter(before))]
        return axes if axes.isdisjoint(_split(other)) else NO_AXES
    return NO_AXES


def _summed(equation: JaxprEqn, before: Mapping[int, Axes]) -> Axes:
    """Returns the mesh axes over which an operation sums."""
    name, (out,) = equation.primitive.name, equation.outvars
    if name == "reshard":  # of an array that is unreduced in the function itself
        source, result = (_sharding(var) for var in (equation.invars[0], out))
        if source is None or result is None or _own(result):
            return NO_AXES
        is_sum = source.spec.partitions == result.spec.partitions
        return _own(source) if is_sum and not source.spec.reduced else NO_AXES
    if name not in _SUMS or before or any(map(_has_own, [*equation.invars, out])):
        return NO_AXES
    axes = _reduced_axes(equation)
    return axes if axes.isdisjoint(_split(out)) else NO_AXES


def _added_rows(equation: JaxprEqn, definitions: Mapping[Var, JaxprEqn]) -> AddedRows | None:
    """Returns the addition of rows that an equation passes on, if each device can add its rows.

    If rows of a table are read with `.at[...].get(out_sharding=...)`, JAX gathers their gradients
    on automatic axes, and adds them on all devices.
    """

    def definition(var: Var | Literal, name: str) -> JaxprEqn | None:
        producer = definitions.get(var) if isinstance(var, Var) else None
        return producer if producer is not None and producer.primitive.name == name else None

    scatter = definition(equation.invars[0], "scatter-add") if equation.invars else None
    if equation.primitive.name != "reshard" or scatter is None:
        return None
    zeros, gather = (
        definition(scatter.invars[n], name) for n, name in ((0, "broadcast_in_dim"), (2, "reshard"))
    )
    indices, numbers = scatter.invars[1], scatter.params["dimension_numbers"]
    if zeros is None or gather is None or not isinstance(indices, Var):
        return None
    rows, (table,) = _var(gather.invars[0]), equation.outvars
    arrays = (*scatter.invars, *scatter.outvars, table)
    is_local = (
        _is_zero(zeros.invars[0])
        and not any(_split(var) or _has_own(var) for var in arrays)
        and not (_has_own(rows) or _split(rows, numbers.update_window_dims))
        and _mesh(rows) == _mesh(table)
        and not numbers.operand_batching_dims
    )
    return AddedRows(scatter, indices, rows) if is_local and _split(rows) else None


def _is_zero(var: Var | Literal) -> bool:
    return isinstance(var, Literal) and not np.any(var.val)


def _reduced_axes(equation: JaxprEqn) -> Axes:
    """Returns the mesh axes that split the dimensions over which an operation sums."""
    if equation.primitive.name == "reduce_sum":
        return _split(equation.invars[0], equation.params["axes"])
    lhs, rhs = equation.params["dimension_numbers"][0]
    sides = list(zip(equation.invars, (lhs, rhs), strict=True))
    entries = [[_entries(var)[n] for n in dims] for var, dims in sides]
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


def _sharding(var: Var | Literal) -> NamedSharding | None:
    sharding = getattr(var.aval, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) and not sharding.mesh.empty else None


def _mesh(var: Var | Literal) -> object:
    sharding = _sharding(var)
    return None if sharding is None else sharding.mesh


def _entries(var: Var | Literal) -> tuple[Any, ...]:
    sharding = _sharding(var)
    ndim = len(getattr(var.aval, "shape", ()))
    entries = () if sharding is None else sharding.spec.partitions
    return (*entries, *(None,) * (ndim - len(entries)))


def _split(var: Var | Literal, dimensions: Iterable[int] | None = None) -> Axes:
    """Returns the mesh axes that split (some) dimensions of an array."""
    entries = _entries(var)
    chosen = entries if dimensions is None else [entries[n] for n in dimensions]
    names = (entry if isinstance(entry, tuple) else (entry,) for entry in chosen)
    return frozenset(name for group in names for name in group if name is not None)


def _own(sharding: NamedSharding) -> Axes:
    return frozenset(sharding.spec.unreduced)


def _own_axes(var: Var | Literal) -> Axes:
    sharding = _sharding(var)
    return NO_AXES if sharding is None else _own(sharding)


def _has_own(var: Var | Literal) -> bool:
    """Returns True for an array that is `unreduced` or `reduced` in the function itself."""
    sharding = _sharding(var)
    return sharding is not None and bool(sharding.spec.unreduced or sharding.spec.reduced)


def _with_axes(var: Var | Literal, axes: Axes) -> NamedSharding | None:
    """Returns the sharding of an array as a sum over mesh axes; None if there are no axes."""
    sharding = _sharding(var)
    if not axes or sharding is None:
        return None
    return NamedSharding(sharding.mesh, PartitionSpec(*_entries(var), unreduced=axes))


def summed(array: Array) -> Array:
    """Returns the sum of an unreduced array over devices, and any other array unchanged."""
    sharding = jax.typeof(array).sharding
    if not (isinstance(sharding, NamedSharding) and sharding.spec.unreduced):
        return array
    return jax.reshard(
        array, NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec.partitions))
    )


# ---------------------------------------------------------------------------
# Operations
# ---------------------------------------------------------------------------


def _run_linear(equation: JaxprEqn, operands: list[Array], axes: Axes) -> Any:
    """Runs an operation whose result is unreduced."""
    name, (out,) = equation.primitive.name, equation.outvars
    sharding = _with_axes(out, axes)
    assert sharding is not None
    if name == "reshard":
        return operands[0]
    if name in _SUMS:
        return bind(equation, operands, out_sharding=sharding)
    if name in _UNARY:
        is_placed = equation.params.get("sharding") is not None
        return bind(equation, operands, **({"sharding": sharding} if is_placed else {}))
    # Ordinary operands are a term of the sum, or factors of each of its terms.
    mark = {"unreduced": axes} if name in _MERGES else {"reduced": axes}

    def marked(array: Array, var: Var | Literal) -> Array:
        if isinstance(var, Var) and jax.typeof(array).sharding.spec.unreduced:
            return array
        aval: Any = var.aval
        spec = PartitionSpec(*_entries(var), **mark)
        return jax.reshard(jnp.asarray(array, aval.dtype), NamedSharding(sharding.mesh, spec))

    return bind(equation, list(map(marked, operands, equation.invars)))


def _add_rows(equation: JaxprEqn, operands: list[Array], added: AddedRows, axes: Axes) -> Array:
    """Adds the rows of each device to zeros; the result is unreduced."""
    (out,), params = equation.outvars, added.scatter.params
    aval: Any = out.aval
    sharding = _with_axes(out, axes)
    assert sharding is not None
    numbers, entries = params["dimension_numbers"], _entries(added.rows)
    of_rows = [e for n, e in enumerate(entries) if n not in numbers.update_window_dims]
    specs = PartitionSpec(*of_rows, None), PartitionSpec(*entries)
    indices, rows = operands
    indices = jax.reshard(indices, NamedSharding(sharding.mesh, specs[0]))

    def add(indices: Array, rows: Array) -> Array:
        zeros = lax.pcast(jnp.zeros(aval.shape, rows.dtype), tuple(axes), to="varying")
        options = {name: params[name] for name in OF_SCATTER}
        total = SCATTERS["scatter-add"](zeros, indices, rows, **options)
        return lax.pcast(total, tuple(axes), to="unreduced")

    return jax.shard_map(
        add, mesh=sharding.mesh, in_specs=specs, out_specs=sharding.spec, axis_names=set(axes)
    )(indices, rows)


# ---------------------------------------------------------------------------
# Operations that contain a jaxpr
# ---------------------------------------------------------------------------


def _kind(equation: JaxprEqn) -> str:
    name = equation.primitive.name
    return "call" if name in _CALLS else "remat" if name in _REMATS else name


def _delay_call(equation: JaxprEqn, asked: tuple[bool, ...], before: Mapping[int, Axes]) -> Delayed:
    return _delay(equation.params["jaxpr"], asked, before)


def _run_call(equation: JaxprEqn, operands: list[Array], inner: Delayed) -> list[Array]:
    call = lambda *args: inner.run(*args)
    call.__name__ = equation.params.get("name", "call")
    return jax.jit(call)(*operands)


def _delay_remat(
    equation: JaxprEqn, asked: tuple[bool, ...], before: Mapping[int, Axes]
) -> Delayed:
    return _delay(equation.params["jaxpr"], asked, {})


def _run_remat(equation: JaxprEqn, operands: list[Array], inner: Delayed) -> Any:
    closed = jax.make_jaxpr(inner.run)(*operands)
    return bind(equation, operands, jaxpr=jaxpr_like(closed, equation.params["jaxpr"]))


def _delay_scan(equation: JaxprEqn, asked: tuple[bool, ...], before: Mapping[int, Axes]) -> Delayed:
    """Chooses results of a scan. A carried sum is unreduced in all iterations or in none."""
    num_consts, num_carry = scan_counts(equation.params)
    carried = frozenset(range(num_carry))
    while True:
        flags = tuple(flag and (n in carried or n >= num_carry) for n, flag in enumerate(asked))
        first = _delay(equation.params["jaxpr"], flags, {})
        axes = {n: first.results[n] for n in carried if first.results[n]}
        plan = _delay(
            equation.params["jaxpr"],
            tuple(f and (n in axes or n >= num_carry) for n, f in enumerate(flags)),
            {num_consts + n: each for n, each in axes.items()},
        )
        entering = plan.operands[num_consts : num_consts + num_carry]
        equal = {n for n, each in axes.items() if entering[n] == plan.results[n] == each}
        if equal == axes.keys():
            return plan
        carried = frozenset(equal)


def _run_scan(equation: JaxprEqn, operands: list[Array], inner: Delayed) -> list[Array]:
    params = equation.params
    num_consts, num_carry = scan_counts(params)
    consts, rest = operands[:num_consts], operands[num_consts:]
    entering = zip(inner.jaxpr.invars[num_consts:], rest[:num_carry], strict=False)
    shardings = [(array, _with_axes(var, inner.of(var))) for var, array in entering]
    init = [array if at is None else jax.reshard(array, at) for array, at in shardings]

    def body(carry: list[Array], xs: list[Array]) -> tuple[list[Array], list[Array]]:
        results = inner.run(*consts, *carry, *xs)
        return results[:num_carry], results[num_carry:]

    carry, stacked = lax.scan(
        body,
        init,
        rest[num_carry:],
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
        _split_transpose=params.get("_split_transpose", False),
    )
    return [*carry, *stacked]


_INNER: dict[str, Callable[[JaxprEqn, tuple[bool, ...], Mapping[int, Axes]], Delayed]] = {
    "call": _delay_call,
    "remat": _delay_remat,
    "scan": _delay_scan,
}
_RUN_INNER: dict[str, Callable[[JaxprEqn, list[Array], Delayed], Any]] = {
    "call": _run_call,
    "remat": _run_remat,
    "scan": _run_scan,
}
