"""Runs a traced step again, and records which of its values are not finite.

The value of each variable has a *code*: -1 if all elements are zero, otherwise 0 for finite, 1 for
infinite, 2 for NaN elements. One program returns the codes of all variables: for each iteration of
a loop, and for each device of a `shard_map`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from jaxmp import _core, _programs
from jaxmp._core import _compat
from jaxmp._programs import PROGRAM, Frame, Interpreter, Start
from jaxmp._tools.audit import _checks

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
      recorder: the recorder of the program.

    `slots` are the positions of the codes that are recorded: of variables, and of those elements
    of an operand of a `select_n` that are selected, by the index of the equation and the operand.
    """

    key: Key
    body: Any
    outer: Region | None
    recorder: Recorder

    def __post_init__(self) -> None:
        self.index = _programs.Body(self.body)
        # The operation that runs the jaxpr; None for the whole program.
        self.construct = None if self.outer is None else self.outer.operations[self.key[-1][0]]
        outer = _programs.Location() if self.construct is None else self.construct.location
        self.operations = [
            _checks.OpOccurrence(
                equation=each,
                location=self.recorder.locations.of(each, outer),
                times=1,
                body=self.index,
                findings=self.recorder.findings,
                outer=self.construct,
            )
            for each in _programs.equations(self.body, inside=False)
        ]
        recorded: list[Any] = [*self.body.constvars, *self.body.invars]
        for n, op in enumerate(self.operations):
            recorded += op.equation.outvars
            if op.name == "select_n":
                recorded += ((n, operand) for operand in range(1, len(op.operands)))
        self.slots = {each: n for n, each in enumerate(dict.fromkeys(recorded))}

    @functools.cached_property
    def inner(self) -> _programs.Inner | None:
        """The jaxpr with the variables of its equation; None for the whole program."""
        inside = () if self.construct is None else _programs.inners(self.construct.equation)
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
      locations: the locations of its equations.
      findings: the edits of fixes.
    """

    consequence = "a value that is not finite is followed to it, and not to the operations inside"
    has_side_results = True
    drops_derivatives = True
    stacked_iterations = ITERATIONS

    def __init__(self) -> None:
        super().__init__()
        self.regions: dict[Key, Region] = {}
        self.locations = _programs.Locations()
        self.findings = _checks.PendingFindings(None)

    def run(self, jaxpr: Any, args: Sequence[Any], start: Start = PROGRAM) -> list[Any]:
        if start.state is None:  # the test of a while loop
            return super().run(jaxpr, args, start)
        body, consts = _compat.jaxpr_body(jaxpr)
        outer, index = start.state
        key = () if outer is None else (*outer.key, (index, id(body)))
        if key not in self.regions:
            self.regions[key] = Region(key, body, outer, self)
        region = self.regions[key]
        pairs = zip((*body.constvars, *body.invars), (*consts, *args), strict=True)
        codes = {var: code_of(value) for var, value in pairs}
        results = super().run(jaxpr, args, start._replace(state=(region, codes)))
        row = [*map(codes.__getitem__, region.slots), jnp.int8(1)]
        self.side[region.key] = lax.concatenate(
            [lax.reshape(code, (1,)) for code in _programs.vary_as_here(row)], 0
        )
        return results

    def equation(self, equation: JaxprEqn, operands: list[Any], frame: Frame) -> list[Any]:
        if frame.state is None:
            return self.enter(equation, operands, frame)
        region, codes = frame.state
        results = self.enter(equation, operands, frame, (region, frame.index))
        codes.update(zip(equation.outvars, map(code_of, results), strict=True))
        if equation.primitive.name == "select_n":
            which = lax.convert_element_type(operands[0], jnp.int32)
            for n, case in enumerate(operands[1:]):
                chosen = lax.eq(which, lax.full_like(which, n))
                shape = np.shape(case)  # a literal of a scalar has no attribute `shape`
                chosen = chosen if chosen.shape == shape else lax.broadcast(chosen, shape)
                codes[frame.index, n + 1] = code_of(case, chosen)
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


def compiled(recorder: Recorder, closed: Any, keys: Collection[Any] = ()) -> Any:
    """Returns a compiled function of the arguments of a program that runs it with a recorder.

    Args:
      recorder: the recorder.
      closed: the program.
      keys: keys of the side results to return; () for all.
    """

    def run(arrays: list[Any]) -> dict[Any, Any]:
        recorder.side.clear()
        recorder.run(closed, list(map(recorder.constant, arrays)), Start(state=(None, 0)))
        return {key: recorder.side[key] for key in keys or recorder.side}

    # XLA must not leave out roundings.
    return jax.jit(run, compiler_options={"xla_allow_excess_precision": False})
