"""Optimizer for NNX models in mixed precision, and averages of their parameters."""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax
from flax import nnx
from flax.nnx.filterlib import Filter

from jaxmp import _core
from jaxmp._core import PyTree, _compat
from jaxmp._flax._nnx_cast_on_read import bound_of
from jaxmp._flax._nnx_gradients import Gradient
from jaxmp._flax._nnx_layers import OverwriteWithGradient, trained
from jaxmp._flax._nnx_writes import Write, same, undo
from jaxmp._gradients import _loss_scale
from jaxmp.errors import CompositionError, JaxmpError
from jaxmp.fp8 import _overwritten
from jaxmp.optim import _apply, _assign, _average, _find

# Writes of the last call of each optimizer's `value_and_grad`, until `update` keeps or undoes them.
# They are not a field, because the tree structure of the optimizer must not change in between.
_pending: weakref.WeakKeyDictionary[Optimizer, list[Write]] = weakref.WeakKeyDictionary()
# The model with which each optimizer was created.
_models: weakref.WeakKeyDictionary[Optimizer, weakref.ref[Any]] = weakref.WeakKeyDictionary()


def trained_model(optimizer: object) -> nnx.Module | None:
    """Returns the model with which an optimizer was created; None if it is not known."""
    reference = _models.get(optimizer) if isinstance(optimizer, Optimizer) else None
    return None if reference is None else reference()


