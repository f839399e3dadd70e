"""States of all FP8 layers during one training step, which a few kernels read and write.

Each layer has a separate state of eight small arrays. If each layer updates it, a program for a
GPU starts about eleven small kernels per layer. `begin_step` and `finish_step` process the states
of all layers together, outside of the differentiated function. Between them, a layer receives its
*active state*, with the same names and other shapes:

- `X_amax`, `[3]`: the stored amax, and the largest and the newest entry of the history. Its
  gradient contains the active amax: 0 if it is that of this step, -1 if there is none.
- `X_amax_history`, `[partials, 1]`: zeros. Its gradient contains partial maxima of the magnitudes
  in this step, so that one kernel computes the maxima of all tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmp import _core
from jaxmp.fp8._operands import amax
from jaxmp.fp8._state import AGE, OPERANDS, USES, State, settled, to_float32

# Number of partial maxima of a tensor: enough thread blocks to read it at full speed.
PARTIALS = 4096


def can_begin(state: State) -> bool:
    """Returns True if the layers that share the arrays of a state are stacked on first axes."""
    stack = state[AGE].shape
    return all(
        state[f"{x}_amax"].shape == stack
        and state[f"{x}_amax_history"].shape[:-1] == stack
        and state[f"{x}_amax_history"].ndim == len(stack) + 1
        for x in OPERANDS
    )


def _groups(states: Sequence[State]) -> list[list[int]]:
    """Returns the indices of the states with equal shapes."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, state in enumerate(states):
        groups.setdefault(state[f"{OPERANDS[0]}_amax_history"].shape, []).append(index)
    return list(groups.values())


# Functions of one layer are jitted, so that all layers share one trace and, in StableHLO, one
# function. XLA inlines them, and runs the same operation of all layers in one kernel.


def _of_operands(state: State, leaf: str) -> jax.Array:
    """Returns `[3, ...]`, a leaf of each operand of a layer."""
    return jnp.stack([state[f"{x}_{leaf}"] for x in OPERANDS])


@jax.jit
def _stored(state: State) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the settled age of a state, and the amaxes and histories of its operands."""
    state = settled(state)
    return state[AGE], _of_operands(state, "amax"), _of_operands(state, "amax_history")


@jax.jit
def _rows(known: jax.Array) -> list[jax.Array]:
    return list(known)


def begin_states(states: Sequence[State], partials: int) -> list[State]:
    """Returns the active states of layers before a step.

    Args:
      states: states in float32 for which `can_begin` is True.
      partials: number of partial maxima of each tensor; 1 for tensors on several devices. Layers
        that are stacked, as in a scan, have 1: each step measures a tensor before it is quantized,
        because XLA for GPUs would copy the operands of a branch in each iteration of a loop.
    """
    active: list[State] = [{} for _ in states]
    for indices in _groups(states):
        ages, amaxes, histories = zip(*(_stored(states[index]) for index in indices), strict=True)
        history = jnp.concatenate(histories)
        stored = jnp.concatenate(amaxes)
        known = jnp.stack([stored, jnp.max(history, axis=-1), history[..., 0]], axis=-1)
        stack = history.shape[1:-1]
        # All layers have the same arrays of zeros, of which only the gradients differ.
        count = 1 if stack else partials
        uses, maxima = jnp.zeros(stack, _core.FLOAT32), jnp.zeros((*stack, count, 1), _core.FLOAT32)
        parts = lax.split(known, [3] * len(indices))
        for index, age, part in zip(indices, ages, parts, strict=True):
            active[index] = {AGE: age, USES: uses}
            for operand, row in zip(OPERANDS, _rows(part), strict=True):
                active[index][f"{operand}_amax"] = row
                active[index][f"{operand}_amax_history"] = maxima
    return active


@jax.jit
def _measured(gradient: State) -> tuple[jax.Array, jax.Array]:
    """Returns the uses of a layer and all partial maxima, from the gradient of its state."""
    gradient = to_float32(gradient)
    return gradient[USES][None], _of_operands(gradient, "amax_history")


@jax.jit
def _finished(new: State, old: State, is_used: jax.Array, latest: jax.Array) -> State:
    """Returns the state of a layer after a step; `latest` has the amaxes of its operands."""
    new, is_used, settled_old = to_float32(new), is_used[0], settled(old)
    ran = {AGE: new[AGE], USES: lax.full_like(old[USES], 1)}
    state = {leaf: jnp.where(is_used, value, old[leaf]) for leaf, value in ran.items()}
    # A layer that ran in FP8 has the age 1; see `rest`.
    is_reset = is_used & (ran[AGE] == np.float32(0))
    for place, operand in enumerate(OPERANDS):
        name = f"{operand}_amax"
        active = new[name][..., 0]
        active = jnp.where(active == np.float32(0), latest[place], active)
        active = jnp.where(lax.is_finite(active) & (active > 0), active, np.float32(0))
        state[name] = jnp.where(is_used, active, old[name])
        name = f"{operand}_amax_history"
        is_new = is_used & lax.is_finite(latest[place])
        grown = _grown(settled_old[name], old[name], latest[place], is_new)
        state[name] = jnp.where(is_reset[..., None], np.float32(0), grown)
    return state


def finish_states(gradients: Sequence[State], before: Sequence[State]) -> list[State]:
    """Returns the states of layers after a step.

    Args:
      gradients: the gradients of the active states, in float32 or `fm32`.
      before: the states before the step, in the same order. A layer that did not run keeps its
        state; so does the history of a tensor whose amax is not finite.
    """
    after: list[State] = [{} for _ in before]
    for indices in _groups(before):
        uses, partials = zip(*(_measured(gradients[index]) for index in indices), strict=True)
        # Without the barrier, XLA would copy each constant result in a separate kernel.
        used = lax.optimization_barrier(jnp.concatenate(uses)) > np.float32(0)
        latest = amax(jnp.concatenate(partials), (-2, -1))[..., 0, 0]
        count = len(indices)
        parts = zip(lax.split(used, [1] * count), lax.split(latest, [3] * count), strict=True)
        for index, (is_used, maxima) in zip(indices, parts, strict=True):
            after[index] = _finished(gradients[index], before[index], is_used, maxima)
    return after


def _grown(history: jax.Array, kept: jax.Array, latest: jax.Array, is_new: jax.Array) -> jax.Array:
    """Returns a history with a new first entry, or `kept`.

    XLA for GPUs runs all of these in one kernel, but not if they are slices of a stacked array, or
    concatenations.
    """
    last = [(0, 0, 0)] * (history.ndim - 1)
    older = lax.pad(history, np.float32(0), [*last, (1, -1, 0)])
    is_first = lax.broadcasted_iota(np.int32, history.shape, history.ndim - 1) == 0
    grown = jnp.where(is_first, latest[..., None], older)
    return jnp.where(is_new[..., None], grown, kept)
