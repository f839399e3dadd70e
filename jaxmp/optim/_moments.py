"""Optimizer moments in bfloat16 that neither stall nor drift."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from jaxmp import _core
from jaxmp._core import DTypeLike, PyTree
from jaxmp.errors import CompositionError, PolicyError
from jaxmp.optim._master import check_inner
from jaxmp.optim._rounding import with_noise

MOMENT_COUNT = "moment_count"
NEAREST, STOCHASTIC = "nearest", "stochastic"
# State class of optax -> field -> rounding. An average whose decay is close to 1 changes by less
# than half a unit in the last place of bfloat16 per step, so that rounding to nearest stops it.
# Other fields stay in FP32: counts, scales, sums that grow, differences, copies of parameters.
_FIELDS = {
    "ScaleByAdamState": {"mu": NEAREST, "nu": STOCHASTIC},
    "ScaleByAmsgradState": {"mu": NEAREST, "nu": STOCHASTIC},
    "ScaleByBeliefState": {"mu": NEAREST, "nu": STOCHASTIC},
    "ScaleByRmsState": {"nu": STOCHASTIC},
    "ScaleByRmsWithCountState": {"nu": STOCHASTIC},
    "ScaleByLionState": {"mu": NEAREST},
    "ScaleByNovogradState": {"mu": NEAREST},
    "ScaleByAdaDeltaState": {"e_g": STOCHASTIC, "e_x": STOCHASTIC},
    "ScaleByAdanState": {"m": NEAREST, "v": NEAREST, "n": STOCHASTIC},
    "TraceState": {"trace": NEAREST},
    "MuonState": {"mu": NEAREST},
    "ScaleByAdemamixState": {"m1": NEAREST, "m2": STOCHASTIC, "nu": STOCHASTIC},
    "ScaleBySimplifiedAdEMAMixState": {"m": STOCHASTIC, "n": STOCHASTIC},
    "SophiaState": {"mu": NEAREST, "nu": STOCHASTIC},
    "MomoState": {"exp_avg": NEAREST},
    "MomoAdamState": {"exp_avg": NEAREST, "exp_avg_sq": STOCHASTIC},
    "DAdaptAdamWState": {"exp_avg": NEAREST, "exp_avg_sq": STOCHASTIC},
    "ProdigyState": {"exp_avg": NEAREST, "exp_avg_sq": STOCHASTIC},
}
# States of optax whose own arrays are not moments.
_WIDE = {
    *("ScaleByRssState", "FactoredState", "ScaleBySM3State", "ScaleByRStdDevState"),
    *("ScaleByRStdDevWithCountState", "EmaState", "MultiStepsState", "ScaleByRpropState"),
    *("LookaheadState", "ApplyEvery", "ScheduleFreeState", "ScaleByLBFGSState"),
}
# States of the optimizer of a recipe.
_OURS = ("SkipNonfiniteState", "MasterParamsState")
_ALLOWED = (_core.FLOAT32, np.dtype(jnp.bfloat16))


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True)
class MomentState:
    """State of `moment_dtype`. Paths of the inner state are those without it.

    Attributes:
      count: int32 scalar, the number of updates, from which the random bits follow.
      inner_state: the state of the inner transformation, with moments in the dtype.
    """

    count: jax.Array
    inner_state: PyTree

    def tree_flatten_with_keys(self) -> tuple[Any, None]:
        key = jax.tree_util.GetAttrKey(MOMENT_COUNT)
        return ((key, self.count), (_core.HiddenKey(), self.inner_state)), None

    @classmethod
    def tree_unflatten(cls, _: None, children: tuple[Any, ...]) -> MomentState:
        return cls(*children)


def moment_dtype(
    inner: optax.GradientTransformation, dtype: DTypeLike = jnp.bfloat16
) -> optax.GradientTransformationExtraArgs:
    """Stores the moments of an optimizer in bfloat16, and updates them in FP32.

    First moments are rounded to nearest. Averages of squares, and averages with a decay close to 1,
    are rounded up or down at random so that their expected value is exact; rounded to nearest, an
    average with a decay of 0.999 stops at a wrong value. The random bits are a hash of the step,
    the number of the array and the index of the element: a run that is resumed, or sharded in
    another way, is bit-identical. Counts, scales, norms, growing sums and copies of parameters stay
    in FP32, and so do the states of transformations that jaxmp does not know.

    AdamW then stores 4 bytes instead of 8 for each parameter, and a step moves 8 bytes less.
    `[optimizer] moment_dtype = "bfloat16"` of a recipe is the same for `recipe.optimizer`.

    Args:
      inner: an optimizer of optax, or a chain of transformations.
      dtype: bfloat16; float32 returns `inner`.

    Returns:
      An optax transformation, whose state is a `MomentState`.

    Raises:
      CompositionError: for another dtype or `inner`, or a state that already has jaxmp's masters:
        put `moment_dtype` inside of `recipe.optimizer`.

    Warns:
      RecipeWarning: from `init`, for states with FP32 arrays that jaxmp does not know.

    Example:
      >>> tx = moment_dtype(optax.adamw(1e-3))
      >>> state = tx.init(jnp.ones(3))
      >>> state.inner_state[0].mu.dtype, state.inner_state[0].nu.dtype
      (dtype(bfloat16), dtype(bfloat16))
    """
    check_inner(inner)
    inner, dtype = optax.with_extra_args_support(inner), _checked_dtype(dtype)
    if dtype == _core.FLOAT32:
        return inner

    def init_fn(params: PyTree) -> PyTree:
        state = inner.init(params)
        is_ours = lambda node: type(node).__name__ in _OURS
        if any(map(is_ours, jax.tree.leaves(state, is_leaf=is_ours))):
            raise CompositionError(
                "moment_dtype received an optimizer of a recipe. Put it inside: "
                "recipe.optimizer(jaxmp.optim.moment_dtype(inner, jnp.bfloat16))."
            )
        if unknown := list(dict.fromkeys(_unknown_owners(state))):
            more = f" and {len(unknown) - 3} others" if len(unknown) > 3 else ""
            _core.warn_user(
                f"moment_dtype does not know the states {', '.join(unknown[:3])}{more} of this "
                "optimizer. Their arrays stay in FP32."
            )
        narrow = lambda leaf, _: leaf.astype(dtype) if leaf.dtype == _core.FLOAT32 else leaf
        return MomentState(jnp.zeros((), jnp.int32), _map_moments(narrow, state))

    def update_fn(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: object
    ) -> tuple[PyTree, PyTree]:
        dtypes: list[Any] = []

        def widen(leaf: jax.Array, _: str) -> jax.Array:
            dtypes.append(leaf.dtype)
            return leaf.astype(_core.FLOAT32) if leaf.dtype == dtype else leaf

        wide = _map_moments(widen, state.inner_state)
        updates, new = inner.update(updates, wide, params, **extra_args)
        numbers, seed = itertools.count(), _mixed(state.count.astype(jnp.uint32))

        def narrow(leaf: jax.Array, rounding: str) -> jax.Array:
            number = next(numbers)
            if rounding == NEAREST or dtypes[number] != dtype or leaf.dtype != _core.FLOAT32:
                return leaf.astype(dtypes[number])
            return with_noise(leaf, _hash(seed, number, leaf.shape), dtype)

        return updates, MomentState(
            jnp.asarray(optax.safe_increment(state.count)), _map_moments(narrow, new)
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _fields_of(node: object) -> dict[str, str] | None:
    """Returns field -> rounding for a state of optax; None for other objects."""
    is_state = isinstance(node, tuple) and type(node).__module__.startswith("optax.")
    return _FIELDS.get(type(node).__name__) if is_state else None


def _is_known(node: object) -> bool:
    return _fields_of(node) is not None


def _map_moments(fn: Callable[[jax.Array, str], jax.Array], state: PyTree) -> PyTree:
    """Applies a function of a moment and its rounding, always in the same order."""

    def convert(node: Any) -> Any:
        fields = _fields_of(node) or {}
        new = {
            field: jax.tree.map(lambda leaf, how=rounding: fn(leaf, how), getattr(node, field))
            for field, rounding in fields.items()
        }
        return node._replace(**new) if new else node

    return jax.tree.map(convert, state, is_leaf=_is_known)


def _unknown_owners(node: Any, owner: str = "", path: str = "") -> Iterator[str]:
    """Yields the states that have FP32 arrays, and are in no table.

    Args:
      node: an optimizer state, or a part of it.
      owner: the class of the innermost state that contains the part; "" for plain containers,
        which are described by the path of their first array.
      path: the path of the part.
    """
    if _is_known(node):
        return
    if jax.tree_util.all_leaves([node]):
        if getattr(node, "ndim", 0) and node.dtype == _core.FLOAT32 and owner not in _WIDE:
            yield owner or f"state{path}"
        return
    if not isinstance(node, (dict, list)) and type(node) is not tuple:
        owner = type(node).__name__
    children = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)[0]
    for keys, child in children:
        # The inner state of a wrapper, such as `MultiSteps`, has another owner.
        is_inner = "state" in jax.tree_util.keystr(keys)
        below = f"{path}{jax.tree_util.keystr(keys)}"
        yield from _unknown_owners(child, "" if is_inner else owner, below)


def _checked_dtype(dtype: DTypeLike) -> np.dtype:
    with contextlib.suppress(PolicyError):
        if (canonical := _core.canonical_dtype(dtype)) in _ALLOWED:
            return canonical
    raise CompositionError(
        f"dtype={dtype!r} of moment_dtype is not allowed. Allowed: 'float32' and 'bfloat16'. "
        "float16 cannot represent squares of small gradients, and 8 bits round them to zero. "
        "Write moment_dtype(inner, jnp.bfloat16)."
    )


def _hash(seed: jax.Array, number: int, shape: tuple[int, ...]) -> jax.Array:
    """Returns uniform random uint32 of a shape for a step and an array of the state.

    They are a function of the step, the number of the array and the row-major index of the
    element, so that they do not depend on the sharding. Two rounds of the finalizer of MurmurHash3
    decorrelate neighbors, arrays and steps.
    """
    index = jnp.zeros(shape, jnp.uint32)
    strides = np.cumprod((1, *shape[:0:-1]), dtype=np.uint64)[::-1]
    for axis in range(len(shape)):  # none for a scalar
        step = np.uint32(int(strides[axis]) % 2**32)
        index = index + lax.broadcasted_iota(jnp.uint32, shape, axis) * step
    of_array = np.uint32((number + 1) * 0x9E3779B9 % 2**32)
    return _mixed(_mixed(index + seed) ^ (seed * of_array + of_array))


def _mixed(bits: jax.Array) -> jax.Array:
    """Returns the finalizer of MurmurHash3 (Appleby 2011), a bijection of 32 bits."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        bits = (bits ^ (bits >> np.uint32(shift))) * np.uint32(factor)
    return bits ^ (bits >> np.uint32(16))
