"""Values of a traced function, how much say their dtypes have, and the casts made of them."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmp._autocast._readers import Readers
from jaxmp._dtypes import FLOAT32, is_half
from jaxmp._jaxprs import AUTOCAST, is_literal
from jaxmp._trees import cast, clamped_cast, is_castable, saturating_cast


class Standing(enum.IntEnum):
    """Whether a value's dtype has a say in that of a result."""

    CONSTANT = 0  # made of literals and integers alone
    NEUTRAL = 1  # an argument, or merely reshaped from one
    COMPUTED = 2


@dataclasses.dataclass(frozen=True, slots=True)
class Value:
    """An array, and what it is made of."""

    array: Any
    standing: Standing = Standing.COMPUTED
    # Of a constant whose entries are all one number: that number, of no dimensions.
    scalar: np.ndarray | None = None

    @property
    def dtype(self) -> Any:
        return self.array.dtype

    @property
    def castable(self) -> bool:
        return is_castable(self.array)


def _to_half(value: Value, dtype: Any) -> Any:
    """A cast in which a finite constant stays finite: the FP32 minimum that stands for a mask."""
    array = value.array
    if value.standing is not Standing.CONSTANT or not is_half(dtype):
        return cast(array, dtype)
    if value.scalar is not None:
        half = np.asarray(saturating_cast(value.scalar, dtype))
        return lax.full(array.shape, half, dtype) if array.ndim else half
    return clamped_cast(array, dtype)


class Scope:
    """The variables of one jaxpr, and the casts that were made of them."""

    def __init__(self, jaxpr: Any, consts: Any, args: list[Value], readers: Readers) -> None:
        self.values = {
            var: Value(const, Standing.NEUTRAL)
            for var, const in zip(jaxpr.constvars, consts, strict=True)
        }
        self.values |= zip(jaxpr.invars[-len(args) :] if args else (), args, strict=True)
        self.casts: dict[tuple[int, Any], Any] = {}
        self.readers = readers

    def read(self, var: Any) -> Value:
        return _literal(var) if is_literal(var) else self.values[var]

    def cast(self, value: Value, dtype: Any) -> Any:
        """The array of a value in `dtype`; anything but a floating array as it is."""
        if not value.castable or value.dtype == dtype:
            return value.array
        key = id(value.array), np.dtype(dtype)
        if key not in self.casts:
            # The value is kept beside its cast, so that its id stays its own. The scope tells an
            # audit that this is no promotion that nobody asked for.
            with jax.named_scope(AUTOCAST):
                self.casts[key] = value.array, _to_half(value, dtype)
        return self.casts[key][1]


def _literal(var: Any) -> Value:
    if not hasattr(var.aval, "dtype"):
        return Value(var.val, Standing.CONSTANT)
    number = np.asarray(var.val, var.aval.dtype)
    return Value(number, Standing.CONSTANT, None if number.ndim else number)


# What an operation on one constant makes of its only number.
_OF_SCALAR: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    **dict.fromkeys(
        ("broadcast_in_dim", "copy", "reshape", "squeeze", "stop_gradient", "transpose"),
        lambda number: number,
    ),
    "neg": lambda number: np.asarray(-number),
    "sqrt": lambda number: np.asarray(np.sqrt(number) if number >= 0 else np.nan, number.dtype),
}


def scalar_of(equation: Any, values: list[Value]) -> np.ndarray | None:
    """The only number of a constant that an equation made of one, if it is known."""
    number = values[0].scalar
    if number is None or number.dtype != FLOAT32:
        return None
    function = _OF_SCALAR.get(equation.primitive.name)
    return None if function is None else function(number)


def wrap(equation: Any, outs: Any, standing: Standing = Standing.COMPUTED) -> list[Value]:
    """What binding an equation's primitive gave, as values."""
    outs = outs if equation.primitive.multiple_results else [outs]
    return [Value(out, standing) for out in outs]


def in_recorded_dtypes(equation: Any, scope: Scope, values: list[Value]) -> list[Any]:
    """Operands in the dtypes in which the equation was traced."""
    pairs = zip(equation.invars, values, strict=True)
    return [to_aval(scope, value, var.aval) for var, value in pairs]


def to_aval(scope: Scope, value: Value, aval: Any) -> Any:
    """A value's array in the dtype of a type that was traced."""
    return scope.cast(value, aval.dtype) if is_castable_aval(aval) else value.array


def with_dtype(aval: Any, value: Value) -> Any:
    """The type of a sub-jaxpr's operand, in the dtype that reaches it now."""
    return aval.update(dtype=value.dtype) if is_castable_aval(aval) else aval


def is_castable_aval(aval: Any) -> bool:
    """Whether a type is that of an array which policies cast."""
    return hasattr(aval, "dtype") and hasattr(aval, "shape") and is_castable(aval)


def _widest(values: list[Value]) -> np.dtype:
    """Of 16 and 32-bit dtypes; FP32 holds what float16 and bfloat16 hold."""
    dtypes = {np.dtype(value.dtype) for value in values}
    return dtypes.pop() if len(dtypes) == 1 else FLOAT32


def common_dtype(values: list[Value]) -> Any:
    """The dtype in which operands meet."""
    floating = [value for value in values if value.castable]
    voting = [value for value in floating if value.standing is Standing.COMPUTED]
    arrays = [value for value in voting if jnp.ndim(value.array) > 0]
    if not arrays and any(jnp.ndim(value.array) > 0 for value in floating):
        arrays = [value for value in floating if jnp.ndim(value.array) > 0]
    return _widest(arrays or voting or floating)
