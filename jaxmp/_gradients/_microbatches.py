"""Evaluates microbatches one after the other in a `lax.scan`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxmp import _overwritten
from jaxmp._core import _compat, _trees
from jaxmp._core._dtypes import FLOAT32, is_16bit
from jaxmp._core._typing import Array, PyTree
from jaxmp._gradients._arguments import Options
from jaxmp._gradients._delayed_sums import delay_sums
from jaxmp._gradients._evaluate import Sums, differentiate, evaluate, unscaled
from jaxmp._gradients._result import describe
from jaxmp._gradients._unreduced import summed
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

    delays = _can_delay(args, options)
    run = differentiate if delays else evaluate

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
    if delays:
        run_part, zero = _with_delayed_sums(run_part, mutables, xs, zero, options)

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


# ---------------------------------------------------------------------------
# One sum over devices, after the loop
# ---------------------------------------------------------------------------

_RunPart: TypeAlias = Callable[..., tuple[Sums, PyTree, PyTree]]


def _can_delay(args: tuple[Any, ...], options: Options) -> bool:
    """Returns True if gradients may be summed over explicit mesh axes after the loop."""
    is_wide = not (is_16bit(options.accumulate_dtype) or is_16bit(options.reduce_dtype))
    return is_wide and _compat.is_explicit(args)


def _with_delayed_sums(
    run_part: _RunPart, mutables: PyTree, xs: tuple[Array, PyTree], zero: Sums, options: Options
) -> tuple[_RunPart, Sums]:
    """Returns `run_part` with sums that are unreduced where possible, and their initial values."""
    first = jax.eval_shape(lambda xs: jax.tree.map(lambda leaf: leaf[0], xs), xs)
    leaves, inputs = jax.tree.flatten((mutables, *first))
    structure: Any = None

    def flat(*leaves: Array) -> list[Array]:
        nonlocal structure
        results, structure = jax.tree.flatten(run_part(*inputs.unflatten(leaves)))
        return results

    closed = jax.make_jaxpr(flat)(*leaves)
    is_param = [
        _overwritten.map_leaves(lambda leaf: True, lambda leaf: False, tree) for tree in zero.grads
    ]
    # The first results are the loss, the weight if there is one, and the gradients.
    asked = [True] * (2 if options.weighted else 1) + jax.tree.leaves(is_param)
    asked += [False] * (len(closed.out_avals) - len(asked))
    delayed = delay_sums(closed, asked)
    loss, *rest = delayed.shardings
    shardings = [loss, *rest] if options.weighted else [loss, None, *rest]
    zeros, of_zeros = jax.tree.flatten(zero)
    zeros = [
        leaf if sharding is None else jax.reshard(leaf, sharding)
        for leaf, sharding in zip(zeros, shardings, strict=False)
    ]

    def run_delayed(mutables: PyTree, index: Array, part: PyTree) -> tuple[Sums, PyTree, PyTree]:
        return structure.unflatten(delayed.run(*jax.tree.leaves((mutables, index, part))))

    return run_delayed, of_zeros.unflatten(zeros)


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
            lambda leaf: jnp.zeros_like(leaf, dtype=_accumulator_dtype(jnp.asarray(leaf), options)),
            _overwritten.fill_lowest,
            args[i],
        )
        for i in options.argnums
    )
    zero = Sums(jnp.zeros((), FLOAT32), jnp.zeros((), FLOAT32), grads)
    axes = {*options.axes, *_compat.varying_axes(args)}
    return _compat.vary(zero, tuple(axes)) if axes else zero


def _accumulator_dtype(gradient: jax.Array, options: Options) -> np.dtype:
    return options.accumulate_dtype if _trees.is_castable(gradient) else gradient.dtype


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
