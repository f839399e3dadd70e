"""Shardings of the arrays that jaxmp adds to a training state."""

from __future__ import annotations

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxmp._core._shardings import shardings_by_path, without_contents
from jaxmp._core._trees import Path, leaves_with_path, path_names
from jaxmp._core._typing import PyTree
from jaxmp.errors import JaxmpError

__all__ = ["state_shardings"]


def state_shardings(
    state: PyTree, params_shardings: PyTree, *, optimizer: str = "like_params"
) -> PyTree:
    """Returns a sharding for each array of a training state.

    Parameters get the shardings in `params_shardings`. Masters, packed remainders and moments are
    found by their paths, which end in the path of their parameter, and by their shapes. All other
    arrays, such as loss scale, counters, FP8 state and the factored moments of Adafactor, are
    replicated.

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
        different meshes, if a parameter is not in the state, or if the mesh has no axis of the name
        `optimizer`.

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
    missing = [names for names in placements if names not in shapes]
    if missing:
        raise JaxmpError(
            f"params_shardings contains {'/'.join(missing[0])!r}, and the state has no such "
            "parameter. Use the tree of the parameters: jax.tree.map(lambda p: "
            "NamedSharding(mesh, PartitionSpec()), state.params)."
        )

    def sharding_of(key_path: tuple[object, ...], leaf: jax.Array) -> NamedSharding:
        names = path_names(key_path)
        param = matches[names]
        if param is None or leaf.shape != shapes[param][1]:
            return NamedSharding(mesh, PartitionSpec())
        sharding = placements[param]
        if names == shapes[param][0] or optimizer == "like_params":
            return sharding
        return _split_further(sharding, leaf.shape, optimizer)

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
    states are deeper.
    """
    shapes: dict[Path, tuple[Path, tuple[int, ...]]] = {}
    for names, leaf in leaves_with_path(state):
        param = matches[names]
        if param is not None and (param not in shapes or len(names) < len(shapes[param][0])):
            shapes[param] = names, leaf.shape
    return shapes


def _split_further(sharding: NamedSharding, shape: tuple[int, ...], axis: str) -> NamedSharding:
    """Splits an array over one more mesh axis, if one of its dimensions allows that."""
    spec = [*sharding.spec, *(None for _ in range(len(shape) - len(sharding.spec)))]
    used = {name for entry in spec for name in (entry if isinstance(entry, tuple) else (entry,))}
    if axis in used:
        return sharding
    for dimension, (entry, size) in enumerate(zip(spec, shape, strict=True)):
        if entry is None and size and size % sharding.mesh.shape[axis] == 0:
            spec[dimension] = axis
            return NamedSharding(sharding.mesh, PartitionSpec(*spec))
    return sharding
