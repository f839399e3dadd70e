"""Differentiates a loss function, in one part or in microbatches, and averages over devices."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxmp import _core
from jaxmp._core import Array, PyTree, _compat
from jaxmp._gradients._fp32 import is_on_several_devices, with_fp32_gradients
from jaxmp._gradients._hints import (
    TracedLoss,
    check_matmuls,
    note_scaled,
    traced,
    traces_of,
    warn_of_rounded_loss,
)
from jaxmp._gradients._loss_scale import LossScale, NoLossScale
from jaxmp._gradients._parts import summed_axes
from jaxmp.errors import JaxmpError
from jaxmp.fp8 import _overwritten


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
    widen_params: bool
    guarded: bool
    # The differentiated arguments of a call, before `begin_step` of their FP8 states.
    before: tuple[Any, ...] = ()
    # Filled with a tree of the axes over which gradients are sums already, if some are.
    parts: list[PyTree] = dataclasses.field(default_factory=list)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sums:
    """Sums over microbatches and devices, before they are divided by the weight.

    loss: float32 scalar.
    weight: float32 scalar; None: the sums of a single unweighted part, which are already means.
    grads: unscaled gradients, one tree for each differentiated argument.
    """

    loss: jax.Array
    weight: jax.Array | None
    grads: tuple[Any, ...]


def evaluate(
    fn: Callable[..., PyTree], args: tuple[Any, ...], kwargs: dict[str, Any], options: Options
) -> tuple[Sums, PyTree]:
    """Returns the loss (or its sum), unscaled gradients and auxiliary data of one part."""
    sums, aux = differentiate(fn, args, kwargs, options)
    # Gradients of parameters that are `reduced` over explicit mesh axes are unreduced.
    return unscaled(jax.tree.map(summed, sums), options), aux


def differentiate(
    fn: Callable[..., PyTree], args: tuple[Any, ...], kwargs: dict[str, Any], options: Options
) -> tuple[Sums, PyTree]:
    """Returns the loss (or its sum), scaled gradients and auxiliary data of one part."""
    inputs = tuple(_overwritten.to_max_accumulated(args[i]) for i in options.argnums)

    is_scaled = not isinstance(options.loss_scale, NoLossScale)
    described = TracedLoss(is_scaled, traces_of((args, kwargs)), options.loss_scale._mark, [])

    def fn_of_inputs(*inputs: PyTree) -> tuple[jax.Array, PyTree]:
        if is_scaled:
            note_scaled(inputs)
        replaced = dict(zip(options.argnums, inputs, strict=True))
        with _compat.assigned(traced, described):
            out = fn(*(replaced.get(i, arg) for i, arg in enumerate(args)), **kwargs)
        loss, weight, aux = parse_result(out, options)
        aux = _overwritten.without_active(_overwritten.to_float32(aux), options.before)
        return loss, (weight, aux)

    is_converted = any(inputs[n] is not args[i] for n, i in enumerate(options.argnums))
    with _overwritten.explain_fm32() if is_converted else contextlib.nullcontext():
        widen = options.widen_params or is_on_several_devices(args, kwargs)
        dtypes = _core.CASTABLE if widen else {_core.FLOAT32}
        if _core.is_16bit(options.reduce_dtype):
            dtypes = set()
        returns = options.mutable_argnum is not None
        run, inputs = with_fp32_gradients(
            fn_of_inputs, inputs, dtypes, regather=options.regather, returns_inputs=returns
        )
        loss, backward, (weight, aux) = jax.vjp(run, *inputs, has_aux=True)
    check_matmuls(described, backward)
    cotangent, _ = _cotangent_and_unscale(loss, options)
    cotangent = _compat.vary(cotangent, _compat.varying_axes(loss))
    if options.axes:
        options.parts[:] = summed_axes(backward, cotangent, options.before)
    grads = backward(cotangent)
    return Sums(loss, weight, grads), aux


def reduced_axes(leaf: object) -> frozenset[Any]:
    """Returns the explicit mesh axes over which a parameter is `reduced`.

    Its gradient is `unreduced`: the sum of one term per device (JAX 0.12 and newer).
    """
    sharding = jax.typeof(leaf).sharding if isinstance(leaf, jax.Array) else None
    return frozenset(sharding.spec.reduced) if isinstance(sharding, NamedSharding) else frozenset()


def summed(array: Array) -> Array:
    """Returns the sum of an unreduced array over devices, and any other array unchanged."""
    sharding = jax.typeof(array).sharding
    if not (isinstance(sharding, NamedSharding) and sharding.spec.unreduced):
        return array
    return jax.reshard(array, sharding.update(spec=PartitionSpec(*sharding.spec.partitions)))


def unscaled(sums: Sums, options: Options) -> Sums:
    """Divides gradients by the loss scale, in FP32. They are NaN if the loss is not finite."""
    _, unscale = _cotangent_and_unscale(_known_everywhere(sums.loss, sums.grads), options)
    grads = tuple(_overwritten.map_params(unscale, tree) for tree in sums.grads)
    return dataclasses.replace(sums, grads=grads)


def _known_everywhere(loss: jax.Array, grads: PyTree) -> jax.Array:
    """Sums a loss over the axes of `shard_map` over which JAX has summed one of its gradients.

    Such a gradient has one value on all devices, so that it is NaN on all devices or on none.
    """
    varying = _compat.varying_axes(loss)
    shared = map(_compat.varying_axes, jax.tree.leaves(grads))
    axes = varying - varying.intersection(*shared)
    return lax.psum(loss, tuple(axes)) if axes else loss


def _cotangent_and_unscale(
    loss: jax.Array, options: Options
) -> tuple[jax.Array, Callable[[PyTree], PyTree]]:
    """Returns the initial cotangent of a loss, and the function that unscales its gradients."""
    finite = lax.is_finite(loss)
    nan = jnp.full_like(loss, jnp.nan)
    scale = options.loss_scale.scale_value
    poisoned = lax.select(finite, jnp.broadcast_to(scale, loss.shape), nan)
    if not isinstance(options.loss_scale, NoLossScale):
        return poisoned, options.loss_scale.with_leaves(scale_value=poisoned).unscale
    is_cpu = _compat.target() == "cpu"
    poison = functools.partial(_poison, finite, only_one=is_cpu or options.guarded)
    # XLA drops products with a constant 1, and repeats the selection in each reader of a gradient.
    return poisoned if is_cpu else jnp.ones_like(loss), poison


def _poison(finite: jax.Array, grads: PyTree, *, only_one: bool) -> PyTree:
    """Casts gradients to FP32, and sets all of them to NaN if the loss is not finite.

    One NaN leaf, the smallest, is sufficient for the guard of an optimizer, and on a CPU, where the
    cotangent of the loss is NaN, too, and a `where` inside the model can block it. A factor on
    every leaf would cost a pass over all gradients. (A loss scale divides by NaN, which sets all
    leaves to NaN.)
    """
    leaves, treedef = jax.tree.flatten(_core.cast_floating(grads, _core.FLOAT32))
    chosen = [n for n, leaf in enumerate(leaves) if _core.is_inexact(leaf) and leaf.size]
    if only_one:
        chosen = sorted(chosen, key=lambda n: leaves[n].size)[:1]
    for n in chosen:
        leaves[n] = lax.select_n(finite, jnp.full_like(leaves[n], jnp.nan), leaves[n])
    return treedef.unflatten(leaves)


# ---------------------------------------------------------------------------
# Devices, and the mean
# ---------------------------------------------------------------------------


def reduce_sums(sums: Sums, options: Options) -> Sums:
    """Averages over devices; weighted results are summed.

    The gradient of a part of a weight, which the loss gathers, is the sum over devices already.
    """
    if not options.axes:
        return sums
    combine = lax.pmean if sums.weight is None else lax.psum
    axes, dtype = options.axes, options.reduce_dtype

    def reduce_leaf(gradient: Array, summed_over: frozenset[Hashable] = frozenset()) -> Array:
        others = tuple(axis for axis in axes if axis not in summed_over)
        total = combine(_core.cast_floating(gradient, dtype), others)
        parts = 1 if sums.weight is not None else lax.axis_size(axes) // lax.axis_size(others)
        return total if parts == 1 else total / parts

    grads = _overwritten.map_leaves(
        reduce_leaf,
        lambda leaf, *_: lax.pmax(_overwritten.to_float32(leaf), axes),
        sums.grads,
        *options.parts,
    )
    vary = lambda scalar: _compat.vary(scalar, axes)
    weight = None if sums.weight is None else lax.psum(vary(sums.weight), axes)
    return Sums(combine(vary(sums.loss), axes), weight, grads)


def mean_of_sums(sums: Sums) -> tuple[jax.Array, tuple[Any, ...]]:
    """Divides the sums by their weight, in FP32."""

    def mean_leaf(gradient: Array) -> Array:
        full = _core.cast_floating(gradient, _core.FLOAT32)
        return full if sums.weight is None else full / sums.weight.astype(full.dtype)

    grads = _overwritten.map_leaves(mean_leaf, lambda x: x, sums.grads)
    return (sums.loss if sums.weight is None else sums.loss / sums.weight), grads


# ---------------------------------------------------------------------------
# Microbatches
# ---------------------------------------------------------------------------


def accumulate(
    fn: Callable[..., PyTree], args: tuple[Any, ...], kwargs: dict[str, PyTree], options: Options
) -> tuple[Sums, PyTree]:
    """Evaluates the microbatches one after the other, and sums their results."""
    rows = {i: _split(args[i], i, options) for i in options.batch_argnums if i < len(args)}
    if not any(rows.values()):
        raise JaxmpError(
            f"microbatches={options.microbatches} has nothing to split: the arguments "
            f"batch_argnums={options.batch_argnums} contain no array with an axis 0. Specify the "
            "batch, for example batch_argnums=1."
        )

    # Gradients of `reduced` parameters are terms of a sum over devices, which follows the loop.
    leaves = jax.tree.leaves([args[i] for i in options.argnums])
    run = differentiate if (delays := any(map(reduced_axes, leaves))) else evaluate

    def body(
        carry: tuple[PyTree, PyTree], xs: tuple[Array, dict[int, list[Array]]]
    ) -> tuple[tuple[PyTree, PyTree], PyTree]:
        (mutables, total), (index, part), call = carry, xs, list(args)
        for i, leaves in part.items():
            call[i] = _join(leaves, args[i])
        for i in options.rng_argnums:
            call[i] = jax.tree.map(lambda key: jax.random.fold_in(key, index), args[i])
        if options.mutable_argnum is not None:
            call[options.mutable_argnum] = mutables
        sums, aux = run(fn, tuple(call), kwargs, options)
        if options.mutable_argnum is not None:
            mutables, aux = unpair(aux)
        weight = jnp.ones((), _core.FLOAT32) if sums.weight is None else sums.weight
        # Whether the two scalars vary over devices is known only here, so no carry contains them.
        return (mutables, _add(total, sums.grads)), (sums.loss, weight, aux)

    mutables = None if options.mutable_argnum is None else args[options.mutable_argnum]
    xs = (jnp.arange(options.microbatches), rows)
    zero = _zero_gradients(args, options)
    (mutables, grads), (losses, weights, aux) = lax.scan(body, (mutables, zero), xs)
    total = Sums(jnp.sum(losses), jnp.sum(weights), grads)
    if delays:
        total = unscaled(jax.tree.map(summed, total), options)
    return total, aux if options.mutable_argnum is None else (mutables, aux)


def unpair(aux: PyTree) -> tuple[PyTree, PyTree]:
    if not (isinstance(aux, tuple) and len(aux) == 2):
        raise JaxmpError(
            "With mutable_argnum the function must return (loss, (mutables, aux)); beside the loss "
            f"it returned {describe(aux)}."
        )
    return aux


def _split(batch: PyTree, argnum: int, options: Options) -> list[Array]:
    """Splits each leaf that has an axis 0 to `(microbatches, rows per microbatch, ...)`."""
    count = options.microbatches

    def split_leaf(names: _core.Path, leaf: Array) -> Array:
        if leaf.shape[0] % count:
            where = "".join(f"[{name!r}]" for name in names)
            raise JaxmpError(
                f"Argument {argnum}{where} has {leaf.shape[0]} rows, which {count} microbatches "
                f"cannot share evenly. Use a batch size divisible by {count}, or another "
                "microbatches=k."
            )
        if options.interleave:
            return jnp.swapaxes(leaf.reshape(-1, count, *leaf.shape[1:]), 0, 1)
        shape = count, leaf.shape[0] // count, *leaf.shape[1:]
        return lax.reshape(leaf, shape, out_sharding=_sharding_of_parts(leaf))

    flat = _core.leaves_with_path(batch)
    return [split_leaf(names, leaf) for names, leaf in flat if _has_rows(leaf)]


def _sharding_of_parts(leaf: Array) -> NamedSharding | None:
    """Returns the sharding of an array's parts on explicit mesh axes: that of its rows."""
    sharding = getattr(jax.typeof(leaf), "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.mesh.empty or not any(sharding.spec[:1]):
        return None
    return NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))


