"""Checks of the arguments of losses, weights of rows, and the reductions of weighted losses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxmp import _core
from jaxmp._core import ArrayLike, DTypeLike, PyTree, _compat
from jaxmp.errors import JaxmpError

Reduction = Literal["mean", "sum", "none", "sum_and_weight"]
REDUCTIONS = get_args(Reduction)


class LossTerms(NamedTuple):
    """Static settings of the loss of a row."""

    label_smoothing: float
    z_loss: float


def check_number(value: Any, name: str, largest: float) -> float:
    if isinstance(value, Tracer):
        raise JaxmpError(
            f"{name} is a traced value, but must be known when the program is traced. List it in "
            f"jax.jit(..., static_argnames={name!r})."
        )
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not (0 <= number <= largest and math.isfinite(number)):
        allowed = "0 or more" if largest == math.inf else f"from 0 to {largest:g}"
        raise JaxmpError(f"{name}={value!r} must be a number {allowed}, for example {name}=0.1.")
    return number


def make_terms(label_smoothing: float, z_loss: float) -> LossTerms:
    smoothing = check_number(label_smoothing, "label_smoothing", 1.0)
    return LossTerms(smoothing, check_number(z_loss, "z_loss", math.inf))


def check_reduction(value: Reduction) -> Reduction:
    if value not in REDUCTIONS:
        raise JaxmpError(
            f"Unknown reduction={value!r}.{_core.did_you_mean(str(value), REDUCTIONS)} Allowed: "
            f"{', '.join(REDUCTIONS)}; for example reduction='mean'."
        )
    return value


def check_layer(hidden: jax.Array, kernel: jax.Array, transposed: bool) -> int:
    """Checks the shapes of a linear layer and returns its number of classes."""
    layout = "[V, D]" if transposed else "[D, V]"
    if hidden.ndim < 1 or kernel.ndim != 2:
        raise JaxmpError(
            f"hidden has shape {list(hidden.shape)} and kernel {list(kernel.shape)}; allowed are "
            f"[..., D] and {layout}."
        )
    features, size = kernel.shape[::-1] if transposed else kernel.shape
    if features != hidden.shape[-1]:
        fix = " The last axis of hidden must be D."
        if size == hidden.shape[-1]:
            fix = f" The kernel is transposed: pass transposed={not transposed}."
        raise JaxmpError(
            f"hidden {list(hidden.shape)} has {hidden.shape[-1]} features, and kernel "
            f"{list(kernel.shape)}, read as {layout}, takes {features}.{fix}"
        )
    if not size:
        raise JaxmpError(f"kernel {list(kernel.shape)}, read as {layout}, has no classes.")
    return size


def check_num_classes(num_classes: int, size: int) -> int:
    """Checks the number of classes of a kernel with `size` of them, some of which are padding."""
    if not _core.is_integer(num_classes, 1) or num_classes > size:
        raise JaxmpError(
            f"num_classes={num_classes!r} is not a number of classes of this kernel, which has "
            f"{size}. Give an integer from 1 to {size}, or leave it out."
        )
    return int(num_classes)


def _check_indices(
    labels: jax.Array, size: int, ignore_index: int | None, name: str, shape: tuple[int, ...]
) -> None:
    """Raises if the labels are not class indices of rows; checks their values if known."""
    rows = shape[:-1]
    if ignore_index is not None and not _core.is_integer(ignore_index):
        raise JaxmpError(f"ignore_index={ignore_index!r} is not an integer, such as -100.")
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise JaxmpError(
            f"labels are {labels.dtype} of shape {list(labels.shape)}; with {name} of shape "
            f"{list(shape)} they must be class indices, integers of shape {list(rows)}: "
            "labels.astype(jnp.int32)."
            + (" For probabilities: softmax_cross_entropy." if name == "hidden" else "")
        )
    if labels.shape != rows:
        raise JaxmpError(
            f"labels have shape {list(labels.shape)}, and {name} of shape {list(shape)} has rows "
            f"of shape {list(rows)}. Pass one class index for each row: "
            f"labels.reshape({rows})."
        )
    if isinstance(labels, Tracer) or not labels.is_fully_addressable:
        return
    values = np.asarray(labels)
    wrong = (values < 0) | (values >= size)
    if ignore_index is not None:
        wrong &= values != ignore_index
    if wrong.any():
        index = tuple(int(i) for i in np.argwhere(wrong)[0])
        label = values[index]
        raise JaxmpError(
            f"labels[{', '.join(map(str, index))}] is {label}, one of {int(wrong.sum())} labels "
            f"that are not class indices. Allowed: 0 to {size - 1}. If {label} marks rows to "
            f"ignore: ignore_index={label}."
        )


def read_indices(
    labels: jax.Array, size: int, ignore_index: int | None, name: str, shape: tuple[int, ...]
) -> tuple[jax.Array, jax.Array | None, jax.Array]:
    """Returns the class indices, and masks of the rows that count (None: all) and of valid labels.

    Labels that are ignored or invalid become 0; ignored ones count as valid.

    Args:
      labels: class indices of rows.
      size: number of classes.
      ignore_index: index of rows that do not count, or None.
      name, shape: those of the array with these rows; the last axis is none of them.

    Raises:
      JaxmpError: if the labels are not class indices of these rows, as far as they are known.
    """
    _check_indices(labels, size, ignore_index, name, shape)
    labels = labels.astype("int64" if labels.dtype.itemsize == 8 else "int32")
    valid = (labels >= 0) & (labels < size)
    counted = None
    if ignore_index is not None:
        counted = labels != ignore_index
        valid |= ~counted
    return jnp.where(valid if counted is None else valid & counted, labels, 0), counted, valid


def vary_alike(*trees: PyTree, like: PyTree = None) -> tuple[Any, ...]:
    """Marks all arrays as varying over each `shard_map` axis over which one of them varies.

    The gradient of a replicated kernel is then summed over the mesh once, after all chunks.
    """
    axes = _compat.varying_axes((trees, like))
    return _compat.vary(trees, axes) if axes else trees


# ---------------------------------------------------------------------------
# Weights and reductions
# ---------------------------------------------------------------------------


def row_factors(
    weights: ArrayLike | None, counted: jax.Array | None, rows: Sequence[int], wide: DTypeLike
) -> jax.Array | None:
    """Returns the factor of each row, in `wide`; None if all are 1."""
    if weights is None:
        return None if counted is None else counted.astype(wide)
    weights = jnp.asarray(weights)
    if jnp.issubdtype(weights.dtype, jnp.complexfloating) or weights.shape != tuple(rows):
        raise JaxmpError(
            f"weights are {weights.dtype} of shape {list(weights.shape)}; the losses have shape "
            f"{list(rows)}, and each has one real weight. For equal weights of all rows: "
            f"weights=jnp.full({tuple(rows)}, weight)."
        )
    weights = weights.astype(wide)
    return weights if counted is None else jnp.where(counted, weights, jnp.zeros_like(weights))


def mark_invalid(losses: jax.Array, valid: jax.Array | None) -> jax.Array:
    """Replaces losses of invalid labels by NaN, through which no gradient passes."""
    if valid is None:
        return losses
    return jnp.where(valid, losses, jnp.full_like(losses, jnp.nan))


def apply_factors(losses: jax.Array, factors: jax.Array) -> jax.Array:
    return zero_unweighted(losses, factors) * factors


def zero_unweighted(losses: jax.Array, factors: jax.Array) -> jax.Array:
    """Replaces non-finite losses of factor 0 by 0, because 0 * inf is NaN."""
    return jnp.where((factors == 0) & ~jnp.isfinite(losses), jnp.zeros_like(losses), losses)


def weighted_sum(losses: jax.Array, factors: jax.Array) -> jax.Array:
    return jnp.sum(apply_factors(losses, factors))


def total_weight(factors: jax.Array | None, rows: Sequence[int], wide: DTypeLike) -> jax.Array:
    return jnp.asarray(math.prod(rows), wide) if factors is None else jnp.sum(factors)


def reduce_losses(losses: jax.Array, factors: jax.Array | None, reduction: Reduction) -> Any:
    weighted = losses if factors is None else apply_factors(losses, factors)
    if reduction == "none":
        return weighted
    weight = total_weight(factors, losses.shape, losses.dtype)
    return reduce_sum(jnp.sum(weighted), weight, reduction)


def reduce_sum(total: jax.Array, weight: jax.Array, reduction: Reduction) -> Any:
    if reduction == "sum":
        return total
    if reduction == "sum_and_weight":
        return total, weight
    return total / jnp.where(weight == 0, jnp.ones_like(weight), weight)
