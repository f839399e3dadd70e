"""Shards all operands of cuDNN's kernel alike, as JAX requires in order to partition the kernel.

On automatic mesh axes, XLA chooses the shardings of query, key and value separately. If only
parameters are sharded, it may shard the key over the head size and the query over the batch; JAX
then refuses to partition the kernel ("Query, key and value should have same sharding").
`one_sharding` passes the operands through an identity function with a custom partitioning. Its rule
requires all results to have the same sharding of batch and heads, and leaves their positions and
head sizes unsharded. On explicit mesh axes, `_explicit` does so for all implementations.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxmp._core._compat import partition_spec
from jaxmp.errors import AttentionError

# Operand -> its dimensions. The kernel can be sharded over b, the batch, and n, the heads.
_DIMENSIONS = {
    "query": "b.n.",
    "key": "b.n.",
    "value": "b.n.",
    "bias": "bn..",
    "mask": "bn..",
    "query_seq_lengths": "b",
    "key_value_seq_lengths": "b",
}

# Operands that have both dimensions, and determine the sharding of the others.
_TIED = ("query", "key", "value")

Arrays = dict[str, jax.Array]


def one_sharding(arrays: dict[str, Any]) -> dict[str, Any]:
    """Returns the same arrays with one sharding of batch and heads, in a program for a mesh.

    Args:
      arrays: operands by their names in `jax.nn.dot_product_attention`; None is allowed. The result
        of attention is passed as a single `query`; then its consumers do not cause a sharding of
        its positions or its head size.

    Raises:
      AttentionError: if the heads are sharded over more devices than the key has heads.
    """
    present = {name: array for name, array in arrays.items() if array is not None}
    kinds = jax.typeof(present["query"]).sharding.mesh.axis_types
    if kinds and AxisType.Auto not in kinds:  # each device computes its part
        return arrays
    tied = _tied({name: present.pop(name) for name in _TIED if name in present})
    # The others, which may lack dimensions, follow the query.
    others = _tied({"query": tied["query"], **present}) if present else {}
    return {**arrays, **tied, **others}


@jax.custom_vjp
def _tied(arrays: Arrays) -> Arrays:
    return _partitioned(arrays)


def _forward_rule(arrays: Arrays) -> tuple[Arrays, None]:
    return _partitioned(arrays), None


def _backward_rule(_: None, gradients: dict[str, Any]) -> tuple[dict[str, Any]]:
    # Each gradient gets the sharding of its operand.
    floating = {name: g for name, g in gradients.items() if g.dtype != jax.dtypes.float0}
    return ({**gradients, **_partitioned(floating)},)


_tied.defvjp(_forward_rule, _backward_rule)


@custom_vmap
def _partitioned(arrays: Arrays) -> Arrays:
    names = tuple(sorted(arrays, key=list(_DIMENSIONS).index))
    shapes = tuple(arrays[name].shape for name in names)
    results = _identity(names, shapes)(*(arrays[name] for name in names))
    return dict(zip(names, results, strict=True))


@_partitioned.def_vmap
def _batched(
    size: int, is_batched: Sequence[dict[str, bool]], arrays: Arrays
) -> tuple[Arrays, Any]:
    whole = {
        name: array if is_batched[0][name] else jnp.broadcast_to(array, (size, *array.shape))
        for name, array in arrays.items()
    }
    return _partitioned(whole), dict.fromkeys(arrays, True)


@functools.cache
def _identity(names: tuple[str, ...], shapes: tuple[tuple[int, ...], ...]) -> Callable[..., Any]:
    """Returns the identity function of arrays with these names and shapes, with a sharding rule."""
    query = shapes[0]
    key = shapes[names.index("key")] if "key" in names else query
    fresh = (f"f{i}" for i in itertools.count())
    sizes: Any = {}

    def factors(name: str, shape: tuple[int, ...], is_tied: bool) -> str:
        own = shape[len(shape) - len(_DIMENSIONS[name]) :]
        terms = []
        for kind, size in zip(_DIMENSIONS[name], own, strict=True):
            shared = {"b": query[-4], "n": key[-2], ".": 1}[kind]
            if size == 1 or shared == 1 or not is_tied:
                terms.append(next(fresh))
            elif size == shared:
                terms.append(kind)
            else:  # query heads that share key heads
                heads = next(fresh)
                sizes[heads] = size // shared
                terms.append(f"(n {heads})")
        return " ".join(["...", *terms])

    every = list(zip(names, shapes, strict=True))
    operands = ", ".join(factors(name, shape, name in _TIED) for name, shape in every)
    results = ", ".join(factors(name, shape, True) for name, shape in every)

    def identity(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        return arrays

    def shardings(mesh: Mesh, infos: Sequence[Any]) -> tuple[NamedSharding, ...]:
        return tuple(NamedSharding(mesh, spec) for spec in _specs(mesh, names, infos))

    def partition(mesh: Mesh, _: object, infos: Sequence[Any]) -> Any:
        result = shardings(mesh, infos)
        return mesh, identity, result, result

    made = custom_partitioning(identity)
    made.def_partition(
        partition=partition,
        infer_sharding_from_operands=lambda mesh, infos, _: shardings(mesh, infos),
        # XLA may split the key's heads over a part of a mesh axis, which JAX cannot decode.
        decode_shardings=False,
        sharding_rule=f"{operands} -> {results}",
        **sizes,
    )
    return made


def _specs(mesh: Mesh, names: tuple[str, ...], infos: Sequence[Any]) -> list[PartitionSpec]:
    """Returns the query's sharding of batch and heads for each array.

    Raises:
      AttentionError: if the heads are sharded over more devices than the key has heads.
    """
    query, key = infos[0], infos[names.index("key") if "key" in names else 0]
    heads, groups = query.shape[-2], key.shape[-2]
    spec = partition_spec(query.sharding, mesh, len(query.shape))
    *leading, batch, _, axes, _ = spec or (None,) * len(query.shape)
    over = {None: ()}.get(axes, axes if isinstance(axes, tuple) else (axes,))
    if spec is None or groups % math.prod(mesh.shape[axis] for axis in over):
        raise AttentionError(
            f"XLA splits the {heads} heads of the query over devices among which cuDNN's kernel "
            f"cannot split the {groups} heads of the key; the mesh is {dict(mesh.shape)}. Repeat "
            f"the heads: key = jnp.repeat(key, {heads // groups}, axis=-2), and value alike. Or "
            "shard the query's heads over fewer devices, write implementation='xla', or make the "
            "axes of the mesh explicit, where jaxmp repeats the heads as often as required."
        )

    def of(name: str, shape: tuple[int, ...]) -> PartitionSpec:
        entries = {"b": batch, "n": axes, ".": None}
        own = shape[len(shape) - len(_DIMENSIONS[name]) :]
        dims = zip(_DIMENSIONS[name], own, strict=True)
        return PartitionSpec(*leading, *(entries[kind] if n > 1 else None for kind, n in dims))

    return [of(name, info.shape) for name, info in zip(names, infos, strict=True)]
