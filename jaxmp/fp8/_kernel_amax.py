"""Amaxes of kernels that the optimizer step measures for `CurrentScaling`.

The optimizer step writes each kernel, so that XLA measures it without reading it again. The next
step then scales it with its own amax, and saves one pass over each kernel.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmp._core import _compat
from jaxmp._core._dtypes import FLOAT32
from jaxmp._core._trees import leaves_with_path
from jaxmp._core._typing import Array, PyTree
from jaxmp.fp8._operands import amax, partial_maxima
from jaxmp.fp8._state import ACTIVE_AMAX, KERNEL_AMAX, PREFIX
from jaxmp.fp8._step_state import PARTIALS

# Name of the parameter that FP8 layers of Flax multiply.
_KERNEL = "kernel"


def kernel_amaxes(states: PyTree) -> list[int]:
    """Locates the states of `CurrentScaling` in `jax.tree.leaves(states)`."""
    return list(_kernel_amaxes(jax.tree.structure(states)))


# Cached, because each step reads the locations several times.
@functools.lru_cache(maxsize=64)
def _kernel_amaxes(structure: Any) -> tuple[int, ...]:
    names = {KERNEL_AMAX, PREFIX + KERNEL_AMAX}
    flat = leaves_with_path(structure.unflatten(range(structure.num_leaves)))
    return tuple(index for index, (path, _) in enumerate(flat) if path and path[-1] in names)


def measure_kernels(params: PyTree, states: PyTree) -> PyTree:
    """Writes the amaxes of kernels into the states of `CurrentScaling(kernel_amax="optimizer")`.

    `jaxmp.TrainState.apply_gradients` and `jaxmp.nnx.Optimizer.update` call this function. Call it
    in a training loop without them, after the update, and whenever you replace kernels of a model
    that has trained with other kernels: a stored amax that is too small saturates large elements.

    Args:
      params: the parameters. The kernel of a state is the parameter of the same module with the
        name "kernel", or the parameter at the path of the state.
      states: the collection `_overwrite_with_gradient`. States of `DelayedScaling` are returned
        unchanged. An amax is 0, which means unknown, if there is no such kernel, or if it is not
        clear along which axes a kernel of several layers is stacked.

    Returns:
      The states, in the same structure.

    Example:
      >>> scaling = jaxmp.fp8.CurrentScaling(kernel_amax="optimizer")
      >>> params = {"up": jnp.full((16, 32), -3.0)}
      >>> states = {"up": jaxmp.fp8.init_state(scaling)}
      >>> float(measure_kernels(params, states)["up"]["exact_kernel_amax"])
      3.0
    """
    indices = kernel_amaxes(states)
    if not indices:
        return states
    leaves, structure = jax.tree.flatten(states)
    for index in indices:
        leaves[index] = jnp.zeros_like(leaves[index])
    located = _locate(params, states)
    for index, largest in _measure(located, leaves).items():
        leaves[index] = largest
    return structure.unflatten(leaves)


def activate(params: PyTree, states: PyTree) -> PyTree:
    """Returns the states that the matmuls read, before a step.

    The states of kernels that are found have the shape `ACTIVE_AMAX` and the amax of the kernel.
    Amaxes that are unknown, as in the first step, are measured here, in one branch for all layers:
    a branch per layer would stop a GPU as often. The other states do not change, and their matmuls
    measure the kernel.

    Args:
      params: the parameters with which the step differentiates.
      states: the collection `_overwrite_with_gradient`.
    """
    leaves, structure = jax.tree.flatten(states)
    located = _locate(params, states)
    located = {i: kernel for i, kernel in located.items() if leaves[i].dtype == FLOAT32}
    if not located:
        return states
    stored = {index: leaves[index] for index in located}
    smallest = jnp.min(jnp.concatenate([leaf.reshape(-1) for leaf in stored.values()]))
    are_known = smallest > np.float32(0)
    amaxes = lax.cond(are_known, lambda: stored, lambda: _measure(located, leaves))
    for index, largest in amaxes.items():
        leaves[index] = largest.reshape(*largest.shape, *ACTIVE_AMAX)
    return structure.unflatten(leaves)


def _locate(params: PyTree, states: PyTree) -> dict[int, Array]:
    """Returns the kernels of states, with the axes of stacked layers first, by index of the leaf.

    Kernels are missing if they are not found, or if an axis is ambiguous. All are missing where it
    is not known which devices have the same kernel.
    """
    indices = kernel_amaxes(states)
    if not indices or _compat.is_in_unchecked_shard_map():
        return {}
    kernels = dict(leaves_with_path(params))
    located = {}
    for index, (path, leaf) in enumerate(leaves_with_path(states)):
        if index in indices:
            module = path[:-1]
            if module and module[0].isdigit() and (*module, _KERNEL) not in kernels:
                # States of NNX are below the number of their object.
                module = module[1:]
            kernel = kernels.get((*module, _KERNEL), kernels.get(module))
            axes = None if kernel is None else _stacked_axes(kernel.shape, leaf.shape)
            if kernel is not None and axes is not None:
                located[index] = jnp.moveaxis(kernel, axes, range(len(axes)))
    return located


def _stacked_axes(shape: tuple[int, ...], stack: tuple[int, ...]) -> tuple[int, ...] | None:
    """Returns the axes of a kernel along which layers are stacked; None if they are ambiguous."""
    orders = itertools.permutations(range(len(shape)), len(stack))
    matches = [axes for axes in orders if tuple(shape[axis] for axis in axes) == stack]
    return matches[0] if len(matches) == 1 else None


def _measure(located: dict[int, Array], leaves: list[Any]) -> dict[int, jax.Array]:
    """Returns the amaxes of kernels from `_locate`; `leaves` are those of the states."""
    stacks: dict[tuple[int, ...], list[int]] = {}
    for index in located:
        stacks.setdefault(leaves[index].shape, []).append(index)
    amaxes = {}
    for group in stacks.values():
        # One kernel of a program computes the maxima of all layers.
        partials = jnp.stack([_partials(located[index], leaves[index]) for index in group])
        maxima = amax(partials, (partials.ndim - 1,))[..., 0]
        amaxes |= dict(zip(group, maxima, strict=True))
    return {index: amaxes[index].astype(leaves[index].dtype) for index in located}


def _partials(kernel: Any, like: jax.Array) -> jax.Array:
    """Returns partial maxima of a kernel, over all devices that share its state."""
    mesh = getattr(jax.typeof(kernel).sharding, "mesh", None)
    count = PARTIALS if mesh is None or mesh.size <= 1 else 1
    maxima = partial_maxima(kernel, like.ndim, count)
    axes = _compat.varying_axes(maxima) - _compat.varying_axes(like)
    return _compat.largest(maxima, tuple(sorted(axes, key=str))) if axes else maxima
