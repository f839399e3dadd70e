"""Computes values of a traced program that depend only on its shapes and constants, such as masks.

`Known` processes the equations of a program in order, and records those whose operands are all
known. JAX computes a value on the CPU when `Known.value` is called.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr

from jaxmp._core._compat import jaxpr_body, scan_counts
from jaxmp._core._jaxprs import (
    Atom,
    Equation,
    Inner,
    Path,
    inners,
    is_literal,
    scope_names,
    sub_jaxprs,
)

# Known value: an array, or the node that computes it and the index of the result; None if unknown.
_Value: TypeAlias = "np.ndarray | tuple[_Node, int] | None"
# Maximum size in bytes of a computed value: a float32 mask of 16,384 x 16,384 elements.
_LARGEST = 2**30


class _Node:
    """Equation whose operands are known, and its results after they are computed."""

    __slots__ = ("equation", "operands", "results")

    def __init__(self, equation: Equation, operands: list[Any]) -> None:
        self.equation, self.operands = equation, operands
        self.results: list[np.ndarray] | None = None


class Known:
    """Known values of a program's variables.

    Example:
      >>> jaxpr = jax.make_jaxpr(lambda x: jnp.tril(jnp.ones_like(x)))(jnp.ones((2, 2)))
      >>> known = Known()
      >>> for equation, _ in walk(jaxpr, known):
      ...     pass
      >>> known.value(jaxpr.jaxpr.outvars[0])
      array([[1., 0.],
             [1., 1.]], dtype=float32)
    """

    def __init__(self) -> None:
        self._values: dict[Atom, _Value] = {}

    def bind(self, variables: Iterable[Any], values: Iterable[Any]) -> None:
        """Sets the values of variables; None: the value is not known."""
        for var, value in zip(variables, values, strict=True):
            self._set(var, value)

    def bind_constants(self, jaxpr: Jaxpr | ClosedJaxpr) -> None:
        """Sets the values of the constants of a closed jaxpr."""
        body, consts = jaxpr_body(jaxpr)
        if consts:
            self.bind(body.constvars, map(_array, consts))

    def step(self, equation: Equation) -> None:
        """Processes an equation without inner jaxprs."""
        operands = [self._get(var) for var in equation.invars]
        # A collective, such as the index of a device, has an effect.
        is_known = not equation.effects and all(x is not None for x in operands)
        node = _Node(equation, operands) if is_known else None
        for index, var in enumerate(equation.outvars):
            self._set(var, None if node is None else (node, index))

    def enter(self, equation: Equation, inner: Inner) -> None:
        """Sets the variables of an inner jaxpr, before its equations are processed."""
        body = inner.jaxpr
        values = [None if var is None else self._get(var) for var in inner.operands]
        name = equation.primitive.name
        if name == "scan":
            consts, carried = scan_counts(equation.params)
            loop = consts + carried
            for index in range(consts, loop):
                if body.outvars[index - consts] is not body.invars[index]:
                    values[index] = None
            values[loop:] = map(self._row, values[loop:])
        elif name == "while":
            values = [None] * len(values)
        for var, outer, value in zip(body.invars, inner.operands, values, strict=True):
            # Inside a `shard_map`, a variable is a part of the array.
            same = outer is not None and (
                name == "scan" or getattr(outer.aval, "shape", None) == var.aval.shape
            )
            self._set(var, value if same else None)

    def leave(self, equation: Equation, inner: Inner) -> None:
        """Sets the results of an equation, after those of its inner jaxpr."""
        is_loop = equation.primitive.name in ("scan", "while", "cond", "shard_map")
        for var, result in zip(inner.jaxpr.outvars, inner.results, strict=True):
            if result is not None:
                self._set(result, None if is_loop else self._get(var))

    def forget(self, variables: Iterable[Any]) -> None:
        """Marks the values of variables as unknown."""
        for var in variables:
            self._set(var, None)

    def value(self, var: Atom) -> np.ndarray | None:
        """Returns the value of a variable; None if it depends on an input, or is too large."""
        return _evaluated(self._get(var))

    def _get(self, var: Atom) -> _Value:
        return np.asarray(var.val, var.aval.dtype) if is_literal(var) else self._values.get(var)

    def _set(self, var: Atom, value: _Value) -> None:
        if value is None:
            self._values.pop(var, None)
        else:
            self._values[var] = value

    def _row(self, value: _Value) -> _Value:
        """Returns the value in each step of a loop, if it is the same in all steps."""
        array = _evaluated(value)
        if array is None or not len(array) or not (array == array[:1]).all():
            return None
        return array[0]


def walk(jaxpr: Jaxpr | ClosedJaxpr, known: Known, names: Path = ()) -> Iterator[tuple[Any, Path]]:
    """Yields each equation of a jaxpr with its name scopes; inner equations follow.

    While an equation is yielded, `known` contains the values of its operands.

    Args:
      jaxpr: open or closed.
      known: values of its variables; it processes every equation.
      names: scopes of the equation that contains the jaxpr.
    """
    known.bind_constants(jaxpr)
    for equation in jaxpr_body(jaxpr)[0].eqns:
        scopes = (*names, *scope_names(str(equation.source_info.name_stack)))
        yield equation, scopes
        if not sub_jaxprs(equation):
            known.step(equation)
            continue
        for inner in inners(equation):
            known.enter(equation, inner)
            yield from walk(inner.jaxpr, known, scopes)
            known.leave(equation, inner)


def _array(value: object) -> np.ndarray | None:
    """Converts an array to NumPy; None for a tracer or a key."""
    try:
        return np.asarray(value)
    except Exception:
        return None


# ---------------------------------------------------------------------------
# Evaluation
# ---------------------------------------------------------------------------


def _evaluated(value: _Value) -> np.ndarray | None:
    if not isinstance(value, tuple):
        return value
    node, index = value
    if node.results is None:
        node.results = _results(node)
    return node.results[index] if node.results else None


def _results(node: _Node) -> list[np.ndarray]:
    """Computes the results of an equation; an empty list if they cannot be computed."""
    known = [_evaluated(operand) for operand in node.operands]
    operands = [operand for operand in known if operand is not None]
    avals = [var.aval for var in node.equation.outvars]
    sizes = [getattr(aval, "size", 0) * aval.dtype.itemsize for aval in avals]
    if len(operands) < len(known) or max(sizes, default=0) > _LARGEST:
        return []
    if node.equation.primitive.name in _PLACEMENTS:
        return operands
    # The mesh of the program is not necessarily that of this machine.
    params = {k: None if k == "sharding" else v for k, v in node.equation.params.items()}
    try:
        with jax.default_device(jax.devices("cpu")[0]):
            results = node.equation.primitive.bind(*operands, **params)
        return list(map(np.asarray, results if isinstance(results, (list, tuple)) else [results]))
    except Exception:
        # For example a PRNG key, which has no elements, or a callback to another machine.
        return []


# Primitives that return their operand, on other devices.
_PLACEMENTS = frozenset({"sharding_constraint", "reshard", "pvary", "device_put", "mesh_cast"})
