"""Trees of shardings that users pass."""

from __future__ import annotations

import jax
from jax.sharding import NamedSharding, Sharding

from jaxmp._core._trees import Path, path_names
from jaxmp._core._typing import PyTree
from jaxmp.errors import JaxmpError

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
    result: dict[Path, NamedSharding] = {}
    flat, _ = jax.tree_util.tree_flatten_with_path(
        shardings, is_leaf=lambda node: isinstance(node, Sharding)
    )
    for key_path, sharding in flat:
        names = without_contents(path_names(key_path))
        names = names[1:] if len(names) > 1 and names[0] == "params" else names
        if not isinstance(sharding, NamedSharding):
            raise JaxmpError(
                f"{argument} has {sharding!r} at {'/'.join(names)!r}. Use a "
                "jax.sharding.NamedSharding(mesh, spec) for each parameter."
            )
        result[names] = sharding
    if not result:
        raise JaxmpError(f"{argument} contains no sharding. Use one for each parameter.")
    if len({sharding.mesh for sharding in result.values()}) > 1:
        raise JaxmpError(f"{argument} contains shardings on different meshes. Use one mesh.")
    return result


def without_contents(names: Path) -> Path:
    """Returns a path without the name of the array in a Variable of Flax NNX."""
    return names[:-1] if names and names[-1] in _CONTENTS else names
