"""Dots of the layers of Flax models: in FP8, or with a wider result; and their operands."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, TypeAlias, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from flax.linen.dtypes import promote_dtype
from jax import lax

from jaxmp import _core, _programs
from jaxmp._core import Array, DTypeLike
from jaxmp.errors import CompositionError, JaxmpError
from jaxmp.fp8 import _dims, _einsum, _explain, _scaling, _state
from jaxmp.fp8._dot_general import dot_general
from jaxmp.fp8._overwritten import OVERWRITE

# ---------------------------------------------------------------------------
# Dots
# ---------------------------------------------------------------------------


# Function of two operands, as `lax.dot_general` with its other arguments.
Product: TypeAlias = Callable[..., jax.Array]


@dataclasses.dataclass(frozen=True)
class _LayerFunction:
    """Replacement of the dot of a Flax layer. Hashable; ignores `path` and `state`."""

    scaling: _scaling.Scaling
    # Result dtype; None: `preferred_element_type`, or by default the dtype of the operands.
    wide: DTypeLike | None = None
    path: str = dataclasses.field(default="", compare=False)
    # Returns the layer's state; None for a scaling without state.
    state: Callable[[], Any] | None = dataclasses.field(default=None, compare=False)
    # True if the dot runs in FP8 in another phase of the recipe only. It then resets its state.
    is_resting: bool = False

    def _multiply(
        self,
        product: Product,
        in_fp8: Product,
        operands: tuple[jax.Array, jax.Array],
        preferred: DTypeLike | None,
        sizes: tuple[int, int, str],
    ) -> jax.Array:
        """Computes the dot of a layer, in FP8 if its sizes allow it.

        Args:
          product: function of the operands that computes the dot without FP8.
          in_fp8: the same function in FP8, which also accepts a state.
          operands: input and kernel.
          preferred: argument `preferred_element_type` of the dot.
          sizes: from `einsum_sizes`.
        """
        k, n, exclusion = sizes
        if self.is_resting:
            out = self._plain(product, *operands, preferred)
            if self.state is None or _explain.excluded(self.scaling, self.path, k, n, exclusion):
                return out
            return _state.rest(out, self.state())
        if not _explain.decide(
            self.scaling, self.path, k, n, exclusion, operands[0].size // max(k, 1)
        ):
            return self._plain(product, *operands, preferred)
        lhs, rhs = operands
        own = lhs.dtype if _keeps_kernel(lhs.dtype, rhs.dtype) else None
        wide = next((dtype for dtype in (self.wide, preferred) if dtype is not None), own)
        state = None if self.state is None else self.state()
        return in_fp8(lhs, rhs, preferred_element_type=wide, state=state)

    def _plain(
        self, product: Product, lhs: jax.Array, rhs: jax.Array, preferred: DTypeLike | None
    ) -> jax.Array:
        """Computes the dot without FP8."""
        if _keeps_kernel(lhs.dtype, rhs.dtype):
            rhs = lax.convert_element_type(rhs, lhs.dtype)
        if self.wide is not None and lhs.dtype == rhs.dtype != self.wide:
            return _programs.wide_matmul(product, lhs, rhs, self.wide)
        return product(lhs, rhs, preferred_element_type=preferred)


class LayerDot(_LayerFunction):
    """Replacement of a Flax layer's `dot_general`."""

    def __call__(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        dimension_numbers: lax.DotDimensionNumbers,
        precision: lax.PrecisionLike = None,
        preferred_element_type: DTypeLike | None = None,
        **options: Any,
    ) -> jax.Array:
        dims = _dims.make_dims(lhs, rhs, dimension_numbers)
        k, n = (
            math.prod(rhs.shape[axis] for axis in axes) for axes in (dims.contract[1], dims.free(1))
        )
        options |= {"dimension_numbers": dimension_numbers, "precision": precision}
        product, in_fp8 = (
            functools.partial(fn, **options) for fn in (lax.dot_general, dot_general(self.scaling))
        )
        return self._multiply(product, in_fp8, (lhs, rhs), preferred_element_type, (k, n, ""))


class LayerEinsum(_LayerFunction):
    """Replacement of a Flax layer's `jnp.einsum`."""

    def __call__(
        self,
        equation: str,
        lhs: jax.Array,
        rhs: jax.Array,
        precision: lax.PrecisionLike = None,
        preferred_element_type: DTypeLike | None = None,
        **options: Any,
    ) -> jax.Array:
        product, in_fp8 = (
            functools.partial(fn, equation, precision=precision, **options)
            for fn in (jnp.einsum, _einsum.einsum(self.scaling))
        )
        sizes = einsum_sizes(equation, lhs.ndim, rhs.shape)
        return self._multiply(product, in_fp8, (lhs, rhs), preferred_element_type, sizes)


def is_stateful(value: object) -> TypeGuard[LayerDot | LayerEinsum]:
    """Returns True for an FP8 dot that reads and writes a state."""
    return isinstance(value, _LayerFunction) and value.scaling.is_stateful


