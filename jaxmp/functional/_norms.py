"""RMS and layer normalization in FP32."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import ArrayLike

from jaxmp._core._dtypes import floating_array, wide_dtype
from jaxmp.errors import JaxmpError


def rms_norm(
    x: ArrayLike,
    scale: ArrayLike | None = None,
    *,
    epsilon: float = 1e-6,
    axis: int | Sequence[int] = -1,
) -> jax.Array:
    """Applies RMS normalization in FP32, and rounds once.

    Computes `x / sqrt(mean(x**2) + epsilon) * scale`, as in Zhang and Sennrich 2019
    (arXiv:1910.07467). In float16, the square of 300 and therefore the mean would be infinite; in
    bfloat16, a mean of 1000 squares is accurate to two digits. In FP32, squares are finite up to
    x = 1.8e19.

    Args:
      x: `[..., D]` (D at `axis`), floating, 16 bits or more.
      scale: `[D]`, of any floating dtype; multiplied in FP32. None: 1.
      epsilon: added to the mean square; 1e-6 is Flax's default.
      axis: axis or axes of the mean. With several axes, `scale` has their sizes, in the order of x.

    Returns:
      `[..., D]` in the dtype of x.

    Raises:
      JaxmpError: if dtypes or shapes do not fit.

    Example:
      >>> jaxmp.functional.rms_norm(jnp.full((2, 4), 300.0, jnp.float16))[0]
      Array([1., 1., 1., 1.], dtype=float16)
    """
    return _normalize(x, scale, None, epsilon, axis, centered=False)


def layer_norm(
    x: ArrayLike,
    scale: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    epsilon: float = 1e-6,
    axis: int | Sequence[int] = -1,
) -> jax.Array:
    """Applies layer normalization in FP32, and rounds once.

    Computes `(x - mean) / sqrt(variance + epsilon) * scale + bias`, as in Ba et al. 2016
    (arXiv:1607.06450). The variance is the mean square of `x - mean`. `mean(x**2) - mean(x)**2`
    takes one pass less, but loses the variance if the mean is large: with mean 5000 and standard
    deviation 1, squares in FP32 have steps of 2.

    Args:
      x: `[..., D]` (D at `axis`), floating, 16 bits or more.
      scale: `[D]`, of any floating dtype; multiplied in FP32. None: 1.
      bias: `[D]`, of any floating dtype; added in FP32. None: 0.
      epsilon: added to the variance; 1e-6 is Flax's default.
      axis: axis or axes of mean and variance. With several axes, `scale` and `bias` have their
        sizes, in the order of x.

    Returns:
      `[..., D]` in the dtype of x.

    Raises:
      JaxmpError: if dtypes or shapes do not fit.

    Example:
      >>> x = jnp.array([[5000.0, 5004.0]], jnp.float16)
      >>> jaxmp.functional.layer_norm(x)
      Array([[-1.,  1.]], dtype=float16)
    """
    return _normalize(x, scale, bias, epsilon, axis, centered=True)


# Name of the saved statistics, with which the backward pass does not reduce x again.
_STATISTICS = "jaxmp_norm_statistics"


def _normalize(
    x: ArrayLike,
    scale: ArrayLike | None,
    bias: ArrayLike | None,
    epsilon: float,
    axis: int | Sequence[int],
    *,
    centered: bool,
) -> jax.Array:
    x = floating_array(x, "x")
    axes = _axes(axis, x)
    parameters = [
        None if parameter is None else _spread(floating_array(parameter, name), name, x, axes)
        for name, parameter in (("scale", scale), ("bias", bias))
    ]
    wide = wide_dtype(x.dtype)

    def normalize(x: jax.Array, scale: jax.Array | None, bias: jax.Array | None) -> jax.Array:
        out = x.astype(wide)
        if centered:
            out -= checkpoint_name(jnp.mean(out, axes, keepdims=True), _STATISTICS)
        square = checkpoint_name(jnp.mean(jnp.square(out), axes, keepdims=True), _STATISTICS)
        out *= lax.rsqrt(square + wide.type(epsilon))
        if scale is not None:
            out *= scale.astype(wide)
        if bias is not None:
            out += bias.astype(wide)
        return out.astype(x.dtype)

    saved = jax.checkpoint_policies.save_only_these_names(_STATISTICS)
    return jax.checkpoint(normalize, policy=saved)(x, *parameters)


def _axes(axis: int | Sequence[int], x: jax.Array) -> tuple[int, ...]:
    items = tuple(axis) if isinstance(axis, Sequence) else (axis,)
    for item in items:
        if isinstance(item, bool) or not isinstance(item, (int, np.integer)):
            raise JaxmpError(f"axis={axis!r}: {item!r} is not an integer, such as axis=-1.")
        if not -x.ndim <= item < x.ndim:
            raise JaxmpError(
                f"axis={axis!r} does not fit x of shape {list(x.shape)}. Allowed: {-x.ndim} to "
                f"{x.ndim - 1}; for example axis=-1."
            )
    axes = tuple(sorted({int(item) % x.ndim for item in items}))
    if not items or len(axes) != len(items):
        raise JaxmpError(f"axis={axis!r} must name one axis or several different ones: axis=-1.")
    return axes


def _spread(parameter: jax.Array, name: str, x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Reshapes a parameter to the rank of x, with size 1 outside of `axes`."""
    sizes = tuple(x.shape[axis] for axis in axes)
    if parameter.shape != sizes:
        raise JaxmpError(
            f"{name} has shape {list(parameter.shape)}, and x of shape {list(x.shape)} has "
            f"{list(sizes)} at axis {axes}. Pass one {name} for each feature: "
            f"{name}.reshape({sizes})."
        )
    return parameter.reshape([x.shape[i] if i in axes else 1 for i in range(x.ndim)])
