"""Runs a traced step again, and records which of its values are not finite.

The value of each variable has a *code*: -1 if all elements are zero, otherwise 0 for finite, 1 for
infinite, 2 for NaN elements. One program returns the codes of all variables: for each iteration of
a loop, and for each device of a `shard_map`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from jaxmp import _core, _programs
from jaxmp._core import _compat, is_float
from jaxmp._programs import PROGRAM, Atom, Frame, Interpreter, Start

ZERO, FINITE, INFINITE, NAN = -1, 0, 1, 2
# Iterations of a while loop that are recorded: the first ones and the last.
ITERATIONS = 256
_HOST = jax.memory.Space.Host
Key = tuple[tuple[int, int], ...]


@dataclasses.dataclass(eq=False)
class Region:
    """One jaxpr of the program.

    Attributes:
      key: for each enclosing equation, its index and the identity of the jaxpr inside of it.
      body: the jaxpr.
      outer: the region that contains it; None for the whole program.
      locations: location of each equation of the jaxpr.
    """

    key: Key
    body: Any
    outer: Region | None
    locations: list[_programs.Location]

    def __post_init__(self) -> None:
        self.index = _programs.Body(self.body)
        self.equations = list(_programs.equations(self.body, inside=False))
        arguments = (*self.body.constvars, *self.body.invars)
        variables = (*arguments, *(v for e in self.equations for v in e.outvars))
        self.slots = {var: n for n, var in enumerate(dict.fromkeys(variables))}
        self.selected: dict[tuple[int, int], int] = {}
        for n, equation in enumerate(self.equations):
            if equation.primitive.name == "select_n":
                for operand in range(1, len(equation.invars)):
                    self.selected[n, operand] = len(self.slots) + len(self.selected)

    @property
    def equation(self) -> Any:
        """The equation that runs the jaxpr; None for the whole program."""
        return None if self.outer is None else self.outer.equations[self.key[-1][0]]

    @property
    def phase(self) -> str:
        """The phase of the equation that runs the jaxpr."""
        return (
            _programs.FORWARD if self.outer is None else self.outer.locations[self.key[-1][0]].phase
        )

    @property
    def enclosing(self) -> tuple[Any, ...]:
        """The enclosing equations, innermost first."""
        return () if self.outer is None else (self.equation, *self.outer.enclosing)

    @functools.cached_property
    def inner(self) -> _programs.Inner | None:
        """The jaxpr with the variables of its equation; None for the whole program."""
        inside = () if self.outer is None else _programs.inners(self.equation)
        return next((inner for inner in inside if inner.jaxpr is self.body), None)

    @property
    def is_repeated(self) -> bool:
        """True if side results of the jaxpr have an axis, for iterations or devices."""
        return self.inner is not None and (self.inner.is_loop or self.is_on_devices)

    @property
    def is_on_devices(self) -> bool:
        """True for the jaxpr of a `shard_map`."""
        return self.inner is not None and self.inner.form is _programs.Form.SHARDS

    @property
    def chain(self) -> list[Region]:
        """The enclosing regions and this one, outermost first, without the whole program."""
        return [] if self.outer is None else [*self.outer.chain, self]

    def count(self) -> int:
        """Returns the length of the axis that the equation adds; 1 if it adds none."""
        length = 1 if self.inner is None else self.inner.length
        return ITERATIONS if length is None else length


class Recorder(Interpreter):
    """Interpreter that records the codes of all variables, by the key of their region.

    For a `select_n`, it also records the codes of those elements that are selected.

    Attributes:
      regions: the regions, known after the program was traced.
    """

    consequence = "a value that is not finite is followed to it, and not to the operations inside"
    has_side_results = True
    drops_derivatives = True
    stacked_iterations = ITERATIONS

    def __init__(self) -> None:
        super().__init__()
        self.regions: dict[Key, Region] = {}
        self.locations = _programs.Locations()

    def run(self, jaxpr: Any, args: Sequence[Any], start: Start = PROGRAM) -> list[Any]:
        if start.state is None:  # the test of a while loop
            return super().run(jaxpr, args, start)
        body, consts = _compat.jaxpr_body(jaxpr)
        region = self._region(body, *start.state)
        pairs = zip((*body.constvars, *body.invars), (*consts, *args), strict=True)
        codes = {region.slots[var]: code_of(value) for var, value in pairs}
        results = super().run(jaxpr, args, start._replace(state=(region, codes)))
        row = [*(codes[n] for n in range(len(codes))), jnp.int8(1)]
        self.side[region.key] = lax.concatenate(
            [lax.reshape(code, (1,)) for code in _programs.vary_as_here(row)], 0
        )
        return results

    def _region(self, body: Any, outer: Region | None, index: int) -> Region:
        key = () if outer is None else (*outer.key, (index, id(body)))
        if key not in self.regions:
            location = _programs.Location() if outer is None else outer.locations[index]
            inside = _programs.equations(body, inside=False)
            locations = [self.locations.of(inner, location) for inner in inside]
            self.regions[key] = Region(key, body, outer, locations)
        return self.regions[key]

    def equation(self, equation: JaxprEqn, operands: list[Any], frame: Frame) -> list[Any]:
        if frame.state is None:
            return self.enter(equation, operands, frame)
        region, codes = frame.state
        results = self.enter(equation, operands, frame, (region, frame.index))
        codes.update(
            (region.slots[v], code_of(x)) for v, x in zip(equation.outvars, results, strict=True)
        )
        if equation.primitive.name == "select_n":
            which = lax.convert_element_type(operands[0], jnp.int32)
            for n, case in enumerate(operands[1:]):
                chosen = lax.eq(which, lax.full_like(which, n))
                shape = np.shape(case)  # a literal of a scalar has no attribute `shape`
                chosen = chosen if chosen.shape == shape else lax.broadcast(chosen, shape)
                codes[region.selected[frame.index, n + 1]] = code_of(case, chosen)
        return results


class WideRecorder(Recorder):
    """Recorder of a run in which each value of 16 bits or in FP8 is FP32."""

    consequence = ""

    def constant(self, array: Any) -> Any:
        return _programs.wide(array)

    def bound(self, equation: JaxprEqn, operands: list[Any]) -> list[Any]:
        return _programs.bind_in_fp32(equation, operands)


def code_of(x: Any, chosen: _core.Array | None = None) -> _core.Array:
    """Returns the code of an array, or of those of its elements that are chosen."""
    x = on_device(x)
    dtype = getattr(x, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.inexact):
        return jnp.int8(FINITE)
    x = lax.abs(x) if jnp.issubdtype(dtype, jnp.complexfloating) else _programs.wide(x)
    to_int = lambda flags: lax.convert_element_type(flags, jnp.int8)
    is_zero = to_int(lax.eq(x, lax.full_like(x, 0)))
    codes = lax.add(to_int(lax.bitwise_not(lax.is_finite(x))), to_int(lax.ne(x, x)))
    codes = lax.sub(codes, is_zero)
    if chosen is not None:
        codes = lax.select(chosen, codes, lax.full_like(codes, ZERO))
    return lax.reduce_max(codes, axes=tuple(range(codes.ndim)))


def on_device(x: Any) -> Any:
    """Returns an array of the host on its device, and the array to which a reference refers now."""
    x = x[...] if isinstance(x, jax.Ref) else x
    is_on_host = isinstance(x, jax.Array) and jax.typeof(x).memory_space == _HOST
    return jax.device_put(x, jax.memory.Space.Device) if is_on_host else x


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
        """Returns the code of a variable at these iterations and devices, `FINITE` for zeros."""
        if _programs.is_literal(var):
            value = np.asarray(var.val)
            is_float = jnp.issubdtype(value.dtype, jnp.inexact)
            return max(int(code_of(jnp.asarray(value))), FINITE) if is_float else FINITE
        return max(int(self.arrays[region.key][at][region.slots[var]]), FINITE)

    def selected(self, region: Region, at: tuple[int, ...], index: int, operand: int) -> int:
        """Returns the code of those elements of an operand that a `select_n` selects."""
        return max(int(self.arrays[region.key][at][region.selected[index, operand]]), FINITE)

    def ran(self, region: Region, at: tuple[int, ...]) -> bool:
        """Returns True if a jaxpr ran at these iterations and devices."""
        return bool(self.arrays[region.key][at][-1])

    def positions(self, region: Region) -> Iterator[tuple[int, ...]]:
        """Yields the iterations and devices at which a jaxpr ran."""
        ran = self.arrays[region.key][..., -1]
        yield from (tuple(map(int, at)) for at in np.argwhere(ran))

    def equations(self) -> Iterator[tuple[Region, Any, _programs.Location]]:
        """Yields (region, equation, location) of each equation."""
        for region in self.regions.values():
            for equation, location in zip(region.equations, region.locations, strict=True):
                yield region, equation, location

    @property
    def has_gradient(self) -> bool:
        """True if the program differentiates a function."""
        return any(location.differentiated for *_, location in self.equations())

    def are_gradients_zero(self) -> bool:
        """Returns True if the program has gradients, and all of their elements are zero."""
        codes: set[int] = set()
        for region in self.regions.values():
            phases = [location.phase for location in region.locations]
            variables = _programs.gradients_of(region.body, phases, region.phase)
            slots = [region.slots[var] for var in variables if is_float(var.aval)]
            rows = self.arrays[region.key]
            codes |= set(np.unique(rows[rows[..., -1] == 1][..., slots]))
        return codes == {ZERO}

    def inside(self, region: Region, index: int) -> list[Region]:
        """Returns the regions that an equation runs, except the condition of a while loop."""
        count = len(region.key)
        keys = (k for k in self.regions if len(k) == count + 1 and k[:count] == region.key)
        return [self.regions[key] for key in keys if key[-1][0] == index]


class Program:
    """Compiled program that runs a jaxpr with a recorder."""

    def __init__(self, recorder: Recorder, closed: Any, keys: Collection[Any] = ()) -> None:
        def run(arrays: list[Any]) -> dict[Any, Any]:
            recorder.side.clear()
            recorder.run(closed, list(map(recorder.constant, arrays)), Start(state=(None, 0)))
            return {key: recorder.side[key] for key in keys or recorder.side}

        self.recorder = recorder
        # XLA must not leave out roundings.
        self.side = jax.jit(run, compiler_options={"xla_allow_excess_precision": False})

    def __call__(self, arrays: list[Any]) -> Recorded:
        return Recorded(self.recorder.regions, jax.device_get(self.side(arrays)))
