"""`value_and_grad` and `grad` with loss scaling, microbatches, and results in FP32."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmp import _overwritten
from jaxmp._core import _compat, _trees
from jaxmp._core._dtypes import FLOAT32, is_16bit, sum_dtype
from jaxmp._core._typing import Array, AxisNames, DTypeLike, PyTree
from jaxmp._fp32_gradients import is_on_several_devices, with_fp32_gradients
from jaxmp._loss_scale import LossScale, LossScaleLike, NoLossScale, as_loss_scale
from jaxmp.errors import JaxmpError
from jaxmp.fp8._state import to_float32


class LossDtypeWarning(UserWarning):
    """Warning that a loss function returned its loss in 16 bits."""


@dataclasses.dataclass(frozen=True)
class _Options:
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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Sums:
    """Sums over microbatches and devices, before they are divided by the weight.

    loss: float32 scalar.
    weight: float32 scalar; None: the sums of a single unweighted part, which are already means.
    grads: unscaled gradients, one tree for each differentiated argument.
    """

    loss: jax.Array
    weight: jax.Array | None
    grads: tuple[Any, ...]


def value_and_grad(
    fn: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    loss_scale: LossScaleLike = None,
    weighted: bool = False,
    microbatches: int = 1,
    batch_argnums: int | Sequence[int] = 1,
    rng_argnums: int | Sequence[int] | None = None,
    axis_name: AxisNames = None,
    mutable_argnum: int | None = None,
    interleave: bool = False,
    accumulate_dtype: DTypeLike = "float32",
    reduce_dtype: DTypeLike = "float32",
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
      loss_scale: a jaxmp or jmp loss scale, a number, or None.
      weighted: `fn` returns `(loss_sum, weight)`, or `((loss_sum, weight), aux)` with `has_aux`.
        The loss is the ratio of the two, each summed over all microbatches and devices. If the
        weight is the number of unmasked tokens, the loss is the mean over all unmasked tokens.
      microbatches: k > 1 splits the arguments in `batch_argnums` into k parts along axis 0,
        evaluates them sequentially in a `lax.scan`, and averages the results. Auxiliary data is
        stacked on a new axis 0. Scalars in a batch are passed to every part unchanged.
      batch_argnums: numbers of the arguments to split.
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
      reduce_dtype: dtype in which gradients are summed across devices. With sharded arrays under
        `jit`, parameters are differentiated in FP32 for that purpose, unless it is a 16-bit dtype:
        then XLA sums each gradient in the dtype in which it is computed.

    Returns:
      A function of the same arguments that returns `(loss, grads)`, or `((loss, aux), grads)`. The
      loss is float32, 16-bit gradients are returned in float32, all others in their own dtype.
      Gradients of an `_overwrite_with_gradient` collection are its new values: they are combined
      by max, and never scaled or averaged. The state of an FP8 layer that did not run is returned
      unchanged.

    Raises:
      JaxmpError: if `argnums` is not an argument number (but a loss scale, for example), the loss
        is not a floating-point scalar, an argument to differentiate contains no floats, a batch
        cannot be split evenly, or an argument number is out of range.

    Example:
      >>> loss_fn = lambda w, x: jnp.mean((x @ w).astype(jnp.float32) ** 2)
      >>> w, x = jnp.ones((3, 1), jnp.float16), jnp.ones((4, 3), jnp.float16)
      >>> loss, grads = value_and_grad(loss_fn, loss_scale=2.0**10, microbatches=2)(w, x)
      >>> float(loss), grads.dtype
      (9.0, dtype('float32'))
    """
    check_argnums(argnums)
    options = _Options(
        loss_scale=as_loss_scale(loss_scale),
        has_aux=has_aux or mutable_argnum is not None,
        weighted=weighted,
        argnums=as_tuple(argnums),
        microbatches=_positive(microbatches),
        batch_argnums=as_tuple(batch_argnums),
        rng_argnums=as_tuple(rng_argnums),
        mutable_argnum=mutable_argnum,
        interleave=interleave,
        axes=as_tuple(axis_name),
        accumulate_dtype=sum_dtype(accumulate_dtype),
        reduce_dtype=sum_dtype(reduce_dtype),
    )

    def value_and_grad_fn(*args: PyTree, **kwargs: PyTree) -> PyTree:
        _compat.check_axes(options.axes)
        called = _for_call(options, args)
        before = [args[i] for i in called.argnums]
        args = _vary(args, called)
        run = _evaluate if called.microbatches == 1 else _accumulate
        sums, aux = run(fn, args, kwargs, called)
        loss, grads = _mean(_reduce(sums, called))
        grads = tuple(map(_overwritten.keep_unused, grads, before))
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
# One evaluation
# ---------------------------------------------------------------------------


