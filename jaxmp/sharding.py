"""Shardings of the arrays that jaxmp adds to a training state."""

from __future__ import annotations

import warnings

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxmp._core._shardings import (
    check_even,
    check_rank,
    missing_parameter,
    shardings_by_path,
    without_contents,
)
from jaxmp._core._trees import Path, is_castable, leaves_with_path, path_names
from jaxmp._core._typing import PyTree
from jaxmp.errors import JaxmpError, RecipeWarning

__all__ = ["state_shardings"]


def state_shardings(
    state: PyTree, params_shardings: PyTree, *, optimizer: str = "like_params"
) -> PyTree:
    """Returns a sharding for each array of a training state.

    Parameters get the shardings in `params_shardings`. Masters, packed remainders and moments are
    found by their paths, which end in the path of their parameter, and by their shapes. All other
    arrays, such as loss scale, counters, FP8 state and the factored moments of Adafactor, are
    replicated. If several models are trained, call the function for each of them, with its
    optimizer.

    Args:
      state: a `TrainState`, the state of NNX objects (`nnx.state((model, optimizer))`), or any
        other pytree that contains the parameters; arrays, or their shapes from `jax.eval_shape`.
      params_shardings: a `NamedSharding` for each parameter, in a tree with the structure of the
        parameters.
      optimizer: "like_params", or the name of a mesh axis. With an axis, masters and moments are
        split over it along the first dimension that is divisible and not split yet, in addition to
        the sharding of the parameter. This is stage 1 of ZeRO (Rajbhandari et al. 2020).

    Returns:
      A pytree with the structure of `state` and a `NamedSharding` for each array, for
      `jax.device_put` and `jax.jit(..., out_shardings=...)`.

    Raises:
      JaxmpError: if a leaf of `params_shardings` is not a `NamedSharding`, if the shardings are on
        different meshes, if a parameter is not in the state or its sharding does not split it
        evenly, or if the mesh has no axis of the name `optimizer`.

    Warns:
      RecipeWarning: if an array has the name and the shape of a parameter that is split, but its
        path does not end in the path of the parameter, so that the array is replicated.

    Example:
      >>> from jax.sharding import NamedSharding, PartitionSpec
      >>> mesh = jax.make_mesh((1,), ("data",))
      >>> params = {"dense": {"kernel": jnp.ones((8, 4))}}
      >>> state = {"params": params, "opt_state": optax.adam(1e-3).init(params)}
      >>> on_rows = {"dense": {"kernel": NamedSharding(mesh, PartitionSpec("data", None))}}
      >>> shardings = state_shardings(state, on_rows)
      >>> shardings["opt_state"][0].mu["dense"]["kernel"].spec
      P('data', None)
      >>> shardings["opt_state"][0].count.spec
      P()
    """
    placements = shardings_by_path(params_shardings, "params_shardings")
    mesh = next(iter(placements.values())).mesh
    if optimizer != "like_params" and optimizer not in mesh.axis_names:
        raise JaxmpError(
            f"optimizer={optimizer!r} is neither 'like_params' nor an axis of the mesh, whose axes "
            f"are {', '.join(map(repr, mesh.axis_names))}. For ZeRO-1 write "
            f"optimizer={mesh.axis_names[0]!r}."
        )
    longest = max(map(len, placements))
    matches = {names: _match(names, placements, longest) for names, _ in leaves_with_path(state)}
    shapes = _parameter_shapes(state, matches)
    for names, sharding in placements.items():
        if names not in shapes:
            suffixes = (without_contents(path)[-len(names) :] for path in matches)
            paths = {path[1:] if path[:1] == ("params",) else path for path in suffixes}
            raise missing_parameter("params_shardings", names, "the state", paths)
        check_rank("params_shardings", names, sharding.spec, shapes[names][1])
        check_even("params_shardings", names, sharding, shapes[names][1])
    _warn_of_lost_moments(state, matches, placements, shapes)

    def sharding_of(key_path: tuple[object, ...], leaf: jax.Array) -> NamedSharding:
        names = path_names(key_path)
        param = matches[names]
        if param is None or np.shape(leaf) != shapes[param][1]:
            return NamedSharding(mesh, PartitionSpec())
        sharding = placements[param]
        if names == shapes[param][0] or optimizer == "like_params":
            return sharding
        return _split_further(sharding, np.shape(leaf), optimizer)

    return jax.tree_util.tree_map_with_path(sharding_of, state)


def _match(names: Path, placements: dict[Path, NamedSharding], longest: int) -> Path | None:
    """Returns the longest path of a parameter in which a path of the state ends."""
    names = without_contents(names)
    for length in range(min(longest, len(names)), 0, -1):
        if names[-length:] in placements:
            return names[-length:]
    return None


def _parameter_shapes(
    state: PyTree, matches: dict[Path, Path | None]
) -> dict[Path, tuple[Path, tuple[int, ...]]]:
    """Returns path of a parameter -> its path in the state and its shape.

    Of all arrays with the path of a parameter, the parameter is the least deep one: optimizer
    states are deeper. Of those at one depth, such as averages of the parameters, it is in "params".
    The `params` beside an `opt_state` precede both, because averages may be beside a train state.
    """
    paths = [names for names, _ in leaves_with_path(state)]
    owners = {names[: names.index("opt_state")] for names in paths if "opt_state" in names}

    def rank(names: Path) -> tuple[bool, int, int]:
        is_beside = any(name == "params" and names[:i] in owners for i, name in enumerate(names))
        return not is_beside, len(names), -names.count("params")

    shapes: dict[Path, tuple[Path, tuple[int, ...]]] = {}
    for names, leaf in leaves_with_path(state):
        param = matches[names]
        if param is not None and (param not in shapes or rank(names) < rank(shapes[param][0])):
            shapes[param] = names, np.shape(leaf)
    return shapes


def _warn_of_lost_moments(
    state: PyTree,
    matches: dict[Path, Path | None],
    placements: dict[Path, NamedSharding],
    shapes: dict[Path, tuple[Path, tuple[int, ...]]],
) -> None:
    """Warns of an array that is replicated, and has name and shape of a parameter that is split."""
    split = {
        (names[-1], shapes[names][1]): names
        for names, sharding in placements.items()
        if any(sharding.spec)
    }
    for names, leaf in leaves_with_path(state):
        path = without_contents(names)
        param = split.get((path[-1], np.shape(leaf))) if path and matches[names] is None else None
        if param is not None and is_castable(leaf):
            warnings.warn(
                f"state_shardings replicates {'/'.join(path)!r}: its path does not end in "
                f"{'/'.join(param)!r}, a parameter of the same shape, which is split. If there are "
                "several models, call state_shardings for each of them, with its optimizer. For "
                "NNX, use the tree of the model alone: nnx.state(model, nnx.Param).",
                RecipeWarning,
                stacklevel=3,
            )
            return


def _split_further(sharding: NamedSharding, shape: tuple[int, ...], axis: str) -> NamedSharding:
    """Splits an array over one more mesh axis, if one of its dimensions allows that."""
    spec = [*sharding.spec, *(None for _ in range(len(shape) - len(sharding.spec)))]
    used = {name for entry in spec for name in (entry if isinstance(entry, tuple) else (entry,))}
    if axis in used:
        return sharding
    for dimension, (entry, size) in enumerate(zip(spec, shape, strict=True)):
        if entry is None and size and size % sharding.mesh.shape[axis] == 0:
            spec[dimension] = axis
            return sharding.update(spec=PartitionSpec(*spec))
    return sharding
