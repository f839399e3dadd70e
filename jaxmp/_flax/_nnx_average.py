"""Average of the parameters of an NNX model, in FP32."""

from __future__ import annotations

from flax import nnx
from flax.nnx.filterlib import Filter

from jaxmp._core import _trees
from jaxmp._flax._nnx_gradients import trained
from jaxmp.optim import _average, _find


class EMA(nnx.EMA):
    """Exponential moving average of parameters as `flax.nnx.EMA`, in FP32.

    `flax.nnx.EMA` computes and stores the average in the dtype of each Variable, so that with
    16-bit parameters it stalls (see `jaxmp.optim.incremental_update`). A target network is an
    average, too: its `decay` is 1 minus the step size.

    Args:
      model: an NNX module, also with 16-bit parameters.
      decay: share of the old average, between 0 and 1.
      only: filter of the Variables to average. State of FP8 scaling is never averaged.

    Raises:
      JaxmpError: if `decay` is not between 0 and 1.

    Example:
      >>> recipe = jaxmp.load_recipe("bf16_params")
      >>> model = recipe.wrap(nnx.Linear(2, 1, rngs=nnx.Rngs(0)))
      >>> optimizer = jaxmp.nnx.Optimizer(model, recipe.optimizer(optax.sgd(0.1)))
      >>> target = EMA(model, decay=0.995)
      >>> target.update(model, optimizer)
      >>> target.apply_to(model).kernel[...].dtype
      dtype('float32')
    """

    def __init__(self, model: nnx.Module, decay: float, *, only: Filter = nnx.Param) -> None:
        super().__init__(model, decay, only=trained(only))
        _average.check_step_size(1 - decay, f"decay={decay}")
        nnx.update(self.params, _average.fp32_copy(nnx.as_pure(self.params)))

    def update(self, model: nnx.Module, optimizer: nnx.Optimizer | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Moves the average towards the parameters of a model.

        Args:
          model: the model.
          optimizer: the optimizer that trains it, whose FP32 masters are read; None: the average is
            that of the rounded parameters.
        """
        new = nnx.as_pure(nnx.state(model, self.filter))
        if optimizer is not None:
            every = nnx.as_pure(nnx.state(model))
            full = _find.replace_by_masters(every, nnx.as_pure(optimizer.opt_state))
            by_path = dict(_trees.leaves_with_path(full))
            new = _trees.map_with_path(lambda names, _: by_path[names], new)
        average = _average.incremental_update(new, nnx.as_pure(self.params), 1 - self.decay)
        nnx.update(self.params, average)
