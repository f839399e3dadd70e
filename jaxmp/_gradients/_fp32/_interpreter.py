"""Interpreter that runs a traced function with the gradients of its parameters in FP32."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from jaxmp import _core, _programs
from jaxmp._core import Array, _compat
from jaxmp._gradients._fp32._derivatives import (
    MATMULS,
    MOVES,
    is_16bit_aval,
    run_custom_derivative,
    run_matmul,
)
from jaxmp._gradients._fp32._layout import (
    ELEMENTWISE,
    REDUCTIONS,
    WeightLayout,
    batch_axes,
    quantizes,
)
from jaxmp._gradients._fp32._values import (
    Constant,
    Copy,
    Repeated,
    Rows,
    Selected,
    Value,
    Weight,
    are_weights,
    as_array,
    attached,
    bound,
    computed_weight,
    copy_of,
    entered,
    left,
)
from jaxmp._programs import Entry, Form, Frame, Interpreter

# Operations that broadcast dimensions of size 1. The gradient of such an operand is a sum.
_BROADCASTING = frozenset({"add", "add_any", "div", "max", "min", "mul", "sub"})

# Operations that move the elements of several operands, and arithmetic.
_MERGES = _core.named("add concatenate div dynamic_update_slice mul neg pad select_n stack sub")

# Functions of single elements.
_FUNCTIONS = _core.named(
    "abs acos acosh asin asinh atan atan2 atanh cbrt clamp cos cosh digamma erf erf_inv erfc exp"
    " exp2 expm1 integer_pow lgamma log log1p logistic pow rsqrt sin sinh sqrt square tan tanh"
)

# Constructs that the interpreter enters, if they read weights.
_ENTERED = {Form.CALL, Form.REMAT, Form.BRANCH, Form.SCAN, Form.SHARDS}

# Operations for which selected rows remain a copy: they may be weights that data selects.
_OF_ROWS = (
    MOVES
    | MATMULS
    | _programs.CALLS
    | _programs.REMATS
    | _programs.BRANCHES
    | {"convert_element_type", "name", "sharding_constraint"}
)


def run(
    closed: _compat.ClosedJaxpr, args: list[Array], is_param: list[bool], *, regather: bool
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
    jaxpr, _ = _compat.jaxpr_body(closed)
    layout = WeightLayout(batch_axes=batch_axes(closed, is_param), again=regather)
    values: list[Value] = []
    for var, arg, differentiated in zip(jaxpr.invars, args, is_param, strict=True):
        if differentiated and is_16bit_aval(var.aval):
            values.append(copy_of(arg, var.aval.dtype, layout))
        else:
            values.append(Weight(arg, layout) if differentiated else arg)
    return list(map(as_array, _Gradients().run(closed, values)))


class _Gradients(Interpreter):
    """Interpreter whose values are weights, their copies, constants and other arrays."""

    consequence = (
        "the gradients of the weights that it reads are summed in the dtype of its matmuls"
    )

    def literal(self, var: _compat.Literal) -> Value:
        return Constant(var.val)

    def array(self, value: Value) -> Array:
        return as_array(value)

    def entered(self, values: list[Any], entry: Entry, operands: list[Any]) -> list[Any]:
        if entry is Entry.CALL:
            return values
        if entry is Entry.CARRY:
            return left(values, operands)
        return [entered(value, entry) for value in values]

    def left(self, results: list[Any], operands: list[Any]) -> list[Any]:
        return left(results, operands)

    def equation(self, equation: _compat.JaxprEqn, operands: list[Any], frame: Frame) -> list[Any]:
        name = equation.primitive.name
        if name not in _OF_ROWS:
            operands = [as_array(v) if isinstance(v, Selected) else v for v in operands]
        reads_weights = any(isinstance(operand, (Weight, Copy)) for operand in operands)
        form = _programs.form_of(equation)
        if reads_weights and form in _ENTERED:
            results = self.enter(equation, operands, frame)
            if form is Form.SHARDS:
                return left(results, self.entered(operands, Entry.SHARD, operands))
        else:
            if reads_weights:
                self.check_known(equation)
            results = _operation(equation, operands)
        # NNX returns all Variables of the modules that it scans. Otherwise, XLA would copy weights,
        # and might split the copies over devices.
        return _programs.with_returned(equation, operands, results)


def _operation(equation: _compat.JaxprEqn, operands: list[Value]) -> list[Value]:
    """Runs an equation that the interpreter does not enter."""
    name = equation.primitive.name
    rule = _RULES.get((name, _kind(name, operands)), _compute)
    return rule(equation, operands)


def _kind(name: str, operands: list[Value]) -> type | None:
    """Returns the class of values that decides how an operation is run; None: only data."""
    if all(isinstance(operand, Constant) for operand in operands):
        return Constant
    # Operands that follow the moved array are positions.
    decisive = operands[:1] if name in MOVES else operands
    kinds = (Copy, Weight, Rows)
    return next((kind for kind in kinds if any(isinstance(v, kind) for v in decisive)), None)


def _compute(equation: _compat.JaxprEqn, operands: list[Value]) -> list[Value]:
    """Runs an operation as it was recorded. A result of weights alone is a weight."""
    results = bound(equation, operands)
    if all(isinstance(operand, Constant) for operand in operands):
        return list(map(Constant, results))
    return left(results, operands)


# ---------------------------------------------------------------------------
# Operations with weights
# ---------------------------------------------------------------------------


def _move_weight(equation: _compat.JaxprEqn, operands: list[Value]) -> list[Value]:
    """Moves elements of a weight, which a cast to 16 bits may gather after the cast."""
    weight, *rest = operands
    assert isinstance(weight, Weight)
    results = bound(equation, operands)
    gathers = equation.primitive.name in ("all_gather", "reshard")
    is_split = weight.layout is not None and weight.layout.is_split
    is_weight = equation.primitive.name == "dynamic_slice" or not any(map(_is_data, rest))
    if len(results) > 1 or not (gathers or is_split or weight.origin):
        return [Weight(result, weight.layout) for result in results] if is_weight else [*results]
    origin = weight, equation, rest
    return [Weight(results[0], None, origin) if is_weight else Rows(results[0], origin)]


def _convert_weight(equation: _compat.JaxprEqn, operands: list[Value]) -> list[Value]:
    (weight,), dtype = operands, _programs.new_dtype_of(equation)
    assert isinstance(weight, Weight)
    if _core.is_16bit(dtype) and weight.array.dtype == _core.FLOAT32:
        return [_narrowed(weight, dtype)]
    return [computed_weight(result) for result in bound(equation, operands)]


def _convert_rows(equation: _compat.JaxprEqn, operands: list[Value]) -> list[Value]:
    """Returns rows of the 16-bit copy of a table, which is gathered in 16 bits."""
    (rows,), dtype = operands, _programs.new_dtype_of(equation)
    assert isinstance(rows, Rows)
    if not _core.is_16bit(dtype):
        return [*bound(equation, operands)]
    return [as_array(_narrowed(Weight(rows.array, None, rows.origin), dtype))]


def _narrowed(weight: Weight, dtype: np.dtype) -> Value:
    """Returns the 16-bit copy of a weight: the weight is cast, and then moved and gathered."""
    if weight.origin is None:
        return copy_of(weight.array, dtype, weight.layout)
    source, equation, rest = weight.origin
    (result,) = _operation(equation, [_narrowed(source, dtype), *rest])
    return result


def _custom_derivative(equation: _compat.JaxprEqn, operands: list[Value]) -> list[Value]:
    """Runs a function with its own derivative. One that quantizes gathers weights in FP8."""
    if any(map(_is_gathered_later, operands)) and quantizes(equation):
        operands = [
            _narrowed(v, _core.FLOAT32) if isinstance(v, Weight) and _is_gathered_later(v) else v
            for v in operands
        ]
    return run_custom_derivative(equation, operands)


def _is_gathered_later(value: Value) -> bool:
    """Returns True for an FP32 weight that is split, or was gathered before it is read."""
    if not isinstance(value, Weight) or value.array.dtype != _core.FLOAT32:
        return False
    return value.origin is not None or (value.layout is not None and value.layout.is_split)


# ---------------------------------------------------------------------------
# Operations with copies
# ---------------------------------------------------------------------------


def _move(equation: _compat.JaxprEqn, operands: list[Value]) -> list[Value]:
    """Moves the elements of a copy and of its carrier."""
    (copy, *rest), name = operands, equation.primitive.name
    assert isinstance(copy, Copy)
    others = list(map(as_array, rest))
    layout = None if copy.layout is None else copy.layout.moved(equation)
    array = copy.whole if layout is None else copy.low
    low, carrier = (_programs.bind_all(equation, [x, *others]) for x in (array, copy.carrier))
    kind = type(copy)
    if name == "gather" and any(map(_is_data, rest)):
        kind = Selected
    elif kind is Copy and name == "broadcast_in_dim" and low[0].size > copy.low.size:
        kind = Repeated
    return [kind(*pair, layout) for pair in zip(low, carrier, strict=True)]


def _is_data(value: Value) -> bool:
    return not isinstance(value, (Weight, Copy, Constant))


def _constrain(equation: _compat.JaxprEqn, operands: list[Value]) -> list[Value]:
    """Applies a sharding constraint. That of a parameter is its sharding."""
    (value,), sharding = operands, _programs.sharding_of_result(equation)
    assert isinstance(value, (Weight, Copy))
    is_spec = isinstance(sharding, NamedSharding) and not _programs.is_partial(equation)
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
        low, carrier = (_programs.bind(equation, [array]) for array in (value.low, value.carrier))
        return [value._replace(low=low, carrier=carrier, layout=layout)]
    return [Weight(bound(equation, operands)[0], layout)]


def _reshard(equation: _compat.JaxprEqn, operands: list[Value]) -> list[Value]:
    """Moves a weight to another sharding of explicit mesh axes, after it was cast."""
    (value,), sharding = operands, _programs.sharding_of_result(equation)
    assert isinstance(value, (Weight, Copy))
    stored = jax.typeof(value.low if isinstance(value, Copy) else value.array).sharding
    if stored.mesh != sharding.mesh:
        # Functions of `auto_axes` enter a mesh with automatic axes, where they read the weight.
        if isinstance(value, Copy):
            return _move(equation, [value._replace(layout=None)])
        return [Weight(array) for array in bound(equation, operands)]
    if isinstance(value, Weight):
        return _move_weight(equation, operands)
    if value.layout is None or value.layout.is_split:
        return _move(equation, operands)
    carrier = _programs.bind(equation, [value.carrier])
    layout = dataclasses.replace(value.layout, stored=stored, gathered=sharding)
    return [Copy(value.low, carrier, layout)]


def _apply(equation: _compat.JaxprEqn, operands: list[Value]) -> list[Value]:
    """Applies a function of weights to copies and to their carriers, with gradients in FP32."""
    is_applied = are_weights(operands) and is_16bit_aval(equation.outvars[0].aval)
    return _merge(equation, operands) if is_applied else _compute(equation, operands)


def _reduce(equation: _compat.JaxprEqn, operands: list[Value]) -> list[Value]:
    """Reduces copies, of which each device reads its part."""
    return _apply(
        equation, [v._replace(layout=None) if isinstance(v, Copy) else v for v in operands]
    )


def _calculate(equation: _compat.JaxprEqn, operands: list[Value]) -> list[Value]:
    """Runs arithmetic on arrays of one shape, so that the gradient of a copy is summed in FP32."""
    operands = [_broadcast(operand, equation) for operand in operands]
    rule = _merge if equation.primitive.name in _MERGES else _apply
    return rule(equation, operands)


def _broadcast(value: Value, equation: _compat.JaxprEqn) -> Value:
    """Broadcasts a copy to the shape of the result."""
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


def _merge(equation: _compat.JaxprEqn, operands: list[Value]) -> list[Value]:
    """Runs an operation on copies and constants, and on their carriers.

    Examples are the parts of a matrix, the rows of a table and NaN, a matrix and its scale, and a
    matrix and a mask from data.
    """
    layout = _common_layout(equation, operands)
    kinds = {type(operand) for operand in operands if isinstance(operand, Copy)}
    kind = Repeated if kinds == {Repeated} else Copy
    is_masked = kind is Copy and equation.primitive.name in ELEMENTWISE
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
            wide.append(jnp.asarray(array).astype(_core.FLOAT32))
            kind = kind if isinstance(operand, Constant) else Selected
        else:
            return _compute(equation, operands)
    return [kind(_programs.bind(equation, low), _programs.bind(equation, wide), layout)]


def _common_layout(equation: _compat.JaxprEqn, operands: list[Value]) -> WeightLayout | None:
    """Returns the layout of the result of an operation on copies; None if they must be gathered."""
    layouts = {operand.layout for operand in operands if isinstance(operand, Copy)}
    if len(layouts) > 1 or equation.primitive.name not in ELEMENTWISE:
        return None
    (layout,) = layouts
    # On explicit axes, data has the sharding of a gathered weight.
    is_gathered = layout is not None and layout.is_explicit and any(map(_is_data, operands))
    return None if is_gathered else layout


def _name(equation: _compat.JaxprEqn, operands: list[Value]) -> list[Value]:
    """Names a copy for the policies of `jax.checkpoint`."""
    (copy,) = operands
    assert isinstance(copy, Copy)
    return [copy._replace(low=_programs.bind(equation, [copy.low]))]


def _convert_copy(equation: _compat.JaxprEqn, operands: list[Value]) -> list[Value]:
    (copy,), dtype = operands, _programs.new_dtype_of(equation)
    assert isinstance(copy, Copy)
    if _core.is_16bit(dtype):
        return [copy._replace(low=_programs.bind(equation, [copy.low]))]
    if isinstance(copy, Selected) or not jnp.issubdtype(dtype, jnp.floating):
        return [*bound(equation, operands)]
    return [Weight(attached(_programs.bind(equation, [copy.low]), copy.carrier), copy.layout)]


# Rule for an operation, and for the class of its operands that decides. Others are computed.
_RULES: dict[tuple[str, type | None], Callable[[_compat.JaxprEqn, list[Value]], list[Value]]] = {
    **{(name, Weight): _move_weight for name in MOVES},
    ("convert_element_type", Weight): _convert_weight,
    ("convert_element_type", Rows): _convert_rows,
    ("custom_vjp_call", Weight): _custom_derivative,
    **{(name, Copy): _move for name in MOVES},
    **{(name, Copy): _apply for name in _FUNCTIONS},
    **{(name, Copy): _reduce for name in REDUCTIONS},
    **{(name, Copy): _merge for name in _MERGES},
    **{(name, Copy): _calculate for name in _BROADCASTING},
    **{(name, Copy): run_matmul for name in MATMULS},
    ("convert_element_type", Copy): _convert_copy,
    ("custom_jvp_call", Copy): run_custom_derivative,
    ("custom_vjp_call", Copy): _custom_derivative,
    ("name", Copy): _name,
    **{("reshard", kind): _reshard for kind in (Weight, Copy)},
    **{("sharding_constraint", kind): _constrain for kind in (Weight, Copy)},
}
