"""Mapped axes of `vmap`, `pmap` and `shard_map`, reductions over them, and layouts of arrays."""

from __future__ import annotations

from collections.abc import Collection, Hashable
from typing import Any

import jax
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Mesh, PartitionSpec, Sharding

from jaxmp._core._compat._private import load_private
from jaxmp._core._typing import PyTree
from jaxmp.errors import CompositionError


def varying_axes(tree: PyTree) -> frozenset[Any]:
    """Returns the axes of an enclosing `shard_map` over which a leaf of `tree` varies."""
    arrays = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
    return frozenset().union(*(jax.typeof(array).mat.varying for array in arrays))


def vary(tree: PyTree, axes: Collection[Any]) -> PyTree:
    """Casts leaves to device-varying over mesh `axes`, so that JAX does not reduce their gradients.

    Inside `shard_map`, JAX sums the gradient of a replicated value over the mesh, in the dtype in
    which the forward pass used it. The gradient of a device-varying value is not summed. Axes of
    `vmap` and `pmap` are not mesh axes and are ignored.
    """
    mesh = jax.sharding.get_abstract_mesh()
    manual = set(mesh.manual_axes) if mesh is not None else set()

    def mark(leaf: jax.Array) -> jax.Array:
        missing = tuple(a for a in axes if a in manual and a not in varying_axes(leaf))
        return jax.lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(mark, tree)


def partition_spec(sharding: Sharding, mesh: Mesh, ndim: int) -> PartitionSpec | None:
    """Returns the partition spec of a sharding that XLA chose, over the axes of a mesh.

    Args:
      sharding: as `custom_partitioning` passes it with `decode_shardings=False`.
      mesh: the mesh of the program.
      ndim: dimensions of the array.

    Returns:
      A spec with `ndim` entries; None if a dimension is split over a part of a mesh axis.
    """
    parse: Any = load_private("jax._src.sharding_impls").parse_flatten_op_sharding
    flat = sharding._to_xla_hlo_sharding(ndim)
    try:
        spec = parse(flat, mesh)[0]
    except ValueError:
        return None
    return PartitionSpec(*spec, *(None,) * (ndim - len(spec)))


def bound_axes(axes: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns those `axes` over which an enclosing `vmap`, `pmap` or `shard_map` maps."""

    def is_bound(axis: Hashable) -> bool:
        try:
            jax.lax.axis_size(axis)
        except NameError:
            return False
        return True

    return tuple(axis for axis in axes if is_bound(axis))


def check_axes(axes: tuple[Any, ...]) -> None:
    """Checks that an enclosing function maps over each of `axes`.

    Raises:
      CompositionError: with the axis, and a call that binds it.
    """
    bound = bound_axes(axes)
    for axis in axes:
        if axis not in bound:
            raise CompositionError(
                f"axis_name={axis!r}: no enclosing function maps over an axis of that name. Map "
                f"the step, for example jax.pmap(train_step, axis_name={axis!r}). If jax.jit "
                "shards the batch, leave axis_name out, also of recipe.optimizer."
            )


def agree(flag: jax.Array, axes: tuple[Any, ...]) -> jax.Array:
    """Returns True if the bool scalar `flag` is True on every device along `axes`."""
    return jax.lax.pmin(vary(flag.astype("int32"), axes), axes).astype(bool)


def largest(value: jax.Array, axes: tuple[Any, ...]) -> jax.Array:
    """Returns the maximum of an integer scalar over all devices along `axes`."""
    return jax.lax.pmax(vary(value, axes), axes)


def smallest(value: jax.Array, axes: tuple[Any, ...]) -> jax.Array:
    """Returns the minimum of an integer scalar over all devices along `axes`."""
    return jax.lax.pmin(vary(value, axes), axes)


def is_in_unchecked_shard_map() -> bool:
    """Returns True while tracing inside `shard_map(..., check_vma=False)`."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return bool(manual) and not varying_axes(lax.axis_index(manual[0]))


def row_major(x: jax.Array) -> jax.Array:
    """Requires the row-major layout for an array in the compiled program.

    On JAX 0.10, an array on several devices is returned as it is, because XLA would gather it
    before the constraint, and divide it again.
    """
    mesh = getattr(jax.typeof(x).sharding, "mesh", None)
    if jax.__version_info__ < (0, 11) and mesh is not None and mesh.size > 1:
        return x
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))
