"""One optimizer step on parameters, for `TrainState` and `jaxmp.nnx.Optimizer`."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxmp._core import _trees
from jaxmp._core._typing import PyTree
from jaxmp.optim._assign import assign, unpack_masters, unpack_parameters
from jaxmp.optim._find import find
from jaxmp.optim._master import MasterParamsState, add_update
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
    if _is_mixed_precision(opt_state):
        unpacked = unpack_parameters(opt_state, params)
        _, new_state = update(grads, unpacked, params, **extra_args)
        return Applied(*assign(params, new_state), _applied(new_state))
    unpacked = unpack_masters(opt_state, params)
    if _applied(opt_state) is not None:
        grads = _poison_all(grads)
    updates, new_state = update(grads, unpacked, params, **extra_args)
    new_params = jax.tree.map(add_update, params, updates)
    applied = _applied(new_state)
    if applied is not None:
        new_state = _restore(applied, new_state, unpacked)
        new_params = _trees.select(applied, new_params, params)
    return Applied(*assign(new_params, new_state), applied)


def _poison_all(grads: PyTree) -> PyTree:
    """Sets all gradients to NaN if one is not finite, because each guard sees only its group."""
    finite = _trees.all_finite(grads)
    return jax.tree.map(
        lambda g: (
            _trees.select_leaf(finite, g, jnp.full_like(g, jnp.nan)) if _trees.is_inexact(g) else g
        ),
        grads,
    )


def _is_mixed_precision(opt_state: PyTree) -> bool:
    """Returns True for the state of `mixed_precision` itself, without wrappers."""
    return _is_guarded(opt_state) and isinstance(opt_state.inner_state, MasterParamsState)


def _is_guarded(node: PyTree) -> bool:
    return isinstance(node, SkipNonfiniteState)


def _applied(opt_state: PyTree) -> jax.Array | None:
    states = [node for _, node in find(opt_state, SkipNonfiniteState)]
    flags = [node.stats.last_finite for node in states if node.settings.guarded]
    return functools.reduce(lax.bitwise_and, flags) if flags else None


def _restore(applied: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    """Restores the old state, except loss scales and counters, if any of the guards skipped.

    Several guards, each for a group of the parameters, count and adjust together: a group whose own
    masters fit must not raise its loss scale while another group backs off.
    """
    several = len(find(old, SkipNonfiniteState)) > 1

    def restore(n: PyTree, o: PyTree) -> PyTree:
        if not _is_guarded(n):
            return _trees.select(applied, n, o)
        n = dataclasses.replace(n, inner_state=_trees.select(applied, n.inner_state, o.inner_state))
        if not (several and n.settings.guarded):
            return n
        return dataclasses.replace(
            n,
            loss_scale=o.loss_scale.adjust(applied),
            # The group of the non-finite gradient is unknown here.
            stats=o.stats.after(
                applied, o.loss_scale.at_floor, n.stats.overflow_leaf, o.stats.nonfinite_leaf
            ),
        )

    return jax.tree.map(restore, new, old, is_leaf=_is_guarded)