def _evaluate(
    fn: Callable[..., PyTree], args: tuple[Any, ...], kwargs: dict[str, Any], options: _Options
) -> tuple[_Sums, PyTree]:
    """Returns the loss (or its sum), unscaled gradients and auxiliary data of one part."""
    inputs = tuple(_overwritten.to_max_accumulated(args[i]) for i in options.argnums)

    def fn_of_inputs(*inputs: PyTree) -> tuple[jax.Array, PyTree]:
        replaced = dict(zip(options.argnums, inputs, strict=True))
        out = fn(*(replaced.get(i, arg) for i, arg in enumerate(args)), **kwargs)
        loss, weight, aux = _parse(out, options)
        return loss, (weight, to_float32(aux))

    run = fn_of_inputs
    if not is_16bit(options.reduce_dtype) and is_on_several_devices(args, kwargs):
        run, inputs = with_fp32_gradients(fn_of_inputs, inputs)
    is_converted = any(inputs[n] is not args[i] for n, i in enumerate(options.argnums))
    with _overwritten.explain_fm32() if is_converted else contextlib.nullcontext():
        loss, backward, (weight, aux) = jax.vjp(run, *inputs, has_aux=True)
    finite = lax.is_finite(loss)
    nan = jnp.full_like(loss, jnp.nan)
    scale = options.loss_scale.scale_value
    poisoned = lax.select(finite, jnp.broadcast_to(scale, loss.shape), nan)
    grads = backward(_compat.vary(poisoned, _compat.varying_axes(loss)))
    if isinstance(options.loss_scale, NoLossScale):
        unscale = functools.partial(_poison_one, finite)
    else:
        unscale = options.loss_scale.with_leaves(scale_value=poisoned).unscale
    return _Sums(loss, weight, tuple(_overwritten.map_params(unscale, g) for g in grads)), aux


def _parse(out: PyTree, options: _Options) -> tuple[jax.Array, jax.Array | None, PyTree]:
    """Splits the result of a loss function into FP32 loss, FP32 weight or None, and aux."""
    if options.has_aux and not (isinstance(out, tuple) and len(out) == 2):
        raise JaxmpError(
            f"With has_aux=True the function must return (loss, aux); it returned {_describe(out)}."
        )
    loss, aux = out if options.has_aux else (out, None)
    if not options.weighted:
        if isinstance(loss, (tuple, list)):
            raise _tuple_for_loss(loss, options)
        return _scalar(loss, "loss"), None, aux
    if not (isinstance(loss, tuple) and len(loss) == 2):
        pair = "((loss_sum, weight), aux)" if options.has_aux else "(loss_sum, weight)"
        raise JaxmpError(
            f"With weighted=True the function must return {pair}; in the place of "
            f"(loss_sum, weight) it returned {_describe(loss)}. Leave weighted=True out if the "
            "function returns a mean."
        )
    weight = lax.stop_gradient(_scalar(loss[1], "weight"))
    return _scalar(loss[0], "loss"), weight, aux


def _tuple_for_loss(loss: tuple[PyTree, ...] | list[PyTree], options: _Options) -> JaxmpError:
    weighted = "value_and_grad(fn, weighted=True)"
    if options.has_aux and options.mutable_argnum is None:
        weighted = "value_and_grad(fn, has_aux=True, weighted=True)"
        aux = ""
    else:
        aux = " If it returns (loss, aux), write value_and_grad(fn, has_aux=True)."
    return JaxmpError(
        f"The loss must be a scalar, and the function returned {_describe(loss)} for it.{aux} If "
        f"it returns (loss_sum, weight), whose quotient is the loss, write {weighted}."
    )


def _scalar(value: PyTree, what: str) -> jax.Array:
    if not hasattr(value, "dtype") and not isinstance(value, (int, float)):
        raise JaxmpError(f"The {what} is {_describe(value)}, not a scalar array.")
    array = jnp.asarray(value)
    if array.shape != ():
        raise JaxmpError(
            f"The {what} must be a scalar, and has shape {array.shape}: reduce it in FP32, for "
            f"example jnp.mean({what}.astype(jnp.float32))."
        )
    if what == "weight":
        return array.astype(FLOAT32)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise JaxmpError(f"The loss must be a floating-point number, and is {array.dtype}.")
    if is_16bit(array.dtype):
        warnings.warn(
            f"The loss function returned its loss in {array.dtype}: what was rounded away is lost. "
            "Compute it in FP32: logits.astype(jnp.float32) before the loss.",
            LossDtypeWarning,
            stacklevel=2,
        )
    return array.astype(FLOAT32)


def _describe(value: PyTree) -> str:
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return (
        f"{type(value).__name__} of shape {value.shape}" if hasattr(value, "shape") else repr(value)
    )


