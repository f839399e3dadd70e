"""`lax.dot_general` in FP8: one product forwards, two backwards."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxmp import _compat
from jaxmp._dtypes import FLOAT32, FLOAT64, HALF, canonical_dtype
from jaxmp.errors import CompositionError, JaxmpError
from jaxmp.fp8._dims import Dims, make_dims
from jaxmp.fp8._mx import MX_QUANTIZED, MXOperand, check_device, is_native, mx_multiply
from jaxmp.fp8._operands import Operand, multiply, observed, quantized
from jaxmp.fp8._quantize import as_floats
from jaxmp.fp8._recipes import (
    GEMMS,
    BlockScaling,
    DelayedScaling,
    MXScaling,
    Scaling,
    as_recipe,
)
from jaxmp.fp8._state import AGE, before_step, check_state, next_state, of_operand

# What `jax.checkpoint_policies.save_only_these_names` keeps: quantised operands, one byte a number.
CHECKPOINT_NAME = "jaxmp_fp8"

_SIDES = {"lhs": 0, "rhs": 1}

_PRECISIONS = (str, lax.Precision, lax.DotAlgorithm, lax.DotAlgorithmPreset)


class _Call(NamedTuple):
    """What is static in one product."""

    recipe: Scaling
    dims: Dims
    # 0 or 1: which operand is the kernel; the other is the input.
    kernel: int
    dtypes: tuple[Any, Any]
    out_dtype: Any
    precision: Any

    def role(self, side: int) -> str:
        return "kernel" if side == self.kernel else "input"

    def gemm_of_gradient(self, side: int) -> str:
        """Which product gives the gradient of operand `side`."""
        return "wgrad" if side == self.kernel else "dgrad"

    def format(self, gemm: str, role: str) -> Any:
        formats = self.recipe.formats(gemm)
        return None if formats is None else formats[GEMMS[gemm].index(role)]


def dot_general(recipe: Any = None, *, kernel: str = "rhs") -> Callable[..., jax.Array]:
    """A stand-in for `jax.lax.dot_general` whose three products run in FP8.

    Forwards, the operands are quantised and multiplied as FP8 numbers; backwards, the result's
    gradient is quantised once and multiplied with the quantised kernel (the input's gradient) and
    with the quantised input (the kernel's gradient). What is kept for the backward pass is FP8.
    Gradients pass through the rounding as if it were not there. It quantises always, also on a
    device without FP8 products, where XLA computes the same numbers in a wider dtype.

    Sizes need not be multiples of 16, but XLA pads to them. With batch dimensions the scale of a
    tensor is one for all of the batch (with `RowwiseScaling` one for each row of each). Under
    `jax.vmap` each example has its own scale, with `DelayedScaling` all have one.

    Under `jax.checkpoint` operands are quantised again when they are recomputed, from their own
    high-precision numbers; `save_only_these_names(fp8.CHECKPOINT_NAME)` as its policy keeps them,
    so that each is quantised once. Only reverse-mode differentiation, once: more is refused.

    Args:
      recipe: a recipe, its name, or None for `CurrentScaling()`.
      kernel: "rhs" or "lhs": which operand is the kernel; the other one is the input.

    Returns:
      `product(lhs, rhs, dimension_numbers, precision=None, preferred_element_type=None, *,
      out_sharding=None, state=None)`, which takes float16, bfloat16, float32 or float64 operands
      and returns what `lax.dot_general` would: the operands' dtype, or `preferred_element_type`.
      `precision` is that of products which the recipe leaves "high". `state` is for
      `DelayedScaling`: a dict of `init_state`, whose gradient is its next value. Equal arguments
      give the same function.

    Raises:
      RecipeError: if `recipe` is none.
      JaxmpError: if `kernel` is no side; from the function, if operands, dimension numbers or state
        do not fit.
      CompositionError: from the function, without `emulate=True`, for block scaling on an
        accelerator and for MX scaling on one that has no such products; where its gradient is
        differentiated.

    Example:
      >>> x, w = jnp.ones((32, 16), jnp.bfloat16), jnp.full((16, 64), 0.5, jnp.bfloat16)
      >>> y = dot_general("current")(x, w, (((1,), (0,)), ((), ())))
      >>> y.dtype, float(y[0, 0])
      (dtype(bfloat16), 8.0)
    """
    recipe = as_recipe(recipe)
    if kernel not in _SIDES:
        raise JaxmpError(
            f"kernel={kernel!r} must be 'rhs' or 'lhs'; for example fp8.dot_general(kernel='rhs')."
        )
    return _maker(recipe, kernel)


@functools.lru_cache(maxsize=256)
def _maker(recipe: Scaling, kernel: str) -> Callable[..., jax.Array]:
    def fp8_dot_general(
        lhs: jax.Array,
        rhs: jax.Array,
        dimension_numbers: Any,
        precision: Any = None,
        preferred_element_type: Any = None,
        *,
        out_sharding: Any = None,
        state: Any = None,
    ) -> jax.Array:
        lhs, rhs = (
            as_floats(x, name, "fp8.dot_general") for x, name in ((lhs, "lhs"), (rhs, "rhs"))
        )
        _check_call(recipe, precision, out_sharding, state)
        call = _Call(
            recipe,
            make_dims(lhs, rhs, dimension_numbers),
            _SIDES[kernel],
            (lhs.dtype, rhs.dtype),
            _result_dtype(lhs, rhs, preferred_element_type),
            precision,
        )
        # Inside `shard_map` the gradient of what is the same on all devices is a sum over them.
        axes = _compat.varying_axes((lhs, rhs))
        lhs, rhs = _compat.vary((lhs, rhs), axes)
        return _product(call, lhs, rhs, None if state is None else dict(state))

    return fp8_dot_general


def _check_call(recipe: Scaling, precision: Any, out_sharding: Any, state: Any) -> None:
    each = precision if isinstance(precision, tuple) else (precision,)
    if not all(one is None or isinstance(one, _PRECISIONS) for one in each):
        raise JaxmpError(
            f"precision is {type(precision).__name__}, and must be None, a name such as 'highest', "
            "a jax.lax.Precision, an algorithm, or a pair of them. An FP8 product takes two "
            "operands: dot_general(lhs, rhs, dimension_numbers), einsum(equation, x, kernel)."
        )
    if out_sharding is not None:
        raise JaxmpError(
            f"out_sharding={out_sharding!r} is not supported in FP8. Leave it out, and constrain "
            "the result: jax.lax.with_sharding_constraint(y, sharding)."
        )
    if isinstance(recipe, DelayedScaling):
        if state is None:
            raise JaxmpError(
                "DelayedScaling needs its state: product(lhs, rhs, dimension_numbers, "
                "state=state), where state = fp8.init_state(recipe) before the first step and "
                "its own gradient afterwards. Without a state use fp8.CurrentScaling()."
            )
        check_state(recipe, state)
    elif state is not None:
        raise JaxmpError(
            f"{type(recipe).__name__} has no state: leave `state` out, or use fp8.DelayedScaling()."
        )
    if isinstance(recipe, BlockScaling) and not recipe.emulate and _compat.target() != "cpu":
        raise CompositionError(
            "BlockScaling: XLA has no product with one scale per block, so on this device it would "
            "run in the operands' own dtype, and no faster. Use fp8.RowwiseScaling() or "
            "fp8.CurrentScaling(); to study its rounding, fp8.BlockScaling(emulate=True)."
        )
    if isinstance(recipe, MXScaling):
        check_device(recipe)


def _result_dtype(lhs: Any, rhs: Any, preferred: Any) -> np.dtype:
    if preferred is not None:
        dtype = canonical_dtype(preferred)
        if dtype not in HALF | {FLOAT32, FLOAT64}:
            raise JaxmpError(
                f"preferred_element_type is {dtype}: an FP8 product has results in float16, "
                "bfloat16, float32 or float64. Take one of them, and convert the result."
            )
        return dtype
    with jax.numpy_dtype_promotion("standard"):
        return jnp.promote_types(lhs.dtype, rhs.dtype)


# ---------------------------------------------------------------------------
# Forwards and backwards
# ---------------------------------------------------------------------------


def _operand(
    call: _Call, gemm: str, role: str, x: Any, dims: Dims, side: int, seen: Any
) -> Operand | MXOperand:
    """`x`, which is operand `side` of a product with `dims`, quantised for it."""
    dtype = call.format(gemm, role)
    if isinstance(call.recipe, MXScaling) and dtype is not None:
        return MX_QUANTIZED[role](x, recipe=call.recipe, dtype=dtype, dims=dims, side=side)
    return quantized(
        call.recipe,
        dtype,
        x,
        axes=dims.contract[side],
        other_axes=dims.free(side),
        seen=seen,
        role=role,
    )


def _kept(operand: Any) -> tuple[Any, Any]:
    """An operand for the backward pass, under a name that `jax.checkpoint` can be told to keep.

    Returns:
      It, and the same for the forward product: where that is computed again, nothing is rounded.
    """
    values, factor = operand
    named = functools.partial(checkpoint_name, name=CHECKPOINT_NAME)
    if factor is None:
        values = named(values)
        return Operand(values, None), Operand(values, None)
    # As bytes, and back in an equation of its own: what `jax.checkpoint` keeps, and the forward
    # pass reads, it rounds by `lax.reduce_precision`, for which the numbers of E4M3 from 248 up are
    # NaN.
    kept, factor = named(lax.bitcast_convert_type(values, jnp.uint8)), named(factor)
    back = lambda: type(operand)(lax.bitcast_convert_type(kept, values.dtype), factor)
    return back(), back()


def _multiply(call: _Call, gemm: str, lhs: Any, rhs: Any, dims: Dims, dtype: Any) -> Any:
    if isinstance(lhs, MXOperand):
        # bfloat16 holds every number of a block and its scale, float16 does not.
        narrow = all(each == jnp.bfloat16 for each in call.dtypes)
        wide = jnp.bfloat16 if narrow else FLOAT64 if FLOAT64 in call.dtypes else FLOAT32
        native = is_native(call.recipe)
        return mx_multiply(lhs, rhs, dims, dtype, native=native, wide=wide)
    accurate = gemm not in call.recipe.fast_accumulation
    return multiply(lhs, rhs, dims, dtype, precision=call.precision, accurate=accurate)


def _first(
    call: _Call, gemm: str, role: str, x: Any, dims: Dims, side: int, state: Any
) -> tuple[Any, Any]:
    """`_operand` where it is first needed, and what is seen of it for delayed scaling."""
    if state is None or not isinstance(call.recipe, DelayedScaling):
        seen = None, None
        return _operand(call, gemm, role, x, dims, side, seen), seen
    return observed(call.recipe, call.format(gemm, role), x, of_operand(state, role), role)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(call: _Call, lhs: jax.Array, rhs: jax.Array, state: Any) -> jax.Array:
    return _forward(call, *_operands(call, lhs, rhs, _before(state))[0])


def _before(state: Any) -> Any:
    return None if state is None else before_step(state)


def _operands(call: _Call, lhs: Any, rhs: Any, state: Any) -> tuple[list[Any], list[Any]]:
    """The operands of the forward product, and what is seen of them for delayed scaling."""
    found = [
        _first(call, "fprop", call.role(side), x, call.dims, side, state)
        for side, x in enumerate((lhs, rhs))
    ]
    return [operand for operand, _ in found], [seen for _, seen in found]


def _forward(call: _Call, lhs: Any, rhs: Any) -> jax.Array:
    return _multiply(call, "fprop", lhs, rhs, call.dims, call.out_dtype)


def _product_fwd(call: _Call, lhs: Any, rhs: Any, state: Any) -> tuple[jax.Array, Any]:
    # Of a first derivative, tangents come neither here nor to the backward pass.
    lhs, rhs = _differentiated_once(type(call.recipe).__name__, lhs, rhs)
    before = _before(state)
    operands, seen = _operands(call, lhs, rhs, before)
    kept = []
    for side, x in enumerate((lhs, rhs)):
        backwards = _for_backward(call, side, x, operands[side], seen[side])
        of_backward, of_forward = _kept(backwards)
        kept.append(of_backward)
        if backwards is operands[side]:
            operands[side] = of_forward
    # Of the state as it came the dtype is wanted, which all its leaves have in common.
    given = None if state is None else state[AGE]
    return _forward(call, *operands), (tuple(kept), seen, before, given)


def _for_backward(call: _Call, side: int, x: Any, forwards: Any, seen: Any) -> Any:
    """Operand `side` as the product needs it that gives the gradient of the other operand."""
    gemm, role = call.gemm_of_gradient(1 - side), call.role(side)
    if _shared(call, role, "fprop", gemm):
        return forwards
    dims, _ = call.dims.transposed(1 - side)
    return _operand(call, gemm, role, x, dims, side, seen)


def _shared(call: _Call, role: str, one: str, other: str) -> bool:
    """Whether two products take `role` in the same FP8 numbers, though they sum over other axes."""
    if call.format(one, role) != call.format(other, role):
        return False
    return (
        call.format(one, role) is None
        or call.recipe.kind in ("current", "delayed")
        # Its blocks are square.
        or (call.recipe.kind == "block" and role == "kernel")
    )


def _product_bwd(call: _Call, residuals: Any, gradient: jax.Array) -> tuple[Any, Any, Any]:
    kept, seen, before, given = residuals
    (gradient,) = _differentiated_once(type(call.recipe).__name__, gradient)
    results: list[Any] = []
    operand: Any = None
    of_gradient: Any = None
    for side in (0, 1):
        gemm = call.gemm_of_gradient(side)
        dims, order = call.dims.transposed(side)
        if operand is None:
            operand, of_gradient = _first(call, gemm, "output_grad", gradient, dims, side, before)
        elif not _shared(call, "output_grad", "dgrad", "wgrad"):
            operand = _operand(call, gemm, "output_grad", gradient, dims, side, of_gradient)
        if isinstance(operand, Operand) and operand.factor is None:
            # Not FP8: a wide result's gradient is rounded to what it is multiplied with.
            values = lax.convert_element_type(operand.values, kept[1 - side].values.dtype)
            operand = Operand(values, None)
        # The gradient in its own operand's place.
        lhs, rhs = (kept[0], operand) if side else (operand, kept[1])
        product = _multiply(call, gemm, lhs, rhs, dims, call.dtypes[side])
        results.append(jnp.transpose(product, order))
    if not isinstance(call.recipe, DelayedScaling) or before is None:
        return results[0], results[1], None
    by_role = dict(
        zip((call.role(0), call.role(1), "output_grad"), (*seen, of_gradient), strict=True)
    )
    return results[0], results[1], next_state(call.recipe, before, by_role, given)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _differentiated_once(recipe: str, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    del recipe
    return arrays


@_differentiated_once.defjvp
def _refuse(recipe: str, primals: Any, tangents: Any) -> Any:
    """JAX would differentiate the rounding and the maxima, or take what it rounds for constant."""
    del primals, tangents
    raise CompositionError(
        f"fp8.dot_general ({recipe}) has no second derivative: what quantises "
        "gradients cannot be differentiated. For gradients of gradients (penalties, Hessians) use "
        'a policy without matmul = "fp8", such as the recipe "bf16".'
    )


_product.defvjp(_product_fwd, _product_bwd)
