"""Names and properties of floating-point formats."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxmp._core._messages import did_you_mean
from jaxmp._core._typing import ArrayLike, DTypeLike
from jaxmp.errors import JaxmpError, PolicyError

# Short name (as printed by `str(Policy)`) -> dtype. One row per format.
_SHORT: dict[str, np.dtype] = {
    "f64": np.dtype("float64"),
    "f32": np.dtype("float32"),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f16": np.dtype("float16"),
    **{
        f"f{bits}_{kind}": np.dtype(getattr(ml_dtypes, f"float{bits}_{kind}"))
        for bits, kinds in {
            8: ["e3m4", "e4m3", "e4m3b11fnuz", "e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu"],
            6: ["e2m3fn", "e3m2fn"],
            4: ["e2m1fn"],
        }.items()
        for kind in kinds
    },
}
_NAME_OF = {dtype: name for name, dtype in _SHORT.items()}

# Every accepted spelling -> dtype.
DTYPE_NAMES: dict[str, np.dtype] = {
    **_SHORT,
    **{dtype.name: dtype for dtype in _SHORT.values()},
    **{name.replace("f", "fp", 1): dtype for name, dtype in _SHORT.items() if name[0] == "f"},
    **{name.replace("_", ""): dtype for name, dtype in _SHORT.items()},
    **{name.split("_")[1]: dtype for name, dtype in _SHORT.items() if "_" in name},
    "full": np.dtype("float32"),
    "half": np.dtype("float16"),
    "double": np.dtype("float64"),
}

FLOAT16, BFLOAT16 = np.dtype("float16"), np.dtype(ml_dtypes.bfloat16)
FLOATS_16BIT = frozenset({FLOAT16, BFLOAT16})
FLOAT32 = np.dtype("float32")
FLOAT64 = np.dtype("float64")
# Formats between which `cast_floating` converts by default.
CASTABLE = FLOATS_16BIT | {FLOAT32}


def canonical_dtype(value: Any, *, within: str = "") -> np.dtype:
    """Converts a dtype, a scalar type or a name to a floating `np.dtype`.

    Args:
      value: such as `jnp.bfloat16`, `np.dtype("float32")`, `"bf16"`, `"float8_e4m3fn"`.
      within: the input that contains `value`, which the error message quotes.

    Returns:
      The canonical `np.dtype`: equal formats are equal and have equal hashes.

    Raises:
      PolicyError: if `value` is not a floating-point format.

    Example:
      >>> canonical_dtype("bf16")
      dtype(bfloat16)
    """
    where = f" in {within!r}" if within else ""
    if isinstance(value, str):
        name = value.strip().lower()
        if name in DTYPE_NAMES:
            return DTYPE_NAMES[name]
        if name.removeprefix("u").startswith("int"):
            raise PolicyError(_integer_message(value, where))
        raise PolicyError(
            f"Unknown dtype {value!r}{where}.{did_you_mean(name, DTYPE_NAMES)} "
            f"Allowed: {', '.join(_SHORT)} and their long names; "
            "for example get_policy('p=f32,c=bf16,o=f32')."
        )
    try:
        if value is None or isinstance(value, (bytes, list, tuple, dict)):
            raise TypeError  # NumPy would read a structured dtype
        dtype = np.dtype(value)
    except (TypeError, ValueError):
        raise PolicyError(
            f"{value!r}{where} is not a dtype. Give a floating dtype such as jnp.bfloat16, "
            "or its name such as 'bf16'."
        ) from None
    if dtype in _NAME_OF:
        return dtype
    if np.issubdtype(dtype, np.integer) or dtype.name.startswith(("int", "uint")):
        raise PolicyError(_integer_message(dtype.name, where))
    raise PolicyError(
        f"{dtype.name!r}{where} is not a floating-point format that a policy can contain. "
        f"Allowed: {', '.join(_SHORT)}; for example jnp.bfloat16."
    )


def _integer_message(name: str, where: str) -> str:
    return (
        f"Integer format {name!r}{where} cannot be a training precision: gradients and "
        "activations need a floating-point format. Use a float such as 'bf16', or quantize "
        "the trained model for inference with another tool."
    )


def short_name(dtype: object) -> str:
    """Returns the short name of a format, such as "bf16", which `canonical_dtype` accepts."""
    return _NAME_OF[canonical_dtype(dtype)]


def is_16bit(dtype: DTypeLike) -> bool:
    """Returns True if `dtype` has 16 bits: float16 or bfloat16."""
    return np.dtype(dtype) in FLOATS_16BIT


def is_fp8(dtype: DTypeLike) -> bool:
    """Returns True if `dtype` is an 8-bit float."""
    return np.dtype(dtype).name.startswith("float8")


def bits(dtype: DTypeLike) -> int:
    """Returns the number of bits per element: 8 for float8, 4 for float4."""
    is_float = jnp.issubdtype(dtype, jnp.inexact)
    return int(jnp.finfo(dtype).bits) if is_float else 8 * np.dtype(dtype).itemsize


def wide_dtype(dtype: DTypeLike) -> np.dtype:
    """Returns the dtype for operations that lose precision in 16 bits: FP32, or FP64 for FP64."""
    return FLOAT64 if dtype == FLOAT64 else FLOAT32


def floating_array(value: ArrayLike, name: str) -> jax.Array:
    """Converts an argument to a floating-point array.

    Raises:
      JaxmpError: if it is not floating-point, or has fewer than 16 bits.
    """
    array = jnp.asarray(value)
    if not jnp.issubdtype(array.dtype, jnp.floating) or array.dtype.itemsize < 2:
        raise JaxmpError(
            f"{name} is {array.dtype} of shape {list(array.shape)}; it must be floating, of 16 "
            f"bits or more: {name}.astype(jnp.float32)."
        )
    return array


def sum_dtype(dtype: DTypeLike) -> np.dtype:
    """Returns the canonical dtype for accumulating gradients.

    Raises:
      PolicyError: if the dtype has fewer than 16 bits.
    """
    canonical = canonical_dtype(dtype)
    if bits(canonical) < 16:
        raise PolicyError(
            f"Gradients cannot be added in {canonical}: sums need 16 bits or more. "
            "Use accumulate_dtype='float32'."
        )
    return canonical
