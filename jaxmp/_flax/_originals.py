"""Recovers the uncast inputs of a 16-bit module for the FP32 modules inside it.

A module that computes in 16 bits casts its inputs. If it passes such an input to an inner module
that computes in FP32, the inner module receives the uncast value. There are two cases:

* A value that is passed unchanged is the same Python object as the cast input.
* A value that was reshaped, broadcast or indexed is a new array. Then the call of the outer module
  is traced a second time, up to the inner module. If the equations from the input to the value only
  move elements, they are applied to the uncast input.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from jax.core import Tracer
from jax.extend.core import Jaxpr, Literal, Var

from jaxmp._core._compat import is_moved, jaxpr_body, underlying
from jaxmp._core._dtypes import bits, is_16bit
from jaxmp._core._typing import Array, PyTree
from jaxmp._flax._casts import IsLeaf, ModulePolicy
from jaxmp._flax._data_movement import CALLS, LAYOUT, ComputedError, DataMovement, LazyArray
from jaxmp._policies._inputs import Kept

# (path, method) of a module.
Callee: TypeAlias = tuple[tuple[str, ...], str]
# A callee, and the number of its calls so far.
CallKey: TypeAlias = tuple[Callee, int]

# ---------------------------------------------------------------------------
# Calls that cast some of their inputs
# ---------------------------------------------------------------------------


class Rerun(NamedTuple):
    """Call of a module that can be traced again without side effects."""

    # The module's arrays, which are arguments of the second trace.
    state: list[Array]
    # (arrays of the arguments, arrays of the module) -> anything; calls a copy of the module.
    call: Callable[[list[Array], list[Array]], object]


class Boundary:
    """Call of a module that cast some of its inputs.

    Args:
      uncast: arrays of the arguments before the cast.
      cast: the same arrays after the cast.
      rerun: returns the call in a form that can be traced again.
    """

    def __init__(self, uncast: list[Array], cast: list[Array], rerun: Callable[[], Rerun]) -> None:
        self.uncast, self.cast, self.rerun = uncast, cast, rerun
        # Id of a cast array -> (the array, its original). Storing the array prevents the reuse of
        # its id.
        self.originals = {id(c): (c, u) for u, c in zip(uncast, cast, strict=True) if c is not u}
        # (path, method) of an inner module that may receive an original -> its calls so far.
        self.calls: dict[Callee, int] = {}
        # Traces of all such calls; None before the full trace.
        self.traces: dict[CallKey, _Trace] | None = None
        # True after the first trace.
        self.probed = False


class _Trace(NamedTuple):
    """Trace of an outer module's call; its results are the inputs of an inner module."""

    jaxpr: Jaxpr
    consts: tuple[Any, ...]
    outvars: list[Var | Literal]


class _Probe:
    """Record of the inputs of inner modules during a second trace."""

    def __init__(self, key: CallKey | None) -> None:
        # The inner call that ends the trace; None to trace to the end and record all inner calls.
        self.key = key
        self.calls: dict[Callee, int] = {}
        self.received: dict[CallKey, list[Array]] = {}


class _Reached(BaseException):
    """Ends a trace. It is not an `Exception`, so the handlers of a model do not catch it."""


class _Thread(threading.local):
    def __init__(self) -> None:
        self.boundaries: list[Boundary] = []
        self.probe: _Probe | None = None


_thread = _Thread()


@contextlib.contextmanager
def noted(boundary: Boundary | None) -> Iterator[None]:
    """Registers `boundary` during a `with` block that runs its call; no effect for None."""
    if boundary is None:
        yield
        return
    _thread.boundaries.append(boundary)
    try:
        yield
    finally:
        _thread.boundaries.pop()


