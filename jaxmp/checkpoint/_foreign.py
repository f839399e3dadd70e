"""Checkpoints that plain orbax or Flax wrote. Nothing is ever unpickled."""

from __future__ import annotations

import collections
import dataclasses
import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from jaxmp import _core
from jaxmp._core import PyTree
from jaxmp.checkpoint._description import FOREIGN, Description, Leaf, Masters, Scale, is_below
from jaxmp.checkpoint._handler import stored_shape
from jaxmp.errors import CheckpointError
from jaxmp.optim import _roles

_ORBAX_FILE = "_METADATA"
# In the directory of a step, or of a checkpoint that `orbax.checkpoint.v1` wrote under any name.
_ORBAX_STEP_FILE = "_CHECKPOINT_METADATA"
_STEP_NAME = re.compile(r"(?:.*_)?(\d+)")


@dataclasses.dataclass(frozen=True)
class ForeignCheckpoint:
    """A checkpoint without a manifest.

    Attributes:
      path: directory of a step or of an item of orbax, or file of Flax.
      items: directories of the items of orbax; () for a file of Flax.
      step: its step, by its name; -1: none.
    """

    path: epath.Path
    items: tuple[epath.Path, ...]
    step: int


def find_checkpoint(directory: epath.Path, step: int | None) -> ForeignCheckpoint | None:
    """Finds a checkpoint of orbax or Flax: that of a step, or (None) the latest one."""
    own = _at(directory, -1)
    if own is not None:
        return own if step is None else None
    if not directory.is_dir():
        return None
    names = ((path, _STEP_NAME.fullmatch(path.name)) for path in directory.iterdir())
    steps = ((path, int(match[1])) for path, match in names if match)
    locations = (_at(path, number) for path, number in steps if step in (None, number))
    return max(filter(None, locations), key=lambda location: location.step, default=None)


def _at(path: epath.Path, step: int) -> ForeignCheckpoint | None:
    if not path.exists():
        return None
    if not path.is_dir():
        return ForeignCheckpoint(path, (), step)
    if (path / _ORBAX_FILE).exists():
        return ForeignCheckpoint(path, (path,), step)
    if step < 0 and not (path / _ORBAX_STEP_FILE).exists():
        return None
    items = tuple(sorted(item for item in path.iterdir() if (item / _ORBAX_FILE).exists()))
    return ForeignCheckpoint(path, items, step) if items else None


@dataclasses.dataclass(frozen=True)
class Stored:
    """Leaves of a checkpoint without a manifest.

    Attributes:
      origin: its path, and the program that wrote it.
      description: description of the leaves.
      values: the leaves by path.
    """

    origin: str
    description: Description
    values: dict[str, np.ndarray]

    def read(self, targets: dict[_core.Path, jax.ShapeDtypeStruct]) -> dict[_core.Path, Any]:
        """Returns leaves by path, placed as `targets` are."""
        values: dict[_core.Path, Any] = {path: self.values["/".join(path)] for path in targets}
        for path, target in targets.items():
            if target.sharding is not None:
                values[path] = jax.make_array_from_callback(
                    target.shape, target.sharding, values[path].__getitem__
                )
        return values


def read(location: ForeignCheckpoint, target: Description) -> list[Stored]:
    """Reads a checkpoint into memory and infers the roles of its leaves.

    Returns:
      The states that it may contain. Of several items these are all of them together, by their
      names, such as `params` and `opt_state`, and each of them.

    Args:
      location: the checkpoint.
      target: description of the state to restore, whose optimizers determine the masters.

    Raises:
      CheckpointError: if it cannot be read.
    """
    try:
        if not location.items:
            return [_stored(f"{location.path} was written by Flax", _read_flax(location), target)]
        trees = {item: _read_orbax(item) for item in location.items}
    except (ValueError, KeyError, OSError, TypeError) as error:
        raise CheckpointError(f"{location.path} cannot be read: {error}") from error
    if len(trees) > 1:
        trees = {location.path: {item.name: tree for item, tree in trees.items()}, **trees}
    return [_stored(f"{path} was written by orbax", tree, target) for path, tree in trees.items()]


def _stored(origin: str, tree: PyTree, target: Description) -> Stored:
    values = {
        "/".join(names): np.asarray(value)
        for names, value in _core.leaves_with_path(tree)
        if isinstance(value, (np.ndarray, np.generic, jax.Array, bool, int, float, complex))
    }
    values = _with_our_scale(_without_boxes(values, target), target)
    return Stored(origin, _infer(values, target), values)


def _read_orbax(item: epath.Path) -> PyTree:
    handler = ocp.PyTreeCheckpointHandler()
    tree = handler.metadata(item).tree
    # Orbax reads texts, which have no shape, only as texts.
    array, text = ocp.RestoreArgs(restore_type=np.ndarray), ocp.RestoreArgs()
    restore_args = jax.tree.map(lambda leaf: array if hasattr(leaf, "shape") else text, tree)
    with ocp.Checkpointer(handler) as checkpointer:
        return checkpointer.restore(item, args=ocp.args.PyTreeRestore(restore_args=restore_args))


