"""Checks and splits the result of a loss function."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
from jax import lax

from jaxmp._core._dtypes import FLOAT32, is_16bit
from jaxmp._core._typing import PyTree
from jaxmp._gradients._arguments import Options
from jaxmp.errors import JaxmpError, RecipeWarning


def parse_result(out: PyTree, options: Options) -> tuple[jax.Array, jax.Array | None, PyTree]:
    """Splits the result of a loss function into FP32 loss, FP32 weight or None, and aux."""
    if options.has_aux and not (isinstance(out, tuple) and len(out) == 2):
        raise JaxmpError(
            "With has_aux=True the function must return (loss, aux), but it returned "
            f"{describe(out)}."
        )
    loss, aux = out if options.has_aux else (out, None)
    if not options.weighted:
        if isinstance(loss, (tuple, list)):
            raise _tuple_for_loss(loss, options)
        return _scalar(loss, "loss"), None, aux
    if not (isinstance(loss, tuple) and len(loss) == 2):
        pair = "((loss_sum, weight), aux)" if options.has_aux else "(loss_sum, weight)"
        raise JaxmpError(
            f"With weighted=True the function must return {pair}, but instead of "
            f"(loss_sum, weight) it returned {describe(loss)}. Leave weighted=True out if the "
            "function returns a mean."
        )
    weight = lax.stop_gradient(_scalar(loss[1], "weight"))
    return _scalar(loss[0], "loss"), weight, aux


def _tuple_for_loss(loss: tuple[PyTree, ...] | list[PyTree], options: Options) -> JaxmpError:
    weighted = "value_and_grad(fn, weighted=True)"
    if options.has_aux and options.mutable_argnum is None:
        weighted = "value_and_grad(fn, has_aux=True, weighted=True)"
        aux = ""
    else:
        aux = " If it returns (loss, aux), write value_and_grad(fn, has_aux=True)."
    return JaxmpError(
        f"The loss must be a scalar, but the function returned {describe(loss)}.{aux} If "
        f"it returns (loss_sum, weight), whose quotient is the loss, write {weighted}."
    )


def _scalar(value: PyTree, what: str) -> jax.Array:
    if not hasattr(value, "dtype") and not isinstance(value, (int, float)):
        raise JaxmpError(f"The {what} is {describe(value)}, not a scalar array.")
    array = jnp.asarray(value)
    if array.shape != ():
        raise JaxmpError(
            f"The {what} must be a scalar, but has shape {array.shape}. Reduce it in FP32, for "
            f"example jnp.mean({what}.astype(jnp.float32))."
        )
    if what == "weight":
        return array.astype(FLOAT32)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise JaxmpError(f"The loss must be a floating-point number, but is {array.dtype}.")
    if is_16bit(array.dtype):
        warnings.warn(
            f"The loss function returned its loss in {array.dtype}, which rounds it. "
            "Compute it in FP32: logits.astype(jnp.float32) before the loss.",
            RecipeWarning,
            stacklevel=2,
        )
    return array.astype(FLOAT32)


def describe(value: PyTree) -> str:
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return (
        f"{type(value).__name__} of shape {value.shape}" if hasattr(value, "shape") else repr(value)
    )
