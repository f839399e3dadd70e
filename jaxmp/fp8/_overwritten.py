"""State whose gradient is its next value: the amaxes of FP8 layers.

The amax of an output gradient exists only in the backward pass. As in Flax, the state of FP8 layers
is therefore in a collection `_overwrite_with_gradient` next to `params`. It is differentiated like
parameters, and its "gradient" is its next value. Unlike gradients, such values are never unscaled,
clipped or averaged: they are combined by max over microbatches, devices and uses of a layer.

All handling of this collection is here; `jaxmp.fp8` defines the state of a single layer.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from jaxmp import _core
from jaxmp._core import PyTree, _compat
from jaxmp.errors import CompositionError, JaxmpError
from jaxmp.fp8._state import NAMES, PREFIX, USES, State, is_active, to_float32, to_fm32
from jaxmp.fp8._step_state import PARTIALS, begin_states, can_begin, finish_states

# Flax's name of the collection.
OVERWRITE = "_overwrite_with_gradient"
_LEAVES = frozenset(NAMES)


# ---------------------------------------------------------------------------
# Parameters and state
# ---------------------------------------------------------------------------


def split(tree: PyTree) -> tuple[PyTree, PyTree]:
    """Splits a tree into parameters and overwritten state.

    Args:
      tree: parameters or gradients. A dict with `params` and `_overwrite_with_gradient` at its top
        has overwritten state; in any other tree, all leaves are parameters.

    Returns:
      `(parameters, state)`; the state is None if there is none.
    """
    if isinstance(tree, Mapping) and OVERWRITE in tree and _core.PARAMS in tree:
        return tree[_core.PARAMS], tree[OVERWRITE]
    return tree, None


def names_of_state(node: Mapping[str, Any]) -> frozenset[str]:
    """Returns the names in a mapping of the leaves of a layer's state; empty if it has none."""
    prefixed = frozenset(PREFIX + name for name in NAMES)
    return next((names for names in (_LEAVES, prefixed) if node.keys() >= names), frozenset())


def join(params: PyTree, state: PyTree, like: PyTree) -> PyTree:
    """Joins parameters and state that `split` returned; other collections come from `like`."""
    if state is None:
        return params
    return type(like)({**like, _core.PARAMS: params, OVERWRITE: state})