def _poison_one(finite: jax.Array, grads: PyTree) -> PyTree:
    """Casts gradients to FP32, and sets the smallest leaf to NaN if the loss is not finite.

    The cotangent of the loss is already NaN, but a `where` inside the model can block it. One NaN
    leaf is sufficient, whereas a factor on every leaf would cost a pass over all gradients. (A loss
    scale divides by NaN, which sets all leaves to NaN.)
    """
    leaves, treedef = jax.tree.flatten(_trees.cast_floating(grads, FLOAT32))
    sizes = [(leaf.size, i) for i, leaf in enumerate(leaves) if leaf.size]
    if sizes:
        _, index = min(sizes)
        leaf = leaves[index]
        leaves[index] = lax.select_n(finite, jnp.full_like(leaf, jnp.nan), leaf)
    return treedef.unflatten(leaves)


# ---------------------------------------------------------------------------
# Microbatches
# ---------------------------------------------------------------------------


def _accumulate(
    fn: Callable[..., PyTree], args: tuple[Any, ...], kwargs: dict[str, PyTree], options: _Options
) -> tuple[_Sums, PyTree]:
    """Evaluates the microbatches one after the other, and sums their results."""
    rows = {i: _split(args[i], i, options) for i in options.batch_argnums if i < len(args)}
    if not any(rows.values()):
        raise JaxmpError(
            f"microbatches={options.microbatches} has nothing to split: no array with an axis 0 in "
            f"batch_argnums={options.batch_argnums}. Name the batch, for example batch_argnums=1."
        )

    def run_part(
        mutables: PyTree, index: jax.Array, part: dict[int, list[Array]]
    ) -> tuple[_Sums, PyTree, PyTree]:
        call = list(args)
        for i, leaves in part.items():
            call[i] = _join(leaves, args[i])
        for i in options.rng_argnums:
            call[i] = jax.tree.map(lambda key: jax.random.fold_in(key, index), args[i])
        if options.mutable_argnum is not None:
            call[options.mutable_argnum] = mutables
        sums, aux = _evaluate(fn, tuple(call), kwargs, options)
        if options.mutable_argnum is not None:
            mutables, aux = unpair(aux)
        return sums, mutables, aux

    def body(
        carry: tuple[PyTree, _Sums], xs: tuple[Array, dict[int, list[Array]]]
    ) -> tuple[tuple[PyTree, _Sums], PyTree]:
        mutables, total = carry
        sums, mutables, aux = run_part(mutables, *xs)
        return (mutables, _add(total, sums)), aux

    mutables = None if options.mutable_argnum is None else args[options.mutable_argnum]
    xs = (jnp.arange(options.microbatches), rows)
    (mutables, total), aux = lax.scan(body, (mutables, _zero_sums(args, options)), xs)
    return total, aux if options.mutable_argnum is None else (mutables, aux)


def unpair(aux: PyTree) -> tuple[PyTree, PyTree]:
    if not (isinstance(aux, tuple) and len(aux) == 2):
        raise JaxmpError(
            "With mutable_argnum the function must return (loss, (mutables, aux)); beside the loss "
            f"it returned {_describe(aux)}."
        )
    return aux


def _split(batch: PyTree, argnum: int, options: _Options) -> list[Array]:
    """Splits each leaf that has an axis 0 to `(microbatches, rows per microbatch, ...)`."""
    count = options.microbatches

    def split_leaf(names: _trees.Path, leaf: Array) -> Array:
        if leaf.shape[0] % count:
            where = "".join(f"[{name!r}]" for name in names)
            raise JaxmpError(
                f"Argument {argnum}{where} has {leaf.shape[0]} rows, which {count} microbatches "
                f"cannot share evenly. Use a batch size divisible by {count}, or another "
                "microbatches=k."
            )
        if options.interleave:
            return jnp.swapaxes(leaf.reshape(-1, count, *leaf.shape[1:]), 0, 1)
        return leaf.reshape(count, -1, *leaf.shape[1:])

    flat = _trees.leaves_with_path(batch)
    return [split_leaf(names, leaf) for names, leaf in flat if _has_rows(leaf)]


def _has_rows(leaf: object) -> bool:
    return getattr(leaf, "ndim", 0) > 0


def _join(part: list[Array], whole: PyTree) -> PyTree:
    """Returns the batch `whole` with its rows replaced by those of one part."""
    rows = iter(part)
    return jax.tree.map(lambda leaf: next(rows) if _has_rows(leaf) else leaf, whole)


def _zero_sums(args: tuple[Any, ...], options: _Options) -> _Sums:
    grads = tuple(
        _overwritten.map_leaves(
            lambda leaf: jnp.zeros_like(leaf, dtype=_accumulator_dtype(jnp.asarray(leaf), options)),
            _overwritten.fill_lowest,
            args[i],
        )
        for i in options.argnums
    )
    zero = _Sums(jnp.zeros((), FLOAT32), jnp.zeros((), FLOAT32), grads)
    axes = {*options.axes, *_compat.varying_axes(args)}
    return _compat.vary(zero, tuple(axes)) if axes else zero


