"""Values of the interpreter: weights, their 16-bit copies, constants, and other arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from jaxmp import _core, _programs
from jaxmp._core import Array, DTypeLike
from jaxmp._core._compat import JaxprEqn
from jaxmp._gradients._fp32._layout import WeightLayout, gathered
from jaxmp._programs import Entry


class Weight(NamedTuple):
    """Array in FP32 or wider that depends on parameters and constants alone.

    array: the array.
    layout: its sharding, as far as it is known; None: it is unknown.
    origin: another weight, the equation that moved its elements, and the other operands, if this
      weight may have been gathered by that equation; otherwise None.
    """

    array: Array
    layout: WeightLayout | None = None
    origin: tuple[Weight, JaxprEqn, list[Any]] | None = None


class Copy(NamedTuple):
    """16-bit copy of a weight.

    low: the 16-bit array; no gradient passes through it.
    carrier: FP32 array of the same shape. Its value is never used, and the gradient passes through
      it.
    layout: the sharding of `low`, and that in which matmuls read it; None: it is unknown.
    """

    low: Array
    carrier: Array
    layout: WeightLayout | None = None

    @property
    def whole(self) -> Array:
        """The 16-bit array in the sharding in which matmuls read it."""
        return gathered(self.low, self.layout)


class Repeated(Copy):
    """Copy with repeated elements, such as a bias for all rows. With data, it is an activation."""

    __slots__ = ()


class Selected(Copy):
    """Copy whose elements data selects, as the rows of a table: they may be activations."""

    __slots__ = ()


class Constant(NamedTuple):
    """Array that depends on no argument."""

    array: Array


class Rows(NamedTuple):
    """Elements of a weight in FP32 at positions that depend on data, such as rows of a table.

    array: the elements.
    origin: the weight, the equation that selected them, and its other operands.
    """

    array: Array
    origin: tuple[Weight, JaxprEqn, list[Any]]


Value: TypeAlias = Weight | Copy | Constant | Rows | Array


def as_array(value: Value) -> Array:
    """Returns a value as one array. The gradient of a copy passes to its carrier."""
    if isinstance(value, Copy):
        return attached(value.whole, value.carrier)
    return value.array if isinstance(value, (Weight, Constant, Rows)) else value


def copy_of(array: Array, dtype: DTypeLike, layout: WeightLayout | None = None) -> Copy:
    """Returns the copy of an array in FP32 in a dtype of 16 bits."""
    return Copy(lax.convert_element_type(detached(array), dtype), array, layout)


def entered(value: Value, entry: Entry) -> Value:
    """Returns an operand of another operation as an argument of the body of that operation."""
    if isinstance(value, Rows):
        return value.array
    if not isinstance(value, (Weight, Copy)):
        return value
    layout = None if entry is Entry.SHARD else value.layout
    if layout is not None and entry is Entry.REMAT:
        # The backward pass runs the body again, and gathers its weights.
        layout = dataclasses.replace(layout, again=False)
    if layout is not None and entry is Entry.ROWS:
        array = value.array if isinstance(value, Weight) else value.low
        sliced = layout.of_a_slice(array.ndim)
        if isinstance(value, Copy) and layout.is_split and not sliced.is_split:
            return value._replace(low=value.whole, layout=sliced)
        layout = sliced
    # A weight inside is not moved back to where it was gathered outside.
    return (
        Weight(value.array, layout) if isinstance(value, Weight) else value._replace(layout=layout)
    )


def computed_weight(value: Value, layout: WeightLayout | None = None) -> Value:
    """Converts a value that was computed from weights and constants alone to a `Weight` or `Copy`.

    Its sharding is unknown, until it is constrained; `layout` is that of one of the weights. The
    gradient of a 16-bit array is rounded to 16 bits, but after it has been summed in FP32. That of
    a copy is not rounded.
    """
    layout = None if layout is None else layout.unplaced()
    if isinstance(value, Copy):
        return Copy(value.whole, value.carrier, layout)
    array = jnp.asarray(as_array(value))
    if not jnp.issubdtype(array.dtype, jnp.floating):
        return array
    if _core.is_16bit(array.dtype):
        return Copy(detached(array), array.astype(_core.FLOAT32), layout)
    return Weight(array, layout)


def are_weights(values: Sequence[Value]) -> bool:
    """Returns True for weights and constants, from which every operation computes a weight."""
    return all(
        isinstance(value, (Weight, Copy, Constant)) and not isinstance(value, Selected)
        for value in values
    )


def left(results: Sequence[Value], operands: Sequence[Value]) -> list[Value]:
    """Returns the results of the body of an operation, as values outside of it."""
    if not are_weights(operands):
        return list(map(as_array, results))
    layouts = (value.layout for value in operands if isinstance(value, (Weight, Copy)))
    layout = next(filter(None, layouts), None)
    return [computed_weight(result, layout) for result in results]


def bound(equation: JaxprEqn, operands: list[Value]) -> list[Array]:
    """Returns the results of an equation with other operands."""
    return _programs.bind_all(equation, list(map(as_array, operands)))


@jax.custom_jvp
def attached(low: Array, carrier: Array) -> Array:
    """Returns `low`, of any dtype; its gradient passes to `carrier` in FP32."""
    return low


def _attached_jvp(primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[Any, Any]:
    (low, _), (_, tangent) = primals, tangents
    is_zero = isinstance(tangent, SymbolicZero)
    return low, _zero_tangent(low) if is_zero else tangent.astype(low.dtype)


attached.defjvp(_attached_jvp, symbolic_zeros=True)


@jax.custom_jvp
def detached(array: Array) -> Array:
    """Returns an array without a gradient; unlike `stop_gradient`, it has a second derivative."""
    return array


def _zero_tangent(array: Array) -> Any:
    return SymbolicZero(jax.typeof(array).to_tangent_aval())


detached.defjvp(lambda primals, _: (*primals, _zero_tangent(*primals)), symbolic_zeros=True)
