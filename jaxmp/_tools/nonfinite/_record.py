"""Runs a traced step again, and records which of its values are not finite.

The value of each variable has a *code*: -1 if all elements are zero, otherwise 0 for finite, 1 for
infinite, 2 for NaN elements. Each equation runs alone, as JAX runs operations outside of `jax.jit`,
so that equal operations of all layers and runs are compiled once. Only a `shard_map`, while loops
and long scans are compiled as a whole: their programs return codes for each iteration and device.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Sequence
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
# Iterations of a scan, and of the scans around it, whose equations run one by one. Each takes about
# 0.1 ms, and its program in a loop about 10 ms to compile.
MOST_ITERATIONS = 64
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
        # Number of iterations of the scans around the jaxpr; 0 for a jaxpr that is compiled.
        self.times = 1 if self.outer is None else self.outer.times
        if self.inner is not None and self.is_repeated:
            self.times = iterations_of(self.inner, self.times)
        # Identity of an equation -> the variables that no later one reads, and that are no results.
        self.last_reads = collections.defaultdict[int, list[Any]](list)
        for var, readers in self.index.consumers.items():
            self.last_reads[id(readers[-1])].append(var)

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
        # (key of a region, number of a loop or `shard_map` in it) -> its compiled program.
        self._compiled: dict[tuple[Key, int], Callable[..., Any]] = {}

    def record(self, closed: Any, arrays: list[Any]) -> dict[Any, Any]:
        """Runs a program, and returns the codes by the key of their region.

        Args:
          closed: the program.
          arrays: its arguments.
        """
        run = lambda: self.run(closed, list(map(self.constant, arrays)), Start(state=(None, 0)))
        # A trial of a fix traces functions again, and uses the programs that operations have.
        with (
            _compat.context(version=0),
            jax.debug_nans(False),
            jax.debug_infs(False),
            jax.transfer_guard("allow"),
        ):
            return self._inside(run)[1]

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
        if region.times:
            self.side[region.key] = np.array(jax.device_get(row))
        else:
            rows = [lax.reshape(code, (1,)) for code in _programs.vary_as_here(row)]
            self.side[region.key] = lax.concatenate(rows, 0)
        return results

    def equation(self, equation: JaxprEqn, operands: list[Any], frame: Frame) -> list[Any]:
        if frame.state is None:
            return self.enter(equation, operands, frame)
        region, codes = frame.state
        results = self._entered(equation, operands, frame, region)
        codes.update(zip(equation.outvars, map(code_of, results), strict=True))
        if equation.primitive.name == "select_n":
            which = lax.convert_element_type(operands[0], jnp.int32)
            for n, case in enumerate(operands[1:]):
                chosen = lax.eq(which, lax.full_like(which, n))
                shape = np.shape(case)  # a literal of a scalar has no attribute `shape`
                chosen = chosen if chosen.shape == shape else lax.broadcast(chosen, shape)
                codes[frame.index, n + 1] = code_of(case, chosen)
        for var in region.last_reads[id(equation)] if region.times else ():
            del frame.values[var]
        return results

    def _entered(
        self, equation: JaxprEqn, operands: list[Any], frame: Frame, region: Region
    ) -> list[Any]:
        """Runs an equation; a construct alone, and not as a part of a program."""
        state, form = (region, frame.index), _programs.form_of(equation)
        start = Start(frame.place.of(equation), state)
        if form is None or not region.times:
            return self.enter(equation, operands, frame, state)
        if form is _programs.Form.BRANCH:
            branches = _programs.cond_of(equation).branches
            return self.run(branches[int(operands[0])], operands[1:], start)
        if form in (_programs.Form.CALL, _programs.Form.REMAT, _programs.Form.DERIVATIVE):
            return self._call(equation, operands, start)
        inner = _programs.inners(equation)[-1]
        if iterations_of(inner, region.times):
            return self._iterated(inner, operands, start)
        inside = Frame(frame.place, None, {}, frame.index)
        run = lambda xs: self._inside(lambda: self.enter(equation, xs, inside, state))
        # XLA must not leave out roundings.
        program = jax.jit(run, compiler_options={"xla_allow_excess_precision": False})
        program = self._compiled.setdefault((region.key, frame.index), program)
        results, side = program(operands)
        self._add(side)
        return results

    def _iterated(self, loop: _programs.Inner, operands: list[Any], start: Start) -> list[Any]:
        """Runs the iterations of a scan one after the other."""
        consts, carry, arrays = loop.split(operands)
        count = len(carry)
        columns: list[list[Any]] = [[None] * loop.times for _ in loop.results[count:]]
        sides: list[dict[Any, Any]] = [{}] * loop.times
        for n in range(loop.times)[:: loop.step]:
            rows = [lax.dynamic_index_in_dim(x, n, 0, keepdims=False) for x in arrays]
            args = [*consts, *carry, *rows]
            run = lambda args=args: self.run(loop.recorded, args, start)
            results, sides[n] = self._inside(run)
            carry = results[:count]
            for column, row in zip(columns, results[count:], strict=True):
                column[n] = lax.expand_dims(row, (0,))
        # A branch that was not taken in an iteration has no codes there.
        for key, row in {key: row for side in sides for key, row in side.items()}.items():
            zeros = jax.tree.map(np.zeros_like, row)
            codes = [side.get(key, zeros) for side in sides]
            self.side[key] = jax.tree.map(lambda *rows: np.stack(jax.device_get(rows)), *codes)
        # Each column is deleted before the next one is joined.
        return [*carry, *(lax.concatenate(columns.pop(0), 0) for _ in range(len(columns)))]


def iterations_of(inner: _programs.Inner, times: int) -> int:
    """Returns the number of iterations of a loop, if they run one by one; 0 otherwise.

    Args:
      inner: a jaxpr of a loop or `shard_map`.
      times: the number of iterations of the jaxpr that contains it.
    """
    times *= inner.times if inner.form is _programs.Form.SCAN else 0
    return times if times <= MOST_ITERATIONS else 0


class WideRecorder(Recorder):
    """Recorder of a run in which each value of 16 bits or in FP8 is FP32."""

    consequence = ""

    def constant(self, array: Any) -> Any:
        return _programs.wide(array)

    def bound(self, equation: JaxprEqn, operands: list[Any]) -> list[Any]:
        return _programs.bind_in_fp32(equation, operands)


def code_of(x: Any, chosen: _core.Array | None = None) -> _core.Array:
    """Returns the code of an array, or of those of its elements that are chosen."""
    with _core.in_mesh_of_type(x):
        return _code_of(x, chosen)


@jax.jit
def _code_of(x: Any, chosen: _core.Array | None) -> _core.Array:
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
