"""Dimension numbers of a product and of the two products of its backward pass."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmp.errors import JaxmpError

Axes = tuple[int, ...]


class Dims(NamedTuple):
    """`lax.dot_general`'s dimension numbers, with the ranks of both operands. Hashable."""

    contract: tuple[Axes, Axes]
    batch: tuple[Axes, Axes]
    ndims: tuple[int, int]

    @property
    def numbers(self) -> tuple[tuple[Axes, Axes], tuple[Axes, Axes]]:
        """What `lax.dot_general` takes."""
        return self.contract, self.batch

    def free(self, side: int) -> Axes:
        """The axes of operand 0 or 1 that the result has, batch axes left out."""
        taken = {*self.contract[side], *self.batch[side]}
        return tuple(axis for axis in range(self.ndims[side]) if axis not in taken)

    def in_result(self, side: int) -> Axes:
        """The result's axes that are the free axes of operand 0 or 1."""
        start = len(self.batch[0]) + (len(self.free(0)) if side else 0)
        return tuple(range(start, start + len(self.free(side))))

    @property
    def result_ndim(self) -> int:
        return len(self.batch[0]) + len(self.free(0)) + len(self.free(1))

    def transposed(self, side: int) -> tuple[Dims, Axes]:
        """The product of the result's gradient with the other operand: the gradient of `side`.

        The result's gradient takes the place of `side` in it, so that for a linear layer no axis
        has to be moved afterwards.

        Returns:
          The dimension numbers, and the permutation that brings the product's axes into the order
          of the operand's.
        """
        other = 1 - side
        batch = tuple(range(len(self.batch[0])))
        contract, others = self.in_result(other), self.free(other)
        if side:
            dims = Dims(
                (others, contract),
                (self.batch[other], batch),
                (self.ndims[other], self.result_ndim),
            )
        else:
            dims = Dims(
                (contract, others),
                (batch, self.batch[other]),
                (self.result_ndim, self.ndims[other]),
            )
        # What is left of the other operand are its contracted axes, in their own order.
        pairs = zip(self.contract[other], self.contract[side], strict=True)
        contracted = [axis for _, axis in sorted(pairs)]
        free = [*contracted, *self.free(side)] if side else [*self.free(side), *contracted]
        order = tuple(int(axis) for axis in np.argsort([*self.batch[side], *free]))
        return dims, order

    def spread(self, factor: jax.Array, side: int) -> jax.Array:
        """Factors of an operand, of size 1 on its contracted axes, for each number of the result.

        Args:
          factor: a scalar, or of the operand's rank.
          side: which operand.

        Returns:
          A scalar, or factors broadcastable to the result.
        """
        if factor.ndim == 0:
            return factor
        order = (*self.batch[side], *self.free(side), *self.contract[side])
        kept = len(self.batch[side]) + len(self.free(side))
        sizes = jnp.transpose(factor, order)
        sizes = sizes.reshape(sizes.shape[:kept])
        batch = sizes.shape[: len(self.batch[side])]
        free = sizes.shape[len(self.batch[side]) :]
        other = (1,) * len(self.free(1 - side))
        return sizes.reshape(batch + (other + free if side else free + other))


def make_dims(lhs: Any, rhs: Any, dimension_numbers: Any) -> Dims:
    """Dimension numbers as `lax.dot_general` takes them, checked.

    Raises:
      JaxmpError: if they are malformed, or name sizes that differ.
    """
    try:
        (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
        axes = [
            tuple(int(a) % x.ndim if -x.ndim <= a < x.ndim else _raise() for a in given)
            for given, x in zip(
                (lhs_contract, rhs_contract, lhs_batch, rhs_batch), (lhs, rhs) * 2, strict=True
            )
        ]
    except (TypeError, ValueError):
        raise _refused(lhs, rhs, dimension_numbers) from None
    dims = Dims((axes[0], axes[1]), (axes[2], axes[3]), (lhs.ndim, rhs.ndim))
    for left, right in (dims.contract, dims.batch):
        if [lhs.shape[a] for a in left] != [rhs.shape[a] for a in right]:
            raise _refused(lhs, rhs, dimension_numbers)
    for side in (0, 1):
        named = dims.contract[side] + dims.batch[side]
        if len(set(named)) < len(named):
            raise _refused(lhs, rhs, dimension_numbers)
    return dims


def _raise() -> int:
    raise ValueError


def _refused(lhs: Any, rhs: Any, dimension_numbers: Any) -> JaxmpError:
    return JaxmpError(
        f"dimension_numbers={dimension_numbers!r} do not fit operands of shapes {lhs.shape} and "
        f"{rhs.shape}. They are ((lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch)), with "
        f"equal sizes in each pair; for a linear layer ((({lhs.ndim - 1},), (0,)), ((), ()))."
    )
