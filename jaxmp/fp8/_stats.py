"""Measures the rounding losses of each FP8 matmul in a real program, under jit and scan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
from jax import lax
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr

from jaxmp._core._compat import jaxpr_body, scan_counts
from jaxmp._core._dtypes import is_fp8
from jaxmp._core._jaxprs import (
    FORWARD,
    RECOMPUTE,
    Equation,
    is_literal,
    phase_of,
    scope_names,
    sub_jaxprs,
)
from jaxmp._core._programs._constructs import CALLS, CUSTOM_DERIVATIVES, REMATS
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
        outs, rows = _Harvest().run(closed, leaves, _Place((), FORWARD))
        stats: Stats = {}
        for place, row in rows:
            stats[_unused(place, stats)] = row
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


class _Place(NamedTuple):
    """Name scopes of an equation, and the pass to which it belongs."""

    names: tuple[str, ...]
    phase: str


class _Seen(NamedTuple):
    place: str
    stats: QuantizationStats


class _Harvest:
    """Interpreter that evaluates a jaxpr and gathers statistics."""

    def __init__(self) -> None:
        # id of a jaxpr -> (the jaxpr, True if it quantizes). Storing the jaxpr keeps its id valid.
        self.known: dict[int, tuple[Any, bool]] = {}

    def quantizes(self, jaxpr: Jaxpr | ClosedJaxpr) -> bool:
        body = jaxpr_body(jaxpr)[0]
        if id(body) not in self.known:
            quantizes = any(
                _role(equation) or any(map(self.quantizes, sub_jaxprs(equation)))
                for equation in body.eqns
            )
            self.known[id(body)] = body, quantizes
        return self.known[id(body)][1]

    def run(
        self, jaxpr: Jaxpr | ClosedJaxpr, args: list[Any], outer: _Place
    ) -> tuple[list, list[_Seen]]:
        body, consts = jaxpr_body(jaxpr)
        values = dict(zip((*body.constvars, *body.invars), (*consts, *args), strict=True))
        rows: list[_Seen] = []
        read = lambda var: var.val if is_literal(var) else values[var]
        for equation in body.eqns:
            info = equation.source_info
            own = str(info.name_stack)
            place = _Place(outer.names + scope_names(own), phase_of(own, outer.phase))
            stack = source_info_util.current_name_stack() + info.name_stack
            operands = list(map(read, equation.invars))
            with source_info_util.user_context(info.traceback, name_stack=stack):
                outs, seen = self.equation(equation, operands, place)
            rows += seen
            values.update(zip(equation.outvars, outs, strict=True))
        return list(map(read, body.outvars)), rows

    def equation(
        self, equation: Equation, operands: list[Any], place: _Place
    ) -> tuple[list, list[_Seen]]:
        name, params = equation.primitive.name, equation.params
        role = _role(equation)
        if role and place.phase != RECOMPUTE:
            return _quantize(equation, operands, f"{'/'.join(place.names)}:{role}")
        if role or not any(map(self.quantizes, sub_jaxprs(equation))):
            return _bound(equation, operands), []
        if name == "scan":
            return self.scan(equation, operands, place)
        if name == "cond" and (branches := params["branches"]) and is_first_step(branches[0]):
            # The version for the first step also has the results of all other steps.
            return self.run(branches[0], operands[1:], place)
        if name not in CALLS | REMATS | CUSTOM_DERIVATIVES:
            return _bound(equation, operands), []
        if params.get("prevent_cse") and params.get("differentiated"):
            # As in JAX's lowering: prevents CSE of the recomputation with the forward pass.
            operands = list(lax.optimization_barrier(tuple(operands)))
        return self.run(sub_jaxprs(equation)[0], operands, place)

    def scan(
        self, equation: Equation, operands: list[Any], place: _Place
    ) -> tuple[list, list[_Seen]]:
        params = equation.params
        consts, carried = scan_counts(params)
        first = consts + carried
        places: list[str] = []

        def body(carry: Sequence[Any], xs: Sequence[Any]) -> Any:
            outs, rows = self.run(params["jaxpr"], [*operands[:consts], *carry, *xs], place)
            places[:] = [row.place for row in rows]
            return outs[:carried], (outs[carried:], [row.stats for row in rows])

        options = {key: params[key] for key in ("length", "reverse", "unroll")}
        carry, (ys, stats) = lax.scan(body, operands[consts:first], operands[first:], **options)
        return [*carry, *ys], list(map(_Seen, places, stats))


def _role(equation: Equation) -> str:
    """Returns the role of the operand that an equation quantizes; "" if it does not quantize."""
    name = equation.params.get("name")
    return name.removeprefix(QUANTIZE) if isinstance(name, str) and QUANTIZE in name else ""


def _quantize(equation: Equation, operands: list[Any], place: str) -> tuple[list, list[_Seen]]:
    """Evaluates the equations of a quantization: the input of its clamp is the scaled operand."""
    body, consts = jaxpr_body(equation.params["jaxpr"])
    values = dict(zip((*body.constvars, *body.invars), (*consts, *operands), strict=True))
    clamped: dict[Any, Any] = {}
    rows: list[_Seen] = []
    read = lambda var: var.val if is_literal(var) else values[var]
    for inner in body.eqns:
        inputs = list(map(read, inner.invars))
        values.update(zip(inner.outvars, _bound(inner, inputs), strict=True))
        if inner.primitive.name == "clamp":
            clamped[inner.outvars[0]] = inputs[1]
        if inner.primitive.name == "add" and not is_literal(inner.invars[0]):
            # `quantize_finite` adds NaN to elements that are not finite.
            clamped[inner.outvars[0]] = clamped.get(inner.invars[0])
        if inner.primitive.name == "convert_element_type" and is_fp8(inner.params["new_dtype"]):
            stats = stats_of(operands[0], clamped[inner.invars[0]], inner.params["new_dtype"])
            rows.append(_Seen(place, stats))
    return list(map(read, body.outvars)), rows


def _bound(equation: Equation, operands: list[Any]) -> list[Any]:
    primitive, params = equation.primitive, equation.params
    if hasattr(primitive, "get_bind_params"):
        params = primitive.get_bind_params(params)
    with equation.ctx.manager:
        outs = primitive.bind(*operands, **params)
    return list(outs) if primitive.multiple_results else [outs]
