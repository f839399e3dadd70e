"""Attention by cuDNN's fused kernel, through `jax.nn.dot_product_attention`, and its sharding.

JAX refuses gradients of the kernel for an odd number of queries or keys: it checks a condition of
calls with a bias for all calls. In training, such calls are therefore padded by one position.

All operands of the kernel are sharded alike, as JAX requires in order to partition it. On automatic
mesh axes, XLA chooses the shardings of query, key and value separately. If only parameters are
sharded, it may shard the key over the head size and the query over the batch; JAX then refuses to
partition the kernel ("Query, key and value should have same sharding"). `one_sharding` passes the
operands through an identity function with a custom partitioning. Its rule requires all results to
have the same sharding of batch and heads, and leaves their positions and head sizes unsharded.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxmp._attention import _arguments
from jaxmp._attention._arguments import NO_KEY, AttentionArguments, AttentionSettings
from jaxmp._attention._plain import seeing_queries
from jaxmp._core import _compat
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


def _tied_backward(_: None, gradients: dict[str, Any]) -> tuple[dict[str, Any]]:
    # Each gradient gets the sharding of its operand.
    floating = {name: g for name, g in gradients.items() if g.dtype != jax.dtypes.float0}
    return ({**gradients, **_partitioned(floating)},)


_tied.defvjp(lambda arrays: (_partitioned(arrays), None), _tied_backward)


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


# One function object for the same arrays, so that JAX finds its earlier trace.
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
    spec = _compat.partition_spec(query.sharding, mesh, len(query.shape))
    *leading, batch, _, axes, _ = spec or (None,) * len(query.shape)
    over = {None: ()}.get(axes, axes if isinstance(axes, tuple) else (axes,))
    if spec is None or groups % math.prod(mesh.shape[axis] for axis in over):
        raise AttentionError(
            f"XLA splits the {heads} heads of the query over devices among which cuDNN's kernel "
            f"cannot split the {groups} heads of the key; the mesh is {dict(mesh.shape)}. Repeat "
            f"the heads: key = jnp.repeat(key, {heads // groups}, axis=-2), and value alike. Or "
            "shard the query's heads over fewer devices, or write implementation='xla'."
        )

    def of(name: str, shape: tuple[int, ...]) -> PartitionSpec:
        entries = {"b": batch, "n": axes, ".": None}
        own = shape[len(shape) - len(_DIMENSIONS[name]) :]
        dims = zip(_DIMENSIONS[name], own, strict=True)
        return PartitionSpec(*leading, *(entries[kind] if n > 1 else None for kind, n in dims))

    return [of(name, info.shape) for name, info in zip(names, infos, strict=True)]


# Head sizes must be multiples of this.
HEAD_MULTIPLE = 8


def padded_size(head: int, value: int) -> int:
    """Returns the head size after padding: one multiple of 8 for query, key and value."""
    return -(-max(head, value) // HEAD_MULTIPLE) * HEAD_MULTIPLE


def cudnn_attention(args: AttentionArguments) -> Any:
    """Computes attention with cuDNN's fused kernel.

    Returns:
      `[B, T, N, V]` in the operands' dtype, zero for queries that see no key. With
      `settings.residual`, a pair of that and the log-sum-exp `[B, T, N]`, which JAX rounds to the
      same dtype.
    """
    args = _arguments.with_scaled_query(args)
    settings = args.settings
    _, _, queries, keys = args.logits_shape
    size = args.value.shape[-1]
    padded = padded_size(args.query.shape[-1], size)
    query, key, value = (_extended(a, {3: padded}) for a in (args.query, args.key, args.value))
    seeing = seeing_queries(args)
    if seeing is not None:
        # Queries that see no key are replaced by zero here, and their results below. So neither
        # results nor gradients depend on how the kernel treats such rows.
        query = jnp.where(seeing, query, 0)
    bias, mask = args.bias, args.mask
    if bias is not None:
        bias, mask = _with_hidden_keys(bias, mask), None
    operands = {
        "query": query,
        "key": key,
        "value": value,
        "query_seq_lengths": args.query_lengths,
        "key_value_seq_lengths": args.key_lengths,
    }
    # cuDNN requires whole rows.
    for name, array in (("bias", bias), ("mask", mask)):
        if array is not None:
            operands[name] = jnp.broadcast_to(array, (*array.shape[:2], queries, keys))
    operands = {name: array for name, array in operands.items() if array is not None}
    is_odd = queries % 2 or keys % 2
    result: Any = (_padded_in_training if is_odd else _kernel)(settings, operands)
    out, residual = result if settings.residual else (result, None)
    out = out[..., :size]
    out = out if seeing is None else jnp.where(seeing, out, 0)
    if residual is None:
        return out
    residual = lax.stop_gradient(residual)
    return out, residual if seeing is None else jnp.where(seeing[..., 0], residual, NO_KEY)


def _kernel(settings: AttentionSettings, operands: Arrays) -> Any:
    """Calls the kernel with operands of its head size."""
    attend: Any = jax.nn.dot_product_attention
    result = attend(
        **one_sharding(operands),
        is_causal=settings.is_causal,
        scale=settings.scale,
        local_window_size=settings.window,
        implementation="cudnn",
        return_residual=settings.residual,
    )
    out, *residual = result if settings.residual else (result,)
    out = one_sharding({"query": out})["query"]
    return (out, *residual) if residual else out


# ---------------------------------------------------------------------------
# Odd numbers of positions
# ---------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _padded_in_training(settings: AttentionSettings, operands: Arrays) -> Any:
    """Computes `_kernel`, whose forward pass takes any lengths, with gradients."""
    return _kernel(settings, operands)


_padded_in_training.defvjp(
    lambda settings, operands: jax.vjp(functools.partial(_padded_kernel, settings), operands),
    lambda settings, pull, d_out: pull(d_out),
)


def _padded_kernel(settings: AttentionSettings, operands: Arrays) -> Any:
    """Pads queries and keys to even numbers; the added keys are hidden from all queries.

    The results of the added queries are cut off. Their gradient is therefore zero, and so is their
    part in the gradients of keys, values and bias.
    """
    query, key = operands["query"], operands["key"]
    (batch, queries), keys = query.shape[:2], key.shape[1]
    even_queries, even_keys = queries + queries % 2, keys + keys % 2
    # A causal mask hides keys behind the last query, an array is extended, and a length suffices.
    hides = {"bias", "mask", "key_value_seq_lengths"} & operands.keys()
    if keys % 2 and not hides and not (settings.is_causal and queries <= keys):
        lengths = {
            "query_seq_lengths": jnp.full((batch,), queries, jnp.int32),
            "key_value_seq_lengths": jnp.full((batch,), keys, jnp.int32),
        }
        operands = {**lengths, **operands}
    padded = dict(operands, query=_extended(query, {1: even_queries}))
    for name in ("key", "value"):
        padded[name] = _extended(operands[name], {1: even_keys})
    # The added queries see all keys but the added one.
    for name, seen, hidden in (("bias", 0, _hidden(query.dtype)), ("mask", True, False)):
        if name in operands:
            rows = _extended(operands[name], {2: even_queries}, seen)
            padded[name] = _extended(rows, {3: even_keys}, hidden)
    return jax.tree.map(lambda array: array[:, :queries], _kernel(settings, padded))


# ---------------------------------------------------------------------------
# Arrays
# ---------------------------------------------------------------------------


def _extended(array: jax.Array, sizes: dict[int, int], value: float = 0) -> jax.Array:
    """Pads axes to sizes with a value; zeros do not change a matmul."""
    widths = [(0, sizes.get(axis, size) - size) for axis, size in enumerate(array.shape)]
    return jnp.pad(array, widths, constant_values=value) if any(map(any, widths)) else array


def _hidden(dtype: np.dtype) -> float:
    """Returns the bias of a hidden key, that of JAX for bool masks.

    It is finite, because cuDNN subtracts the largest logit of a row, and -inf - -inf is NaN.
    """
    return -(2.0**15) if dtype == jnp.float16 else -(2.0**41)


def _with_hidden_keys(bias: jax.Array, mask: jax.Array | None) -> jax.Array:
    """Combines bias and mask: hidden keys have a bias below that of all keys that a query sees.

    Their sum could exceed float16, and a large negative bias would equal that of hidden keys.
    """
    least = _hidden(bias.dtype)
    hidden = jnp.isneginf(bias) if mask is None else jnp.isneginf(bias) | ~mask
    return jnp.where(hidden, least, jnp.maximum(bias, least / 2))
