"""Walks over pytrees: paths, casts, finiteness, selection."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.core import Tracer

from jaxmp._core._dtypes import CASTABLE, FLOAT32, FLOAT64, is_16bit, wide_dtype
from jaxmp._core._typing import Array, ArrayLike, AxisNames, DTypeLike, PyTree

Path = tuple[str, ...]
# Array with a dtype: of JAX or NumPy, or only its shape.
_AnyArray: TypeAlias = jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct

# ---------------------------------------------------------------------------
# Paths
# ---------------------------------------------------------------------------

# Boxes (`nn.Partitioned`, `nnx.Variable`) add one of these fields below the name of a parameter.
BOX_FIELDS = frozenset({"value", "raw_value"})


class HiddenKey:
    """Key of the content of a state, which adds no name to paths."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HiddenKey)

    def __hash__(self) -> int:
        return hash(HiddenKey)

    def __str__(self) -> str:
        return ""


def as_tuple(value: AxisNames) -> tuple[Any, ...]:
    """Returns mapped axes, or argument numbers, as a tuple; None: an empty one."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def path_names(key_path: tuple[Any, ...]) -> Path:
    """Converts a JAX key path to names, without the field that a box adds at the end."""
    keys = [key for key in key_path if not isinstance(key, HiddenKey)]
    is_box = lambda key: isinstance(key, jax.tree_util.GetAttrKey) and key.name in BOX_FIELDS
    while len(keys) > 1 and is_box(keys[-1]):
        keys.pop()
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in keys)


def parameter_path(names: Path) -> str:
    """Converts `("block", "dense", "kernel")` to `"block/dense:kernel"`."""
    return f"{'/'.join(names[:-1])}:{names[-1]}" if names else ""


def map_with_path(fn: Callable[..., Any], tree: PyTree, *rest: PyTree) -> PyTree:
    """Maps like `jax.tree.map`; `fn` receives the names of the path as first argument."""
    return jax.tree_util.tree_map_with_path(
        lambda key_path, *leaves: fn(path_names(key_path), *leaves), tree, *rest
    )


def leaves_with_path(tree: PyTree) -> list[tuple[Path, Any]]:
    """Returns `[(names, leaf), ...]` in flattening order."""
    return [(path_names(key_path), leaf) for key_path, leaf in jax.tree.leaves_with_path(tree)]


# ---------------------------------------------------------------------------
# Leaves
# ---------------------------------------------------------------------------


def dtype_of(leaf: object) -> np.dtype | None:
    """Returns the dtype of an array-like leaf; None for keys, strings, None and numbers.

    That of NumPy's floats is the one that JAX gives them: without x64, float64 is float32.
    """
    dtype = getattr(leaf, "dtype", None)
    if isinstance(dtype, np.dtype):
        is_numpy = isinstance(leaf, (np.ndarray, np.generic)) and dtype.kind == "f"
        return _canonical_float(dtype) if is_numpy else dtype
    if dtype is None or jnp.issubdtype(dtype, jax.dtypes.extended):
        return None
    return np.dtype(dtype)


def _canonical_float(dtype: np.dtype) -> np.dtype:
    return jax.dtypes.canonicalize_dtype(dtype.newbyteorder("=") if dtype.itemsize < 8 else FLOAT64)


def is_castable(leaf: object) -> bool:
    """Returns True if policies cast `leaf`: an array in float16, bfloat16 or float32."""
    return dtype_of(leaf) in CASTABLE


def is_float(leaf: object) -> bool:
    """Returns True if `leaf` is an array in float16, bfloat16, float32 or float64."""
    return dtype_of(leaf) in CASTABLE | {FLOAT64}


def is_integer(value: object, least: float = -math.inf) -> bool:
    """Returns True for an integer of Python or NumPy, at least `least`. A bool does not count."""
    is_bool = isinstance(value, bool)
    return not is_bool and isinstance(value, (int, np.integer)) and bool(value >= least)


def is_key(leaf: object) -> bool:
    """Returns True if `leaf` is a typed PRNG key array."""
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def has_fields(node: object, *names: str) -> bool:
    """Returns True if an object has attributes, but not if it has all, as `nnx.Rngs` does."""
    return all(hasattr(node, name) for name in names) and not hasattr(node, "_no_name")


def is_inexact(leaf: object) -> bool:
    """Returns True if `leaf` is an array of 16 to 64-bit floats, or of complex numbers."""
    dtype = dtype_of(leaf)
    return dtype is not None and (is_float(leaf) or np.issubdtype(dtype, np.complexfloating))


def canonical(leaf: object) -> Any:
    """Returns an argument in the dtype that `jit` gives it: NumPy's float64 is float32 without x64.

    Example:
      >>> canonical(np.ones(2)).dtype
      dtype('float32')
    """
    if not isinstance(leaf, (np.ndarray, np.generic)):
        return leaf
    dtype = jax.dtypes.canonicalize_dtype(leaf.dtype) if leaf.dtype.kind in "iufc" else None
    return leaf if dtype is None else cast(leaf, dtype)


def cast(leaf: _AnyArray, dtype: Any) -> Any:
    """Casts an array, NumPy array or `ShapeDtypeStruct`; returns it if its dtype is `dtype`."""
    if leaf.dtype == dtype:
        return leaf
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.update(dtype=dtype)
    if isinstance(leaf, (np.ndarray, np.generic)):
        return leaf.astype(dtype)
    return lax.convert_element_type(leaf, dtype)


def saturating_cast(leaf: _AnyArray, dtype: DTypeLike) -> Any:
    """Casts an array as `cast` does, except that a finite number never becomes infinite.

    Infinities and NaN are kept. Numbers beyond the range of `dtype` become its largest finite
    number. The derivative is that of a plain cast, so that overflowing cotangents stay visible.

    Example:
      >>> saturating_cast(jnp.float32([-1e9, -jnp.inf]), jnp.float16).tolist()
      [-65504.0, -inf]
    """
    is_shape = isinstance(leaf, jax.ShapeDtypeStruct)
    if is_shape or jnp.finfo(leaf.dtype).max <= jnp.finfo(dtype).max:
        return cast(leaf, dtype)
    if isinstance(leaf, (np.ndarray, np.generic)):
        wide, largest = _widened(leaf, dtype)
        return np.where(np.isfinite(wide), np.clip(wide, -largest, largest), wide).astype(dtype)[()]
    return _saturate(leaf, np.dtype(dtype))


def clamped_cast(array: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Computes `saturating_cast` with the derivative of its operations."""
    wide, largest = _widened(array, dtype)
    clamped = lax.clamp(-largest, wide, largest)
    return cast(lax.select(lax.is_finite(wide), clamped, wide), dtype)