def _accumulator_dtype(gradient: jax.Array, options: _Options) -> np.dtype:
    return options.accumulate_dtype if _trees.is_castable(gradient) else gradient.dtype


def _add(total: _Sums, new: _Sums) -> _Sums:
    """Adds the sums of one part; an unweighted part has weight 1."""
    grads = tuple(
        _overwritten.map_leaves(
            lambda t, g: t + _trees.cast(g, t.dtype), _overwritten.combine, old, fresh
        )
        for old, fresh in zip(total.grads, new.grads, strict=True)
    )
    weight = jnp.ones((), FLOAT32) if new.weight is None else new.weight
    if total.weight is not None:
        weight = total.weight + weight
    return _Sums(total.loss + new.loss, weight, grads)


# ---------------------------------------------------------------------------
# Devices, and the mean
# ---------------------------------------------------------------------------


def _vary(args: tuple[Any, ...], options: _Options) -> tuple[Any, ...]:
    """Marks differentiated arguments as device-varying, so that only `_reduce` sums gradients."""
    if not options.axes:
        return args
    return tuple(
        _compat.vary(arg, options.axes) if i in options.argnums else arg
        for i, arg in enumerate(args)
    )


def _reduce(sums: _Sums, options: _Options) -> _Sums:
    """Averages over devices; weighted results are summed."""
    if not options.axes:
        return sums
    combine = lax.pmean if sums.weight is None else lax.psum
    axes, dtype = options.axes, options.reduce_dtype

    def reduce_leaf(gradient: Array) -> Array:
        reduced = _trees.cast(gradient, dtype) if _trees.is_castable(gradient) else gradient
        return combine(reduced, axes)

    grads = tuple(
        _overwritten.map_leaves(
            reduce_leaf, lambda leaf: _overwritten.combine_over_axes(leaf, axes), tree
        )
        for tree in sums.grads
    )
    vary = lambda scalar: _compat.vary(scalar, axes)
    weight = None if sums.weight is None else lax.psum(vary(sums.weight), axes)
    return _Sums(combine(vary(sums.loss), axes), weight, grads)


def _mean(sums: _Sums) -> tuple[jax.Array, tuple[Any, ...]]:
    """Divides the sums by their weight, in FP32."""

    def mean_leaf(gradient: Array) -> Array:
        full = _in_full(gradient)
        return full if sums.weight is None else full / sums.weight.astype(full.dtype)

    grads = tuple(_overwritten.map_leaves(mean_leaf, lambda x: x, tree) for tree in sums.grads)
    return (sums.loss if sums.weight is None else sums.loss / sums.weight), grads


def _in_full(gradient: Array) -> Array:
    return _trees.cast(gradient, FLOAT32) if _trees.is_castable(gradient) else gradient


# ---------------------------------------------------------------------------
# Arguments
# ---------------------------------------------------------------------------


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


def _positive(microbatches: int) -> int:
    if (
        isinstance(microbatches, bool)
        or not isinstance(microbatches, (int, np.integer))
        or microbatches < 1
    ):
        raise JaxmpError(f"microbatches={microbatches!r} must be an integer >= 1; for example 4.")
    return int(microbatches)


def _for_call(options: _Options, args: tuple[Any, ...]) -> _Options:
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
            raise JaxmpError(f"{name}={numbers} names one argument twice; name each once.")
        return counted

    mutable = count("mutable_argnum")
    called = dataclasses.replace(
        options,
        argnums=count("argnums"),
        rng_argnums=count("rng_argnums"),
        batch_argnums=count("batch_argnums", optional=True),
        mutable_argnum=mutable[0] if mutable else None,
    )
    both = set(called.argnums) & set(called.batch_argnums)
    if both and called.microbatches > 1:
        raise JaxmpError(
            f"Argument {min(both)} is both differentiated and split into microbatches; name the "
            "batch alone in batch_argnums."
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
                f"Argument {index}{where} is a {type(leaf).__name__}, which is not an array and "
                "has no gradient. Differentiate the arrays of an Equinox module alone: "
                "params, static = eqx.partition(model, eqx.is_inexact_array), then "
                "jaxmp.value_and_grad(lambda params: loss_fn(eqx.combine(params, static)))(params)."
            )
        if not _trees.is_inexact(leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf)):
            raise JaxmpError(
                f"Argument {index}{where} is {getattr(leaf, 'dtype', type(leaf).__name__)}, which "
                "has no gradient. Pass it as another argument, or leave it out of argnums."
            )