def _has_rows(leaf: object) -> bool:
    return getattr(leaf, "ndim", 0) > 0


def _join(part: list[Array], whole: PyTree) -> PyTree:
    """Returns the batch `whole` with its rows replaced by those of one part."""
    rows = iter(part)
    return jax.tree.map(lambda leaf: next(rows) if _has_rows(leaf) else leaf, whole)


def _zero_gradients(args: tuple[Any, ...], options: Options) -> tuple[Any, ...]:
    return _overwritten.map_leaves(
        lambda leaf: _zero_gradient(jnp.asarray(leaf), options),
        lambda leaf: _vary_like(jnp.full_like(leaf, -jnp.inf), leaf),
        tuple(args[i] for i in options.argnums),
    )


def _vary_like(array: jax.Array, leaf: Array) -> jax.Array:
    return _compat.vary(array, _compat.varying_axes(leaf))


def _zero_gradient(leaf: jax.Array, options: Options) -> jax.Array:
    dtype = options.accumulate_dtype if _core.is_castable(leaf) else leaf.dtype
    axes = reduced_axes(leaf)
    if not axes:
        return _vary_like(jnp.zeros_like(leaf, dtype=dtype), leaf)
    sharding = jax.typeof(leaf).sharding
    spec = PartitionSpec(*sharding.spec.partitions, unreduced=axes)
    return jax.reshard(jnp.zeros(leaf.shape, dtype), NamedSharding(sharding.mesh, spec))


