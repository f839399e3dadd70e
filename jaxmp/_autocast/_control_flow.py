"""Rules for equations that contain jaxprs: control flow, calls and custom derivatives.

Each rule runs one equation. It retraces the inner jaxprs for the current dtypes of the operands and
returns the results as values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, jaxpr_as_fun

from jaxmp._autocast._magnified import Effects
from jaxmp._autocast._resolve import IN_CUSTOM_JVP, IN_JVP_RULE, AutocastConfig
from jaxmp._autocast._values import Environment, Priority, Value, in_recorded_dtypes, to_aval, wrap
from jaxmp._core._compat import jaxpr_body
from jaxmp._core._jaxprs import Path, array_aval
from jaxmp._core._programs._bind import bind
from jaxmp._core._programs._constructs import (
    CALLS,
    REMATS,
    call_of,
    cond_of,
    scan_of,
    shard_map_of,
    while_of,
)
from jaxmp._core._programs._interpreter import Place
from jaxmp._core._trees import cast, is_castable
from jaxmp._core._typing import Array


class Runner(Protocol):
    """Interface of the interpreter that the rules use; see `Interpreter` for its methods."""

    config: AutocastConfig

    def run(
        self,
        jaxpr: Jaxpr | ClosedJaxpr,
        args: Sequence[Value],
        place: Place | None = None,
        state: Effects = (),
    ) -> list[Value]: ...

    def retraced(
        self,
        jaxpr: Jaxpr | ClosedJaxpr,
        values: list[Value],
        scope_path: Path,
        outputs: Callable[[list[Array], list[ShapedArray]], list[Array]] | None = None,
        effects: Effects = (),
    ) -> tuple[Any, list[Priority]]: ...

    def record_opaque(self, equation: JaxprEqn, scope_path: Path) -> None: ...


def _call(
    runner: Runner, equation: JaxprEqn, env: Environment, values: list[Value], scope_path: Path
) -> list[Value]:
    """Runs `jit`, `checkpoint` and similar calls: the same equation with the retraced jaxpr."""
    call, effects = call_of(equation), env.effects_of(equation)
    jaxpr, priorities = runner.retraced(call.jaxpr, values, scope_path, effects=effects)
    outs = bind(equation, [v.array for v in values], **{call.parameter: jaxpr})
    return [Value(*pair) for pair in zip(outs, priorities, strict=True)]


def _scan(
    runner: Runner, equation: JaxprEqn, env: Environment, values: list[Value], scope_path: Path
) -> list[Value]:
    """Runs a `scan`: the carry has its recorded dtypes, the other operands their current dtypes."""
    loop = scan_of(equation)
    consts, carry, rows = loop.split(values)
    values = [*consts, *_carried(env, carry, loop.split(equation.invars)[1]), *rows]
    carried = loop.carry

    def outputs(outs: list[Array], recorded: list[ShapedArray]) -> list[Array]:
        return _cast_all(outs[:carried], recorded[:carried]) + outs[carried:]

    effects = env.effects_of(equation)
    jaxpr, priorities = runner.retraced(loop.jaxpr, values, scope_path, outputs, effects)
    outs = bind(equation, [v.array for v in values], jaxpr=jaxpr)
    priorities = [Priority.COMPUTED] * carried + priorities[carried:]
    return [Value(*pair) for pair in zip(outs, priorities, strict=True)]


def _while(
    runner: Runner, equation: JaxprEqn, env: Environment, values: list[Value], scope_path: Path
) -> list[Value]:
    """Runs a `while` loop; the loop state keeps its recorded dtypes."""
    loop = while_of(equation)
    of_test, of_body, carry = loop.split(values)
    carry = _carried(env, carry, loop.split(equation.invars)[2])
    tested, _ = runner.retraced(loop.test, of_test + carry, scope_path)
    looped, _ = runner.retraced(loop.body, of_body + carry, scope_path, _cast_all)
    arrays = [value.array for value in of_test + of_body + carry]
    return [Value(out) for out in bind(equation, arrays, cond_jaxpr=tested, body_jaxpr=looped)]


def _carried(env: Environment, values: list[Value], variables: Sequence[Any]) -> list[Value]:
    """Returns carried operands in their recorded dtypes."""
    pairs = zip(values, variables, strict=True)
    return [Value(to_aval(env, value, var.aval)) for value, var in pairs]


def _cond(
    runner: Runner, equation: JaxprEqn, env: Environment, values: list[Value], scope_path: Path
) -> list[Value]:
    """Runs a `cond`; all branches return the recorded dtypes, since they must agree."""
    effects = env.effects_of(equation)
    branches = tuple(
        runner.retraced(branch, values[1:], scope_path, _cast_all, effects)[0]
        for branch in cond_of(equation).branches
    )
    return [Value(out) for out in bind(equation, [v.array for v in values], branches=branches)]


def _cast_all(outs: Sequence[Array], recorded: Sequence[ShapedArray]) -> list[Array]:
    return [
        cast(jnp.asarray(out), aval.dtype) if is_castable(out) else out
        for out, aval in zip(outs, recorded, strict=True)
    ]


def _custom_jvp(
    runner: Runner, equation: JaxprEqn, env: Environment, values: list[Value], scope_path: Path
) -> list[Value]:
    """Runs a `custom_jvp` function and its rule, both in the current dtypes of their operands."""
    params = equation.params
    if runner.config.scaling is not None:
        # Reverse mode transposes the matmuls of the rule, and FP8 matmuls cannot be transposed.
        scope_path = (*scope_path, IN_CUSTOM_JVP)
    effects = env.effects_of(equation)
    jaxpr, priorities = runner.retraced(params["call_jaxpr"], values, scope_path, effects=effects)
    avals = [array_aval(var) for var in equation.invars]
    out_avals = [var.aval for var in jaxpr_body(jaxpr)[0].outvars]
    rule = equation.primitive.get_bind_params(params)["subfuns"][1]
    call = jax.custom_jvp(jaxpr_as_fun(jaxpr))

    def call_jvp(
        primals: tuple[Array, ...], tangents: tuple[Array | SymbolicZero, ...]
    ) -> tuple[list[Array], list[Array | SymbolicZero]]:
        zeros = [
            isinstance(tangent, SymbolicZero) or not _moves(aval)
            for tangent, aval in zip(tangents, avals, strict=True)
        ]
        recorded, zeros_out = _rule_jaxpr(rule, avals, zeros, params["symbolic_zeros"])
        args = [Value(array, v.priority) for array, v in zip(primals, values, strict=True)]
        args += [Value(t) for t, zero in zip(tangents, zeros, strict=True) if not zero]
        outs = runner.run(recorded, args, Place((*scope_path, IN_JVP_RULE)))
        moving = [aval for aval, zero in zip(out_avals, zeros_out, strict=True) if not zero]
        arrays = _cast_all([out.array for out in outs], [*out_avals, *moving])
        rest = iter(arrays[len(out_avals) :])
        tangents_out = [
            SymbolicZero(aval.to_tangent_aval()) if zero else next(rest)
            for aval, zero in zip(out_avals, zeros_out, strict=True)
        ]
        return arrays[: len(out_avals)], tangents_out

    call.defjvp(call_jvp, symbolic_zeros=params["symbolic_zeros"])
    outs = call(*(value.array for value in values))
    return [Value(*pair) for pair in zip(outs, priorities, strict=True)]


def _rule_jaxpr(
    rule: Any, avals: Sequence[ShapedArray], zeros: list[bool], symbolic_zeros: bool
) -> tuple[ClosedJaxpr, list[bool]]:
    """Traces a `custom_jvp` rule in the recorded dtypes.

    Args:
      rule: (primals, then tangents) -> (primal results, then tangent results).
      avals: the recorded types of the primals.
      zeros: for each tangent, True if the rule receives a symbolic zero.
      symbolic_zeros: True if the rule was defined with `symbolic_zeros=True`.

    Returns:
      The jaxpr from primals and nonzero tangents to primal and nonzero tangent results; and for
      each primal result, True if its tangent is a symbolic zero, which the jaxpr does not return.
    """
    # On explicit mesh axes, the sharding is a part of the type.
    spread = (aval.sharding if any(aval.sharding.spec) else None for aval in avals)
    shapes = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)
        for aval, sharding in zip(avals, spread, strict=True)
    ]
    zeros_out: list[bool] = []

    def run(*arrays: Array) -> list[Array]:
        rest = iter(arrays[len(avals) :])
        tangents = [
            SymbolicZero(aval.to_tangent_aval()) if zero else next(rest)
            for aval, zero in zip(avals, zeros, strict=True)
        ]
        outs = rule.call_wrapped(*arrays[: len(avals)], *tangents)
        primals_out, tangents_out = outs[: len(outs) // 2], outs[len(outs) // 2 :]
        if not symbolic_zeros:
            tangents_out = map(_instantiate, tangents_out)
        tangents_out = list(tangents_out)
        zeros_out[:] = [isinstance(tangent, SymbolicZero) for tangent in tangents_out]
        return [*primals_out, *(t for t in tangents_out if not isinstance(t, SymbolicZero))]

    moving = [shape for shape, zero in zip(shapes, zeros, strict=True) if not zero]
    return jax.make_jaxpr(run)(*shapes, *moving), zeros_out


def _moves(aval: ShapedArray) -> bool:
    """Returns True if a value of this type can have a nonzero tangent: floating or complex."""
    return jnp.issubdtype(aval.dtype, jnp.inexact)


def _instantiate(out: Array | SymbolicZero) -> Array:
    if not isinstance(out, SymbolicZero):
        return out
    aval: Any = out.aval
    return jnp.zeros(aval.shape, aval.dtype)


def as_recorded_dtypes(
    runner: Runner, equation: JaxprEqn, env: Environment, values: list[Value], scope_path: Path
) -> list[Value]:
    """Runs an equation in its recorded dtypes, without changes to its inner jaxprs."""
    runner.record_opaque(equation, scope_path)
    return wrap(equation, bind(equation, in_recorded_dtypes(equation, env, values)))


def _shard_map(
    runner: Runner, equation: JaxprEqn, env: Environment, values: list[Value], scope_path: Path
) -> list[Value]:
    record, effects = shard_map_of(equation), env.effects_of(equation)
    priorities: list[Priority] = []

    def shard(*arrays: Array) -> tuple[Array, ...]:
        pairs = zip(arrays, values, strict=True)
        args = [Value(array, value.priority) for array, value in pairs]
        outs = runner.run(record.jaxpr, args, Place(scope_path), effects)
        priorities[:] = [out.priority for out in outs]
        return tuple(out.array for out in outs)

    outs = record.run(shard, [value.array for value in values])
    return [Value(*pair) for pair in zip(outs, priorities, strict=True)]


INSIDE: dict[str, Callable[..., list[Value]]] = {
    **dict.fromkeys(CALLS | REMATS, _call),
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "custom_jvp_call": _custom_jvp,
    "custom_vjp_call": as_recorded_dtypes,
    "shard_map": _shard_map,
}
