"""Values of the interpreter: weights, their 16-bit copies, constants, and other arrays."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from jaxmp._core._dtypes import FLOAT32, is_16bit
from jaxmp._core._replay import bind
from jaxmp._core._typing import Array


class Weight(NamedTuple):
    """Array in FP32 or wider that depends on parameters and constants alone."""

    array: Array


class Copy(NamedTuple):
    """16-bit copy of a weight.

    low: the 16-bit array; no gradient passes through it.
    carrier: FP32 array of the same shape. Its value is never used, and the gradient passes through
      it.
    """

    low: Array
    carrier: Array


class Constant(NamedTuple):
    """Array that depends on no argument."""

    array: Array


Value: TypeAlias = Weight | Copy | Constant | Array


def as_array(value: Value) -> Array:
    """Returns a value as one array. The gradient of a copy passes to its carrier."""
    if isinstance(value, Copy):
        return attached(value.low, value.carrier)
    return value.array if isinstance(value, (Weight, Constant)) else value


def copy_of(array: Array, low: Array) -> Copy:
    """Returns the copy `low` of an array in FP32."""
    return Copy(lax.stop_gradient(low), array)


def computed_weight(array: Array) -> Value:
    """Returns an array that was computed from weights and constants alone as such a value.

    The gradient of a 16-bit array is rounded to 16 bits, but after it has been summed in FP32.
    """
    if not jnp.issubdtype(array.dtype, jnp.floating):
        return array
    if is_16bit(array.dtype):
        return copy_of(array.astype(FLOAT32), array)
    return Weight(array)


def bound(equation: JaxprEqn, operands: list[Value]) -> list[Array]:
    """Returns the results of an equation with other operands."""
    return results_of(equation, bind(equation, list(map(as_array, operands))))


def results_of(equation: JaxprEqn, out: Array | list[Array]) -> list[Array]:
    """Returns what `bind` returned as a list."""
    return list(out) if isinstance(out, (list, tuple)) else [out]


@jax.custom_vjp
def attached(low: Array, carrier: Array) -> Array:
    """Returns `low`, of any dtype; its gradient passes to `carrier` in FP32."""
    return low


def _attached_fwd(low: Array, carrier: Array) -> tuple[Array, None]:
    return low, None


def _attached_bwd(_: None, cotangent: Array) -> tuple[None, Array]:
    return None, cotangent.astype(FLOAT32)


attached.defvjp(_attached_fwd, _attached_bwd)
