"""Functions that replace the dot of a Flax layer and the promotion of its operands."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.linen.dtypes import promote_dtype

from jaxmp._core._typing import Array, DTypeLike
from jaxmp._core._wide_dot import wide_product
from jaxmp._flax._fp8_layers import promote_around_kernel


@functools.cache
def wide_operator(product: Callable[..., Any], wide: np.dtype) -> Callable[..., jax.Array]:
    """Returns `product` with results in `wide`; one object per dtype, so equal modules stay equal.

    Args:
      product: a function of two operands with the option `preferred_element_type`; `jnp.einsum` has
        an equation before them.
      wide: dtype of the result.
    """

    def operator(*args: Any, **kwargs: object) -> jax.Array:
        start = int(isinstance(args[0], str))
        equation, (lhs, rhs, *more) = args[:start], args[start:]

        def bound(
            lhs: Array, rhs: Array, preferred_element_type: DTypeLike | None = None
        ) -> jax.Array:
            options = {**kwargs, "preferred_element_type": preferred_element_type}
            return product(*equation, lhs, rhs, *more, **options)

        return wide_product(bound, lhs, rhs, wide)

    return operator


@dataclasses.dataclass(frozen=True)
class Promotion:
    """Flax's `promote_dtype` for a layer with another dot."""

    # Dtype of the result, to which biases are cast; None: the compute dtype.
    wide: np.dtype | None
    # An FP32 kernel is not cast.
    keeps_kernel: bool

    def __call__(
        self, *args: Any, dtype: DTypeLike | None = None, inexact: bool = True
    ) -> tuple[Array | None, ...]:
        # NNX passes one tuple of arrays.
        arrays = args[0] if isinstance(args[0], tuple) else args
        count = len(arrays) if self.wide is None else 2
        promote = lambda arrays, **options: promote_dtype(*arrays, **options)
        if self.keeps_kernel:
            promoted = promote_around_kernel(promote, arrays[:count], dtype, inexact)
        else:
            promoted = promote(arrays[:count], dtype=dtype, inexact=inexact)
        biases = (None if b is None else jnp.asarray(b, self.wide) for b in arrays[count:])
        return (*promoted, *biases)
