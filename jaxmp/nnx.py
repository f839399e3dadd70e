"""Flax NNX: gradients and an optimizer that are right in mixed precision."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import jax
import optax
from flax import nnx

from jaxmp import _gradients, _trees, optim
from jaxmp._loss_scale import NoLossScale
from jaxmp.optim import _find, _master, _skip
from jaxmp.optim._apply import apply_update

__all__ = ["Optimizer", "value_and_grad"]


def value_and_grad(
    fn: Callable[..., Any],
    loss_scale: Any = None,
    has_aux: bool = False,
    *,
    wrt: Any = nnx.Param,
    batch_argnums: int | tuple[int, ...] = 1,
    rng_argnums: int | tuple[int, ...] | None = None,
    **options: Any,
) -> Callable[..., Any]:
    """`jaxmp.value_and_grad` for a function whose first argument is an NNX module.

    What the forward pass writes into the module (batch statistics, RNG counts) is written back, one
    microbatch after the other. What it sows (`nnx.Intermediate`) is not: return it as auxiliary
    data.

    Args:
      fn: `fn(model, *args)` returns a scalar loss, or what `jaxmp.value_and_grad` allows.
      loss_scale: a jaxmp or jmp loss scale, a number, or None.
      has_aux: whether `fn` returns auxiliary data beside the loss.
      wrt: a filter of the Variables to differentiate.
      batch_argnums: arguments to split into microbatches; the model is argument 0.
      rng_argnums: arguments that hold PRNG keys, folded with the microbatch's index.
      **options: `microbatches`, `axis_name`, `accumulate_dtype`, `reduce_dtype`.

    Returns:
      A function of the same arguments that returns `(loss, grads)`, or `((loss, aux), grads)`;
      `grads` is an `nnx.State` like that of `wrt`, in float32 for 16-bit parameters.

    Example:
      >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
      >>> loss, grads = value_and_grad(lambda m, x: m(x).sum())(model, jnp.ones((4, 2)))
      >>> float(grads["bias"][...][0])
      4.0
    """

    def value_and_grad_fn(model: Any, *args: Any, **kwargs: Any) -> Any:
        graphdef, *states = nnx.split(model, wrt, nnx.Intermediate, ...)
        params, sown, rest = map(nnx.as_pure, states)

        written = nnx.Not(nnx.Any(wrt, nnx.Intermediate))

        def pure(params: Any, rest: Any, *args: Any) -> Any:
            merged = nnx.merge(graphdef, params, sown, rest)
            out = fn(merged, *args, **kwargs)
            loss, aux = _gradients.unpair(out) if has_aux else (out, None)
            return loss, (nnx.as_pure(nnx.state(merged, written)), aux)

        run = _gradients.value_and_grad(
            pure,
            loss_scale,
            mutable_argnum=1,
            batch_argnums=_behind_rest(batch_argnums),
            rng_argnums=_behind_rest(rng_argnums),
            **options,
        )
        (loss, (rest, aux)), grads = run(params, rest, *args)
        nnx.update(model, rest)
        grads = jax.tree.structure(states[0]).unflatten(jax.tree.leaves(grads))
        return ((loss, aux) if has_aux else loss), grads

    return value_and_grad_fn


def _behind_rest(argnums: Any) -> tuple[int, ...]:
    """The pure function takes the module's other Variables as argument 1."""
    return tuple(n + 1 if n >= 0 else n for n in _gradients.as_tuple(argnums))


# What the forward pass overwrote, until `update` knows whether the step is skipped. Not a field:
# between the two calls the optimizer must flatten as it did before.
_overwritten: weakref.WeakKeyDictionary[Optimizer, Any] = weakref.WeakKeyDictionary()


