"""Binds recorded equations again with other operands, keeping source lines and scopes."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmp import _core
from jaxmp._core import Array, _compat
from jaxmp._core._compat import JaxprEqn
from jaxmp._programs._constructs import sub_jaxprs
from jaxmp._programs._jaxprs import array_aval
from jaxmp._programs._locations import Lines

# These primitives contain a jaxpr of two scalars in the recorded dtype. For another dtype, JAX's
# public function builds a new one.
SCATTERS: dict[str, Callable[..., Any]] = {
    "scatter-add": lax.scatter_add,
    "scatter-sub": lax.scatter_sub,
    "scatter-mul": lax.scatter_mul,
    "scatter-min": lax.scatter_min,
    "scatter-max": lax.scatter_max,
}
_OF_SCATTER = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")


def bind(equation: JaxprEqn, arrays: list[Any], **changes: object) -> Any:
    """Returns the result of an equation for other operands, and with changed parameters."""
    primitive, params = equation.primitive, {**equation.params, **changes}
    scatter = SCATTERS.get(primitive.name)
    if scatter is not None and arrays[0].dtype != getattr(equation.invars[0].aval, "dtype", None):
        # JAX's functions accept these parameters as options.
        return scatter(*arrays, **{name: equation.params[name] for name in _OF_SCATTER})
    if hasattr(primitive, "get_bind_params"):
        params = primitive.get_bind_params(params)
    results = primitive.bind(*arrays, **params)
    # JAX 0.12 returns the results of `shard_map` in another type of sequence.
    return list(results) if primitive.multiple_results else results


def bind_all(equation: JaxprEqn, arrays: list[Any], **changes: object) -> list[Any]:
    """Returns the results of `bind` as a list, also of an equation with a single one."""
    out = bind(equation, arrays, **changes)
    return out if equation.primitive.multiple_results else [out]


@contextlib.contextmanager
def as_recorded(equation: JaxprEqn) -> Iterator[None]:
    """Runs a block with the source line, scopes and context (such as the mesh) of an equation.

    JAX records the equations inside of functions that it jits itself, such as `jnp.std`, without
    the user's frames. These equations get the frames of the call.
    """
    info = equation.source_info
    stack = _compat.source_info_util.current_name_stack() + info.name_stack
    traceback = info.traceback
    if traceback is not None and not _lines().has_own(traceback):
        traceback = _compat.source_info_util.current().traceback
    with _compat.source_info_util.user_context(traceback, name_stack=stack), equation.ctx.manager:
        yield


# The folders of libraries do not change after these were imported.
_lines = functools.cache(Lines)


# ---------------------------------------------------------------------------
# FP32 instead of 16 bits and FP8
# ---------------------------------------------------------------------------

# Operations with other results for operands in FP32.
_OF_BITS = frozenset({"bitcast_convert_type", "nextafter"})
# Operations whose results are elements of their operands.
MOVES = _core.named(
    "abs argmax argmin broadcast_in_dim clamp concatenate copy dynamic_slice dynamic_update_slice"
    " expand_dims gather max min neg optimization_barrier pad reduce_max reduce_min reshape rev"
    " select_n slice sort split squeeze transpose"
)


def is_narrow(value: Any) -> bool:
    """Returns True for an array, or its type, of 16-bit floats or FP8."""
    return is_narrow_dtype(getattr(value, "dtype", None))


def is_narrow_dtype(dtype: Any) -> bool:
    """Returns True for the dtypes of 16-bit floats and of FP8."""
    return dtype in _core.FLOATS_16BIT or (isinstance(dtype, np.dtype) and _core.is_fp8(dtype))


def wide(x: Any) -> Any:
    """Returns an array of 16 bits or FP8 in FP32; other values unchanged."""
    if not is_narrow(x):
        return x
    with _core.in_mesh_of_type(x):
        return lax.convert_element_type(x, _core.FLOAT32)


def rounded_to(x: Array, dtype: Any) -> Array:
    """Returns FP32 values rounded to a format of 16 bits or FP8; those of other dtypes unchanged.

    XLA may remove a pair of conversions, and a barrier between them stores the narrow array.
    """
    dtype = jnp.dtype(dtype) if isinstance(dtype, str) else dtype
    if not is_narrow_dtype(dtype):
        return x
    with _core.in_mesh_of_type(x):
        return _rounded_to(x, jnp.finfo(dtype))


def _rounded_to(x: Array, info: Any) -> Array:
    rounded = lax.reduce_precision(x, 8, info.nmant)
    if info.nexp == 8:
        return rounded
    # Subnormal numbers are multiples of the smallest one.
    step = np.float32(info.smallest_subnormal)
    steps = lax.round(lax.div(x, step), lax.RoundingMethod.TO_NEAREST_EVEN)
    is_subnormal = lax.lt(lax.abs(x), np.float32(info.smallest_normal))
    rounded = lax.select(is_subnormal, lax.mul(steps, step), rounded)
    # Infinite, or NaN in the formats that have no infinity.
    beyond = lax.mul(x, np.float32(np.asarray(np.inf, info.dtype)))
    return lax.select(lax.gt(lax.abs(rounded), np.float32(info.max)), beyond, rounded)


def runs_in_fp32(equation: JaxprEqn) -> bool:
    """Returns False for kernels, callbacks and operations on the bits of an array."""
    name = equation.primitive.name
    return name not in _OF_BITS and (name in SCATTERS or not sub_jaxprs(equation))


def bind_in_fp32(equation: JaxprEqn, operands: list[Any]) -> list[Array]:
    """Returns the results of an equation in FP32.

    Operations that cannot run in FP32 run in the dtypes in which they were recorded.

    Args:
      equation: the equation.
      operands: its operands, in FP32 or in the recorded dtypes.
    """
    if _is_of_fp8_bytes(equation):
        return operands
    if not runs_in_fp32(equation):
        return bind_as_recorded(equation, operands)
    params = equation.params.items()
    changes: dict[str, Any] = {
        key: _core.FLOAT32 for key, x in params if isinstance(x, np.dtype) and is_narrow_dtype(x)
    }
    if "precision" in equation.params and any(is_narrow(v.aval) for v in equation.invars):
        changes["precision"] = (lax.Precision.HIGHEST,) * 2
    return list(map(wide, bind_all(equation, list(map(wide, operands)), **changes)))


def bind_as_recorded(equation: JaxprEqn, operands: list[Any]) -> list[Array]:
    """Returns the results, in FP32, of an equation in the dtypes in which it was recorded."""
    pairs = zip(operands, equation.invars, strict=True)
    narrow = [jnp.asarray(x, array_aval(v).dtype) if is_narrow(v.aval) else x for x, v in pairs]
    return list(map(wide, bind_all(equation, narrow)))


def _is_of_fp8_bytes(equation: JaxprEqn) -> bool:
    """Returns True for a conversion of FP8 arrays to the bytes that the backward pass saves."""
    dtypes = [getattr(v.aval, "dtype", None) for v in (*equation.invars, *equation.outvars)]
    is_cast = equation.primitive.name == "bitcast_convert_type"
    return is_cast and any(isinstance(x, np.dtype) and _core.is_fp8(x) for x in dtypes)
