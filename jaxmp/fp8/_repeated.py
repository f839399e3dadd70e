"""Quantizes kernels once for all iterations of a loop that does not change them.

The microbatches of a step run in a `lax.scan` with the same weights. XLA for GPUs moves no
quantization out of a loop, so that each microbatch would measure and quantize every FP32 kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, jaxpr_as_fun

from jaxmp._core._jaxprs import QUANTIZE, equations, sub_jaxprs
from jaxmp._core._programs._constructs import CALLS, REMATS, call_of, scan_of
from jaxmp._core._programs._interpreter import Frame, Interpreter, Place
from jaxmp._core._typing import PyTree
from jaxmp.fp8._operands import COPIES, repeating

# Names of the jitted functions that quantize kernels.
_KERNELS = frozenset({QUANTIZE + "kernel", COPIES + "kernel"})
# Equations whose jaxpr is entered. `custom_jvp_call` is the identity of `differentiated_once`.
_ENTERED = CALLS | REMATS | {"scan"}

# Indices of equations: that of a jaxpr, and those of the equations that contain it.
_Path: TypeAlias = tuple[int, ...]


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
    leaves = _Microbatches().run(closed, []) if _has_kernel(closed) else jaxpr_as_fun(closed)()
    return jax.tree.unflatten(jax.tree.structure(shape), leaves)


def _has_kernel(jaxpr: Jaxpr | ClosedJaxpr) -> bool:
    return any(map(_is_kernel, equations(jaxpr)))


def _is_kernel(equation: JaxprEqn) -> bool:
    # A scan over layers moves the constants of its body to calls without operands.
    return bool(equation.invars) and equation.params.get("name") in _KERNELS


class _Microbatches(Interpreter):
    """Interpreter of a program that contains the loop over microbatches."""

    def equation(self, equation: JaxprEqn, operands: list[Any], frame: Frame) -> list[Any]:
        if equation.primitive.name != "scan":
            return self.bound(equation, operands)
        loop = scan_of(equation)
        consts, carry, rows = loop.split(operands)
        before = _Before({}, {})
        before.run(loop.jaxpr, [*consts, *[None] * len([*carry, *rows])], state=())
        return _Inside(before.kernels, before.rows).scan(equation, operands, frame.place, ())


class _Before(Interpreter):
    """Interpreter of the body of a loop that quantizes kernels before the loop.

    The value of a variable is None if it is known in the loop only.

    kernels: path of an equation -> its results. They are stacked for each scan in which the kernel
      is a row of an array.
    rows: path of a scan -> paths of the kernels that are stacked for it.
    """

    def __init__(self, kernels: dict[_Path, Any], rows: dict[_Path, list[_Path]]) -> None:
        super().__init__()
        self.kernels, self.rows = kernels, rows

    def equation(self, equation: JaxprEqn, operands: list[Any], frame: Frame) -> list[Any]:
        path, name = (*frame.state, frame.index), equation.primitive.name
        is_known = all(value is not None for value in operands) and not equation.effects
        if is_known and _is_kernel(equation):
            if path not in self.kernels:
                self.kernels[path] = self.bound(equation, operands)
            return self.kernels[path]
        if name in _ENTERED and any(map(_has_kernel, sub_jaxprs(equation))):
            if name == "scan":
                return self._quantize_rows(equation, operands, path)
            return self.run(call_of(equation).jaxpr, operands, frame.place, path)
        if name == "custom_jvp_call" and not is_known:
            return self.run(call_of(equation).jaxpr, operands, frame.place, path)
        unknown: list[Any] = [None] * len(equation.outvars)
        return self.bound(equation, operands) if is_known else unknown

    def _quantize_rows(self, equation: JaxprEqn, operands: list[Any], path: _Path) -> list[Any]:
        """Quantizes the kernels of a scan: constants once, and rows in a scan."""
        loop = scan_of(equation)
        consts, carry, rows = loop.split(operands)
        first = [*consts, *[None] * len(carry)]
        self.run(loop.jaxpr, [*first, *[None] * len(rows)], state=path)

        def row(carry: None, xs: list[Any]) -> tuple[None, dict[_Path, Any]]:
            inner = _Before(dict(self.kernels), self.rows)
            inner.run(loop.jaxpr, [*first, *xs], state=path)
            own = {key: inner.kernels[key] for key in inner.kernels if key not in self.kernels}
            self.rows[path] = list(own)
            return carry, own

        if any(row is not None for row in rows):
            _, stacked = lax.scan(row, None, rows, **loop.options)
            self.kernels |= stacked
        return [None] * len(equation.outvars)


class _Inside(Interpreter):
    """Interpreter of the body of a loop with the kernels that `_Before` has quantized."""

    def __init__(self, kernels: dict[_Path, Any], rows: dict[_Path, list[_Path]]) -> None:
        super().__init__()
        self.kernels, self.rows = kernels, rows

    def equation(self, equation: JaxprEqn, operands: list[Any], frame: Frame) -> list[Any]:
        path = (*frame.state, frame.index)
        if path in self.kernels:
            return self.kernels[path]
        if not any(key[: len(path)] == path for key in self.kernels):
            return self.bound(equation, operands)
        if equation.primitive.name == "scan":
            return self.scan(equation, operands, frame.place, path)
        return self.enter(equation, operands, frame, path)

    def scan(self, equation: JaxprEqn, operands: list[Any], place: Place, path: _Path) -> list[Any]:
        """Evaluates a scan whose kernels are constants, and rows of arrays."""
        loop = scan_of(equation)
        consts, init, xs = loop.split(operands)

        def body(carry: list[Any], xs: tuple[list[Any], dict[_Path, Any]]) -> Any:
            rows, own = xs
            inner = _Inside({**self.kernels, **own}, self.rows)
            results = inner.run(loop.jaxpr, [*consts, *carry, *rows], place, path)
            return results[: loop.carry], results[loop.carry :]

        own = {key: self.kernels[key] for key in self.rows.get(path, ())}
        carry, ys = lax.scan(body, init, (xs, own), **loop.options)
        return [*carry, *ys]
