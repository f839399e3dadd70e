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
from jaxmp.fp8._call import Call
from jaxmp.fp8._cast_transpose import explain_fallback
from jaxmp.fp8._checkpoint import named_result
from jaxmp.fp8._copies import Source
from jaxmp.fp8._known_dot import Saved, backward, forward
from jaxmp.fp8._known_scales import are_known, formats
from jaxmp.fp8._layer import is_matrix_product, of_matrices, pallas_source, to_matrices
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
    if dots is None or not scaling.uses_pallas or call.shardings.result is not None:
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

    Layers are fused with `DelayedScaling(kernels="pallas")` if the Pallas kernel can quantize all
    of their matrices. This requires a program for one device, and `jaxmp.value_and_grad`. Rounding
    differs from that of the layers: the activation is not rounded to 16 bits before it is
    quantized.

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
    if not _can_fuse(dots):
        return None
    *ups, down = dots
    biases = tuple(
        None if row is dot.row else row.reshape(-1) for row, dot in zip(rows, ups, strict=True)
    )
    x = ups[0].lhs
    states = tuple(dict(dot.state or {}) for dot in dots)
    arrays = x.reshape(-1, x.shape[-1]), tuple(dot.rhs for dot in dots), biases, states
    axes = _compat.varying_axes(arrays)
    matrix, kernels, biases, _ = _compat.vary(arrays, axes)
    hidden = rows[0].dtype
    layers = tuple(of_matrices(dot.call)._replace(out_dtype=hidden) for dot in ups)
    last = of_matrices(down.call)._replace(dtypes=(hidden, down.rhs.dtype))
    call = MlpCall((*layers, last), name, residual_name, pallas_source())
    y: Any = _mlp(call, matrix, kernels, biases, states)
    y = y.reshape(*x.shape[:-1], y.shape[-1])
    y = y if out is down.row else y.astype(out.dtype) + out
    return y


def _can_fuse(dots: list[Captured]) -> bool:
    """Returns True if the Pallas kernel can quantize all matrices of these layers."""
    scaling = dots[-1].call.scaling

    def is_linear(dot: Captured) -> bool:
        is_product = dot.rhs.ndim == 2 and is_matrix_product(dot.call)
        return is_product and dot.call.scaling == scaling and are_known(scaling, dot.state)

    if len(formats(scaling)) < len(OPERANDS) or not all(map(is_linear, dots)):
        return False
    matrices = [to_matrices(dots[0].call, dots[0].lhs, dots[0].rhs)[0], *(d.rhs for d in dots)]
    return not explain_fallback(*matrices, interpret=pallas_source().interpret)


# ---------------------------------------------------------------------------
# Fused MLP
# ---------------------------------------------------------------------------


class MlpCall(NamedTuple):
    """Static arguments of a fused MLP."""

    # The dots of matrices, that of `down` last.
    layers: tuple[Call, ...]
    activation: str
    residual_name: str | None
    # That of tensors that are stored.
    source: Source


_Biases = tuple[jax.Array | None, ...]
_States = tuple[State, ...]


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
    *layers, last = call.layers
    ups, hidden = [], []
    for layer, kernel, bias, state in zip(layers, kernels, biases, states, strict=False):
        h, saved = forward(layer, call.source, (x,), (kernel,), state)
        h = h if bias is None else h + bias[None].astype(h.dtype)
        ups.append(saved)
        h = named_result(lax.optimization_barrier(h), batched=False)
        hidden.append(_named(h, call.residual_name))
    source = call.source._replace(prologue=ACTIVATIONS[call.activation].value)
    y, saved = forward(last, source, tuple(hidden), (kernels[-1],), states[-1])
    return named_result(y, batched=False), _SavedMlp(ups, hidden, saved, biases)


def _backward(call: MlpCall, saved: _SavedMlp, gradient: jax.Array) -> tuple[Any, ...]:
    *layers, last = call.layers
    down = backward(last, call.source, saved.down, (gradient,))
    arrays, gradients, biases = (*saved.hidden, down.lhs), [], []
    derivatives = ACTIVATIONS[call.activation].derivatives
    rows = zip(layers, saved.ups, saved.biases, derivatives, strict=True)
    for layer, up, bias, derivative in rows:
        source = Source(call.source.interpret, derivative, sums=bias is not None)
        result = backward(layer, source, up, arrays)
        gradients.append(result)
        sums = result.sums
        biases.append(None if bias is None or sums is None else sums.astype(bias.dtype))
    of_input = functools.reduce(jnp.add, (each.lhs for each in gradients))
    gradients.append(down)
    kernels, states = (each.rhs for each in gradients), (each.state for each in gradients)
    return of_input, tuple(kernels), tuple(biases), tuple(states)


_mlp.defvjp(_forward, _backward)
