"""Runs a traced step again in another format, for the errors of its gradients and outputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from jaxmp._core import _dtypes, _shardings, _typing
from jaxmp._policies import _op_table
from jaxmp._programs import _analysis, _bind, _interpreter, _jaxprs, _observe, _operations
from jaxmp._tools.stats._measure import clipped, fp8_scale

EMULATED = FLOAT16, FLOAT8 = "float16", "float8"
_TABLE = _op_table.OpTable()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Value:
    """Value of a variable of an emulated step.

    array: the array.
    is_cotangent: True if the backward pass made it.
    is_wide: True if it is an FP32 result that is not rounded yet.
    """

    array: Any
    is_cotangent: bool = dataclasses.field(default=False, metadata={"static": True})
    is_wide: bool = dataclasses.field(default=False, metadata={"static": True})


class Emulation(_interpreter.Interpreter):
    """Interpreter that computes in another format.

    The results of the operations that the op table runs in 16 bits are rounded, in modules and of
    all matmuls: to float16, or to bfloat16 for FP8. Operations that read an FP32 result, as in a
    norm, compute in FP32 until a matmul, the end of the module, or that of a loop or branch. For
    FP8, the operands of matmuls without batch axes are rounded to E4M3, and to E5M2 in the backward
    pass, each with the scale of its largest magnitude. Numbers beyond the range of a format become
    its largest number.

    Args:
      name: "float16", "float8", or "" for the step as it is.
      scale: the loss scale of the backward pass in float16.
    """

    drops_derivatives = True

    def __init__(self, name: str, scale: Any) -> None:
        super().__init__()
        self.name, self.scale = name, scale
        self._dtype = jnp.dtype(np.float16 if name == FLOAT16 else jnp.bfloat16)
        # Scopes with FP32 results, such as norms, which also sum their gradients in FP32.
        self._fp32_modules: set[_jaxprs.Path] = set()

    def traced(self, closed: ClosedJaxpr, arrays: list[Any]) -> tuple[ClosedJaxpr, list[Any]]:
        """Returns the emulated step as a program, and its arguments."""

        def step(scale: Any, *arrays: Any) -> list[Any]:
            self.scale = scale
            return list(map(self.array, self.run(closed, list(map(_Value, arrays)))))

        args = [self.scale, *arrays]
        return jax.make_jaxpr(step)(*args), args

    def constant(self, array: Any) -> _Value:
        return _Value(array)

    def array(self, value: Any) -> Any:
        return value.array if isinstance(value, _Value) else value

    def entered(
        self, values: list[Any], entry: _interpreter.Entry, operands: list[Any]
    ) -> list[Any]:
        # The result of an iteration has the type of the carry.
        return list(map(self.array, values)) if entry is _interpreter.Entry.CARRY else values

    def run(
        self,
        jaxpr: Jaxpr | ClosedJaxpr,
        args: Sequence[Any],
        place: _interpreter.Place | None = None,
        state: Any = None,
    ) -> list[Any]:
        place = place or _interpreter.Place()
        values = _as_values(args, place.phase == _jaxprs.BACKWARD)
        return super().run(jaxpr, values, place, _analysis.ModuleOutputs(jaxpr, place, state))

    def equation(
        self, equation: JaxprEqn, operands: list[Any], frame: _interpreter.Frame
    ) -> list[Any]:
        place, outputs, name = frame.place.of(equation), frame.state, equation.primitive.name
        is_backward, is_matmul = place.phase == _jaxprs.BACKWARD, name in _observe.MATMULS
        is_inside = self.name and (place.scopes or is_matmul) and _bind.runs_in_fp32(equation)
        arrays = list(map(self.array, operands))
        if not is_inside or not any(map(_is_fp32, arrays)):
            used = [var in outputs.consumers for var in equation.outvars]
            used = _analysis.used_inside(equation, used) if place.phase == _jaxprs.FORWARD else None
            return _as_values(self.enter(equation, operands, frame, used), is_backward)
        is_wide = any(x.is_wide for x in operands) and name != "add_any"
        is_batch_sum = name == "reduce_sum" and 0 in _operations.axes_of(equation)
        if is_backward and is_batch_sum and not is_wide and place.scopes not in self._fp32_modules:
            # A sum over the batch, as of a bias, accumulates in the format.
            narrow = lax.convert_element_type(self._scaled(arrays[0], True), self._dtype)
            (result,) = self.bound(equation, [lax.optimization_barrier(narrow)])
            wide = lax.convert_element_type(result, _dtypes.FLOAT32)
            return [_Value(lax.div(wide, self._scale(True)), True)]
        flags = [x.is_cotangent for x in operands]
        if is_matmul:
            # Parameters, inputs and cotangents may come from outside of the module, in FP32.
            arrays = [self._rounded(x, f) for x, f in zip(arrays, flags, strict=True)]
        is_dot = name == "dot_general"
        if self.name == FLOAT8 and is_dot and not _operations.dot_of(equation).batch[0]:
            pairs = zip(arrays, flags, strict=True)
            arrays = [_fp8(x, f) if _is_fp32(x) else x for x, f in pairs]
        results = self.bound(equation, arrays)
        ends = equation.outvars
        if not is_matmul and (is_wide or _TABLE.category(name) == "fp32"):
            ends = outputs.last
            self._fp32_modules.add(place.scopes)
        return [
            _Value(self._rounded(x, is_backward), is_backward)
            if var in ends
            else _Value(x, is_backward, is_wide=True)
            for var, x in zip(equation.outvars, results, strict=True)
        ]

    def _scale(self, is_backward: bool) -> Any:
        return self.scale if is_backward and self.name == FLOAT16 else np.float32(1)

    def _scaled(self, x: _typing.Array, is_backward: bool) -> _typing.Array:
        """Returns an array times its scale, in the range of the format."""
        return clipped(lax.mul(x, self._scale(is_backward)), self._dtype)

    def _rounded(self, x: Any, is_backward: bool) -> Any:
        if not _is_fp32(x):
            return x
        scaled = _bind.rounded_to(self._scaled(x, is_backward), self._dtype)
        return lax.div(scaled, self._scale(is_backward))


def _as_values(results: Sequence[Any], is_cotangent: bool) -> list[_Value]:
    """Returns values of results, of which those of loops and branches are plain arrays."""
    values = [x if isinstance(x, _Value) else _Value(x, is_cotangent) for x in results]
    return [dataclasses.replace(x, is_cotangent=x.is_cotangent or is_cotangent) for x in values]


def _is_fp32(x: Any) -> bool:
    return getattr(x, "dtype", None) == _dtypes.FLOAT32


def _fp8(x: _typing.Array, is_cotangent: bool) -> _typing.Array:
    name = "float8_e5m2" if is_cotangent else "float8_e4m3fn"
    scale = fp8_scale(lax.reduce_max(lax.abs(x), range(x.ndim)), name)
    return lax.div(_bind.rounded_to(clipped(lax.mul(x, scale), name), name), scale)


# ---------------------------------------------------------------------------
# Errors
# ---------------------------------------------------------------------------


class Sampler(_observe.Observer):
    """Observer that returns a regular subset of the elements of each tensor."""

    def measure(self, x: _typing.Array, *_: Any) -> _typing.Array:
        return _shardings.sampled(x)


# Kind -> module -> samples of its tensors.
Samples = dict[str, dict[str, list[_typing.Array]]]


@jax.jit
def errors_of(exact: Samples, rounded: Samples) -> dict[str, dict[str, _typing.Array]]:
    """Returns the norm of the difference of a module's tensors, over the norm of the tensors."""

    def error(first: list[_typing.Array], second: list[_typing.Array]) -> _typing.Array:
        unit = jnp.finfo(_dtypes.FLOAT32).tiny
        for x in first:
            unit = jnp.maximum(unit, jnp.max(jnp.abs(x), initial=0))
        norm = lambda xs: jnp.sqrt(sum(jnp.sum(jnp.square(x / unit)) for x in xs))
        differences = [x - y for x, y in zip(first, second, strict=True)]
        return norm(differences) / jnp.maximum(norm(first), jnp.finfo(_dtypes.FLOAT32).tiny)

    return {
        kind: {module: error(tensors, rounded[kind][module]) for module, tensors in group.items()}
        for kind, group in exact.items()
    }
