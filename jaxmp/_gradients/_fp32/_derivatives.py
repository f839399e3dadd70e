"""Matmuls and functions with custom derivatives, whose weight gradients are in FP32."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from jaxmp import _core, _programs
from jaxmp._core import Array, PyTree, _compat
from jaxmp._core._compat import ClosedJaxpr, JaxprEqn, Literal, Var
from jaxmp._gradients._fp32._layout import (
    ELEMENTWISE,
    REDUCTIONS,
    Saved,
    WeightLayout,
    as_gathered,
    as_stored,
    gathered,
    gathered_again,
    loops,
    run_gathered,
    whole,
)
from jaxmp._gradients._fp32._values import (
    Constant,
    Copy,
    Selected,
    Value,
    Weight,
    are_weights,
    as_array,
    bound,
    detached,
    left,
)
from jaxmp._programs import Frame

# Layouts of arrays; None for one that is not a weight.
Layouts: TypeAlias = list[WeightLayout | None]


def run_matmul(equation: JaxprEqn, operands: list[Value]) -> list[Value]:
    """Runs a matmul or convolution with a copy, whose gradient is computed in FP32.

    In a product of weights, XLA may split the contracted axis, and sum over devices in the forward
    pass, too.
    """
    if sum(isinstance(operand, Copy) for operand in operands) > 1:
        # Rows of a table that are multiplied by a weight are activations.
        operands = [as_array(v) if isinstance(v, Selected) else v for v in operands]
    side = 1 if isinstance(operands[1], Copy) else 0
    copy, other = operands[side], operands[1 - side]
    is_data = not isinstance(other, (Weight, Copy, Constant)) and not jnp.iscomplexobj(other)
    if not (isinstance(copy, Copy) and is_data):
        return run_custom_derivative(equation, operands)
    # Integers, such as the sizes of the groups of a ragged matmul.
    rest = list(map(as_array, operands[2:]))

    def call(other: Array, low: Array, rest: list[Array], **changes: object) -> Array:
        pair = [other, low] if side else [low, other]
        return _programs.bind(equation, [*pair, *rest], **changes)

    layout = copy.layout
    again = layout is not None and layout.is_split and layout.again

    @jax.custom_vjp
    def matmul(other: Array, low: Array, carrier: Array, rest: list[Array]) -> Array:
        return call(other, gathered(low, layout), rest)

    def matmul_fwd(other: Array, low: Array, carrier: Array, rest: list[Array]) -> Any:
        low = as_stored(low, layout)
        whole = gathered_again(low, layout)
        return call(other, whole, rest), (other, low if again else whole, rest)

    def matmul_bwd(saved: tuple[Array, Array, list[Array]], cotangent: Array) -> Any:
        other, low, rest = saved
        if again:
            # Otherwise XLA keeps the array that the forward pass gathered, or gathers the weights
            # of several layers before it computes their gradients.
            low, cotangent = lax.optimization_barrier((as_stored(low, layout), cotangent))
            low = gathered(low, layout)
        # A matmul with a wide result is differentiated in the dtype to which its operands are
        # promoted, as in `_core._wide_dot`.
        options, narrow = _programs.arithmetic_of(equation), {}
        if options is not None and options.result_dtype is not None:
            narrow["preferred_element_type"] = jnp.promote_types(other.dtype, low.dtype)
            cotangent = cotangent.astype(narrow["preferred_element_type"])
        is_explicit = AxisType.Explicit in jax.typeof(low).sharding.mesh.axis_types
        if equation.primitive.name == "dot_general" and not is_explicit:
            d_other = None
            if jnp.issubdtype(other.dtype, jnp.floating):
                d_other = transposed_dot(equation, 1 - side, low, cotangent, other.dtype)
            d_carrier = transposed_dot(equation, side, other, cotangent, _core.FLOAT32)
            return d_other, None, as_stored(d_carrier, layout), None

        def of_other(other: Array) -> Array:
            return call(other, low, rest, **narrow)

        def d_low(other: Array, cotangent: Array, *rest: Array) -> tuple[Array]:
            of_low = lambda low: call(other, low, list(rest), **narrow)
            return jax.linear_transpose(of_low, low)(cotangent)

        (d_other,) = jax.linear_transpose(of_other, other)(cotangent)
        closed = jax.make_jaxpr(d_low)(other, cotangent, *rest)
        (d_carrier,) = run_in_fp32(closed, [other, cotangent, *rest], [True])
        return d_other, None, as_stored(d_carrier, layout), None

    matmul.defvjp(matmul_fwd, matmul_bwd)
    return [matmul(other, copy.low, copy.carrier, rest)]


def transposed_dot(
    equation: JaxprEqn, side: int, other: Array, cotangent: Array, dtype: np.dtype
) -> Array:
    """Returns the gradient of one operand of a `dot_general`, as the result of a matmul.

    Args:
      equation: the `dot_general`.
      side: number of the operand.
      other: the other operand.
      cotangent: gradient of the result, in the dtype of `other`.
      dtype: dtype of the gradient.
    """
    sums, batch = _programs.dot_of(equation)
    free = [
        [n for n in range(_programs.array_aval(var).ndim) if n not in (*s, *b)]
        for var, s, b in zip(equation.invars, sums, batch, strict=True)
    ]
    kept, same = free[side], len(batch[0])
    by_other = [sums[side][n] for n in np.argsort(sums[1 - side])]
    start = same + (0 if side else len(kept))
    operands = [
        (cotangent, range(start, start + len(free[1 - side])), range(same), kept),
        (other, free[1 - side], batch[1 - side], by_other),
    ]
    # A matmul writes its result in the order of its operands. XLA copies a result to another order.
    operands.sort(key=lambda operand: max(operand[-1], default=-1))
    (lhs, *left), (rhs, *right) = operands
    (contracted, batched, axes) = zip(left, right, strict=True)
    product = functools.partial(
        lax.dot_general,
        dimension_numbers=(contracted, batched),
        precision=equation.params["precision"],
    )
    if dtype == _core.FLOAT32:
        out = _programs.wide_matmul(product, lhs, rhs, dtype, is_transposed=True)
    else:
        out = product(lhs, rhs, preferred_element_type=dtype)
    return lax.transpose(out, np.argsort([*batch[side], *axes[0], *axes[1]]))


def run_custom_derivative(equation: JaxprEqn, operands: list[Value]) -> list[Value]:
    """Runs a `custom_vjp` or `custom_jvp` function; gradients of copies are not rounded."""
    copies = {n: operand for n, operand in enumerate(operands) if isinstance(operand, Copy)}
    if not copies:
        return left(bound(equation, operands), operands)
    arrays = [v.low if isinstance(v, Copy) else as_array(v) for v in operands]
    layouts = [copies[n].layout if n in copies else None for n in range(len(operands))]
    function = _OwnDerivative(equation, layouts, list(copies), are_weights(operands))

    @jax.custom_vjp
    def call(arrays: list[Array], carriers: list[Array]) -> Any:
        return function.outputs(function.run(*map(gathered, arrays, layouts)))

    call.defvjp(function.forward, function.backward)
    pairs = call(arrays, [copy.carrier for copy in copies.values()])
    results = [pair[0] if len(pair) == 1 else Copy(detached(pair[0]), pair[1]) for pair in pairs]
    return left(results, operands)


@dataclasses.dataclass(frozen=True)
class _OwnDerivative:
    """Function with a derivative of its author, of operands of which some are copies.

    equation: its call.
    layouts: for each operand, the layout of a copy; None for other operands.
    copies: the indices of the copies.
    is_weight: True for a function of weights, whose 16-bit results have carriers.
    """

    equation: JaxprEqn
    layouts: Layouts
    copies: list[int]
    is_weight: bool

    def run(self, *arrays: Array) -> list[Array]:
        """Runs the equation; a matmul is accumulated in FP32 over devices, and then rounded."""
        equation, operands = self.equation, list(arrays)
        if equation.primitive.name not in MATMULS or any(map(jnp.iscomplexobj, operands)):
            return _programs.bind_all(equation, operands)
        return [_wide_matmul(equation, operands).astype(_dtype(equation.outvars[0]))]

    def outputs(self, results: Sequence[Array | Saved]) -> list[tuple[Array, ...]]:
        """Returns the results, each with its carrier if it has one."""
        arrays = map(whole, results)
        has_carrier = lambda array: self.is_weight and is_16bit_aval(array)
        return [(a, a.astype(_core.FLOAT32)) if has_carrier(a) else (a,) for a in arrays]

    def forward(self, arrays: list[Array], carriers: list[Array]) -> Any:
        """Returns the results, and the backward pass with its residuals."""
        is_split = any(layout is not None and layout.is_split for layout in self.layouts)
        vjp = functools.partial(_gathered_vjp, layouts=self.layouts) if is_split else jax.vjp
        results, backward = vjp(self.run, *arrays)
        return self.outputs(results), backward

    def backward(self, backward: PyTree, cotangents: list[tuple[Array, ...]]) -> Any:
        """Returns the gradients of the operands that are not copies, and of the carriers."""
        low, wide = ([pair[n] for pair in cotangents] for n in (0, -1))
        kept, structure = jax.tree.flatten((backward, low), is_leaf=_is_saved)
        saved = [leaf.array if _is_saved(leaf) else leaf for leaf in kept]
        marks = [leaf.layout if _is_saved(leaf) else None for leaf in kept]
        # The gradients of integers have the dtype float0.
        avals = [_programs.array_aval(var).to_tangent_aval() for var in self.equation.invars]
        floating = [n for n, aval in enumerate(avals) if aval.dtype != jax.dtypes.float0]

        def gradients(*saved: Array) -> list[Array]:
            backward, cotangents = structure.unflatten(saved)
            results = backward(cotangents)
            return [results[n] for n in floating]

        closed = jax.make_jaxpr(gradients)(*map(as_gathered, saved, marks))
        saved[len(saved) - len(wide) :] = wide
        if any(map(_is_saved, kept)):
            saved = _after_cotangents(saved, marks, len(low))
            low = map(rounded, saved, closed.jaxpr.invars)
            run = lambda *saved: list(map(whole, run_gathered(closed, saved, marks)))
            closed = jax.make_jaxpr(run)(*low)
        results = run_in_fp32(closed, saved, [n in self.copies for n in floating])
        by_operand = dict(zip(floating, results, strict=True))
        narrow = [None if n in self.copies else by_operand.get(n) for n in range(len(avals))]
        return narrow, [self._stored(by_operand[n], self.layouts[n]) for n in self.copies]

    def _stored(self, gradient: Array, layout: WeightLayout | None) -> Array:
        # A loop over chunks of the batch that adds to a split gradient sums it over devices in each
        # iteration, if the mesh has several axes. The sum of a whole one moves behind the loop.
        if loops(self.equation) and layout is not None and not layout.is_explicit:
            gradient = gathered_again(gradient, layout)
        return as_stored(gradient, layout)


def _gathered_vjp(
    forward: Callable[..., list[Array]], *arrays: Array, layouts: Layouts
) -> tuple[list[Array], PyTree]:
    """Returns `jax.vjp(forward, *arrays)`; weights are gathered where `forward` reads them.

    Arrays that have not been gathered are of type `Saved`, in the results and in the function of
    the backward pass.
    """
    structure: Any = None

    def with_backward(*arrays: Array) -> list[Array]:
        nonlocal structure
        leaves, structure = jax.tree.flatten(jax.vjp(forward, *arrays))
        return leaves

    closed = jax.make_jaxpr(with_backward)(*map(as_gathered, arrays, layouts))
    return structure.unflatten(run_gathered(closed, arrays, layouts))


def _after_cotangents(saved: list[Array], marks: Layouts, count: int) -> list[Array]:
    """Makes weights depend on the cotangents, the last `count` arrays; see `run_matmul`."""
    first = len(saved) - count
    tied = [
        n
        for n, (array, mark) in enumerate(zip(saved, marks, strict=True))
        if (mark is not None and mark.again)
        or (n >= first and jnp.issubdtype(array.dtype, jnp.floating))
    ]
    values = lax.optimization_barrier([as_stored(saved[n], marks[n]) for n in tied])
    new = dict(zip(tied, values, strict=True))
    return [new.get(n, array) for n, array in enumerate(saved)]


def _is_saved(leaf: object) -> TypeGuard[Saved]:
    return isinstance(leaf, Saved)


# ---------------------------------------------------------------------------
# Backward passes whose results are not rounded to 16 bits
# ---------------------------------------------------------------------------

# Operations that move the elements of their first operand, and compute nothing.
MOVES = _core.named(
    "broadcast_in_dim copy dynamic_slice expand_dims gather reshape rev slice split squeeze"
    " transpose unstack all_gather mesh_cast pvary reshard sharding_constraint"
)
MATMULS = frozenset({"conv_general_dilated", "dot_general", "ragged_dot_general"})
# Operations that may follow the matmul of a weight gradient, such as the factor of a scale.
_FACTORS = frozenset({"add", "add_any", "div", "mul", "neg"})
# Operations on the gradient of a computed weight.
_OF_WEIGHTS = (_FACTORS | ELEMENTWISE | REDUCTIONS) - {"bitcast_convert_type"}


def run_in_fp32(closed: ClosedJaxpr, args: list[Array], wide: list[bool]) -> list[Array]:
    """Runs a backward pass; some of its results are returned in FP32.

    If a gradient is computed by a matmul, possibly followed by data movement and factors, the
    matmul has an FP32 result. If a gradient is rounded at the end, the rounding is left out.

    Args:
      closed: the traced backward pass.
      args: its arguments. In the gradient of a function of weights, cotangents of 16-bit results
        are in FP32, and so is all arithmetic with them.
      wide: for each result, True to return it in FP32.
    """
    jaxpr, consts = _compat.jaxpr_body(_inlined(closed))
    pairs = list(zip(jaxpr.invars, args, strict=True))
    # Variables that can be computed in FP32, and those of them that are.
    possible = {var for var, arg in pairs if rounded(arg, var) is not arg}
    is_of_weights = bool(possible)
    factors = _OF_WEIGHTS if is_of_weights else _FACTORS
    body = _programs.Body(jaxpr)
    flat = list(_programs.equations(jaxpr, inside=False))
    for equation in flat:
        if _can_be_wide(equation, possible, factors):
            # FP32 variables that follow a 16-bit matmul, such as factors of rows, and 16-bit ones.
            is_after = not possible.isdisjoint(v for v in equation.invars if isinstance(v, Var))
            possible |= {
                var
                for var in equation.outvars
                if is_16bit_aval(var.aval) or (is_after and _dtype(var) == _core.FLOAT32)
            }
    outputs = [pair for pair in zip(jaxpr.outvars, wide, strict=True) if isinstance(pair[0], Var)]
    asked = {var for var, w in outputs if w}
    narrow = {var for var, w in outputs if not w}
    chosen = (asked & possible) - narrow
    for equation in reversed(flat):
        if chosen.isdisjoint(equation.outvars) or equation.primitive.name in MATMULS:
            continue
        for var in possible.intersection(v for v in equation.invars if isinstance(v, Var)):
            is_wide = (
                r is not None and not chosen.isdisjoint(r.outvars) for r in body.consumers[var]
            )
            if is_of_weights or all(is_wide):
                chosen.add(var)
    results = _Wide(chosen).run(ClosedJaxpr(jaxpr, consts), args)
    return [
        r.astype(_core.FLOAT32) if w else rounded(r, v)
        for r, w, v in zip(results, wide, jaxpr.outvars, strict=True)
    ]


def rounded(array: Array, var: Var | Literal) -> Array:
    """Returns an FP32 array in the dtype of its variable, if that has 16 bits."""
    is_wide = is_16bit_aval(var.aval) and array.dtype == _core.FLOAT32
    return array.astype(_dtype(var)) if is_wide else array


class _Wide(_programs.Interpreter):
    """Interpreter that computes some variables in FP32 instead of 16 bits."""

    def __init__(self, variables: set[Var]) -> None:
        super().__init__()
        self.variables = variables

    def equation(self, equation: JaxprEqn, operands: list[Array], frame: Frame) -> list[Array]:
        is_wide = not self.variables.isdisjoint(equation.outvars)
        is_matmul = equation.primitive.name in MATMULS
        if is_wide and not is_matmul:
            return _in_fp32(equation, operands)
        operands = list(map(rounded, operands, equation.invars))
        return [_wide_matmul(equation, operands)] if is_wide else self.bound(equation, operands)


class _Inline(_programs.Interpreter):
    """Interpreter that replaces calls by the operations inside."""

    def equation(self, equation: JaxprEqn, operands: list[Array], frame: Frame) -> list[Array]:
        if equation.primitive.name in _programs.CALLS:
            return self.enter(equation, operands, frame)
        return self.bound(equation, operands)


def _inlined(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Returns a jaxpr without calls of jitted functions and without unused equations."""
    inlined = closed
    if not _programs.CALLS.isdisjoint(_programs.primitives(closed)):
        inlined = jax.make_jaxpr(lambda *args: _Inline().run(closed, args))(*closed.in_avals)
    jaxpr, consts = _compat.jaxpr_body(inlined)
    return ClosedJaxpr(_programs.without_unused(jaxpr), consts)


