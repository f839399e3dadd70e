"""Conversions between a 16-bit parameter and its FP32 master.

There are two forms of masters:

* ``fp32``: 32 bits in addition to the 16 bits of the parameter. The parameter is the master,
  rounded to nearest with ties to even, as by any cast.
* ``packed``: the 16 bits that bfloat16 drops, as a signed remainder. Parameter and remainder
  together represent the master exactly, in 4 bytes. The remainder is the lower half of the FP32
  bit pattern, so that ties round away from zero (a carry out of the lower half).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmp._core import _trees
from jaxmp._core._dtypes import FLOAT32, is_16bit
from jaxmp._core._typing import DTypeLike, PyTree
from jaxmp._policies._resolve import storage_dtype
from jaxmp._recipe_files._load import PolicyMap

BFLOAT16 = np.dtype(jnp.bfloat16)
_HALF_ULP = np.uint32(0x8000)
_QUIET_NAN = np.uint32(0x7FC00000)

# Finite FP32 values of at least this magnitude become infinite by the cast: the largest finite
# value plus half a unit in its last place (65504 + 16 for float16).
OVERFLOW_THRESHOLD = {
    np.dtype(np.float16): np.float32(65520.0),
    BFLOAT16: np.array(0x7F7F8000, np.uint32).view(np.float32)[()],
}


def pack(master: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Splits FP32 values into bfloat16, with ties away from zero, and an int16 remainder.

    Args:
      master: float32 array of any shape.

    Returns:
      bfloat16 and int16 arrays of the same shape, from which `unpack` restores finite and infinite
      values exactly. A NaN becomes the quiet NaN.
    """
    bits = lax.bitcast_convert_type(master, jnp.uint32)
    bits = lax.select(jnp.isnan(master), jnp.full_like(bits, _QUIET_NAN), bits)
    high = lax.shift_right_logical(bits + _HALF_ULP, jnp.full_like(bits, 16)).astype(jnp.uint16)
    low = bits.astype(jnp.uint16)
    return (
        lax.bitcast_convert_type(high, jnp.bfloat16),
        lax.bitcast_convert_type(low, jnp.int16),
    )


def unpack(param: jax.Array, remainder: jax.Array) -> jax.Array:
    """Returns the FP32 value of a bfloat16 parameter and its int16 remainder."""
    return lax.bitcast_convert_type(_high_bits(param) + remainder.astype(jnp.int32), jnp.float32)


def remainder_to(master: jax.Array, param: jax.Array) -> jax.Array:
    """Returns the int16 remainder with which `param` is closest to `master`.

    It is exact if `param` is `pack(master)[0]`, and otherwise clipped.
    """
    bits = lax.bitcast_convert_type(master, jnp.int32)
    return jnp.clip(bits - _high_bits(param), -(2**15), 2**15 - 1).astype(jnp.int16)


def _high_bits(param: jax.Array) -> jax.Array:
    high = lax.bitcast_convert_type(param, jnp.int16).astype(jnp.int32)
    return lax.shift_left(high, jnp.full_like(high, 16))


def to_storage(value: PyTree, dtype: DTypeLike, master: str) -> PyTree:
    """Casts one leaf to its storage dtype, with the rounding of the form of its master."""
    if master == "packed" and np.dtype(dtype) == BFLOAT16 and value.dtype == FLOAT32:
        if isinstance(value, jax.ShapeDtypeStruct):
            return value.update(dtype=dtype)
        return pack(jnp.asarray(value))[0]
    return _trees.cast(value, dtype)


def cast_params(params: PyTree, policies: PolicyMap, master: str = "fp32") -> PyTree:
    """Casts each floating parameter to the dtype in which `policies` store it.

    Args:
      params: a tree of parameters, or a dict of Flax collections whose `params` are cast.
      policies: a PolicyMap.
      master: the form of the masters, "fp32" or "packed", which determines how ties round.
    """
    collections = _trees.has_collections(params)

    def cast_leaf(names: _trees.Path, leaf: PyTree) -> PyTree:
        inside = not collections or names[0] == _trees.PARAMS
        if not inside or not _trees.is_castable(leaf, policies.default.cast_float64):
            return leaf
        dtype = storage_dtype(policies, _trees.rule_names(params, names))
        return to_storage(leaf, dtype, master if is_16bit(dtype) else "fp32")

    return _trees.map_with_path(cast_leaf, params)
