"""`lax.dot_general` with FP8 operands in the forward and backward pass."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxmp import _core
from jaxmp._core import DTypeLike, _compat
from jaxmp.errors import CompositionError, JaxmpError
from jaxmp.fp8 import _dims, _scaling
from jaxmp.fp8._checkpoint import named_amax, named_result, named_values, saveable
from jaxmp.fp8._dims import Dims, Shardings
from jaxmp.fp8._mx import MX_QUANTIZED, MXOperand, check_mx_device, is_native, mx_multiply
from jaxmp.fp8._operands import AMAX, OBSERVE, OBSERVE_AND_QUANTIZE, QUANTIZE, Operand, as_floats
from jaxmp.fp8._scaling import DelayedScaling, MXScaling, RowwiseScaling, Scaling, ScalingLike
from jaxmp.fp8._state import AGE, State, before_step, check_layer_state, next_state, of_operand

_SIDES = {"lhs": 0, "rhs": 1}

_PRECISIONS = (str, lax.Precision, lax.DotAlgorithm, lax.DotAlgorithmPreset)


class DotCall(NamedTuple):
    """Static arguments of one FP8 dot."""

    scaling: Scaling
    dims: Dims
    # 0 or 1: the operand that is the kernel. The other one is the input.
    kernel: int
    dtypes: tuple[Any, Any]
    out_dtype: DTypeLike
    precision: Any
    # Those of the operands and of the result, on explicit mesh axes.
    shardings: Shardings

    def role(self, side: int) -> str:
        return "kernel" if side == self.kernel else "input"

    def gemm_of_gradient(self, side: int) -> str:
        """Returns the name of the dot that computes the gradient of operand `side`."""
        return "wgrad" if side == self.kernel else "dgrad"

    def format(self, gemm: str, role: str) -> Any:
        formats = self.scaling.formats(gemm)
        return None if formats is None else formats[_scaling.GEMMS[gemm].index(role)]


def dot_general(scaling: ScalingLike = None, *, kernel: str = "rhs") -> Callable[..., jax.Array]:
    """Creates a replacement of `jax.lax.dot_general` that quantizes its operands to FP8.

    The forward dot multiplies the quantized input by the quantized kernel. The two dots of the
    backward pass multiply the quantized gradient of the result by the quantized kernel (gradient
    of the input) and by the quantized input (gradient of the kernel). With per-tensor scales, a
    tensor that two dots use in the same format is quantized once. Residuals are saved in FP8, or
    in the operands' dtype for dots that the scaling leaves "high". Differentiation treats the
    rounding as the identity.

    Operands are always quantized. On a device without FP8 matmuls, XLA multiplies the quantized
    values in a wider dtype. XLA pads sizes that are not multiples of 16. A per-tensor scale covers
    all batch dimensions; `RowwiseScaling` uses one scale per row of each batch element. Under
    `jax.vmap`, each example has a separate scale, except with `DelayedScaling`, where examples that
    share a state share the scale.

    `jax.checkpoint` quantizes the high-precision operands again when it recomputes them. With the
    policy `jax.checkpoint_policies.save_only_these_names("jaxmp_fp8")` it saves the quantized
    operands instead. Only first-order reverse-mode differentiation is supported; other
    derivatives raise an error.

    Args:
      scaling: an FP8 scaling, its name, or None for `CurrentScaling()`.
      kernel: "rhs" or "lhs", the operand that is the kernel. The other one is the input.

    Returns:
      `product(lhs, rhs, dimension_numbers, precision=None, preferred_element_type=None, *,
      out_sharding=None, state=None)`. It accepts float16, bfloat16, float32 or float64 operands
      and returns the same dtype as `lax.dot_general`: `preferred_element_type`, or by default the
      dtype of the operands. `precision` applies to dots that the scaling leaves "high", and
      `out_sharding` to explicit mesh axes, as in `lax.dot_general`. `state` is
      required by scalings with a state: a dict from `init_state`, whose gradient is the state of
      the next step. Equal arguments of `fp8.dot_general` return the same function object.

    Raises:
      RecipeError: if `scaling` is not an FP8 scaling.
      JaxmpError: if `kernel` is neither "rhs" nor "lhs". The returned function raises it if
        operands, dimension numbers, other arguments or the state are invalid.
      CompositionError: by the returned function, for `MXScaling` without `emulate=True` on an
        accelerator without MX matmuls; also if its gradient is differentiated.

    Example:
      >>> x, w = jnp.ones((32, 16), jnp.bfloat16), jnp.full((16, 64), 0.5, jnp.bfloat16)
      >>> y = dot_general("current")(x, w, (((1,), (0,)), ((), ())))
      >>> y.dtype, float(y[0, 0])
      (dtype(bfloat16), 8.0)
    """
    scaling = _scaling.as_scaling(scaling)
    if kernel not in _SIDES:
        raise JaxmpError(
            f"kernel={kernel!r} must be 'rhs' or 'lhs'; for example fp8.dot_general(kernel='rhs')."
        )
    return _maker(scaling, kernel)


# One function object for each scaling, because Flax compares the fields of modules.
@functools.lru_cache(maxsize=256)
def _maker(scaling: Scaling, kernel: str) -> Callable[..., jax.Array]:
    def fp8_dot_general(
        lhs: jax.Array,
        rhs: jax.Array,
        dimension_numbers: lax.DotDimensionNumbers,
        precision: lax.PrecisionLike = None,
        preferred_element_type: DTypeLike | None = None,
        *,
        out_sharding: NamedSharding | PartitionSpec | None = None,
        state: Mapping[str, jax.Array] | None = None,
    ) -> jax.Array:
        lhs = as_floats(lhs, "lhs", "fp8.dot_general")
        rhs = as_floats(rhs, "rhs", "fp8.dot_general")
        _check_call(scaling, precision, state)
        dims = _dims.make_dims(lhs, rhs, dimension_numbers)
        call = DotCall(
            scaling,
            dims,
            _SIDES[kernel],
            (lhs.dtype, rhs.dtype),
            _result_dtype(lhs, rhs, preferred_element_type),
            precision,
            _dims.dot_shardings(lhs, rhs, dims, out_sharding),
        )
        # Inside `shard_map`, the gradient of an operand that is replicated over devices is a sum
        # over them. Casting both operands to device-varying makes the transpose compute this sum.
        axes = _compat.varying_axes((lhs, rhs))
        lhs, rhs = _compat.vary((lhs, rhs), axes)
        if isinstance(scaling, MXScaling) and call.shardings.result is not None:
            # Rows of blocks merge dimensions, which explicit mesh axes do not allow in general.
            on_auto = call._replace(shardings=Shardings())
            product = lambda lhs, rhs: _product(on_auto, lhs, rhs, None)
            run: Any = jax.sharding.auto_axes(product, out_sharding=call.shardings.result)
            return run(lhs, rhs)
        try:
            return _product(call, lhs, rhs, None if state is None else dict(state))
        except TypeError as error:
            if "forward-mode" not in str(error):
                raise
            raise CompositionError(
                f"fp8.dot_general ({type(scaling).__name__}) has no derivative in forward mode "
                "(jax.jvp, jax.jacfwd), because a backward pass quantizes its gradients. Use "
                "jax.grad, jax.vjp or jax.jacrev, or a policy without "
                'matmul = "fp8", such as the recipe "bf16".'
            ) from None

    return fp8_dot_general


def _check_call(
    scaling: Scaling,
    precision: lax.PrecisionLike,
    state: Mapping[str, jax.Array] | None,
) -> None:
    precisions = precision if isinstance(precision, tuple) else (precision,)
    if not all(item is None or isinstance(item, _PRECISIONS) for item in precisions):
        raise JaxmpError(
            f"precision is {type(precision).__name__}, and must be None, a name such as 'highest', "
            "a jax.lax.Precision, an algorithm, or a pair of them. An FP8 product takes two "
            "operands: dot_general(lhs, rhs, dimension_numbers), einsum(equation, x, kernel)."
        )
    if isinstance(scaling, DelayedScaling):
        if state is None:
            raise JaxmpError(
                f"{type(scaling).__name__} needs its state: product(lhs, rhs, dimension_numbers, "
                "state=state), where state = fp8.init_state(scaling) before the first step and "
                "its own gradient afterwards. Without a state use fp8.CurrentScaling()."
            )
        check_layer_state(scaling, state)
    elif state is not None:
        raise JaxmpError(
            f"{type(scaling).__name__} has no state. Leave `state` out, or use "
            "fp8.DelayedScaling()."
        )
    if isinstance(scaling, MXScaling):
        check_mx_device(scaling)


def _result_dtype(lhs: jax.Array, rhs: jax.Array, preferred: DTypeLike | None) -> np.dtype:
    if preferred is not None:
        dtype = _core.canonical_dtype(preferred)
        if dtype not in _core.CASTABLE | {_core.FLOAT64}:
            raise JaxmpError(
                f"preferred_element_type is {dtype}: an FP8 product has results in float16, "
                "bfloat16, float32 or float64. Take one of them, and convert the result."
            )
        return dtype
    with jax.numpy_dtype_promotion("standard"):
        return jnp.promote_types(lhs.dtype, rhs.dtype)


# ---------------------------------------------------------------------------
# Forward and backward pass
# ---------------------------------------------------------------------------


def _shield(call: DotCall, out: jax.Array, kernel_shape: tuple[int, ...]) -> jax.Array:
    """Names the result of a forward dot, behind a barrier if an activation may follow.

    XLA for GPUs replaces a matmul and a tanh GELU whose input is used again by one cuBLAS call,
    which it does not support in FP8 (RET_CHECK failure !has_aux_output, JAX 0.12). Layers with more
    outputs than inputs are those in front of activations. The others do not have the barrier, so
    that XLA can add a residual as part of the matmul.
    """
    sizes = [kernel_shape[axis] for axis in call.dims.contract[call.kernel]]
    others = [kernel_shape[axis] for axis in call.dims.free(call.kernel)]
    if math.prod(others) > math.prod(sizes):
        out = lax.optimization_barrier(out)
    return named_result(out, batched=bool(call.dims.batch[0]))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _differentiated_once(scaling: str, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Returns arrays of which only the first derivative may be taken.

    First-order reverse mode never passes tangents through a forward or backward pass. A tangent
    implies a second derivative, which raises an error.
    """
    del scaling
    return arrays


