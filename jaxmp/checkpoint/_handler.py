"""Tests, writes and reads the leaves of a state by orbax, and converts them as a plan demands."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils

from jaxmp import _core
from jaxmp.checkpoint import _manifest
from jaxmp.checkpoint._description import PYTHON_NUMBERS, Description, FlatState, Leaf
from jaxmp.checkpoint._plan import Action, Plan
from jaxmp.errors import CheckpointError
from jaxmp.optim import _master

# Smaller parts are read on the host: compiling a program for each of their shapes takes longer.
_HOST_ELEMENTS = 2**15


def start_test(leaf: Any) -> list[Any]:
    """Starts to test an array of JAX or NumPy; devices continue after this function has returned.

    Each process tests its own parts. A test of the whole array would be a program of all processes,
    which waits forever if one of them is in another program or has died.

    Returns:
      A boolean for each part on this process, which is True if the part is finite. They stay valid
      when the array is donated.
    """
    if not isinstance(leaf, jax.Array):
        return [_is_finite(leaf)]
    return [_is_finite(shard.data) for shard in leaf.addressable_shards if shard.replica_id == 0]


def _is_finite(part: Any) -> Any:
    if not jnp.issubdtype(part.dtype, jnp.inexact):
        return True
    if part.size > _HOST_ELEMENTS and isinstance(part, jax.Array):
        return _on_device(part)
    return np.isfinite(np.asarray(part)).all()


_on_device = jax.jit(_core.all_finite)


def not_finite(tests: dict[str, list[Any]]) -> tuple[str, ...]:
    """Returns the paths of the leaves that are not finite, which are the same on all processes."""
    bad = np.array([not all(map(bool, parts)) for parts in tests.values()], np.bool_)
    if jax.process_count() > 1 and len(bad):
        bad = np.any(multihost_utils.process_allgather(bad), axis=0)
    return tuple(path for path, is_bad in zip(tests, np.atleast_1d(bad), strict=True) if is_bad)


ITEM = "state"


class StateHandler(ocp.PyTreeCheckpointHandler):
    """Orbax's handler of pytrees, which writes the manifest after the last file of the data.

    Orbax calls `finalize` when all data is on disk and before it renames the directory to its final
    name, so a directory of that name has a manifest.
    """

    def __init__(self) -> None:
        super().__init__()
        self._pending: SaveState | None = None

    async def async_save(self, directory: epath.Path, args: SaveState) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Starts to write the leaves."""
        self._pending = args
        tree = ocp.tree.from_flat_dict(args.leaves)
        return await super().async_save(directory, args=ocp.args.PyTreeSave(tree))

    def finalize(self, directory: epath.Path) -> None:
        """Completes the files of the data and writes the manifest."""
        super().finalize(directory)
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._check_written(directory, pending.leaves)
            _manifest.write_manifest(directory, pending.finish())

    def _check_written(self, directory: epath.Path, leaves: dict[_core.Path, Any]) -> None:
        """Compares the arrays on disk with those to write, before an older step is deleted.

        Raises:
          CheckpointError: naming the first array that is missing, or has another shape or dtype.
        """
        try:
            written = ocp.tree.to_flat_dict(self.metadata(directory).tree)
        except (ValueError, OSError) as error:
            reason = str(error).partition(" [")[0]
            raise CheckpointError(
                f"Orbax did not write all arrays to {directory}, so the step stays incomplete: "
                f"{reason}."
            ) from error
        for path, leaf in leaves.items():
            stored = written[path]
            if tuple(stored.shape) != leaf.shape or np.dtype(stored.dtype) != leaf.dtype:
                raise CheckpointError(
                    f"Orbax wrote {'/'.join(path)!r} to {directory} as "
                    f"{stored.dtype}{list(stored.shape)}, and the state has "
                    f"{leaf.dtype}{list(leaf.shape)}. The step stays incomplete."
                )


