"""Uses of values: which of them decide something, so that their rounding changes a result.

A matmul whose result reaches a softmax, a choice or a loss should return its FP32 sums: a rounded
logit of 9 is off by up to 3 %, and so is its probability. A logarithm or a root magnifies a
rounding, and a Cholesky factor of a rounded Gram matrix is NaN.
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import jax.numpy as jnp

from jaxmp._core import _compat, named
from jaxmp._core._compat import AnyJaxpr, Jaxpr, JaxprEqn
from jaxmp._programs._analysis import Backward
from jaxmp._programs._constructs import CONSTRUCTS, OPAQUE_CALLS
from jaxmp._programs._distances import distance_calls
from jaxmp._programs._interpreter import PROGRAM, Frame, Start
from jaxmp._programs._jaxprs import BACKWARD, FORWARD, Equation, array_aval, is_literal, phase_of
from jaxmp._programs._locations import call_stack
from jaxmp._programs._matmuls import MATMULS, is_inner_product, is_outer_product, terms_of
from jaxmp._programs._operations import axes_of, count_of_keys, dot_of, exponent_of
from jaxmp._programs._solutions import SOLVERS, products_of_solutions


class Use(enum.IntFlag):
    """Uses of a value in a program, directly or through operations that keep its rounding error."""

    NONE = 0
    # The program returns it, except for what was rounded on its way: sums with other arrays.
    RESULT = enum.auto()
    # A scalar result sums it.
    LOSS = enum.auto()
    # A top-k, an argmax or a sort compares it, or an index is made of it.
    ORDER = enum.auto()
    # A softmax, log-softmax or logsumexp, but not one that weights the rows of a matmul: attention.
    SOFTMAX = enum.auto()
    # A logarithm, a root or a quotient follows, which is infinite at 0 or at 1.
    MAGNIFIED = enum.auto()
    # A factorization or a solve follows, whose error is that of the matrix times its condition.
    SOLVED = enum.auto()
    # A factorization, a solve, or a sine of coordinates follows after matmuls and other linear
    # operations, as of a Kalman filter's covariance, or a rotation. The rounding of each factor
    # reaches it.
    CHAINED = enum.auto()
    # A sum, and a matmul with several columns, read it: an exponential with both is attention.
    SUMMED = enum.auto()
    PRODUCT = enum.auto()
    # A distance is the difference of the norms of its operands and of it, or an angle or a
    # hyperbolic distance that of 1 and of it.
    DISTANCE = enum.auto()
    # A sine, cosine or tangent follows, as that of coordinates times frequencies.
    ANGLE = enum.auto()
    # The value is the product of a solution, and the condition of a matrix multiplies its rounding.
    SOLUTION = enum.auto()
    # The program returns a sum or product of it and other arrays, which nothing else reads.
    PART = enum.auto()
    # Its last digits matter: a comparison, remainder, Fourier transform, or matmul of the highest
    # precision reads it, or a logarithm or quotient follows a subtraction of nearly its value.
    DIGITS = enum.auto()


# Use of a value -> why it is not rounded, most important first.
_WHY_WIDE = {
    Use.SOFTMAX: "a softmax or another sum of exponentials reads the value",
    Use.ORDER: "a choice depends on the value",
    Use.SOLVED: "a factorization or a solve reads the value",
    Use.DISTANCE: "a distance or angle is a small difference of the value and other numbers",
    Use.ANGLE: "a sine, cosine or tangent of the value is computed",
    Use.CHAINED: "a factorization, a solve or an angle reads a linear function of the value",
    Use.DIGITS: "a comparison, remainder, Fourier transform, matmul with precision=HIGHEST or"
    " logarithm of 1 - value is computed",
    Use.SOLUTION: "it multiplies the result of a factorization or a solve, or the next matmul does",
    Use.LOSS: "a loss reads the value",
    Use.MAGNIFIED: "a logarithm, a root or a quotient magnifies the rounding",
    Use.RESULT: "the function returns the value",
    Use.PART: "the function returns a sum or product of the value",
}
DECISIONS = Use.LOSS | Use.ORDER | Use.SOFTMAX
# Uses for which a value should not be rounded.
SENSITIVE = ~(Use.SUMMED | Use.PRODUCT)
# The flags as integers: Python computes with `enum.IntFlag` ten times as slowly.
_NONE, _RESULT, _LOSS, _ORDER, _SOFTMAX = map(int, (Use.NONE, *Use)[:5])
_MAGNIFIED, _SOLVED, _CHAINED, _SUMMED, _PRODUCT, _DISTANCE, _ANGLE, _SOLUTION = map(
    int, [*Use][4:12]
)
_DECISIONS, _DIGITS = int(DECISIONS), int(Use.DIGITS)
_COMPARED = frozenset(("argmax", "argmin", "top_k", "approx_top_k", "sort"))
# Operations that move or choose elements, and leave them as they are.
EXACT = named(
    "convert_element_type reduce_precision copy copy_p neg max min clamp select_n reduce_max"
    " reduce_min cummax cummin reduce_window_max reduce_window_min select_and_gather_add"
    " transpose reshape broadcast_in_dim broadcast_to squeeze expand_dims rev tile slice"
    " dynamic_slice dynamic_update_slice gather scatter scatter-min scatter-max split unstack"
    " concatenate stack pad device_put sharding_constraint layout_constraint reshard relayout"
    " shard_alike stop_gradient name optimization_barrier tie xla_metadata_value ppermute"
    " all_to_all ragged_all_to_all pbroadcast pmax pmin all_gather all_gather_invariant"
    " all_gather_reduced pvary preduced pcast psum psum_invariant unreduced_psum reduce_scatter"
    " unreduced_reduce_scatter"
)
# Operations whose results are squares or absolute values, if their operands are.
_MOVES = named("convert_element_type reshape broadcast_in_dim transpose squeeze copy")
_SUMS = named("reduce_sum cumsum reduce_window_sum scatter-add scatter-sub select_and_scatter_add")
# Of a complex number, they contain the sine and cosine of its imaginary part.
_WAVES = named("exp exp2 expm1 pow")
# Functions whose results are accurate if they were rounded, but not if their operands were.
_FLAT = frozenset(("tanh", "atan", "erf", "erfc", "logistic"))
_MAGNIFYING = named("log log1p log2 sqrt rsqrt cbrt erf_inv acos asin acosh atanh")
_LINEAR = EXACT.union(MATMULS, named("add sub add_any")) - named("max min clamp select_n")
# Operations -> the uses of their results that are uses of their operands. Others pass all uses.
_PASSED = {
    name: passed
    for names, passed in (
        (_FLAT, _DECISIONS | _SOLVED | _RESULT),
        (_MAGNIFYING, _DECISIONS | _SOLVED),
        # Frequencies may be powers, and their logarithms parameters.
        (_WAVES, _DECISIONS | _SOLVED | _ANGLE | _RESULT),
        (named("sin cos tan sinh cosh asinh digamma lgamma erf_inv rem"), _DECISIONS | _SOLVED),
        (
            named("sqrt cbrt abs square integer_pow reduce_prod cumprod"),
            _DECISIONS | _SOLVED | _MAGNIFIED | _ANGLE,
        ),
        (named("add sub add_any"), ~_PRODUCT),
    )
    for name in names
}
# Operations of which a result of the program is only that of the larger operand.
_COMBINING = named("add sub add_any mul div dot_general")


def uses(jaxpr: AnyJaxpr) -> dict[Any, Use]:
    """Returns the uses of the variables of a program, and of the jaxprs inside at any depth.

    Variables without a use are left out. A variable of a function that is called several times has
    the uses of all calls.

    Args:
      jaxpr: the program, of whose results `wide_results` determines the uses.

    Example, the matmuls that should return FP32 sums:
      >>> jaxpr = jax.make_jaxpr(lambda x, w: jax.nn.log_softmax(x @ w))(x, x.T)
      >>> used, matmuls = uses(jaxpr), [e for e in jaxpr.eqns if e.primitive.name == "dot_general"]
      >>> [bool(used.get(e.outvars[0], Use.NONE) & DECISIONS) for e in matmuls]
      [True]
    """
    analysis, used, body = Uses(), {}, _compat.jaxpr_body(jaxpr)[0]
    analysis.facts(body, list(map(int, wide_results(body))))
    for _, facts in analysis.known.values():
        used |= {var: Use(use | used.get(var, _NONE)) for var, use in facts.items()}
    return used


def why_wide(use: Use) -> str:
    """Returns why a value with these uses is not rounded; "" without a use."""
    return next((why for each, why in _WHY_WIDE.items() if each in use), "")


def wide_results(jaxpr: Jaxpr) -> tuple[Use, ...]:
    """Returns `RESULT` for each result of a program in FP32 or wider, and for each scalar."""
    return _wide(var.aval for var in jaxpr.outvars)


def _wide(avals: Iterable[Any]) -> tuple[Use, ...]:
    is_kept = lambda aval: _is_float(aval) and (aval.dtype.itemsize > 2 or aval.ndim == 0)
    return tuple(Use.RESULT if is_kept(aval) else Use.NONE for aval in avals)


# Terms of the sums and matmuls of coordinates.
FEW_TERMS = range(16)


def exact_uses(equation: Equation, use: Use) -> Use:
    """Returns the uses for which a matmul multiplies its FP32 operands as they are.

    An angle needs the coordinates of a point, up to 15. In a wide layer, roundings average out.
    """
    angle = Use.ANGLE if _is_of_point(equation) else Use.NONE
    return use & (Use.SOLVED | Use.CHAINED | Use.DISTANCE | Use.SOLUTION | angle)


def _is_of_point(equation: Equation) -> bool:
    """Returns True for a matmul that sums up to 15 terms, the coordinates of a point."""
    return equation.primitive.name == "dot_general" and terms_of(equation) in FEW_TERMS


class Uses(Backward):
    """Uses of the variables of one jaxpr, for those of its results; see `Use`.

    A factor, bias or mask passes all uses but `RESULT`, which only reaches the last layer, and not
    the whole residual stream: it stops at products of two arrays of the same size, and at sums of
    those of several dimensions.
    """

    nothing = _NONE
    # True if the order of sums of squares is also one of their terms: of nearest neighbours.
    orders_squares: ClassVar[bool] = False

    def __init__(self) -> None:
        # Variables that were broadcast to their shape.
        self._broadcast: set[Any] = set()
        # Squares and absolute values, whose sums are distances if they are those of differences.
        self._squares: set[Any] = set()
        # Transposed variable -> the variable.
        self._transposed: dict[Any, Any] = {}
        # (id of a jaxpr, uses of its results, pass) -> (the jaxpr, the uses inside it).
        self.known: dict[Any, tuple[Any, dict[Any, int]]] = {}
        # Call stack of a matmul -> the uses that its gradients have, too.
        self._of_gradients: dict[Any, int] | None = None

    def join(self, first: Any, second: Any) -> Any:
        return first | second

    def facts(
        self, jaxpr: AnyJaxpr, results: Sequence[Any], start: Start = PROGRAM
    ) -> dict[Any, int]:
        """Returns variable -> uses for one jaxpr, without the jaxprs inside."""
        body = _compat.jaxpr_body(jaxpr)[0]
        key = id(body), tuple(results), start.place.phase
        is_first = self._of_gradients is None
        if self._of_gradients is None:
            self._of_gradients = dict.fromkeys(distance_calls(body), _DISTANCE)
            for call in products_of_solutions(body):
                self._of_gradients[call] = self._of_gradients.get(call, _NONE) | _SOLUTION
        if key not in self.known:
            for equation in body.eqns:
                if self._is_square(equation):
                    self._squares.add(equation.outvars[0])
                if equation.primitive.name == "transpose":
                    self._transposed[equation.outvars[0]] = equation.invars[0]
                elif equation.primitive.name == "broadcast_in_dim":
                    operand, result = equation.invars[0], equation.outvars[0]
                    if operand.aval.size != result.aval.size:
                        self._broadcast.add(result)
            facts = super().facts(body, results, start)
            self.known[key] = body, facts
            self._mark_gradients([*self.known] if is_first else [key], is_first)
        return self.known[key][1]

    def _mark_gradients(self, keys: Sequence[Any], is_first: bool) -> None:
        """Adds the uses of matmuls of the forward pass to their gradients, at any depth."""
        rows = [(self.known[key], key[-1]) for key in keys]
        dots = [
            (equation, used, phase)
            for (body, used), phase in rows
            for equation in body.eqns
            if equation.primitive.name == "dot_general"
        ]
        assert self._of_gradients is not None
        for equation, used, phase in dots if is_first else ():
            use = used.get(equation.outvars[0], _NONE) & (_SOLVED | _CHAINED | _DISTANCE)
            if use and phase_of(str(equation.source_info.name_stack), phase) == FORWARD:
                self._of_gradients[call_stack(equation)] = use
        self._of_gradients.pop((), None)
        for equation, used, _ in dots if self._of_gradients else ():
            var, use = equation.outvars[0], self.of_call(equation)
            used |= {var: used.get(var, _NONE) | use} if use else {}

    def of_call(self, equation: JaxprEqn) -> int:
        """Returns the uses that a matmul has as that of a distance or of a solution."""
        assert self._of_gradients is not None
        return self._of_gradients.get(call_stack(equation), _NONE)

    def equation(self, equation: JaxprEqn, results: list[Any], frame: Frame) -> list[Any]:
        name, count = equation.primitive.name, len(equation.invars)
        if name in CONSTRUCTS or name in OPAQUE_CALLS:
            return self.enter(equation, results, frame)
        if name in SOLVERS:
            return [_SOLVED | _CHAINED] * count
        if name == "optimization_barrier":
            return results
        if name in ("swap", "addupdate"):
            # What is read from a reference of the caller is not known.
            return [_NONE, *map(int, _wide(var.aval for var in equation.invars[1:]))]
        use = _NONE
        for each in results:
            use |= each
        use = use if _is_linear(equation) else use & ~_CHAINED
        if name in _COMPARED:
            keys = count_of_keys(equation) if name == "sort" else count
            return [use | _ORDER] * keys + [use] * (count - keys)
        if not any(_is_float(var.aval) for var in equation.outvars):
            return [_ORDER if _makes_index(equation) else _NONE] * count
        is_sum = name in _SUMS or is_inner_product(equation)
        if name in MATMULS and not is_sum and not is_outer_product(equation):
            # The Gram matrix of rounded rows is one of other rows, and positive definite.
            is_gram = len({self._transposed.get(v, v) for v in equation.invars[:2]}) == 1
            is_chained = use & _CHAINED and not is_gram
            is_chained |= use & _ANGLE and _is_of_point(equation)
            passed = _CHAINED if is_chained else _NONE
            return [_of_factor(equation, n) | passed for n in range(count)]
        if is_sum:
            is_distance = self.orders_squares and equation.invars[0] in self._squares
            order = use & _ORDER if is_distance else _NONE
            used = [_of_summand(equation, use) | order] * count
        else:
            used = [use & self._passed(equation, use)] * count
        if name in ("exp", "exp2") and use & _SUMMED and not use & _PRODUCT:
            used[0] |= _SOFTMAX
        if name in _MAGNIFYING or exponent_of(equation) < 0:
            used[0] |= _MAGNIFIED
        if name in ("acos", "acosh"):
            used[0] |= _DISTANCE
        is_wave = name in _WAVES and array_aval(equation.invars[0]).dtype.kind == "c"
        if is_wave or name in ("sin", "cos", "tan"):
            used[0] |= _ANGLE
        if name == "div":
            used[1] = used[1] & (_DECISIONS | _SOLVED) | _MAGNIFIED
        # The gradient of a softmax multiplies it with other arrays, which attention does not. The
        # gradient of a bias is a sum, but not a loss or that of a softmax.
        of_mul = _PRODUCT | _SUMMED if name == "mul" else _NONE
        hidden = _LOSS if is_sum else of_mul
        if hidden and hidden & used[0]:
            stack = str(equation.source_info.name_stack)
            is_backward = phase_of(stack, frame.place.phase) == BACKWARD
            used = [use & ~hidden for use in used] if is_backward else used
        return used

    def _is_square(self, equation: JaxprEqn) -> bool:
        name, operands = equation.primitive.name, equation.invars
        if name in _MOVES:
            return not is_literal(operands[0]) and operands[0] in self._squares
        is_product = name == "mul" and operands[0] is operands[1]
        return is_product or name in ("square", "abs") or exponent_of(equation) == 2

    def _passed(self, equation: JaxprEqn, use: int) -> int:
        """Returns the uses that the result of an equation passes to its operands."""
        name = "mul" if is_outer_product(equation) else equation.primitive.name
        passed = _PASSED.get(name, ~_NONE)
        if name in ("exp", "exp2") and use & _PRODUCT:
            return passed & (_ORDER | _SOLVED | _ANGLE)
        if use & _RESULT and name in _COMBINING:
            is_small = any(self._is_small(v, equation) for v in equation.invars)
            return passed if is_small else passed & ~_RESULT
        return passed

    def _is_small(self, var: Any, equation: JaxprEqn) -> bool:
        result: Any = equation.outvars[0].aval
        # Terms of a loss are scalars, or one of each example. The sum of weights that divides it is
        # a scalar. Sizes of symbolic shapes can only be compared for equality.
        is_term = result.ndim <= int(equation.primitive.name in _LINEAR) or is_literal(var)
        return is_term or var in self._broadcast or var.aval.size != result.size


def _is_linear(equation: JaxprEqn) -> bool:
    """Returns True for linear operations, and for multiplications with a scalar."""
    if equation.primitive.name in ("mul", "div"):
        return any(getattr(var.aval, "ndim", 1) == 0 for var in equation.invars)
    return equation.primitive.name in _LINEAR


def _makes_index(equation: JaxprEqn) -> bool:
    """Returns True for a conversion to integers, unless they are too few bits for an index.

    A call of a function whose jaxpr is not known, such as `jnp.searchsorted`, counts as one.
    """
    if equation.primitive.name not in ("convert_element_type", "call_hi_primitive"):
        return False
    dtype = array_aval(equation.outvars[0]).dtype
    return jnp.issubdtype(dtype, jnp.integer) and dtype.itemsize > 2


def _of_factor(equation: JaxprEqn, n: int) -> int:
    """Returns the use of an operand of a matmul: a product, or a sum with fixed weights."""
    if equation.primitive.name != "dot_general":
        return _PRODUCT
    dot, other = dot_of(equation), 1 - n
    used = len(dot.contracted[other]) + len(dot.batch[other])
    return _SUMMED if used == array_aval(equation.invars[other]).ndim else _PRODUCT


def _of_summand(equation: JaxprEqn, use: int) -> int:
    """Returns the use of an operand of a sum.

    A result of the program is a loss if the sum leaves only examples, the first dimension.
    """
    result: Any = equation.outvars[0].aval
    keeps_first = is_inner_product(equation) or 0 not in axes_of(equation)
    is_reduced = result.ndim == 0 or (result.ndim == 1 and keeps_first)
    loss = _LOSS if use & _RESULT and is_reduced else _NONE
    name, shape = equation.primitive.name, array_aval(equation.invars[0]).shape
    # A sine needs the coordinates of a distance, and all terms of a phase.
    is_distance = (
        name == "reduce_sum" and math.prod(shape[n] for n in axes_of(equation)) in FEW_TERMS
    )
    angle = _DIGITS | _ANGLE if name == "cumsum" else _ANGLE if is_distance else _NONE
    return _SUMMED | loss | use & (_LOSS | _PRODUCT | _MAGNIFIED | _SOLVED | _CHAINED | angle)


def _is_float(aval: Any) -> bool:
    return hasattr(aval, "dtype") and _is_inexact(aval.dtype)


# Each operand asks for it, and `issubdtype` is slow.
@functools.cache
def _is_inexact(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.inexact)
