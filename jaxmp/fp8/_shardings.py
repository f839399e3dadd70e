"""Shardings of dots on explicit mesh axes, where they are part of the types of arrays."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxmp._core._dtypes import FLOAT32
from jaxmp.fp8._dims import Dims


class Shardings(NamedTuple):
    """Shardings of the operands and of the result of a dot; None: not on explicit mesh axes."""

    lhs: NamedSharding | None = None
    rhs: NamedSharding | None = None
    result: NamedSharding | None = None

    def before_transpose(
        self, side: int, order: tuple[int, ...]
    ) -> NamedSharding | PartitionSpec | None:
        """Returns the sharding of the backward dot that computes the gradient of an operand.

        Args:
          side: 0 or 1, the operand.
          order: permutation that brings the axes of the dot's result into those of the operand.
        """
        sharding = (self.lhs, self.rhs)[side]
        return None if sharding is None else before_transpose(sharding, order)


def before_transpose(
    sharding: NamedSharding | PartitionSpec, order: tuple[int, ...]
) -> NamedSharding | PartitionSpec:
    """Returns the sharding of an array whose transpose by `order` has `sharding`."""
    is_spec = isinstance(sharding, PartitionSpec)
    entries: list[Any] = [None] * len(order)
    for axis, entry in zip(order, sharding if is_spec else sharding.spec, strict=False):
        entries[axis] = entry
    spec = PartitionSpec(*entries)
    return spec if is_spec else NamedSharding(sharding.mesh, spec)


def is_explicit(array: jax.Array) -> bool:
    """Returns True if the sharding of an array is part of its type."""
    return AxisType.Explicit in jax.typeof(array).sharding.mesh.axis_types


def dot_shardings(
    lhs: jax.Array, rhs: jax.Array, dims: Dims, out_sharding: NamedSharding | PartitionSpec | None
) -> Shardings:
    """Returns the shardings of a dot, whose result is sharded as that of `lax.dot_general`.

    Raises the errors of `lax.dot_general`, for example if both operands are sharded along the axes
    that the dot contracts, and there is no `out_sharding`.
    """
    explicit = [is_explicit(operand) for operand in (lhs, rhs)]
    if out_sharding is None and not any(explicit):
        return Shardings()

    def dot(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        lhs, rhs = (lax.convert_element_type(operand, FLOAT32) for operand in (lhs, rhs))
        return lax.dot_general(lhs, rhs, dims.numbers, out_sharding=out_sharding)

    result: Any = jax.make_jaxpr(dot)(lhs, rhs).out_avals[0]
    of_lhs, of_rhs = (jax.typeof(operand).sharding for operand in (lhs, rhs))
    return Shardings(
        of_lhs if explicit[0] else None,
        of_rhs if explicit[1] else None,
        result.sharding if any(explicit) else None,
    )


def broadcast_factor(factor: jax.Array, product: jax.Array) -> jax.Array:
    """Broadcasts a factor to the shape of a product; on explicit mesh axes, to its sharding too."""
    if factor.ndim and is_explicit(product):
        sharding = jax.typeof(product).sharding
        entries = (*sharding.spec, *(None,) * (product.ndim - len(sharding.spec)))
        spec = [e if size > 1 else None for e, size in zip(entries, factor.shape, strict=True)]
        factor = jax.reshard(factor, NamedSharding(sharding.mesh, PartitionSpec(*spec)))
    return jax.numpy.broadcast_to(factor, product.shape)
