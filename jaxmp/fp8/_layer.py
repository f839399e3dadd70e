"""Linear layers and MLPs of matrices that are quantized to two copies."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax

from jaxmp._core._typing import DTypeLike
from jaxmp.fp8._call import Call, differentiated_once, shield
from jaxmp.fp8._cast_transpose import Prologue, explain_fallback
from jaxmp.fp8._checkpoint import named
from jaxmp.fp8._copies import (
    QUANTIZE_COPIES,
    Copies,
    Quantized,
    Source,
    identity,
    keep,
    multiply_last,
)
from jaxmp.fp8._known_scales import (
    Known,
    factor_of,
    formats,
    independent,
    known_scales,
    products_of,
)
from jaxmp.fp8._operands import kernel_amax
from jaxmp.fp8._repeated import is_repeated
from jaxmp.fp8._scaling import DelayedScaling, Scaling
from jaxmp.fp8._state import (
    AGE,
    OPERANDS,
    State,
    before_step,
    next_state,
    of_operand,
    unknown_amax,
)

# Evaluates Pallas kernels on any device, for tests.
INTERPRET = False


class Saved(NamedTuple):
    """Values of a layer that its backward pass reads."""

    input: Copies
    kernel: Copies
    known: dict[str, Known] | None
    # Role -> active amax and partial maxima.
    seen: dict[str, tuple[Any, Any]]
    # State before the step, and a leaf of the state that the caller passed.
    before: State | None
    state_leaf: Any


class Layer:
    """Operands of a layer during one pass; they are quantized in the order of `OPERANDS`."""

    def __init__(self, scaling: Scaling, kernels: str, state: State | None) -> None:
        self.scaling, self.kernels = scaling, kernels
        self.before = self.known = self.state_leaf = None
        if state is not None and isinstance(scaling, DelayedScaling):
            self.before, self.state_leaf = before_step(state), state[AGE]
            self.known = known_scales(scaling, self.before)
        elif state is not None:
            self.before = state
        self.scales: list[jax.Array] = []
        self.seen: dict[str, tuple[Any, Any]] = {}

    @classmethod
    def of_saved(cls, scaling: Scaling, kernels: str, saved: Saved) -> Layer:
        """Returns the layer in its backward pass."""
        layer = cls(scaling, kernels, None)
        layer.before, layer.known, layer.state_leaf = saved.before, saved.known, saved.state_leaf
        layer.scales = [saved.input.scale, saved.kernel.scale]
        layer.seen = dict(saved.seen)
        return layer

    def quantize(
        self,
        xs: tuple[jax.Array, ...],
        prologue: Prologue = identity,
        *,
        sums: bool = False,
    ) -> Quantized:
        """Quantizes the next operand of the layer, `prologue(*xs)`."""
        role = OPERANDS[len(self.scales)]
        before, known = self.before, None if self.known is None else self.known[role]
        state = None if before is None or known is None else of_operand(before, role)
        dtype = formats(self.scaling)[role]
        source = Source(self.scaling, dtype, prologue, self.kernels, sums)
        earlier = tuple(self.scales)
        quantize = QUANTIZE_COPIES[role]
        if known is None:
            has_amax = before is not None and role == "kernel"
            stored = kernel_amax(xs[0], before) if has_amax else None
            result = quantize(xs, None, None, (), source=source, stored=stored)
            # Here, because a loop may quantize the kernel once for all inputs.
            scale = result.copies.scale
            products = tuple(factor_of(each) * factor_of(scale) for each in earlier)
            result = result._replace(products=products)
        elif role == "kernel" and is_repeated():
            result = quantize(xs, state, independent(known), (), source=source)
            products = products_of(source.scaling, known, earlier, result.copies.scale)
            result = result._replace(products=products)
        else:
            result = quantize(xs, state, known, earlier, source=source)
        self.scales.append(result.copies.scale)
        if known is not None:
            self.seen[role] = known.amax, result.partials
        return result

    def multiply(
        self, gemm: str, lhs: jax.Array, rhs: jax.Array, factor: jax.Array, dtype: DTypeLike
    ) -> jax.Array:
        accurate = gemm not in self.scaling.fast_accumulation
        return multiply_last(lhs, rhs, factor, dtype, accurate=accurate)

    def forward(self, x: Quantized, w: Quantized, dtype: DTypeLike) -> tuple[jax.Array, Saved]:
        """Multiplies input and kernel; returns the result, and what the backward pass reads."""
        saved_x, forward_x = keep(x.copies, transposed=True)
        saved_w, forward_w = keep(w.copies, transposed=False)
        factor = named(w.products[0])
        y = self.multiply("fprop", forward_x.values, forward_w.transposed, factor, dtype)
        known = None if self.known is None else {OPERANDS[-1]: self.known[OPERANDS[-1]]}
        return y, Saved(saved_x, saved_w, known, self.seen, self.before, self.state_leaf)

    def backward(
        self, g: Quantized, saved: Saved, dtypes: tuple[DTypeLike, DTypeLike]
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the gradients of input and kernel."""
        of_kernel, of_input = g.products[1], g.products[0]
        dx = self.multiply("dgrad", g.copies.values, saved.kernel.values, of_kernel, dtypes[0])
        x, gradient = saved.input.transposed, g.copies.transposed
        return dx, self.multiply("wgrad", x, gradient, of_input, dtypes[1])

    def next_state(self) -> State | None:
        """Returns the gradient of the state; None for scalings without state."""
        if self.before is None:
            return None
        if not isinstance(self.scaling, DelayedScaling):
            return unknown_amax(self.before)
        assert self.state_leaf is not None
        return next_state(self.scaling, self.before, self.seen, self.state_leaf)


