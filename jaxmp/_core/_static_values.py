"""Computes values of a traced program that depend only on its shapes and constants, such as masks.

`Known` processes the equations of a program in order, and records those whose operands are all
known. NumPy computes a value when `Known.value` is called. An axis along which the elements repeat,
as after `broadcast_in_dim`, has stride 0 and uses no further memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr

from jaxmp._core._compat import jaxpr_body, scan_counts
from jaxmp._core._jaxprs import (
    Atom,
    Equation,
    Inner,
    Path,
    array_aval,
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
        is_known = equation.primitive.name in _OPERATIONS and all(x is not None for x in operands)
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
        return np.asarray(var.val) if is_literal(var) else self._values.get(var)

    def _set(self, var: Atom, value: _Value) -> None:
        if value is None:
            self._values.pop(var, None)
        else:
            self._values[var] = value

    def _row(self, value: _Value) -> _Value:
        """Returns the value in each step of a loop, if it is the same in all steps."""
        array = _evaluated(value)
        if array is None or not len(array) or (array.strides[0] and len(array) > 1):
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
    operands = [_evaluated(operand) for operand in node.operands]
    if any(operand is None for operand in operands):
        return []
    result = _OPERATIONS[node.equation.primitive.name](node.equation, *operands)
    return [] if result is None else [result]


def _elementwise(function: Callable[..., Any]) -> Callable[..., np.ndarray | None]:
    """Wraps an elementwise function; axes that repeat in all operands are computed once."""

    def operation(equation: Equation, *operands: np.ndarray) -> np.ndarray | None:
        aval = array_aval(equation.outvars[0])
        whole = [np.broadcast_to(operand, aval.shape) for operand in operands]
        repeated = [all(array.strides[axis] == 0 for array in whole) for axis in range(aval.ndim)]
        index = tuple(slice(1) if repeats else slice(None) for repeats in repeated)
        small = [array[index] for array in whole]
        if small[0].size * aval.dtype.itemsize > _LARGEST:
            return None
        result = np.asarray(function(equation, *small)).astype(aval.dtype, copy=False)
        return np.broadcast_to(result, aval.shape)

    return operation


def _numpy(function: Callable[..., Any]) -> Callable[..., np.ndarray | None]:
    return _elementwise(lambda equation, *operands: function(*operands))


def _select(
    equation: Equation, which: np.ndarray, first: np.ndarray, *more: np.ndarray
) -> np.ndarray:
    return np.choose(which.astype(np.intp), (first, *more)) if more else first


def _quotient(lhs: np.ndarray, rhs: np.ndarray) -> np.ndarray:
    """Computes `lax.div`, which rounds integers towards zero."""
    if lhs.dtype.kind not in "iu":
        return lhs / rhs
    return np.trunc(lhs / np.where(rhs == 0, 1, rhs)).astype(lhs.dtype)


def _iota(equation: Equation) -> np.ndarray:
    params = equation.params
    shape, axis = tuple(params["shape"]), params["dimension"]
    ones = [1] * len(shape)
    ones[axis] = shape[axis]
    steps = np.arange(shape[axis]).astype(params["dtype"])
    return np.broadcast_to(steps.reshape(ones), shape)


def _broadcast(equation: Equation, operand: np.ndarray) -> np.ndarray:
    params = equation.params
    ones = [1] * len(params["shape"])
    for axis, size in zip(params["broadcast_dimensions"], operand.shape, strict=True):
        ones[axis] = size
    return np.broadcast_to(operand.reshape(ones), params["shape"])


def _reshape(equation: Equation, operand: np.ndarray) -> np.ndarray | None:
    """Computes `reshape`, and `squeeze` and `expand_dims`, which never copy."""
    if operand.size * operand.itemsize > _LARGEST and equation.primitive.name == "reshape":
        return None
    return operand.reshape(array_aval(equation.outvars[0]).shape)


def _transpose(equation: Equation, operand: np.ndarray) -> np.ndarray:
    return operand.transpose(equation.params["permutation"])


def _slice(equation: Equation, operand: np.ndarray) -> np.ndarray:
    params = equation.params
    strides = params["strides"] or (1,) * operand.ndim
    limits = zip(params["start_indices"], params["limit_indices"], strides, strict=True)
    return operand[tuple(slice(*limit) for limit in limits)]


def _dynamic_slice(equation: Equation, operand: np.ndarray, *starts: np.ndarray) -> np.ndarray:
    sizes = equation.params["slice_sizes"]
    index = []
    for start, size, whole in zip(starts, sizes, operand.shape, strict=True):
        first = min(max(int(start), 0), whole - size)
        index.append(slice(first, first + size))
    return operand[tuple(index)]


def _same(equation: Equation, operand: np.ndarray) -> np.ndarray:
    return operand


# Primitive -> function of (equation, *operands) that returns the result; None if it is too large.
_OPERATIONS: dict[str, Callable[..., np.ndarray | None]] = {
    "eq": _numpy(np.equal),
    "ne": _numpy(np.not_equal),
    "lt": _numpy(np.less),
    "le": _numpy(np.less_equal),
    "gt": _numpy(np.greater),
    "ge": _numpy(np.greater_equal),
    "and": _numpy(np.bitwise_and),
    "or": _numpy(np.bitwise_or),
    "xor": _numpy(np.bitwise_xor),
    "not": _numpy(np.invert),
    "add": _numpy(np.add),
    "sub": _numpy(np.subtract),
    "mul": _numpy(np.multiply),
    "div": _numpy(_quotient),
    "rem": _numpy(np.fmod),
    "max": _numpy(np.maximum),
    "min": _numpy(np.minimum),
    "neg": _numpy(np.negative),
    "abs": _numpy(np.abs),
    "sign": _numpy(np.sign),
    "convert_element_type": _numpy(lambda operand: operand),
    "clamp": _numpy(lambda least, operand, largest: np.clip(operand, least, largest)),
    "is_finite": _numpy(np.isfinite),
    "select_n": _elementwise(_select),
    "iota": _iota,
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "squeeze": _reshape,
    "expand_dims": _reshape,
    "transpose": _transpose,
    "slice": _slice,
    "dynamic_slice": _dynamic_slice,
    **dict.fromkeys(("copy", "copy_p", "stop_gradient", "pvary", "sharding_constraint"), _same),
}
