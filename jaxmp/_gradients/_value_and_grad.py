"""`value_and_grad` and `grad` with loss scaling, microbatches, and results in FP32."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmp import _core
from jaxmp._core import AxisNames, DTypeLike, PyTree, _compat
from jaxmp._gradients._dynamic_loss_scale import LossScaleLike, as_loss_scale
from jaxmp._gradients._evaluate import Options, accumulate, evaluate, mean_of_sums, reduce_sums
from jaxmp._gradients._fp32 import is_on_several_devices
from jaxmp.errors import JaxmpError
from jaxmp.fp8 import _overwritten


def value_and_grad(
    fn: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    loss_scale: LossScaleLike = None,
    weighted: bool = False,
    microbatches: int = 1,
    batch_argnums: int | Sequence[int] | None = None,
    rng_argnums: int | Sequence[int] | None = None,
    axis_name: AxisNames = None,
    mutable_argnum: int | None = None,
    interleave: bool = False,
    accumulate_dtype: DTypeLike = "float32",
    reduce_dtype: DTypeLike = "float32",
    regather: bool = True,
    widen_params: bool = False,
    guarded: bool = False,
) -> Callable[..., Any]:
    """Differentiates like `jax.value_and_grad`, with loss scaling and results in FP32.

    The loss is cast to FP32, and the loss scale is the initial cotangent of the backward pass.
    `loss * scale` is therefore never computed and cannot overflow. Gradients are divided by the
    scale in FP32. A loss that is not finite makes the gradients NaN, so that the optimizer skips
    the step without reading the loss.

    Args:
      fn: function that returns a scalar loss, or `(loss, aux)` with `has_aux`. With `weighted`, it
        returns `(loss_sum, weight)` instead of the loss.
      argnums: numbers of the arguments to differentiate, as in `jax.value_and_grad`.
      has_aux: `fn` also returns auxiliary data.
      loss_scale: a loss scale, a number, or None.
      weighted: `fn` returns `(loss_sum, weight)`, or `((loss_sum, weight), aux)` with `has_aux`.
        The loss is the ratio of the two, each summed over all microbatches and devices. If the
        weight is the number of unmasked tokens, the loss is the mean over all unmasked tokens.
      microbatches: k > 1 splits the arguments in `batch_argnums` into k parts along axis 0,
        evaluates them sequentially in a `lax.scan`, and averages the results. Auxiliary data is
        stacked on a new axis 0. Scalars in a batch are passed to every part unchanged. On explicit
        mesh axes, gradients of parameters that are `reduced` over the axes of the batch are summed
        over devices once, after the scan.
      batch_argnums: numbers of the arguments to split, such as `(1, 2)` for `fn(params, x, y)`.
        None: argument 1, if it is certain to be the whole batch: its arrays have equally many rows,
        and no other argument has an array with as many. Differentiated arguments, those in
        `rng_argnums` and `mutable_argnum`, and PRNG keys are not considered. Otherwise a call with
        k > 1 raises before it is traced.
      rng_argnums: numbers of the arguments that contain PRNG keys. Each part receives the keys
        folded with its index.
      axis_name: mapped axis (or axes) of `vmap`, `pmap` or `shard_map` over which loss and
        gradients are averaged, once, in `reduce_dtype`.
      mutable_argnum: number of the argument with mutable collections. `fn` returns
        `(loss, (mutables, aux))`, and each part receives the collections that the previous part
        returned.
      interleave: part i takes the rows i, i + k, i + 2k, ... instead of a contiguous block, so that
        a batch that is sharded on axis 0 stays on its devices.
      accumulate_dtype: dtype in which the gradients of the parts are accumulated.
      reduce_dtype: dtype in which gradients are summed across devices. Matmuls with 16-bit copies
        of FP32 parameters compute their gradients with FP32 results, and `jit` sums these over
        devices, unless it is a 16-bit dtype: then a gradient is computed and summed in the dtype
        of its operation.
      regather: weights that are split over the axes of the batch, and of which a sharding
        constraint in `fn` or the metadata of Flax contains the sharding, are gathered in the dtype
        of their matmuls. True: again in the backward pass; False: they are kept until then.
      widen_params: parameters that are stored in 16 bits are differentiated as if they were FP32.
        Arrays on several devices always are.
      guarded: the gradients go to an optimizer that skips steps with non-finite gradients. A loss
        that is not finite then makes one gradient NaN instead of all of them, which saves XLA
        passes over gradients on a GPU. `TrainState` and `jaxmp.nnx.Optimizer` set it.

    Returns:
      A function of the same arguments that returns `(loss, grads)`, or `((loss, aux), grads)`. The
      loss is float32, 16-bit gradients are returned in float32, all others in their own dtype.
      Gradients of an `_overwrite_with_gradient` collection are its new values: they are combined
      by max, and never scaled or averaged. The state of an FP8 layer that did not run is returned
      unchanged.

    Raises:
      JaxmpError: if `argnums` is not an argument number (but a loss scale, for example), the loss
        is not a floating-point scalar, an argument to differentiate contains no floats, a batch
        cannot be split evenly or is not certain, or an argument number is out of range.

    Example:
      >>> loss_fn = lambda w, x: jnp.mean((x @ w).astype(jnp.float32) ** 2)
      >>> w, x = jnp.ones((3, 1), jnp.float16), jnp.ones((4, 3), jnp.float16)
      >>> loss, grads = value_and_grad(loss_fn, loss_scale=2.0**10, microbatches=2)(w, x)
      >>> float(loss), grads.dtype
      (9.0, dtype('float32'))
    """
    check_argnums(argnums)
    options = Options(
        loss_scale=as_loss_scale(loss_scale),
        has_aux=has_aux or mutable_argnum is not None,
        weighted=weighted,
        argnums=_core.as_tuple(argnums),
        microbatches=check_positive(microbatches),
        batch_argnums=(1,) if batch_argnums is None else _core.as_tuple(batch_argnums),
        rng_argnums=_core.as_tuple(rng_argnums),
        mutable_argnum=mutable_argnum,
        interleave=interleave,
        axes=_core.as_tuple(axis_name),
        accumulate_dtype=_core.sum_dtype(accumulate_dtype),
        reduce_dtype=_core.sum_dtype(reduce_dtype),
        regather=regather,
        widen_params=widen_params,
        guarded=guarded,
    )

    def value_and_grad_fn(*args: PyTree, **kwargs: PyTree) -> PyTree:
        _compat.check_axes(options.axes)
        called = options_of_call(options, args)
        if batch_argnums is None and called.microbatches > 1:
            _check_only_batch(called, args, kwargs)
        before = tuple(args[i] for i in called.argnums)
        called = dataclasses.replace(called, before=before, parts=[])
        spread = is_on_several_devices(args, kwargs)
        # As device-varying arguments, their gradients are summed in `reduce_sums` only.
        begin = lambda arg: _compat.vary(_overwritten.begin_step(arg, spread), called.axes)
        args = tuple(begin(arg) if i in called.argnums else arg for i, arg in enumerate(args))
        run = evaluate if called.microbatches == 1 else accumulate
        sums, aux = run(fn, args, kwargs, called)
        loss, grads = mean_of_sums(reduce_sums(sums, called))
        grads = tuple(map(_overwritten.finish_step, grads, before))
        grads = grads if isinstance(argnums, (tuple, list)) else grads[0]
        return ((loss, aux) if called.has_aux else loss), grads

    return value_and_grad_fn


def grad(
    fn: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    **options: Any,
) -> Callable[..., Any]:
    """Differentiates like `value_and_grad`, but returns only the gradients, as `jax.grad` does.

    Args:
      fn: as in `value_and_grad`.
      argnums: numbers of the arguments to differentiate, as in `jax.grad`.
      has_aux: `fn` also returns auxiliary data.
      **options: keyword arguments of `value_and_grad`, such as `loss_scale`.

    Returns:
      A function that returns the gradients, or `(grads, aux)` with `has_aux`.

    Example:
      >>> float(grad(lambda x: x**2, loss_scale=8.0)(jnp.float32(3.0)))
      6.0
    """
    run = value_and_grad(fn, argnums, has_aux, **options)

    def grad_fn(*fn_args: PyTree, **fn_kwargs: PyTree) -> PyTree:
        value, grads = run(*fn_args, **fn_kwargs)
        with_aux = has_aux or options.get("mutable_argnum") is not None
        return (grads, value[1]) if with_aux else grads

    return grad_fn


# ---------------------------------------------------------------------------
# Checks of arguments
# ---------------------------------------------------------------------------


def check_argnums(argnums: int | Sequence[int]) -> None:
    """Checks that `argnums` contains only argument numbers, and not a positional loss scale.

    Raises:
      JaxmpError: with the value and the intended call.
    """
    numbers = argnums if isinstance(argnums, (tuple, list)) else (argnums,)
    for number in numbers:
        if not _core.is_integer(number):
            raise JaxmpError(
                f"argnums={argnums!r}: the second argument of value_and_grad and grad is the "
                "number of the argument to differentiate, or a tuple of such numbers, as in JAX. "
                "Pass a loss scale by keyword: value_and_grad(fn, loss_scale=loss_scale)."
            )


def check_positive(microbatches: int) -> int:
    if not _core.is_integer(microbatches, 1):
        raise JaxmpError(f"microbatches={microbatches!r} must be an integer >= 1; for example 4.")
    return int(microbatches)


def count_argnums(
    name: str, argnums: int | Sequence[int] | None, count: int, microbatches: int
) -> tuple[int, ...]:
    """Returns argument numbers with negative ones counted from the end.

    Args:
      name: the option that contains them. `batch_argnums` that no argument has are left out of a
        call that is not split.
      argnums: the numbers.
      count: number of positional arguments.
      microbatches: number of parts of the batch.

    Raises:
      JaxmpError: if there is no such argument, or an argument is listed twice.
    """
    numbers = _core.as_tuple(argnums)
    is_optional = name == "batch_argnums" and microbatches == 1
    for index in numbers:
        if not -count <= index < count and not is_optional:
            raise JaxmpError(
                f"{name} names argument {index}, but the function was called with {count} "
                "positional argument(s); pass it by position."
            )
    counted = tuple(i % count for i in numbers if -count <= i < count)
    if len(set(counted)) < len(counted):
        raise JaxmpError(f"{name}={numbers} contains an argument twice. List each argument once.")
    return counted


def options_of_call(options: Options, args: tuple[Any, ...]) -> Options:
    """Returns the options for a call with `args`, with checked, non-negative argument numbers."""
    names = ("mutable_argnum", "argnums", "rng_argnums", "batch_argnums")
    numbers = {
        name: count_argnums(name, getattr(options, name), len(args), options.microbatches)
        for name in names
    }
    mutable = numbers.pop("mutable_argnum")
    called = dataclasses.replace(options, **numbers, mutable_argnum=mutable[0] if mutable else None)
    both = set(called.argnums) & set(called.batch_argnums)
    if both and called.microbatches > 1:
        raise JaxmpError(
            f"Argument {min(both)} is both differentiated and split into microbatches. List "
            "only the batch in batch_argnums."
        )
    for index in called.argnums:
        _check_differentiable(index, args[index])
    return called


def _check_only_batch(options: Options, args: tuple[Any, ...], kwargs: dict[str, PyTree]) -> None:
    """Raises if argument 1 is not certain to be the whole batch."""
    excluded = {*options.argnums, *options.rng_argnums, options.mutable_argnum}
    every = enumerate((*args, *kwargs.values()))
    rows = {i: _row_counts(arg) for i, arg in every if i not in excluded}
    shown = {i: sorted(counts) for i, counts in rows.items()}
    first = rows.pop(1, set())
    # Other arrays beside a copy of the parameters, such as those of a target network.
    shapes = functools.partial(jax.tree.map, np.shape)
    is_copy = any(rows.values()) and shapes(args[1]) in [shapes(args[i]) for i in options.argnums]
    is_batch = len(first) == 1 and not is_copy
    size = first if is_batch else next((n for n in rows.values() if len(n) == 1), {0})
    batch = [1] * is_batch + [i for i, counts in rows.items() if size <= counts] or [1]
    if is_batch and batch == [1]:
        return
    raise JaxmpError(
        f"microbatches={options.microbatches} splits argument 1, which may not be the whole batch. "
        f"Rows of the arrays in each argument: {shown}. Name the arguments to split: "
        f"value_and_grad(fn, microbatches={options.microbatches}, batch_argnums="
        f"{tuple(batch) if len(batch) > 1 else batch[0]}). Pass them by position, and arrays that "
        "all parts receive whole in other arguments."
    )


def _row_counts(arg: PyTree) -> set[int]:
    """Returns the lengths of axis 0 of the arrays in an argument, except raw PRNG keys."""
    shapes = [(x.shape, x.dtype) for x in jax.tree.leaves(arg) if getattr(x, "ndim", 0)]
    return {shape[0] for shape, dtype in shapes if (shape, dtype) != ((2,), np.uint32)}


def _check_differentiable(index: int, arg: PyTree) -> None:
    if _core.has_fields(arg, "params", "opt_state"):
        raise JaxmpError(
            f"Argument {index} is a {type(arg).__name__}, not a tree of parameters. Differentiate "
            "its parameters, with its loss scale: state.value_and_grad(loss_fn)(batch)."
        )
    params, _ = _overwritten.split(arg)
    for names, leaf in _core.leaves_with_path(params):
        where = "".join(f"[{name!r}]" for name in names)
        is_number = hasattr(leaf, "dtype") or isinstance(leaf, (int, float, complex))
        if is_number and _core.is_inexact(leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf)):
            continue
        fix = "Pass it as another argument, or leave it out of argnums."
        if names:
            fix = (
                "Differentiate the other leaves alone. Of an Equinox module: params, static = "
                "eqx.partition(model, eqx.is_inexact_array), then "
                "jaxmp.value_and_grad(lambda params: loss_fn(eqx.combine(params, static)))(params)."
            )
        reason = "" if is_number else " because it is not an array"
        raise JaxmpError(
            f"Argument {index}{where} is {getattr(leaf, 'dtype', type(leaf).__name__)}, which "
            f"cannot be differentiated{reason}. {fix}"
        )
