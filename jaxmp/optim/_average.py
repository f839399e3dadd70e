"""Averages and copies of parameters in FP32: EMA, Polyak averages, target networks."""

from __future__ import annotations

import numbers
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxmp import _core
from jaxmp._core import Array, PyTree
from jaxmp.errors import JaxmpError
from jaxmp.fp8 import _overwritten
from jaxmp.optim._find import get_master_params
from jaxmp.optim._layout import master_states


def fp32_copy(tree: PyTree) -> PyTree:
    """Returns an FP32 copy of parameters, the first value of an average or a target network.

    It also converts an average that is stored in 16 bits. The arrays are new, with the shardings of
    the parameters, so either tree can be donated.

    Args:
      tree: as `new` in `incremental_update`; arrays, or their shapes (`jax.ShapeDtypeStruct`).

    Returns:
      A tree like the parameters. Arrays of float16 and bfloat16 are float32, and those of other
      dtypes are copied.

    Raises:
      JaxmpError: as `incremental_update`.

    Example:
      >>> target = fp32_copy({"w": jnp.ones(2, jnp.bfloat16)})
      >>> target["w"].dtype
      dtype('float32')
    """
    return jax.tree.map(_copy, _parameters(tree))


def incremental_update(new: PyTree, old: PyTree, step_size: float | Array) -> PyTree:
    """Moves an average towards parameters, as `optax.incremental_update`, in FP32.

    A 16-bit average does not change if a step moves it by less than half of the distance between
    two adjacent values: in bfloat16 2**-9 of its value, so a target network that is updated by
    0.005 stalls. The products of optax are rounded to the dtype of `new`, also where `old` is FP32.

    Args:
      new: a tree of parameters; a train state (an object with `params` and `opt_state`); or an
        optimizer or its state, if it has FP32 masters of all parameters. Of the last two, the
        masters are read instead of the rounded parameters.
      old: the average, such as `fp32_copy(new)`, in the structure of the parameters.
      step_size: share of `new` in the result, between 0 and 1: a number, or a scalar of any
        floating dtype. A decay of 0.999 is a step size of 0.001.

    Returns:
      `old + step_size * (new - old)`, computed and returned in FP32 (in FP64 for FP64 arrays), also
      if `old` is in 16 bits. Integers, PRNG keys and the state of FP8 scaling are those of `new`.

    Raises:
      JaxmpError: if `step_size` is a number outside of [0, 1], if the structures differ, or if an
        optimizer does not contain all parameters.

    Example:
      >>> params = {"w": jnp.full(2, 2.0, jnp.bfloat16)}
      >>> target = incremental_update(params, {"w": jnp.ones(2)}, 0.005)
      >>> target["w"].tolist()
      [1.00499..., 1.00499...]
    """
    check_step_size(step_size, f"step_size={step_size}")
    new = _parameters(new)
    if jax.tree.structure(new) != jax.tree.structure(old):
        raise JaxmpError(
            f"The average has the structure {jax.tree.structure(old)}, and the parameters have "
            f"{jax.tree.structure(new)}. Make the average from the same object: "
            "average = jaxmp.optim.fp32_copy(new)."
        )
    move = lambda leaf, average: _move(leaf, average, step_size)
    return _overwritten.map_leaves(move, lambda leaf, _: leaf, (new,), (old,))[0]


def check_step_size(step_size: float | Array, argument: str) -> None:
    """Checks the share of the new parameters in an average, if it is known."""
    if isinstance(step_size, numbers.Real) and not 0 <= step_size <= 1:
        raise JaxmpError(
            f"{argument} is not between 0 and 1. The step size is the share of the new parameters, "
            "as in optax, and the decay that of the average: decay=0.999 is step_size=0.001."
        )


def _parameters(tree: PyTree) -> PyTree:
    """Returns the parameters of a train state or an optimizer in FP32; another tree unchanged."""
    is_state = _core.has_fields(tree, "opt_state") or master_states(tree)
    return get_master_params(tree) if is_state else tree


def _copy(leaf: Array | jax.ShapeDtypeStruct) -> Array | jax.ShapeDtypeStruct:
    dtype = _wide(leaf)
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.update(dtype=dtype)
    return jnp.array(leaf, dtype=dtype, copy=True)


def _wide(leaf: Array | jax.ShapeDtypeStruct) -> Any:
    is_real = _core.is_inexact(leaf) and not jnp.issubdtype(leaf.dtype, jnp.complexfloating)
    return _core.wide_dtype(leaf.dtype) if is_real else getattr(leaf, "dtype", None)


def _move(new: Array, old: Array, step_size: float | Array) -> Array:
    if not _core.is_inexact(old):
        return new
    dtype = _wide(old)
    real = jnp.finfo(dtype).dtype
    start, end = (lax.convert_element_type(array, dtype) for array in (old, new))
    share = jnp.asarray(step_size, real)
    # The rounded difference does not always lead to the new value.
    return jnp.where(share == 1, end, start + share.astype(dtype) * (end - start))
