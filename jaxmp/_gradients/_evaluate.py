"""Differentiates one microbatch, and averages over devices."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxmp import _overwritten
from jaxmp._core import _compat, _trees
from jaxmp._core._dtypes import FLOAT32, is_16bit
from jaxmp._core._typing import Array, PyTree
from jaxmp._fp32_gradients import is_on_several_devices, with_fp32_gradients
from jaxmp._gradients._arguments import Options
from jaxmp._gradients._result import parse_result
from jaxmp._loss_scale import NoLossScale
from jaxmp._loss_scale._use import contains_float16, present


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

    def fn_of_inputs(*inputs: PyTree) -> tuple[jax.Array, PyTree]:
        replaced = dict(zip(options.argnums, inputs, strict=True))
        out = fn(*(replaced.get(i, arg) for i, arg in enumerate(args)), **kwargs)
        loss, weight, aux = parse_result(out, options)
        return loss, (
            weight,
            _overwritten.without_active(_overwritten.to_float32(aux), options.before),
        )

    if not isinstance(options.loss_scale, NoLossScale):
        present.scaled_gradient = True
        if not present.float16:
            traced = jax.make_jaxpr(lambda *inputs: fn_of_inputs(*inputs)[0])(*inputs)
            present.float16 = contains_float16(traced)
    run = fn_of_inputs
    is_converted = any(inputs[n] is not args[i] for n, i in enumerate(options.argnums))
    if not is_16bit(options.reduce_dtype) and is_on_several_devices(args, kwargs):
        run, inputs = with_fp32_gradients(fn_of_inputs, inputs, regather=options.regather)
    with _overwritten.explain_fm32() if is_converted else contextlib.nullcontext():
        loss, backward, (weight, aux) = jax.vjp(run, *inputs, has_aux=True)
    cotangent, _ = _cotangent_and_unscale(loss, options)
    grads = backward(_compat.vary(cotangent, _compat.varying_axes(loss)))
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
    return jax.reshard(
        array, NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec.partitions))
    )


def unscaled(sums: Sums, options: Options) -> Sums:
    """Divides gradients by the loss scale, in FP32. They are NaN if the loss is not finite."""
    _, unscale = _cotangent_and_unscale(sums.loss, options)
    grads = tuple(_overwritten.map_params(unscale, tree) for tree in sums.grads)
    return dataclasses.replace(sums, grads=grads)


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
    if _compat.target() == "cpu":
        return poisoned, functools.partial(_poison_one, finite)
    # XLA drops products with a constant 1, and fuses the selection with the reads of gradients.
    return jnp.ones_like(loss), functools.partial(_poison_all, finite)


def _poison_all(finite: jax.Array, grads: PyTree) -> PyTree:
    """Casts gradients to FP32, and sets all of them to NaN if the loss is not finite."""
    select = lambda leaf: lax.select_n(finite, jnp.full_like(leaf, jnp.nan), leaf)
    grads = _trees.cast_floating(grads, FLOAT32)
    return jax.tree.map(lambda leaf: select(leaf) if _trees.is_inexact(leaf) else leaf, grads)


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
# Devices, and the mean
# ---------------------------------------------------------------------------


def vary_args(args: tuple[Any, ...], options: Options) -> tuple[Any, ...]:
    """Marks arguments as device-varying, so that gradients are summed only in `reduce_sums`."""
    if not options.axes:
        return args
    return tuple(
        _compat.vary(arg, options.axes) if i in options.argnums else arg
        for i, arg in enumerate(args)
    )


def reduce_sums(sums: Sums, options: Options) -> Sums:
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
    return Sums(combine(vary(sums.loss), axes), weight, grads)


def mean_of_sums(sums: Sums) -> tuple[jax.Array, tuple[Any, ...]]:
    """Divides the sums by their weight, in FP32."""

    def mean_leaf(gradient: Array) -> Array:
        full = _in_full(gradient)
        return full if sums.weight is None else full / sums.weight.astype(full.dtype)

    grads = tuple(_overwritten.map_leaves(mean_leaf, lambda x: x, tree) for tree in sums.grads)
    return (sums.loss if sums.weight is None else sums.loss / sums.weight), grads


def _in_full(gradient: Array) -> Array:
    return _trees.cast(gradient, FLOAT32) if _trees.is_castable(gradient) else gradient