def _widened(array: jax.Array | np.ndarray | np.generic, dtype: DTypeLike) -> tuple[Any, Any]:
    """Casts to a dtype wide enough for the largest number of `dtype`; also returns this number."""
    wide = cast(array, FLOAT32) if is_16bit(array.dtype) else array
    return wide, wide.dtype.type(jnp.finfo(dtype).max)


_saturate: Any = jax.custom_jvp(clamped_cast, nondiff_argnums=(1,))


@_saturate.defjvp
def _saturate_jvp(
    dtype: np.dtype, primals: tuple[jax.Array, ...], tangents: tuple[jax.Array, ...]
) -> tuple[jax.Array, jax.Array]:
    (tangent,) = tangents
    return _saturate(*primals, dtype), lax.convert_element_type(tangent, dtype)


# ---------------------------------------------------------------------------
# Trees
# ---------------------------------------------------------------------------


def cast_floating(tree: PyTree, dtype: DTypeLike) -> PyTree:
    """Casts the float16, bfloat16 and float32 arrays of `tree` to `dtype`.

    Without x64, float64 arrays of NumPy are float32. Integers, bools, float64, complex numbers,
    PRNG keys, float0, FP8 arrays, strings, None and Python numbers are returned unchanged.

    Args:
      tree: any pytree.
      dtype: the floating dtype of the result.

    Returns:
      A tree of the same structure.

    Example:
      >>> cast_floating({"w": jnp.ones(2), "n": jnp.arange(2)}, jnp.bfloat16)["n"].dtype
      dtype('int32')
    """
    return jax.tree.map(lambda leaf: cast(leaf, dtype) if is_castable(leaf) else leaf, tree)


def all_finite(tree: PyTree) -> jax.Array:
    """Returns True if all floating and complex elements of `tree` are finite.

    Returns:
      A bool scalar; True for a tree without floating leaves.
    """
    flags = [jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree) if is_inexact(leaf)]
    return functools.reduce(lax.bitwise_and, flags) if flags else jnp.array(True)


def check_squares(tree: PyTree) -> tuple[jax.Array, jax.Array]:
    """Finds the first leaf of `tree` whose sum of squares is not finite, and checks for zeros.

    A leaf with infinities or NaN has such a sum. So does one whose squares, or their sum, overflow:
    FP32 does so above 1.8e19, where gradient norms and second moments are infinite too. These sums
    are those of `optax.clip_by_global_norm`, and XLA computes equal sums once.

    Args:
      tree: arrays of any dtypes, of which only the floating and complex ones are tested.

    Returns:
      The int32 index of the leaf, or the number of leaves if all sums are finite; and True if all
      sums are zero, but False for a tree without floating and complex leaves.
    """
    leaves = jax.tree.leaves(tree)
    tested = {index: leaf for index, leaf in enumerate(leaves) if is_inexact(leaf)}
    if not tested:
        return jnp.int32(len(leaves)), jnp.array(False)
    sums = [_sum_of_squares(leaf) for leaf in tested.values()]
    widest = FLOAT64 if any(total.dtype == FLOAT64 for total in sums) else FLOAT32
    stacked = lax.concatenate([lax.reshape(cast(total, widest), (1,)) for total in sums], 0)
    indices = jnp.array(list(tested), jnp.int32)
    masked = lax.select(lax.is_finite(stacked), lax.full_like(indices, len(leaves)), indices)
    are_zero = lax.eq(stacked, lax.full_like(stacked, 0))
    return lax.reduce_min(masked, (0,)), lax.reduce_and(are_zero, axes=(0,))