@_differentiated_once.defjvp
def _refuse(scaling: str, primals: object, tangents: object) -> NoReturn:
    """Raises, because JAX would differentiate rounding and amax, or treat them as constants."""
    del primals, tangents
    raise CompositionError(
        f"fp8.dot_general ({scaling}) has no second derivative: what quantizes "
        "gradients cannot be differentiated. For gradients of gradients (penalties, Hessians) use "
        'a policy without matmul = "fp8", such as the recipe "bf16". Where the inner gradient is a '
        "constant of the loss, as in adversarial training, compute it from constants: "
        "jax.grad(attack)(jax.lax.stop_gradient(x), jax.lax.stop_gradient(params))."
    )


def _operand(
    call: DotCall, gemm: str, role: str, x: jax.Array, dims: Dims, side: int, seen: tuple[Any, Any]
) -> Operand | MXOperand:
    """Quantizes `x`, operand `side` of a dot with dimension numbers `dims`.

    `seen` are the active and the measured amax, or None where they are those of `x`.
    """
    scaling, dtype = call.scaling, call.format(gemm, role)
    if dtype is None:
        return Operand(x, None)
    if isinstance(scaling, MXScaling):
        return MX_QUANTIZED[role](x, scaling=scaling, dtype=dtype, dims=dims, side=side)
    axes = dims.contract[side] if isinstance(scaling, RowwiseScaling) else None
    return Operand(*QUANTIZE[role](x, *seen, scaling=scaling, dtype=dtype, axes=axes))