def select(applied: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    """Returns overwritten state after a step: `old` if the optimizer skipped the step.

    Args:
      applied: bool scalar.
      new: the state of the next step, from gradients; None if there is none.
      old: the state before the step, in the same structure.
    """
    after, before = _Collection(new), _Collection(old, jax.tree.structure(new))
    for location in after.locations:
        after.write(location, _select_state(applied, after.read(location), before.read(location)))
    of_layers = {index for location in after.locations for index in location.values()}
    for index in set(range(len(after.leaves))) - of_layers:
        after.leaves[index] = _core.select_leaf(applied, after.leaves[index], before.leaves[index])
    return after.tree()


# Jitted, so that all layers share one trace and, in StableHLO, one function.
@jax.jit
def _select_state(applied: jax.Array, new: State, old: State) -> State:
    return {name: lax.select_n(applied, old[name], leaf) for name, leaf in new.items()}


def map_params(fn: Callable[[PyTree], PyTree], tree: PyTree) -> PyTree:
    """Applies `fn` to the parameters of a tree, and keeps the state."""
    params, state = split(tree)
    return join(fn(params), state, tree)


def map_leaves(
    of_params: Callable[..., Any], of_state: Callable[..., Any], *trees: tuple[PyTree, ...]
) -> tuple[PyTree, ...]:
    """Maps the leaves of parameters with one function, and those of state with another.

    Args:
      of_params: of one leaf of each group of trees.
      of_state: of the same leaves in the state.
      trees: groups of trees, which the functions receive side by side.
    """

    def map_one(*trees: PyTree) -> PyTree:
        params, states = zip(*map(split, trees), strict=True)
        return join(jax.tree.map(of_params, *params), jax.tree.map(of_state, *states), trees[0])

    return tuple(map_one(*group) for group in zip(*trees, strict=True))


def check_is_absent(params: PyTree) -> None:
    """Checks that the parameters contain no FP8 state, which an optimizer must not change.

    Raises:
      CompositionError: with the call that passes only parameters.
    """
    if split(params)[1] is not None:
        raise CompositionError(
            f"The parameters contain the collection {OVERWRITE!r}, the state of FP8 scaling. It is "
            "not a parameter: its gradient is its next value. Use "
            "jaxmp.TrainState.create(params=variables, tx=tx), which assigns it. In your own loop, "
            "call tx.init(variables['params']) and tx.update(grads['params'], opt_state, "
            f"variables['params']), and take the next {OVERWRITE!r} from grads[{OVERWRITE!r}]."
        )


# ---------------------------------------------------------------------------
# Max-accumulation
# ---------------------------------------------------------------------------


def begin_step(tree: PyTree, is_on_several_devices: bool) -> PyTree:
    """Replaces the states of FP8 layers by their active states, which `finish_step` reads.

    Args:
      tree: a differentiated argument.
      is_on_several_devices: tensors have one maximum per device, which XLA combines by all-reduce.

    Returns:
      A tree of the same structure. States remain as they are where JAX would sum their gradients.
    """
    params, collection = split(tree)
    states = _Collection(collection)
    locations = [each for each in states.locations if can_begin(states.read(each))]
    if _max_accumulates([states.leaves[n] for each in locations for n in each.values()]):
        partials = 1 if is_on_several_devices else PARTIALS
        active = begin_states(list(map(states.read, locations)), partials)
        for location, state in zip(locations, active, strict=True):
            states.write(location, state)
    return join(params, states.tree(), tree)


def without_active(aux: PyTree, before: tuple[PyTree, ...]) -> PyTree:
    """Restores the states in auxiliary data, such as that of `apply(..., mutable=True)`.

    Args:
      aux: auxiliary data of a loss function.
      before: the differentiated arguments, before `begin_step`.
    """
    collections = [state for _, state in map(split, before) if state is not None]
    if not collections:
        return aux
    is_collections = lambda node: isinstance(node, Mapping) and OVERWRITE in node

    def restore(node: PyTree) -> PyTree:
        if not is_collections(node):
            return node
        structure = jax.tree.structure(node[OVERWRITE])
        states = (state for state in collections if jax.tree.structure(state) == structure)
        return type(node)({**node, OVERWRITE: next(states, node[OVERWRITE])})

    return jax.tree.map(restore, aux, is_leaf=is_collections)


def _max_accumulates(arrays: list[Any]) -> bool:
    """Returns True if JAX can combine the gradients of these leaves of states by max."""
    traced = all(isinstance(leaf, Tracer) and leaf.dtype == _core.FLOAT32 for leaf in arrays)
    if not arrays or not traced or _compat.is_in_unchecked_shard_map():
        return False
    return importlib.util.find_spec("flax") is not None


def to_max_accumulated(tree: PyTree) -> PyTree:
    """Converts the states of FP8 layers to `fm32`, in which JAX combines cotangents by max.

    A layer that runs twice, or in each iteration of a scan, has one cotangent per use. In float32,
    JAX would sum them.

    Returns:
      A tree of the same structure. States remain in float32 outside of a trace, where JAX cannot
      add `fm32` arrays, inside `shard_map(..., check_vma=False)`, and if Flax is not installed.
    """
    params, collection = split(tree)
    states = _Collection(collection)
    # Layers share some arrays of active states. Trees of JAX sort the keys of dicts, so that this
    # one, whose keys are addresses, would make each process compile another program.
    arrays = {id(x): x for each in states.locations for x in states.read(each).values()}
    if not _max_accumulates(list(arrays.values())):
        return tree
    converted = dict(zip(arrays, to_fm32(list(arrays.values())), strict=True))
    for location in states.locations:
        state = states.read(location)
        states.write(location, {name: converted[id(leaf)] for name, leaf in state.items()})
    return join(params, states.tree(), tree)


@contextlib.contextmanager
def explain_fm32() -> Iterator[None]:
    """Adds a note about the dtype `fm32` to the errors that a loss function raises."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if not isinstance(error, JaxmpError):
            error.add_note(
                "The FP8 state that the loss receives has the dtype fm32 (fp8_meta32), which "
                "supports only data movement and conversion. If the loss computes with the state "
                "itself, convert it first: variables = jaxmp.fp8.to_float32(variables)."
            )
        raise


# ---------------------------------------------------------------------------
# Layers that did not run
# ---------------------------------------------------------------------------


def finish_step(grads: PyTree, before: PyTree) -> PyTree:
    """Returns gradients with the states of FP8 layers after the step.

    Args:
      grads: gradients, with the gradients of states or active states, in float32 or `fm32`. A layer
        whose `uses` is not positive did not run and keeps its state; its gradient is JAX's zero,
        which is -inf in `fm32`.
      before: the differentiated argument, before `begin_step`.
    """
    params, new = split(grads)
    if new is None:
        return grads
    after, old = _Collection(new), _Collection(split(before)[1])
    active, others = [], []
    for location in after.locations:
        (active if is_active(after.read(location)) else others).append(location)
    finished = finish_states(list(map(after.read, active)), list(map(old.read, active)))
    for location, state in zip(active, finished, strict=True):
        after.write(location, state)
    for location in others:
        after.write(location, _keep_unused(after.read(location), old.read(location)))
    return join(params, after.tree(), grads)


# Jitted, so that all layers share one trace and, in StableHLO, one function.
@jax.jit
def _keep_unused(new: State, old: State) -> State:
    new = to_float32(new)
    used = new[USES] > np.float32(0)

    def select(leaf: jax.Array, before: jax.Array) -> jax.Array:
        # If layers are stacked on an axis other than the first, all or none count as used.
        mask = used if leaf.shape[: used.ndim] == used.shape else jnp.any(used)
        mask = mask.reshape(mask.shape + (1,) * (leaf.ndim - mask.ndim))
        return lax.select(jnp.broadcast_to(mask, leaf.shape), leaf, before)

    return {name: select(leaf, old[name]) for name, leaf in new.items()}


class _Collection:
    """Leaves of overwritten state, with the locations of the FP8 states of layers.

    A location is a dict from leaf name to index. States among the other variables of a layer have
    prefixed leaf names; locations have none.
    """

    def __init__(self, collection: PyTree, structure: Any = None) -> None:
        self.structure = structure or jax.tree.structure(collection)
        self.leaves = self.structure.flatten_up_to(collection)
        self.locations = _layer_states(self.structure)

    def read(self, location: dict[str, int]) -> State:
        return {name: self.leaves[index] for name, index in location.items()}

    def write(self, location: dict[str, int], state: State) -> None:
        for name, index in location.items():
            self.leaves[index] = state[name]

    def tree(self) -> PyTree:
        return self.structure.unflatten(self.leaves)


# Cached, because each step reads the locations several times.
@functools.lru_cache(maxsize=64)
def _layer_states(structure: Any) -> list[dict[str, int]]:
    locations: dict[Any, dict[str, int]] = {}
    collection = structure.unflatten(range(structure.num_leaves))
    for index, (path, _) in enumerate(_core.leaves_with_path(collection)):
        if path:
            prefix = PREFIX if path[-1].startswith(PREFIX) else ""
            location = locations.setdefault((path[:-1], prefix), {})
            location[path[-1].removeprefix(prefix)] = index
    return [
        {name: location[name] for name in NAMES}
        for location in locations.values()
        if location.keys() >= _LEAVES
    ]
