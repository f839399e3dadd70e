"""One optimizer step on parameters: what a train state and an NNX optimizer share."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxmp._core import _trees
from jaxmp.optim._find import find
from jaxmp.optim._master import MasterParamsState, add_update, assign, expand
from jaxmp.optim._skip import SkipNonfiniteState


class Applied(NamedTuple):
    """What a step gives.

    Attributes:
      params: the parameters; cast from their masters where they have one.
      opt_state: the optimizer state.
      applied: bool scalar, False for a skipped step; None: nothing guards the optimizer.
    """

    params: Any
    opt_state: Any
    applied: jax.Array | None


def apply_update(
    tx: optax.GradientTransformation, grads: Any, opt_state: Any, params: Any, **extra_args: Any
) -> Applied:
    """Updates parameters, or leaves everything but loss scale and counters as it was.

    State that wraps the guarded part of the optimizer (a schedule's count, momentum outside) is
    restored on a skipped step too.
    """
    update = optax.with_extra_args_support(tx).update
    if isinstance(grads, optax.LookaheadParams):
        # The loss reads the fast parameters, and `optax.lookahead` takes their gradients alone.
        grads = grads.fast
    if _is_whole(opt_state):
        expanded = expand(opt_state, params, everything=True)
        _, new_state = update(grads, expanded, params, **extra_args)
        return Applied(*assign(params, new_state), _applied(new_state))
    expanded = expand(opt_state, params)
    if _applied(opt_state) is not None:
        grads = _all_or_none(grads)
    updates, new_state = update(grads, expanded, params, **extra_args)
    new_params = jax.tree.map(add_update, params, updates)
    applied = _applied(new_state)
    if applied is not None:
        new_state = _restore(applied, new_state, expanded)
        new_params = _trees.select(applied, new_params, params)
    return Applied(*assign(new_params, new_state), applied)


def _all_or_none(grads: Any) -> Any:
    """All gradients NaN if one is not finite: each guard sees its own part of them only."""
    finite = _trees.all_finite(grads)
    return jax.tree.map(
        lambda g: (
            _trees.select_leaf(finite, g, jnp.full_like(g, jnp.nan)) if _trees.is_inexact(g) else g
        ),
        grads,
    )


def _is_whole(opt_state: Any) -> bool:
    """Whether the optimizer is `mixed_precision` itself, with nothing around it."""
    return _is_guarded(opt_state) and isinstance(opt_state.inner_state, MasterParamsState)


def _is_guarded(node: Any) -> bool:
    return isinstance(node, SkipNonfiniteState)


def _applied(opt_state: Any) -> jax.Array | None:
    states = [node for _, node in find(opt_state, SkipNonfiniteState)]
    flags = [node.stats.last_finite for node in states if node.settings.guarded]
    return functools.reduce(lax.bitwise_and, flags) if flags else None


def _restore(applied: jax.Array, new: Any, old: Any) -> Any:
    """The old state, but for loss scales and counters, where one of the guards has skipped.

    Several guards, each for a group of the parameters, count and adjust as one: a group whose own
    masters fit must not raise its loss scale while another group backs off.
    """
    several = len(find(old, SkipNonfiniteState)) > 1

    def restore(n: Any, o: Any) -> Any:
        if not _is_guarded(n):
            return _trees.select(applied, n, o)
        n = dataclasses.replace(n, inner_state=_trees.select(applied, n.inner_state, o.inner_state))
        if not (several and n.settings.guarded):
            return n
        return dataclasses.replace(
            n,
            loss_scale=o.loss_scale.adjust(applied),
            # Which group the gradient belongs to that was not finite is not known.
            stats=o.stats.after(
                applied, o.loss_scale.at_floor, n.stats.overflow_leaf, o.stats.nonfinite_leaf
            ),
        )

    return jax.tree.map(restore, new, old, is_leaf=_is_guarded)
