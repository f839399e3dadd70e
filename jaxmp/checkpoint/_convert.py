"""Executes a plan: reads leaves, and makes the leaves of a state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmp._core._dtypes import FLOAT16, FLOAT32
from jaxmp._core._trees import Path
from jaxmp.checkpoint._description import PYTHON_NUMBERS, Description, FlatState, Leaf
from jaxmp.checkpoint._plan import Action, Plan
from jaxmp.errors import CheckpointError
from jaxmp.optim import _master

# JAX's name of a key dtype -> its implementation and the number of uint32 in a key.
_KEYS = {
    "key<fry>": ("threefry2x32", 2),
    "key<rbg>": ("rbg", 4),
    "key<urbg>": ("unsafe_rbg", 4),
}

# Reads leaves: path -> shape, stored dtype and sharding (None: a NumPy array).
Reader = Callable[[dict[Path, jax.ShapeDtypeStruct]], dict[Path, Any]]


# ---------------------------------------------------------------------------
# Stored form
# ---------------------------------------------------------------------------


def to_stored(leaf: Leaf, value: Any) -> Any:
    """Converts a leaf to the array that is written: keys to uint32, numbers to NumPy's.

    NumPy arrays are copied in the byte order of this machine, because a save goes on while the
    caller changes them.
    """
    if leaf.is_key:
        _key_impl(leaf)
        return jax.random.key_data(value)
    if isinstance(value, jax.Array):
        return value
    array = np.array(value)
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def stored_shape(leaf: Leaf) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of the array that is written for a leaf."""
    if leaf.is_key:
        return jax.ShapeDtypeStruct((*leaf.shape, _key_impl(leaf)[1]), np.uint32)
    if leaf.dtype in PYTHON_NUMBERS:
        return jax.ShapeDtypeStruct((), np.array(PYTHON_NUMBERS[leaf.dtype]()).dtype)
    return jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(leaf.dtype))


def _key_impl(leaf: Leaf) -> tuple[str, int]:
    if leaf.dtype not in _KEYS:
        raise CheckpointError(
            f"Leaf {leaf.path!r} is an array of PRNG keys of the type {leaf.dtype}. Checkpoints "
            f"contain {', '.join(_KEYS)}; store jax.random.key_data(keys) instead."
        )
    return _KEYS[leaf.dtype]


def is_written(leaf: Leaf) -> bool:
    """Returns False for arrays without elements, which orbax refuses to write."""
    return 0 not in leaf.shape


# ---------------------------------------------------------------------------
# Reading
# ---------------------------------------------------------------------------


def _read_leaves(leaves: list[tuple[Leaf, Any]], read: Reader) -> dict[str, Any]:
    """Reads leaves in their stored form.

    Args:
      leaves: leaves of the checkpoint, each with the sharding to read it with (None: NumPy array).
      read: function that reads leaves.
    """
    targets: dict[Path, jax.ShapeDtypeStruct] = {}
    result: dict[str, Any] = {}
    for leaf, sharding in leaves:
        shape = stored_shape(leaf)
        if not is_written(leaf):
            result[leaf.path] = np.zeros(shape.shape, shape.dtype)
        else:
            targets[split(leaf.path)] = shape.update(sharding=sharding)
    if targets:
        result |= {"/".join(path): value for path, value in read(targets).items()}
    return result


def split(path: str) -> Path:
    """Undoes `join`; names that contain "/" are split too, which keeps paths unique."""
    return tuple(path.split("/"))


# ---------------------------------------------------------------------------
# Making leaves
# ---------------------------------------------------------------------------


