"""Sharding constraints on parameters, from which gradients take the shardings of the weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxmp import _core
from jaxmp._core import Array, Path, PyTree
from jaxmp.errors import JaxmpError


def constrain(array: Array, spec: PartitionSpec, *, is_argument: bool = False) -> Array:
    """Constrains an array to a partition spec of the mesh that it is on.

    The array is returned unchanged if it is on a single device, or if its axes are not automatic,
    so that its type contains its sharding; also if the spec has axes that the mesh lacks, or does
    not fit the dimensions of the array.

    Raises:
      JaxmpError: if `wrap` received the spec (`is_argument`), and the mesh lacks one of its axes.
    """
    mesh: Any = getattr(jax.typeof(array).sharding, "mesh", None)
    if mesh is None or mesh.size < 2 or set(mesh.axis_types) != {AxisType.Auto}:
        return array
    names = {name for entry in spec for name in (entry if isinstance(entry, tuple) else (entry,))}
    unknown = names - {None, *mesh.axis_names}
    if is_argument and unknown:
        raise JaxmpError(
            f"shardings has {spec!r} for a parameter of shape {array.shape}, which is on another "
            f"mesh, {mesh}. Use the mesh of the parameters: NamedSharding(mesh, "
            f"PartitionSpec({mesh.axis_names[0]!r}))."
        )
    if unknown or len(spec) > array.ndim:
        return array
    return jax.lax.with_sharding_constraint(array, NamedSharding(mesh, spec))


# ---------------------------------------------------------------------------
# Linen
# ---------------------------------------------------------------------------


def constrain_variables(variables: PyTree, shardings: Mapping[Path, NamedSharding]) -> PyTree:
    """Constrains the parameters of a Linen model to their shardings.

    Args:
      variables: a dict of collections, or other variables, which are returned unchanged.
      shardings: path of a parameter -> its sharding. Others have those of their boxes, if any.

    Raises:
      JaxmpError: if the shardings are not those of the parameters, or one does not fit its
        parameter.
    """
    if not isinstance(variables, Mapping) or "params" not in variables:
        return variables
    leaves = jax.tree_util.tree_flatten_with_path(variables["params"], is_leaf=_is_box)[0]
    if not shardings and not any(_is_box(leaf) for _, leaf in leaves):
        return variables
    if shardings and leaves:
        arrays = {_core.path_names(path): leaf for path, leaf in leaves}
        shapes = {names: jax.numpy.shape(_unboxed(leaf)) for names, leaf in arrays.items()}
        required = (names for names, leaf in arrays.items() if not _is_box(leaf))
        _core.check_tree("shardings", shardings, "the model", shapes, required)

    def of_leaf(key_path: tuple[object, ...], leaf: Any) -> Any:
        array, sharding = _unboxed(leaf), shardings.get(_core.path_names(key_path))
        spec = _spec_of_box(leaf) if sharding is None else sharding.spec
        if spec is None or not isinstance(array, jax.Array):
            return leaf
        constrained = constrain(array, spec, is_argument=sharding is not None)
        return leaf.replace_boxed(constrained) if _is_box(leaf) else constrained

    params = jax.tree_util.tree_map_with_path(of_leaf, variables["params"], is_leaf=_is_box)
    return {**variables, "params": params}


def _unboxed(leaf: Any) -> Any:
    return leaf.value if isinstance(leaf, nn.Partitioned) else leaf


def _is_box(leaf: object) -> bool:
    return isinstance(leaf, nn.Partitioned)


def _spec_of_box(leaf: Any) -> PartitionSpec | None:
    """Returns the partition spec of a boxed array; None without one that has all dimensions."""
    if not _is_box(leaf):
        return None
    if isinstance(leaf, nn.LogicallyPartitioned):
        spec = nn.logical_to_mesh_axes(leaf.names, leaf.rules or None)
    else:
        spec = leaf.get_partition_spec()
    return None if spec is None or len(spec) != leaf.value.ndim else spec


# ---------------------------------------------------------------------------
# NNX
# ---------------------------------------------------------------------------


# Name of the metadata with the partition spec that `recipe.wrap` received. Flax moves arrays with
# its own metadata as soon as an optimizer copies it.
SPEC = "jaxmp_spec"


def constrain_variable(variable: Any) -> Any:
    """Constrains the array of a Variable to the sharding in its metadata."""
    if not isinstance(variable, nnx.Variable):
        return variable  # It is an array, which may be an attribute of a module, too.
    value, metadata = variable.get_raw_value(), variable.get_metadata()
    names = metadata.get(SPEC, metadata.get("out_sharding"))
    if names is None or not isinstance(value, jax.Array):
        return variable
    if SPEC not in metadata and len(names) != value.ndim:
        return variable
    constrained = constrain(value, PartitionSpec(*names), is_argument=SPEC in metadata)
    if constrained is not value:
        variable = jax.tree.structure(variable).unflatten([constrained])
    return variable
