"""One optimizer step on parameters, for `TrainState` and `jaxmp.nnx.Optimizer`."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxmp import _core
from jaxmp._core import PyTree
from jaxmp.optim._assign import assign, set_master_params, unpack_masters
from jaxmp.optim._find import guard_of
from jaxmp.optim._layout import MasterParamsState
from jaxmp.optim._losses import with_scaled_losses
from jaxmp.optim._master import add_update
from jaxmp.optim._skip import SkipNonfiniteState


class Applied(NamedTuple):
    """Result of a step.

    Attributes:
      params: the parameters, cast from their masters if they have any.
      opt_state: the optimizer state.
      applied: bool scalar, False for a skipped step; None if the optimizer skips no steps.
    """

    params: PyTree
    opt_state: PyTree
    applied: jax.Array | None


def apply_update(
    tx: optax.GradientTransformation,
    grads: PyTree,
    opt_state: PyTree,
    params: PyTree,
    **extra_args: object,
) -> Applied:
    """Updates parameters; a skipped step changes only loss scales and counters.

    On a skipped step, the state of transformations around `skip_nonfinite` (the count of a
    schedule, momentum) is restored as well.
    """
    update = optax.with_extra_args_support(tx).update
    if isinstance(grads, optax.LookaheadParams):
        # The loss reads the fast parameters, and `optax.lookahead` takes only their gradients.
        grads = grads.fast
    params, opt_state = set_master_params(params, opt_state)
    if _is_of_recipe(opt_state):
        settings = opt_state.settings
        assigning = dataclasses.replace(settings, assigns=True)
        started: Any = dataclasses.replace(opt_state, settings=assigning)
        new: Any = update(grads, started, params, **extra_args)[1]
        params, inner_state = new.inner_state
        new = dataclasses.replace(new, inner_state=inner_state, settings=settings)
        return Applied(params, new, _applied(new))
    unpacked = unpack_masters(opt_state, params)
    if guard := guard_of(opt_state):
        extra_args = with_scaled_losses(extra_args, guard)
    if _applied(opt_state) is not None:
        unpacked = _note_finite(unpacked, _is_finite(grads))
    updates, new_state = update(grads, unpacked, params, **extra_args)
    new_params = jax.tree.map(add_update, params, updates)
    applied = _applied(new_state)
    if applied is not None:
        new_state = _restore(applied, new_state, unpacked)
        new_params = _core.select(applied, new_params, params)
    return Applied(*assign(new_params, new_state), applied)


def _is_finite(grads: PyTree) -> jax.Array:
    """Returns True if all gradients are finite, by the sums of squares that the guard computes."""
    first, _ = _core.check_squares(grads)
    return lax.eq(first, jnp.int32(len(jax.tree.leaves(grads))))


def _note_finite(opt_state: PyTree, finite: jax.Array) -> PyTree:
    """Tells guards, which may see only some gradients or changed ones, if all are finite."""

    def note(node: PyTree) -> PyTree:
        if not _is_guarded(node):
            return node
        stats = dataclasses.replace(node.stats, last_finite=finite)
        settings = dataclasses.replace(node.settings, is_noted=True)
        return dataclasses.replace(node, stats=stats, settings=settings)

    return jax.tree.map(note, opt_state, is_leaf=_is_guarded)


def _is_of_recipe(opt_state: PyTree) -> bool:
    """Returns True for the state of a recipe's optimizer itself, without wrappers."""
    return _is_guarded(opt_state) and isinstance(opt_state.inner_state, MasterParamsState)


def _is_guarded(node: PyTree) -> bool:
    return isinstance(node, SkipNonfiniteState)


def _applied(opt_state: PyTree) -> jax.Array | None:
    guard = guard_of(opt_state)
    return guard.stats.last_finite if guard is not None and guard.settings.guarded else None


def _restore(applied: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    """Restores the old state around the guard if it skipped; it has restored its own."""

    def restore(n: PyTree, o: PyTree) -> PyTree:
        if not _is_guarded(n):
            return _core.select(applied, n, o)
        return dataclasses.replace(n, settings=dataclasses.replace(n.settings, is_noted=False))

    return jax.tree.map(restore, new, old, is_leaf=_is_guarded)
