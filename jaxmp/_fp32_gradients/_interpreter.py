"""Interpreter that runs a traced function with the gradients of its parameters in FP32."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jax.sharding import NamedSharding

from jaxmp._core._compat import jaxpr_body, scan_counts
from jaxmp._core._dtypes import FLOAT32, is_16bit
from jaxmp._core._replay import as_recorded, bind
from jaxmp._core._typing import Array, PyTree
from jaxmp._fp32_gradients._backward import MATMULS, MOVES, is_16bit_aval, run_in_fp32
from jaxmp._fp32_gradients._layout import (
    CALLS,
    ELEMENTWISE,
    REDUCTIONS,
    Layout,
    Saved,
    batch_axes,
    gathered,
    run_gathered,
    split,
)
from jaxmp._fp32_gradients._values import (
    Constant,
    Copy,
    Rows,
    Value,
    Weight,
    as_array,
    attached,
    bound,
    computed_weight,
    copy_of,
    entered,
    results_of,
)

# Operations that broadcast dimensions of size 1. The gradient of such an operand is a sum.
_BROADCASTING = frozenset({"add", "add_any", "div", "max", "min", "mul", "sub"})

# Operations that move the elements of several operands, and arithmetic.
_MERGES = frozenset(
    {"add", "concatenate", "div", "dynamic_update_slice", "mul", "neg", "pad", "select_n", "stack"}
    | {"sub"}
)


def run(
    closed: ClosedJaxpr, args: list[Array], is_param: list[bool], *, regather: bool
) -> list[Array]:
    """Runs a traced function so that the gradients of its parameters are computed in FP32.

    Args:
      closed: the traced function.
      args: its arguments; those parameters that it takes in 16 bits are given in FP32.
      is_param: for each argument, True for a parameter.
      regather: gather weights again in the backward pass, instead of keeping them.

    Returns:
      The results of the function.
    """
    jaxpr, consts = jaxpr_body(closed)
    layout = Layout(batch_axes=batch_axes(closed, is_param), again=regather)
    values: list[Value] = []
    for var, arg, differentiated in zip(jaxpr.invars, args, is_param, strict=True):
        if differentiated and is_16bit_aval(var.aval):
            values.append(copy_of(arg, lax.convert_element_type(arg, var.aval.dtype), layout))
        else:
            values.append(Weight(arg, layout) if differentiated else arg)
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
    name = equation.primitive.name
    if name == "convert_element_type" and isinstance(operands[0], Rows):
        return [_narrowed_rows(operands[0], equation)]
    if not any(isinstance(operand, (Weight, Copy)) for operand in operands):
        return list(bound(equation, operands))
    if name in _RULES:
        return _RULES[name](equation, operands)
    copies = [isinstance(operand, Copy) for operand in operands]
    if any(copies):
        if name in MOVES and copies[0]:
            return _move(equation, operands)
        if name in REDUCTIONS:
            operands = [v._replace(layout=None) if isinstance(v, Copy) else v for v in operands]
        if name in _BROADCASTING:
            operands = [_broadcast(operand, equation) for operand in operands]
        if name in _COPY_RULES:
            result = _COPY_RULES[name](equation, operands)
            if result is not None:
                return [result]
    results = bound(equation, operands)
    if name in MOVES and isinstance(operands[0], Weight):
        return _moved_weight(equation, operands[0], operands[1:], results)
    if all(isinstance(operand, (Weight, Copy, Constant)) for operand in operands):
        return list(map(computed_weight, results))
    return list(results)


def _moved_weight(
    equation: JaxprEqn, weight: Weight, rest: list[Value], results: list[Array]
) -> list[Value]:
    """Returns moved elements of a weight, which a cast to 16 bits may gather after the cast."""
    if any(isinstance(operand, Copy) for operand in rest):
        return list(results)
    gathers = equation.primitive.name in ("all_gather", "reshard")
    is_split = weight.layout is not None and weight.layout.is_split
    is_weight = all(isinstance(operand, (Weight, Constant)) for operand in rest)
    if len(results) > 1 or not (gathers or is_split or weight.origin):
        return [Weight(result, weight.layout) for result in results] if is_weight else [*results]
    origin = weight, equation, rest
    return [Weight(results[0], None, origin) if is_weight else Rows(results[0], origin)]


# ---------------------------------------------------------------------------
# Operations with copies
# ---------------------------------------------------------------------------


def _move(equation: JaxprEqn, operands: list[Value]) -> list[Value]:
    """Moves the elements of a copy and of its carrier."""
    copy, *rest = operands
    assert isinstance(copy, Copy)
    others = list(map(as_array, rest))
    layout = None if copy.layout is None else copy.layout.moved(equation)
    low = results_of(equation, bind(equation, [copy.whole if layout is None else copy.low, *others]))
    carrier = results_of(equation, bind(equation, [copy.carrier, *others]))
    return [Copy(*pair, layout) for pair in zip(low, carrier, strict=True)]


def _constrain(equation: JaxprEqn, operands: list[Value]) -> list[Value]:
    """Applies a sharding constraint. That of a parameter is its sharding."""
    (value,), sharding = operands, equation.params["sharding"]
    if not isinstance(value, (Weight, Copy)) or value.layout is None:
        return _move(equation, operands) if isinstance(value, Copy) else _bind_weight(equation, value)
    if not isinstance(sharding, NamedSharding) or equation.params["unconstrained_dims"]:
        return _move(equation, operands) if isinstance(value, Copy) else _bind_weight(equation, value)
    ndim = len(equation.outvars[0].aval.shape)
    layout = value.layout.constrained(sharding, ndim)
    if layout.stored == value.layout.stored:
        # Matmuls read the weight in this sharding, after it was cast.
        if isinstance(value, Copy):
            return [value._replace(layout=layout)]
        if layout != value.layout:
            (array,) = bound(equation, operands)
            return [Weight(array, None, (value, equation, []))]
    if isinstance(value, Copy):
        low, carrier = (bind(equation, [array]) for array in (value.low, value.carrier))
        return [Copy(low, carrier, layout)]
    (array,) = bound(equation, operands)
    return [Weight(array, layout)]


def _bind_weight(equation: JaxprEqn, value: Value) -> list[Value]:
    (array,) = bound(equation, [value])
    return [Weight(array, None, value.origin)] if isinstance(value, Weight) else [array]


def _reshard(equation: JaxprEqn, operands: list[Value]) -> list[Value]:
    """Moves a weight to another sharding of explicit mesh axes, after it was cast."""
    (value,), sharding = operands, equation.params["dst_sharding"]
    if isinstance(value, Weight):
        return _moved_weight(equation, value, [], bound(equation, operands))
    if not isinstance(value, Copy) or value.layout is None or value.layout.is_split:
        return _move(equation, operands) if isinstance(value, Copy) else bound(equation, operands)
    stored = jax.typeof(value.low).sharding
    carrier = bind(equation, [value.carrier])
    layout = dataclasses.replace(value.layout, stored=stored, gathered=sharding)
    return [Copy(value.low, carrier, layout)]


def _broadcast(value: Value, equation: JaxprEqn) -> Value:
    """Broadcasts a copy to the shape of the result, so that its gradient is summed in FP32."""
    aval: Any = equation.outvars[0].aval
    if not isinstance(value, Copy) or value.low.shape == aval.shape:
        return value
    axes = range(len(aval.shape))
    sharding = aval.sharding if any(aval.sharding.spec) else None
    low, carrier = (
        lax.broadcast_in_dim(array, aval.shape, axes, out_sharding=sharding)
        for array in (value.whole, value.carrier)
    )
    return Copy(low, carrier)


def _merge(equation: JaxprEqn, operands: list[Value]) -> Value | None:
    """Runs an operation on copies and constants alone, and on their carriers.

    Examples are the parts of a matrix, the rows of a table and NaN, and a matrix and its scale.
    """
    layout = _common_layout(equation, operands)
    low, wide = [], []
    for operand, var in zip(operands, equation.invars, strict=True):
        if isinstance(operand, Copy):
            array = operand.whole if layout is None else operand.low
        else:
            array = as_array(operand)
        low.append(array)
        if not is_16bit_aval(var.aval):
            wide.append(array)
        elif isinstance(operand, Copy):
            wide.append(operand.carrier)
        elif isinstance(operand, Constant):
            wide.append(jnp.asarray(array).astype(FLOAT32))
        else:
            return None
    return Copy(bind(equation, low), bind(equation, wide), layout)


def _common_layout(equation: JaxprEqn, operands: list[Value]) -> Layout | None:
    """Returns the layout of the result of an operation on copies; None if they must be gathered."""
    layouts = {operand.layout for operand in operands if isinstance(operand, Copy)}
    if len(layouts) > 1 or equation.primitive.name not in ELEMENTWISE:
        return None
    return layouts.pop()


def _name(equation: JaxprEqn, operands: list[Value]) -> Value | None:
    """Names a copy for the policies of `jax.checkpoint`."""
    (copy,) = operands
    assert isinstance(copy, Copy)
    return Copy(bind(equation, [copy.low]), copy.carrier, copy.layout)


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

    layout = copy.layout
    again = layout is not None and layout.is_split and layout.again

    @jax.custom_vjp
    def matmul(other: Array, low: Array, carrier: Array) -> Array:
        return call(other, gathered(low, layout))

    def matmul_fwd(other: Array, low: Array, carrier: Array) -> Any:
        whole = gathered(low, layout)
        return call(other, whole), (other, low if again else whole)

    def matmul_bwd(saved: tuple[Array, Array], cotangent: Array) -> Any:
        other, low = saved
        if again:
            # The barrier prevents XLA from keeping the array that the forward pass gathered.
            low = gathered(lax.optimization_barrier(low), layout)
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
        return d_other, None, split(d_carrier, layout)

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
            return [Copy(converted, operand.carrier, operand.layout)]
        return [Weight(attached(converted, operand.carrier), operand.layout)]
    array = as_array(operand)
    if is_16bit(dtype) and array.dtype == FLOAT32:
        if isinstance(operand, Weight):
            return [_narrowed(operand, dtype)]
        return [copy_of(array, bind(equation, [array]))]
    return [computed_weight(bind(equation, [array]))]


def _narrowed_rows(rows: Rows, equation: JaxprEqn) -> Array:
    """Returns rows of the 16-bit copy of a table, which is gathered in 16 bits."""
    dtype = equation.params["new_dtype"]
    if not is_16bit(dtype):
        return bind(equation, [rows.array])
    return as_array(_narrowed(Weight(rows.array, None, rows.origin), dtype))


def _narrowed(weight: Weight, dtype: np.dtype) -> Value:
    """Returns the 16-bit copy of a weight: the weight is cast, and then moved and gathered."""
    if weight.origin is None:
        low = lax.convert_element_type(weight.array, dtype)
        return copy_of(weight.array, low, weight.layout)
    source, equation, rest = weight.origin
    (result,) = _equation(equation, [_narrowed(source, dtype), *rest])
    return result


def _custom_derivative(equation: JaxprEqn, operands: list[Value]) -> list[Value]:
    """Runs a `custom_vjp` or `custom_jvp` function; gradients of copies are not rounded."""
    copies = {index for index, operand in enumerate(operands) if isinstance(operand, Copy)}
    if not copies:
        return list(bound(equation, operands))
    arrays = [v.low if isinstance(v, Copy) else as_array(v) for v in operands]
    carriers = [v.carrier for v in operands if isinstance(v, Copy)]
    layouts = [v.layout if isinstance(v, Copy) else None for v in operands]
    is_split = [layout is not None and layout.is_split for layout in layouts]

    def forward(*arrays: Array) -> list[Array]:
        return results_of(equation, bind(equation, list(arrays)))

    @jax.custom_vjp
    def call(arrays: list[Array], carriers: list[Array]) -> list[Array]:
        return forward(*map(gathered, arrays, layouts))

    def call_fwd(arrays: list[Array], carriers: list[Array]) -> Any:
        if not any(is_split):
            return jax.vjp(forward, *arrays)
        return _gathered_vjp(forward, arrays, layouts)

    def call_bwd(backward: PyTree, cotangents: list[Array]) -> Any:
        kept, structure = jax.tree.flatten((backward, cotangents), is_leaf=_is_saved)
        saved = [leaf.array if _is_saved(leaf) else leaf for leaf in kept]
        floating: list[int] = []

        def gradients(*saved: Array) -> list[Array]:
            backward, cotangents = structure.unflatten(saved)
            results = backward(cotangents)
            # The gradients of integers have the dtype float0.
            floating[:] = [n for n, g in enumerate(results) if g.dtype != jax.dtypes.float0]
            return [results[n] for n in floating]

        closed = jax.make_jaxpr(gradients)(*saved)
        if any(map(_is_saved, kept)):
            marks = [leaf.layout if _is_saved(leaf) else None for leaf in kept]
            saved = [
                lax.optimization_barrier(array) if mark is not None and mark.again else array
                for array, mark in zip(saved, marks, strict=True)
            ]
            closed = jax.make_jaxpr(lambda *saved: _all_gathered(closed, saved, marks))(*saved)
        results = run_in_fp32(closed, saved, [n in copies for n in floating])
        by_operand = dict(zip(floating, results, strict=True))
        narrow = [None if n in copies else by_operand.get(n) for n in range(len(arrays))]
        return narrow, [split(by_operand[n], layouts[n]) for n in sorted(copies)]

    call.defvjp(call_fwd, call_bwd)
    return list(call(arrays, carriers))


def _gathered_vjp(
    forward: Callable[..., list[Array]], arrays: list[Array], layouts: list[Layout | None]
) -> tuple[list[Array], PyTree]:
    """Returns `jax.vjp(forward, *arrays)`; weights are gathered where `forward` reads them.

    In the function of the backward pass, arrays that have not been gathered are of type `Saved`.
    """
    structure: Any = None

    def with_backward(*arrays: Array) -> list[Array]:
        nonlocal structure
        leaves, structure = jax.tree.flatten(jax.vjp(forward, *arrays))
        return leaves

    closed = jax.make_jaxpr(with_backward)(*arrays)
    results, marks = run_gathered(closed, arrays, layouts)
    leaves = [
        array if mark is None else Saved(array, mark)
        for array, mark in zip(results, marks, strict=True)
    ]
    return structure.unflatten(leaves)


def _all_gathered(
    closed: ClosedJaxpr, args: Sequence[Array], layouts: list[Layout | None]
) -> list[Array]:
    results, marks = run_gathered(closed, args, layouts)
    return list(map(gathered, results, marks))


def _is_saved(leaf: object) -> TypeGuard[Saved]:
    return isinstance(leaf, Saved)


def _call(equation: JaxprEqn, operands: list[Value]) -> list[Value]:
    """Inlines the jaxpr of a jitted function."""
    jaxpr, consts = jaxpr_body(equation.params["jaxpr"])
    return _run(jaxpr, consts, operands)


def _remat(equation: JaxprEqn, operands: list[Value]) -> list[Value]:
    params = equation.params
    jaxpr, consts = jaxpr_body(params["jaxpr"])
    operands = [entered(operand, is_recomputed=True) for operand in operands]
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
    scanned = [entered(v, is_scanned=True) for v in operands[num_consts + num_carry :]]
    leaves, structure = jax.tree.flatten(scanned)

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
    leaves, structure = jax.tree.flatten(list(map(entered, rest)))

    def branch(closed: ClosedJaxpr) -> Callable[..., list[Array]]:
        jaxpr, consts = jaxpr_body(closed)
        return lambda *leaves: list(map(as_array, _run(jaxpr, consts, structure.unflatten(leaves))))

    branches = list(map(branch, equation.params["branches"]))
    return list(lax.switch(as_array(index), branches, *leaves))


def _shard_map(equation: JaxprEqn, operands: list[Value]) -> list[Value]:
    params = equation.params
    jaxpr, consts = jaxpr_body(params["jaxpr"])
    operands = [Weight(v.array) if isinstance(v, Weight) else v for v in map(entered, operands)]
    operands = [Copy(v.low, v.carrier) if isinstance(v, Copy) else v for v in operands]
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
    "reshard": _reshard,
    "scan": _scan,
    "shard_map": _shard_map,
    "sharding_constraint": _constrain,
    **dict.fromkeys(CALLS, _call),
}