class Optimizer(nnx.Optimizer):
    """A drop-in for `flax.nnx.Optimizer` that is right in mixed precision.

    Masters are taken from the model's parameters as they are; then the parameters are cast to their
    storage dtypes. A step whose gradients are not finite changes nothing but the loss scale and the
    counters; `step` counts the others.

    Args:
      model: an NNX module; its parameters are cast in place.
      tx: an optax transformation; `recipe.optimizer(inner)` makes one.
      wrt: a filter of the Variables to update.

    Raises:
      CompositionError: if something around `mixed_precision` would break it silently.

    Example:
      >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
      >>> tx = jaxmp.load_recipe("bf16_params").optimizer(optax.sgd(0.1))
      >>> optimizer = Optimizer(model, tx)
      >>> model.kernel[...].dtype
      dtype(bfloat16)
    """

    def __init__(
        self, model: Any, tx: optax.GradientTransformation, *, wrt: Any = nnx.Param
    ) -> None:
        params = nnx.as_pure(nnx.state(model, wrt))
        optim.check_composition(jax.eval_shape(tx.init, params))
        super().__init__(model, tx, wrt=wrt)
        nnx.update(model, _master.store(params, self._pure_state()))

    def _pure_state(self) -> Any:
        return nnx.as_pure(self.opt_state)

    @property
    def loss_scale(self) -> Any:
        """The loss scale in the optimizer state; `NoLossScale()` if the optimizer keeps none."""
        if not _find.find(self._pure_state(), _skip.SkipNonfiniteState):
            return NoLossScale()
        return _find.get_loss_scale(self._pure_state())

    def value_and_grad(self, fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """`value_and_grad` of `fn(model, *args)` at the loss scale of this optimizer.

        What the forward pass overwrites in the model is kept until `update`, which restores it if
        the step is skipped; RNG state moves on. Call both in one `nnx.jit`, or both outside: what
        is kept does not cross the boundary of a compiled function.

        Args:
          fn: as in `jaxmp.nnx.value_and_grad`.
          **options: those of `jaxmp.nnx.value_and_grad`.

        Returns:
          A function of `(model, *args)`.
        """
        for _, node in _find.find(self._pure_state(), _skip.SkipNonfiniteState):
            options.setdefault("accumulate_dtype", node.settings.accumulate_dtype)
            options.setdefault("reduce_dtype", node.settings.reduce_dtype)
        if "loss_scale" not in options:
            options["loss_scale"] = self.loss_scale
        run = value_and_grad(fn, wrt=self.wrt, **options)

        def value_and_grad_fn(model: Any, *args: Any, **kwargs: Any) -> Any:
            before = nnx.as_pure(nnx.state(model, self._restorable))
            out = run(model, *args, **kwargs)
            # Gradients may be added up over several calls: the first state is the one to restore.
            _overwritten.setdefault(self, before)
            return out

        return value_and_grad_fn

    @property
    def _restorable(self) -> Any:
        return nnx.Not(nnx.Any(self.wrt, nnx.RngState, nnx.Intermediate))

    def update(self, model: Any, grads: Any, /, **extra_args: Any) -> Any:
        """One optimizer step on `model`, or none at all.

        Args:
          model: the module that this optimizer was made for.
          grads: unscaled gradients, as `value_and_grad` returns them.
          **extra_args: handed to the optax transformation.

        Returns:
          None: the update that counts is the assignment from the masters.
        """
        params = nnx.as_pure(nnx.state(model, self.wrt))
        grads = nnx.as_pure(nnx.state(grads, self.wrt))
        new_params, opt_state, applied = apply_update(
            self.tx, grads, self._pure_state(), params, **nnx.as_pure(extra_args)
        )
        nnx.update(model, new_params)
        nnx.update(self.opt_state, nnx.state(opt_state))
        before = _overwritten.pop(self, None)
        if applied is None:
            self.step[...] += 1
            return
        self.step[...] += applied.astype(self.step[...].dtype)
        if before is not None:
            after = nnx.as_pure(nnx.state(model, self._restorable))
            nnx.update(model, _trees.select(applied, after, before))
