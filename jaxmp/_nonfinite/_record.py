"""Runs a traced step again, and records which of its values are not finite.

The value of each variable has a *code*: 0 for finite, 1 for infinite, 2 for NaN elements. One
program returns the codes of all variables: for each iteration of a loop, and for each device of a
`shard_map`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from jaxmp._core._compat import jaxpr_body
from jaxmp._core._dtypes import FLOAT32, FLOATS_16BIT
from jaxmp._core._jaxprs import Atom, array_aval, is_literal, sub_jaxprs
from jaxmp._core._locations import Location, Locations
from jaxmp._core._programs._bind import SCATTERS, bind
from jaxmp._core._programs._constructs import CONSTRUCTS, scan_of, shard_map_of
from jaxmp._core._programs._interpreter import Frame, Interpreter, Place, vary_as_here
from jaxmp._core._typing import Array

FINITE, INFINITE, NAN = 0, 1, 2
# Iterations of a while loop that are recorded: the first ones and the last.
ITERATIONS = 256
# Equations with a leading axis in their side results.
REPEATED = frozenset({"scan", "while", "shard_map"})

Key = tuple[tuple[int, int], ...]


@dataclasses.dataclass(eq=False)
class Region:
    """One jaxpr of the program.

    Attributes:
      key: for each enclosing equation, its index and the identity of the jaxpr inside of it.
      body: the jaxpr.
      outer: the region that contains it; None for the whole program.
      equation: the equation that runs it; None for the whole program.
      location: the location of that equation.
      enclosing: the enclosing equations, innermost first.
      locations: location of each equation of the jaxpr.
    """

    key: Key
    body: Any
    outer: Region | None
    equation: Any
    location: Location
    enclosing: tuple[Any, ...]
    locations: list[Location]

    def __post_init__(self) -> None:
        names = (v for v in (*self.body.constvars, *self.body.invars))
        variables = [*names, *(v for e in self.body.eqns for v in e.outvars)]
        self.slots = {var: n for n, var in enumerate(dict.fromkeys(variables))}
        self.read = {v for e in self.body.eqns for v in e.invars if not is_literal(v)}
        self.read |= {v for v in self.body.outvars if not is_literal(v)}
        self.makers = {v: n for n, e in enumerate(self.body.eqns) for v in e.outvars}
        self.selected: dict[tuple[int, int], int] = {}
        for n, equation in enumerate(self.body.eqns):
            if equation.primitive.name == "select_n":
                for operand in range(1, len(equation.invars)):
                    self.selected[n, operand] = len(self.slots) + len(self.selected)

    @property
    def kind(self) -> str:
        """Name of the equation that runs the jaxpr; "" for the whole program."""
        return "" if self.equation is None else self.equation.primitive.name

    @property
    def chain(self) -> list[Region]:
        """The enclosing regions and this one, outermost first, without the whole program."""
        return [] if self.outer is None else [*self.outer.chain, self]

    def count(self) -> int:
        """Returns the length of the axis that the equation adds; 1 if it adds none."""
        if self.kind == "scan":
            return scan_of(self.equation).options["length"]
        if self.kind == "shard_map":
            return shard_map_of(self.equation).devices
        return ITERATIONS if self.kind == "while" else 1


class _Run(NamedTuple):
    region: Region
    codes: dict[int, Array]


class Recorder(Interpreter):
    """Interpreter that knows the region of each equation.

    `regions` are known after the program was traced. A subclass overrides `record`.
    """

    has_side_results = True
    drops_derivatives = True
    stacked_iterations = ITERATIONS

    def __init__(self) -> None:
        super().__init__()
        self.regions: dict[Key, Region] = {}
        self.locations = Locations()

    def run(
        self, jaxpr: Any, args: Sequence[Any], place: Place | None = None, state: Any = None
    ) -> list[Any]:
        if state is None:  # the test of a while loop
            return super().run(jaxpr, args, place, None)
        body, consts = jaxpr_body(jaxpr)
        run = _Run(self._region(body, *state), {})
        pairs = zip((*body.constvars, *body.invars), (*consts, *args), strict=True)
        run.codes.update((run.region.slots[var], code_of(value)) for var, value in pairs)
        results = super().run(jaxpr, args, place, run)
        self.recorded(run)
        return results

    def _region(self, body: Any, outer: Region | None, index: int) -> Region:
        key = () if outer is None else (*outer.key, (index, id(body)))
        if key not in self.regions:
            equation, location, enclosing = None, Location(), ()
            if outer is not None:
                equation, location = outer.body.eqns[index], outer.locations[index]
                enclosing = (equation, *outer.enclosing)
            locations = [self.locations.of(inner, location) for inner in body.eqns]
            self.regions[key] = Region(key, body, outer, equation, location, enclosing, locations)
        return self.regions[key]

    def equation(self, equation: JaxprEqn, operands: list[Any], frame: Frame) -> list[Any]:
        run: _Run | None = frame.state
        if run is None:
            return self.enter(equation, operands, frame)
        results = self.compute(equation, operands, frame, (run.region, frame.index))
        self.record(run, frame.index, operands, results)
        return results

    def compute(
        self, equation: JaxprEqn, operands: list[Any], frame: Frame, state: Any
    ) -> list[Any]:
        """Runs one equation."""
        return self.enter(equation, operands, frame, state)

    def record(self, run: _Run, index: int, operands: list[Any], results: list[Any]) -> None:
        """Records values of an equation."""

    def recorded(self, run: _Run) -> None:
        """Adds what was recorded in one run of a jaxpr to the side results."""


class Codes(Recorder):
    """Recorder of the codes of all variables, and of the operands that a `select_n` selects."""

    def record(self, run: _Run, index: int, operands: list[Any], results: list[Any]) -> None:
        region = run.region
        equation = region.body.eqns[index]
        for var, result in zip(equation.outvars, results, strict=True):
            run.codes[region.slots[var]] = code_of(result)
        if equation.primitive.name == "select_n":
            which, *cases = operands
            for n, case in enumerate(cases):
                number = lax.convert_element_type(which, jnp.int32)
                chosen = lax.eq(number, lax.full_like(number, n))
                chosen = chosen if chosen.shape == case.shape else lax.broadcast(chosen, case.shape)
                run.codes[region.selected[index, n + 1]] = code_of(case, chosen)

    def recorded(self, run: _Run) -> None:
        codes = [run.codes[n] for n in range(len(run.codes))]
        codes = [lax.reshape(x, (1,)) for x in vary_as_here([*codes, jnp.int8(1)])]
        self.side[run.region.key] = lax.concatenate(codes, 0)


class WideCodes(Codes):
    """Recorder of codes in a run in which each value of 16 bits or in FP8 is FP32."""

    def constant(self, array: Any) -> Any:
        return wide(array)

    def compute(
        self, equation: JaxprEqn, operands: list[Any], frame: Frame, state: Any
    ) -> list[Any]:
        if equation.primitive.name in CONSTRUCTS:
            return self.enter(equation, operands, frame, state)
        return computed_in_fp32(equation, operands)

    def bound(self, equation: JaxprEqn, operands: list[Any]) -> list[Any]:
        return [wide(x) for x in super().bound(equation, _recorded_dtypes(equation, operands))]


def computed_in_fp32(equation: JaxprEqn, operands: list[Any]) -> list[Any]:
    """Returns the results of an equation for FP32 operands.

    Kernels and operations on the bits of an array are run in their recorded dtypes.
    """
    name, params = equation.primitive.name, equation.params
    has_function = bool(sub_jaxprs(equation)) and name not in SCATTERS
    if has_function or name in ("bitcast_convert_type", "nextafter", "reduce_precision"):
        out = bind(equation, _recorded_dtypes(equation, operands))
    else:
        dtypes = {key: x for key, x in params.items() if isinstance(x, np.dtype)}
        changes: dict[str, Any] = {key: FLOAT32 for key, x in dtypes.items() if is_narrow(x)}
        if "precision" in params and any(is_narrow(_dtype(v)) for v in equation.invars):
            changes["precision"] = (lax.Precision.HIGHEST,) * 2
        out = bind(equation, [wide(x) for x in operands], **changes)
    return [wide(x) for x in (out if equation.primitive.multiple_results else [out])]


def _recorded_dtypes(equation: JaxprEqn, operands: list[Any]) -> list[Any]:
    pairs = zip(operands, equation.invars, strict=True)
    return [
        lax.convert_element_type(x, array_aval(v).dtype) if is_narrow(_dtype(v)) else x
        for x, v in pairs
    ]


def _dtype(var: Atom) -> Any:
    return getattr(var.aval, "dtype", None)


def is_narrow(dtype: Any) -> bool:
    """Returns True for floating-point formats of at most 16 bits."""
    is_float = isinstance(dtype, np.dtype) and jnp.issubdtype(dtype, jnp.floating)
    return is_float and (dtype in FLOATS_16BIT or dtype.itemsize == 1)


def wide(x: Any) -> Any:
    """Returns an array of a narrow format as FP32; other arrays unchanged."""
    is_wide = not is_narrow(getattr(x, "dtype", None))
    return x if is_wide else lax.convert_element_type(x, FLOAT32)


def code_of(x: Any, chosen: Array | None = None) -> Array:
    """Returns the code of an array, or of those of its elements that are chosen."""
    dtype = getattr(x, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.inexact):
        return jnp.int8(FINITE)
    x = lax.abs(x) if jnp.issubdtype(dtype, jnp.complexfloating) else wide(x)
    to_int = lambda flags: lax.convert_element_type(flags, jnp.int8)
    codes = lax.add(to_int(lax.bitwise_not(lax.is_finite(x))), to_int(lax.ne(x, x)))
    if chosen is not None:
        codes = lax.select(chosen, codes, lax.full_like(codes, FINITE))
    return lax.reduce_max(codes, axes=tuple(range(codes.ndim)))


@dataclasses.dataclass(frozen=True)
class Recorded:
    """Codes of one run.

    Attributes:
      regions: the regions of the program.
      arrays: key of a region -> codes, with an axis for each enclosing loop and `shard_map`.
    """

    regions: dict[Key, Region]
    arrays: dict[Key, np.ndarray]

    @property
    def root(self) -> Region:
        """The whole program."""
        return self.regions[()]

    def code(self, region: Region, at: tuple[int, ...], var: Atom) -> int:
        """Returns the code of a variable at these iterations and devices."""
        if is_literal(var):
            value = np.asarray(var.val)
            is_float = jnp.issubdtype(value.dtype, jnp.inexact)
            return int(code_of(jnp.asarray(value))) if is_float else FINITE
        return int(self.arrays[region.key][at][region.slots[var]])

    def selected(self, region: Region, at: tuple[int, ...], index: int, operand: int) -> int:
        """Returns the code of those elements of an operand that a `select_n` selects."""
        return int(self.arrays[region.key][at][region.selected[index, operand]])

    def ran(self, region: Region, at: tuple[int, ...]) -> bool:
        """Returns True if a jaxpr ran at these iterations and devices."""
        return bool(self.arrays[region.key][at][-1])

    def positions(self, region: Region) -> Iterator[tuple[int, ...]]:
        """Yields the iterations and devices at which a jaxpr ran."""
        ran = self.arrays[region.key][..., -1]
        yield from (tuple(map(int, at)) for at in np.argwhere(ran))

    def equations(self) -> Iterator[tuple[Region, Any, Location]]:
        """Yields (region, equation, location) of each equation."""
        for region in self.regions.values():
            for equation, location in zip(region.body.eqns, region.locations, strict=True):
                yield region, equation, location

    def inside(self, region: Region, index: int) -> list[Region]:
        """Returns the regions that an equation runs, but for the test of a while loop."""
        count = len(region.key)
        keys = (k for k in self.regions if len(k) == count + 1 and k[:count] == region.key)
        return [self.regions[key] for key in keys if key[-1][0] == index]


class Program:
    """Compiled program of the codes of a jaxpr's variables; returns `Recorded`."""

    def __init__(self, recorder: Codes, closed: Any) -> None:
        self.recorder, self.closed = recorder, closed
        self._codes = compiled(self._run)

    def _run(self, arrays: list[Any]) -> dict[Key, Array]:
        recorder = self.recorder
        recorder.side = {}
        recorder.run(self.closed, list(map(recorder.constant, arrays)), state=(None, 0))
        return recorder.side

    def __call__(self, arrays: list[Any]) -> Recorded:
        return Recorded(self.recorder.regions, jax.device_get(self._codes(arrays)))


def compiled(function: Any) -> Any:
    """Returns a jitted function that rounds as it is written."""
    return jax.jit(function, compiler_options={"xla_allow_excess_precision": False})
