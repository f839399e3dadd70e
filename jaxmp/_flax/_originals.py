"""Passes the uncast inputs of a 16-bit module to the FP32 modules inside it.

A module that computes in 16 bits casts its inputs. If it passes such an input unchanged, as the
same Python object, to an inner module that computes in FP32, the inner module receives the uncast
value. An input that was reshaped or indexed before is a new array in 16 bits: `keep_inputs` exempts
it from the cast.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TypeAlias

import jax

from jaxmp._core._dtypes import bits
from jaxmp._core._typing import Array, PyTree
from jaxmp._flax._casts import IsLeaf, ModulePolicy
from jaxmp._policies._inputs import Kept

# Id of a cast array -> (the array, its original). Storing the array prevents the reuse of its id.
Originals: TypeAlias = dict[int, tuple[Array, Array]]


class _Thread(threading.local):
    def __init__(self) -> None:
        # Of the running calls that cast some of their inputs, the innermost last.
        self.calls: list[Originals] = []


_thread = _Thread()


@contextlib.contextmanager
def noted(originals: Originals) -> Iterator[None]:
    """Makes originals available to the modules that a `with` block calls."""
    _thread.calls.append(originals)
    try:
        yield
    finally:
        _thread.calls.pop()


def originals_of(incoming: PyTree, cast: PyTree, is_leaf: IsLeaf) -> Originals:
    """Returns the arrays of `(args, kwargs)` that a call cast, with their originals."""
    before = jax.tree.leaves(incoming, is_leaf=is_leaf)
    after = jax.tree.leaves(cast, is_leaf=is_leaf)
    return {id(c): (c, u) for u, c in zip(before, after, strict=True) if c is not u}


def with_originals(
    module_policy: ModulePolicy,
    method: str,
    args: tuple[PyTree, ...],
    kwargs: dict[str, PyTree],
    is_leaf: IsLeaf,
) -> tuple[tuple[PyTree, ...], dict[str, PyTree]]:
    """Replaces inputs that an enclosing module cast with their uncast originals.

    Args:
      module_policy: the resolved policy of the module. All inputs are replaced if it computes in
        more than 16 bits; otherwise only those in `keep_inputs`.
      method: name of the called method.
      args, kwargs: the arguments of the call.
      is_leaf: returns True for values that are not pytrees of arrays.

    Returns:
      The new `(args, kwargs)`.
    """
    if not any(_thread.calls):
        return args, kwargs
    kept = module_policy.kept(method)
    if bits(module_policy.policy.compute_dtype) > 16:
        kept = Kept(frozenset(range(len(args))), frozenset(kwargs))

    def restored(value: PyTree) -> PyTree:
        return jax.tree.map(_original, value, is_leaf=is_leaf)

    return tuple(
        restored(value) if i in kept.positions else value for i, value in enumerate(args)
    ), {name: restored(value) if name in kept.names else value for name, value in kwargs.items()}


def _original(leaf: PyTree) -> PyTree:
    """Returns the value before all casts of the enclosing calls; the leaf itself without a cast."""
    for originals in reversed(_thread.calls):
        cast, uncast = originals.get(id(leaf), (None, None))
        if cast is leaf:
            leaf = uncast
    return leaf
