"""Estimates of the rounding error of sums in 16 bits."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np

# XLA divides a reduction into chunks: on a CPU into windows of 32 elements, on a GPU among the
# threads, and for long arrays in two levels.
_CHUNK = 32


def rounding_error(terms: int, dtype: np.dtype, *, in_chunks: bool) -> float:
    """Returns the largest error to expect of a sum, relative to the sum of absolute values.

    The bound of any order of summation is `h * u`, where `h` is the largest number of additions
    that a term passes through and `u` the unit roundoff (Higham, "Accuracy and Stability of
    Numerical Algorithms", section 4.2). Rounding errors of both signs cancel, so that the error
    grows as `sqrt(h) * u` (Higham and Mary, "A New Approach to Probabilistic Rounding Error
    Analysis", 2019), until a sequential sum is so large that further terms do not change it.

    Args:
      terms: the number of summands.
      dtype: in which the sum accumulates.
      in_chunks: False for a loop or a scatter, which adds one term after another.
    """
    unit = float(jnp.finfo(dtype).eps) / 2
    if not in_chunks:
        return 1.0 if terms >= stagnation(dtype) else math.sqrt(terms) * unit
    levels = math.ceil(math.log(max(terms, 2), _CHUNK))
    return min(1.0, math.sqrt(min(terms, _CHUNK * levels)) * unit)


def stagnation(dtype: np.dtype) -> int:
    """Returns the number of equal terms after which a sequential sum stops growing."""
    return round(2 / float(jnp.finfo(dtype).eps))


def error_text(terms: int, dtype: np.dtype, *, in_chunks: bool) -> str:
    """Returns the estimate as a part of a sentence."""
    error = rounding_error(terms, dtype, in_chunks=in_chunks)
    if error == 1:
        return f"one after another: a sum of equal terms stops growing at {stagnation(dtype):,}"
    text = f"with an error of up to about {error:.1%} of the sum of absolute values"
    return text if in_chunks else f"one after another, {text}"
