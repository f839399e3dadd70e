"""Skipping the steps whose gradients are not finite, with the loss scale in the state."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxmp._core import _compat, _trees
from jaxmp._core._dtypes import FLOAT32, sum_dtype
from jaxmp._loss_scale import DynamicLossScale, as_loss_scale
from jaxmp.errors import CompositionError
from jaxmp.optim._master import (
    MasterParamsState,
    check_parameters,
    map_master_states,
    master_states,
)

SKIP_MODES = ("auto", "select", "cond", "none")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SkipStats:
    """What the guard has seen; every field a scalar array.

    Attributes:
      total: int32, steps skipped so far.
      consecutive: int32, steps skipped since the last applied one.
      at_floor: int32, of those, the steps that overflowed with the dynamic loss scale at its floor.
      last_finite: bool, whether the last step was applied; True before the first.
      overflow_leaf: int32, the first parameter whose master was too large for its storage dtype in
        the last step, as an index into the layout of the masters; -1: none.
      nonfinite_leaf: int32, the first parameter whose gradient was not finite in the last step, as
        an index into the gradients; -1: none, or not known.
    """

    total: Any
    consecutive: Any
    at_floor: Any
    last_finite: Any
    overflow_leaf: Any
    nonfinite_leaf: Any

    @classmethod
    def zero(cls, inner_state: Any = ()) -> SkipStats:
        """The counters before the first step."""
        zero = lambda: jnp.zeros((), jnp.int32)
        overflow_leaf, none = _overflow_leaf(inner_state), jnp.array(-1, jnp.int32)
        return cls(zero(), zero(), zero(), jnp.array(True), overflow_leaf, none)

    def after(
        self,
        applied: jax.Array,
        at_floor: jax.Array,
        overflow_leaf: jax.Array,
        nonfinite_leaf: jax.Array,
    ) -> SkipStats:
        """The counters after one more step."""
        zero = jnp.zeros((), jnp.int32)
        skipped = lax.bitwise_not(applied)
        return SkipStats(
            total=self.total + skipped.astype(jnp.int32),
            consecutive=lax.select(applied, zero, self.consecutive + 1),
            at_floor=lax.select(
                applied, zero, self.at_floor + lax.bitwise_and(skipped, at_floor).astype(jnp.int32)
            ),
            last_finite=applied,
            overflow_leaf=overflow_leaf,
            nonfinite_leaf=nonfinite_leaf,
        )


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Settings:
    """What a train state must know of its optimizer; static.

    Attributes:
      guarded: steps with non-finite gradients are skipped.
      axis_name: mapped axes over which `value_and_grad` averages and all devices agree to skip.
      accumulate_dtype: name of the dtype in which microbatches are accumulated.
      reduce_dtype: name of the dtype in which gradients are averaged across devices.
    """

    guarded: bool
    axis_name: tuple[Any, ...]
    accumulate_dtype: str
    reduce_dtype: str


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SkipNonfiniteState:
    """State of `skip_nonfinite`.

    Attributes:
      loss_scale: the loss scale (a pytree); read it with `jaxmp.get_loss_scale`.
      stats: the counters; read them with `jaxmp.get_skip_stats`.
      inner_state: the state of the inner transformation.
      settings: what `TrainState` must know (static).
    """

    loss_scale: Any
    stats: SkipStats
    inner_state: Any
    settings: Settings = dataclasses.field(metadata={"static": True})


def skip_nonfinite(
    inner: optax.GradientTransformation,
    *,
    loss_scale: Any = None,
    skip: str = "auto",
    axis_name: Any = None,
    accumulate_dtype: Any = "float32",
    reduce_dtype: Any = "float32",
) -> optax.GradientTransformationExtraArgs:
    """Applies the inner transformation only to finite gradients, and adjusts the loss scale.

    A step with a non-finite gradient emits zero updates and leaves the inner state as it was: no
    moment, no schedule count, no average moves. Only the loss scale and the counters do. A master
    that its float16 parameter cannot hold counts as such a step too (see `master_params`).

    Args:
      inner: any optax transformation.
      loss_scale: what scaled the loss; adjusted after each step. None: none. The gradients given to
        `update` are unscaled already (`jaxmp.value_and_grad` does that).
      skip: "select" computes the update and discards it, element by element; "cond" branches around
        it; "auto" is "cond" when compiling for CPU, where select multiplies the program's size,
        and "select" otherwise, where it fuses with the update at no cost in memory traffic; "none"
        is no guard at all.
      axis_name: mapped axis (or axes) of `pmap`, `vmap` or `shard_map`. All devices along it agree
        to skip, and the `value_and_grad` of a train state averages loss and gradients over it.
        `init` works outside the mapped function too.
      accumulate_dtype: what `TrainState.value_and_grad` accumulates microbatches in.
      reduce_dtype: what it averages gradients across devices in.

    Returns:
      An optax transformation with a `SkipNonfiniteState`.

    Raises:
      CompositionError: for an unknown `skip`, and for "none" with a dynamic loss scale, which
        could never learn of an overflow.

    Example:
      >>> tx = skip_nonfinite(optax.sgd(0.5))
      >>> state = tx.init(jnp.ones(2))
      >>> updates, state = tx.update(jnp.array([jnp.inf, 1.0]), state)
      >>> updates.tolist(), int(state.stats.total)
      ([0.0, 0.0], 1)
    """
    initial_scale = as_loss_scale(loss_scale)
    _check_mode(skip, initial_scale)
    inner = optax.with_extra_args_support(inner)
    axes = as_axes(axis_name)
    settings = Settings(
        skip != "none", axes, sum_dtype(accumulate_dtype).name, sum_dtype(reduce_dtype).name
    )

    def init_fn(params: Any) -> Any:
        check_parameters(params)
        inner_state = _agree_on_overflow(inner.init(params), _compat.bound_axes(axes))
        return SkipNonfiniteState(
            initial_scale.fresh(), SkipStats.zero(inner_state), inner_state, settings
        )

    def update_fn(
        updates: Any, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[Any, Any]:
        grads = _trees.cast_floating(updates, FLOAT32)
        _compat.check_axes(axes)
        # While the state itself holds every new parameter, nobody reads the updates.
        updates_are_read = not _holds_parameters(state.inner_state)
        alike = params is None or jax.tree.structure(grads) == jax.tree.structure(params)

        def do_update() -> tuple[Any, Any]:
            emitted, inner_state = inner.update(grads, state.inner_state, params, **extra_args)
            inner_state = _agree_on_overflow(inner_state, axes)
            if not updates_are_read:
                return (), inner_state
            return jax.tree.map(_like, grads, emitted) if alike else emitted, inner_state

        if skip == "none":
            emitted, inner_state = do_update()
            return emitted, dataclasses.replace(state, inner_state=inner_state)

        first = _trees.first_nonfinite(grads)
        if axes:
            first = _compat.smallest(first, axes)
        finite = lax.eq(first, jnp.int32(len(jax.tree.leaves(grads))))
        # Gradients of another structure than the parameters have other indices.
        nonfinite_leaf = state.stats.nonfinite_leaf
        if alike:
            nonfinite_leaf = lax.select(finite, jnp.full_like(first, -1), first)
        guarded = _cond_update if _resolve(skip) == "cond" else _select_update
        # A skipped step emits zeros that have the structure of the updates. Gradients have it too,
        # except under wrappers such as `optax.lookahead`, which has two copies of the parameters.
        wanted: Any = grads if updates_are_read else ()
        if updates_are_read and not alike:
            wanted = jax.eval_shape(do_update)[0]
        applied, emitted, inner_state, overflow_leaf = guarded(
            finite, do_update, wanted, state.inner_state
        )
        return emitted, SkipNonfiniteState(
            loss_scale=state.loss_scale.adjust(applied),
            stats=state.stats.after(
                applied, state.loss_scale.at_floor, overflow_leaf, nonfinite_leaf
            ),
            inner_state=inner_state,
            settings=state.settings,
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _check_mode(skip: str, loss_scale: Any) -> None:
    if skip not in SKIP_MODES:
        raise CompositionError(
            f"Unknown skip={skip!r}. Allowed: {', '.join(map(repr, SKIP_MODES))}; "
            "for example skip='auto'."
        )
    if skip == "none" and isinstance(loss_scale, DynamicLossScale):
        raise CompositionError(
            "skip='none' with a dynamic loss scale: without the guard an overflow is neither "
            "skipped nor seen by the scale. Use skip='auto', or a StaticLossScale."
        )


def as_axes(axis_name: Any) -> tuple[Any, ...]:
    """The mapped axes that an `axis_name` argument names."""
    if axis_name is None:
        return ()
    return tuple(axis_name) if isinstance(axis_name, (tuple, list)) else (axis_name,)


def _resolve(skip: str) -> str:
    if skip != "auto":
        return skip
    return "cond" if _compat.target() == "cpu" else "select"


def _holds_parameters(inner_state: Any) -> bool:
    return isinstance(inner_state, MasterParamsState) and inner_state.layout.expanded == "all"


def _like(grad: Any, update: Any) -> Any:
    """An update in its gradient's dtype, so that a skipped step's zeros have the same type."""
    return update if update.dtype == grad.dtype else update.astype(grad.dtype)


def _overflow_leaf(inner_state: Any) -> jax.Array:
    """Index of the first overflowing master among all masters in `inner_state`; -1: none."""
    found, offset = jnp.array(-1, jnp.int32), 0
    for state in master_states(inner_state):
        here = jnp.where(state.overflow >= 0, state.overflow + offset, -1)
        found = lax.select(found >= 0, found, here)
        offset += len(state.layout.storage)
    return found


def _can_overflow(inner_state: Any) -> bool:
    return any(state.layout.can_overflow for state in master_states(inner_state))


def _agree_on_overflow(inner_state: Any, axes: tuple[Any, ...]) -> Any:
    """Each device may hold other parts of the parameters; all skip if one part overflows."""
    if not axes:
        return inner_state

    def agree(state: MasterParamsState) -> MasterParamsState:
        return dataclasses.replace(
            state,
            overflow=_compat.largest(state.overflow, axes),
            fits=_compat.agree(state.fits, axes),
        )

    return map_master_states(agree, inner_state)


def _fit(inner_state: Any) -> jax.Array:
    """Whether every float16 parameter holds its new master."""
    return functools.reduce(lax.bitwise_and, (s.fits for s in master_states(inner_state)))


# (applied, emitted updates, inner state, overflow leaf)
_Outcome = tuple[jax.Array, Any, Any, jax.Array]


def _select_update(finite: jax.Array, do_update: Any, wanted: Any, old_state: Any) -> _Outcome:
    emitted, new_state = do_update()
    applied = lax.bitwise_and(finite, _fit(new_state)) if _can_overflow(old_state) else finite
    if _compat.target() == "cpu":
        # Without the barrier XLA:CPU fuses the check into every select (eight times the HLO).
        applied = lax.optimization_barrier(applied)
    overflow_leaf = lax.select(finite, _overflow_leaf(new_state), jnp.array(-1, jnp.int32))
    emitted = _trees.select(applied, emitted, _zeros_like(wanted))
    # Keys that the inner transformation keeps stay, as they do behind a branch.
    kept = jax.tree.map(functools.partial(_trees.select_leaf, applied), new_state, old_state)
    return applied, emitted, kept, overflow_leaf


def _cond_update(finite: jax.Array, do_update: Any, wanted: Any, old_state: Any) -> _Outcome:
    def reject_update(overflow_leaf: jax.Array) -> _Outcome:
        return jnp.array(False), _zeros_like(wanted), old_state, overflow_leaf

    def try_update() -> _Outcome:
        emitted, new_state = do_update()
        overflow_leaf = _overflow_leaf(new_state)
        accepted = jnp.array(True), emitted, new_state, overflow_leaf
        if not _can_overflow(old_state):
            return accepted
        return lax.cond(_fit(new_state), lambda: accepted, lambda: reject_update(overflow_leaf))

    return lax.cond(finite, try_update, lambda: reject_update(jnp.array(-1, jnp.int32)))


def _zeros_like(tree: Any) -> Any:
    return jax.tree.map(jnp.zeros_like, tree)