def boundary_of(
    incoming: PyTree,
    cast: PyTree,
    is_leaf: IsLeaf,
    rerun: Callable[[list[object], list[int], Any], Rerun],
) -> Boundary | None:
    """Returns the `Boundary` of a call; None if no input was cast, or during a second trace.

    Args:
      incoming: `(args, kwargs)` before the cast.
      cast: `(args, kwargs)` after the cast.
      is_leaf: returns True for values that are not pytrees of arrays.
      rerun: (leaves, positions of arrays among them, tree structure) -> the call, for a second
        trace.
    """
    if _thread.probe is not None:
        return None
    before = jax.tree.leaves(incoming, is_leaf=is_leaf)
    after, structure = jax.tree.flatten(cast, is_leaf=is_leaf)
    if all(map(operator.is_, before, after)):
        return None
    arrays = [i for i, leaf in enumerate(after) if isinstance(leaf, (jax.Array, np.ndarray))]
    return Boundary(
        [before[i] for i in arrays],
        [after[i] for i in arrays],
        lambda: rerun(after, arrays, structure),
    )


# ---------------------------------------------------------------------------
# Calls that receive originals
# ---------------------------------------------------------------------------


def with_originals(
    module_policy: ModulePolicy,
    path: tuple[str, ...],
    method: str,
    args: tuple[PyTree, ...],
    kwargs: dict[str, PyTree],
    is_leaf: IsLeaf,
) -> tuple[tuple[PyTree, ...], dict[str, PyTree]]:
    """Replaces inputs that an enclosing module cast with their uncast originals.

    Args:
      module_policy: the resolved policy of the module. All inputs are replaced if it computes in
        more than 16 bits; otherwise only those in `keep_inputs`.
      path, method: the module's path and the name of the called method.
      args, kwargs: the arguments of the call.
      is_leaf: returns True for values that are not pytrees of arrays.

    Returns:
      The new `(args, kwargs)`.
    """
    if not _thread.boundaries and _thread.probe is None:
        return args, kwargs
    kept = module_policy.kept(method)
    if bits(module_policy.policy.compute_dtype) > 16:
        kept = Kept(frozenset(range(len(args))), frozenset(kwargs))
    elif not (kept.positions or kept.names):
        return args, kwargs
    wanted = (
        [value if i in kept.positions else None for i, value in enumerate(args)],
        {name: value if name in kept.names else None for name, value in kwargs.items()},
    )
    leaves, structure = jax.tree.flatten(wanted, is_leaf=is_leaf)
    leaves = _replaced((path, method), leaves)
    wide_args, wide_kwargs = structure.unflatten(leaves)
    return tuple(
        wide if i in kept.positions else value
        for i, (wide, value) in enumerate(zip(wide_args, args, strict=True))
    ), {name: wide_kwargs[name] if name in kept.names else value for name, value in kwargs.items()}


def _replaced(callee: Callee, leaves: list[PyTree]) -> list[PyTree]:
    halves = [i for i, leaf in enumerate(leaves) if _is_half(leaf)]
    probe = _thread.probe
    if probe is not None:
        key = _counted(probe.calls, callee)
        probe.received[key] = [leaves[i] for i in halves]
        if key == probe.key:
            raise _Reached
        return leaves
    keys = [_counted(boundary.calls, callee) for boundary in _thread.boundaries]
    originals = {i: _unchanged(leaves[i], len(keys)) for i in halves}
    for level in reversed(range(len(keys))):
        missing = [i for i in halves if originals[i] is None]
        boundary = _thread.boundaries[level]
        if any(_may_come_from(leaves[i], boundary) for i in missing):
            trace = _traced(boundary, keys[level], len(halves))
            for position, i in enumerate(halves):
                if trace is not None and i in missing:
                    originals[i] = _moved(trace, position, leaves[i], level)
    return [leaf if originals.get(i) is None else originals[i] for i, leaf in enumerate(leaves)]


def _is_half(leaf: object) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray)) and is_16bit(leaf.dtype)


def _counted(calls: dict[Callee, int], callee: Callee) -> CallKey:
    calls[callee] = calls.get(callee, 0) + 1
    return callee, calls[callee]


def _unchanged(leaf: Array | None, level: int) -> Array | None:
    """Returns the original of a value that was passed on unchanged; None if it was not.

    Args:
      leaf: the value.
      level: number of boundaries to search, counted from the outermost.
    """
    original = None
    for boundary in reversed(_thread.boundaries[:level]):
        cast, uncast = boundary.originals.get(id(leaf), (None, None))
        if cast is leaf:
            original = leaf = uncast
    return original


