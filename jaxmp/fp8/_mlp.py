"""MLP of FP8 layers whose activation is computed in the kernel that quantizes its result."""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxmp import functional
from jaxmp._core import _compat
from jaxmp._core._messages import did_you_mean
from jaxmp.errors import JaxmpError
from jaxmp.fp8._call import Call, differentiated_once
from jaxmp.fp8._cast_transpose import explain_fallback
from jaxmp.fp8._checkpoint import named_result
from jaxmp.fp8._known_scales import are_known, formats
from jaxmp.fp8._layer import Layer, Saved, is_matrix_product, pallas_mode, to_matrices
from jaxmp.fp8._scaling import Scaling
from jaxmp.fp8._state import OPERANDS, State


class Activation(NamedTuple):
    """Activation of one or two arrays, and its derivatives."""

    plain: Callable[..., jax.Array]
    # Of FP32 elements.
    value: Callable[..., jax.Array]
    # For each operand: a function of all operands and the gradient of the result.
    derivatives: tuple[Callable[..., jax.Array], ...]


def _derivative(value: Callable[..., jax.Array], index: int) -> Callable[..., jax.Array]:
    def derivative(*args: jax.Array) -> jax.Array:
        *operands, gradient = args
        return jax.vjp(value, *operands)[1](gradient)[index]

    return derivative


def _activation(
    plain: Callable[..., jax.Array], value: Callable[..., jax.Array], count: int
) -> Activation:
    return Activation(plain, value, tuple(_derivative(value, n) for n in range(count)))


def _swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.silu(gate) * up


ACTIVATIONS: dict[str, Activation] = {
    "gelu": _activation(functional.gelu, jax.nn.gelu, 1),
    "silu": _activation(functional.silu, jax.nn.silu, 1),
    "swiglu": _activation(functional.swiglu, _swiglu, 2),
}


# ---------------------------------------------------------------------------
# Capturing the dots of layers
# ---------------------------------------------------------------------------


class Captured(NamedTuple):
    """A dot that a layer called; it returned `row` instead of its result."""

    call: Call
    lhs: jax.Array
    rhs: jax.Array
    state: State | None
    # Zeros, with size 1 on all axes but the last, to which the layer adds its bias.
    row: jax.Array


_captured: contextvars.ContextVar[list[Captured] | None] = contextvars.ContextVar(
    "jaxmp_fp8_captured", default=None
)


@contextlib.contextmanager
def _capturing(dots: list[Captured]) -> Iterator[None]:
    token = _captured.set(dots)
    try:
        yield
    finally:
        _captured.reset(token)


def captured_row(
    call: Call, lhs: jax.Array, rhs: jax.Array, state: State | None
) -> jax.Array | None:
    """Returns the row that replaces the result of a dot if `mlp` calls its layer, else None."""
    dots, scaling = _captured.get(), call.scaling
    if dots is None or not _mode(scaling) or call.shardings.result is not None:
        return None
    shape = (1,) * (lhs.ndim - 1) + rhs.shape[-1:]
    row = jnp.zeros(shape, call.out_dtype)
    dots.append(Captured(call, lhs, rhs, state, row))
    return row


# ---------------------------------------------------------------------------
# Public function
# ---------------------------------------------------------------------------


