"""Checks that no transformation around `mixed_precision` breaks training silently."""

from __future__ import annotations

from typing import Any

import jax
import optax

from jaxmp._core._typing import PyTree
from jaxmp.errors import CompositionError
from jaxmp.optim._find import find, guard_of
from jaxmp.optim._master import MasterParamsState, master_states
from jaxmp.optim._skip import SkipNonfiniteState


def check_composition(opt_state: PyTree) -> None:
    """Checks that no transformation around `mixed_precision` breaks it.

    Args:
      opt_state: the optimizer state (or its shapes) as `tx.init` returns it.

    Raises:
      CompositionError: with the wrapper, the reason, and the composition that works.
    """
    guard_of(opt_state)
    _check_node(opt_state)


# Wrappers that pass gradients and updates through unchanged, for their parameters.
_TRANSPARENT = (
    optax.MaskedState,
    optax.PartitionState,
    optax.InjectHyperparamsState,
    optax.InjectStatefulHyperparamsState,
)


def _check_node(node: PyTree) -> None:
    if isinstance(node, SkipNonfiniteState):
        if find(node.inner_state, SkipNonfiniteState):
            raise CompositionError(
                "mixed_precision inside mixed_precision: two guards and two loss scales for the "
                "same parameters. Apply the recipe once: tx = recipe.optimizer(inner)."
            )
        return
    if not find(node, SkipNonfiniteState) and not _has_masters(node):
        return
    if isinstance(node, optax.MultiStepsState):
        raise CompositionError(
            "optax.MultiSteps around mixed_precision: an overflow would remain in its accumulator "
            "forever. Accumulate inside: recipe.optimizer(optax.MultiSteps(inner, every_k)),"
            " or use value_and_grad(..., microbatches=k)."
        )
    if isinstance(node, optax.ApplyIfFiniteState):
        raise CompositionError(
            "optax.apply_if_finite around mixed_precision hides overflows from the loss scale, "
            "which would never back off. Remove it: recipe.optimizer(inner) already skips such "
            "steps."
        )
    if _has_masters(node):
        _check_assignable(node)
    for child in _children(node):
        _check_node(child)


def _has_masters(node: PyTree) -> bool:
    return any(jax.tree.leaves(state.masters) for state in master_states(node))


def _check_assignable(node: PyTree) -> None:
    """Raises if a wrapper changes updates, which assignment from masters would ignore."""
    if isinstance(node, (*_TRANSPARENT, MasterParamsState)):
        return
    if _is_chain(node):
        parts = list(node.values()) if isinstance(node, dict) else list(node)
        for index, part in enumerate(parts[:-1]):
            if _has_masters(part):
                raise CompositionError(
                    f"Part {index + 1} of {len(parts)} of an optax.chain has masters of 16-bit "
                    "parameters, and other parts follow it. The parameters are assigned from the "
                    "masters, so that the following parts would be ignored. Put them inside: "
                    "recipe.optimizer(optax.chain(inner, ...)); for groups of parameters use "
                    "optax.multi_transform."
                )
        return
    raise CompositionError(
        f"{type(node).__name__} around masters of 16-bit parameters: the parameters are assigned "
        "from the masters, so that changes of the updates by this wrapper would be ignored. Put it "
        "inside: recipe.optimizer(wrapper(inner)), or store the parameters in FP32."
    )


def _is_chain(node: PyTree) -> bool:
    plain_tuple = isinstance(node, tuple) and not hasattr(node, "_fields")
    return plain_tuple or isinstance(node, dict)


def _children(node: PyTree) -> list[Any]:
    """Returns the direct children of a pytree node; none for a leaf."""
    if isinstance(node, optax.PartitionState):
        return list(node.inner_states.values())
    flat = jax.tree.leaves(node, is_leaf=lambda x: x is not node)
    return [] if len(flat) == 1 and flat[0] is node else flat