def _sum_of_squares(leaf: ArrayLike) -> jax.Array:
    """Returns the sum of the squares of an array, at least in FP32."""
    array = jnp.asarray(leaf)
    real = (lax.real(array), lax.imag(array)) if jnp.iscomplexobj(array) else (array,)
    parts = [cast(part, wide_dtype(part.dtype)) for part in real]
    sums = [lax.reduce_sum(lax.square(part), axes=tuple(range(part.ndim))) for part in parts]
    return functools.reduce(lax.add, sums)


def select(pred: jax.Array, on_true: PyTree, on_false: PyTree) -> PyTree:
    """Selects `on_true` or `on_false` by the bool scalar `pred`, without arithmetic.

    Typed PRNG keys are those of `on_true`: random state advances even if a step is skipped.
    """
    choose = lambda new, old: new if is_key(new) else select_leaf(pred, new, old)
    return jax.tree.map(choose, on_true, on_false)


def select_leaf(pred: jax.Array, new: ArrayLike, old: ArrayLike) -> ArrayLike:
    """Selects `new` if `pred`, a scalar or one bool per element, is True and `old` otherwise."""
    return new if new is old else lax.select_n(pred, jnp.asarray(old), jnp.asarray(new))


def keep_finite(new: PyTree, old: PyTree) -> PyTree:
    """Replaces the elements of arrays in `new` that are not finite by those of `old`.

    Each element is decided alone, so that XLA fuses the choice with the operation that computes it.
    An element that was not finite before takes its new value only if that is finite.
    """

    def keep(new: ArrayLike, old: ArrayLike) -> ArrayLike:
        is_new = isinstance(new, (jax.Array, np.ndarray)) and is_inexact(new) and new is not old
        return select_leaf(jnp.isfinite(new), new, old) if is_new else new

    return jax.tree.map(keep, new, old)


def in_one_program(fn: Callable[..., Any], *trees: PyTree) -> Any:
    """Calls a function of arrays, as one program instead of a program for each operation and shape.

    Arrays on different devices cannot be arguments of one program.
    """
    leaves = jax.tree.leaves(trees)
    if any(isinstance(leaf, Tracer) or not isinstance(leaf, jax.Array) for leaf in leaves):
        return fn(*trees)
    placements = {
        (frozenset(leaf.sharding.device_set), leaf.sharding.memory_kind) for leaf in leaves
    }
    return (jax.jit(fn) if len(placements) == 1 else fn)(*trees)


def are_alike(tree: PyTree, other: PyTree) -> bool:
    """Returns True if two trees have the same structure, shapes and dtypes."""
    kind = lambda leaf: (np.shape(leaf), getattr(leaf, "dtype", type(leaf)))
    (leaves, structure), (others, other_structure) = map(jax.tree.flatten, (tree, other))
    return structure == other_structure and list(map(kind, leaves)) == list(map(kind, others))


def copied(array: Array) -> jax.Array:
    """Copies an array on its devices, without compiling a program for its shape.

    In the context of a mesh, the copy is on the mesh, as results of `jax.numpy` are.
    """
    in_mesh = not jax.sharding.get_abstract_mesh().empty
    if in_mesh or isinstance(array, Tracer) or not isinstance(array, jax.Array):
        return jnp.array(array, copy=True)
    # Without a placement, an array stays uncommitted; one of several hosts requires its own.
    place = None if array.is_fully_addressable else array.sharding
    return jax.device_put(array, place, may_alias=False)


def owned(tree: PyTree, *others: PyTree) -> PyTree:
    """Copies arrays of `tree` that are also in `others`, scalars, and repeated arrays.

    Donation of a state deletes its arrays, which therefore must not be shared with other objects.
    """
    taken = {id(leaf) for leaf in jax.tree.leaves(others)}

    def own(leaf: object) -> object:
        if not isinstance(leaf, jax.Array):
            return leaf
        if id(leaf) in taken or leaf.size <= 1:
            leaf = copied(leaf)
        taken.add(id(leaf))
        return leaf

    return jax.tree.map(own, tree)


# ---------------------------------------------------------------------------
# Collections
# ---------------------------------------------------------------------------

PARAMS = "params"
# The collection that the layers of Flax write in the forward pass.
BATCH_STATS = "batch_stats"


def has_collections(tree: PyTree) -> bool:
    """Returns True if `tree` is a dict of Flax collections that contains parameters."""
    return isinstance(tree, Mapping) and PARAMS in tree


def strip_collection(names: Path) -> Path:
    """Removes the `params` collection from a path, which rules omit."""
    return names[1:] if len(names) > 1 and names[0] == PARAMS else names


def rule_names(tree: PyTree, names: Path) -> Path:
    """Returns the path of a leaf of `tree` in the form that rules match.

    It omits the `params` collection, and `fast` and `slow` of `optax.LookaheadParams`, which
    contains two copies of the parameters.
    """
    if isinstance(tree, optax.LookaheadParams):
        return rule_names(getattr(tree, names[0]), names[1:])
    return strip_collection(names) if has_collections(tree) else names
