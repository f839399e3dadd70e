"""Gradients, optimizer and averages of Flax NNX models."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from flax import nnx
from flax.nnx.filterlib import Filter

from jaxmp._core._typing import PyTree
from jaxmp._flax._nnx_gradients import Gradient, trained
from jaxmp._flax._nnx_layers import OverwriteWithGradient
from jaxmp._flax._nnx_optimizer import EMA, Optimizer
from jaxmp._gradients import _value_and_grad
from jaxmp._gradients._dynamic_loss_scale import LossScaleLike

__all__ = [
    "EMA",
    "Optimizer",
    "OverwriteWithGradient",
    "value_and_grad",
]


def value_and_grad(
    fn: Callable[..., Any] | None = None,
    argnums: int | nnx.DiffState | Sequence[int | nnx.DiffState] = 0,
    has_aux: bool = False,
    *,
    loss_scale: LossScaleLike = None,
    wrt: Filter = nnx.Param,
    **options: Any,
) -> Callable[..., Any]:
    """Returns a function that computes the FP32 loss and gradients of a function of Flax objects.

    It corresponds to `flax.nnx.value_and_grad`, for computations in 16 bits. Flax objects (modules,
    `nnx.Rngs`, metrics, Variables) can be in any argument, also inside lists, tuples and dicts.
    Values that `fn` writes to them (batch statistics, RNG counts, metrics, sown values) are written
    to the caller's objects, as in Flax.

    Args:
      fn: returns a scalar loss, or another result that `jaxmp.value_and_grad` allows. None: returns
        a decorator: `@value_and_grad(has_aux=True)`.
      argnums: the arguments to differentiate: numbers, or `nnx.DiffState(number, filter)`.
      has_aux: `fn` returns `(loss, aux)`; `aux` can contain Flax objects.
      loss_scale: a loss scale, a number, or None.
      wrt: filter of the Variables to differentiate. The state of delayed scaling
        (`OverwriteWithGradient`) is always differentiated.
      **options: `weighted`, `microbatches`, `batch_argnums`, `rng_argnums`, `axis_name`,
        `interleave`, `accumulate_dtype` and `reduce_dtype` of `jaxmp.value_and_grad`. Each
        microbatch receives the state of all Flax objects after the previous one, including RNG
        counts, but the original parameters. Sown values are stacked, like auxiliary data.

    Returns:
      A function of the same arguments that returns `(loss, grads)`, or `((loss, aux), grads)`.
      `grads` is a tuple if `argnums` is one. It contains an `nnx.State` for each module, in float32
      for 16-bit parameters. It includes the new values of `OverwriteWithGradient`, if the model has
      any: `Optimizer.update` assigns them, and `nnx.state(grads, nnx.Param)` excludes them. Without
      an `Optimizer`, assign them with `nnx.update(model, nnx.state(grads, OverwriteWithGradient))`.

    Raises:
      JaxmpError: if `fn` is a method of a module, if a Variable is both in an argument to
        differentiate and in another one, or if `jaxmp.value_and_grad` refuses an argument.

    Example:
      >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
      >>> loss, grads = value_and_grad(lambda m, x: m(x).sum())(model, jnp.ones((4, 2)))
      >>> float(grads["bias"][...][0])
      4.0
    """
    if fn is None:
        return functools.partial(
            value_and_grad,
            argnums=argnums,
            has_aux=has_aux,
            loss_scale=loss_scale,
            wrt=wrt,
            **options,
        )
    gradient = Gradient(fn, argnums, has_aux, trained(wrt))
    options = {"loss_scale": loss_scale, **options}
    _value_and_grad.value_and_grad(fn, **options)  # Checks the options before the first call.

    @functools.wraps(fn, updated=())
    def value_and_grad_fn(*args: PyTree, **kwargs: PyTree) -> PyTree:
        out, _ = gradient(args, kwargs, options)
        return out

    return value_and_grad_fn
