"""Data flow of a training step: labels that connect results with arguments and loss scales."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxmp import _core, _programs
from jaxmp._tools.audit._checks import BROADCASTS, FLOATS, LAYOUT, OpOccurrence, dtype_of

# Operand -> its labels.
LabelsOf = Callable[[_programs.Atom], frozenset[Any]]

# Label of a value of a backward pass, and of values computed from it.
GRADIENT = "computed from gradients"
# Label of a scalar argument, and of values computed from scalars alone.
SCALAR = "a scalar of the state"

# Factors of an argument that is a summand of a value.
PLUS, MINUS, LARGE, SMALL, UNKNOWN = "+", "-", "large", "small", "unknown"
# Factors of an updated argument. Weight decay and averages have small factors.
_UPDATED = frozenset({PLUS, LARGE, UNKNOWN})


class From(NamedTuple):
    """Label of a value that has an argument, possibly times a scalar, as a summand."""

    number: int
    factor: str


class Scalar(NamedTuple):
    """Label of a scalar that was broadcast, with its value if it is a constant."""

    value: float | None
    # True for one of the state.
    is_state: bool = False


class Terms(NamedTuple):
    """Label of a sum of that many 16-bit gradients."""

    number: int


@dataclasses.dataclass(frozen=True, eq=False)
class Update:
    """Label of a sum of an argument and of other values."""

    number: int
    factor: str
    op: OpOccurrence
    # The other arguments that are summands.
    others: frozenset[int]
    has_gradient: bool
    # True if it has most of the weight, and another argument a small one.
    is_average: bool


# The labels that `lineage` propagates.
LINEAGE = (From, Scalar, Terms, Update)
_SAME = _core.named(
    "convert_element_type reshape broadcast_in_dim squeeze expand_dims transpose copy copy_p"
    " optimization_barrier reduce_precision stop_gradient pvary pcast sharding_constraint select_n"
    " max min clamp psum psum_invariant all_gather reduce_scatter"
)


_SUMS = _core.named("add add_any sub")
# Primitives whose results may be labeled `Scalar`, whatever labels the operands have.
MAKES_SCALARS = _core.named("broadcast_in_dim select_n")
_RULES = _SAME | _SUMS | _core.named("neg mul div")


def lineage(op: OpOccurrence, own: frozenset[Any], labels_of: LabelsOf) -> frozenset[Any]:
    """Returns the labels of an equation's results, given those of its operands.

    Args:
      op: the equation; derivatives have no lineage.
      own: labels of its operands, from `LINEAGE` alone.
      labels_of: the labels of its operands.
    """
    equation, name = op.equation, op.name
    is_read = bool(own) or name in _SUMS | MAKES_SCALARS
    if name not in _RULES or not op.is_forward or not is_read:
        return frozenset()
    each = [labels_of(var) & own for var in equation.invars]
    if name == "broadcast_in_dim" and op.result.aval.size != equation.invars[0].aval.size:
        operand = equation.invars[0]
        scalars = frozenset(_scalars(operand, each[0]))
        is_known = bool(scalars) or math.prod(operand.aval.shape) != 1
        return scalars if is_known else frozenset({Scalar(None, SCALAR in labels_of(operand))})
    if name in _SAME:
        numbers = (constant(var, op) for var in equation.invars[1:])
        return frozenset(Scalar(number) for number in numbers if number is not None).union(*each)
    if name == "neg":
        return _negated(each[0])
    if name in ("mul", "div"):
        return _scaled(name, equation.invars, each)
    second = _negated(each[1]) if name == "sub" else each[1]
    summands = {x for x in each[0] | second if isinstance(x, From)}
    return frozenset(summands | _updates(op, summands, labels_of) | _terms(op, labels_of))


def is_argument(labels: Iterable[Any]) -> bool:
    """Returns True for the labels of an argument to which nothing was added, such as a weight."""
    types = set(map(type, labels))
    return From in types and Update not in types


def number_of(var: _programs.Atom) -> float | None:
    """Returns the value of a constant real scalar, or None."""
    if not _programs.is_literal(var) or math.prod(var.aval.shape) != 1:
        return None
    is_real = var.aval.dtype != jax.dtypes.float0 and not np.iscomplexobj(var.val)
    return float(var.val) if is_real else None


def _negated(labels: Iterable[Any]) -> frozenset[Any]:
    opposite = {PLUS: MINUS, MINUS: PLUS}
    own = (x for x in labels if isinstance(x, From))
    return frozenset(From(number, opposite.get(factor, factor)) for number, factor in own)


def _scaled(
    name: str, operands: Sequence[_programs.Atom], each: list[frozenset[Any]]
) -> frozenset[Any]:
    for array, scalar in ((0, 1), (1, 0)) if name == "mul" else ((0, 1),):
        factor = _factor(name, operands[scalar], each[scalar])
        own = [x for x in each[array] if isinstance(x, From)]
        if factor is not None and own:
            return frozenset(From(x.number, _times(x.factor, factor)) for x in own)
    return frozenset()


def _factor(name: str, scalar: _programs.Atom, labels: frozenset[Any]) -> str | None:
    """Returns the size of a scalar factor; None for an array."""
    values = [x.value for x in _scalars(scalar, labels)]
    if not values and math.prod(scalar.aval.shape) != 1:
        return None
    if not values or values[0] is None or (name == "div" and values[0] == 0):
        return UNKNOWN
    size = abs(1 / values[0] if name == "div" else values[0])
    return PLUS if size == 1 else LARGE if size >= 0.5 else SMALL


def _times(first: str, second: str) -> str:
    if second == PLUS:
        return first
    return SMALL if SMALL in (first, second) else UNKNOWN if UNKNOWN in (first, second) else LARGE


def _updates(op: OpOccurrence, summands: set[Any], labels_of: LabelsOf) -> set[Any]:
    """Returns labels of the arguments that a sum updates.

    An argument that is also subtracted, as in `p + (new - p)`, is replaced, not updated.
    """
    numbers = {x.number for x in summands}
    replaced = {x.number for x in summands if x.factor == MINUS}
    has_gradient = any(GRADIENT in labels_of(var) for var in op.operands)
    updates = set()
    for number, factor in summands:
        if factor in _UPDATED and number not in replaced:
            others = frozenset(numbers - {number})
            small = any(x.factor == SMALL and x.number in others for x in summands)
            # A factor of 0.999 is 1 in bfloat16.
            is_average = factor in (LARGE, PLUS) and small
            updates.add(Update(number, factor, op, others, has_gradient, is_average))
    return updates


def _terms(op: OpOccurrence, labels_of: LabelsOf) -> set[Any]:
    """Returns the number of summed gradients, if all summands are gradients."""
    if not _core.is_16bit(dtype_of(op.result)) or op.result.aval.size == 1:
        return set()
    counts = []
    for var in op.operands:
        labels = labels_of(var)
        if GRADIENT not in labels or any(isinstance(x, From) for x in labels):
            return set()
        counts.append(max((x.number for x in labels if isinstance(x, Terms)), default=1))
    return {Terms(sum(counts))}


def is_scale(op: OpOccurrence, var: _programs.Atom, labels_of: LabelsOf) -> bool:
    """Returns True if an equation of a backward pass reads a loss scale as its operand `var`.

    A loss scale is a scalar of the program's state, or a large constant factor. Under `vmap`, it
    was broadcast. That of `jaxmp.grad` is selected, and NaN if the loss is not finite.
    """
    rows = _scalars(var, labels_of(var)) if dtype_of(var) in _core.CASTABLE else []
    if SCALAR in labels_of(var) or any(row.is_state for row in rows):
        return True
    if _programs.is_literal(var) and op.name not in ("mul", "div", "broadcast_in_dim"):
        return False
    sizes = [abs(row.value or 0) for row in rows]
    if op.name == "div" and var is op.operands[1]:
        sizes = [1 / size if size else 0 for size in sizes]
    is_scalar = any(math.prod(result.aval.shape) == 1 for result in op.equation.outvars)
    is_scalar = is_scalar or any(map(math.isnan, sizes))
    is_power = lambda size: size >= 128 and math.frexp(size)[0] == 0.5
    return any(is_power(size) or (is_scalar and 8 <= size < math.inf) for size in sizes)


def constant(var: _programs.Atom, op: OpOccurrence) -> float | None:
    """Returns the value of a constant scalar, which may be broadcast."""
    source = op.body.source_of(var, BROADCASTS)
    if math.prod(getattr(source.aval, "shape", (0,))) != 1:
        return None
    value = op.audit.known.value(source)
    return None if value is None or value.dtype.kind in "bc" else float(value.reshape(()))


def _scalars(var: _programs.Atom, labels: Iterable[Any]) -> list[Scalar]:
    """Returns the scalars that an operand is made of, itself if it is a number."""
    number = number_of(var)
    return [x for x in labels if isinstance(x, Scalar)] if number is None else [Scalar(number)]


_PRODUCTS = {"mul", *_programs.MATMULS}
_JOINS = _core.named(
    "add add_any sub max min select_n concatenate stack pad clamp dynamic_update_slice scatter"
    " scatter-add scatter-min scatter-max"
)
_LINEAR = _programs.EXACT.union(_core.named("abs reduce_sum cumsum reduce_window_sum")) - _JOINS
_LIMITS = _core.named("max min clamp select_n")
# A loss scale may be stored as its logarithm.
_EXPONENTIALS = _core.named("exp exp2 pow shift_left")
_ROOTS = {"sqrt": 0.5, "rsqrt": -0.5, "square": 2.0}


class Power(NamedTuple):
    """Label of a value that is proportional to a power of a scalar argument."""

    number: int
    # None: it depends on the argument in another way.
    exponent: float | None
    # `powers_after` propagates it.
    survives = frozenset[str]()


def powers_after(op: OpOccurrence, labels_of: LabelsOf) -> frozenset[Power]:
    """Returns the powers of an equation's results, given the labels of its operands."""
    name, operands = op.name, op.operands
    kind = getattr(dtype_of(op.result), "kind", "b")
    if kind == "b" or (kind in "iu" and op.result.aval.size != 1):
        return frozenset()
    if name == "select_n":
        operands = operands[1:]
    each = [powers_of(labels_of(var)) for var in operands]
    numbers = {number for row in each for number in row}
    powers = {n: _exponent(name, op, [row.get(n, 0.0) for row in each]) for n in numbers}
    return frozenset(Power(n, power) for n, power in powers.items() if power != 0)


