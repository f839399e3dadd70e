"""Adds masters, a loss scale and skipped steps to an optimizer."""

from __future__ import annotations

from typing import Literal

import numpy as np
import optax

from jaxmp import _core
from jaxmp._core import AxisNames
from jaxmp._gradients._dynamic_loss_scale import LossScaleLike
from jaxmp._policies import _load
from jaxmp.errors import CompositionError
from jaxmp.optim._master import check_inner, master_params
from jaxmp.optim._moments import moment_dtype
from jaxmp.optim._skip import GradientSettings, SkipSettings, guard


def mixed_precision(
    inner: optax.GradientTransformation,
    *,
    recipe: _load.RecipeLike,
    loss_scale: LossScaleLike | Literal["auto"] = "auto",
    master: str = "auto",
    skip: str = "auto",
    axis_name: AxisNames = None,
) -> optax.GradientTransformationExtraArgs:
    """Adds masters, loss scale and skipped steps: `skip_nonfinite(master_params(inner))`.

    Everything that depends on the raw gradient belongs inside: clipping, weight decay, schedules,
    `optax.MultiSteps`. `update` receives unscaled gradients, as `jaxmp.value_and_grad` returns
    them. The `value_and_grad` of a train state or NNX optimizer sums gradients in the dtypes of the
    recipe.

    Each of the two transformations also works alone. The state of `master_params` reports if a
    float16 parameter could not represent its new master. `skip_nonfinite` skips a step for which
    any state inside of it reports that.

    Args:
      inner: any optax transformation.
      recipe: a recipe or policies, whose `param_dtype` determines which parameters are stored in
        16 bits and therefore have a master.
      loss_scale: the loss scale to keep in the state and adjust. "auto": that of the recipe; for
        policies that are not a recipe, `DynamicLossScale()` if any of their dtypes is float16,
        otherwise none. None: no scaling.
      master: see `master_params`.
      skip: see `skip_nonfinite`.
      axis_name: see `skip_nonfinite`.

    Returns:
      An optax transformation.

    Raises:
      CompositionError: as in `master_params` and `skip_nonfinite`; from `init`, if the parameters
        contain the state of FP8 scaling.
      PolicyError: for an unknown policy or dtype.

    Example:
      >>> inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4))
      >>> tx = mixed_precision(inner, recipe="fp16")
      >>> float(get_loss_scale(tx.init(jnp.ones(2))).scale_value)
      65536.0
    """
    check_inner(inner)
    data = _load.as_recipe_data(recipe)
    if isinstance(loss_scale, str):
        if loss_scale != "auto":
            raise CompositionError(
                f"Unknown loss_scale={loss_scale!r}. Allowed: 'auto', None, a number or a loss "
                "scale; for example loss_scale=jaxmp.DynamicLossScale()."
            )
        loss_scale = data.loss_scale_data.build()
    inner = moment_dtype(inner, data.moment_dtype)
    masters = master_params(inner, recipe=data.policies, master=master)
    gradients = GradientSettings(
        data.accumulate_dtype, data.reduce_dtype, data.regather, data.widen_params
    )
    settings = SkipSettings(skip != "none", _core.as_tuple(axis_name), gradients)
    dtype = np.dtype(data.policies.default.compute_dtype)
    return guard(
        masters, loss_scale, skip, settings, dtype=dtype if _core.is_16bit(dtype) else None
    )