def _kept(operand: Operand | MXOperand, *, is_kernel: bool) -> tuple[Any, Any]:
    """Names the arrays of an operand, so that a policy of `jax.checkpoint` can save them.

    Returns:
      The operand for the backward pass and the operand for the forward dot. Both read the named
      arrays, so that a recomputed forward dot quantizes nothing if the arrays were saved.
    """
    values, scales = operand
    if scales is None:
        whole = Operand(saveable(values, is_kernel=False), None)
        return whole, whole
    scales, kind = saveable(scales, is_kernel=is_kernel), type(operand)
    of_backward, of_forward = named_values(values, is_kernel=is_kernel)
    return kind(of_backward, scales), kind(of_forward, scales)


def _multiply(
    call: DotCall,
    gemm: str,
    lhs: Operand | MXOperand,
    rhs: Any,
    dims: Dims,
    dtype: DTypeLike,
    out_sharding: NamedSharding | PartitionSpec | None,
) -> jax.Array:
    """Multiplies two operands and undoes their scales.

    Args:
      call: the FP8 dot.
      gemm: name of this dot, in the forward or backward pass.
      lhs, rhs: its operands; either both are scaled, or neither.
      dims: its dimension numbers.
      dtype: dtype of the result.
      out_sharding: sharding of the result on explicit mesh axes.
    """
    if isinstance(lhs, MXOperand):
        # bfloat16 represents each FP8 value times its block scale; float16 does not.
        wide: Any = _core.FLOAT64 if _core.FLOAT64 in call.dtypes else _core.FLOAT32
        if all(each == jnp.bfloat16 for each in call.dtypes):
            wide = jnp.bfloat16
        native = is_native(call.scaling)
        return mx_multiply(lhs, rhs, dims, dtype, native=native, wide=wide)
    dot = functools.partial(
        lax.dot_general, dimension_numbers=dims.numbers, out_sharding=out_sharding
    )
    values = [lhs.values, rhs.values]
    if lhs.factor is None:
        return dot(*values, precision=call.precision, preferred_element_type=dtype)
    # XLA requests fast accumulation from cuBLAS if the precision is DEFAULT.
    is_fast = gemm in call.scaling.fast_accumulation
    precision = lax.Precision.DEFAULT if is_fast else lax.Precision.HIGHEST
    # The product of two FP8 values can exceed the range of float16, but not that of bfloat16.
    narrow = jnp.bfloat16 if dtype == jnp.bfloat16 else _core.FLOAT32
    if lhs.factor.ndim or rhs.factor.ndim:
        product = dot(*values, precision=precision, preferred_element_type=narrow)
        product = lax.convert_element_type(product, _core.FLOAT32)
        for side, factor in enumerate((lhs.factor, rhs.factor)):
            product = product * _dims.broadcast_factor(dims.spread(factor, side), product)
        return lax.convert_element_type(product, dtype)
    # The operand that may equal that of other dots.
    factor, shared, on_gpu = lhs.factor * rhs.factor, 1 - call.kernel, _compat.target() == "gpu"
    if on_gpu and dtype == jnp.bfloat16 and dims.contracts_last(shared):
        # XLA would merge dots that share an operand, and apply the factors in separate passes,
        # rounded to bfloat16. The barrier includes the factor, because XLA merges equal barriers.
        # An operand that cuBLAS reads transposed has none: XLA would no longer transpose it in the
        # kernel that quantizes it.
        values[shared], factor = lax.optimization_barrier((values[shared], factor))
    # A factor rounded to bfloat16 would change all elements by the same 0.2 %. On a GPU, XLA folds
    # a scalar factor in the dtype of the dot into the cuBLAS call, without the rounding. In FP32,
    # it would write the product in FP32, and convert it in a separate pass.
    narrow = narrow if on_gpu else _core.FLOAT32
    product = dot(*values, precision=precision, preferred_element_type=narrow)
    factor = _compat.mark_target(lax.convert_element_type(factor, product.dtype))
    product = lax.mul(product, lax.broadcast(factor, product.shape))
    return lax.convert_element_type(product, dtype)


