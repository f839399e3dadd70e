"""Attention of operands on explicit mesh axes, where shardings are part of the types of arrays.

JAX refuses operations on arrays whose shardings differ or are ambiguous. `run_on_parts` gives all
operands the batch and the heads of the query. Without a fused kernel, it calls the implementation
in `jax.shard_map`, so that each device computes its part. Axes that split positions or head sizes
split the heads instead if these can be divided; otherwise the arrays are gathered over them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from jaxmp._attention._arguments import Arguments
from jaxmp._core._dtypes import wide_dtype

# Field of `Arguments` -> its dimensions: b batch, n heads, t and s positions, h and v head sizes.
_DIMENSIONS = {
    "query": "btnh",
    "key": "bsnh",
    "value": "bsnv",
    "bias": "bnts",
    "mask": "bnts",
    "query_lengths": "b",
    "key_lengths": "b",
    "dropout_rng": "",
    "scale": "",
}

Axes: TypeAlias = tuple[str, ...]


class Parts(NamedTuple):
    """Division of an attention call among the devices of explicit mesh axes. Hashable."""

    mesh: AbstractMesh
    # Mesh axes that split batch and heads.
    batch: Axes
    heads: Axes
    # Mesh axes of the query, which the result has, too.
    query: tuple[Axes, Axes, Axes, Axes]
    # Heads of key and value after each is repeated, so that the axes of the heads divide them.
    key_heads: int

    def spec(self, name: str, shape: tuple[int, ...]) -> PartitionSpec:
        """Returns the partition spec of an operand; a dimension of size 1 is not split."""
        axes = {"b": self.batch, "n": self.heads}
        dims = zip(_DIMENSIONS[name], shape, strict=False)
        return _spec(axes.get(kind, ()) if size > 1 else () for kind, size in dims)


def parts_of(args: Arguments) -> Parts | None:
    """Returns the division of a call; None without explicit mesh axes, or for shapes."""
    if not isinstance(args.query, jax.Array):
        return None
    sharding = jax.typeof(args.query).sharding
    mesh = sharding.mesh
    if AxisType.Explicit not in mesh.axis_types:
        return None
    spec = (*sharding.spec, *(None,) * (4 - len(sharding.spec)))
    batch, positions, heads, size = map(_axes, spec)
    query = (batch, positions, heads, size)
    devices = lambda axes: math.prod(mesh.shape[axis] for axis in axes)
    moved = heads + positions + size
    _, count, _, _ = args.logits_shape
    heads = heads if count % devices(moved) else moved
    key_heads = args.key.shape[2]
    while key_heads % devices(heads) or count % key_heads:
        key_heads += args.key.shape[2]
    return Parts(mesh, batch, heads, query, key_heads)


def notes_of(args: Arguments) -> Iterator[str]:
    """Describes the data that a call moves between devices of explicit mesh axes."""
    parts = parts_of(args)
    if parts is None:
        return
    for name in ("query", "key", "value"):
        before = _spec(map(_axes, jax.typeof(getattr(args, name)).sharding.spec))
        after = parts.spec(name, (2,) * 4)
        if before != after:
            yield f"{name} is resharded from {before} to {after}"
    if parts.key_heads != args.key.shape[2]:
        yield (
            f"the {args.key.shape[2]} heads of key and value are repeated to {parts.key_heads}, "
            f"because the query's are split over {parts.heads}"
        )
    _, positions, heads, size = parts.query
    gathered = tuple(axis for axis in heads + positions + size if axis not in parts.heads)
    if gathered:
        yield f"each device of {gathered} computes the same heads"


def run_on_parts(compute: Callable[[Arguments], Any], args: Arguments, *, is_mapped: bool) -> Any:
    """Calls an implementation, on explicit mesh axes on each device for its batch and heads.

    Args:
      compute: returns `[B, T, N, V]`, or with `settings.residual` a pair of that and `[B, T, N]`.
      args: the arguments.
      is_mapped: `compute` is mapped over the axes that split batch or heads; False if it accepts
        operands that are sharded alike.

    Returns:
      The result of `compute`, sharded as the query. A head size that differs from that of the query
      is not split.
    """
    parts = parts_of(args)
    if parts is None:
        return compute(args)
    operands = _arranged(args, parts)
    axes = parts.batch + parts.heads if is_mapped else ()
    compute = functools.partial(_compute_part, compute, axes, getattr(args.bias, "dtype", None))
    if axes:
        out = _spec((parts.batch, (), parts.heads))
        compute = jax.shard_map(
            compute,
            mesh=parts.mesh,
            in_specs=(operands.map(lambda name, array: parts.spec(name, array.shape)),),
            out_specs=(out, out) if args.settings.residual else out,
            axis_names=set(axes),
            # The gradients of the parts are not summed over further axes.
            check_vma=False,
        )
    results = compute(operands)
    batch, positions, heads, size = parts.query
    size = size if args.value.shape[-1] == args.query.shape[-1] else ()
    entries = (batch, positions, heads, size)
    place = lambda array: jax.reshard(
        array, NamedSharding(parts.mesh, _spec(entries[: array.ndim]))
    )
    return jax.tree.map(place, results)


def _arranged(args: Arguments, parts: Parts) -> Arguments:
    """Returns the operands, sharded alike, with repeated heads of key and value."""
    repeats = parts.key_heads // args.key.shape[2]

    def arrange(name: str, array: Any) -> Any:
        if name in ("key", "value") and repeats > 1:
            array = jnp.repeat(array, repeats, 2)
        if name == "bias":
            # Its gradient may be summed over devices, in this dtype.
            array = array.astype(wide_dtype(array.dtype))
        return jax.reshard(array, NamedSharding(parts.mesh, parts.spec(name, array.shape)))

    return args.map(arrange)


def _compute_part(
    compute: Callable[[Arguments], Any], axes: Axes, bias_dtype: Any, part: Arguments
) -> Any:
    """Computes the part of a device in a `shard_map` over `axes`, or the whole without axes."""
    bias, rng = part.bias, part.dropout_rng
    if rng is not None and not part.settings.broadcast_dropout:
        for axis in axes:  # devices drop different weights
            rng = jax.random.fold_in(rng, jax.lax.axis_index(axis))
    bias = None if bias is None else bias.astype(bias_dtype)
    return compute(dataclasses.replace(part, dropout_rng=rng, bias=bias))


def _axes(entry: object) -> Axes:
    """Returns the mesh axes of one entry of a partition spec."""
    if entry is None:
        return ()
    return tuple(entry) if isinstance(entry, tuple) else (str(entry),)


def _spec(dimensions: Any) -> PartitionSpec:
    entries = [axes[0] if len(axes) == 1 else axes or None for axes in dimensions]
    return PartitionSpec(*entries)
