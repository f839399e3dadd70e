"""Interpreter that runs constructs in place: as the same equations, with jaxprs traced again.

Calls, loops and branches keep all their options, such as donated operands, shardings, and the
policy of a `jax.checkpoint`. A function that a program calls many times remains one jaxpr: it is
traced again once for each combination of types and `key`.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import jax
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from jaxmp._core._compat import jaxpr_body, jaxpr_like
from jaxmp._core._jaxprs import inners
from jaxmp._core._programs._bind import bind
from jaxmp._core._programs._constructs import parameters_with, shard_map_of
from jaxmp._core._programs._interpreter import Interpreter, Place
from jaxmp._core._typing import Array


class InPlace(Interpreter):
    """Interpreter that runs constructs in place; a client overrides the methods that raise."""

    def __init__(self) -> None:
        super().__init__()
        # Key -> (the jaxpr, the new one, notes on its results). It stores the jaxpr so that its id
        # is not used again.
        self._traced: dict[Any, tuple[Any, Any, list[Any]]] = {}

    def key(self, jaxpr: Jaxpr, place: Place, state: Any) -> Hashable:
        """Returns all that determines how a jaxpr runs, beside the notes on its arguments."""
        raise NotImplementedError

    def aval(self, var: Any, value: Any) -> ShapedArray:
        """Returns the type of an argument of a jaxpr that has a value."""
        raise NotImplementedError

    def with_array(self, value: Any, array: Array) -> Any:
        """Returns the value of an argument of a jaxpr, for that of the operand."""
        raise NotImplementedError

    def note(self, value: Any) -> Hashable:
        """Returns all that distinguishes a value from another one of the same type."""
        raise NotImplementedError

    def noted(self, array: Array, note: Any) -> Any:
        """Returns the value of a result with a note; None: of a loop or branch."""
        raise NotImplementedError

    def as_carry(self, value: Any, var: Any, outer: Any) -> Any:
        """Converts an operand that a loop carries to its recorded type."""
        raise NotImplementedError

    def as_result(self, value: Any, aval: ShapedArray) -> Any:
        """Converts a result that a loop carries, or a branch returns, to its recorded type."""
        raise NotImplementedError

    def in_place(
        self, equation: JaxprEqn, operands: list[Any], outer: Any, place: Place, state: Any
    ) -> list[Any]:
        """Runs a call, loop, branch or `shard_map` in place.

        Args:
          equation: the equation.
          operands: its operands.
          outer: state of the client for the jaxpr that contains the equation.
          place: location of the equation.
          state: state of the client for the jaxprs; those of a while loop have none.
        """
        name, operands, inside = equation.primitive.name, list(operands), inners(equation)
        if name == "shard_map":
            return self._on_shards(equation, operands, place, state)
        carried = {inner.indices[n] for inner in inside for n in inner.carried}
        for n in (n for n in carried if n is not None):
            operands[n] = self.as_carry(operands[n], equation.invars[n], outer)
        new: dict[int, Any] = {}
        notes: list[Any] = []
        for inner in inside:
            args = [operands[n] for n in inner.indices if n is not None]
            # Results that must have their recorded types.
            fixed = len(inner.results) if name == "cond" else len(inner.carried)
            own = None if name == "while" else state
            new[id(inner.recorded)], notes = self.retraced(inner.recorded, args, place, own, fixed)
        arrays = list(map(self.array, operands))
        outs = bind(equation, arrays, **parameters_with(equation, new))
        return list(map(self.noted, outs, notes))

    def _on_shards(
        self, equation: JaxprEqn, operands: list[Any], place: Place, state: Any
    ) -> list[Any]:
        record, notes = shard_map_of(equation), []

        def shard(*arrays: Array) -> tuple[Array, ...]:
            args = list(map(self.with_array, operands, arrays))
            outs = self.run(record.jaxpr, args, place, state)
            notes[:] = map(self.note, outs)
            return tuple(map(self.array, outs))

        outs = record.run(shard, list(map(self.array, operands)))
        return list(map(self.noted, outs, notes))

    def retraced(
        self,
        jaxpr: Jaxpr | ClosedJaxpr,
        values: list[Any],
        place: Place,
        state: Any = None,
        fixed: int = 0,
    ) -> tuple[Any, list[Any]]:
        """Traces a jaxpr again for other values of its arguments.

        Args:
          jaxpr: open or closed.
          values: those of its arguments.
          place: location of the equation that contains it.
          state: state of the client for the jaxpr.
          fixed: number of its first results that keep their recorded types.

        Returns:
          The new jaxpr, open or closed as `jaxpr` is, and a note on each result; None for those
          that are fixed.
        """
        body, _ = jaxpr_body(jaxpr)
        avals = [self.aval(var, value) for var, value in zip(body.invars, values, strict=True)]
        notes = tuple(map(self.note, values))
        key = id(jaxpr), tuple(map(str, avals)), notes, self.key(body, place, state), fixed
        if key not in self._traced:
            results: list[Any] = []

            def run(*arrays: Array) -> list[Array]:
                args = list(map(self.with_array, values, arrays))
                outs = self.run(jaxpr, args, place, state)
                results[:] = [None] * fixed + list(map(self.note, outs[fixed:]))
                avals = [var.aval for var in body.outvars[:fixed]]
                outs[:fixed] = map(self.as_result, outs[:fixed], avals)
                return list(map(self.array, outs))

            new = jaxpr_like(jax.make_jaxpr(run)(*avals), jaxpr)
            self._traced[key] = jaxpr, new, results
        return self._traced[key][1:]
