"""Shards all operands of cuDNN's kernel alike, as JAX requires in order to partition the kernel.

XLA chooses the shardings of query, key and value separately. If only parameters are sharded, it may
shard the key over the head size and the query over the batch; JAX then refuses to partition the
kernel ("Query, key and value should have same sharding"). `one_sharding` passes the operands
through an identity function with a custom partitioning. Its rule requires all results to have the
same sharding of batch and heads, and leaves their positions and head sizes unsharded.
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
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

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
    mesh = jax.typeof(present["query"]).sharding.mesh
    if AxisType.Explicit not in mesh.axis_types:
        tied = _tied({name: present.pop(name) for name in _TIED if name in present})
        # The others, which may lack dimensions, follow the query.
        others = _tied({"query": tied["query"], **present}) if present else {}
        return {**arrays, **tied, **others}
    # On explicit mesh axes, the sharding is part of the operands' types.
    specs = _specs(mesh, tuple(present), list(map(jax.typeof, present.values())))
    for (name, array), spec in zip(present.items(), specs, strict=True):
        present[name] = jax.reshard(array, NamedSharding(mesh, spec))
    return {**arrays, **present}


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
        sharding_rule=f"{operands} -> {results}",
        **sizes,
    )
    return made


def _specs(
    mesh: Mesh | AbstractMesh, names: tuple[str, ...], infos: Sequence[Any]
) -> list[PartitionSpec]:
    """Returns the query's sharding of batch and heads for each array.

    Raises:
      AttentionError: if the heads are sharded over more devices than the key has heads.
    """
    query, key = infos[0], infos[names.index("key") if "key" in names else 0]
    spec = (*query.sharding.spec, *(None,) * (len(query.shape) - len(query.sharding.spec)))
    *leading, batch, _, heads, _ = spec
    over = {None: ()}.get(heads, heads if isinstance(heads, tuple) else (heads,))
    devices = math.prod(mesh.shape[axis] for axis in over)
    if key.shape[-2] % devices:
        raise AttentionError(
            f"the {query.shape[-2]} heads of the query are sharded over {devices} devices, and the "
            f"key has {key.shape[-2]} heads, which cuDNN's kernel cannot shard alike. Shard the "
            "heads over fewer devices, or write implementation='xla'."
        )

    def of(name: str, shape: tuple[int, ...]) -> PartitionSpec:
        axes = {"b": batch, "n": heads, ".": None}
        own = shape[len(shape) - len(_DIMENSIONS[name]) :]
        dims = zip(_DIMENSIONS[name], own, strict=True)
        return PartitionSpec(*leading, *(axes[kind] if size > 1 else None for kind, size in dims))

    return [of(name, info.shape) for name, info in zip(names, infos, strict=True)]
