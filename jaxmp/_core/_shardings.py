"""Trees of shardings that users pass."""

from __future__ import annotations

import math
from collections.abc import Iterable

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from jaxmp._core._trees import Path, path_names
from jaxmp._core._typing import PyTree
from jaxmp.errors import JaxmpError, did_you_mean

# Names under which a Variable of Flax NNX stores its array.
_CONTENTS = frozenset({"value", "raw_value"})


def shardings_by_path(shardings: PyTree, argument: str) -> dict[Path, NamedSharding]:
    """Returns path of a parameter, without its collection -> its sharding.

    Args:
      shardings: a `NamedSharding` for each parameter, in a tree like the parameters.
      argument: the name of the argument, for messages.

    Raises:
      JaxmpError: if a leaf is not a `NamedSharding`, if there is none, or if they are on different
        meshes.
    """
    if isinstance(shardings, (NamedSharding, PartitionSpec)):
        raise JaxmpError(
            f"{argument} is {shardings!r}. Use a tree with a NamedSharding for each parameter: "
            "jax.tree.map(lambda p: NamedSharding(mesh, PartitionSpec()), params)."
        )
    result: dict[Path, NamedSharding] = {}
    flat, _ = jax.tree_util.tree_flatten_with_path(
        shardings, is_leaf=lambda node: isinstance(node, Sharding)
    )
    for key_path, sharding in flat:
        names = without_contents(path_names(key_path))
        names = names[1:] if len(names) > 1 and names[0] == "params" else names
        if not isinstance(sharding, NamedSharding):
            value = repr(sharding)
            if isinstance(sharding, (jax.Array, jax.ShapeDtypeStruct)):
                value = f"{sharding.dtype.name}{[*sharding.shape]}"
            raise JaxmpError(
                f"{argument} has {value} at {'/'.join(names)!r}. Use a "
                "jax.sharding.NamedSharding(mesh, spec) for each parameter."
            )
        result[names] = sharding
    if not result:
        raise JaxmpError(f"{argument} contains no sharding. Use one for each parameter.")
    if len({sharding.mesh for sharding in result.values()}) > 1:
        raise JaxmpError(f"{argument} contains shardings on different meshes. Use one mesh.")
    return result


def missing_parameter(argument: str, name: Path, owner: str, paths: Iterable[Path]) -> JaxmpError:
    """Returns an error for a sharding of a parameter that does not exist.

    Args:
      argument: the name of the argument with the shardings.
      name: the path of the parameter.
      owner: the object that lacks it: "the model" or "the state".
      paths: those of the parameters that it has.
    """
    hint = did_you_mean("/".join(name), map("/".join, paths))
    return JaxmpError(
        f"{argument} contains {'/'.join(name)!r}, and {owner} has no such parameter.{hint} Use the "
        "tree of the parameters: jax.tree.map(lambda p: NamedSharding(mesh, PartitionSpec()), "
        "params)."
    )


def check_rank(argument: str, name: Path, spec: PartitionSpec, shape: tuple[int, ...]) -> None:
    """Raises an error if the sharding of a parameter has more dimensions than the parameter."""
    if len(spec) > len(shape):
        raise JaxmpError(
            f"{argument} has {spec!r} at {'/'.join(name)!r}, and the parameter has the shape "
            f"{shape}. Use at most {len(shape)} entries: {PartitionSpec(*spec[: len(shape)])!r}."
        )


def check_even(argument: str, name: Path, sharding: NamedSharding, shape: tuple[int, ...]) -> None:
    """Raises an error if a sharding does not split an array into equal parts, as JAX requires."""
    spec = sharding.spec
    for dimension, (entry, size) in enumerate(zip(spec, shape, strict=False)):
        axes = entry if isinstance(entry, tuple) else (entry,)
        count = math.prod(sharding.mesh.shape[axis] for axis in axes if isinstance(axis, str))
        if size % count:
            whole = PartitionSpec(*spec[:dimension], None, *spec[dimension + 1 :])
            raise JaxmpError(
                f"{argument} has {spec!r} at {'/'.join(name)!r}, and the parameter has the shape "
                f"{shape}: {count} devices cannot share dimension {dimension} evenly. Leave it "
                f"whole: {whole!r}."
            )


def without_contents(names: Path) -> Path:
    """Returns a path without the name of the array in a Variable of Flax NNX."""
    return names[:-1] if names and names[-1] in _CONTENTS else names
