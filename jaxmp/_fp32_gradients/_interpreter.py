"""Interpreter that runs a traced function with the gradients of its parameters in FP32."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jax.sharding import NamedSharding

from jaxmp._core._compat import jaxpr_body, scan_counts
from jaxmp._core._dtypes import FLOAT32, is_16bit
from jaxmp._core._programs._bind import as_recorded, bind
from jaxmp._core._programs._constructs import CALLS, REMATS, call_of
from jaxmp._core._typing import Array
from jaxmp._fp32_gradients._backward import MATMULS, MOVES, is_16bit_aval
from jaxmp._fp32_gradients._derivatives import run_custom_derivative, run_matmul
from jaxmp._fp32_gradients._equations import forwarded, quantizes
from jaxmp._fp32_gradients._layout import (
    ELEMENTWISE,
    REDUCTIONS,
    Layout,
    batch_axes,
)
from jaxmp._fp32_gradients._values import (
    Constant,
    Copy,
    Repeated,
    Rows,
    Value,
    Weight,
    as_array,
    attached,
    bound,
    computed_weight,
    copy_of,
    entered,
    left,
    results_of,
)

# Operations that broadcast dimensions of size 1. The gradient of such an operand is a sum.
_BROADCASTING = frozenset({"add", "add_any", "div", "max", "min", "mul", "sub"})

# Operations that move the elements of several operands, and arithmetic.
_MERGES = frozenset(
    {"add", "concatenate", "div", "dynamic_update_slice", "mul", "neg", "pad", "select_n", "stack"}
    | {"sub"}
)


# Operations for which rows of a table remain a copy: they may be weights that data selects.
_OF_ROWS = (
    MOVES
    | MATMULS
    | CALLS
    | REMATS
    | {"cond", "convert_element_type", "name", "sharding_constraint"}
)


def run(
    closed: ClosedJaxpr, args: list[Array], is_param: list[bool], *, regather: bool
) -> list[Array]:
    """Runs a traced function so that the gradients of its parameters are computed in FP32.

    Args:
      closed: the traced function.
      args: its arguments; parameters that it accepts in 16 bits are passed in FP32.
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
    if name not in _OF_ROWS:
        # Rows that are used otherwise are activations.
        operands = [as_array(v) if _is_selected(v) else v for v in operands]
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
    return left(results, operands)


def _moved_weight(
    equation: JaxprEqn, weight: Weight, rest: list[Value], results: list[Array]
) -> list[Value]:
    """Returns moved elements of a weight, which a cast to 16 bits may gather after the cast."""
    if any(isinstance(operand, Copy) for operand in rest):
        return list(results)
    gathers = equation.primitive.name in ("all_gather", "reshard")
    is_split = weight.layout is not None and weight.layout.is_split
    is_weight = equation.primitive.name == "dynamic_slice" or not any(map(_is_data, rest))
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
    low = results_of(
        equation, bind(equation, [copy.whole if layout is None else copy.low, *others])
    )
    carrier = results_of(equation, bind(equation, [copy.carrier, *others]))
    is_selected = equation.primitive.name == "gather" and any(map(_is_data, rest))
    rows = () if is_selected else copy.rows
    repeats = equation.primitive.name == "broadcast_in_dim" and low[0].size > copy.low.size
    kind = Repeated if repeats else type(copy)
    return [kind(*pair, layout, rows) for pair in zip(low, carrier, strict=True)]


def _is_selected(value: Value) -> bool:
    return isinstance(value, Copy) and value.rows == ()


def _is_data(value: Value) -> bool:
    return not isinstance(value, (Weight, Copy, Constant))


def _constrain(equation: JaxprEqn, operands: list[Value]) -> list[Value]:
    """Applies a sharding constraint. That of a parameter is its sharding."""
    (value,), params = operands, equation.params
    sharding = params["sharding"]
    if not isinstance(value, (Weight, Copy)):
        return list(bound(equation, operands))
    is_spec = isinstance(sharding, NamedSharding) and not params["unconstrained_dims"]
    if value.layout is None or not is_spec:
        if isinstance(value, Copy):
            return _move(equation, operands)
        return [value._replace(array=bound(equation, operands)[0])]
    layout = value.layout.constrained(sharding, as_array(value._replace(layout=None)).ndim)
    if layout.stored == value.layout.stored:
        # Matmuls read the weight in this sharding, after it was cast.
        if isinstance(value, Copy):
            return [value._replace(layout=layout)]
        if layout != value.layout:
            return [Weight(bound(equation, operands)[0], None, (value, equation, []))]
    if isinstance(value, Copy):
        low, carrier = (bind(equation, [array]) for array in (value.low, value.carrier))
        return [Copy(low, carrier, layout, value.rows)]
    return [Weight(bound(equation, operands)[0], layout)]