def einsum_sizes(
    equation: str, ndim: int | None, kernel_shape: tuple[int, ...]
) -> tuple[int, int, str]:
    """Returns the input and output features of an einsum layer.

    Args:
      equation: einsum equation of an input and a kernel.
      ndim: rank of the input; None: assume that an ellipsis covers one axis.
      kernel_shape: shape of the kernel.

    Returns:
      `(k, n, "")`; or `(0, 0, exclusion)` if one dot cannot compute the equation, with the reason.
    """
    if ndim is None:
        term = equation.replace(" ", "").partition(",")[0]
        ndim = len(term.replace("...", "."))
    try:
        (_, contract), (_, batch) = _einsum.plan_einsum(equation, ndim, len(kernel_shape)).numbers
    except JaxmpError as error:
        return 0, 0, str(error)
    k = math.prod(kernel_shape[axis] for axis in contract)
    n = math.prod(kernel_shape) // max(k * math.prod(kernel_shape[axis] for axis in batch), 1)
    return k, n, ""


# ---------------------------------------------------------------------------
# Promotion of operands
# ---------------------------------------------------------------------------


def quantizes_float32_kernels(scaling: _scaling.Scaling | None) -> bool:
    """Returns True if the FP8 dots of a layer read its kernel in FP32, without a 16-bit copy.

    The kernel is rounded once, and its gradient is a result of the matmul in FP32. A dot without
    FP8, and an MX dot on a CPU, would multiply an FP32 kernel in FP32.
    """
    if scaling is None or scaling.kind == "mx":
        return False
    return all(scaling.formats(gemm) is not None for gemm in _scaling.GEMMS)


def _keeps_kernel(compute_dtype: DTypeLike, kernel_dtype: DTypeLike) -> bool:
    return _core.is_16bit(compute_dtype) and kernel_dtype == _core.FLOAT32


# ---------------------------------------------------------------------------
# Linen
# ---------------------------------------------------------------------------


def read_linen_state(ref: Callable[[], Any], scaling: _scaling.Scaling) -> dict[str, jax.Array]:
    """Returns the FP8 state of one Linen layer; its gradient is its next value.

    Args:
      ref: a weak reference to the layer.
      scaling: that of its dot.
    """
    module = ref()
    names = {name: f"{_state.PREFIX}{name}" for name in _state.NAMES}
    if not all(module.has_variable(OVERWRITE, name) for name in names.values()):
        if not module.is_mutable_collection(OVERWRITE):
            raise CompositionError(
                f"{type(scaling).__name__} finds no state for {'/'.join(module.scope.path)!r}. "
                f"Pass all variables that `init` of the wrapped model returns, with {OVERWRITE!r}: "
                "model.apply(variables, x); TrainState.create(params=variables) trains them. "
                "Layers under nn.scan and nn.vmap require "
                f"variable_axes={{'params': 0, {OVERWRITE!r}: 0}}, or, where all steps share the "
                f"parameters, variable_broadcast=['params', {OVERWRITE!r}]."
            )
        for name, value in _state.init_state(scaling).items():
            # Not `module.variable`, which is allowed in `setup` and compact methods only.
            module.put_variable(OVERWRITE, names[name], value)
    return {name: module.get_variable(OVERWRITE, names[name]) for name in names}


# ---------------------------------------------------------------------------
# Wider results
# ---------------------------------------------------------------------------


@functools.cache
def wide_operator(product: Callable[..., Any], wide: np.dtype) -> Product:
    """Returns `product` with results in `wide`; one object per dtype, so equal modules stay equal.

    Args:
      product: a function of two operands with the option `preferred_element_type`; `jnp.einsum` has
        an equation before them.
      wide: dtype of the result.
    """

    def operator(*args: Any, **kwargs: object) -> jax.Array:
        start = int(isinstance(args[0], str))
        equation, (lhs, rhs, *more) = args[:start], args[start:]

        def bound(
            lhs: Array, rhs: Array, preferred_element_type: DTypeLike | None = None
        ) -> jax.Array:
            options = {**kwargs, "preferred_element_type": preferred_element_type}
            return product(*equation, lhs, rhs, *more, **options)

        is_transposed = None
        if product is lax.dot_general:
            numbers: Any = more[0] if more else kwargs["dimension_numbers"]
            is_transposed = lhs.ndim - 1 not in numbers[0][0]
        return _programs.wide_matmul(bound, lhs, rhs, wide, is_transposed=is_transposed)

    return operator


@dataclasses.dataclass(frozen=True)
class Promotion:
    """Flax's `promote_dtype` for a layer with another dot."""

    # Dtype of the result, to which biases are cast; None: the compute dtype.
    wide: np.dtype | None
    # An FP32 kernel is not cast.
    keeps_kernel: bool

    def __call__(
        self, *args: Any, dtype: DTypeLike | None = None, inexact: bool = True
    ) -> tuple[Array | None, ...]:
        # NNX passes one tuple of arrays.
        arrays = args[0] if isinstance(args[0], tuple) else args
        count = len(arrays) if self.wide is None else 2
        promote = functools.partial(promote_dtype, dtype=dtype, inexact=inexact)
        inputs, kernel, *others = arrays[:count]
        if self.keeps_kernel and dtype and _keeps_kernel(dtype, jnp.asarray(kernel).dtype):
            inputs, *others = promote(inputs, *others)
        else:
            inputs, kernel, *others = promote(inputs, kernel, *others)
        biases = (None if b is None else jnp.asarray(b, self.wide) for b in arrays[count:])
        return (inputs, kernel, *others, *biases)
