"""Computes values of a traced program that depend only on its shapes and constants, such as masks.

`Scope.value` follows a variable back to the equations that compute it, through the jaxprs that
contain them. If all are known, JAX computes the value on the CPU.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

from jaxmp._core import _compat
from jaxmp._programs._analysis import Body
from jaxmp._programs._bind import bind_all
from jaxmp._programs._constructs import Form, Inner, form_of, inners, sub_jaxprs
from jaxmp._programs._jaxprs import Atom, Equation, is_literal
from jaxmp._programs._operations import sharding_of_result

# Known value: an array, or the node that computes it and the index of the result; None if unknown.
_Value: TypeAlias = "np.ndarray | tuple[_Node, int] | None"
# Maximum size in bytes of a computed value: a float32 mask of 16,384 x 16,384 elements.
_LARGEST = 2**30


class Scope:
    """A jaxpr of a program, in which values of variables are looked up.

    Args:
      jaxpr: the whole program, open or closed.
      inputs: its arguments, whose elements are known if they are arrays.
      stops: returns True for equations whose results are not looked up.

    Example:
      >>> jaxpr = jax.make_jaxpr(lambda x: jnp.tril(jnp.ones_like(x)))(jnp.ones((2, 2)))
      >>> Scope(jaxpr).value(jaxpr.jaxpr.outvars[0])
      array([[1., 0.],
             [1., 1.]], dtype=float32)
    """

    def __init__(
        self,
        jaxpr: _compat.AnyJaxpr,
        inputs: Sequence[Any] = (),
        stops: Callable[[Equation], bool] = lambda _: False,
    ) -> None:
        self.jaxpr, consts = _compat.jaxpr_body(jaxpr)
        self.body = Body(jaxpr)
        self._inputs = dict(zip(self.jaxpr.invars, inputs, strict=False))
        self.stops = stops
        # The scope and the part of an equation that contain this scope.
        self._outer: tuple[Scope, Inner] | None = None
        self._inside: dict[int, list[Scope]] = {}
        self._values: dict[Atom, _Value] = dict(
            zip(self.jaxpr.constvars, map(_array, consts), strict=False)
        )

    def value(self, var: Atom) -> np.ndarray | None:
        """Returns the value of a variable; None if it depends on an input, or is too large."""
        try:
            return _evaluated(self._find(var))
        except RecursionError:  # The value depends on thousands of operations, unlike a mask.
            return None

    def inside(self, equation: Equation) -> list[Scope]:
        """Returns the scopes of the jaxprs in an equation of this scope."""
        if not sub_jaxprs(equation):
            return []
        if id(equation) not in self._inside:
            scopes = self._inside[id(equation)] = []
            for inner in inners(equation):
                scope = Scope(inner.jaxpr, stops=self.stops)
                scope._outer = self, inner
                scopes.append(scope)
        return self._inside[id(equation)]

    def _find(self, var: Atom) -> _Value:
        if is_literal(var):
            return np.asarray(var.val, var.aval.dtype)
        if var not in self._values:
            maker = self.body.maker(var)
            self._values[var] = self._argument(var) if maker is None else self._result(maker, var)
        return self._values[var]

    def _argument(self, var: Atom) -> _Value:
        if self._outer is None or var not in self.jaxpr.invars:
            return _array(self._inputs.get(var))
        outer, inner = self._outer
        position = self.jaxpr.invars.index(var)
        source = inner.operands[position]
        if source is None or inner.may_be_skipped:
            return None
        if inner.is_loop:
            if position >= inner.carried.stop:
                return _row(_evaluated(outer._find(source)))
            is_changed = (var, var) not in zip(inner.incoming, inner.outgoing, strict=True)
            return None if position in inner.carried and is_changed else outer._find(source)
        # Inside a `shard_map`, a variable is a part of the array.
        return outer._find(source) if source.aval.shape == var.aval.shape else None

    def _result(self, equation: Equation, var: Atom) -> _Value:
        index = equation.outvars.index(var)
        # A collective, such as the index of a device, has an effect.
        if equation.effects or self.stops(equation):
            return None
        inside = self.inside(equation)
        if inside:
            is_call = form_of(equation) in (Form.CALL, Form.REMAT, Form.DERIVATIVE)
            return inside[0]._find(inside[0].jaxpr.outvars[index]) if is_call else None
        operands = []
        for operand in equation.invars:
            value = self._find(operand)
            if value is None:
                return None
            operands.append(value)
        node = _Node(equation, operands)
        for number, result in enumerate(equation.outvars):
            self._values[result] = node, number
        return node, index


def _row(array: np.ndarray | None) -> np.ndarray | None:
    """Returns the value in each step of a loop, if it is the same in all steps."""
    is_same = array is not None and len(array) and (array == array[:1]).all()
    return array[0] if array is not None and is_same else None


def _array(value: object) -> np.ndarray | None:
    """Converts an array to NumPy; None for a shape, a tracer, a key, or a deleted array."""
    try:
        return np.asarray(value) if hasattr(value, "__array__") else None
    except (TypeError, RuntimeError):
        return None


# ---------------------------------------------------------------------------
# Evaluation
# ---------------------------------------------------------------------------


class _Node:
    """Equation whose operands are known, and its results after they are computed."""

    def __init__(self, equation: Any, operands: list[Any]) -> None:
        self.equation, self.operands = equation, operands

    @functools.cached_property
    def results(self) -> list[np.ndarray]:
        """The results of the equation; an empty list if they cannot be computed."""
        known = [_evaluated(operand) for operand in self.operands]
        operands = [operand for operand in known if operand is not None]
        avals = [var.aval for var in self.equation.outvars]
        # Flax's dtype of FP8 scales has no size, and is not one of NumPy.
        bytes_of = lambda aval: getattr(aval.dtype, "itemsize", math.inf)
        sizes = [getattr(aval, "size", 0) * bytes_of(aval) for aval in avals]
        if len(operands) < len(known) or max(sizes, default=0) > _LARGEST:
            return []
        if self.equation.primitive.name in _PLACEMENTS:
            return operands
        # The mesh of the program is not necessarily that of this machine.
        is_placed = sharding_of_result(self.equation) is not None
        changes = {"sharding": None} if is_placed else {}
        try:
            with jax.default_device(jax.devices("cpu")[0]):
                return list(map(np.asarray, bind_all(self.equation, operands, **changes)))
        except (TypeError, ValueError, RuntimeError):
            # For example a PRNG key, which has no elements, or an operation that a CPU lacks.
            return []


def _evaluated(value: _Value) -> np.ndarray | None:
    if not isinstance(value, tuple):
        return value
    node, index = value
    return node.results[index] if node.results else None


# Primitives that return their operand, on other devices.
_PLACEMENTS = frozenset({"sharding_constraint", "reshard", "pvary", "device_put", "mesh_cast"})
