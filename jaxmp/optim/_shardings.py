"""Shardings of the arrays that jaxmp adds to a training state."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxmp import _core
from jaxmp._core import Path, PyTree
from jaxmp.errors import JaxmpError


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
        parameters. Keys such as "opt_state/0/mu" place other arrays of the state.
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
      RecipeWarning: if large arrays are replicated although parameters are split, such as the
        history of L-BFGS, factors of Shampoo, the state of `optax.flatten`, and a parameter that
        `params_shardings` lacks. Arrays are large above 4 kB and above a hundredth of a device's
        part of the parameters. Also if an array has the name and the shape of a parameter that is
        split, but its path does not end in the path of the parameter.

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
    placements = _core.shardings_by_path(params_shardings, "params_shardings")
    mesh = next(iter(placements.values())).mesh
    if optimizer != "like_params" and optimizer not in mesh.axis_names:
        raise JaxmpError(
            f"optimizer={optimizer!r} is neither 'like_params' nor an axis of the mesh, whose axes "
            f"are {', '.join(map(repr, mesh.axis_names))}. For ZeRO-1 write "
            f"optimizer={mesh.axis_names[0]!r}."
        )
    matches = {names: _match(names, placements) for names, _ in _core.leaves_with_path(state)}
    shapes = _parameter_shapes(state, matches)
    known = {names: shape for names, (_, shape) in shapes.items()}
    for names in [names for names in placements if names not in known]:
        # Names for the message.
        suffixes = (path[-len(names) :] for path in matches)
        known |= {_core.strip_collection(path): () for path in suffixes}
    _core.check_tree("params_shardings", placements, "the state", known)
    axis = None if optimizer == "like_params" else optimizer
    _warn_of_replicated(state, matches, placements, shapes, axis)

    def sharding_of(key_path: tuple[object, ...], leaf: jax.Array) -> NamedSharding:
        names = _core.path_names(key_path)
        param = matches[names]
        if param is None or np.shape(leaf) != shapes[param][1]:
            return NamedSharding(mesh, PartitionSpec())
        sharding = placements[param]
        if names == shapes[param][0] or optimizer == "like_params":
            return sharding
        return _split_further(sharding, np.shape(leaf), optimizer)

    return jax.tree_util.tree_map_with_path(sharding_of, state)


def _match(names: Path, placements: dict[Path, NamedSharding]) -> Path | None:
    """Returns the longest path of a parameter in which a path of the state ends."""
    names = _core.as_parts(names)
    ends = (names[start:] for start in range(len(names)))
    return next((end for end in ends if end in placements), None)


def _parameter_shapes(
    state: PyTree, matches: dict[Path, Path | None]
) -> dict[Path, tuple[Path, tuple[int, ...]]]:
    """Returns path of a parameter -> its path in the state and its shape.

    Of all arrays with the path of a parameter, the parameter is the least deep one: optimizer
    states are deeper. Of those at one depth, such as averages of the parameters, it is in "params".
    The `params` beside an `opt_state` precede both, because averages may be beside a train state.
    """
    paths = [names for names, _ in _core.leaves_with_path(state)]
    owners = {names[: names.index("opt_state")] for names in paths if "opt_state" in names}

    def rank(names: Path) -> tuple[bool, int, int]:
        is_beside = any(name == "params" and names[:i] in owners for i, name in enumerate(names))
        return not is_beside, len(names), -names.count("params")

    shapes: dict[Path, tuple[Path, tuple[int, ...]]] = {}
    for names, leaf in _core.leaves_with_path(state):
        param = matches[names]
        if param is not None and (param not in shapes or rank(names) < rank(shapes[param][0])):
            shapes[param] = names, np.shape(leaf)
    return shapes


# Smaller arrays, such as the statistics of a norm, may be replicated: 4 kB, as in the audit, and a
# hundredth of a device's part of the parameters.
_SMALL, _SHARE = 4096, 0.01

_REPLICATED = """\
state_shardings replicates {first}{others}, although parameters are split. If there are several \
models, call state_shardings for each of them, with its optimizer. For NNX, params_shardings has \
the structure of nnx.state(model, nnx.Param).
{arrays}
Otherwise, add their shardings; those with PartitionSpec() remain replicated:
    shardings = state_shardings(state, {{
        **params_shardings,
{code}
    }})"""


def _warn_of_replicated(
    state: PyTree,
    matches: dict[Path, Path | None],
    placements: dict[Path, NamedSharding],
    shapes: dict[Path, tuple[Path, tuple[int, ...]]],
    axis: str | None,
) -> None:
    """Warns of large arrays that are replicated, and of those with name and shape of a parameter.

    Args:
      state, matches, placements, shapes: as in `state_shardings`.
      axis: that over which moments are split; None: as their parameters.
    """
    split = {names: s for names, s in placements.items() if axis or any(s.spec)}
    by_name = {(names[-1], shapes[names][1]) for names in split}
    flat = dict(_core.leaves_with_path(state))
    owned = sum(_bytes(flat[path], placements[names]) for names, (path, _) in shapes.items())
    names_of_rows, rows, code = [], [], []
    for names, leaf in flat.items() if split else ():
        param, shape = matches[names], np.shape(leaf)
        if _core.dtype_of(leaf) is None or (
            param and (param not in split or shape == shapes[param][1])
        ):
            continue
        like = split[param or next(iter(split))]
        sharding = like.update(spec=PartitionSpec())
        size = _bytes(leaf, sharding)
        is_alike = param is None and (*names[-1:], shape) in by_name
        if not is_alike and size <= max(_SMALL, _SHARE * owned):
            continue
        reason = "its path does not end in one of params_shardings"
        rank = len(shapes[param][1]) if param else 0
        if param:
            reason = f"its parameter {'/'.join(param)!r} has the shape {[*shapes[param][1]]}"
        if param and shape[-rank:] == shapes[param][1] and not axis:
            spec = *(None,) * (len(shape) - rank), *like.spec
            sharding = like.update(spec=PartitionSpec(*spec))
        else:
            used = (name for entry in like.spec for name in np.ravel(entry) if name)
            sharding = _split_further(sharding, shape, axis or str(next(used)))
        wasted = (size - _bytes(leaf, sharding)) / 1e6
        names_of_rows.append(repr("/".join(names)))
        rows.append(f"{leaf.dtype}{[*shape]}, {reason}; {wasted:.3g} MB per device could be saved")
        code.append(f"NamedSharding(mesh, {sharding.spec!r})")
    if rows:
        rest = len(rows) - 1
        text = _REPLICATED.format(
            first=names_of_rows[0],
            others=f" and {rest} more" if rest else "",
            arrays="\n".join(map("    {}: {}.".format, names_of_rows, rows)),
            code="\n".join(map("        {}: {},".format, names_of_rows, code)),
        )
        _core.warn_user(text)


def _bytes(leaf: Any, sharding: NamedSharding) -> int:
    """Returns the bytes of a device's part of an array."""
    return math.prod(sharding.shard_shape(np.shape(leaf))) * np.dtype(_core.dtype_of(leaf)).itemsize


def _split_further(sharding: NamedSharding, shape: tuple[int, ...], axis: str) -> NamedSharding:
    """Splits an array over one more mesh axis, if one of its dimensions allows that."""
    spec = [*sharding.spec, *(None for _ in range(len(shape) - len(sharding.spec)))]
    if axis in _core.axis_names(spec):
        return sharding
    for dimension, (entry, size) in enumerate(zip(spec, shape, strict=True)):
        if entry is None and size and size % sharding.mesh.shape[axis] == 0:
            spec[dimension] = axis
            return sharding.update(spec=PartitionSpec(*spec))
    return sharding
