"""Interpreter of values that runs constructs in place: as the same equations, traced again.

Calls, loops and branches keep all their options, such as donated operands, shardings, and the
policy of a `jax.checkpoint`. A function that a program calls many times remains one jaxpr: it is
traced again once for each combination of types and `key`.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.custom_derivatives import SymbolicZero

from jaxmp import _programs
from jaxmp._autocast._decide import Environment
from jaxmp._autocast._values import Priority, Value, is_castable_aval, returned
from jaxmp._core import Array, PyTree, _compat
from jaxmp._core._compat import AnyJaxpr, ClosedJaxpr, Jaxpr, JaxprEqn
from jaxmp._programs import Form, Location, Start, array_aval, bind


class InPlace(_programs.Interpreter):
    """Interpreter that runs constructs in place."""

    def __init__(self) -> None:
        super().__init__()
        # Key -> (the jaxpr, the new one, notes on its results). It stores the jaxpr so that its id
        # is not used again.
        self._traced: dict[Any, tuple[Any, Any, list[Any]]] = {}

    def key(self, jaxpr: Jaxpr, start: Start) -> Hashable:
        """Returns all that determines how a jaxpr runs, beside the notes on its arguments."""
        raise NotImplementedError

    def array(self, value: Value) -> Any:
        return value.array

    def in_place(
        self, equation: JaxprEqn, operands: list[Value], outer: Environment, start: Start
    ) -> list[Value]:
        """Runs a call, loop, branch or `shard_map` in place.

        Args:
          equation: the equation.
          operands: its operands.
          outer: state of the jaxpr that contains the equation.
          start: location of the equation, and state for the jaxprs; the test of a while loop has
            none.
        """
        form, inside = _programs.form_of(equation), _programs.inners(equation)
        operands = list(operands)
        if form is Form.SHARDS:
            return self._on_shards(equation, operands, start)
        carried = {inner.indices[n] for inner in inside for n in inner.carried}
        for n in (n for n in carried if n is not None):
            operands[n] = Value(outer.to_aval(operands[n], equation.invars[n].aval))
        new: dict[int, Any] = {}
        notes: list[Any] = []
        for inner in inside:
            args = [operands[n] for n in inner.indices if n is not None]
            # Results that must have their recorded types.
            fixed = len(inner.results) if form is Form.BRANCH else len(inner.carried)
            is_test = form is Form.WHILE and inner is inside[0]
            own = start._replace(state=None) if is_test else start
            new[id(inner.recorded)], notes = self.retraced(inner.recorded, args, own, fixed)
        arrays = list(map(self.array, operands))
        outs = bind(equation, arrays, **_programs.parameters_with(equation, new))
        return list(map(_noted, outs, notes))

    def _on_shards(self, equation: JaxprEqn, operands: list[Value], start: Start) -> list[Value]:
        record, notes = _programs.shard_map_of(equation), []

        def shard(*arrays: Array) -> tuple[Array, ...]:
            args = list(map(Value.with_array, operands, arrays))
            outs = self.run(record.jaxpr, args, start)
            notes[:] = map(_note, outs)
            return tuple(map(self.array, outs))

        outs = record.run(shard, list(map(self.array, operands)))
        return list(map(_noted, outs, notes))

    def retraced(
        self, jaxpr: AnyJaxpr, values: list[Value], start: Start, fixed: int = 0
    ) -> tuple[Any, list[Any]]:
        """Traces a jaxpr again for other values of its arguments.

        Args:
          jaxpr: open or closed.
          values: those of its arguments.
          start: location of the equation that contains it, and state for it.
          fixed: number of its first results that keep their recorded types.

        Returns:
          The new jaxpr, open or closed as `jaxpr` is, and a note on each result; None for those
          that are fixed.
        """
        body, _ = _compat.jaxpr_body(jaxpr)
        avals = [_aval(var.aval, value) for var, value in zip(body.invars, values, strict=True)]
        notes = tuple(map(_note, values))
        key = id(jaxpr), tuple(map(str, avals)), notes, self.key(body, start), fixed
        if key not in self._traced:
            results: list[Any] = []

            def run(*arrays: Array) -> list[Array]:
                args = list(map(Value.with_array, values, arrays))
                outs = self.run(jaxpr, args, start)
                results[:] = [None] * fixed + list(map(_note, outs[fixed:]))
                avals = [var.aval for var in body.outvars[:fixed]]
                outs[:fixed] = map(_as_result, outs[:fixed], avals)
                return list(map(self.array, outs))

            new = _compat.jaxpr_like(jax.make_jaxpr(run)(*avals), jaxpr)
            self._traced[key] = jaxpr, new, results
        return self._traced[key][1:]

    def custom_jvp(
        self, equation: JaxprEqn, operands: list[Value], start: Start, of_rule: Location
    ) -> list[Value]:
        """Runs a `custom_jvp` function and its rule, both for the current types of their operands.

        Args:
          equation, operands, start: as in `in_place`. `run` receives the same state for the
            rule, of which the tangents are further results.
          of_rule: location in which the rule runs.
        """
        function = _programs.custom_jvp_of(equation)
        jaxpr, notes = self.retraced(function.jaxpr, operands, start)
        avals = [array_aval(var) for var in equation.invars]
        out_avals = [var.aval for var in _compat.jaxpr_body(jaxpr)[0].outvars]
        call = jax.custom_jvp(_compat.jaxpr_as_fun(jaxpr))

        def call_jvp(
            primals: tuple[Array, ...], tangents: tuple[Any, ...]
        ) -> tuple[list[Array], list[Array | SymbolicZero]]:
            moves = [
                not isinstance(tangent, SymbolicZero) and _moves(aval)
                for tangent, aval in zip(tangents, avals, strict=True)
            ]
            recorded, moves_out = _rule_jaxpr(function, avals, moves)
            args = list(map(Value.with_array, operands, primals))
            args += map(Value, itertools.compress(tangents, moves))
            results = self.run(recorded, args, start._replace(place=of_rule))
            result_avals = *out_avals, *itertools.compress(out_avals, moves_out)
            arrays = list(map(self.array, map(_as_result, results, result_avals)))
            count = len(out_avals)
            return arrays[:count], _with_zeros(out_avals, moves_out, arrays[count:])

        call.defjvp(call_jvp, symbolic_zeros=function.symbolic_zeros)
        outs = call(*map(self.array, operands))
        return list(map(_noted, outs, notes))

    def custom_vmap(self, equation: JaxprEqn, operands: list[Value], start: Start) -> list[Value]:
        """Runs a `custom_vmap` function and its rule, both for the current types of their operands.

        Args:
          equation, operands, start: as in `in_place`.
        """
        recorded, author_rule = _programs.custom_vmap_of(equation)
        jaxpr, notes = self.retraced(recorded, operands, start)
        avals = [array_aval(var) for var in equation.invars]
        out_avals = [var.aval for var in _compat.jaxpr_body(jaxpr)[0].outvars]

        def rule(size: int, is_batched: list[Any], *args: Any) -> tuple[PyTree, PyTree]:
            arrays, structure = jax.tree.flatten(args)
            shapes = [
                jax.typeof(array).update(dtype=aval.dtype)
                for array, aval in zip(arrays, avals, strict=True)
            ]
            batched: list[PyTree] = []

            def run(*arrays: Array) -> PyTree:
                out, is_out_batched = author_rule(size, is_batched, *structure.unflatten(arrays))
                batched.append(is_out_batched)
                return out

            closed, out_shapes = jax.make_jaxpr(run, return_shape=True)(*shapes)
            outs = self.run(closed, list(map(Value.with_array, operands, arrays)), start)
            outs = map(self.array, map(_as_result, outs, out_avals))
            return jax.tree.unflatten(jax.tree.structure(out_shapes), outs), batched[0]

        outs = bind(equation, list(map(self.array, operands)), call=jaxpr, rule=rule)
        return list(map(_noted, outs, notes))


def _aval(aval: Any, value: Value) -> ShapedArray:
    """Returns the type of an argument of a jaxpr, of the recorded type, that has a value."""
    return aval.update(dtype=value.dtype) if is_castable_aval(aval) else aval


def _note(value: Value) -> tuple[Priority, bytes | None]:
    """Returns all that distinguishes a value from another one of the same type."""
    return value.priority, None if value.scalar is None else value.scalar.tobytes()


def _noted(array: Array, note: Any) -> Value:
    """Returns the value of a result with a note; None: of a loop or branch."""
    return Value(array) if note is None else Value(array, note[0])


def _as_result(value: Value, aval: ShapedArray) -> Value:
    """Converts a result that a loop carries, or a branch returns, to its recorded type."""
    return Value(returned(value, None, aval.dtype)) if value.castable else value


def _with_zeros(
    avals: Sequence[ShapedArray], moves: list[bool], arrays: Sequence[Array]
) -> list[Array | SymbolicZero]:
    """Returns the tangents of these types: arrays where `moves` is True, or symbolic zeros."""
    rest = iter(arrays)
    pairs = zip(avals, moves, strict=True)
    return [next(rest) if moved else SymbolicZero(aval.to_tangent_aval()) for aval, moved in pairs]


def _rule_jaxpr(
    function: _programs.CustomJvp, avals: Sequence[ShapedArray], moves: list[bool]
) -> tuple[ClosedJaxpr, list[bool]]:
    """Traces a `custom_jvp` rule in the recorded dtypes.

    Args:
      function: the function.
      avals: the recorded types of the primals.
      moves: for each tangent, False if the rule receives a symbolic zero.

    Returns:
      The jaxpr from primals and nonzero tangents to primal and nonzero tangent results; and for
      each primal result, False if its tangent is a symbolic zero, which the jaxpr does not return.
    """
    moves_out: list[bool] = []

    def run(*arrays: Array) -> list[Array]:
        tangents = _with_zeros(avals, moves, arrays[len(avals) :])
        outs = function.rule.call_wrapped(*arrays[: len(avals)], *tangents)
        primals_out, tangents_out = outs[: len(outs) // 2], outs[len(outs) // 2 :]
        if not function.symbolic_zeros:
            tangents_out = list(map(_instantiate, tangents_out))
        moves_out[:] = [not isinstance(tangent, SymbolicZero) for tangent in tangents_out]
        return [*primals_out, *itertools.compress(tangents_out, moves_out)]

    return jax.make_jaxpr(run)(*avals, *itertools.compress(avals, moves)), moves_out


def _moves(aval: ShapedArray) -> bool:
    """Returns True if a value of this type can have a nonzero tangent: floating or complex."""
    return jnp.issubdtype(aval.dtype, jnp.inexact)


def _instantiate(out: Array | SymbolicZero) -> Array:
    if not isinstance(out, SymbolicZero):
        return out
    aval: Any = out.aval
    return jnp.zeros(aval.shape, aval.dtype)
