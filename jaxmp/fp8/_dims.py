"""Dimension numbers and shardings of a dot and of the two dots of its backward pass."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxmp import _core
from jaxmp.errors import JaxmpError

Axes = tuple[int, ...]


class Dims(NamedTuple):
    """Dimension numbers of a `lax.dot_general` and the ranks of its operands. Hashable."""

    contract: tuple[Axes, Axes]
    batch: tuple[Axes, Axes]
    ndims: tuple[int, int]

    @property
    def numbers(self) -> tuple[tuple[Axes, Axes], tuple[Axes, Axes]]:
        """The `dimension_numbers` argument of `lax.dot_general`."""
        return self.contract, self.batch

    def free(self, side: int) -> Axes:
        """Returns the axes of operand `side` that are neither contracted nor batch axes."""
        taken = {*self.contract[side], *self.batch[side]}
        return tuple(axis for axis in range(self.ndims[side]) if axis not in taken)

    def in_result(self, side: int) -> Axes:
        """Returns the axes of the result that come from the free axes of operand `side`."""
        start = len(self.batch[0]) + (len(self.free(0)) if side else 0)
        return tuple(range(start, start + len(self.free(side))))

    def contracts_last(self, side: int) -> bool:
        """Returns True if the contracted axes of operand `side` are its last axes."""
        axes = self.contract[side]
        return sorted(axes) == list(range(self.ndims[side] - len(axes), self.ndims[side]))

    def transposed(self, side: int) -> tuple[Dims, Axes]:
        """Returns the dot of the backward pass that computes the gradient of operand `side`.

        Its operands are the gradient of the result, in position `side`, and the other operand of
        the forward dot. With this order, linear layers need no transposition of the dot's result.

        Returns:
          The dimension numbers of the dot, and the permutation for `jnp.transpose` that brings the
          axes of its result into the order of operand `side`.
        """
        other = 1 - side
        batch = tuple(range(len(self.batch[0])))
        contract, others = self.in_result(other), self.free(other)
        ndims = len(batch) + len(self.free(0)) + len(self.free(1)), self.ndims[other]
        fields: Any = (contract, others), (batch, self.batch[other]), ndims
        dims = Dims(*(pair[::-1] if side else pair for pair in fields))
        # In this dot, the free axes of the other operand are those that the forward dot contracts,
        # in ascending order.
        pairs = zip(self.contract[other], self.contract[side], strict=True)
        contracted = [axis for _, axis in sorted(pairs)]
        free = [*contracted, *self.free(side)] if side else [*self.free(side), *contracted]
        order = tuple(int(axis) for axis in np.argsort([*self.batch[side], *free]))
        return dims, order

    def spread(self, factor: jax.Array, side: int) -> jax.Array:
        """Reshapes the factors of one operand so that they broadcast to the result.

        Args:
          factor: a scalar, or an array of the operand's rank with size 1 on its contracted axes.
          side: 0 or 1, the operand.

        Returns:
          A scalar, or an array of the result's rank that broadcasts to it.
        """
        if factor.ndim == 0:
            return factor
        axes = self.batch[side], self.free(side), self.contract[side]
        batch, free, _ = ([factor.shape[axis] for axis in each] for each in axes)
        other = [1] * len(self.free(1 - side))
        moved = jnp.transpose(factor, sum(axes, ()))
        return moved.reshape([*batch, *other, *free] if side else [*batch, *free, *other])


def make_dims(lhs: jax.Array, rhs: jax.Array, dimension_numbers: lax.DotDimensionNumbers) -> Dims:
    """Validates the `dimension_numbers` of a `lax.dot_general` and makes all axes non-negative.

    Raises:
      JaxmpError: if they are malformed, or pair axes of different sizes.
    """
    operands, both = (lhs, rhs), []
    try:
        both = [
            tuple(
                tuple(range(x.ndim)[axis] for axis in axes)
                for axes, x in zip(pair, operands, strict=True)
            )
            for pair in dimension_numbers
        ]
        named = [contract + batch for contract, batch in zip(*both, strict=True)]
        sizes = [[x.shape[axis] for axis in axes] for axes, x in zip(named, operands, strict=True)]
        is_valid = sizes[0] == sizes[1] and len(both[0][0]) == len(both[0][1])
        is_valid = is_valid and all(len(set(axes)) == len(axes) for axes in named)
    except (TypeError, ValueError, IndexError):
        is_valid = False
    if not is_valid:
        raise JaxmpError(
            f"dimension_numbers={dimension_numbers!r} do not fit operands of shapes {lhs.shape} "
            f"and {rhs.shape}. They are ((lhs_contracting, rhs_contracting), (lhs_batch, "
            "rhs_batch)), with equal sizes in each pair; for a linear layer "
            f"((({lhs.ndim - 1},), (0,)), ((), ()))."
        )
    contract, batch = cast(Any, both)
    return Dims(contract, batch, (lhs.ndim, rhs.ndim))


# ---------------------------------------------------------------------------
# Shardings
# ---------------------------------------------------------------------------


class Shardings(NamedTuple):
    """Shardings of the operands and of the result of a dot; None: not on explicit mesh axes."""

    lhs: NamedSharding | None = None
    rhs: NamedSharding | None = None
    result: NamedSharding | None = None


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
        lhs, rhs = (lax.convert_element_type(operand, _core.FLOAT32) for operand in (lhs, rhs))
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
