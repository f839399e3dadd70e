"""Hints about trainings whose parts do not fit, once for each training.

Model, gradient and optimizer are different objects. A hint is attached to those that know of the
mistake: the wrapped model sees that it is differentiated, the trace of a gradient whether its loss
was scaled, and the loss scale of an optimizer's state the dtype that its recipe computes in.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import dis
import inspect
import warnings
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import Any, TypeVar

import jax
import numpy as np

from jaxmp._core import _compat
from jaxmp._core._dtypes import FLOAT64, FLOATS_16BIT, bits
from jaxmp._core._typing import PyTree
from jaxmp._programs._matmuls import count_flops
from jaxmp.errors import RecipeWarning

T = TypeVar("T")


@dataclasses.dataclass(unsafe_hash=True)
class Mark:
    """Mark of an object of one training. All marks are equal, so that they never cause a retrace.

    Attributes:
      dtype: compute dtype of the optimizer's recipe, if it has 16 bits; otherwise None.
      is_checked: the hint of the object has been considered.
    """

    dtype: np.dtype | None = dataclasses.field(default=None, compare=False, repr=False)
    is_checked: bool = dataclasses.field(default=False, compare=False, repr=False)


# The warning that is due when the trace of a gradient ends, or None if its loss has been scaled.
_gradients: weakref.WeakKeyDictionary[Any, weakref.finalize[Any, Any] | None]
_gradients = weakref.WeakKeyDictionary()


# While a jaxmp function traces a loss, which it differentiates afterwards: whether it is scaled.
_is_scaled = contextvars.ContextVar[bool | None]("_is_scaled", default=None)


@contextlib.contextmanager
def traced_loss(is_scaled: bool) -> Iterator[None]:
    """Notes in a block whether the gradient of the loss that it traces will be scaled."""
    token = _is_scaled.set(is_scaled)
    try:
        yield
    finally:
        _is_scaled.reset(token)


def is_in_loss(tree: PyTree) -> bool:
    """Returns True if a loss is traced for its gradient, or a leaf belongs to such a trace."""
    traces = map(_compat.gradient_trace, jax.tree.leaves(tree))
    return _is_scaled.get() is not None or any(trace is not None for trace in traces)


def note_scaled(tree: PyTree) -> None:
    """Notes that the gradient to which the arrays of a tree belong has a scaled loss."""
    for trace in {*map(_compat.gradient_trace, jax.tree.leaves(tree))} - {None}:
        if pending := _gradients.get(trace):
            pending.detach()
        _gradients[trace] = None


def expect_scale(inputs: PyTree, mark: Mark) -> None:
    """Warns of a float16 model whose gradient is traced, if the trace ends without a scaled loss.

    Args:
      inputs: the parameters, or other arrays that the model reads.
      mark: that of the model.
    """
    trace = next(filter(None, map(_compat.gradient_trace, jax.tree.leaves(inputs))), None)
    if trace is None and _is_scaled.get() is False:
        _warn_of_gradient(mark, _user_line())
    elif trace is not None and trace not in _gradients:
        # Flax NNX leaves the trace to the garbage collector; all others end with their function.
        _gradients[trace] = weakref.finalize(trace, _warn_of_gradient, mark, _user_line())


def _warn_of_gradient(mark: Mark, line: tuple[str, int]) -> None:
    if not mark.is_checked:
        mark.is_checked = True
        message = (
            "The gradient of a float16 model is computed without a loss scale, so that small "
            "gradients become zero. Make the optimizer with the recipe, tx = "
            "recipe.optimizer(inner), and compute the gradients with its scale: "
            "state.value_and_grad(loss_fn)(batch), optimizer.value_and_grad(loss_fn)(model, batch) "
            "or jaxmp.value_and_grad(loss_fn, loss_scale=jaxmp.get_loss_scale(opt_state))(params, "
            "batch). The recipe 'bf16' needs no loss scale. Ignore this if the code scales the "
            "loss itself."
        )
        warnings.warn_explicit(message, RecipeWarning, *line)


def check_matmuls(mark: Mark, backward: Any) -> None:
    """Warns of a loss whose matmuls are wider than 16 bits, although the optimizer's recipe is not.

    Args:
      mark: that of the optimizer's loss scale.
      backward: the result of `jax.vjp`. Most have 16-bit residuals, and are not searched.
    """
    if mark.dtype is None or mark.is_checked:
        return
    mark.is_checked = True
    residuals, jaxpr = jax.tree.leaves(backward), getattr(backward, "jaxpr", None)
    if jaxpr is None or any(getattr(leaf, "dtype", None) in FLOATS_16BIT for leaf in residuals):
        return
    pairs = count_flops(jaxpr)
    dtypes = {dtype for pair in pairs for dtype in pair}
    if any(bits(dtype) <= 16 for dtype in dtypes):
        return
    if FLOAT64 in dtypes:
        warn_user(
            f"The recipe of the optimizer computes in {mark.dtype}, but matmuls of the loss run in "
            "float64: recipes do not cast float64 arrays, which JAX and NumPy make by default if "
            "jax_enable_x64 is on. Cast the inputs before the model: x = x.astype(jnp.float32)."
        )
    elif dtypes:
        warn_user(
            f"The recipe of the optimizer computes in {mark.dtype}, but was not applied to a "
            "model or a function: all matmuls of the loss run in FP32. Apply it: model = "
            "recipe.wrap(model), which returns a new model, or loss_fn = jaxmp.autocast(loss_fn, "
            "recipe)."
        )


def warn_if_dropped(result: T, fix: str) -> T:
    """Returns the result of the caller, and warns if the statement that called it drops this.

    Args:
      result: a new object; the caller modifies nothing.
      fix: the statement that keeps it.
    """
    here: Any = inspect.currentframe()
    name, frame = here.f_back.f_code.co_name, here.f_back.f_back
    if frame is not None and _drops_call(frame, name):
        message = f"The result of {name} is dropped, and nothing else changes. Keep it: {fix}."
        warnings.warn(message, RecipeWarning, stacklevel=3)
    return result


def _drops_call(frame: FrameType, name: str) -> bool:
    """Returns True if a frame calls the function of a name, and its next instruction is a pop."""
    code, following = frame.f_code.co_code, frame.f_lasti + 2
    while code[following] == 0:  # Inline caches of the interpreter.
        following += 2
    if code[following] != dis.opmap["POP_TOP"]:
        return False
    # A function in C, such as `list.extend(map(recipe.wrap, models))`, may keep what it drops.
    before = [each for each in dis.get_instructions(frame.f_code) if each.offset <= frame.f_lasti]
    start = lambda each: each.positions and (each.positions.lineno, each.positions.col_offset)
    return any(each.argval == name and start(each) == start(before[-1]) for each in before)


_LIBRARIES = {"jaxmp", "jax", "flax", "optax", "contextlib", "functools"}


def _user_line() -> tuple[str, int]:
    """Returns file and line of the innermost call outside of jaxmp, JAX and Flax."""
    frame: Any = inspect.currentframe()
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in _LIBRARIES:
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def warn_user(message: str) -> None:
    """Warns at the line of the user's call, each time: a hint is due once for each training."""
    warnings.warn_explicit(message, RecipeWarning, *_user_line())
