"""Loss scales that never change."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, final

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from jaxmp._core._dtypes import FLOAT32
from jaxmp._core._trees import cast_floating
from jaxmp._loss_scale._arguments import LARGEST_DIVISOR, LARGEST_SCALE, check_scale
from jaxmp._loss_scale._base import LossScale
from jaxmp._loss_scale._leaves import float32, new_leaf, rescale_leaf
from jaxmp._loss_scale._use import present

T = TypeVar("T")


@final
@jax.tree_util.register_pytree_with_keys_class
class NoLossScale(LossScale):
    """Null loss scale, with which one training step works for every precision.

    Example:
      >>> loss = jnp.float16(2.0)
      >>> NoLossScale().scale(loss) is loss
      True
    """

    @property
    def scale_value(self) -> jax.Array:
        """1.0 as a float32 scalar array."""
        return jnp.ones((), jnp.float32)

    def scale(self, tree: T) -> T:
        """Returns `tree` itself."""
        return tree

    def unscale(self, tree: T) -> T:
        """Casts the float16 and bfloat16 leaves of `tree` to float32, as every loss scale does."""
        return cast_floating(tree, FLOAT32)


class Scaling(LossScale):
    """Base class of loss scales other than `NoLossScale`."""

    scale_value: jax.Array

    @property
    def ceiling(self) -> float:
        """Largest scale that a step can reach."""
        return LARGEST_SCALE

    def scale(self, tree: T) -> T:
        present.scaled_gradient = True
        return jax.tree.map(lambda leaf: rescale_leaf(self._multiply, leaf), tree)

    def unscale(self, tree: T) -> T:
        divide = self._divide if self.ceiling <= LARGEST_DIVISOR else self._divider_by_large()
        return jax.tree.map(lambda leaf: rescale_leaf(divide, leaf), tree)

    def _multiply(self, x: jax.Array) -> jax.Array:
        return x * self.scale_value.astype(x.dtype)

    def _divide(self, x: jax.Array) -> jax.Array:
        return x / self.scale_value.astype(x.dtype)

    def _divider_by_large(self) -> Callable[[jax.Array], jax.Array]:
        """Returns `_divide` for scales that may exceed 2**126.

        XLA replaces a division by a broadcast scalar with a product by its reciprocal. Above 2**126
        the reciprocal is subnormal, and if subnormals are flushed, every finite gradient would
        become 0. The barrier prevents XLA from combining two known factors into that reciprocal.
        """
        large = lax.gt(self.scale_value, float32(LARGEST_DIVISOR))
        shrink = lax.optimization_barrier(lax.select(large, float32(0.25), float32(1.0)))
        divisor = lax.mul(self.scale_value, shrink)
        return lambda x: (x * shrink.astype(x.dtype)) / divisor.astype(x.dtype)


@final
@jax.tree_util.register_pytree_with_keys_class
class StaticLossScale(Scaling):
    """Loss scale that never changes.

    The scale is a leaf, so that a jitted step is not traced again for another value.

    Args:
      loss_scale: the scale: a positive number that is finite in FP32 and at least 2**-126, or a
        scalar array of such a number. Traced values are not checked.

    Raises:
      LossScaleError: if `loss_scale` is not such a number.

    Example:
      >>> StaticLossScale(1024).unscale(jnp.float16(1.0))
      Array(0.00097656, dtype=float32)
    """

    LEAVES = ("scale_value",)

    def __init__(self, loss_scale: ArrayLike) -> None:
        present.scale = True
        scale = check_scale("loss_scale", loss_scale)
        vars(self).update(scale_value=new_leaf(scale, jnp.float32))

    def __repr__(self) -> str:
        return f"StaticLossScale(loss_scale={self.scale_value})"