def powers_of(labels: Iterable[Any]) -> dict[int, float | None]:
    """Returns scalar argument -> exponent; None if a value depends on it in another way."""
    powers: dict[int, float | None] = {}
    for label in labels:
        if isinstance(label, Power):
            same = label.exponent == powers.get(label.number, label.exponent)
            powers[label.number] = label.exponent if same else None
    return powers


def _exponent(name: str, op: OpOccurrence, exponents: list[float | None]) -> float | None:
    known = [exponent for exponent in exponents if exponent is not None]
    if name in _EXPONENTIALS and op.result.aval.size == 1:
        return _sign_of_exponential(op)
    if len(known) < len(exponents):
        return None
    if name in _PRODUCTS:
        return sum(known)
    if name == "div":
        return known[0] - known[1]
    if name in _ROOTS or name == "integer_pow":
        return known[0] * (_ROOTS[name] if name in _ROOTS else _programs.exponent_of(op.equation))
    if name in _LINEAR:
        return known[0]
    # All operations of a backward pass are linear in its cotangents.
    if name in _JOINS or op.is_backward:
        pairs = zip(op.operands[-len(known) :], known, strict=True)
        others = {exponent for var, exponent in pairs if exponent or not _is_neutral(var, op)}
        return others.pop() if len(others) == 1 else None
    return None


