"""Runs a traced step again in another format, for the errors of its gradients and outputs."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from jaxmp._core._dtypes import FLOAT32
from jaxmp._core._jaxprs import BACKWARD, Path
from jaxmp._core._programs._bind import runs_in_fp32
from jaxmp._core._programs._constructs import CONSTRUCTS
from jaxmp._core._programs._interpreter import Frame
from jaxmp._core._programs._operations import dot_of
from jaxmp._core._shardings import sampled
from jaxmp._core._typing import Array
from jaxmp._policies._op_table import OpTable
from jaxmp._statistics._measure import fp8_scale
from jaxmp._statistics._observe import Observer

EMULATED = FLOAT16, FLOAT8 = "float16", "float8"
# Elements of a tensor that are compared, at most.
_SAMPLES = 65536
_TABLE = OpTable()


class Emulation(Observer):
    """Observer that computes in another format, and returns samples of the tensors.

    The results of the operations that the op table runs in 16 bits are rounded, in modules and of
    all matmuls: to float16, or to bfloat16 for FP8. Operations that read an FP32 result, as in a
    norm, compute in FP32 until a matmul or the end of the module. For FP8, the operands of matmuls
    without batch axes are rounded to E4M3, and to E5M2 in the backward pass, each with the scale of
    its largest magnitude. Numbers beyond the range of a format become its largest number.

    Args:
      name: "float16", "float8", or "" for the step as it is.
      scale: the loss scale of the backward pass in float16.
    """

    def __init__(self, name: str, scale: Any) -> None:
        super().__init__()
        self.name, self.scale = name, scale
        # Scopes with FP32 results, such as norms, which also sum their gradients in FP32.
        self._fp32_modules: set[Path] = set()

    def measure(self, x: Array, *_: Any) -> Array:
        """Returns a regular subset of the elements."""
        return sampled(x, _SAMPLES)

    def _entered(self, equation: JaxprEqn, operands: list[Any], frame: Frame) -> list[Any]:
        inside, place, primitive = frame.state, frame.place.of(equation), equation.primitive.name
        is_matmul = primitive in ("dot_general", "conv_general_dilated")
        is_inside = self.name and (place.scopes or is_matmul) and runs_in_fp32(equation)
        if not is_inside or primitive in CONSTRUCTS or not any(map(_is_fp32, operands)):
            self.ended = ()
            results = super()._entered(equation, operands, frame)
            if primitive in CONSTRUCTS:
                inside.wide.update(itertools.compress(equation.outvars, self.ended))
            return results
        is_backward = place.phase == BACKWARD
        is_wide = any(map(inside.is_wide, equation.invars)) and primitive != "add_any"
        flags = [inside.is_cotangent(var) for var in equation.invars]
        is_batch_sum = primitive == "reduce_sum" and 0 in equation.params["axes"]
        if is_backward and is_batch_sum and not is_wide and place.scopes not in self._fp32_modules:
            # A sum over the batch, as of a bias, accumulates in the format.
            (result,) = self.bound(equation, [self._narrow(operands[0], True)])
            return [self._wide(result, True)]
        if is_matmul:
            # Parameters, inputs and cotangents may come from outside of the module, in FP32.
            operands = [self._rounded(x, f) for x, f in zip(operands, flags, strict=True)]
        if self.name == FLOAT8 and primitive == "dot_general" and not dot_of(equation).batch[0]:
            pairs = zip(operands, flags, strict=True)
            operands = [_fp8(x, f) if _is_fp32(x) else x for x, f in pairs]
        results = super()._entered(equation, operands, frame)
        if not is_matmul and (is_wide or _TABLE.category(primitive) == "fp32"):
            ends = inside.outputs.last
            inside.wide.update(var for var in equation.outvars if var not in ends)
            self._fp32_modules.add(place.scopes)
            pairs = zip(equation.outvars, results, strict=True)
            return [self._rounded(x, is_backward) if var in ends else x for var, x in pairs]
        return [self._rounded(x, is_backward) for x in results]

    def _scale(self, is_backward: bool) -> Any:
        return self.scale if is_backward and self.name == FLOAT16 else np.float32(1)

    def _narrow(self, x: Array, is_backward: bool) -> Array:
        dtype = np.float16 if self.name == FLOAT16 else jnp.bfloat16
        return _stored(x, dtype, self._scale(is_backward))

    def _wide(self, x: Array, is_backward: bool) -> Array:
        return lax.div(lax.convert_element_type(x, FLOAT32), self._scale(is_backward))

    def _rounded(self, x: Any, is_backward: bool) -> Any:
        if not _is_fp32(x):
            return x
        if self.name == FLOAT8:
            return lax.reduce_precision(x, 8, 7)
        return self._wide(self._narrow(x, is_backward), is_backward)


def _is_fp32(x: Any) -> bool:
    return getattr(x, "dtype", None) == FLOAT32


def _stored(x: Array, dtype: Any, scale: Any) -> Array:
    """Returns an array in a format, times a scale; larger numbers become the largest one."""
    largest = np.float32(jnp.finfo(dtype).max)
    scaled = lax.clamp(-largest, lax.mul(x, scale), largest)
    # XLA may remove a pair of conversions.
    return lax.optimization_barrier(lax.convert_element_type(scaled, jnp.dtype(dtype)))


def _fp8(x: Array, is_cotangent: bool) -> Array:
    name = "float8_e5m2" if is_cotangent else "float8_e4m3fn"
    scale = fp8_scale(lax.reduce_max(lax.abs(x), range(x.ndim)), name)
    return lax.div(lax.convert_element_type(_stored(x, name, scale), FLOAT32), scale)


# Kind -> module -> samples of its tensors.
Samples = dict[str, dict[str, list[Array]]]


@jax.jit
def errors_of(exact: Samples, rounded: Samples) -> dict[str, dict[str, Array]]:
    """Returns the norm of the difference of a module's tensors, over the norm of the tensors."""

    def error(first: list[Array], second: list[Array]) -> Array:
        unit = jnp.finfo(FLOAT32).tiny
        for x in first:
            unit = jnp.maximum(unit, jnp.max(jnp.abs(x), initial=0))
        norm = lambda xs: jnp.sqrt(sum(jnp.sum(jnp.square(x / unit)) for x in xs))
        differences = [x - y for x, y in zip(first, second, strict=True)]
        return norm(differences) / jnp.maximum(norm(first), jnp.finfo(FLOAT32).tiny)

    return {
        kind: {module: error(tensors, rounded[kind][module]) for module, tensors in group.items()}
        for kind, group in exact.items()
    }