def mlp(
    x: jax.Array,
    up: Callable[[jax.Array], jax.Array],
    down: Callable[[jax.Array], jax.Array],
    *,
    gate: Callable[[jax.Array], jax.Array] | None = None,
    activation: str | None = None,
    residual_name: str | None = None,
) -> jax.Array:
    """Computes `down(activation(up(x)))` of linear layers.

    If the layers run in FP8, the kernels that quantize also compute the activation and its
    derivative, in FP32. The result of the activation is not stored in 16 bits, and the backward
    pass saves only the results of `up` and `gate`, and quantized operands. Any other layers, as in
    `init` and with other recipes, are called as written.

    Layers are fused with `kernels="pallas"` if the Pallas kernel can quantize all of their
    matrices. This requires a program for one device, and `jaxmp.value_and_grad` with delayed
    scaling. Rounding differs from that of the layers: the
    activation is not rounded to 16 bits before it is quantized.

    Args:
      x: `[..., D]`, the input.
      up, down: linear layers of Linen or NNX, or functions that call `fp8.dot_general`, from D to F
        and from F to any number of features. `down` is called with its input replaced by one row
        if the layers are fused, and must only multiply it and add a bias.
      gate: linear layer from D to F for "swiglu": `down(silu(gate(x)) * up(x))`.
      activation: "gelu" (tanh approximation) or "silu"; None: "gelu", or "swiglu" with a gate.
      residual_name: name of the results of `up` and `gate` for policies of `jax.checkpoint`, as
        given by `jax.ad_checkpoint.checkpoint_name`; None: no name.

    Returns:
      `[..., features of down]`, in the dtype that `down` returns.

    Raises:
      JaxmpError: if the activation is unknown, or does not match `gate`, and for a layer that is
        not callable.

    Example:
      >>> up, down = jnp.full((16, 32), 0.25), jnp.full((32, 16), 0.25)
      >>> y = mlp(jnp.ones((4, 16)), lambda x: x @ up, lambda h: h @ down, activation="silu")
      >>> y.shape
      (4, 16)
    """
    for role, layer in {"up": up, "down": down, "gate": up if gate is None else gate}.items():
        if not callable(layer):
            raise JaxmpError(
                f"fp8.mlp: {role} is a {type(layer).__name__}, which is not a layer. Pass a layer, "
                "or a function: fp8.mlp(x, lambda x: x @ up, lambda h: h @ down)."
            )
    name = activation or ("gelu" if gate is None else "swiglu")
    allowed = ("gelu", "silu") if gate is None else ("swiglu",)
    if name not in allowed:
        # A function of jax.nn, such as relu, is spelled correctly.
        hint = "" if hasattr(jax.nn, str(name)) else did_you_mean(str(name), allowed)
        call = "down(jax.nn.relu(up(x)))" if gate is None else "down(jax.nn.gelu(gate(x)) * up(x))"
        raise JaxmpError(
            f"fp8.mlp: activation={activation!r} with gate={None if gate is None else 'a layer'}."
            f"{hint} Allowed: 'gelu' and 'silu' without a gate, 'swiglu' with a gate: "
            "fp8.mlp(x, up, down, gate=gate). For any other activation, call the layers, as in "
            f"{call}."
        )
    layers = (up,) if gate is None else (gate, up)
    activated = lambda hidden: ACTIVATIONS[name].plain(*(_named(h, residual_name) for h in hidden))
    dots: list[Captured] = []
    with _capturing(dots):
        rows = [layer(x) for layer in layers]
    if not dots:
        return down(activated(rows))
    with _capturing(dots):
        out = down(rows[0])
    fused = None
    if len(dots) == len(layers) + 1:
        fused = _fused(name, residual_name, dots, rows, out)
    return down(activated([layer(x) for layer in layers])) if fused is None else fused


def _named(x: jax.Array, name: str | None) -> jax.Array:
    """Names an array for policies of `jax.checkpoint`."""
    return x if name is None else checkpoint_name(x, name)


def _fused(
    name: str,
    residual_name: str | None,
    dots: list[Captured],
    rows: list[jax.Array],
    out: jax.Array,
) -> jax.Array | None:
    """Returns the result of a fused MLP; None if its layers cannot be fused.

    Args:
      name: the activation.
      residual_name: name of the results of the layers in front of the activation.
      dots: the dots of the layers, that of `down` last.
      rows: the results of the layers in front of the activation, of one row: their biases.
      out: the result of `down` of one row: its bias.
    """
    *ups, down = dots
    scaling = down.call.scaling
    if explain_unfused(name, dots):
        return None
    biases = tuple(
        None if row is dot.row else row.reshape(-1) for row, dot in zip(rows, ups, strict=True)
    )
    x = ups[0].lhs
    states = tuple(dot.state for dot in dots)
    arrays = x.reshape(-1, x.shape[-1]), tuple(dot.rhs for dot in dots), biases, states
    axes = _compat.varying_axes(arrays)
    matrix, kernels, biases, _ = _compat.vary(arrays, axes)
    call = MlpCall(
        scaling,
        _mode(scaling),
        name,
        residual_name,
        (x.dtype, rows[0].dtype, down.call.out_dtype, *(kernel.dtype for kernel in kernels)),
    )
    y: Any = _mlp(call, matrix, kernels, biases, states)
    y = y.reshape(*x.shape[:-1], y.shape[-1])
    y = y if out is down.row else y.astype(out.dtype) + out
    return y


