"""Measures the rounding losses of each FP8 matmul in a real program, under jit and scan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from jaxmp._core._dtypes import is_fp8
from jaxmp._core._jaxprs import RECOMPUTE, equations, is_literal, sub_jaxprs
from jaxmp._core._programs._constructs import call_of, cond_of
from jaxmp._core._programs._interpreter import Frame, Interpreter, Place
from jaxmp._core._typing import Array, PyTree
from jaxmp.errors import JaxmpError
from jaxmp.fp8._first_step import is_first_step
from jaxmp.fp8._operands import QUANTIZE
from jaxmp.fp8._quantize import QuantizationStats, stats_of

Stats = dict[str, QuantizationStats]


def with_stats(fn: Callable[..., Any]) -> Callable[..., tuple[Any, Stats]]:
    """Transforms `fn` so that it also returns the losses of its casts to FP8.

    `fn` is traced, and its program is evaluated with the statistics as additional outputs. There
    are no callbacks, and the result does not change. Apply `with_stats` outside of the
    transformation that computes gradients, so that output gradients are measured too, and inside
    `jax.jit`:

        step_with_stats = jax.jit(fp8.with_stats(train_step))

    The statistics cover the FP8 matmuls of `fp8.dot_general`, of layers and of `autocast`,
    including those inside jitted functions, scans and rematerialized regions, whose recomputation
    is not counted again. They do not cover `lax.cond`, `lax.while_loop` and `shard_map`.

    Args:
      fn: a function of pytrees of arrays.

    Returns:
      A function of the same arguments that returns `(result, stats)`. `stats` is a dict from the
      name scopes of a matmul and the operand ("Model/layer:input", ":kernel" or ":output_grad") to
      `QuantizationStats`. If an operand is quantized several times, as with `RowwiseScaling`, the
      later keys end in "#2" and so on. Statistics inside a scan have a first axis of its length.

    Raises:
      JaxmpError: if `fn` is not a function. The returned function raises it when differentiated.

    Example:
      >>> product = fp8.dot_general("current")
      >>> loss = lambda w, x: product(x, w, (((1,), (0,)), ((), ()))).sum()
      >>> grads, stats = with_stats(jax.grad(loss))(jnp.ones((16, 32)), jnp.ones((8, 16)))
      >>> sorted(stats), float(stats[":kernel"].amax), float(stats[":kernel"].saturated)
      ([':input', ':kernel', ':output_grad'], 1.0, 0.0)
    """
    if not callable(fn):
        raise JaxmpError(
            f"fp8.with_stats received {type(fn).__name__} instead of a function: "
            "fp8.with_stats(jax.value_and_grad(loss_fn))(params, x)."
        )

    def observed(*args: PyTree, **kwargs: PyTree) -> tuple[Any, Stats]:
        closed, shape = jax.make_jaxpr(fn, return_shape=True)(*args, **kwargs)
        leaves = [_undifferentiated(leaf) for leaf in jax.tree.leaves((args, kwargs))]
        measure = _Measure()
        outs = measure.run(closed, leaves)
        stats: Stats = {}
        for (name, _), row in measure.side.items():
            stats[_unused(name, stats)] = row
        return jax.tree.unflatten(jax.tree.structure(shape), outs), stats

    return observed


def _unused(place: str, stats: Stats) -> str:
    names = (f"{place}#{number}" for number in range(2, len(stats) + 3))
    return place if place not in stats else next(name for name in names if name not in stats)


@jax.custom_jvp
def _undifferentiated(x: Array) -> Array:
    return x


@_undifferentiated.defjvp
def _refuse(primals: object, tangents: object) -> NoReturn:
    del primals, tangents
    raise JaxmpError(
        "fp8.with_stats cannot be differentiated. Apply it outside of the gradient function: "
        "fp8.with_stats(jax.value_and_grad(loss_fn))."
    )


class _Measure(Interpreter):
    """Interpreter that gathers statistics, with keys such as ("Model/layer:input", an object)."""

    has_side_results = True
    drops_derivatives = True

    def __init__(self) -> None:
        super().__init__()
        # id of a jaxpr -> (the jaxpr, True if it quantizes). Storing the jaxpr keeps its id valid.
        self.known: dict[int, tuple[Any, bool]] = {}

    def quantizes(self, jaxpr: Jaxpr | ClosedJaxpr) -> bool:
        if id(jaxpr) not in self.known:
            quantizes = any(
                _role(equation) or any(map(self.quantizes, sub_jaxprs(equation)))
                for equation in equations(jaxpr, inside=False)
            )
            self.known[id(jaxpr)] = jaxpr, quantizes
        return self.known[id(jaxpr)][1]

    def equation(self, equation: JaxprEqn, operands: list[Any], frame: Frame) -> list[Any]:
        name, role = equation.primitive.name, _role(equation)
        if role and frame.place.of(equation).phase != RECOMPUTE:
            return self._quantize(equation, operands, frame.place.of(equation), role)
        if role or not any(map(self.quantizes, sub_jaxprs(equation))):
            return self.bound(equation, operands)
        if name == "cond" and is_first_step(cond_of(equation).branches[0]):
            # The version for the first step also has the results of all other steps.
            return self.run(cond_of(equation).branches[0], operands[1:], frame.place.of(equation))
        if name in ("cond", "while", "shard_map"):
            return self.bound(equation, operands)
        return self.enter(equation, operands, frame)

    def _quantize(
        self, equation: JaxprEqn, operands: list[Any], place: Place, role: str
    ) -> list[Any]:
        quantization = _Quantization(operands[0])
        results = quantization.run(call_of(equation).jaxpr, operands)
        for stats in quantization.rows:
            self.side[f"{'/'.join(place.scopes)}:{role}", object()] = stats
        return results


class _Quantization(Interpreter):
    """Interpreter of one quantization: the input of its clamp is the scaled operand."""

    def __init__(self, operand: Array) -> None:
        super().__init__()
        self.operand = operand
        self.clamped: dict[Any, Any] = {}
        self.rows: list[QuantizationStats] = []

    def equation(self, equation: JaxprEqn, operands: list[Any], frame: Frame) -> list[Any]:
        name, clamped = equation.primitive.name, self.clamped
        if name == "clamp":
            clamped[equation.outvars[0]] = operands[1]
        if name == "add" and not is_literal(equation.invars[0]):
            # `quantize` adds NaN to elements that are not finite.
            clamped[equation.outvars[0]] = clamped.get(equation.invars[0])
        results = self.bound(equation, operands)
        if name == "convert_element_type" and is_fp8(results[0].dtype):
            stats = stats_of(self.operand, clamped[equation.invars[0]], results[0].dtype)
            self.rows.append(stats)
        return results


def _role(equation: JaxprEqn) -> str:
    """Returns the role of the operand that an equation quantizes; "" if it does not quantize."""
    name = equation.params.get("name")
    # A scan over layers moves the constants of its body to calls without operands.
    if not isinstance(name, str) or QUANTIZE not in name or not equation.invars:
        return ""
    return name.removeprefix(QUANTIZE)
