"""Losses of predictions and targets of the same shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from jaxmp._core._dtypes import FLOAT32, FLOAT64, floating_array, wide_dtype
from jaxmp.losses._arguments import (
    Reduction,
    check_axis,
    check_number,
    check_reduction,
    check_same_shape,
    reduce_losses,
    row_factors,
)


def mse(
    predictions: ArrayLike,
    targets: ArrayLike,
    *,
    weights: ArrayLike | None = None,
    reduction: Reduction = "mean",
) -> Any:
    """Computes the squared error `(predictions - targets) ** 2` in FP32.

    In float16, the square of a difference of 256 is infinite, and `optax.squared_error` computes in
    the dtype of its operands. This function calls it with FP32 operands that are not stored:
    16-bit operands are saved for the backward pass, and the gradient has their dtype.

    Args:
      predictions: `[...]`, floating, 16 bits or more.
      targets: `[...]`, floating, of the shape of the predictions.
      weights: weights of all entries, `[...]`, or of the rows along the first dimensions; floating,
        integer or bool.
      reduction: "mean" (over entries), "sum", "none" or "sum_and_weight".

    Returns:
      FP32 (float64 for float64 operands): a scalar; `[...]` for "none"; `(sum, weight)` for
      "sum_and_weight".

    Raises:
      JaxmpError: if dtypes, shapes or options do not fit.

    Example:
      >>> predictions = jnp.array([300.0, 1.0], jnp.float16)
      >>> float(jaxmp.losses.mse(predictions, jnp.zeros(2, jnp.float16)))
      45000.5
    """
    predictions, reduction = floating_array(predictions, "predictions"), check_reduction(reduction)
    targets = check_same_shape(floating_array(targets, "targets"), predictions, "predictions")
    factors = _entry_factors(weights, predictions, targets)
    return reduce_losses(_in_fp32(optax.squared_error)(predictions, targets), factors, reduction)


def sigmoid_binary_cross_entropy(
    logits: ArrayLike,
    labels: ArrayLike,
    *,
    label_smoothing: float = 0.0,
    weights: ArrayLike | None = None,
    reduction: Reduction = "mean",
) -> Any:
    """Computes the binary cross entropy of each entry in FP32.

    The loss of an entry is `-y log sigmoid(x) - (1 - y) log sigmoid(-x)`, computed by
    `optax.sigmoid_binary_cross_entropy` with FP32 operands that are not stored. Infinite logits on
    the side of their label (masked entries) are an exception: their loss would be 0 * inf, and is
    0 here, like its gradient. On the other side, the loss is inf and the gradient is finite.

    Args:
      logits: `[...]`, floating, 16 bits or more.
      labels: `[...]`, of the shape of the logits: probabilities, floating; or 0 and 1 as integers
        or bools.
      label_smoothing: fraction by which labels are moved towards 1/2, in `[0, 1]`. A number, not an
        array.
      weights: as in `mse`.
      reduction: as in `mse`.

    Returns:
      As in `mse`.

    Raises:
      JaxmpError: if dtypes, shapes or options do not fit.

    Example:
      >>> logits = jnp.array([-jnp.inf, 0.0, 60000.0], jnp.float16)
      >>> labels = jnp.array([0, 1, 0])
      >>> jaxmp.losses.sigmoid_binary_cross_entropy(logits, labels, reduction="none").round(4)
      Array([0.000e+00, 6.931e-01, 6.000e+04], dtype=float32)
    """
    logits, reduction = floating_array(logits, "logits"), check_reduction(reduction)
    labels = check_same_shape(jnp.asarray(labels), logits, "logits")
    if not jnp.issubdtype(labels.dtype, jnp.floating):
        labels = labels.astype(wide_dtype(logits.dtype))
    smoothing = check_number(label_smoothing, "label_smoothing", 1.0)

    def entries(logits: jax.Array, labels: jax.Array) -> jax.Array:
        # Before smoothing, which would change the label of a masked entry.
        certain = jnp.isinf(logits) & (labels == (logits > 0).astype(labels.dtype))
        logits = jnp.where(certain, jnp.zeros_like(logits), logits)
        labels = labels * (1 - smoothing) + smoothing / 2
        losses = optax.sigmoid_binary_cross_entropy(logits, labels)
        return jnp.where(certain, jnp.zeros_like(losses), losses)

    factors = _entry_factors(weights, logits, labels)
    return reduce_losses(_in_fp32(entries)(logits, labels), factors, reduction)


def kl_divergence(
    log_predictions: ArrayLike,
    targets: ArrayLike,
    *,
    log_targets: bool = False,
    weights: ArrayLike | None = None,
    reduction: Reduction = "mean",
    axis: int = -1,
) -> Any:
    """Computes the KL divergence `sum(t (log t - log p))` of each row in FP32.

    With `0 log 0 = 0`, a class whose target is 0 has loss 0 and gradient 0, even if its log
    prediction is -inf. There, `optax.kl_divergence` is NaN, and its gradient with respect to the
    targets is NaN at every 0, so it is not called here; elsewhere both agree. A class with
    prediction 0 and a positive target has loss inf.

    Near a log probability of -10, bfloat16 has steps of 0.06. If predictions and targets are
    computed from logits, apply `log_softmax` to the logits in FP32.

    Args:
      log_predictions: `[..., V]` (V at `axis`), log probabilities; floating, 16 bits or more.
      targets: `[..., V]`, probabilities, or log probabilities with `log_targets=True`; floating.
      log_targets: the targets are log probabilities.
      weights: weight of each row, `[...]`; floating, integer or bool.
      reduction: as in `mse`; "mean" is over rows ("batchmean" in torch).
      axis: axis of the classes.

    Returns:
      FP32 (float64 for float64 operands): a scalar; `[...]` for "none"; `(sum, weight)` for
      "sum_and_weight".

    Raises:
      JaxmpError: if dtypes, shapes or options do not fit.

    Example:
      >>> log_p = jnp.log(jnp.array([[0.5, 0.5, 0.0]])).astype(jnp.bfloat16)
      >>> float(jaxmp.losses.kl_divergence(log_p, jnp.array([[1.0, 0.0, 0.0]])))
      0.69140625
    """
    log_predictions = floating_array(log_predictions, "log_predictions")
    targets, reduction = floating_array(targets, "targets"), check_reduction(reduction)
    targets = check_same_shape(targets, log_predictions, "log_predictions")
    axis = check_axis(axis, log_predictions)

    def rows(log_predictions: jax.Array, targets: jax.Array) -> jax.Array:
        zero = jnp.zeros_like(targets)
        absent = targets == (-jnp.inf if log_targets else 0)
        # Mask both operands before the formula: masking only its result would leave 0 * inf in the
        # gradient.
        log_predictions = jnp.where(absent, zero, log_predictions)
        targets = jnp.where(absent, zero if log_targets else zero + 1, targets)
        logs = targets if log_targets else jnp.log(targets)
        chances = jnp.exp(targets) if log_targets else targets
        return jnp.sum(jnp.where(absent, zero, chances * (logs - log_predictions)), axis)

    shape = targets.shape[:axis] + targets.shape[axis + 1 :]
    factors = row_factors(weights, None, shape, _widest(log_predictions, targets))
    return reduce_losses(_in_fp32(rows)(log_predictions, targets), factors, reduction)


def _in_fp32(fn: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Returns `fn` with operands cast to FP32; its backward pass saves the original operands."""

    def widened(*operands: jax.Array) -> jax.Array:
        wide = _widest(*operands)
        return fn(*(operand.astype(wide) for operand in operands))

    return jax.checkpoint(widened)


def _widest(*operands: jax.Array) -> Any:
    return FLOAT64 if any(operand.dtype == FLOAT64 for operand in operands) else FLOAT32


def _entry_factors(weights: ArrayLike | None, *operands: jax.Array) -> jax.Array | None:
    """Returns the factor of each entry; `weights` may be those of rows."""
    shape = operands[0].shape
    if weights is not None:
        weights = jnp.asarray(weights)
        if weights.ndim < len(shape) and weights.shape == shape[: weights.ndim]:
            missing = tuple(range(weights.ndim, len(shape)))
            weights = jnp.broadcast_to(jnp.expand_dims(weights, missing), shape)
    return row_factors(weights, None, shape, _widest(*operands))