def _sign_of_exponential(op: OpOccurrence) -> float:
    """Returns -1 for the inverse of a loss scale: `exp2(-k)`, or a power of 0.5."""
    base, exponent = op.operands[0], op.operands[-1]
    makers = filter(None, map(op.body.maker, near(exponent, op.body, _KEEPS_AXES)))
    is_inverse = any(maker.primitive.name == "neg" for maker in makers)
    return -1.0 if is_inverse != (op.name == "pow" and number_of(base) == 0.5) else 1.0


def _is_neutral(var: _programs.Atom, op: OpOccurrence) -> bool:
    """Returns True for summands that leave a value proportional: 0, an epsilon, infinity and NaN.

    In a backward pass, such are all summands that are not cotangents. Constant limits of a loss
    scale or of cotangents are no summands.
    """
    is_gradient = lambda x: GRADIENT in op.audit.flow.of(x)
    if op.is_backward and not (is_gradient(var) and dtype_of(var) in FLOATS):
        return True
    if op.name in _LIMITS and (op.is_backward or not any(map(is_gradient, op.operands))):
        return op.audit.known.value(var) is not None
    source = op.body.source_of(
        var, _core.named("broadcast_in_dim square neg convert_element_type reshard pvary")
    )
    is_large = lambda value: np.any(np.isfinite(value) & (np.abs(value) > 1e-3))
    return _programs.is_literal(source) and not is_large(source.val)