def run_plan(plan: Plan, stored: Description, flat: FlatState, read: Reader) -> list[Any]:
    """Makes the leaves of a state from those of a checkpoint.

    Args:
      plan: the origin of each leaf of the state.
      stored: description of the checkpoint.
      flat: the given state; its values determine the placement.
      read: function that reads leaves of the checkpoint.
    """
    source = stored.by_path
    placements: dict[str, Any] = {}
    for action, value in zip(plan.actions, flat.values, strict=True):
        for path in action.sources:
            is_array = not source[path].is_key and source[path].dtype not in PYTHON_NUMBERS
            sharding = placement(value) if is_array else None
            placements[path] = placements.get(path) or sharding
    values = _read_leaves([(source[p], s) for p, s in placements.items()], read)
    rows = zip(plan.actions, flat.description.leaves, flat.values, strict=True)
    return [_finish(leaf, _make(action, leaf, values, v), v) for action, leaf, v in rows]


def placement(value: object) -> jax.sharding.Sharding | None:
    """Returns the sharding that a leaf of the given state was placed with; None: by default."""
    if isinstance(value, jax.Array):
        return value.sharding if value.committed else None
    return getattr(value, "sharding", None)


def _make(action: Action, leaf: Leaf, stored: dict[str, Any], value: Any) -> Any:
    """Makes one leaf in its stored form."""
    if action.operation == "create":
        return _create(action, leaf, value)
    sources = [stored[path] for path in action.sources]
    if action.operation == "copy":
        return sources[0]
    dtype = stored_shape(leaf).dtype
    if action.operation == "cast":
        full = sources[0]
        param = _cast(leaf, full)
    else:
        full = _full_value(*sources)
        if action.operation == "master":
            return full
        param, remainder = _pack(full) if action.packed[1] else (None, None)
        if action.operation == "remainder":
            return remainder
        if param is None or param.dtype != dtype:
            param = jax.jit(lambda x: x.astype(dtype))(full)
    if dtype == FLOAT16 and bool(jnp.any(jnp.isinf(param) & jnp.isfinite(full))):
        raise CheckpointError(
            f"The checkpoint cannot be migrated: {leaf.path!r} has values of 65520 or more, which "
            "float16 cannot represent. Migrate to a recipe that stores parameters in bfloat16 or "
            "float32, such as 'bf16_params' or 'fp16'."
        )
    return param


@jax.jit
def _full_value(param: jax.Array, master: jax.Array | None = None) -> jax.Array:
    if master is None:
        return param.astype(FLOAT32)
    return _master.unpack(param, master) if master.dtype == jnp.int16 else master


_pack = jax.jit(_master.pack)


def _create(action: Action, leaf: Leaf, value: Any) -> np.ndarray:
    shape = stored_shape(leaf)
    if action.value is not None:
        return np.full(shape.shape, action.value, shape.dtype)
    if isinstance(value, jax.ShapeDtypeStruct):
        raise CheckpointError(
            f"The checkpoint has no value for {leaf.path!r}, and the given state is abstract. Pass "
            "the recipe of the state: restore(state, recipe=recipe, migrate=True)."
        )
    return np.asarray(value)


def _cast(leaf: Leaf, source: jax.Array) -> Any:
    dtype = stored_shape(leaf).dtype
    with np.errstate(over="ignore"):  # `_make` refuses an infinity
        result = source.astype(dtype)
    if np.dtype(dtype).kind in "iub" and not np.array_equal(
        np.asarray(result).astype(np.int64), np.asarray(source).astype(np.int64)
    ):
        raise CheckpointError(
            f"The checkpoint cannot be migrated: the value of {leaf.path!r}, {source}, does not "
            f"fit {np.dtype(dtype).name}."
        )
    return result


def _finish(leaf: Leaf, stored: Any, value: Any) -> Any:
    """Converts a leaf from its stored form to that of the given state, with its sharding."""
    if leaf.dtype in PYTHON_NUMBERS:
        return PYTHON_NUMBERS[leaf.dtype](np.asarray(stored).item())
    if isinstance(value, (np.ndarray, np.generic)):
        return np.asarray(stored)
    if leaf.is_key:
        stored = jax.random.wrap_key_data(jnp.asarray(stored), impl=_key_impl(leaf)[0])
    sharding = placement(value)
    if isinstance(stored, jax.Array) and stored.sharding == sharding and not leaf.is_key:
        return stored
    return jax.device_put(stored, sharding)
