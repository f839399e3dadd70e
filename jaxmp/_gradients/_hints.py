"""Hints about trainings whose parts do not fit, once for each training.

Model, gradient and optimizer are different objects. A hint is attached to those that know of the
mistake: the wrapped model sees that it is differentiated, the trace of a gradient whether its loss
was scaled, and the loss scale of an optimizer's state the dtype that its recipe computes in.
"""

from __future__ import annotations

import contextvars
import warnings
import weakref
from typing import Any, NamedTuple

import jax

from jaxmp import _core, _programs
from jaxmp._core import Mark, PyTree, _compat
from jaxmp._core._compat import _tracing
from jaxmp.errors import RecipeWarning

# The warning that is due when the trace of a gradient ends, or None if its loss has been scaled.
_gradients: weakref.WeakKeyDictionary[Any, weakref.finalize[Any, Any] | None]
_gradients = weakref.WeakKeyDictionary()


class TracedLoss(NamedTuple):
    """Loss that a jaxmp function traces, and differentiates afterwards.

    is_scaled: True if its gradient will be scaled.
    outer: the traces that its arguments belong to before they are differentiated.
    mark: that of the optimizer's loss scale.
    models: (mark, line of the user) of float16 models, if its gradient will not be scaled.
    """

    is_scaled: bool
    outer: frozenset[Any]
    mark: Mark
    models: list[tuple[Mark, tuple[str, int]]]


# The loss that is being traced. Its models read it here, because no argument passes it to them.
traced = contextvars.ContextVar[TracedLoss | None]("traced", default=None)

# Filled by each loss with a scale that is traced inside of a function that autocast traces.
scaled_losses = contextvars.ContextVar[list[bool] | None]("scaled_losses", default=None)


def traces_of(tree: PyTree) -> frozenset[Any]:
    """Returns the traces that the leaves of a tree belong to."""
    return frozenset(map(_compat.trace_of, jax.tree.leaves(tree))) - {None}


def is_in_loss(tree: PyTree) -> bool:
    """Returns True if a loss is traced for its gradient, or a leaf belongs to such a trace."""
    return traced.get() is not None or bool(_tracing.gradient_traces(tree))


def note_scaled(tree: PyTree) -> None:
    """Notes that the gradient to which the arrays of a tree belong has a scaled loss."""
    if (scaled := scaled_losses.get()) is not None:
        scaled.append(True)
    for trace in _tracing.gradient_traces(tree):
        if pending := _gradients.get(trace):
            pending.detach()
        _gradients[trace] = None


def expect_scale(inputs: PyTree, mark: Mark) -> None:
    """Warns of a float16 model whose gradient is traced, if the trace ends without a scaled loss.

    Args:
      inputs: the parameters and arguments. Those of a teacher, whose arrays are outside of all
        traces, or in that of the whole step, have no gradient.
      mark: that of the model.
    """
    loss = traced.get()
    if loss is not None and loss.is_scaled:
        return
    # Inside of a loss, the forces of a potential are gradients, too. The loss scale is that of the
    # outermost gradient.
    traces = _tracing.gradient_traces(inputs)
    trace = next((t for t in traces if traces.isdisjoint(_tracing.outer_traces(t))), None)
    if trace is None and loss is not None:
        if not traces_of(inputs) <= loss.outer:
            loss.models.append((mark, _core.user_line()))
    elif trace is not None and trace not in _gradients:
        # Flax NNX leaves the trace to the garbage collector; all others end with their function.
        _gradients[trace] = weakref.finalize(trace, warn_of_gradient, mark, _core.user_line())


def warn_of_gradient(mark: Mark, line: tuple[str, int]) -> None:
    """Warns once of a float16 model or function whose gradient has no loss scale."""
    if not mark.is_checked:
        mark.is_checked = True
        message = (
            "The gradient of a float16 model is computed without a loss scale, so that small "
            "gradients become zero. Make the optimizer with the recipe, tx = "
            "recipe.optimizer(inner), and compute the gradients with its scale: "
            "state.value_and_grad(loss_fn)(batch), optimizer.value_and_grad(loss_fn)(model, batch) "
            "or jaxmp.value_and_grad(loss_fn, loss_scale=jaxmp.get_loss_scale(opt_state))(params, "
            "batch). The recipe 'bf16' needs no loss scale. Of a teacher, stop the gradient of the "
            "arguments: teacher(jax.lax.stop_gradient(x)). Ignore this if the code scales the loss."
        )
        warnings.warn_explicit(message, RecipeWarning, *line)


def warn_of_rounded_loss(dtype: Any) -> None:
    """Warns of a loss that is computed in 16 bits."""
    _core.warn_user(
        f"The loss, or a term of it, is computed in {dtype}, which rounds it. Compute it in FP32: "
        "logits.astype(jnp.float32) before the loss."
    )


def check_matmuls(loss: TracedLoss, backward: Any) -> None:
    """Warns of a loss whose matmuls are wider than 16 bits, although the optimizer's recipe is not.

    It also warns of float16 models without a loss scale, if a gradient passes through one.

    Args:
      loss: the loss.
      backward: the result of `jax.vjp`. Most have 16-bit residuals, and are not searched.
    """
    mark, jaxpr = loss.mark, getattr(backward, "jaxpr", None)
    dtypes = {getattr(leaf, "dtype", None) for leaf in jax.tree.leaves(backward)}
    if loss.models and jaxpr is not None:
        # A loss in `jax.checkpoint` has residuals in FP32 alone.
        dtypes.update(dtype for pair in _programs.count_flops(jaxpr) for dtype in pair)
    for model, line in loss.models if _core.FLOAT16 in dtypes else ():
        warn_of_gradient(model, line)
    if mark.dtype is None or mark.is_checked:
        return
    mark.is_checked = True
    if jaxpr is None or not dtypes.isdisjoint(_core.FLOATS_16BIT):
        return
    pairs = _programs.count_flops(jaxpr)
    dtypes = {dtype for pair in pairs for dtype in pair}
    if any(_core.bits(dtype) <= 16 for dtype in dtypes):
        return
    if _core.FLOAT64 in dtypes:
        _core.warn_user(
            f"The recipe of the optimizer computes in {mark.dtype}, but matmuls of the loss run in "
            "float64: recipes do not cast float64 arrays, which JAX and NumPy make by default if "
            "jax_enable_x64 is on. Cast the inputs before the model: x = x.astype(jnp.float32).",
            repeats=True,
        )
    elif dtypes and not mark.is_applied:
        _core.warn_user(
            f"The recipe of the optimizer computes in {mark.dtype}, but was not applied to a "
            "model or a function: all matmuls of the loss run in FP32. Apply it: model = "
            "recipe.wrap(model), which returns a new model, or loss_fn = jaxmp.autocast(loss_fn, "
            "recipe).",
            repeats=True,
        )
