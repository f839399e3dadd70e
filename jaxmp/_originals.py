"""Values that a module boundary cast, as they were before: for modules that compute in FP32.

A module in 16 bits casts its inputs. Where it passes one on to a module that computes in FP32, that
module receives the uncast value. A value that was passed on unchanged is known by its identity. One
that was reshaped, broadcast or indexed on the way is another array: then the call is traced again
up to that module, without computing anything. If the equations between input and value only
move elements, they are applied to the uncast input.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer

from jaxmp._boundary import Plan
from jaxmp._compat import is_moved, jaxpr_body, underlying
from jaxmp._dtypes import bits, is_half
from jaxmp._inputs import Kept
from jaxmp._jaxprs import is_literal, sub_jaxprs

# Equations whose result holds elements of all operands.
_JOINS = frozenset({"concatenate", "stack"})
# Equations whose result holds elements of their first operand; the others are indices.
_LAYOUT = _JOINS | frozenset(
    {
        *("reshape", "broadcast_in_dim", "squeeze", "expand_dims", "transpose", "rev", "copy"),
        *("slice", "dynamic_slice", "gather", "split", "unstack", "tile", "stop_gradient"),
    }
)
# Equations of integers and booleans, by which indices are computed.
_INDICES = _LAYOUT | {
    *("add", "sub", "mul", "neg", "max", "min", "rem", "clamp", "sign", "iota"),
    *("eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not", "select_n", "convert_element_type"),
}
_CALLS = frozenset({"jit", "pjit"})

# ---------------------------------------------------------------------------
# Calls that cast some of their inputs
# ---------------------------------------------------------------------------


class Rerun(NamedTuple):
    """A call of a module that can be traced again without side effects."""

    # The module's arrays: they are arguments of the second trace.
    state: list[Any]
    # (arrays of the arguments, arrays of the module) -> anything; calls a copy of the module.
    call: Callable[[list[Any], list[Any]], Any]


class Boundary:
    """A call of a module that cast some of its inputs."""

    def __init__(self, uncast: list[Any], cast: list[Any], rerun: Callable[[], Rerun]) -> None:
        # What the module was called with, and what it computes with.
        self.uncast, self.cast, self.rerun = uncast, cast, rerun
        # A cast value is kept alive, so that its identity stays its own.
        self.originals = {id(c): (c, u) for u, c in zip(uncast, cast, strict=True) if c is not u}
        # How often each module that may receive an original was called since.
        self.calls: dict[Any, int] = {}
        # Traces of all such calls; None: not made.
        self.traces: dict[Any, _Trace] | None = None
        self.probed = False


class _Trace(NamedTuple):
    """A traced call up to a module, whose inputs are its results."""

    jaxpr: Any
    consts: tuple[Any, ...]
    outvars: list[Any]


class _Probe:
    """A trace that is made in order to see what a module receives."""

    def __init__(self, key: Any) -> None:
        # The call that ends the trace; None: none does, and all are recorded.
        self.key = key
        self.calls: dict[Any, int] = {}
        self.received: dict[Any, list[Any]] = {}


class _Reached(BaseException):
    """Ends a trace. It is not an `Exception`, so the handlers of a model do not catch it."""


class _Thread(threading.local):
    def __init__(self) -> None:
        self.boundaries: list[Boundary] = []
        self.probe: _Probe | None = None


_thread = _Thread()


@contextlib.contextmanager
def noted(boundary: Boundary | None) -> Iterator[None]:
    """Runs the call of a module whose boundary cast some inputs; None: it cast none."""
    if boundary is None:
        yield
        return
    _thread.boundaries.append(boundary)
    try:
        yield
    finally:
        _thread.boundaries.pop()


def boundary_of(
    incoming: Any, cast: Any, is_leaf: Any, rerun: Callable[[Any, list[int], Any], Rerun]
) -> Boundary | None:
    """The record of a call that cast inputs; None if it cast none.

    Args:
      incoming: `(args, kwargs)` before the cast.
      cast: the same after it.
      is_leaf: returns True for values that are not pytrees of arrays.
      rerun: (leaves, positions of arrays among them, tree structure) -> how to call it again.
    """
    if _thread.probe is not None:
        return None
    before = jax.tree.leaves(incoming, is_leaf=is_leaf)
    after, structure = jax.tree.flatten(cast, is_leaf=is_leaf)
    if all(map(_is_same, before, after)):
        return None
    arrays = [i for i, leaf in enumerate(after) if isinstance(leaf, (jax.Array, np.ndarray))]
    return Boundary(
        [before[i] for i in arrays],
        [after[i] for i in arrays],
        lambda: rerun(after, arrays, structure),
    )


def _is_same(before: Any, after: Any) -> bool:
    return before is after


# ---------------------------------------------------------------------------
# Calls that receive originals
# ---------------------------------------------------------------------------


def with_originals(plan: Plan, path: Any, method: str, args: Any, kwargs: Any, is_leaf: Any) -> Any:
    """`(args, kwargs)` with the originals of values that an enclosing module cast.

    Args:
      plan: of the module that is called; originals go to all inputs if it computes in more than 16
        bits, and to those in `keep_inputs`.
      path, method: where it is, and which method is called.
      args, kwargs: what it is called with.
      is_leaf: returns True for values that are not pytrees of arrays.
    """
    if not _thread.boundaries and _thread.probe is None:
        return args, kwargs
    kept = plan.kept(method)
    if bits(plan.policy.compute_dtype) > 16:
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


def _replaced(place: Any, leaves: list[Any]) -> list[Any]:
    halves = [i for i, leaf in enumerate(leaves) if _is_half(leaf)]
    probe = _thread.probe
    if probe is not None:
        key = _counted(probe.calls, place)
        probe.received[key] = [leaves[i] for i in halves]
        if key == probe.key:
            raise _Reached
        return leaves
    keys = [_counted(boundary.calls, place) for boundary in _thread.boundaries]
    found = {i: _unchanged(leaves[i], len(keys)) for i in halves}
    for level in reversed(range(len(keys))):
        missing = [i for i in halves if found[i] is None]
        boundary = _thread.boundaries[level]
        if any(_may_come_from(leaves[i], boundary) for i in missing):
            trace = _traced(boundary, keys[level], len(halves))
            for position, i in enumerate(halves):
                if trace is not None and i in missing:
                    found[i] = _moved(trace, position, leaves[i], level)
    return [leaf if found.get(i) is None else found[i] for i, leaf in enumerate(leaves)]


def _is_half(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray)) and is_half(leaf.dtype)


def _counted(calls: dict[Any, int], place: Any) -> Any:
    calls[place] = calls.get(place, 0) + 1
    return place, calls[place]


def _unchanged(leaf: Any, level: int) -> Any:
    """The original of a value that was passed on as it is; None if it is none.

    `level`: only boundaries outside of this one count.
    """
    original = None
    for boundary in reversed(_thread.boundaries[:level]):
        cast, uncast = boundary.originals.get(id(leaf), (None, None))
        if cast is leaf:
            original = leaf = uncast
    return original


def _may_come_from(leaf: Any, boundary: Boundary) -> bool:
    """Returns a cheap guess: False if a value has elements that no cast input of a boundary has."""
    casts = [underlying(cast) for cast, _ in boundary.originals.values()]
    value = underlying(leaf)
    if isinstance(value, Tracer):
        return is_moved(value, casts, _LAYOUT | _CALLS)
    concrete = [cast for cast in casts if not isinstance(cast, Tracer)]
    if not all(getattr(array, "is_fully_addressable", True) for array in (value, *concrete)):
        return False
    # Each element must be one of the 65536 values that occur in the inputs.
    occurs = np.zeros(2**16, bool)
    for cast in concrete:
        if cast.dtype == value.dtype:
            occurs[np.asarray(cast).view(np.uint16)] = True
    return bool(occurs[np.asarray(value).view(np.uint16)].all())


# ---------------------------------------------------------------------------
# The second trace
# ---------------------------------------------------------------------------


def _traced(boundary: Boundary, key: Any, count: int) -> _Trace | None:
    """Traces what a module receives as equations of the inputs; None if that is not possible."""
    if boundary.probed and boundary.traces is None:
        # More than one module asks: one trace to the end serves all that are still to come.
        boundary.traces = _probe(boundary, None)
    boundary.probed = True
    trace = (boundary.traces or {}).get(key) or _probe(boundary, key).get(key)
    return trace if trace is not None and len(trace.outvars) == count else None


def _probe(boundary: Boundary, key: Any) -> dict[Any, _Trace]:
    probe = _Probe(key)
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in boundary.cast]
    try:
        rerun = boundary.rerun()
        state = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in rerun.state]

        def call(inputs: list[Any], state: list[Any]) -> list[list[Any]]:
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
        # A model may decide by values, or refuse to be traced; then only identity tells.
        return {}
    jaxpr, consts = jaxpr_body(closed)
    outvars = iter(jaxpr.outvars)
    return {
        k: _Trace(jaxpr, consts, list(itertools.islice(outvars, len(results))))
        for k, results in zip(_recorded(probe), shape, strict=True)
    }


def _recorded(probe: _Probe) -> list[Any]:
    return list(probe.received) if probe.key is None else [probe.key]


# ---------------------------------------------------------------------------
# Moving the elements of the original
# ---------------------------------------------------------------------------


class _ComputedError(Exception):
    """A value was computed with, not only moved."""


class _Value(NamedTuple):
    """An array that is made when it is needed, and its dtype."""

    make: Callable[[], Any]
    dtype: Any


class _Reader:
    """Follows the equations of a jaxpr back from a value.

    Args:
      jaxpr: without its constants.
      original: input variable -> the uncast value; raises `_ComputedError` if none was cast.
      index: input or constant variable -> its value.
    """

    def __init__(
        self, jaxpr: Any, original: Callable[[Any], _Value], index: Callable[[Any], Any]
    ) -> None:
        self.equations = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
        self.original, self.index = original, index

    def wide(self, var: Any) -> _Value:
        """The elements that a floating variable holds, uncast."""
        if is_literal(var):
            raise _ComputedError
        equation = self.equations.get(var)
        if equation is None:
            return self.original(var)
        position, name = equation.outvars.index(var), equation.primitive.name
        if name in _CALLS:
            inner, result = self._inside(equation, position)
            return inner.wide(result)
        if name not in _LAYOUT:
            raise _ComputedError
        count = len(equation.invars) if name in _JOINS else 1
        moved = [self.wide(operand) for operand in equation.invars[:count]]
        indices = [self.integer(operand) for operand in equation.invars[count:]]
        if len({value.dtype for value in moved}) > 1:
            raise _ComputedError
        return _Value(
            lambda: _bound(equation, position, [*(v.make() for v in moved), *indices]),
            moved[0].dtype,
        )

    def integer(self, var: Any) -> Any:
        """The value of an index, computed from integers."""
        if var.aval.dtype.kind not in "iub":
            raise _ComputedError
        if is_literal(var):
            return var.val
        equation = self.equations.get(var)
        if equation is None:
            return self.index(var)
        position, name = equation.outvars.index(var), equation.primitive.name
        if name in _CALLS:
            inner, result = self._inside(equation, position)
            return inner.integer(result)
        if name not in _INDICES:
            raise _ComputedError
        return _bound(equation, position, [self.integer(operand) for operand in equation.invars])

    def _inside(self, equation: Any, position: int) -> tuple[_Reader, Any]:
        body, consts = jaxpr_body(sub_jaxprs(equation)[0])
        outside = dict(zip(body.invars, equation.invars, strict=True))
        known = dict(zip(body.constvars, consts, strict=True))

        def index(var: Any) -> Any:
            return known[var] if var in known else self.integer(outside[var])

        def original(var: Any) -> _Value:
            if var in known:
                raise _ComputedError
            return self.wide(outside[var])

        return _Reader(body, original, index), body.outvars[position]


def _bound(equation: Any, position: int, operands: list[Any]) -> Any:
    out = equation.primitive.bind(*operands, **equation.params)
    return out[position] if equation.primitive.multiple_results else out


def _moved(trace: _Trace, position: int, leaf: Any, level: int) -> Any:
    """The original, moved as the value was; None if it was computed with."""
    boundary = _thread.boundaries[level]
    # The module's own arrays follow the inputs.
    pairs = zip(boundary.cast, boundary.uncast, strict=True)
    inputs = dict(zip(trace.jaxpr.invars, pairs, strict=False))
    known = dict(zip(trace.jaxpr.constvars, trace.consts, strict=True))

    def original(var: Any) -> _Value:
        cast, uncast = inputs.get(var, (None, None))
        if cast is uncast:
            raise _ComputedError
        # An enclosing boundary may have cast it before.
        outer = _unchanged(uncast, level)
        value = uncast if outer is None else outer
        return _Value(lambda: value, value.dtype)

    def index(var: Any) -> Any:
        if var in known:
            return known[var]
        cast, _ = inputs.get(var, (None, None))
        if cast is None:
            raise _ComputedError
        return cast

    try:
        value = _Reader(trace.jaxpr, original, index).wide(trace.outvars[position])
    except _ComputedError:
        return None
    if bits(value.dtype) <= bits(leaf.dtype):
        return None
    moved = value.make()
    return moved if moved.shape == leaf.shape else None