def _first(
    call: DotCall, gemm: str, role: str, x: jax.Array, dims: Dims, side: int, state: State | None
) -> tuple[Any, Any]:
    """Quantizes an operand at its first use.

    Returns:
      The operand, and its active and measured amax, which other dots and the next state reuse.
    """
    scaling, dtype = call.scaling, call.format(gemm, role)
    if state is None or not isinstance(scaling, DelayedScaling):
        # A policy of `jax.checkpoint` may save this amax.
        is_saved = gemm == "fprop" and scaling.kind == "current" and dtype is not None
        stored = named_amax(AMAX(x)) if is_saved else None
        seen = stored, stored
        return _operand(call, gemm, role, x, dims, side, seen), seen
    own = of_operand(state, role)
    if dtype is None:
        return Operand(x, None), OBSERVE(x, own, scaling)
    arrays, seen = OBSERVE_AND_QUANTIZE[role](x, own, scaling=scaling, dtype=dtype)
    return Operand(*arrays), seen


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(call: DotCall, lhs: jax.Array, rhs: jax.Array, state: State | None) -> jax.Array:
    return _forward(call, *_operands(call, lhs, rhs, before_step(state))[0])


def _operands(
    call: DotCall, lhs: jax.Array, rhs: jax.Array, state: State | None
) -> tuple[list[Any], list[Any]]:
    """Quantizes the operands of the forward dot, and measures their amaxes for delayed scaling."""
    pairs = [
        _first(call, "fprop", call.role(side), x, call.dims, side, state)
        for side, x in enumerate((lhs, rhs))
    ]
    return [operand for operand, _ in pairs], [seen for _, seen in pairs]