def _can_be_wide(equation: JaxprEqn, wide: set[Var], factors: frozenset[str]) -> bool:
    """Returns True if an equation of a backward pass can compute its 16-bit result in FP32."""
    name = equation.primitive.name
    if name in MATMULS or not equation.invars:
        return name in MATMULS
    first, *_ = variables = [v if isinstance(v, Var) else None for v in equation.invars]
    if name == "convert_element_type":
        return first in wide or _dtype(equation.invars[0]) == _core.FLOAT32
    if name in MOVES:
        return first in wide
    return name in factors and any(var in wide for var in variables)


def _dtype(var: Var | Literal) -> Any:
    return getattr(var.aval, "dtype", None)


def _in_fp32(equation: JaxprEqn, operands: list[Array]) -> list[Array]:
    if equation.primitive.name == "convert_element_type":
        return operands
    return _programs.bind_all(
        equation, [o.astype(_core.FLOAT32) if is_16bit_aval(o) else o for o in operands]
    )


def _in_parts(equation: JaxprEqn, operands: list[Array]) -> Callable[..., Array] | None:
    """Returns the 16-bit convolution of a weight gradient, which is cast to FP32 before sums.

    cuDNN has no gradient of a kernel with 16-bit operands and an FP32 result, so that XLA would
    convert the operands. On several devices, each computes the sum over its part of the contracted
    axis, which is the batch. None: it cannot be divided.
    """
    mesh, options = jax.typeof(operands[0]).sharding.mesh, equation.params
    convolve = lambda *pair: _programs.bind(equation, [*pair], out_sharding=None).astype(
        _core.FLOAT32
    )
    if mesh.size <= 1 or set(mesh.axis_types) == {AxisType.Manual}:
        return convolve
    lhs, rhs, _ = options["dimension_numbers"]
    is_whole = options["feature_group_count"] == 1 and set(mesh.axis_types) == {AxisType.Auto}
    if not is_whole or operands[0].shape[lhs[1]] % mesh.size:
        return None
    axes = mesh.axis_names
    in_parts = jax.shard_map(
        lambda *pair: convolve(*pair)[None],
        mesh=mesh,
        in_specs=tuple(PartitionSpec(*[None] * spec[1], axes) for spec in (lhs, rhs)),
        out_specs=PartitionSpec(axes),
        check_vma=False,
    )
    # A sum outside of the `shard_map`, because XLA then sends each device only its part of the
    # gradient if the optimizer's state is split.
    return lambda *pair: in_parts(*pair).sum(0)


def _wide_matmul(equation: JaxprEqn, operands: list[Array]) -> Array:
    """Runs a matmul with an FP32 result, whose own derivatives run in the operands' dtype."""
    lhs, rhs, *rest = operands

    def product(*pair: Array, **dtypes: object) -> Any:
        return _programs.bind(equation, [*pair, *rest], **dtypes)

    is_convolution = equation.primitive.name == "conv_general_dilated"
    if is_convolution and (convolve := _in_parts(equation, operands)):
        multiply = lambda *pair, **dtypes: (convolve if dtypes else product)(*pair)
        return _core.wide_product(multiply, lhs, rhs, _core.FLOAT32)
    return _programs.wide_matmul(product, lhs, rhs, _core.FLOAT32, is_transposed=True)


def is_16bit_aval(aval: object) -> bool:
    """Returns True for the type of a 16-bit floating-point array."""
    return getattr(aval, "dtype", None) in _core.FLOATS_16BIT
