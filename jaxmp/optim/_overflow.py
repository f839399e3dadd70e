"""States that report parameters which cannot represent their new values.

`skip_nonfinite` reads these reports from the state of its inner transformation, and `master_params`
writes them. Neither depends on the other.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable, Hashable
from typing import Any, Self, TypeGuard

import jax
import jax.numpy as jnp
from jax import lax

from jaxmp._core import _compat
from jaxmp._core._typing import PyTree


class OverflowState(abc.ABC):
    """State of a transformation that casts parameters to storage dtypes.

    Attributes:
      overflow: int32 scalar: index of the first parameter that was too large for its storage dtype
        in the last update; -1 if there is none.
      fits: bool scalar; False if the last step must be skipped for that reason.
    """

    overflow: jax.Array
    fits: jax.Array

    @property
    @abc.abstractmethod
    def can_overflow(self) -> bool:
        """True if `fits` can become False."""

    @property
    @abc.abstractmethod
    def leaf_count(self) -> int:
        """Number of parameters that `overflow` counts."""

    @property
    def has_all_parameters(self) -> bool:
        """True if the state itself contains all new parameters, so emitted updates are not read."""
        return False

    def agree(self, axes: tuple[Hashable, ...]) -> Self:
        """Combines the report over devices, which may have different parts of the parameters."""
        overflow, fits = _compat.largest(self.overflow, axes), _compat.agree(self.fits, axes)
        state: Any = self
        return dataclasses.replace(state, overflow=overflow, fits=fits)


def _is_overflow_state(node: object) -> TypeGuard[OverflowState]:
    return isinstance(node, OverflowState)


def _overflow_states(state: PyTree) -> list[OverflowState]:
    """Returns every OverflowState in `state`, in flattening order."""
    return [
        leaf
        for leaf in jax.tree.leaves(state, is_leaf=_is_overflow_state)
        if _is_overflow_state(leaf)
    ]


def can_overflow(state: PyTree) -> bool:
    """Returns True if a step can fail because a parameter cannot represent its new value."""
    return any(node.can_overflow for node in _overflow_states(state))


def all_fit(state: PyTree) -> jax.Array:
    """Returns True if no report in the state requires that the step is skipped."""
    return functools.reduce(lax.bitwise_and, (node.fits for node in _overflow_states(state)))


def overflow_leaf(state: PyTree) -> jax.Array:
    """Returns the index of the first overflow among all parameters; -1 if there is none."""
    first, offset = jnp.array(-1, jnp.int32), 0
    for node in _overflow_states(state):
        index = jnp.where(node.overflow >= 0, node.overflow + offset, -1)
        first = lax.select(first >= 0, first, index)
        offset += node.leaf_count
    return first


def agree_on_overflow(state: PyTree, axes: tuple[Hashable, ...]) -> PyTree:
    """Combines all reports in the state over devices."""
    if not axes:
        return state
    agree: Callable[[Any], Any] = lambda x: x.agree(axes) if _is_overflow_state(x) else x
    return jax.tree.map(agree, state, is_leaf=_is_overflow_state)
