"""Rules of autocast for functions with custom derivatives."""

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
from jaxmp._autocast._values import Environment, Value, in_recorded_dtypes, wrap
from jaxmp._core._compat import jaxpr_body
from jaxmp._core._jaxprs import Path, array_aval
from jaxmp._core._programs._bind import bind
from jaxmp._core._programs._constructs import CustomJvp, custom_jvp_of
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
        state: Effects | None = None,
    ) -> list[Value]: ...

    def retraced(
        self,
        jaxpr: Jaxpr | ClosedJaxpr,
        values: list[Value],
        place: Place,
        state: Any = None,
        fixed: int = 0,
    ) -> tuple[Any, list[Any]]: ...

    def noted(self, array: Array, note: Any) -> Value: ...

    def record_opaque(self, equation: JaxprEqn, scope_path: Path) -> None: ...


def _cast_all(outs: Sequence[Array], recorded: Sequence[ShapedArray]) -> list[Array]:
    return [
        cast(jnp.asarray(out), aval.dtype) if is_castable(out) else out
        for out, aval in zip(outs, recorded, strict=True)
    ]


def _custom_jvp(
    runner: Runner, equation: JaxprEqn, env: Environment, values: list[Value], scope_path: Path
) -> list[Value]:
    """Runs a `custom_jvp` function and its rule, both in the current dtypes of their operands."""
    function = custom_jvp_of(equation)
    if runner.config.scaling is not None:
        # Reverse mode transposes the matmuls of the rule, and FP8 matmuls cannot be transposed.
        scope_path = (*scope_path, IN_CUSTOM_JVP)
    effects = env.effects_of(equation)
    jaxpr, notes = runner.retraced(function.jaxpr, values, Place(scope_path), effects)
    avals = [array_aval(var) for var in equation.invars]
    out_avals = [var.aval for var in jaxpr_body(jaxpr)[0].outvars]
    call = jax.custom_jvp(jaxpr_as_fun(jaxpr))

    def call_jvp(
        primals: tuple[Array, ...], tangents: tuple[Array | SymbolicZero, ...]
    ) -> tuple[list[Array], list[Array | SymbolicZero]]:
        zeros = [
            isinstance(tangent, SymbolicZero) or not _moves(aval)
            for tangent, aval in zip(tangents, avals, strict=True)
        ]
        recorded, zeros_out = _rule_jaxpr(function, avals, zeros)
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

    call.defjvp(call_jvp, symbolic_zeros=function.symbolic_zeros)
    outs = call(*(value.array for value in values))
    return list(map(runner.noted, outs, notes))


def _rule_jaxpr(
    function: CustomJvp, avals: Sequence[ShapedArray], zeros: list[bool]
) -> tuple[ClosedJaxpr, list[bool]]:
    """Traces a `custom_jvp` rule in the recorded dtypes.

    Args:
      function: the function.
      avals: the recorded types of the primals.
      zeros: for each tangent, True if the rule receives a symbolic zero.

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
        outs = function.rule.call_wrapped(*arrays[: len(avals)], *tangents)
        primals_out, tangents_out = outs[: len(outs) // 2], outs[len(outs) // 2 :]
        if not function.symbolic_zeros:
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


RULES: dict[str, Callable[..., list[Value]]] = {
    "custom_jvp_call": _custom_jvp,
    "custom_vjp_call": as_recorded_dtypes,
}
