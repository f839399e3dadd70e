"""One optimizer step on parameters: what a train state and an NNX optimizer share."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import optax
from jax import lax

from jaxmp import _trees
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
    expanded = expand(opt_state, params, everything=_is_whole(opt_state))
    update = optax.with_extra_args_support(tx).update
    updates, new_state = update(grads, expanded, params, **extra_args)
    new_params = params if _is_whole(opt_state) else jax.tree.map(add_update, params, updates)
    applied = _applied(new_state)
    if applied is not None and _has_leaves_outside(new_state):
        new_state = _restore_outside(applied, new_state, expanded)
        new_params = _trees.select(applied, new_params, params)
    return Applied(*assign(new_params, new_state), applied)


def _is_whole(opt_state: Any) -> bool:
    """Whether the optimizer is `mixed_precision` itself, with nothing around it."""
    return _is_guarded(opt_state) and isinstance(opt_state.inner_state, MasterParamsState)


def _is_guarded(node: Any) -> bool:
    return isinstance(node, SkipNonfiniteState)


def _applied(opt_state: Any) -> jax.Array | None:
    states = [node for _, node in find(opt_state, SkipNonfiniteState)]
    flags = [node.stats.last_finite for node in states if node.settings.guarded]
    return functools.reduce(lax.bitwise_and, flags) if flags else None


def _has_leaves_outside(opt_state: Any) -> bool:
    return not all(map(_is_guarded, jax.tree.leaves(opt_state, is_leaf=_is_guarded)))


def _restore_outside(applied: jax.Array, new: Any, old: Any) -> Any:
    """The guarded parts have kept their own; the rest is kept here."""
    return jax.tree.map(
        lambda n, o: n if _is_guarded(n) else _trees.select(applied, n, o),
        new,
        old,
        is_leaf=_is_guarded,
    )
