"""Arrays of loss scales, and the scaling of the leaves of a tree."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from jaxmp._core._dtypes import FLOAT32
from jaxmp._core._trees import cast_floating, dtype_of, is_inexact
from jaxmp._core._typing import PyTree


def new_leaf(value: ArrayLike, dtype: DTypeLike) -> jax.Array:
    return jnp.array(value, dtype, copy=True)


def int32(value: int) -> jax.Array:
    return lax.full((), value, jnp.int32)


def float32(value: float) -> jax.Array:
    return lax.full((), value, jnp.float32)


def is_equal(a: ArrayLike, b: ArrayLike) -> bool:
    return a is b or bool(np.array_equal(a, b))


def rescale_leaf(rescale: Callable[[jax.Array], jax.Array], leaf: PyTree) -> PyTree:
    """Applies `rescale` in FP32 or wider to a floating leaf, or to both parts of a complex one."""
    if isinstance(leaf, float) and dtype_of(leaf) is None:
        leaf = jnp.float32(leaf)
    if not is_inexact(leaf):
        return leaf
    wide = jnp.asarray(cast_floating(leaf, FLOAT32))
    if jnp.iscomplexobj(wide):
        return lax.complex(rescale(wide.real), rescale(wide.imag))
    return rescale(wide)
