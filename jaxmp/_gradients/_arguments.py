"""Options of `value_and_grad`, and the checks of its arguments and of the loss."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmp import _overwritten
from jaxmp._core import _trees
from jaxmp._core._dtypes import FLOAT32, is_16bit
from jaxmp._core._typing import AxisNames, PyTree
from jaxmp._loss_scale import LossScale
from jaxmp.errors import JaxmpError, RecipeWarning


@dataclasses.dataclass(frozen=True)
class Options:
    """Checked arguments of `value_and_grad`."""

    loss_scale: LossScale
    has_aux: bool
    weighted: bool
    argnums: tuple[int, ...]
    microbatches: int
    batch_argnums: tuple[int, ...]
    rng_argnums: tuple[int, ...]
    mutable_argnum: int | None
    interleave: bool
    axes: tuple[Hashable, ...]
    accumulate_dtype: np.dtype
    reduce_dtype: np.dtype
    regather: bool
    # The differentiated arguments of a call, before `begin_step` of their FP8 states.
    before: tuple[Any, ...] = ()


def as_tuple(value: AxisNames) -> tuple[Any, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def check_argnums(argnums: int | Sequence[int]) -> None:
    """Checks that `argnums` contains only argument numbers, and not a positional loss scale.

    Raises:
      JaxmpError: with the value and the intended call.
    """
    numbers = argnums if isinstance(argnums, (tuple, list)) else (argnums,)
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, (int, np.integer)):
            raise JaxmpError(
                f"argnums={argnums!r}: the second argument of value_and_grad and grad is the "
                "number of the argument to differentiate, or a tuple of such numbers, as in JAX. "
                "Pass a loss scale by keyword: value_and_grad(fn, loss_scale=loss_scale)."
            )


def check_positive(microbatches: int) -> int:
    if (
        isinstance(microbatches, bool)
        or not isinstance(microbatches, (int, np.integer))
        or microbatches < 1
    ):
        raise JaxmpError(f"microbatches={microbatches!r} must be an integer >= 1; for example 4.")
    return int(microbatches)


def options_of_call(options: Options, args: tuple[Any, ...]) -> Options:
    """Returns the options for a call with `args`, with checked, non-negative argument numbers."""

    def count(name: str, *, optional: bool = False) -> tuple[int, ...]:
        numbers = as_tuple(getattr(options, name))
        for index in numbers:
            if not -len(args) <= index < len(args) and not optional:
                raise JaxmpError(
                    f"{name} names argument {index}, but the function was called with {len(args)} "
                    "positional argument(s); pass it by position."
                )
        counted = tuple(i % len(args) for i in numbers if -len(args) <= i < len(args))
        if len(set(counted)) < len(counted):
            raise JaxmpError(
                f"{name}={numbers} contains an argument twice. List each argument once."
            )
        return counted

    mutable = count("mutable_argnum")
    called = dataclasses.replace(
        options,
        argnums=count("argnums"),
        rng_argnums=count("rng_argnums"),
        batch_argnums=count("batch_argnums", optional=options.microbatches == 1),
        mutable_argnum=mutable[0] if mutable else None,
    )
    both = set(called.argnums) & set(called.batch_argnums)
    if both and called.microbatches > 1:
        raise JaxmpError(
            f"Argument {min(both)} is both differentiated and split into microbatches. List "
            "only the batch in batch_argnums."
        )
    for index in called.argnums:
        _check_differentiable(index, args[index])
    return called


def _check_differentiable(index: int, arg: PyTree) -> None:
    params, _ = _overwritten.split(arg)
    for names, leaf in _trees.leaves_with_path(params):
        where = "".join(f"[{name!r}]" for name in names)
        if not (hasattr(leaf, "dtype") or isinstance(leaf, (int, float, complex))):
            raise JaxmpError(
                f"Argument {index}{where} is a {type(leaf).__name__}, which cannot be "
                "differentiated because it is not an array. Differentiate the arrays of an Equinox "
                "module alone: params, static = eqx.partition(model, eqx.is_inexact_array), then "
                "jaxmp.value_and_grad(lambda params: loss_fn(eqx.combine(params, static)))(params)."
            )
        if not _trees.is_inexact(leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf)):
            raise JaxmpError(
                f"Argument {index}{where} is {getattr(leaf, 'dtype', type(leaf).__name__)}, which "
                "cannot be differentiated. Pass it as another argument, or leave it out of argnums."
            )


# ---------------------------------------------------------------------------
# Results
# ---------------------------------------------------------------------------


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
