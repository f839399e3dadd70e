"""Orbax handler that tests, writes and reads the leaves of a state, and its manifest with them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils

from jaxmp._core._trees import Path
from jaxmp.checkpoint._manifest import Manifest, write_manifest
from jaxmp.errors import CheckpointError

# Smaller parts are read on the host: compiling a program for each of their shapes takes longer.
_HOST_ELEMENTS = 2**15


def start_tests(leaves: dict[str, Any]) -> dict[str, list[Any]]:
    """Starts to test leaves; devices continue after this function has returned.

    Args:
      leaves: path -> array of JAX or NumPy, without PRNG keys.

    Returns:
      For each path a boolean of each part on this process, which is True if the part is finite.
      They stay valid when the leaves are donated.
    """
    return {path: list(map(_is_finite, _parts(leaf))) for path, leaf in leaves.items()}


def not_finite(tests: dict[str, list[Any]]) -> tuple[str, ...]:
    """Returns the paths of the leaves that are not finite, which are the same on all processes."""
    bad = np.array([not all(map(bool, parts)) for parts in tests.values()], np.bool_)
    if jax.process_count() > 1 and len(bad):
        bad = np.any(multihost_utils.process_allgather(bad), axis=0)
    return tuple(path for path, is_bad in zip(tests, np.atleast_1d(bad), strict=True) if is_bad)


def _parts(leaf: Any) -> list[Any]:
    if not isinstance(leaf, jax.Array):
        return [leaf]
    return [shard.data for shard in leaf.addressable_shards if shard.replica_id == 0]


def _is_finite(part: Any) -> Any:
    if not jnp.issubdtype(part.dtype, jnp.inexact):
        return True
    if part.size > _HOST_ELEMENTS and isinstance(part, jax.Array):
        return _on_device(part)
    return np.isfinite(np.asarray(part)).all()


@jax.jit
def _on_device(part: jax.Array) -> jax.Array:
    return jnp.isfinite(part).all()


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
        return await super().async_save(directory, args=ocp.args.PyTreeSave(nest(args.leaves)))

    def finalize(self, directory: epath.Path) -> None:
        """Completes the files of the data and writes the manifest."""
        super().finalize(directory)
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._check_written(directory, pending.leaves)
            write_manifest(directory, pending.finish())

    def _check_written(self, directory: epath.Path, leaves: dict[Path, Any]) -> None:
        """Compares the arrays on disk with those to write, before an older step is deleted.

        Raises:
          CheckpointError: naming the first array that is missing, or has another shape or dtype.
        """
        try:
            written = self.metadata(directory).tree
        except (ValueError, OSError) as error:
            reason = str(error).partition(" [")[0]
            raise CheckpointError(
                f"Orbax did not write all arrays to {directory}, so the step stays incomplete: "
                f"{reason}."
            ) from error
        for path, leaf in leaves.items():
            stored = _lookup(written, path)
            if tuple(stored.shape) != leaf.shape or np.dtype(stored.dtype) != leaf.dtype:
                raise CheckpointError(
                    f"Orbax wrote {'/'.join(path)!r} to {directory} as "
                    f"{stored.dtype}{list(stored.shape)}, and the state has "
                    f"{leaf.dtype}{list(leaf.shape)}. The step stays incomplete."
                )

    def restore(self, directory: epath.Path, args: RestoreState) -> dict[Path, Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Returns the leaves that are named in `args`, by their paths."""
        restored = super().restore(
            directory,
            args=ocp.args.PyTreeRestore(
                item=nest(args.targets),
                restore_args=nest({path: _restore_args(x) for path, x in args.targets.items()}),
                partial_restore=True,
            ),
        )
        return {path: _lookup(restored, path) for path in args.targets}


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

    leaves: dict[Path, Any]
    manifest: Manifest
    tests: dict[str, list[Any]]
    allow_nonfinite: bool

    def finish(self) -> Manifest:
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


@ocp.args.register_with_handler(StateHandler, for_restore=True)
@dataclasses.dataclass
class RestoreState(ocp.args.CheckpointArgs):
    """Leaves to read.

    Attributes:
      targets: path -> `jax.ShapeDtypeStruct` with the stored shape and dtype. With a sharding the
        leaf becomes a JAX array, without one a NumPy array.
    """

    targets: dict[Path, jax.ShapeDtypeStruct]


def _restore_args(target: jax.ShapeDtypeStruct) -> ocp.RestoreArgs:
    if target.sharding is None:
        return ocp.RestoreArgs(restore_type=np.ndarray, dtype=target.dtype)
    return ocp.ArrayRestoreArgs(
        sharding=target.sharding, global_shape=target.shape, dtype=target.dtype
    )


def nest(leaves: dict[Path, Any]) -> dict[str, Any]:
    """Returns nested dicts of leaves by their paths."""
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        node = tree
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = leaf
    return tree


def _lookup(tree: dict[str, Any], path: Path) -> Any:
    for name in path:
        tree = tree[name]
    return tree
