"""Masters, loss scale and skipped steps as one optax transformation."""

from __future__ import annotations

from typing import Any

import optax

from jaxmp.optim._master import master_params
from jaxmp.optim._skip import skip_nonfinite


def mixed_precision(
    inner: optax.GradientTransformation,
    *,
    policies: Any,
    loss_scale: Any = None,
    master: str = "auto",
    skip: str = "auto",
    axis_name: Any = None,
    accumulate_dtype: Any = "float32",
    reduce_dtype: Any = "float32",
) -> optax.GradientTransformationExtraArgs:
    """Makes an optimizer fit for mixed precision: `skip_nonfinite(master_params(inner))`.

    Everything that depends on the raw gradient goes inside: clipping, weight decay, schedules,
    `optax.MultiSteps`. `update` takes unscaled gradients, as `jaxmp.value_and_grad` returns them.

    Args:
      inner: any optax transformation.
      policies: anything that names policies: their `param_dtype` says which parameters are stored
        in 16 bits and so have a master.
      loss_scale: the loss scale to keep in the state and adjust. None: none.
      master: see `master_params`.
      skip: see `skip_nonfinite`.
      axis_name: mapped axis over which all devices agree to skip, and over which the
        `value_and_grad` of a train state averages loss and gradients.
      accumulate_dtype: what `TrainState.value_and_grad` accumulates microbatches in.
      reduce_dtype: what it averages gradients across devices in.

    Returns:
      An optax transformation.

    Raises:
      CompositionError: see `master_params` and `skip_nonfinite`; from `init`, if it is given the
        state of FP8 scaling with the parameters.
      PolicyError: for an unknown policy or dtype.

    Example:
      >>> tx = mixed_precision(
      ...     optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4)),
      ...     policies="fp16",
      ...     loss_scale=jaxmp.DynamicLossScale(),
      ... )
    """
    return skip_nonfinite(
        master_params(inner, policies=policies, master=master),
        loss_scale=loss_scale,
        skip=skip,
        axis_name=axis_name,
        accumulate_dtype=accumulate_dtype,
        reduce_dtype=reduce_dtype,
    )