def _add(total: tuple[Any, ...], new: tuple[Any, ...]) -> tuple[Any, ...]:
    return _overwritten.map_leaves(
        lambda t, g: t + _core.cast(g, t.dtype),
        lambda t, g: jnp.maximum(t, _overwritten.to_float32(g)),
        total,
        new,
    )


# ---------------------------------------------------------------------------
# Results
# ---------------------------------------------------------------------------


def parse_result(out: PyTree, options: Options) -> tuple[jax.Array, jax.Array | None, PyTree]:
    """Splits the result of a loss function into FP32 loss, FP32 weight or None, and aux."""
    loss, aux = split_aux(out, options.has_aux)
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


def split_aux(out: PyTree, has_aux: bool) -> tuple[PyTree, PyTree]:
    """Splits the result of a loss function into the loss and aux, or None."""
    if has_aux and not (isinstance(out, tuple) and len(out) == 2):
        raise JaxmpError(
            "With has_aux=True the function must return (loss, aux), but it returned "
            f"{describe(out)}. Return a pair, or leave has_aux=True out."
        )
    return out if has_aux else (out, None)


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
        return array.astype(_core.FLOAT32)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise JaxmpError(f"The loss must be a floating-point number, but is {array.dtype}.")
    if _core.is_16bit(array.dtype):
        warn_of_rounded_loss(array.dtype)
    return array.astype(_core.FLOAT32)


def describe(value: PyTree) -> str:
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return (
        f"{type(value).__name__} of shape {value.shape}" if hasattr(value, "shape") else repr(value)
    )
