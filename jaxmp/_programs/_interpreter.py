"""Interpreter that runs a jaxpr again, equation by equation.

`Interpreter` itself changes nothing: it computes the same values and gradients with the same
operations. A client overrides some of these methods:

* `constant` and `array` convert between arrays and the *values* to which a run binds variables,
  which are arrays by default, and any pytree otherwise;
* `equation` runs one equation; by default it enters a construct by a rule of this module, and binds
  all other equations as they were recorded;
* `entered` and `left` convert values at the border of a construct.

Each run of a jaxpr has a `Frame`: its location in the program, and a state of the client, such as
a plan or an analysis of that jaxpr.

*Side results* are arrays that a client computes beside the program, such as statistics. It adds
them to `side`; the rules return them from loops, branches and devices. Arrays of a scan and of a
`shard_map` are stacked and then `joined`; of a while loop, those of the last iteration count, or
the client asks for `stacked_iterations`; those of a branch or loop that does not run are zeros.
They are computed by primitives of `jax.lax`: JAX caches the traces of jitted functions,
such as `jnp.where`, and traces of the user's programs would contain the source lines of this run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxmp import _core
from jaxmp._core import Array, PyTree, _compat
from jaxmp._core._compat import AnyJaxpr, JaxprEqn
from jaxmp._programs import _constructs
from jaxmp._programs._bind import as_recorded, bind_all
from jaxmp._programs._jaxprs import is_literal
from jaxmp._programs._locations import Lines, Location


class Start(NamedTuple):
    """Location and state with which the run of a jaxpr starts.

    place: location of the equation that contains the jaxpr.
    state: state of the client for the jaxpr.
    """

    place: Location = Location()
    state: Any = None


# That of a whole program.
PROGRAM = Start()


@dataclasses.dataclass
class Frame:
    """Run of one jaxpr.

    place, state: as in `Start`.
    values: values of the variables so far.
    index: number of the current equation.
    """

    place: Location
    state: Any
    values: dict[Any, Any]
    index: int = 0


class Entry(enum.Enum):
    """Manner in which operands enter a construct."""

    CALL = enum.auto()  # unchanged: of a call, and constants of a loop
    REMAT = enum.auto()  # into a function that the backward pass runs again
    CARRY = enum.auto()
    ROWS = enum.auto()  # as slices of scanned arrays
    BRANCH = enum.auto()
    SHARD = enum.auto()  # as the parts of one device


# Side results. JAX passes a tree of this type through loops and branches without sorting its keys.
_Side: TypeAlias = "OrderedDict[Any, Any]"


class Interpreter:
    """Runs a jaxpr again; see the documentation of this module."""

    # Consequence of an equation with a jaxpr that is not a known construct, as the end of a
    # warning; "" for a client inside of another one, which warns.
    consequence = ""
    # True if the client adds to `side`.
    has_side_results = False
    # Number of iterations of a while loop whose side results are stacked and then `joined`: the
    # first ones and the last. 0: only those of the last iteration are returned.
    stacked_iterations = 0
    # True: functions with custom derivatives are run as calls, without their rules, in a program
    # that is not differentiated again.
    drops_derivatives = False

    def __init__(self) -> None:
        self.side: _Side = OrderedDict()
        # Operations with a jaxpr that the client met and no module of jaxmp enters.
        self.unknown: set[str] = set()

    # -- values ----------------------------------------------------------------------------

    def constant(self, array: Any) -> Any:
        """Converts a constant of a jaxpr to a value."""
        return array

    def literal(self, var: Any) -> Any:
        """Converts a literal, such as the scalar in `mul x 2.0`, to a value."""
        return self.constant(var.val)

    def array(self, value: Any) -> Any:
        """Converts a value to the array that equations read which the client does not change."""
        return value

    def entered(self, values: list[Any], entry: Entry, operands: list[Any]) -> list[Any]:
        """Converts some of the operands of a construct to arguments of its jaxpr."""
        return values

    def left(self, results: list[Any], operands: list[Any]) -> list[Any]:
        """Converts results of the jaxpr of a loop, branch or remat to results of the construct."""
        return list(map(self.array, results))

    def joined(self, value: PyTree) -> PyTree:
        """Returns the side result of a loop, for those of all iterations, stacked."""
        return value

    # -- the loop over equations -----------------------------------------------------------

    def run(self, jaxpr: AnyJaxpr, args: Sequence[Any], start: Start = PROGRAM) -> list[Any]:
        """Runs an open or closed jaxpr.

        Args:
          jaxpr: the jaxpr.
          args: values of its arguments.
          start: location of the equation that contains it, and state of the client for it.
        """
        values = self.frame(jaxpr, args, start).values
        outvars = _compat.jaxpr_body(jaxpr)[0].outvars
        return [self.literal(var) if is_literal(var) else values[var] for var in outvars]

    def frame(self, jaxpr: AnyJaxpr, args: Sequence[Any], start: Start = PROGRAM) -> Frame:
        """Runs a jaxpr as `run` does, and returns the values of all its variables."""
        body, consts = _compat.jaxpr_body(jaxpr)
        # An analysis does not know the constants of an open jaxpr.
        consts = consts or (None,) * len(body.constvars)
        values: dict[Any, Any] = dict(zip(body.constvars, map(self.constant, consts), strict=True))
        values |= zip(body.invars, args, strict=True)
        frame = Frame(*start, values)
        read = lambda var: self.literal(var) if is_literal(var) else values[var]
        for frame.index, equation in enumerate(body.eqns):
            operands = list(map(read, equation.invars))
            with self.context(equation):
                results = self.equation(equation, operands, frame)
            values |= zip(equation.outvars, results, strict=True)
        return frame

    def context(self, equation: JaxprEqn) -> contextlib.AbstractContextManager[None]:
        """Returns the context in which an equation is run again: its scopes, source and mesh."""
        return as_recorded(equation)

    def equation(self, equation: JaxprEqn, operands: list[Any], frame: Frame) -> list[Any]:
        """Runs one equation."""
        return self.enter(equation, operands, frame)

    def bound(self, equation: JaxprEqn, operands: list[Any]) -> list[Array]:
        """Runs an equation as it was recorded."""
        return bind_all(equation, list(map(self.array, operands)))

    def enter(
        self, equation: JaxprEqn, operands: list[Any], frame: Frame, state: Any = None
    ) -> list[Any]:
        """Runs the jaxprs inside of an equation; other equations are run as recorded.

        Args:
          equation: the equation.
          operands: its operands.
          frame: the run of the jaxpr that contains it.
          state: state of the client for the jaxprs; the test of a while loop has none.
        """
        form = _constructs.form_of(equation)
        is_call = form is _constructs.Form.DERIVATIVE and self.drops_derivatives
        rule = Interpreter._call if is_call else _RULES.get(form)
        if rule is not None:
            return rule(self, equation, operands, Start(frame.place.of(equation), state))
        self.check_known(equation)
        return self.bound(equation, operands)

    def check_known(self, equation: JaxprEqn) -> None:
        """Warns of an operation that contains a jaxpr, and is neither listed nor opaque."""
        name = equation.primitive.name
        if self.consequence and name not in self.unknown and _constructs.is_unknown(equation):
            self.unknown.add(name)
            warn_of_unknown(name, equation, self.consequence)

    # -- rules of constructs ---------------------------------------------------------------

    def _inside(self, function: Callable[[], list[Any]]) -> tuple[list[Any], _Side]:
        """Returns the results of a function, and the side results that it adds."""
        outside, self.side = self.side, OrderedDict()
        try:
            return function(), self.side
        finally:
            self.side = outside

    def _add(self, side: _Side) -> None:
        for key, value in side.items():
            self.side[key] = value
            self.side.move_to_end(key)  # its position in the program

    def _add_joined(self, side: _Side) -> None:
        self._add(OrderedDict((key, self.joined(value)) for key, value in side.items()))

    def _call(self, equation: JaxprEqn, operands: list[Any], start: Start) -> list[Any]:
        """Runs the jaxpr of a call in place of the call."""
        args = self.entered(operands, Entry.CALL, operands)
        return self.run(_constructs.call_of(equation).jaxpr, args, start)

    def _remat(self, equation: JaxprEqn, operands: list[Any], start: Start) -> list[Any]:
        call = _constructs.call_of(equation)
        args = self.entered(operands, Entry.REMAT, operands)
        if call.is_recomputation:
            results = self.run(call.jaxpr, call.separated(args), start)
            return self.left(results, operands)

        def recomputed(*args: Any) -> tuple[list[Any], _Side]:
            run = lambda: self.left(self.run(call.jaxpr, args, start), operands)
            return self._inside(run)

        results, side = call.rematerialized(recomputed)(*args)
        self._add(side)
        return results

    def _scan(self, equation: JaxprEqn, operands: list[Any], start: Start) -> list[Any]:
        (loop,) = _constructs.inners(equation)
        consts, carry, rows = loop.split(operands)
        consts = self.entered(consts, Entry.CALL, operands)

        def body(carry: list[Any], rows: list[Any]) -> Any:
            run = lambda: self.run(loop.recorded, [*consts, *carry, *rows], start)
            results, side = self._inside(lambda: self.left(run(), operands))
            count = len(loop.carried)
            return results[:count], (results[count:], side)

        carry = self.entered(carry, Entry.CARRY, operands)
        rows = self.entered(rows, Entry.ROWS, operands)
        options = {"length": loop.times, "reverse": loop.step < 0, "unroll": loop.unroll}
        carry, (stacked, side) = lax.scan(body, carry, rows, **options)
        self._add_joined(side)
        return [*carry, *stacked]

    def _while(self, equation: JaxprEqn, operands: list[Any], start: Start) -> list[Any]:
        condition, loop = _constructs.inners(equation)
        of_body, carry, _ = loop.split(operands)
        of_test = operands[: len(operands) - len(loop.indices)]
        of_test, of_body = (self.entered(v, Entry.CALL, operands) for v in (of_test, of_body))
        carry = self.entered(carry, Entry.CARRY, operands)

        def test(values: list[Any]) -> Array:
            run = lambda: self.run(
                condition.recorded, [*of_test, *values], start._replace(state=None)
            )
            return self.array(self._inside(run)[0][0])

        def body(*carry: Any) -> tuple[list[Any], _Side]:
            run = lambda: self.run(loop.recorded, [*of_body, *carry], start)
            return self._inside(lambda: self.left(run(), operands))

        none, count = self._absent(body, carry), self.stacked_iterations

        def step(carry: Any) -> Any:
            values, (stacked, *number) = carry
            results, side = body(*values)
            if condition.jaxpr.outvars[0].aval.ndim:
                # Under `vmap`, the loop runs until all elements ended, and keeps those that did.
                runs = test(values)
                where = lambda x: jnp.expand_dims(runs, range(runs.ndim, x.ndim))
                results = jax.tree.map(lambda x, old: jnp.where(where(x), x, old), results, values)
            rows = vary_as_here(side)
            for n in number:
                at = lax.min(n, jnp.int32(count - 1))
                put = lambda x, row, at=at: lax.dynamic_update_index_in_dim(x, row, at, 0)
                rows = jax.tree.map(put, stacked, rows)
            return results, (rows, *(lax.add(n, jnp.int32(1)) for n in number))

        kept: tuple[Any, ...] = (none,)
        if count:
            rows = jax.tree.map(lambda row: lax.broadcast(row, (count,)), none)
            kept = vary_as_here(rows), jnp.int32(0)

        def any_runs(carry: Any) -> Array:
            runs = test(carry[0])
            return runs.any() if runs.ndim else runs

        results, (side, *_) = lax.while_loop(any_runs, step, (carry, kept))
        (self._add_joined if count else self._add)(side)
        return results

    def _cond(self, equation: JaxprEqn, operands: list[Any], start: Start) -> list[Any]:
        (index, *rest), cond = operands, _constructs.cond_of(equation)
        args = self.entered(rest, Entry.BRANCH, rest)

        def branch(jaxpr: Any) -> Callable[..., Any]:
            run = lambda args: self.left(self.run(jaxpr, args, start), rest)
            return lambda *args: self._inside(lambda: run(args))

        branches = list(map(branch, cond.branches))
        none: _Side = OrderedDict()
        for each in branches:
            for key, value in self._absent(each, args).items():
                # Side results of different shapes in two branches are left out.
                is_same = key not in none or _core.are_alike(none[key], value)
                none[key] = value if is_same else None
        none = OrderedDict((key, value) for key, value in none.items() if value is not None)

        def padded(branch: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any) -> Any:
                results, side = branch(*args)
                rows = ((key, side.get(key, default)) for key, default in none.items())
                return results, vary_as_here(OrderedDict(rows))

            return run

        results, side = cond.run(self.array(index), list(map(padded, branches)), args)
        self._add(side)
        return results

    def _shard_map(self, equation: JaxprEqn, operands: list[Any], start: Start) -> list[Any]:
        record = _constructs.shard_map_of(equation)
        args = self.entered(operands, Entry.SHARD, operands)
        specs = [
            jax.tree.map(lambda _, spec=spec: spec, arg)
            for arg, spec in zip(args, record.in_specs, strict=True)
        ]

        def shard(*args: Any) -> tuple[tuple[Any, ...], _Side]:
            results, side = self._inside(lambda: self.run(record.jaxpr, args, start))
            return tuple(map(self.array, results)), jax.tree.map(lambda x: x[None], side)

        axes = tuple(axis for axis in record.mesh.axis_names if axis in record.axis_names)
        out_specs = record.out_specs, PartitionSpec(axes)
        results, side = record.run(shard, args, tuple(specs), out_specs)
        self._add_joined(side)
        return list(results)

    def _absent(self, function: Callable[..., Any], args: Sequence[Any]) -> _Side:
        """Returns the side results of a function for the case that it does not run."""
        if not self.has_side_results:
            return OrderedDict()
        shapes = jax.eval_shape(lambda *args: function(*args)[1], *args)
        return jax.tree.map(lambda x: vary_as_here(jnp.zeros(x.shape, x.dtype)), shapes)


_RULES: dict[_constructs.Form | None, Callable[..., list[Any]]] = {
    _constructs.Form.CALL: Interpreter._call,
    _constructs.Form.REMAT: Interpreter._remat,
    _constructs.Form.SHARDS: Interpreter._shard_map,
    _constructs.Form.BRANCH: Interpreter._cond,
    _constructs.Form.SCAN: Interpreter._scan,
    _constructs.Form.WHILE: Interpreter._while,
}


def vary_as_here(tree: PyTree) -> PyTree:
    """Casts to varying over the axes of a `shard_map`, so that all branches have one type."""
    mesh = jax.sharding.get_abstract_mesh()
    is_unchecked = mesh.empty or _compat.is_in_unchecked_shard_map()
    return tree if is_unchecked else _compat.vary(tree, mesh.manual_axes)


def warn_of_unknown(name: str, equation: JaxprEqn, consequence: str) -> None:
    """Warns of an operation that contains a function, and that no module of jaxmp enters.

    Args:
      name: the name of the operation.
      equation: one equation of it.
      consequence: the end of the message, such as "its memory is not counted".
    """
    file, line = Lines().of((equation,))
    where = f" at {file}:{line}" if file else ""
    _core.warn_user(
        f"jaxmp does not enter the operation {name!r} of JAX {jax.__version__}{where}, which "
        f"contains a function. It runs as it was recorded: {consequence}."
    )
