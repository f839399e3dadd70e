"""Squared distances that a matmul and norms compute: `|x|**2 + |y|**2 - 2 * x @ y`.

They are small differences of large numbers. If the operands of the matmul are rounded to 16 bits,
and those of the norms are not, the error of the distance of two near points exceeds the distance.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from jaxmp._core import _compat, named
from jaxmp._programs._analysis import Forward
from jaxmp._programs._constructs import CONSTRUCTS
from jaxmp._programs._interpreter import Frame
from jaxmp._programs._locations import call_stack
from jaxmp._programs._matmuls import is_inner_product
from jaxmp._programs._operations import exponent_of, name_of

SAME = named("transpose reshape broadcast_in_dim squeeze neg abs copy convert_element_type")
_SCALES = frozenset(("mul", "div"))
_ADDS = frozenset(("add", "sub"))
_BOUNDS = frozenset(("max", "min", "clamp", "select_n"))
# A sum of more matmuls is not followed, such as the residual stream of a transformer.
_MOST_DOTS = 4


class _Terms(NamedTuple):
    """Terms of a value.

    source: the id of the variable that it is, up to its layout and a factor.
    square: that of the variable of which it is the square, or None.
    norms: those of the variables whose squares it sums.
    roots: the norms of its square.
    dots: (equation, the two operands) of the matmuls that it contains.
    """

    source: int
    square: int | None = None
    norms: frozenset[int] = frozenset()
    roots: frozenset[int] = frozenset()
    dots: frozenset[Any] = frozenset()


class _Distances(Forward):
    def __init__(self) -> None:
        super().__init__()
        self.found: set[Any] = set()

    def equation(
        self, equation: _compat.JaxprEqn, operands: list[Any], frame: Frame
    ) -> list[_Terms | None]:
        name, variables = equation.primitive.name, equation.invars
        if name in CONSTRUCTS:
            known = self._known(variables, operands)
            results = self.enter(equation, known, frame)
            if name_of(equation) in ("diagonal", "_diag") and operands:
                # That of a Gram matrix. `jnp.diag` of a vector is a matrix, which has no norms.
                is_matrix = getattr(variables[0].aval, "ndim", 0) > 1
                squares = [both for _, both in known[0].dots if len(both) == 1 and is_matrix]
                norms = frozenset[int]().union(*squares)
                results[0] = _Terms(id(equation.outvars[0]), norms=norms, dots=known[0].dots)
            return results
        if len(equation.outvars) != 1 or not variables:
            return [None] * len(equation.outvars)
        result = _Terms(id(equation.outvars[0]))
        arrays = [n for n, var in enumerate(variables) if getattr(var.aval, "ndim", 0)]
        if name in SAME or (name in _SCALES and arrays == [0]) or (name, arrays) == ("mul", [1]):
            # A number, by which `optax.safe_norm` replaces zeros, has the source 0.
            terms = [*self._known(variables, operands), _Terms(0)]
            return [terms[arrays[0] if arrays else -1]]
        terms = self._known(variables, operands)
        sources = [each.source for each in terms]
        norms = frozenset[int]().union(*(each.norms for each in terms))
        roots = frozenset[int]().union(*(each.roots for each in terms))
        is_product = name in ("mul", "dot_general") and sources[0] == sources[1]
        if name == "square" or exponent_of(equation) == 2 or (name == "mul" and is_product):
            return [result._replace(square=sources[0], norms=terms[0].roots)]
        if name == "sqrt":
            return [result._replace(roots=norms)]
        if name in _BOUNDS:
            chosen = set(sources[1:]) - {0} if name == "select_n" else ()
            source = min(chosen) if len(chosen) == 1 else result.source
            return [result._replace(source=source, norms=norms, roots=roots)]
        if name == "reduce_sum" and terms[0].square is not None:
            return [result._replace(norms=frozenset([terms[0].square]))]
        if name == "dot_general" and is_product and is_inner_product(equation):
            return [result._replace(norms=frozenset(sources[:1]))]
        if name == "dot_general":
            dot = equation, frozenset(sources[:2])
            return [result._replace(dots=frozenset([dot]))]
        if name in _ADDS:
            dots = frozenset().union(*(each.dots for each in terms))
            if len(dots) > _MOST_DOTS:
                return [None]
            self.found |= {call_stack(dot) for dot, both in dots if both <= norms} - {()}
            return [result._replace(norms=norms, dots=dots)]
        return [None]

    def _known(self, variables: list[Any], operands: list[Any]) -> list[Any]:
        pairs = zip(variables, operands, strict=True)
        return [_Terms(id(var)) if terms is None else terms for var, terms in pairs]


def distance_calls(jaxpr: _compat.AnyJaxpr) -> set[Any]:
    """Returns the call stacks of the matmuls of distances, which are also those of gradients."""
    distances = _Distances()
    distances.run(jaxpr, [None] * len(_compat.jaxpr_body(jaxpr)[0].invars))
    return distances.found