_KEEPS_AXES = LAYOUT - _core.named("reshape broadcast_in_dim squeeze expand_dims transpose")
_KEEPS_AXES |= _core.named("mul div neg")


def sums_examples(op: OpOccurrence) -> bool:
    """Returns True for a matmul that sums over the leading axes of both operands.

    Such are statistics of a batch or population, as `x.T @ y` and `noise.T @ fitness`. The products
    of activations and weights sum over the last axis of the activations.
    """
    if op.name != "dot_general":
        return False
    dot = _programs.dot_of(op.equation)
    for var, summed, batch in zip(op.operands, dot.contracted, dot.batch, strict=True):
        makers = filter(None, map(op.body.maker, near(var, op.body, _KEEPS_AXES)))
        moves = (_programs.dimensions_of(e) for e in makers if e.primitive.name == "transpose")
        axes = [axis for axis in next(moves, range(var.aval.ndim)) or () if axis is not None]
        free = {axis for n, axis in enumerate(axes) if n not in (*summed, *batch)}
        if any(axes[n] > axis for n in summed for axis in free):
            return False
    return True


# Most values that `near` yields: few operations make a mean, a largest element, or a vector divided
# by its norm.
_MOST_STEPS = 32
# Operations between a product and the same vector, divided by its norm.
_NORMALIZED = LAYOUT | _core.named("mul div jit pjit")


def is_of_power_iteration(op: OpOccurrence) -> bool:
    """Returns True for the products of a spectral norm: of one matrix and of the vector that its
    product with another vector became, divided by its norm.

    The results divide, directly or by their norm.
    """
    if not (op.name == "dot_general" and op.is_forward and _programs.Use.MAGNIFIED in op.use):
        return False
    vector, matrix = _vector_and_matrix(op.equation, op.body)
    is_near = lambda result, vector: result in near(vector, op.body, _NORMALIZED)
    here = _programs.equations(op.body.jaxpr, inside=False)
    products = [each for each in here if each.primitive.name == op.name]
    others = [(each, *_vector_and_matrix(each, op.body)) for each in products]
    return matrix is not None and any(
        other is matrix and (is_near(each.outvars[0], vector) or is_near(op.result, other_vector))
        for each, other_vector, other in others
    )


