"""Interpreter that runs a traced function with the gradients of its parameters in FP32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from jaxmp._core._compat import jaxpr_body, scan_counts
from jaxmp._core._dtypes import FLOAT32, is_16bit
from jaxmp._core._replay import as_recorded, bind
from jaxmp._core._typing import Array, PyTree
from jaxmp._fp32_gradients._backward import CALLS, MATMULS, MOVES, is_16bit_aval, run_in_fp32
from jaxmp._fp32_gradients._values import (
    Constant,
    Copy,
    Value,
    Weight,
    as_array,
    attached,
    bound,
    computed_weight,
    copy_of,
    results_of,
)

# Operations that broadcast dimensions of size 1. The gradient of such an operand is a sum.
_BROADCASTING = frozenset({"add", "add_any", "div", "max", "min", "mul", "sub"})

# Operations that move the elements of several operands, and arithmetic.
_MERGES = frozenset(
    {"add", "concatenate", "div", "dynamic_update_slice", "mul", "neg", "pad", "select_n", "stack"}
    | {"sub"}
)


def run(closed: ClosedJaxpr, args: list[Array], is_param: list[bool]) -> list[Array]:
    """Runs a traced function so that the gradients of its parameters are computed in FP32.

    Args:
      closed: the traced function.
      args: its arguments; those parameters that it takes in 16 bits are given in FP32.
      is_param: for each argument, True for a parameter.

    Returns:
      The results of the function.
    """
    jaxpr, consts = jaxpr_body(closed)
    values: list[Value] = []
    for var, arg, differentiated in zip(jaxpr.invars, args, is_param, strict=True):
        if differentiated and is_16bit_aval(var.aval):
            values.append(copy_of(arg, lax.convert_element_type(arg, var.aval.dtype)))
        else:
            values.append(Weight(arg) if differentiated else arg)
    return list(map(as_array, _run(jaxpr, consts, values)))


def _run(jaxpr: Jaxpr, consts: Sequence[Array], args: list[Value]) -> list[Value]:
    values: dict[Var, Value] = dict(zip(jaxpr.constvars, consts, strict=True))
    values |= zip(jaxpr.invars, args, strict=True)

    def read(var: Var | Literal) -> Value:
        return Constant(var.val) if isinstance(var, Literal) else values[var]

    for equation in jaxpr.eqns:
        operands = [read(var) for var in equation.invars]
        with as_recorded(equation):
            results = _equation(equation, operands)
        values |= zip(equation.outvars, results, strict=True)
    return [read(var) for var in jaxpr.outvars]


def _equation(equation: JaxprEqn, operands: list[Value]) -> list[Value]:
    if all(isinstance(operand, Constant) for operand in operands):
        return [Constant(out) for out in bound(equation, operands)]
    if not any(isinstance(operand, (Weight, Copy)) for operand in operands):
        return list(bound(equation, operands))
    name = equation.primitive.name
    if name in _RULES:
        return _RULES[name](equation, operands)
    copies = [isinstance(operand, Copy) for operand in operands]
    if any(copies):
        if name in MOVES and copies[0]:
            return _move(equation, operands)
        if name in _BROADCASTING:
            operands = [_broadcast(operand, equation) for operand in operands]
        if name in _COPY_RULES:
            result = _COPY_RULES[name](equation, operands)
            if result is not None:
                return [result]
    results = bound(equation, operands)
    if all(isinstance(operand, (Weight, Copy, Constant)) for operand in operands):
        return list(map(computed_weight, results))
    return list(results)


# ---------------------------------------------------------------------------
# Operations with copies
# ---------------------------------------------------------------------------


def _move(equation: JaxprEqn, operands: list[Value]) -> list[Value]:
    """Moves the elements of a copy and of its carrier."""
    copy, *rest = operands
    assert isinstance(copy, Copy)
    others = list(map(as_array, rest))
    low = results_of(equation, bind(equation, [copy.low, *others]))
    carrier = results_of(equation, bind(equation, [copy.carrier, *others]))
    return [Copy(*pair) for pair in zip(low, carrier, strict=True)]


def _broadcast(value: Value, equation: JaxprEqn) -> Value:
    """Broadcasts a copy to the shape of the result, so that its gradient is summed in FP32."""
    aval: Any = equation.outvars[0].aval
    if not isinstance(value, Copy) or value.low.shape == aval.shape:
        return value
    axes = range(len(aval.shape))
    sharding = aval.sharding if any(aval.sharding.spec) else None
    low, carrier = (
        lax.broadcast_in_dim(array, aval.shape, axes, out_sharding=sharding) for array in value
    )
    return Copy(low, carrier)


def _merge(equation: JaxprEqn, operands: list[Value]) -> Value | None:
    """Runs an operation on copies and constants alone, and on their carriers.

    Examples are the parts of a matrix, the rows of a table and NaN, and a matrix and its scale.
    """
    low, wide = [], []
    for operand, var in zip(operands, equation.invars, strict=True):
        array = operand.low if isinstance(operand, Copy) else as_array(operand)
        low.append(array)
        if not is_16bit_aval(var.aval):
            wide.append(array)
        elif isinstance(operand, Copy):
            wide.append(operand.carrier)
        elif isinstance(operand, Constant):
            wide.append(jnp.asarray(array).astype(FLOAT32))
        else:
            return None
    return Copy(bind(equation, low), bind(equation, wide))


def _name(equation: JaxprEqn, operands: list[Value]) -> Value | None:
    """Names a copy for the policies of `jax.checkpoint`."""
    (copy,) = operands
    assert isinstance(copy, Copy)
    return Copy(bind(equation, [copy.low]), copy.carrier)


def _matmul(equation: JaxprEqn, operands: list[Value]) -> Value | None:
    """Runs a matmul or convolution with a copy, whose gradient is computed in FP32."""
    side = 1 if isinstance(operands[1], Copy) else 0
    copy, other = operands[side], operands[1 - side]
    if not isinstance(copy, Copy) or isinstance(other, (Weight, Copy, Constant)):
        return None
    rest = list(map(as_array, operands[2:]))

    def call(other: Array, low: Array, **changes: object) -> Array:
        pair = [other, low] if side else [low, other]
        return bind(equation, [*pair, *rest], **changes)

    @jax.custom_vjp
    def matmul(other: Array, low: Array, carrier: Array) -> Array:
        return call(other, low)

    def matmul_fwd(other: Array, low: Array, carrier: Array) -> Any:
        return call(other, low), (other, low)

    def matmul_bwd(saved: tuple[Array, Array], cotangent: Array) -> Any:
        other, low = saved
        # A matmul with a wide result is differentiated in the dtype of its operands, as in
        # `_core._wide_dot`.
        wide = equation.params["preferred_element_type"] is not None
        narrow = {"preferred_element_type": low.dtype} if wide else {}
        cotangent = cotangent.astype(low.dtype)

        def of_other(other: Array) -> Array:
            return call(other, low, **narrow)

        def d_low(other: Array, cotangent: Array) -> tuple[Array]:
            of_low = lambda low: call(other, low, **narrow)
            return jax.linear_transpose(of_low, low)(cotangent)

        (d_other,) = jax.linear_transpose(of_other, other)(cotangent)
        closed = jax.make_jaxpr(d_low)(other, cotangent)
        (d_carrier,) = run_in_fp32(closed, [other, cotangent], [True])
        return d_other, None, d_carrier

    matmul.defvjp(matmul_fwd, matmul_bwd)
    return matmul(other, copy.low, copy.carrier)


_COPY_RULES: dict[str, Callable[[JaxprEqn, list[Value]], Value | None]] = {
    "name": _name,
    **dict.fromkeys(_MERGES, _merge),
    **dict.fromkeys(MATMULS, _matmul),
}


# ---------------------------------------------------------------------------
# Operations with a special rule
# ---------------------------------------------------------------------------


def _convert(equation: JaxprEqn, operands: list[Value]) -> list[Value]:
    (operand,), dtype = operands, equation.params["new_dtype"]
    if not jnp.issubdtype(dtype, jnp.floating):
        return list(bound(equation, operands))
    if isinstance(operand, Copy):
        converted = bind(equation, [operand.low])
        if is_16bit(dtype):
            return [Copy(converted, operand.carrier)]
        return [Weight(attached(converted, operand.carrier))]
    array = as_array(operand)
    converted = bind(equation, [array])
    if is_16bit(dtype) and array.dtype == FLOAT32:
        return [copy_of(array, converted)]
    return [computed_weight(converted)]


def _custom_derivative(equation: JaxprEqn, operands: list[Value]) -> list[Value]:
    """Runs a `custom_vjp` or `custom_jvp` function; gradients of copies are not rounded."""
    copies = {index for index, operand in enumerate(operands) if isinstance(operand, Copy)}
    if not copies:
        return list(bound(equation, operands))
    arrays = [v.low if isinstance(v, Copy) else as_array(v) for v in operands]
    carriers = [v.carrier for v in operands if isinstance(v, Copy)]

    def forward(*arrays: Array) -> list[Array]:
        return results_of(equation, bind(equation, list(arrays)))

    @jax.custom_vjp
    def call(arrays: list[Array], carriers: list[Array]) -> list[Array]:
        return forward(*arrays)

    def call_fwd(arrays: list[Array], carriers: list[Array]) -> Any:
        return jax.vjp(forward, *arrays)

    def call_bwd(backward: PyTree, cotangents: list[Array]) -> Any:
        saved, structure = jax.tree.flatten((backward, cotangents))
        floating: list[int] = []

        def gradients(*saved: Array) -> list[Array]:
            backward, cotangents = structure.unflatten(saved)
            results = backward(cotangents)
            # The gradients of integers have the dtype float0.
            floating[:] = [n for n, g in enumerate(results) if g.dtype != jax.dtypes.float0]
            return [results[n] for n in floating]

        closed = jax.make_jaxpr(gradients)(*saved)
        results = run_in_fp32(closed, saved, [n in copies for n in floating])
        by_operand = dict(zip(floating, results, strict=True))
        narrow = [None if n in copies else by_operand.get(n) for n in range(len(arrays))]
        return narrow, [by_operand[n] for n in sorted(copies)]

    call.defvjp(call_fwd, call_bwd)
    return list(call(arrays, carriers))


def _call(equation: JaxprEqn, operands: list[Value]) -> list[Value]:
    """Inlines the jaxpr of a jitted function."""
    jaxpr, consts = jaxpr_body(equation.params["jaxpr"])
    return _run(jaxpr, consts, operands)


def _remat(equation: JaxprEqn, operands: list[Value]) -> list[Value]:
    params = equation.params
    jaxpr, consts = jaxpr_body(params["jaxpr"])
    leaves, structure = jax.tree.flatten(operands)

    def run_leaves(*leaves: Array) -> list[Array]:
        return list(map(as_array, _run(jaxpr, consts, structure.unflatten(leaves))))

    prevent_cse, policy = params["prevent_cse"], params["policy"]
    return list(jax.checkpoint(run_leaves, prevent_cse=prevent_cse, policy=policy)(*leaves))


def _scan(equation: JaxprEqn, operands: list[Value]) -> list[Value]:
    """Runs a scan. Its body does not treat carried arrays as weights."""
    params = equation.params
    num_consts, num_carry = scan_counts(params)
    jaxpr, closed_consts = jaxpr_body(params["jaxpr"])
    consts = operands[:num_consts]
    init = list(map(as_array, operands[num_consts : num_consts + num_carry]))
    leaves, structure = jax.tree.flatten(operands[num_consts + num_carry :])

    def body(carry: list[Array], leaves: list[Array]) -> tuple[list[Array], list[Array]]:
        args = [*consts, *carry, *structure.unflatten(leaves)]
        arrays = list(map(as_array, _run(jaxpr, closed_consts, args)))
        return arrays[:num_carry], arrays[num_carry:]

    carry, stacked = lax.scan(
        body,
        init,
        leaves,
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
        _split_transpose=params.get("_split_transpose", False),
    )
    return [*carry, *stacked]


def _cond(equation: JaxprEqn, operands: list[Value]) -> list[Value]:
    index, *rest = operands
    leaves, structure = jax.tree.flatten(rest)

    def branch(closed: ClosedJaxpr) -> Callable[..., list[Array]]:
        jaxpr, consts = jaxpr_body(closed)
        return lambda *leaves: list(map(as_array, _run(jaxpr, consts, structure.unflatten(leaves))))

    branches = list(map(branch, equation.params["branches"]))
    return list(lax.switch(as_array(index), branches, *leaves))


def _shard_map(equation: JaxprEqn, operands: list[Value]) -> list[Value]:
    params = equation.params
    jaxpr, consts = jaxpr_body(params["jaxpr"])
    leaves, structure = jax.tree.flatten(operands)
    specs = [
        spec
        for operand, spec in zip(operands, params["in_specs"], strict=True)
        for _ in jax.tree.leaves(operand)
    ]

    def shard(*leaves: Array) -> tuple[Array, ...]:
        return tuple(map(as_array, _run(jaxpr, consts, structure.unflatten(leaves))))

    return list(
        jax.shard_map(
            shard,
            mesh=params["mesh"],
            in_specs=tuple(specs),
            out_specs=tuple(params["out_specs"]),
            check_vma=params["check_vma"],
            axis_names=params["newly_manual_axes"],
        )(*leaves)
    )


_RULES: dict[str, Callable[[JaxprEqn, list[Value]], list[Value]]] = {
    "checkpoint": _remat,
    "cond": _cond,
    "convert_element_type": _convert,
    "custom_jvp_call": _custom_derivative,
    "custom_vjp_call": _custom_derivative,
    "remat2": _remat,
    "scan": _scan,
    "shard_map": _shard_map,
    **dict.fromkeys(CALLS, _call),
}
