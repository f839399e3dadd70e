"""Operations of a traced program, with the jaxpr and the equations that contain them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from jaxmp._attention import MARK
from jaxmp._core._dtypes import CASTABLE, FLOAT32, FLOAT64, FLOATS_16BIT
from jaxmp._programs._analysis import Body
from jaxmp._programs._jaxprs import Atom, Equation
from jaxmp._programs._locations import Location
from jaxmp._programs._matmuls import Matmul
from jaxmp._programs._operations import name_of

# Floating-point dtypes that the audit compares; FP8 is not among them.
FLOATS = CASTABLE | {FLOAT64}


def named(text: str) -> frozenset[str]:
    """Returns the set of primitive names in a string, which are separated by blanks."""
    return frozenset(text.split())


# Primitives that return the elements of their operand, or their absolute values (as the maximum in
# `jax.nn.logsumexp` does), in another layout or dtype.
LAYOUT = named(
    "convert_element_type reshape broadcast_in_dim abs squeeze transpose copy expand_dims"
    " stop_gradient reduce_precision"
)
PERIODIC = named("sin cos tan")


class OpOccurrence(NamedTuple):
    """An equation, its location, and the number of its executions."""

    equation: Equation
    location: Location
    times: int
    body: Body
    # The operation that contains it.
    outer: OpOccurrence | None = None

    @property
    def name(self) -> str:
        return self.equation.primitive.name

    @property
    def enclosing(self) -> tuple[Equation, ...]:
        """The equations that contain it, innermost first."""
        return () if self.outer is None else (self.outer.equation, *self.outer.enclosing)

    @property
    def caller(self) -> str:
        """Name of the jitted function that contains it directly; "" if there is none."""
        return "" if self.outer is None else name_of(self.outer.equation)


def dtype_of(var: Atom) -> Any:
    """Returns the dtype of a variable; None if it has none."""
    return getattr(var.aval, "dtype", None)


def half_of(variables: Iterable[Atom]) -> np.dtype | None:
    """Returns the first 16-bit floating-point dtype among variables, or None."""
    for var in variables:
        dtype = dtype_of(var)
        if dtype in FLOATS_16BIT:
            return dtype
    return None


def is_attention(equation: Equation) -> bool:
    """Returns True for a call of jaxmp's own attention, in any implementation."""
    return name_of(equation).startswith(f"{MARK}_")


def is_internal_matmul(op: OpOccurrence, matmul: Matmul) -> bool:
    """Returns True for matmuls that jaxmp's attention computes in FP32 from 16-bit operands.

    On devices without Tensor Cores it multiplies the gradient of the logits in FP32.
    """
    calls = (equation for equation in op.enclosing if is_attention(equation))
    return FLOAT32 in (matmul.lhs, matmul.rhs) and any(
        half_of(equation.invars) is not None for equation in calls
    )