def _read_flax(location: ForeignCheckpoint) -> PyTree:
    serialization = sys.modules.get("flax.serialization")
    if serialization is None:
        raise _core.missing_dependency("flax", "checkpoints of Flax", "flax")
    tree = serialization.msgpack_restore(location.path.read_bytes())
    if not isinstance(tree, dict):
        raise CheckpointError(f"{location.path} is not a checkpoint of Flax.")
    return tree


_BOX_FIELD = "value"


def _without_boxes(values: dict[str, np.ndarray], target: Description) -> dict[str, np.ndarray]:
    """Omits the field that boxes of Flax, such as `nnx.Variable`, add at the end of paths.

    A leaf of that name is not a box if it has siblings, or if the state has such a leaf, too.
    """
    own = {leaf.names[-2:] for leaf in target.leaves}
    prefixes = ("/".join(names[:end]) for names in map(_split, values) for end in range(len(names)))
    leaves_below = collections.Counter(prefixes)

    def unboxed(path: str) -> str:
        parent, _, name = path.rpartition("/")
        is_box = name == _BOX_FIELD and leaves_below[parent] == 1
        return parent if parent and is_box and _split(path)[-2:] not in own else path

    return {unboxed(path): value for path, value in values.items()}


def _split(path: str) -> _core.Path:
    return tuple(path.split("/"))


# Ends of the paths under which jmp and Flax store a dynamic loss scale -> our names of its leaves.
_SCALES = [
    {"loss_scale/loss_scale": "scale_value", "loss_scale/counter": "good_steps"},
    {"loss_scale/0": "scale_value", "loss_scale/1": "good_steps"},
    {"loss_scale": "scale_value"},
    {"loss_scale/scale": "scale_value", "loss_scale/fin_steps": "good_steps"},
    {"dynamic_scale/scale": "scale_value", "dynamic_scale/fin_steps": "good_steps"},
]


def _with_our_scale(values: dict[str, np.ndarray], target: Description) -> dict[str, np.ndarray]:
    """Moves the scalars of a loss scale of another library to the path of the state's own one."""
    if len(target.scales) != 1 or any(is_below(path, target.scales[0].path) for path in values):
        return values
    scalars = [path for path, value in values.items() if value.shape == ()]
    for names in _SCALES:
        ours = {
            path: f"{target.scales[0].path}/{name}"
            for path in scalars
            for end, name in names.items()
            if f"/{path}".endswith(f"/{end}")
        }
        if len(ours) == len(names) == len({*ours.values()}):
            return {ours.get(path, path): value for path, value in values.items()}
    return values


def _infer(values: dict[str, np.ndarray], target: Description) -> Description:
    """Describes leaves by the paths that the optimizers of `target` would give them."""
    masters = tuple(filter(None, (_infer_masters(row, values) for row in target.masters)))
    roles = {path: role for row in masters for path, role in row.roles.items()}
    scales = tuple(
        Scale(scale.path, FOREIGN)
        for scale in target.scales
        if any(is_below(path, scale.path) for path in values)
    )
    roles |= {path: _roles.LOSS_SCALE for path in values for s in scales if is_below(path, s.path)}
    kept = (_roles.COUNTER, _roles.FP8)
    roles |= {leaf.path: leaf.role for leaf in target.leaves if leaf.role in kept}
    is_fp8 = lambda path: _roles.FP8 in map(_roles.COLLECTIONS.get, path.split("/"))
    roles |= dict.fromkeys(filter(is_fp8, values), _roles.FP8)
    keys = {leaf.path: leaf for leaf in target.leaves if leaf.is_key}
    leaves = tuple(
        keys[path]
        if path in keys and _holds_key(value, keys[path])
        else Leaf(path, jnp.dtype(value.dtype).name, value.shape, roles.get(path, _roles.OTHER))
        for path, value in values.items()
    )
    optimizers = target.optimizers if masters else ()
    return Description(leaves, masters, scales, optimizers)


def _holds_key(value: np.ndarray, key: Leaf) -> bool:
    """Returns True for an array of integers that are the data of PRNG keys like that leaf."""
    stored = stored_shape(key)
    return (value.shape, value.dtype) == (stored.shape, stored.dtype)


def _infer_masters(row: Masters, values: dict[str, np.ndarray]) -> Masters | None:
    has = lambda name: any(is_below(path, f"{row.path}/{name}".lstrip("/")) for path in values)
    if not has("inner_state"):
        return None
    layout = next(filter(lambda layout: has(f"{layout}_masters"), ("fp32", "packed")), "no")
    root = f"{row.path}/{layout}_masters".lstrip("/")
    stored = lambda path: path if path in values else ""
    parameters = (
        dataclasses.replace(p, leaf=stored(p.leaf), master=stored(f"{root}/{p.inside}"))
        for p in row.parameters
    )
    return Masters(row.path, layout, tuple(parameters))
