"""Parameters that cannot represent their new values, as the states of `master_params` report them.

`skip_nonfinite` reads these reports from the state of its inner transformation.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable

import jax
import jax.numpy as jnp
from jax import lax

from jaxmp._core import _compat
from jaxmp._core._typing import PyTree
from jaxmp.optim._master import MasterParamsState, map_master_states, master_states


def can_overflow(state: PyTree) -> bool:
    """Returns True if a step can fail because a parameter cannot represent its new value."""
    return any(node.can_overflow for node in master_states(state))


def all_fit(state: PyTree) -> jax.Array:
    """Returns True if no report in the state requires that the step is skipped."""
    return functools.reduce(lax.bitwise_and, (node.fits for node in master_states(state)))


def overflow_leaf(state: PyTree) -> jax.Array:
    """Returns the index of the first overflow among all parameters; -1 if there is none."""
    first, offset = jnp.array(-1, jnp.int32), 0
    for node in master_states(state):
        index = jnp.where(node.overflow >= 0, node.overflow + offset, -1)
        first = lax.select(first >= 0, first, index)
        offset += len(node.layout.storage)
    return first


def agree_on_overflow(state: PyTree, axes: tuple[Hashable, ...]) -> PyTree:
    """Combines all reports over devices, which may have different parts of the parameters."""

    def agree(node: MasterParamsState) -> MasterParamsState:
        overflow, fits = _compat.largest(node.overflow, axes), _compat.agree(node.fits, axes)
        return dataclasses.replace(node, overflow=overflow, fits=fits)

    return map_master_states(agree, state) if axes else state
