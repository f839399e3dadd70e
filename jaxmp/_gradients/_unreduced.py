"""Runs traced functions that leave some of their results unreduced over explicit mesh axes.

On explicit mesh axes, JAX has a type for the terms of a sum over devices: an array that is
`unreduced` over mesh axes is the sum of one part per device. `_delayed_sums.py` chooses the arrays
of a function that are unreduced.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jax.sharding import NamedSharding, PartitionSpec

from jaxmp._core._compat import jaxpr_like
from jaxmp._core._programs._bind import SCATTERS, bind, scatter_of
from jaxmp._core._programs._constructs import CALLS, REMATS, call_of, scan_of
from jaxmp._core._programs._interpreter import Frame, Interpreter
from jaxmp._core._programs._operations import sharding_of_result
from jaxmp._core._typing import Array

# Mesh axes over which an array is unreduced; empty: it is an ordinary array.
Axes: TypeAlias = frozenset[Any]

# Linear operations of one array.
UNARY = frozenset(
    {"broadcast_in_dim", "convert_element_type", "copy", "expand_dims", "neg", "pad", "reshape"}
    | {"slice", "squeeze", "transpose"}
)
# Linear operations of several arrays, of which some may be ordinary.
MERGES = frozenset({"add", "add_any", "concatenate", "sub"})
FACTORS = frozenset({"div", "mul"})
SUMS = frozenset({"dot_general", "reduce_sum"})
NO_AXES: Axes = frozenset()


class AddedRows(NamedTuple):
    """Addition of rows to a table of zeros: the gradient of a table from which rows were read."""

    scatter: JaxprEqn
    indices: Var
    # The rows before they were gathered.
    rows: Var


@dataclasses.dataclass(frozen=True)
class Delayed:
    """Traced function that leaves some of its results unreduced.

    Attributes:
      jaxpr: the jaxpr.
      consts: its constants.
      axes: for each unreduced variable, its mesh axes.
      inner: index of an equation that contains a jaxpr -> the function that replaces that jaxpr.
      rows: index of an equation whose result is a table to which rows were added -> the addition.
      jitted: name -> the function as a jitted one, so that its calls share one jaxpr.
    """

    jaxpr: Jaxpr
    consts: tuple[Any, ...]
    axes: Mapping[Var, Axes]
    inner: Mapping[int, Delayed]
    rows: Mapping[int, AddedRows]
    jitted: dict[str, Callable[..., list[Array]]] = dataclasses.field(default_factory=dict)

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
        return [_with_axes(var, axes or unreduced_axes_of(var)) for var, axes in pairs]

    @property
    def operands(self) -> list[Axes]:
        """For each argument, the mesh axes over which it must be unreduced."""
        return [self.of(var) for var in self.jaxpr.invars]

    def of(self, var: Var | Literal) -> Axes:
        """Returns the mesh axes over which a variable is unreduced."""
        return NO_AXES if isinstance(var, Literal) else self.axes.get(var, NO_AXES)

    def run(self, *args: Array) -> list[Array]:
        """Runs the function."""
        return _Unreduced().run(ClosedJaxpr(self.jaxpr, self.consts), args, state=self)


class _Unreduced(Interpreter):
    """Interpreter of `Delayed` functions, which are the state of their jaxprs."""

    def equation(self, equation: JaxprEqn, operands: list[Any], frame: Frame) -> list[Any]:
        delayed, index = frame.state, frame.index
        if index in delayed.inner:
            return RUN_INNER[kind_of(equation)](equation, operands, delayed.inner[index])
        axes = delayed.of(equation.outvars[0]) if equation.outvars else NO_AXES
        added = delayed.rows.get(index)
        if added is not None:
            rows = [frame.values[added.indices], frame.values[added.rows]]
            return [_add_rows(equation, rows, added, axes)]
        return [_run_linear(equation, operands, axes)] if axes else self.bound(equation, operands)


# ---------------------------------------------------------------------------
# Shardings
# ---------------------------------------------------------------------------


def sharding_of(var: Var | Literal) -> NamedSharding | None:
    sharding = getattr(var.aval, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) and not sharding.mesh.empty else None


def entries_of(var: Var | Literal) -> tuple[Any, ...]:
    sharding = sharding_of(var)
    ndim = len(getattr(var.aval, "shape", ()))
    entries = () if sharding is None else sharding.spec.partitions
    return (*entries, *(None,) * (ndim - len(entries)))


def unreduced_axes(sharding: NamedSharding) -> Axes:
    return frozenset(sharding.spec.unreduced)


def unreduced_axes_of(var: Var | Literal) -> Axes:
    sharding = sharding_of(var)
    return NO_AXES if sharding is None else unreduced_axes(sharding)


def _with_axes(var: Var | Literal, axes: Axes) -> NamedSharding | None:
    """Returns the sharding of an array as a sum over mesh axes; None if there are no axes."""
    sharding = sharding_of(var)
    if not axes or sharding is None:
        return None
    return NamedSharding(sharding.mesh, PartitionSpec(*entries_of(var), unreduced=axes))


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
    if name in SUMS:
        return bind(equation, operands, out_sharding=sharding)
    if name in UNARY:
        is_placed = sharding_of_result(equation) is not None
        return bind(equation, operands, **({"sharding": sharding} if is_placed else {}))
    # Ordinary operands are a term of the sum, or factors of each of its terms.
    mark = {"unreduced": axes} if name in MERGES else {"reduced": axes}

    def marked(array: Array, var: Var | Literal) -> Array:
        if isinstance(var, Var) and jax.typeof(array).sharding.spec.unreduced:
            return array
        aval: Any = var.aval
        spec = PartitionSpec(*entries_of(var), **mark)
        return jax.reshard(jnp.asarray(array, aval.dtype), NamedSharding(sharding.mesh, spec))

    return bind(equation, list(map(marked, operands, equation.invars)))


def _add_rows(equation: JaxprEqn, operands: list[Array], added: AddedRows, axes: Axes) -> Array:
    """Adds the rows of each device to zeros; the result is unreduced."""
    (out,), options = equation.outvars, scatter_of(added.scatter)
    aval: Any = out.aval
    sharding = _with_axes(out, axes)
    assert sharding is not None
    numbers, entries = options["dimension_numbers"], entries_of(added.rows)
    of_rows = [e for n, e in enumerate(entries) if n not in numbers.update_window_dims]
    specs = PartitionSpec(*of_rows, None), PartitionSpec(*entries)
    indices, rows = operands
    indices = jax.reshard(indices, NamedSharding(sharding.mesh, specs[0]))

    def add(indices: Array, rows: Array) -> Array:
        zeros = lax.pcast(jnp.zeros(aval.shape, rows.dtype), tuple(axes), to="varying")
        total = SCATTERS["scatter-add"](zeros, indices, rows, **options)
        return lax.pcast(total, tuple(axes), to="unreduced")

    return jax.shard_map(
        add, mesh=sharding.mesh, in_specs=specs, out_specs=sharding.spec, axis_names=set(axes)
    )(indices, rows)


# ---------------------------------------------------------------------------
# Operations that contain a jaxpr
# ---------------------------------------------------------------------------


def kind_of(equation: JaxprEqn) -> str:
    name = equation.primitive.name
    return "call" if name in CALLS else "remat" if name in REMATS else name


def _run_call(equation: JaxprEqn, operands: list[Array], inner: Delayed) -> list[Array]:
    call = lambda *args: inner.run(*args)
    call.__name__ = call_of(equation).name or "call"
    return inner.jitted.setdefault(call.__name__, jax.jit(call))(*operands)


def _run_remat(equation: JaxprEqn, operands: list[Array], inner: Delayed) -> Any:
    closed = jax.make_jaxpr(inner.run)(*operands)
    call = call_of(equation)
    return bind(equation, operands, **{call.parameter: jaxpr_like(closed, call.jaxpr)})


def _run_scan(equation: JaxprEqn, operands: list[Array], inner: Delayed) -> list[Array]:
    loop = scan_of(equation)
    consts, carry, rows = loop.split(operands)
    _, carried, _ = loop.split(inner.jaxpr.invars)
    entering = zip(carried, carry, strict=True)
    shardings = [(array, _with_axes(var, inner.of(var))) for var, array in entering]
    init = [array if at is None else jax.reshard(array, at) for array, at in shardings]

    def body(carry: list[Array], xs: list[Array]) -> tuple[list[Array], list[Array]]:
        results = inner.run(*consts, *carry, *xs)
        return results[: loop.carry], results[loop.carry :]

    carry, stacked = lax.scan(body, init, rows, **loop.options)
    return [*carry, *stacked]


RUN_INNER: dict[str, Callable[[JaxprEqn, list[Array], Delayed], Any]] = {
    "call": _run_call,
    "remat": _run_remat,
    "scan": _run_scan,
}
