"""Recomputes a variable of a jaxpr from other inputs, if only data movement leads to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from jaxmp._core._compat import jaxpr_body
from jaxmp._core._jaxprs import array_aval, sub_jaxprs
from jaxmp._core._programs._constructs import CALLS
from jaxmp._core._typing import Array

# Equations whose result consists of elements of all operands.
_JOINS = frozenset({"concatenate", "stack"})
# Equations whose result consists of elements of the first operand; the others are indices.
LAYOUT = _JOINS | frozenset(
    {
        *("reshape", "broadcast_in_dim", "squeeze", "expand_dims", "transpose", "rev", "copy"),
        *("slice", "dynamic_slice", "gather", "split", "unstack", "tile", "stop_gradient"),
    }
)
# Equations on integers and booleans that compute indices.
_INDICES = LAYOUT | {
    *("add", "sub", "mul", "neg", "max", "min", "rem", "clamp", "sign", "iota"),
    *("eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not", "select_n", "convert_element_type"),
}


class ComputedError(Exception):
    """Raised if a value is the result of arithmetic, not only of data movement."""


class LazyArray(NamedTuple):
    """Array that is computed on demand, and its dtype."""

    make: Callable[[], Array]
    dtype: np.dtype


class DataMovement:
    """Evaluator that recomputes a variable of a jaxpr from uncast inputs.

    It follows the equations from the variable back to the inputs. Only data movement is allowed.

    Args:
      jaxpr: without its constants.
      original: input variable -> its uncast value; raises `ComputedError` if it was not cast.
      index: input or constant variable -> its value, for indices.
    """

    def __init__(
        self, jaxpr: Jaxpr, original: Callable[[Var], LazyArray], index: Callable[[Var], Array]
    ) -> None:
        self.equations = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
        self.original, self.index = original, index

    def wide(self, var: Var | Literal) -> LazyArray:
        """Returns the uncast value of a floating variable.

        Raises:
          ComputedError: if it is not the result of data movement alone, on inputs of one dtype.
        """
        if isinstance(var, Literal):
            raise ComputedError
        equation = self.equations.get(var)
        if equation is None:
            return self.original(var)
        position, name = equation.outvars.index(var), equation.primitive.name
        if name in CALLS:
            inner, result = self._inside(equation, position)
            return inner.wide(result)
        if name not in LAYOUT:
            raise ComputedError
        count = len(equation.invars) if name in _JOINS else 1
        moved = [self.wide(operand) for operand in equation.invars[:count]]
        indices = [self.integer(operand) for operand in equation.invars[count:]]
        if len({value.dtype for value in moved}) > 1:
            raise ComputedError
        return LazyArray(
            lambda: _bound(equation, position, [*(v.make() for v in moved), *indices]),
            moved[0].dtype,
        )

    def integer(self, var: Var | Literal) -> Array:
        """Returns the value of an index variable, computed from integers.

        Raises:
          ComputedError: if it depends on floating values or on unlisted operations.
        """
        if array_aval(var).dtype.kind not in "iub":
            raise ComputedError
        if isinstance(var, Literal):
            return var.val
        equation = self.equations.get(var)
        if equation is None:
            return self.index(var)
        position, name = equation.outvars.index(var), equation.primitive.name
        if name in CALLS:
            inner, result = self._inside(equation, position)
            return inner.integer(result)
        if name not in _INDICES:
            raise ComputedError
        return _bound(equation, position, [self.integer(operand) for operand in equation.invars])

    def _inside(self, equation: JaxprEqn, position: int) -> tuple[DataMovement, Var | Literal]:
        body, consts = jaxpr_body(sub_jaxprs(equation)[0])
        outside = dict(zip(body.invars, equation.invars, strict=True))
        known = dict(zip(body.constvars, consts, strict=True))

        def index(var: Var) -> Array:
            return known[var] if var in known else self.integer(outside[var])

        def original(var: Var) -> LazyArray:
            if var in known:
                raise ComputedError
            return self.wide(outside[var])

        return DataMovement(body, original, index), body.outvars[position]


def _bound(equation: JaxprEqn, position: int, operands: list[Array]) -> Array:
    out = equation.primitive.bind(*operands, **equation.params)
    return out[position] if equation.primitive.multiple_results else out