@ocp.args.register_with_handler(StateHandler, for_save=True)
@dataclasses.dataclass
class SaveState(ocp.args.CheckpointArgs):
    """Leaves to write.

    Attributes:
      leaves: path -> array.
      manifest: the manifest.
      tests: path of each leaf that must be finite -> booleans, which devices may still compute.
      allow_nonfinite: write the manifest even if they are not.
    """

    leaves: dict[_core.Path, Any]
    manifest: _manifest.Manifest
    tests: dict[str, list[Any]]
    allow_nonfinite: bool

    def finish(self) -> _manifest.Manifest:
        """Returns the manifest with the leaves that are not finite; waits for their tests.

        Raises:
          CheckpointError: naming the first leaf that is not finite.
        """
        bad, self.tests = not_finite(self.tests), {}
        if bad and not self.allow_nonfinite:
            more = f" and {len(bad) - 1} other leaves" if bad[1:] else ""
            raise CheckpointError(
                f"Step {self.manifest.step} stays incomplete, because of NaN or infinity in "
                f"{bad[0]!r}{more}. Resume from an earlier step; or save it for a diagnosis: "
                "save(..., allow_nonfinite=True)."
            )
        if bad:
            self.manifest = dataclasses.replace(self.manifest, nonfinite=bad)
        return self.manifest


# ---------------------------------------------------------------------------
# Conversions
# ---------------------------------------------------------------------------


# JAX's name of a key dtype -> its implementation and the number of uint32 in a key.
_KEYS = {
    "key<fry>": ("threefry2x32", 2),
    "key<rbg>": ("rbg", 4),
    "key<urbg>": ("unsafe_rbg", 4),
}

# Reads leaves: path -> shape, stored dtype and sharding (None: a NumPy array).
Reader = Callable[[dict[_core.Path, jax.ShapeDtypeStruct]], dict[_core.Path, Any]]


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
    shapes = {leaf: stored_shape(leaf).update(sharding=sharding) for leaf, sharding in leaves}
    targets = {leaf.names: shape for leaf, shape in shapes.items() if is_written(leaf)}
    values = read(targets) if targets else {}
    return {
        leaf.path: values[leaf.names] if is_written(leaf) else np.zeros(shape.shape, shape.dtype)
        for leaf, shape in shapes.items()
    }


# ---------------------------------------------------------------------------
# Making leaves
# ---------------------------------------------------------------------------


def make_leaves(plan: Plan, stored: Description, flat: FlatState, read: Reader) -> list[Any]:
    """Makes the leaves of a state from those of a checkpoint.

    Args:
      plan: the origin of each leaf of the state.
      stored: description of the checkpoint.
      flat: the given state; its values determine the placement.
      read: function that reads leaves of the checkpoint.
    """
    source = stored.by_path
    for leaf, value in zip(flat.description.leaves, flat.values, strict=True):
        _check_width(leaf, value)
    placements: dict[str, Any] = {}
    for action, value in zip(plan.actions, flat.values, strict=True):
        for path in action.sources:
            is_array = not source[path].is_key and source[path].dtype not in PYTHON_NUMBERS
            sharding = placement(value) if is_array else None
            placements[path] = placements.get(path) or sharding
    values = _read_leaves([(source[p], s) for p, s in placements.items()], read)
    rows = zip(plan.actions, flat.description.leaves, flat.values, strict=True)
    return [_finish(leaf, _make(action, leaf, values, v), v) for action, leaf, v in rows]


def _check_width(leaf: Leaf, value: object) -> None:
    """Refuses 64 bits where JAX would silently convert them to 32."""
    is_array = not leaf.is_key and leaf.dtype not in PYTHON_NUMBERS
    is_of_jax = is_array and not isinstance(value, (np.ndarray, np.generic))
    if is_of_jax and jax.dtypes.canonicalize_dtype(leaf.dtype) != leaf.dtype:
        raise CheckpointError(
            f"Leaf {leaf.path!r} of the state is {leaf.dtype}, which JAX would convert to 32 bits. "
            "Turn on its 64-bit mode, jax.config.update('jax_enable_x64', True), or pass an array "
            f"of NumPy: np.zeros({leaf.shape}, {leaf.dtype!r})."
        )


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
        if action.operation == "remainder":
            return _remainder(full)
        param = _to_storage(full, dtype, "packed" if action.packs else "fp32")
    if dtype == _core.FLOAT16 and bool(jnp.any(jnp.isinf(param) & jnp.isfinite(full))):
        raise CheckpointError(
            f"The checkpoint cannot be migrated: {leaf.path!r} has values of 65520 or more, which "
            "float16 cannot represent. Migrate to a recipe that stores parameters in bfloat16 or "
            "float32, such as 'bf16_params' or 'fp16'."
        )
    return param


@jax.jit
def _full_value(param: jax.Array, master: jax.Array | None = None) -> jax.Array:
    if master is None:
        return param.astype(_core.FLOAT32)
    return _master.read_master(param, master)


_remainder = jax.jit(lambda full: _master.pack(full)[1])
_to_storage = jax.jit(_master.to_storage, static_argnums=(1, 2))


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