def _reshard(equation: JaxprEqn, operands: list[Value]) -> list[Value]:
    """Moves a weight to another sharding of explicit mesh axes, after it was cast."""
    (value,), sharding = operands, equation.params["dst_sharding"]
    stored = jax.typeof(value.low if isinstance(value, Copy) else as_array(value)).sharding
    if stored.mesh != sharding.mesh:
        # Functions of `auto_axes` enter a mesh with automatic axes, where they read the weight.
        if isinstance(value, Copy):
            return _move(equation, [value._replace(layout=None)])
        return [Weight(array) for array in bound(equation, operands)]
    if isinstance(value, Weight):
        return _moved_weight(equation, value, [], bound(equation, operands))
    if not isinstance(value, Copy) or value.layout is None or value.layout.is_split:
        return (
            _move(equation, operands) if isinstance(value, Copy) else [*bound(equation, operands)]
        )
    carrier = bind(equation, [value.carrier])
    layout = dataclasses.replace(value.layout, stored=stored, gathered=sharding)
    return [Copy(value.low, carrier, layout)]


def _broadcast(value: Value, equation: JaxprEqn) -> Value:
    """Broadcasts a copy to the shape of the result, so that its gradient is summed in FP32."""
    aval: Any = equation.outvars[0].aval
    if not isinstance(value, Copy) or value.low.shape == aval.shape:
        return value
    # Arithmetic also accepts a scalar beside an array.
    axes = range(len(aval.shape)) if value.low.ndim else ()
    sharding = aval.sharding if any(aval.sharding.spec) else None
    low, carrier = (
        lax.broadcast_in_dim(array, aval.shape, axes, out_sharding=sharding)
        for array in (value.whole, value.carrier)
    )
    return Repeated(low, carrier)


def _merge(equation: JaxprEqn, operands: list[Value]) -> Value | None:
    """Runs an operation on copies and constants, and on their carriers.

    Examples are the parts of a matrix, the rows of a table and NaN, a matrix and its scale, and a
    matrix and a mask from data.
    """
    layout = _common_layout(equation, operands)
    kinds = {type(operand) for operand in operands if isinstance(operand, Copy)}
    kind = Repeated if kinds == {Repeated} else Copy
    is_masked = kind is Copy and equation.primitive.name in ELEMENTWISE
    rows = None
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
        elif isinstance(operand, Constant) or is_masked:
            wide.append(jnp.asarray(array).astype(FLOAT32))
            rows = rows if isinstance(operand, Constant) else ()
        else:
            return None
    return kind(bind(equation, low), bind(equation, wide), layout, rows)


def _common_layout(equation: JaxprEqn, operands: list[Value]) -> Layout | None:
    """Returns the layout of the result of an operation on copies; None if they must be gathered."""
    layouts = {operand.layout for operand in operands if isinstance(operand, Copy)}
    if len(layouts) > 1 or equation.primitive.name not in ELEMENTWISE:
        return None
    (layout,) = layouts
    # On explicit axes, data has the sharding of a gathered weight.
    is_gathered = layout is not None and layout.is_explicit and any(map(_is_data, operands))
    return None if is_gathered else layout


def _name(equation: JaxprEqn, operands: list[Value]) -> Value | None:
    """Names a copy for the policies of `jax.checkpoint`."""
    (copy,) = operands
    assert isinstance(copy, Copy)
    return Copy(bind(equation, [copy.low]), copy.carrier, copy.layout, copy.rows)


_COPY_RULES: dict[str, Callable[[JaxprEqn, list[Value]], Value | None]] = {
    "name": _name,
    **dict.fromkeys(_MERGES, _merge),
    **dict.fromkeys(MATMULS, run_matmul),
}


# ---------------------------------------------------------------------------
# Operations with a special rule
# ---------------------------------------------------------------------------


