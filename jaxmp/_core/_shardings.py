"""Trees of shardings that users pass."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec, Sharding

from jaxmp._core import _compat
from jaxmp._core._messages import did_you_mean
from jaxmp._core._trees import Path, path_names, strip_collection
from jaxmp._core._typing import Array, PyTree
from jaxmp.errors import JaxmpError


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
    is_sharding = lambda node: isinstance(node, Sharding)
    for key_path, sharding in jax.tree.leaves_with_path(shardings, is_leaf=is_sharding):
        names = strip_collection(as_parts(path_names(key_path)))
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
    (first, sharding), *others = result.items()
    for name, other in others:
        if other.mesh != sharding.mesh:
            raise JaxmpError(
                f"{argument} contains shardings on different meshes: {sharding.mesh} at "
                f"{'/'.join(first)!r} and {other.mesh} at {'/'.join(name)!r}. Use one mesh: "
                f"NamedSharding(mesh, {other.spec!r})."
            )
    return result


def check_tree(
    argument: str,
    shardings: Mapping[Path, NamedSharding],
    owner: str,
    shapes: Mapping[Path, tuple[int, ...]],
    required: Iterable[Path] = (),
) -> None:
    """Raises an error if shardings do not fit the parameters.

    Args:
      argument: the name of the argument with the shardings.
      shardings: path of a parameter -> its sharding.
      owner: the object with the parameters: "the model" or "the state".
      shapes: path -> shape of its arrays.
      required: paths that must have a sharding.
    """
    unknown = ["/".join(name) for name in shardings if name not in shapes]
    missing = ["/".join(name) for name in required if name not in shardings]
    for name, sharding in () if unknown else shardings.items():
        _check_fit(argument, name, sharding, shapes[name])
    if unknown or missing:
        options = missing or ["/".join(name) for name in shapes]
        hints = "".join(did_you_mean(name, options) for name in unknown)
        lists = (", ".join(map(repr, names)) for names in (unknown, missing))
        text = "{0} contains {1}, and {3} has no such parameter.{4} " if unknown else ""
        text += "{0} contains no sharding for {2}. " if missing else ""
        text = text.format(argument, *lists, owner, hints)
        raise JaxmpError(
            f"{text}Use the tree of the parameters: jax.tree.map(lambda p: NamedSharding(mesh, "
            "PartitionSpec()), params)."
        )


def _check_fit(argument: str, name: Path, sharding: NamedSharding, shape: tuple[int, ...]) -> None:
    """Raises an error if a sharding has more dimensions than its parameter.

    Also if it does not split the array into equal parts, as JAX requires.
    """
    spec = sharding.spec
    if len(spec) > len(shape):
        raise JaxmpError(
            f"{argument} has {spec!r} at {'/'.join(name)!r}, and the parameter has the shape "
            f"{shape}. Use at most {len(shape)} entries: {PartitionSpec(*spec[: len(shape)])!r}."
        )

    for dimension, (entry, size) in enumerate(zip(spec, shape, strict=False)):
        count = math.prod(sharding.mesh.shape[axis] for axis in axis_names((entry,)))
        if size % count:
            whole = PartitionSpec(*spec[:dimension], None, *spec[dimension + 1 :])
            raise JaxmpError(
                f"{argument} has {spec!r} at {'/'.join(name)!r}, and the parameter has the shape "
                f"{shape}: {count} devices cannot share dimension {dimension} evenly. Leave it "
                f"whole: {whole!r}."
            )


def axis_names(spec: Iterable[object]) -> frozenset[str]:
    """Returns the mesh axes of a partition spec."""
    entries = (entry if isinstance(entry, tuple) else (entry,) for entry in spec)
    return frozenset(name for entry in entries for name in entry if isinstance(name, str))


def as_parts(names: Path) -> Path:
    """Splits the keys of a path at slashes, so that "in/kernel" is the key of a kernel."""
    return tuple("/".join(names).split("/"))


def in_mesh_of(arrays: Iterable[object]) -> contextlib.AbstractContextManager[object]:
    """Returns a context in which the explicit mesh of arrays is the current one, if there is none.

    `jax.jit` takes the mesh from its arguments. Operations that run alone may have none.
    """
    shardings = (getattr(array, "sharding", None) for array in arrays)
    meshes = (each.mesh for each in shardings if isinstance(each, NamedSharding))
    mesh: Any = next((m for m in meshes if AxisType.Explicit in m.axis_types), None)
    is_set = mesh is None or not _compat.current_mesh().empty
    return contextlib.nullcontext() if is_set else jax.set_mesh(mesh)


def in_mesh_of_type(x: object) -> contextlib.AbstractContextManager[object]:
    """Returns a context in which operations can read an array of another mesh than the current one.

    Inside of a function of `jax.sharding.auto_axes`, arrays belong to another mesh than outside.
    """
    if isinstance(x, jax.Array):
        mesh: Any = jax.typeof(x).sharding.mesh
        if not mesh.empty and mesh != jax.sharding.get_abstract_mesh():
            return jax.sharding.use_abstract_mesh(mesh)
    return contextlib.nullcontext()


def moved_to_mesh_of(scalar: Array, x: Array) -> Array:
    """Moves a scalar to the mesh of an array, so that one operation can read both."""
    mesh: Any = jax.typeof(x).sharding.mesh
    is_own = not isinstance(scalar, jax.Array) or jax.typeof(scalar).sharding.mesh == mesh
    return scalar if is_own else jax.sharding.reshard(scalar, NamedSharding(mesh, PartitionSpec()))


def flattened(x: Array) -> Array:
    """Returns the elements of an array as a vector, without axes of an explicit mesh.

    JAX does not reshape over such axes. The operations are primitives, for use in interpreters.
    """
    sharding: Any = jax.typeof(x).sharding
    if any(axis is not None for axis in sharding.spec):
        x = jax.sharding.reshard(x, NamedSharding(sharding.mesh, PartitionSpec()))
    return lax.reshape(x, (x.size,))


# Elements of a tensor that are compared, at most: a regular subset, which suffices for its error.
SAMPLES = 65536


def sampled(x: Array, count: int = SAMPLES) -> Array:
    """Returns at most `count` elements at equal distances, as a float32 vector."""
    sample = flattened(x)[:: max(-(-x.size // count), 1)]
    return lax.convert_element_type(sample, jnp.float32)