# ---------------------------------------------------------------------------
# Linear layers
# ---------------------------------------------------------------------------


class MatrixCall(NamedTuple):
    """Static arguments of a linear layer of matrices, or of a layer of an MLP."""

    scaling: Scaling
    kernels: str
    # Dtypes of input, kernel and result.
    dtypes: tuple[Any, Any, Any]


def explain_kernels(call: Call, lhs: jax.Array, rhs: jax.Array, is_known: bool) -> str:
    """Returns the reason why a linear layer does not use the Pallas kernel, or "" if it does.

    Args:
      call: the dot.
      lhs, rhs: operands.
      is_known: result of `are_known`; False on explicit mesh axes.
    """
    if len(formats(call.scaling)) < len(OPERANDS):
        return "an operand has two formats, or a dot does not use FP8"
    if not is_known:
        return "jaxmp.value_and_grad does not update the state, or arrays are on several devices"
    if not is_matrix_product(call):
        return "the dot is not a product of two matrices"
    return explain_fallback(*to_matrices(call, lhs, rhs), interpret=INTERPRET)


def is_matrix_product(call: Call) -> bool:
    """Returns True if a dot is a product of matrices, after reshapes of its operands."""
    dims = call.dims
    count = len(dims.contract[0])
    free = dims.ndims[0] - count
    return (
        call.kernel == 1
        and not dims.batch[0]
        and dims.contract[0] == tuple(range(free, dims.ndims[0]))
        and dims.contract[1] == tuple(range(count))
    )


def to_matrices(call: Call, lhs: jax.Array, rhs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Reshapes input and kernel to `[rows, k]` and `[k, n]`."""
    k = math.prod(rhs.shape[: len(call.dims.contract[1])])
    return lhs.reshape(-1, k), rhs.reshape(k, -1)


def pallas_mode() -> str:
    """Returns how Pallas kernels run; see `Source.kernels`."""
    return "interpret" if INTERPRET else "pallas"


def linear(call: Call, lhs: jax.Array, rhs: jax.Array, state: State | None) -> jax.Array:
    """Computes a dot whose operands the Pallas kernel quantizes; see `explain_kernels`."""
    x, w = to_matrices(call, lhs, rhs)
    matrix = MatrixCall(call.scaling, pallas_mode(), (*call.dtypes, call.out_dtype))
    y = shield(call, _linear(matrix, x, w, state), rhs.shape)
    count = len(call.dims.contract[1])
    return y.reshape(*lhs.shape[: lhs.ndim - count], *rhs.shape[count:])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _linear(call: MatrixCall, x: jax.Array, w: jax.Array, state: State | None) -> jax.Array:
    # Without a backward pass, one copy of each operand suffices, and XLA writes only that one.
    return _linear_forward(call._replace(kernels="xla"), x, w, state)[0]


def _linear_forward(
    call: MatrixCall, x: jax.Array, w: jax.Array, state: State | None
) -> tuple[jax.Array, Saved]:
    x, w = differentiated_once(type(call.scaling).__name__, x, w)
    layer = Layer(call.scaling, call.kernels, state)
    return layer.forward(layer.quantize((x,)), layer.quantize((w,)), call.dtypes[2])


def _linear_backward(call: MatrixCall, saved: Saved, gradient: jax.Array) -> tuple[Any, Any, Any]:
    (gradient,) = differentiated_once(type(call.scaling).__name__, gradient)
    layer = Layer.of_saved(call.scaling, call.kernels, saved)
    dx, dw = layer.backward(layer.quantize((gradient,)), saved, call.dtypes[:2])
    return dx, dw, layer.next_state()


_linear.defvjp(_linear_forward, _linear_backward)