def _forward(call: DotCall, lhs: Operand | MXOperand, rhs: Operand | MXOperand) -> jax.Array:
    out = _multiply(call, "fprop", lhs, rhs, call.dims, call.out_dtype, call.shardings.result)
    return _shield(call, out, (lhs, rhs)[call.kernel].values.shape)


def _product_fwd(call: DotCall, *primals: Any) -> tuple[jax.Array, Any]:
    lhs, rhs, state = jax.tree.map(lambda primal: primal.value, primals)
    _check_gradient(call, *jax.tree.map(lambda primal: primal.perturbed, primals))
    lhs, rhs = _differentiated_once(type(call.scaling).__name__, lhs, rhs)
    before = before_step(state)
    operands, seen = _operands(call, lhs, rhs, before)
    saved = []
    for side, x in enumerate((lhs, rhs)):
        backwards = _for_backward(call, side, x, operands[side], seen[side])
        of_backward, of_forward = _kept(backwards, is_kernel=side == call.kernel)
        saved.append(of_backward)
        if backwards is operands[side]:
            operands[side] = of_forward
    # The gradient of the state must have the dtype that all leaves of the state share. One leaf is
    # saved to record it.
    state_leaf = None if state is None else state[AGE]
    if before is None:
        seen = []
    return _forward(call, *operands), (tuple(saved), seen, before, state_leaf)


def _check_gradient(call: DotCall, *is_differentiated: Any) -> None:
    """Warns if the gradient of a kernel is computed without that of its state.

    Args:
      call: the dot.
      is_differentiated: for both operands and each leaf of the state, True if it has a gradient.
    """
    *operands, state = is_differentiated
    if operands[call.kernel] and state is not None and not state[AGE]:
        _core.warn_user(
            "The gradient of an FP8 model is computed without that of its states, which is their "
            "value in the next step. They do not change: each step measures all tensors again, or "
            "with calibrate=False has scales of 1. Differentiate variables = {'params': params, "
            "'_overwrite_with_gradient': states}, as jaxmp.TrainState does, or the argument state "
            "of fp8.dot_general. In NNX, write "
            "jaxmp.nnx.value_and_grad(loss_fn)(model), or split the model with graph, params, "
            "states, rest = nnx.split(model, nnx.Param, jaxmp.nnx.OverwriteWithGradient, ...)."
        )


def _for_backward(
    call: DotCall, side: int, x: jax.Array, forwards: Operand | MXOperand, seen: tuple[Any, Any]
) -> Operand | MXOperand:
    """Returns operand `side`, quantized for the dot that computes the other operand's gradient."""
    gemm, role = call.gemm_of_gradient(1 - side), call.role(side)
    if _shared(call, role, "fprop", gemm):
        return forwards
    dims, _ = call.dims.transposed(1 - side)
    return _operand(call, gemm, role, x, dims, side, seen)


def _shared(call: DotCall, role: str, gemm: str, other: str) -> bool:
    """Checks if two dots can share the quantized `role`, although they contract different axes."""
    if call.format(gemm, role) != call.format(other, role):
        return False
    return call.format(gemm, role) is None or call.scaling.kind in ("current", "delayed")


def _product_bwd(
    call: DotCall, residuals: tuple[Any, ...], gradient: jax.Array
) -> tuple[Any, Any, Any]:
    saved, seen, before, state_leaf = residuals
    (gradient,) = _differentiated_once(type(call.scaling).__name__, gradient)
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
            # Without FP8, cast the gradient of a wide result to the dtype of the other operand.
            values = lax.convert_element_type(operand.values, saved[1 - side].values.dtype)
            operand = Operand(values, None)
        # The gradient of the result replaces operand `side`.
        lhs, rhs = (saved[0], operand) if side else (operand, saved[1])
        sharding = call.shardings[side]
        sharding = None if sharding is None else _dims.before_transpose(sharding, order)
        product = _multiply(call, gemm, lhs, rhs, dims, call.dtypes[side], sharding)
        results.append(jnp.transpose(product, order))
    if before is None or not isinstance(call.scaling, DelayedScaling):
        return results[0], results[1], None
    of_lhs, of_rhs = seen
    by_role = {call.role(0): of_lhs, call.role(1): of_rhs, "output_grad": of_gradient}
    return results[0], results[1], next_state(call.scaling, before, by_role, state_leaf)


# The rule is called where a gradient is traced, and learns of which operands it is.
_product.defvjp(_product_fwd, _product_bwd, symbolic_zeros=True)
