"""Values of a traced function, their promotion priority, and their casts."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import AbstractValue, ShapedArray

from jaxmp import _core, _programs
from jaxmp._core import Array, DTypeLike, _compat


class Priority(enum.IntEnum):
    """Promotion priority of a value: COMPUTED arrays determine the dtype of a binary operation.

    Matmuls, FP32 operations, casts and loop carries are COMPUTED. Other results have the largest
    priority of their operands.
    """

    CONSTANT = 0  # computed from literals and integers alone; weakly typed
    ARGUMENT = 1  # an argument, or computed from arguments; weakly typed
    NARROW = 2  # the FP32 result of a linear layer with few outputs; weakly typed
    COMPUTED = 3


@dataclasses.dataclass(frozen=True, slots=True)
class Value:
    """Array with its promotion priority."""

    array: Any
    priority: Priority = Priority.COMPUTED
    # For a constant with equal elements: that element, with shape (). Otherwise None.
    scalar: np.ndarray | None = None

    @property
    def dtype(self) -> np.dtype:
        return self.array.dtype

    def with_array(self, array: Any) -> Value:
        """Returns the value of another array with the same elements, such as a tracer of it."""
        return dataclasses.replace(self, array=array)

    @property
    def castable(self) -> bool:
        return _core.is_castable(self.array)


def to_16bit(value: Value, dtype: DTypeLike) -> Array | np.ndarray:
    """Casts a value; a finite constant stays finite in 16 bits.

    For example, the most negative FP32 number, which masks logits, is -inf in float16.
    """
    array = value.array
    if value.priority is not Priority.CONSTANT or not _core.is_16bit(dtype):
        return _core.cast(array, dtype)
    if value.scalar is not None:
        half = np.asarray(_core.saturating_cast(value.scalar, dtype))
        return lax.full_like(array, half, dtype) if array.ndim else half
    return _core.clamped_cast(array, dtype)


_MOVES = ("broadcast_in_dim", "copy", "reshape", "squeeze", "stop_gradient", "transpose")
# Primitive -> its effect on the element of a constant with equal elements.
_OF_SCALAR: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    **dict.fromkeys(_MOVES, lambda number: number),
    "neg": lambda number: np.asarray(-number),
    "sqrt": lambda number: np.asarray(np.sqrt(number) if number >= 0 else np.nan, number.dtype),
}


def scalar_of(equation: _compat.JaxprEqn, values: list[Value]) -> np.ndarray | None:
    """Returns the common element of an equation's result, if its operand is such a constant.

    None if the operand's elements are not known to be equal, or the primitive is not listed.
    """
    number = values[0].scalar if values else None
    if number is None or number.dtype != _core.FLOAT32:
        return None
    function = _OF_SCALAR.get(equation.primitive.name)
    return None if function is None else function(number)


def returned(value: Value, aval: Any, dtype: Any) -> Array:
    """Returns the array of a result in `dtype`, and with the weak type of `aval`."""
    array = _programs.as_jax_array(value.array)
    array = _core.cast(array, dtype) if value.castable else array
    is_weak = getattr(aval, "weak_type", False) and array.dtype == aval.dtype
    return _core.as_weak(array) if is_weak else array


def is_castable_aval(aval: AbstractValue) -> TypeGuard[ShapedArray]:
    """Returns True for the types of arrays that policies cast; False for references to arrays."""
    return isinstance(aval, ShapedArray) and _core.is_castable(aval)


def widest(values: list[Value]) -> np.dtype:
    """Returns the common dtype of 16 and 32-bit values; FP32 for float16 with bfloat16."""
    dtypes = {np.dtype(value.dtype) for value in values}
    return dtypes.pop() if len(dtypes) == 1 else _core.FLOAT32


def common_dtype(values: list[Value]) -> np.dtype:
    """Returns the dtype to which an operation of category "widest" casts its operands.

    It is the widest dtype of the first of these groups that is not empty:

    1. computed arrays with dimensions;
    2. all arrays with dimensions;
    3. computed scalars;
    4. all scalars.
    """
    floating = [value for value in values if value.castable]
    computed = [value for value in floating if value.priority is Priority.COMPUTED]
    arrays = [value for value in floating if jnp.ndim(value.array) > 0]
    computed_arrays = [value for value in computed if jnp.ndim(value.array) > 0]
    return widest(computed_arrays or arrays or computed or floating)


# ---------------------------------------------------------------------------
# Matmuls
# ---------------------------------------------------------------------------


def is_matmul(equation: _compat.JaxprEqn) -> bool:
    """Returns True for a `dot_general` of castable operands, without inner and outer products."""
    return (
        equation.primitive.name == "dot_general"
        and not _programs.is_outer_product(equation)
        and not _programs.is_inner_product(equation)
        and all(is_castable_aval(var.aval) for var in equation.invars)
    )


def kernel_of(values: Sequence[Value]) -> int:
    """Returns 0 or 1, the operand of a matmul that is treated as the kernel of a layer.

    It is the only operand that no matmul, FP32 operation or cast has computed, or the second one.
    """
    computed = [value.priority >= Priority.NARROW for value in values]
    return 0 if computed == [False, True] else 1


def outputs_of(equation: _compat.JaxprEqn, values: Sequence[Value]) -> int | None:
    """Returns the number of outputs of a linear layer; None for other operations.

    A matmul of two computed operands, such as that of attention, is not a layer. Of two arguments,
    a vector is the input.
    """
    if not is_matmul(equation):
        return None
    kernel = kernel_of(values)
    computed = [value.priority >= Priority.NARROW for value in values]
    if computed[kernel]:
        return None
    dot = _programs.dot_of(equation)
    used = {*dot.contracted[kernel], *dot.batch[kernel]}
    free = [n for axis, n in enumerate(values[kernel].array.shape) if axis not in used]
    return math.prod(free) if free or any(computed) else None