def _vector_and_matrix(
    equation: _programs.Equation, body: _programs.Body
) -> tuple[_programs.Atom, _programs.Atom | None]:
    """Returns the operands of a product of a vector and a matrix; no matrix for other products."""
    vector, matrix = sorted(equation.invars, key=lambda var: var.aval.size)
    sizes = sorted(size for size in vector.aval.shape if size > 1)
    is_product = len(sizes) == 1 and sum(size > 1 for size in matrix.aval.shape) == 2
    return vector, body.source_of(matrix, LAYOUT) if is_product else None


def near(
    var: _programs.Atom, body: _programs.Body, primitives: frozenset[str] | None = None
) -> Iterator[_programs.Atom]:
    """Yields a value of a jaxpr and the first values that it is computed from.

    Args:
      var: the value.
      body: of the jaxpr.
      primitives: operations whose operands follow; None for all.
    """
    sources, waiting = set[_programs.Atom](), collections.deque([var])
    while waiting and len(sources) < _MOST_STEPS:
        source = waiting.popleft()
        if _programs.is_literal(source) or source in sources:
            continue
        yield source
        sources.add(source)
        maker = body.maker(source)
        if maker is not None and (primitives is None or maker.primitive.name in primitives):
            waiting += maker.invars


# ---------------------------------------------------------------------------
# Walks through calls
# ---------------------------------------------------------------------------

# A variable, and an operation of the jaxpr that contains it.
Value = tuple[_programs.Atom, OpOccurrence]


def walked(waiting: list[Value]) -> Iterator[Value]:
    """Yields values other than literals, each once, while the caller adds further values.

    Args:
      waiting: values. Parameters of calls are replaced by their operands.
    """
    seen: set[_programs.Atom] = set()
    while waiting:
        var, within = through_calls(*waiting.pop())
        if not _programs.is_literal(var) and var not in seen:
            seen.add(var)
            yield var, within


def through_calls(var: _programs.Atom, op: OpOccurrence) -> Value:
    """Returns the operand of a call such as `jnp.cumsum` in place of a parameter of its jaxpr."""
    while op.outer is not None and op.outer.name in _programs.CALLS:
        inner = _programs.inners(op.outer.equation)[0]
        pairs = zip(inner.operands, inner.jaxpr.invars, strict=True)
        operand = next((o for o, i in pairs if i is var), None)
        if operand is None:
            break
        var, op = operand, op.outer
    return var, op


def readers_of(
    var: _programs.Atom, op: OpOccurrence
) -> Iterator[tuple[_programs.Equation, OpOccurrence]]:
    """Yields the equations that read a variable, and those of a call's results."""
    for reader in op.body.consumers.get(var, ()):
        if reader is not None:
            yield reader, op
        elif op.outer is not None and op.outer.name in _programs.CALLS:
            inner = _programs.inners(op.outer.equation)[-1]
            for result, out in zip(inner.results, inner.jaxpr.outvars, strict=True):
                if out is var and result is not None:
                    yield from readers_of(result, op.outer)


def is_constant(var: _programs.Atom, op: OpOccurrence) -> bool:
    """Returns True for a value that is computed from numbers and integers alone."""
    waiting = [(var, op)]
    for value, within in walked(waiting):
        if getattr(dtype_of(value), "kind", "b") not in "biu":
            maker = within.body.maker(value)
            if maker is None:
                return False
            waiting += [(operand, within) for operand in maker.invars]
    return True


def contains(equations: Iterable[_programs.Equation], names: Container[str]) -> bool:
    """Returns True if some equations, or calls among them, contain one of the named primitives."""
    every = (e for each in equations for e in (each, *_programs.equations_inside(each)))
    return any(equation.primitive.name in names for equation in every)


def is_forward(equation: _programs.Equation) -> bool:
    """Returns False for an equation of a backward pass."""
    return _programs.phase_of(str(equation.source_info.name_stack)) == _programs.FORWARD