class Optimizer(nnx.Optimizer):
    """Replacement of `flax.nnx.Optimizer` for mixed precision.

    Masters are copied from the model's parameters before these are cast to their storage dtypes. A
    step with non-finite gradients changes only the loss scale and the skip counters; `step` counts
    the applied steps.

    Args:
      model: an NNX module. Its parameters are cast in place.
      tx: an optax transformation, such as `recipe.optimizer(inner)`.
      wrt: filter of the Variables to update.

    Raises:
      CompositionError: if `wrt` selects nothing, or a transformation around `recipe.optimizer`
        would break it silently.

    Example:
      >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
      >>> tx = jaxmp.load_recipe("bf16_params").optimizer(optax.sgd(0.1))
      >>> optimizer = Optimizer(model, tx)
      >>> model.kernel[...].dtype
      dtype(bfloat16)
    """

    def __init__(
        self,
        model: nnx.Module,
        tx: optax.GradientTransformation,
        *,
        wrt: Filter = nnx.Param,
    ) -> None:
        params = nnx.as_pure(nnx.state(model, trained(wrt)))
        if not jax.tree.leaves(params):
            raise CompositionError(
                f"jaxmp.nnx.Optimizer received a {type(model).__qualname__} in which wrt={wrt!r} "
                "selects no Variables of Flax NNX, so it would train nothing. Select others, such "
                "as wrt=nnx.Param; for a model of another package, such as Equinox, use the "
                "optimizer itself: opt_state = recipe.optimizer(optax.adam(1e-3)).init(params)."
            )
        _find.check_composition(jax.eval_shape(tx.init, params), params)
        super().__init__(model, tx, wrt=trained(wrt))
        self.wrt = wrt
        nnx.update(model, _assign.store(params, self._pure_state()))
        if isinstance(model, nnx.Module):
            policies = getattr(bound_of(model), "policies", None)
            _assign.warn_without_masters(params, self._pure_state(), policies)
            _models[self] = weakref.ref(model)

    def _trained_params(self) -> PyTree:
        """Returns the parameters of the model with which this was created; None if it is gone."""
        model = trained_model(self)
        return None if model is None else nnx.as_pure(nnx.state(model, trained(self.wrt)))

    def _pure_state(self) -> PyTree:
        return nnx.as_pure(self.opt_state)

    @property
    def loss_scale(self) -> _loss_scale.LossScale:
        """The loss scale in the optimizer state; `NoLossScale()` if it has none."""
        return _find.own_loss_scale(self._pure_state())

    def value_and_grad(
        self,
        fn: Callable[..., Any] | None = None,
        argnums: int | nnx.DiffState | Sequence[int | nnx.DiffState] = 0,
        has_aux: bool = False,
        **options: Any,
    ) -> Callable[..., Any]:
        """Returns `jaxmp.nnx.value_and_grad` of `fn` with the loss scale of this optimizer.

        The loss scale is read when the returned function is called. Values that the forward pass
        writes to Flax objects are recorded until `update`, which restores them if the step is
        skipped; RNG state advances. Call both in one `nnx.jit`, or both outside: the record does
        not cross the boundary of a compiled function. Values that are not finite are left out.

        Args:
          fn: as in `jaxmp.nnx.value_and_grad`.
          argnums: the arguments to differentiate, as in `jaxmp.nnx.value_and_grad`.
          has_aux: `fn` returns `(loss, aux)`.
          **options: those of `jaxmp.nnx.value_and_grad`, except `wrt`, which is the optimizer's.

        Returns:
          A function of the arguments of `fn`.

        Raises:
          JaxmpError: if the returned function is called in a compiled function, and this method
            was not called on the optimizer that the function receives. Otherwise the loss scale
            would be a constant, and a skipped step would restore nothing.
        """
        if fn is None:
            return functools.partial(
                self.value_and_grad, argnums=argnums, has_aux=has_aux, **options
            )
        gradient = Gradient(fn, argnums, has_aux, trained(self.wrt))
        return gradient.function(options, self._gradient_options, self._remember)

    def _gradient_options(self, options: dict[str, Any]) -> dict[str, Any]:
        if "loss_scale" not in options and not _compat.can_update(self.step):
            raise JaxmpError(
                "optimizer.value_and_grad was called in a compiled function on an optimizer that "
                "the function does not receive as an argument, so its loss scale would never "
                "change there. Pass the optimizer, and call value_and_grad inside: "
                "nnx.jit(lambda model, optimizer, batch: "
                "optimizer.value_and_grad(loss_fn)(model, batch))."
            )
        return _find.gradient_options(self._pure_state(), options)

    def _warn_of_wide(self, model: nnx.Module) -> None:
        """Warns about frozen FP32 parameters, after other optimizers have cast theirs."""
        if self.wrt is nnx.Param:
            return
        frozen = nnx.as_pure(nnx.state(model, nnx.All(nnx.Param, nnx.Not(self.wrt))))
        fix = "nnx.update(model, recipe.cast_params(nnx.state(model, nnx.Param)))"
        _assign.warn_of_wide(frozen, self._pure_state(), fix)

    def _remember(self, writes: list[Write]) -> None:
        """Records the writes of a call, which replace those of an earlier call."""
        _pending.pop(self, None)
        # `update` cannot reach writes inside a compiled function without the optimizer.
        if _compat.can_update(self.step):
            _pending[self] = [write for write in writes if write.is_restorable]

    def update(self, model: nnx.Module, grads: PyTree = None, /, **extra_args: PyTree) -> PyTree:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Applies one optimizer step to `model`, or skips it.

        A skipped step restores the values that the last call of this optimizer's `value_and_grad`
        wrote, and none that another optimizer or another call wrote. Variables of type
        `OverwriteWithGradient` in `grads` are assigned instead of optimized.

        Args:
          model: the module with which this optimizer was created.
          grads: unscaled gradients, as `value_and_grad` returns them.
          **extra_args: passed to the optax transformation.

        Returns:
          The updates: the new parameters minus the old ones.
        """
        if grads is None:
            raise JaxmpError(
                "update requires the model and the gradients, unlike nnx.ModelAndOptimizer: "
                "optimizer.update(model, grads)."
            )
        self._warn_of_wide(model)
        params = nnx.as_pure(nnx.state(model, trained(self.wrt)))
        overwritten = nnx.as_pure(nnx.state(grads, OverwriteWithGradient))
        grads = nnx.as_pure(nnx.state(grads, trained(self.wrt)))
        new_params, opt_state, applied = _apply.apply_update(
            self.tx, grads, self._pure_state(), params, **nnx.as_pure(extra_args)
        )
        writes = _pending.pop(self, [])
        if applied is not None and writes:
            others = [write for pending in list(_pending.values()) for write in pending]
            for write in writes:
                undo(write, others, applied)
            # Parameters that the forward pass wrote, for example in nnx.SpectralNorm.
            restored = nnx.as_pure(nnx.state(model, trained(self.wrt)))
            if not same(params, restored):
                opt_state = _assign.keep_masters(applied, opt_state, self._pure_state())
                new_params = _core.select(applied, new_params, restored)
        nnx.update(model, new_params)
        nnx.update(self.opt_state, nnx.state(opt_state))
        if applied is not None and jax.tree.leaves(overwritten):
            old = nnx.as_pure(nnx.state(model, OverwriteWithGradient))
            overwritten = _overwritten.select(applied, overwritten, old)
        nnx.update(model, overwritten)
        self.step[...] += 1 if applied is None else applied.astype(self.step[...].dtype)
        return jax.tree.map(operator.sub, new_params, params)


# ---------------------------------------------------------------------------
# Averages
# ---------------------------------------------------------------------------


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
            by_path = dict(_core.leaves_with_path(full))
            new = _core.map_with_path(lambda names, _: by_path[names], new)
        average = _average.incremental_update(new, nnx.as_pure(self.params), 1 - self.decay)
        nnx.update(self.params, average)
