"""Readers of the parameters of operations without jaxprs; see `_constructs` for those with jaxprs.

JAX does not document these parameters. A function that reads one that an operation lacks returns
the value that is named in its docstring.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeAlias

from jax import lax

from jaxmp._core._programs._constructs import LOOPS, scan_of, while_of

# Dimensions of the two operands of a matmul.
_Sides: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]


class Dot(NamedTuple):
    """`dot_general`.

    contracted: the dimensions of both operands that are summed.
    batch: the dimensions of both operands that belong together and are not summed.
    is_highest: True if the author asked for `precision=HIGHEST`.
    result_dtype: the dtype in which the author asked for the result; None: that of the operands.
    """

    contracted: _Sides
    batch: _Sides
    is_highest: bool
    result_dtype: Any


def dot_of(equation: Any) -> Dot:
    """Returns the record of a `dot_general`."""
    params = equation.params
    contracted, batch = params["dimension_numbers"]
    return Dot(contracted, batch, is_highest(equation), params["preferred_element_type"])


def is_highest(equation: Any) -> bool:
    """Returns True for a matmul or convolution whose author asked for `precision=HIGHEST`."""
    precision = equation.params.get("precision")
    given = precision if isinstance(precision, tuple) else (precision,)
    return lax.Precision.HIGHEST in given


def new_dtype_of(equation: Any) -> Any:
    """Returns the dtype of the result of a `convert_element_type`."""
    return equation.params["new_dtype"]


def name_of(equation: Any) -> str:
    """Returns the name of a jitted function, of a kernel, or of `checkpoint_name`; else ""."""
    name = equation.params.get("name")
    return name if isinstance(name, str) else ""


def exponent_of(equation: Any) -> int:
    """Returns the exponent of an `integer_pow`; 1 for other operations."""
    return equation.params["y"] if equation.primitive.name == "integer_pow" else 1


def iota_length(equation: Any) -> int:
    """Returns the number of values of an `iota`."""
    params = equation.params
    return params["shape"][params["dimension"]]


def count_of_keys(equation: Any) -> int:
    """Returns the number of operands by which a sort compares; 1 for other operations."""
    return equation.params.get("num_keys", 1)


def axes_of(equation: Any) -> tuple[int, ...]:
    """Returns the dimensions of the operand that a reduction or cumulation combines; else ()."""
    axis = equation.params.get("axes", equation.params.get("axis", ()))
    return axis if isinstance(axis, tuple) else (axis,)


def mesh_axes_of(equation: Any) -> tuple[Any, ...]:
    """Returns the mesh axes of a collective, such as `psum` or `all_gather`."""
    axes = equation.params.get("axes", equation.params.get("axis_name"))
    return tuple(axes) if isinstance(axes, (tuple, list)) else (axes,)


def window_of(equation: Any) -> int:
    """Returns the number of elements that a windowed reduction combines."""
    return math.prod(equation.params["window_dimensions"])


def sharding_of_result(equation: Any) -> Any:
    """Returns the sharding that a constraint, a `reshard` or another operation asks for; or None.

    One with dimensions that its author left to the compiler counts as none.
    """
    params = equation.params
    if params.get("unconstrained_dims"):
        return None
    return params.get("sharding", params.get("dst_sharding"))


class Jit(NamedTuple):
    """Flags of a jitted function, for each operand.

    shardings: shardings that its author asks for; None if there are none.
    donated: True for operands whose memory is reused.
    """

    shardings: tuple[Any, ...]
    donated: tuple[bool, ...]


def jit_of(equation: Any) -> Jit:
    """Returns the flags of a jitted function; other operations have none set."""
    params, count = equation.params, len(equation.invars)
    shardings = params.get("in_shardings") or (None,) * count
    return Jit(tuple(shardings), tuple(params.get("donated_invars") or (False,) * count))


class Loop(NamedTuple):
    """Body of a `scan` or `while`.

    body: its jaxpr, without constants.
    incoming: the arguments of the body that are carried; an argument before them is a constant, and
      one after them a row of a scanned array.
    outgoing: the results of the body that become `incoming` of the next iteration.
    length: number of iterations; None if it depends on data.
    """

    body: Any
    incoming: list[Any]
    outgoing: list[Any]
    length: int | None


def loop_of(equation: Any) -> Loop | None:
    """Returns the body of a loop; None for other operations."""
    name = equation.primitive.name
    if name not in LOOPS:
        return None
    if name == "scan":
        scan = scan_of(equation)
        closed, first, count, length = scan.jaxpr, scan.consts, scan.carry, scan.options["length"]
    else:
        loop = while_of(equation)
        closed, first, count, length = loop.body, loop.body_consts, len(equation.outvars), None
    body = closed.jaxpr
    return Loop(body, body.invars[first : first + count], body.outvars[:count], length)
