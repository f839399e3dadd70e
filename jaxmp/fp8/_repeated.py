"""Quantizes kernels once for all iterations of a loop that does not change them.

The microbatches of a step run in a `lax.scan` with the same weights. XLA for GPUs moves no
quantization out of a loop, so that each microbatch would measure and quantize every FP32 kernel.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var, jaxpr_as_fun

from jaxmp._core import _compat
from jaxmp._core._compat import jaxpr_body
from jaxmp._core._dtypes import is_fp8
from jaxmp._core._jaxprs import equations, is_literal
from jaxmp._core._programs._bind import as_recorded, bind
from jaxmp._core._programs._constructs import CALLS, REMATS, call_of, scan_of
from jaxmp._core._programs._interpreter import Frame, Interpreter
from jaxmp._core._typing import Array, PyTree
from jaxmp.fp8._copies import COPIES
from jaxmp.fp8._operands import QUANTIZE

# Names of the jitted functions that quantize kernels.
_KERNELS = frozenset({QUANTIZE + "kernel", COPIES + "kernel"})

_is_repeated: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "jaxmp_fp8_is_repeated", default=False
)


def is_repeated() -> bool:
    """Returns True while a function is traced that runs several times with the same kernels."""
    return _is_repeated.get()


@contextlib.contextmanager
def repeating() -> Iterator[None]:
    token = _is_repeated.set(True)
    try:
        yield
    finally:
        _is_repeated.reset(token)


def scan_with_same_kernels(
    body: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]], init: PyTree, xs: PyTree
) -> tuple[PyTree, PyTree]:
    """Returns `lax.scan(body, init, xs)`, in which kernels are quantized before the loop.

    A kernel is quantized before the loop if it depends neither on the carry nor on `xs`. This
    includes the kernels of layers in a `lax.scan` or `jax.checkpoint` inside of `body`, but not
    those in a `cond`, `while_loop` or `shard_map`. The results are equal to those of `lax.scan`.
    The quantized kernels of all layers, one or two bytes per element, are in memory together.
    """

    def loop() -> tuple[PyTree, PyTree]:
        return lax.scan(body, init, xs)

    with repeating():
        closed, shape = jax.make_jaxpr(loop, return_shape=True)()
    leaves = jaxpr_as_fun(closed)() if not _has_kernel(closed) else _Repeated().run(closed, [])
    return jax.tree.unflatten(jax.tree.structure(shape), leaves)


def _has_kernel(jaxpr: ClosedJaxpr) -> bool:
    return any(map(_is_kernel, equations(jaxpr)))


def _microbatches(equation: JaxprEqn, operands: list[Any]) -> list[Any]:
    loop = scan_of(equation)
    consts, carry, rows = loop.split(operands)
    unknown: list[None] = [None] * len([*carry, *rows])
    plan = _make_plan(loop.jaxpr, [*[_CONSTANT] * len(consts), *unknown])
    if plan is None:
        return _results(equation, operands)
    args = [*consts, *unknown]
    quantized = {_CONSTANT: _quantized(loop.jaxpr, args, plan, _CONSTANT), _SCANNED: {}}
    return _scan(equation, operands, plan, quantized)


# ---------------------------------------------------------------------------
# Which kernels
# ---------------------------------------------------------------------------

# Levels of variables inside a loop: equal in all iterations, or a row of an array that is known
# before the loop. None: known in the loop only.
_CONSTANT, _SCANNED = 0, 1
_Level = int | None


class _Plan(NamedTuple):
    """Equations of a jaxpr that quantize kernels, or contain such equations, by their indices."""

    # Index -> largest level of the operands that are known before the loop.
    levels: dict[int, int]
    # Index -> plan of the jaxpr of a call or scan.
    inner: dict[int, _Plan]
    # Variables that are known before the loop.
    known: dict[Var, int]


def _is_kernel(equation: JaxprEqn) -> bool:
    # A scan over layers moves the constants of its body to calls without operands.
    return bool(equation.invars) and equation.params.get("name") in _KERNELS


def _make_plan(jaxpr: Jaxpr | ClosedJaxpr, levels: Sequence[_Level]) -> _Plan | None:
    """Returns the plan of a jaxpr; None if it quantizes no kernel that is known before the loop.

    Args:
      jaxpr: the jaxpr.
      levels: those of its arguments.
    """
    body, _ = jaxpr_body(jaxpr)
    plan = _Plan({}, {}, dict.fromkeys(body.constvars, _CONSTANT))
    known = plan.known
    known |= {v: lv for v, lv in zip(body.invars, levels, strict=True) if lv is not None}
    for index, equation in enumerate(body.eqns):
        own = [_CONSTANT if is_literal(v) else known.get(v) for v in equation.invars]
        highest = max((level for level in own if level is not None), default=_CONSTANT)
        if None not in own and not equation.effects:
            known |= dict.fromkeys(equation.outvars, highest)
            if _is_kernel(equation):
                plan.levels[index] = highest
        elif _is_identity(equation):
            pairs = zip(equation.outvars, own, strict=True)
            known |= {var: level for var, level in pairs if level is not None}
        elif (inner := _inner_plan(equation, own)) is not None:
            plan.levels[index], plan.inner[index] = highest, inner
    return plan if plan.levels else None


def _is_identity(equation: JaxprEqn) -> bool:
    """Returns True for a function with a derivative rule that returns its arguments."""
    if equation.primitive.name != "custom_jvp_call":
        return False
    body, _ = jaxpr_body(call_of(equation).jaxpr)
    return not body.eqns and list(body.invars) == list(body.outvars)


def _inner_plan(equation: JaxprEqn, levels: list[_Level]) -> _Plan | None:
    name = equation.primitive.name
    if name == "scan":
        loop = scan_of(equation)
        consts, carry, rows = loop.split(levels)
        of = lambda own, level: None if own is None else level
        of_consts = [of(own, _CONSTANT) for own in consts]
        of_xs = [of(own, _SCANNED) for own in rows]
        return _make_plan(loop.jaxpr, [*of_consts, *[None] * len(carry), *of_xs])
    return _make_plan(call_of(equation).jaxpr, levels) if name in CALLS | REMATS else None


# ---------------------------------------------------------------------------
# Before the loop
# ---------------------------------------------------------------------------


def _quantized(
    jaxpr: Jaxpr | ClosedJaxpr, args: list[Any], plan: _Plan, level: int
) -> dict[int, Any]:
    """Quantizes the kernels of a plan at one level.

    Args:
      jaxpr: the jaxpr.
      args: its arguments; None for those that are not known before the loop.
      plan: the plan of the jaxpr.
      level: `_SCANNED`, or `_CONSTANT` for the other kernels.

    Returns:
      Index of an equation -> its results, or the quantized kernels of its jaxpr.
    """
    body, consts = jaxpr_body(jaxpr)
    indices = {index for index, own in plan.levels.items() if own == level}
    values: dict[Var, Any] = dict(zip(body.constvars, consts, strict=True))
    values |= {v: a for v, a in zip(body.invars, args, strict=True) if a is not None}
    read = lambda var: var.val if is_literal(var) else values.get(var)
    quantized: dict[int, Any] = {}
    for index in _required(body, plan, indices):
        equation = body.eqns[index]
        operands = [read(var) for var in equation.invars]
        with as_recorded(equation):
            if index in indices and index in plan.inner:
                quantized[index] = _quantized_inside(equation, operands, plan.inner[index])
                continue
            results: list[Any] = (
                operands if _is_identity(equation) else _results(equation, operands)
            )
        if index in indices:
            is_single = COPIES not in equation.params["name"]
            quantized[index] = results, _transposed(results) if is_single else {}
        values |= zip(equation.outvars, results, strict=True)
    return quantized


def _transposed(results: list[Array]) -> dict[int, Array]:
    """Returns the transposed copies of FP8 matrices, which the forward dots of a GPU read.

    cuBLAS multiplies FP8 matrices that are contracted along their last axes.
    """
    if _compat.target() != "gpu":
        return {}
    matrices = ((n, x) for n, x in enumerate(results) if x.ndim == 2 and is_fp8(x.dtype))
    return {n: _compat.row_major(x.T) for n, x in matrices}


def _required(body: Any, plan: _Plan, indices: set[int]) -> list[int]:
    """Returns the indices of the equations that `indices` depend on, and these, in order."""
    variables: set[Var] = set()
    required = []
    for index in reversed(range(len(body.eqns))):
        equation = body.eqns[index]
        if index in indices or not variables.isdisjoint(equation.outvars):
            required.append(index)
            variables |= {v for v in equation.invars if not is_literal(v) and v in plan.known}
    return required[::-1]


def _quantized_inside(equation: JaxprEqn, operands: list[Any], plan: _Plan) -> Any:
    """Quantizes the kernels of a call or scan."""
    if equation.primitive.name != "scan":
        jaxpr = call_of(equation).jaxpr
        return {
            level: _quantized(jaxpr, operands, plan, level) for level in set(plan.levels.values())
        }
    loop = scan_of(equation)
    consts, carry, rows = loop.split(operands)
    jaxpr, first = loop.jaxpr, [*consts, *[None] * len(carry)]
    known = [index for index, row in enumerate(rows) if row is not None]
    constant = _quantized(jaxpr, [*first, *[None] * len(rows)], plan, _CONSTANT)

    def row(carry: None, xs: list[Array]) -> tuple[None, Any]:
        part: list[Any] = [None] * len(rows)
        for index, x in zip(known, xs, strict=True):
            part[index] = x
        return None, _quantized(jaxpr, [*first, *part], plan, _SCANNED)

    scanned: Any = {}
    if _SCANNED in plan.levels.values():
        xs = [rows[index] for index in known]
        _, scanned = lax.scan(row, None, xs, **loop.options)
    return {_CONSTANT: constant, _SCANNED: scanned}


# ---------------------------------------------------------------------------
# In the loop
# ---------------------------------------------------------------------------


class _Origins:
    """Arrays that equal a quantized kernel or its bits, and transposed copies of kernels."""

    def __init__(self, kernels: PyTree) -> None:
        # The arrays are stored, which keeps their ids valid.
        self.known = {id(x): (x, x) for x in jax.tree.leaves(kernels)}
        self.transposed: dict[int, Array] = {}

    def of(self, x: object) -> Any:
        """Returns the quantized kernel whose bits are `x`; None if there is none."""
        return self.known.get(id(x), (None, None))[1]

    def result(self, equation: JaxprEqn, operands: list[Any]) -> Any:
        """Returns the result of an equation that names, bitcasts or multiplies by a kernel.

        Returns None for all other equations.
        """
        name = equation.primitive.name
        if name == "dot_general":
            return self.product(equation, operands)
        if name not in ("name", "bitcast_convert_type"):
            return None
        origin = self.of(operands[0])
        if origin is None or not is_fp8(origin.dtype):
            return None
        if name == "name":
            return operands[0]
        if equation.params["new_dtype"] == origin.dtype:
            return origin
        (bits,) = _results(equation, operands)
        self.known[id(bits)] = bits, origin
        return bits

    def product(self, equation: JaxprEqn, operands: list[Any]) -> Any:
        """Returns a product with the transposed copy of a kernel; None if it reads no such copy."""
        (of_lhs, of_rhs), batch = equation.params["dimension_numbers"]
        copy = self.transposed.get(id(operands[1]))
        if copy is None or tuple(of_rhs) != (0,):
            return None
        (out,) = _results(equation, [operands[0], copy], dimension_numbers=((of_lhs, (1,)), batch))
        return out


class _State(NamedTuple):
    """State of a jaxpr in the loop over microbatches.

    plan: its plan.
    quantized: level -> results of `_quantized`.
    origins: the quantized kernels of the enclosing loop.
    """

    plan: _Plan
    quantized: Any
    origins: _Origins


class _Repeated(Interpreter):
    """Interpreter with kernels that are already quantized."""

    def equation(self, equation: JaxprEqn, operands: list[Any], frame: Frame) -> list[Any]:
        is_scan = equation.primitive.name == "scan"
        if frame.state is None:
            return _microbatches(equation, operands) if is_scan else self.bound(equation, operands)
        plan, quantized, origins = frame.state
        if frame.index not in plan.levels:
            result = origins.result(equation, operands)
            return self.bound(equation, operands) if result is None else [result]
        kernels = quantized[plan.levels[frame.index]][frame.index]
        inner = plan.inner.get(frame.index)
        if inner is None:
            results, transposed = kernels
            origins.transposed |= {id(results[n]): x for n, x in transposed.items()}
            return results
        if is_scan:
            return _scan(equation, operands, inner, kernels)
        return self.enter(equation, operands, frame, _State(inner, kernels, origins))


def _scan(equation: JaxprEqn, operands: list[Any], plan: _Plan, quantized: Any) -> list[Any]:
    """Evaluates a scan with quantized kernels: constants, and rows of arrays."""
    loop = scan_of(equation)
    consts, init, scanned_operands = loop.split(operands)
    # Index of an output -> index of the scanned kernels that it equals, and its dtype.
    same: dict[int, tuple[int, Any]] = {}

    def body(carry: Sequence[Any], xs: tuple[list[Any], Any]) -> Any:
        rows, scanned = xs
        kernels = {_CONSTANT: quantized[_CONSTANT], _SCANNED: scanned}
        origins = _Origins(kernels)
        state = _State(plan, kernels, origins)
        outs = _Repeated().run(loop.jaxpr, [*consts, *carry, *rows], state=state)
        leaves = jax.tree.leaves(scanned)
        ys: list[Any] = outs[loop.carry :]
        for index, y in enumerate(ys):
            origin = origins.of(y)
            matches = [n for n, leaf in enumerate(leaves) if leaf is origin]
            if matches:
                same[index], ys[index] = (matches[0], y.dtype), None
        return outs[: loop.carry], ys

    xs = scanned_operands, quantized[_SCANNED]
    carry, ys = lax.scan(body, init, xs, **loop.options)
    stacks = jax.tree.leaves(quantized[_SCANNED])
    for index, (number, dtype) in same.items():
        stack = stacks[number]
        is_same = stack.dtype == dtype
        ys[index] = stack if is_same else lax.bitcast_convert_type(stack, jnp.dtype(dtype))
    return [*carry, *ys]


def _results(equation: JaxprEqn, operands: list[Any], **changes: object) -> list[Any]:
    out = bind(equation, operands, **changes)
    return list(out) if isinstance(out, (list, tuple)) else [out]