def explain_unfused(name: str, dots: list[Captured]) -> str:
    """Returns the reason why the layers of an MLP cannot be fused, or ""."""
    scaling = dots[-1].call.scaling
    if not _mode(scaling):
        return "the scaling does not use Pallas kernels"
    if any(dot.call.scaling != scaling for dot in dots):
        return "the layers have different scalings"
    if len(formats(scaling)) < len(OPERANDS):
        return "an operand has two formats, or a dot does not use FP8"
    for dot in dots:
        if not are_known(scaling, dot.state):
            return "jaxmp.value_and_grad does not update the state"
        if dot.rhs.ndim != 2 or not is_matrix_product(dot.call):
            return "a layer is not a product of two matrices"
    interpret = _mode(scaling) == "interpret"
    matrices = [to_matrices(dots[0].call, dots[0].lhs, dots[0].rhs)[0], *(d.rhs for d in dots)]
    return explain_fallback(*matrices, interpret=interpret)


def _mode(scaling: Scaling) -> str:
    """Returns how Pallas kernels run if the scaling uses them; otherwise ""."""
    return pallas_mode() if scaling.uses_pallas else ""


# ---------------------------------------------------------------------------
# Fused MLP
# ---------------------------------------------------------------------------


class MlpCall(NamedTuple):
    """Static arguments of a fused MLP."""

    scaling: Scaling
    kernels: str
    activation: str
    residual_name: str | None
    # Dtypes of the input, of the hidden arrays, of the result, and of the kernels.
    dtypes: tuple[Any, ...]


_Biases = tuple[jax.Array | None, ...]
_States = tuple[State | None, ...]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mlp(
    call: MlpCall,
    x: jax.Array,
    kernels: tuple[jax.Array, ...],
    biases: _Biases,
    states: _States,
) -> jax.Array:
    return _forward(call, x, kernels, biases, states)[0]


class _SavedMlp(NamedTuple):
    """Results of the forward pass for the backward pass."""

    ups: list[Saved]
    hidden: list[jax.Array]
    down: Saved
    biases: _Biases


def _forward(
    call: MlpCall,
    x: jax.Array,
    kernels: tuple[jax.Array, ...],
    biases: _Biases,
    states: _States,
) -> tuple[jax.Array, _SavedMlp]:
    x, *kernels_ = differentiated_once(type(call.scaling).__name__, x, *kernels)
    ups, hidden = [], []
    for kernel, bias, state in zip(kernels_[:-1], biases, states[:-1], strict=True):
        layer = Layer(call.scaling, call.kernels, state)
        h, saved = layer.forward(layer.quantize((x,)), layer.quantize((kernel,)), call.dtypes[1])
        h = h if bias is None else h + bias[None].astype(h.dtype)
        ups.append(saved)
        h = named_result(lax.optimization_barrier(h), batched=False)
        hidden.append(_named(h, call.residual_name))
    layer = Layer(call.scaling, call.kernels, states[-1])
    activated = layer.quantize(tuple(hidden), ACTIVATIONS[call.activation].value)
    y, saved = layer.forward(activated, layer.quantize((kernels_[-1],)), call.dtypes[2])
    y = named_result(y, batched=False)
    return y, _SavedMlp(ups, hidden, saved, biases)


def _backward(call: MlpCall, saved: _SavedMlp, gradient: jax.Array) -> tuple[Any, ...]:
    (gradient,) = differentiated_once(type(call.scaling).__name__, gradient)
    of_x, of_hidden, _, *of_kernels = call.dtypes
    down = Layer.of_saved(call.scaling, call.kernels, saved.down)
    pair = of_hidden, of_kernels[-1]
    of_activated, of_down = down.backward(down.quantize((gradient,)), saved.down, pair)
    gradients, biases, states, sums = [], [], [], []
    derivatives = ACTIVATIONS[call.activation].derivatives
    operands = (*saved.hidden, of_activated)
    if call.kernels == "xla":
        # With the barrier, XLA computes the activation again, and stores no parts of it in FP32.
        operands = lax.optimization_barrier(operands)
    for number, each in enumerate(saved.ups):
        layer, bias = Layer.of_saved(call.scaling, call.kernels, each), saved.biases[number]
        hidden = layer.quantize(operands, derivatives[number], sums=bias is not None)
        dx, dw = layer.backward(hidden, each, (of_x, of_kernels[number]))
        gradients.append(dw)
        sums.append(dx)
        of_bias = hidden.sums
        biases.append(None if bias is None or of_bias is None else of_bias.astype(bias.dtype))
        states.append(layer.next_state())
    of_input = functools.reduce(jnp.add, sums)
    return of_input, (*gradients, of_down), tuple(biases), (*states, down.next_state())


_mlp.defvjp(_forward, _backward)
