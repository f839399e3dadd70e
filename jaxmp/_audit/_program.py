"""Operations of a traced program, with the jaxpr and the equations that contain them."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import Jaxpr

from jaxmp._attention import MARK
from jaxmp._core._compat import jaxpr_body
from jaxmp._core._dtypes import CASTABLE, FLOAT32, FLOAT64, FLOATS_16BIT
from jaxmp._core._jaxprs import Atom, Equation, consumers, is_literal
from jaxmp._core._locations import Location
from jaxmp._core._matmuls import Matmul
from jaxmp._core._programs._constructs import scan_of, while_of

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


class Body:
    """A jaxpr with an index of the producer and the consumers of each variable."""

    def __init__(self, jaxpr: Jaxpr) -> None:
        self.jaxpr = jaxpr

    @functools.cached_property
    def consumers(self) -> dict[Any, list[Any]]:
        """Variable -> the equations that read it, and None if the jaxpr returns it."""
        return consumers(self.jaxpr)

    @functools.cached_property
    def producers(self) -> dict[Any, Equation]:
        """Variable -> the equation that computes it."""
        return {var: equation for equation in self.jaxpr.eqns for var in equation.outvars}

    @functools.cached_property
    def positions(self) -> dict[Any, int]:
        """Variable -> the index of the equation that computes it."""
        return {var: n for n, equation in enumerate(self.jaxpr.eqns) for var in equation.outvars}

    def dependents(self, start: Atom) -> set[Atom]:
        """Returns the variables that are computed from one of this jaxpr, and that variable."""
        found = {start}
        for equation in self.jaxpr.eqns:
            if not found.isdisjoint(var for var in equation.invars if not is_literal(var)):
                found.update(equation.outvars)
        return found

    def readers(self, var: Atom) -> list[Equation]:
        """Returns the equations that read a variable."""
        return [reader for reader in self.consumers.get(var, ()) if reader is not None]

    def maker(self, var: Atom) -> Equation | None:
        """Returns the equation that computes a variable; None for an argument or a constant."""
        return None if is_literal(var) else self.producers.get(var)

    def maker_through(self, var: Atom, primitives: frozenset[str]) -> Equation | None:
        """Returns the first maker of a value that is none of the named primitives."""
        maker = self.maker(var)
        while maker is not None and maker.primitive.name in primitives:
            maker = self.maker(maker.invars[0])
        return maker

    def source_of(self, var: Atom, primitives: frozenset[str]) -> Atom:
        """Returns the value that `var` is made from by the named primitives alone."""
        maker = self.maker(var)
        while maker is not None and maker.primitive.name in primitives:
            var = maker.invars[0]
            maker = self.maker(var)
        return var


class Loop(NamedTuple):
    """Jaxpr of a loop, and the variables of its carry before and after an iteration."""

    body: Any
    incoming: list[Any]
    outgoing: list[Any]
    # None for a while loop.
    length: int | None


def loop_of(equation: Equation) -> Loop | None:
    """Returns the body of a `scan` or `while`; None for other equations."""
    name = equation.primitive.name
    if name == "scan":
        scan = scan_of(equation)
        jaxpr, length = jaxpr_body(scan.jaxpr)[0], scan.options["length"]
        incoming = scan.split(jaxpr.invars)[1]
    elif name == "while":
        loop = while_of(equation)
        jaxpr, length = jaxpr_body(loop.body)[0], None
        incoming = jaxpr.invars[loop.body_consts :]
    else:
        return None
    return Loop(jaxpr, incoming, jaxpr.outvars[: len(incoming)], length)


class OpOccurrence(NamedTuple):
    """An equation, its location, and the number of its executions."""

    equation: Equation
    location: Location
    times: int
    body: Body
    # Enclosing equations, innermost first.
    enclosing: tuple[Equation, ...]

    @property
    def name(self) -> str:
        return self.equation.primitive.name


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
    return str(equation.params.get("name", "")).startswith(f"{MARK}_")


def is_internal_matmul(op: OpOccurrence, matmul: Matmul) -> bool:
    """Returns True for matmuls that jaxmp's attention computes in FP32 from 16-bit operands.

    On devices without Tensor Cores it multiplies the gradient of the logits in FP32.
    """
    calls = (equation for equation in op.enclosing if is_attention(equation))
    return FLOAT32 in (matmul.lhs, matmul.rhs) and any(
        half_of(equation.invars) is not None for equation in calls
    )