def _convert(equation: JaxprEqn, operands: list[Value]) -> list[Value]:
    (operand,), dtype = operands, equation.params["new_dtype"]
    if not jnp.issubdtype(dtype, jnp.floating):
        return list(bound(equation, operands))
    if isinstance(operand, Copy):
        if operand.rows == () and not is_16bit(dtype):
            return list(bound(equation, operands))
        converted = bind(equation, [operand.low])
        if is_16bit(dtype):
            return [operand._replace(low=converted)]
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
    """Runs a function with its own derivative. One that quantizes gathers weights in FP8."""
    if any(map(_is_gathered_later, operands)) and quantizes(equation):
        operands = [
            _narrowed(v, FLOAT32) if isinstance(v, Weight) and _is_gathered_later(v) else v
            for v in operands
        ]
    return run_custom_derivative(equation, operands)


def _is_gathered_later(value: Value) -> bool:
    """Returns True for an FP32 weight that is split, or was gathered before it is read."""
    if not isinstance(value, Weight) or value.array.dtype != FLOAT32:
        return False
    return value.origin is not None or (value.layout is not None and value.layout.is_split)


def _call(equation: JaxprEqn, operands: list[Value]) -> list[Value]:
    """Inlines the jaxpr of a jitted function."""
    jaxpr, consts = jaxpr_body(call_of(equation).jaxpr)
    return _run(jaxpr, consts, operands)


def _remat(equation: JaxprEqn, operands: list[Value]) -> list[Value]:
    params = equation.params
    jaxpr, consts = jaxpr_body(params["jaxpr"])
    inside = [entered(operand, is_recomputed=True) for operand in operands]
    leaves, structure = jax.tree.flatten(inside)

    def run_leaves(*leaves: Array) -> list[Value]:
        return left(_run(jaxpr, consts, structure.unflatten(leaves)), operands)

    prevent_cse, policy = params["prevent_cse"], params["policy"]
    results = jax.checkpoint(run_leaves, prevent_cse=prevent_cse, policy=policy)(*leaves)
    return [
        result if index is None else operands[index]
        for result, index in zip(results, forwarded(jaxpr), strict=True)
    ]


def _scan(equation: JaxprEqn, operands: list[Value]) -> list[Value]:
    """Runs a scan. Carried arrays are weights if it has no other operands."""
    params = equation.params
    num_consts, num_carry = scan_counts(params)
    jaxpr, closed_consts = jaxpr_body(params["jaxpr"])
    consts = operands[:num_consts]
    init = left(operands[num_consts : num_consts + num_carry], operands)
    scanned = [entered(v, is_scanned=True) for v in operands[num_consts + num_carry :]]
    leaves, structure = jax.tree.flatten(scanned)

    def body(carry: list[Value], leaves: list[Array]) -> tuple[list[Value], list[Value]]:
        args = [*consts, *carry, *structure.unflatten(leaves)]
        results = left(_run(jaxpr, closed_consts, args), operands)
        return results[:num_carry], results[num_carry:]

    carry, stacked = lax.scan(
        body,
        init,
        leaves,
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
        _split_transpose=params.get("_split_transpose", False),
    )
    # NNX returns all Variables of the modules that it scans. Otherwise, XLA would copy weights, and
    # might split the copies over devices.
    xs = dict(enumerate(operands[num_consts + num_carry :], num_consts + num_carry))
    returned = forwarded(jaxpr)[num_carry:]
    ys = (
        array if index is None else xs.get(index, array)
        for array, index in zip(stacked, returned, strict=True)
    )
    return [*carry, *ys]


def _cond(equation: JaxprEqn, operands: list[Value]) -> list[Value]:
    # Data may choose between weights.
    index, *rest = operands
    leaves, structure = jax.tree.flatten(list(map(entered, rest)))

    def branch(closed: ClosedJaxpr) -> Callable[..., list[Value]]:
        jaxpr, consts = jaxpr_body(closed)
        return lambda *leaves: left(_run(jaxpr, consts, structure.unflatten(leaves)), rest)

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

    results = jax.shard_map(
        shard,
        mesh=params["mesh"],
        in_specs=tuple(specs),
        out_specs=tuple(params["out_specs"]),
        check_vma=params["check_vma"],
        axis_names=params["newly_manual_axes"],
    )(*leaves)
    return left(results, operands)


_RULES: dict[str, Callable[[JaxprEqn, list[Value]], list[Value]]] = {
    "cond": _cond,
    "convert_element_type": _convert,
    "custom_jvp_call": run_custom_derivative,
    "custom_vjp_call": _custom_derivative,
    "reshard": _reshard,
    "scan": _scan,
    "shard_map": _shard_map,
    "sharding_constraint": _constrain,
    **dict.fromkeys(CALLS, _call),
    **dict.fromkeys(REMATS, _remat),
}