def _may_come_from(leaf: Array, boundary: Boundary) -> bool:
    """Returns False if a value cannot consist of elements of a boundary's cast inputs; cheap."""
    casts = [underlying(cast) for cast, _ in boundary.originals.values()]
    value = underlying(leaf)
    if isinstance(value, Tracer):
        return is_moved(value, casts, LAYOUT | CALLS)
    concrete = [cast for cast in casts if not isinstance(cast, Tracer)]
    if not all(getattr(array, "is_fully_addressable", True) for array in (value, *concrete)):
        return False
    # Each element must have one of the bit patterns (at most 65536) that occur in the inputs.
    occurs = np.zeros(2**16, bool)
    for cast in concrete:
        if cast.dtype == value.dtype:
            occurs[np.asarray(cast).view(np.uint16)] = True
    return bool(occurs[np.asarray(value).view(np.uint16)].all())


# ---------------------------------------------------------------------------
# The second trace
# ---------------------------------------------------------------------------


def _traced(boundary: Boundary, key: CallKey, count: int) -> _Trace | None:
    """Traces what a module receives as equations of the inputs; None if that is not possible."""
    if boundary.probed and boundary.traces is None:
        # A second inner call needs originals: one full trace serves it and all later calls.
        boundary.traces = _probe(boundary, None)
    boundary.probed = True
    trace = (boundary.traces or {}).get(key) or _probe(boundary, key).get(key)
    return trace if trace is not None and len(trace.outvars) == count else None


def _probe(boundary: Boundary, key: CallKey | None) -> dict[CallKey, _Trace]:
    probe = _Probe(key)
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in boundary.cast]
    try:
        rerun = boundary.rerun()
        state = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in rerun.state]

        def call(inputs: list[Array], state: list[Array]) -> list[list[Array]]:
            outer = _thread.boundaries, _thread.probe
            _thread.boundaries, _thread.probe = [], probe
            try:
                rerun.call(inputs, state)
            except _Reached:
                pass
            finally:
                _thread.boundaries, _thread.probe = outer
            return [probe.received.get(k, []) for k in _recorded(probe)]

        closed, shape = jax.make_jaxpr(call, return_shape=True)(shapes, state)
    except Exception:
        # For example, control flow of the model depends on values. Then only values that are passed
        # on unchanged are recovered.
        return {}
    jaxpr, consts = jaxpr_body(closed)
    outvars = iter(jaxpr.outvars)
    return {
        k: _Trace(jaxpr, consts, list(itertools.islice(outvars, len(results))))
        for k, results in zip(_recorded(probe), shape, strict=True)
    }


def _recorded(probe: _Probe) -> list[CallKey]:
    return list(probe.received) if probe.key is None else [probe.key]


# ---------------------------------------------------------------------------
# Moving the elements of the original
# ---------------------------------------------------------------------------


def _moved(trace: _Trace, position: int, leaf: Array, level: int) -> Array | None:
    """Returns the original of a value, with the same data movement applied.

    Args:
      trace: of the outer module's call.
      position: of the value among the results of the trace.
      leaf: the value.
      level: index of the outer module's boundary.

    Returns:
      An array of the shape of `leaf`; None if the value was computed, or is not narrower than the
      original.
    """
    boundary = _thread.boundaries[level]
    # strict=False: the arrays of the module follow the inputs.
    pairs = zip(boundary.cast, boundary.uncast, strict=True)
    inputs = dict(zip(trace.jaxpr.invars, pairs, strict=False))
    known = dict(zip(trace.jaxpr.constvars, trace.consts, strict=True))

    def original(var: Var) -> LazyArray:
        cast, uncast = inputs.get(var, (None, None))
        if cast is uncast or uncast is None:
            raise ComputedError
        # An enclosing boundary may have cast this value as well.
        outer = _unchanged(uncast, level)
        value = uncast if outer is None else outer
        return LazyArray(lambda: value, value.dtype)

    def index(var: Var) -> Array:
        if var in known:
            return known[var]
        cast, _ = inputs.get(var, (None, None))
        if cast is None:
            raise ComputedError
        return cast

    try:
        value = DataMovement(trace.jaxpr, original, index).wide(trace.outvars[position])
    except ComputedError:
        return None
    if bits(value.dtype) <= bits(leaf.dtype):
        return None
    moved = value.make()
    return moved if moved.shape == leaf.shape else None
