"""Evaluates microbatches one after the other in a `lax.scan`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxmp import _overwritten
from jaxmp._core import _compat, _trees
from jaxmp._core._dtypes import FLOAT32
from jaxmp._core._typing import Array, PyTree
from jaxmp._gradients._arguments import Options
from jaxmp._gradients._evaluate import Sums, differentiate, evaluate, reduced_axes, summed, unscaled
from jaxmp._gradients._result import describe
from jaxmp.errors import JaxmpError


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

    def run_part(
        mutables: PyTree, index: jax.Array, part: dict[int, list[Array]]
    ) -> tuple[Sums, PyTree, PyTree]:
        call = list(args)
        for i, leaves in part.items():
            call[i] = _join(leaves, args[i])
        for i in options.rng_argnums:
            call[i] = jax.tree.map(lambda key: jax.random.fold_in(key, index), args[i])
        if options.mutable_argnum is not None:
            call[options.mutable_argnum] = mutables
        sums, aux = run(fn, tuple(call), kwargs, options)
        if options.mutable_argnum is not None:
            mutables, aux = unpair(aux)
        return sums, mutables, aux

    mutables = None if options.mutable_argnum is None else args[options.mutable_argnum]
    xs = (jnp.arange(options.microbatches), rows)
    zero = _zero_sums(args, options)

    def body(
        carry: tuple[PyTree, Sums], xs: tuple[Array, dict[int, list[Array]]]
    ) -> tuple[tuple[PyTree, Sums], PyTree]:
        mutables, total = carry
        sums, mutables, aux = run_part(mutables, *xs)
        return (mutables, _add(total, sums)), aux

    (mutables, total), aux = lax.scan(body, (mutables, zero), xs)
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
        shape = count, leaf.shape[0] // count, *leaf.shape[1:]
        return lax.reshape(leaf, shape, out_sharding=_sharding_of_parts(leaf))

    flat = _trees.leaves_with_path(batch)
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


def _zero_sums(args: tuple[Any, ...], options: Options) -> Sums:
    grads = tuple(
        _overwritten.map_leaves(
            lambda leaf: _zero_gradient(jnp.asarray(leaf), options),
            _overwritten.fill_lowest,
            args[i],
        )
        for i in options.argnums
    )
    zero = Sums(jnp.zeros((), FLOAT32), jnp.zeros((), FLOAT32), grads)
    axes = {*options.axes, *_compat.varying_axes(args)}
    return _compat.vary(zero, tuple(axes)) if axes else zero


def _zero_gradient(leaf: jax.Array, options: Options) -> jax.Array:
    dtype = options.accumulate_dtype if _trees.is_castable(leaf) else leaf.dtype
    axes = reduced_axes(leaf)
    if not axes:
        return jnp.zeros_like(leaf, dtype=dtype)
    sharding = jax.typeof(leaf).sharding
    spec = PartitionSpec(*sharding.spec.partitions, unreduced=axes)
    return jax.reshard(jnp.zeros(leaf.shape, dtype), NamedSharding(sharding.mesh, spec))


def _add(total: Sums, new: Sums) -> Sums:
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
    return Sums(total.loss + new.loss, weight, grads)
