"""Backward passes whose results are not rounded to 16 bits."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var

from jaxmp._core._compat import jaxpr_body, target
from jaxmp._core._dtypes import FLOAT32, is_16bit
from jaxmp._core._jaxprs import equations, without_unused
from jaxmp._core._programs._analysis import Body, primitives
from jaxmp._core._programs._bind import bind
from jaxmp._core._programs._constructs import CALLS
from jaxmp._core._programs._interpreter import Frame, Interpreter
from jaxmp._core._typing import Array
from jaxmp._core._wide_dot import wide_product, widened_product
from jaxmp._fp32_gradients._layout import ELEMENTWISE, REDUCTIONS
from jaxmp._fp32_gradients._values import results_of

# Operations that move the elements of their first operand, and compute nothing.
MOVES = frozenset(
    {
        "all_gather",
        "broadcast_in_dim",
        "copy",
        "dynamic_slice",
        "expand_dims",
        "gather",
        "mesh_cast",
        "pvary",
        "reshape",
        "reshard",
        "rev",
        "sharding_constraint",
        "slice",
        "split",
        "squeeze",
        "transpose",
        "unstack",
    }
)
MATMULS = frozenset({"conv_general_dilated", "dot_general", "ragged_dot_general"})
# Operations that may follow the matmul of a weight gradient, such as the factor of a scale.
_FACTORS = frozenset({"add", "add_any", "div", "mul", "neg"})
# Operations on the gradient of a computed weight.
_OF_WEIGHTS = (_FACTORS | ELEMENTWISE | REDUCTIONS) - {"bitcast_convert_type"}


def run_in_fp32(closed: ClosedJaxpr, args: list[Array], wide: list[bool]) -> list[Array]:
    """Runs a backward pass; some of its results are returned in FP32.

    If a gradient is computed by a matmul, possibly followed by data movement and factors, the
    matmul has an FP32 result. If a gradient is rounded at the end, the rounding is left out.

    Args:
      closed: the traced backward pass.
      args: its arguments. In the gradient of a function of weights, cotangents of 16-bit results
        are in FP32, and so is all arithmetic with them.
      wide: for each result, True to return it in FP32.
    """
    jaxpr, consts = jaxpr_body(_inlined(closed))
    pairs = list(zip(jaxpr.invars, args, strict=True))
    # Variables that can be computed in FP32, and those of them that are.
    possible = {var for var, arg in pairs if rounded(arg, var) is not arg}
    is_of_weights = bool(possible)
    factors = _OF_WEIGHTS if is_of_weights else _FACTORS
    body = Body(jaxpr)
    flat = list(equations(jaxpr, inside=False))
    for equation in flat:
        if _can_be_wide(equation, possible, factors):
            # FP32 variables that follow a 16-bit matmul, such as factors of rows, and 16-bit ones.
            is_after = not possible.isdisjoint(v for v in equation.invars if isinstance(v, Var))
            possible |= {
                var
                for var in equation.outvars
                if is_16bit_aval(var.aval) or (is_after and _dtype(var) == FLOAT32)
            }
    outputs = [pair for pair in zip(jaxpr.outvars, wide, strict=True) if isinstance(pair[0], Var)]
    asked = {var for var, w in outputs if w}
    narrow = {var for var, w in outputs if not w}
    chosen = (asked & possible) - narrow
    for equation in reversed(flat):
        if chosen.isdisjoint(equation.outvars) or equation.primitive.name in MATMULS:
            continue
        for var in possible.intersection(v for v in equation.invars if isinstance(v, Var)):
            is_wide = (
                r is not None and not chosen.isdisjoint(r.outvars) for r in body.consumers[var]
            )
            if is_of_weights or all(is_wide):
                chosen.add(var)
    results = _Wide(chosen).run(ClosedJaxpr(jaxpr, consts), args)
    return [
        r.astype(FLOAT32) if w else rounded(r, v)
        for r, w, v in zip(results, wide, jaxpr.outvars, strict=True)
    ]


def rounded(array: Array, var: Var | Literal) -> Array:
    """Returns an FP32 array in the dtype of its variable, if that has 16 bits."""
    is_wide = is_16bit_aval(var.aval) and array.dtype == FLOAT32
    return array.astype(_dtype(var)) if is_wide else array


class _Wide(Interpreter):
    """Interpreter that computes some variables in FP32 instead of 16 bits."""

    def __init__(self, variables: set[Var]) -> None:
        super().__init__()
        self.variables = variables

    def equation(self, equation: JaxprEqn, operands: list[Array], frame: Frame) -> list[Array]:
        is_wide = not self.variables.isdisjoint(equation.outvars)
        if not is_wide or equation.primitive.name in MATMULS:
            operands = list(map(rounded, operands, equation.invars))
        return results_of(equation, (_in_fp32 if is_wide else bind)(equation, operands))


class _Inline(Interpreter):
    """Interpreter that replaces calls by the operations inside."""

    def equation(self, equation: JaxprEqn, operands: list[Array], frame: Frame) -> list[Array]:
        if equation.primitive.name in CALLS:
            return self.enter(equation, operands, frame)
        return self.bound(equation, operands)


def _inlined(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Returns a jaxpr without calls of jitted functions and without unused equations."""
    inlined = closed
    if not CALLS.isdisjoint(primitives(closed)):
        inlined = jax.make_jaxpr(lambda *args: _Inline().run(closed, args))(*closed.in_avals)
    jaxpr, consts = jaxpr_body(inlined)
    return ClosedJaxpr(without_unused(jaxpr), consts)


def _can_be_wide(equation: JaxprEqn, wide: set[Var], factors: frozenset[str]) -> bool:
    """Returns True if an equation of a backward pass can compute its 16-bit result in FP32."""
    name = equation.primitive.name
    if name in MATMULS or not equation.invars:
        return name in MATMULS
    first, *_ = variables = [v if isinstance(v, Var) else None for v in equation.invars]
    if name == "convert_element_type":
        return first in wide or _dtype(equation.invars[0]) == FLOAT32
    if name in MOVES:
        return first in wide
    return name in factors and any(var in wide for var in variables)


def _dtype(var: Var | Literal) -> Any:
    return getattr(var.aval, "dtype", None)


def _in_fp32(equation: JaxprEqn, operands: list[Array]) -> Any:
    name = equation.primitive.name
    if name in MATMULS:
        if target() == "cpu" and any(map(is_16bit_aval, operands)):
            return widened_product(
                lambda *wide, **dtype: bind(equation, list(wide), **dtype), *operands
            )
        return bind(equation, operands, preferred_element_type=FLOAT32)
    if name == "convert_element_type":
        return operands[0]
    return bind(equation, [o.astype(FLOAT32) if is_16bit_aval(o) else o for o in operands])


def run_forward(equation: JaxprEqn, operands: list[Array]) -> Any:
    """Runs an equation; a matmul is accumulated in FP32 over devices, too, and then rounded."""
    if equation.primitive.name not in MATMULS:
        return bind(equation, operands)

    lhs, rhs, *rest = operands

    def multiply(*pair: Array, **wide: object) -> Any:
        return (_in_fp32 if wide else bind)(equation, [*pair, *rest])

    return wide_product(multiply, lhs, rhs, FLOAT32).astype(_dtype(equation.outvars[0]))


def is_16bit_aval(aval: object) -> bool:
    """Returns True for the type of a 16-bit floating-point array."""
    dtype = getattr(aval, "dtype", None)
    # NumPy does not know the extended dtypes of JAX, such as those of keys and of FP8 states.
    return isinstance(dtype, np.dtype) and is_16bit(dtype)
