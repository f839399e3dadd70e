"""Binds recorded equations with FP32 in place of 16 bits and FP8."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from jaxmp._core._dtypes import FLOAT32, FLOATS_16BIT, is_fp8
from jaxmp._core._jaxprs import array_aval, sub_jaxprs
from jaxmp._core._programs._bind import SCATTERS, bind
from jaxmp._core._typing import Array

# Operations with other results for operands in FP32.
_OF_BITS = frozenset({"bitcast_convert_type", "nextafter"})


def is_narrow(value: Any) -> bool:
    """Returns True for an array, or its type, of 16-bit floats or FP8."""
    dtype = getattr(value, "dtype", None)
    return dtype in FLOATS_16BIT or (isinstance(dtype, np.dtype) and is_fp8(dtype))


def wide(x: Any) -> Any:
    """Returns an array of 16 bits or FP8 in FP32; other values unchanged."""
    return lax.convert_element_type(x, FLOAT32) if is_narrow(x) else x


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
    changes: dict[str, Any] = {}
    if runs_in_fp32(equation):
        params = equation.params.items()
        dtypes = {key: x for key, x in params if isinstance(x, np.dtype)}
        changes = {key: FLOAT32 for key, x in dtypes.items() if x in FLOATS_16BIT or is_fp8(x)}
        if "precision" in equation.params and any(is_narrow(v.aval) for v in equation.invars):
            changes["precision"] = (lax.Precision.HIGHEST,) * 2
        operands = list(map(wide, operands))
    else:
        pairs = zip(operands, equation.invars, strict=True)
        operands = [
            jnp.asarray(x, array_aval(v).dtype) if is_narrow(v.aval) else x for x, v in pairs
        ]
    out = bind(equation, operands, **changes)
    return list(map(wide, out if equation.primitive.multiple_results else [out]))


def _is_of_fp8_bytes(equation: JaxprEqn) -> bool:
    """Returns True for a conversion of FP8 arrays to the bytes that the backward pass saves."""
    dtypes = [getattr(v.aval, "dtype", None) for v in (*equation.invars, *equation.outvars)]
    is_cast = equation.primitive.name == "bitcast_convert_type"
    return is_cast and any(isinstance(x, np.dtype) and is_fp8(x) for x in dtypes)
