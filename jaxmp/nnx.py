"""Gradients, optimizer, averages and compiled steps of Flax NNX models, and their layers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from flax import nnx
from flax.nnx.filterlib import Filter

from jaxmp import _gradients
from jaxmp._attention._layer import AttentionFunction
from jaxmp._core._typing import PyTree
from jaxmp._flax._nnx_average import EMA as EMA
from jaxmp._flax._nnx_compiled_step import CompiledStep
from jaxmp._flax._nnx_fp8 import OverwriteWithGradient as OverwriteWithGradient
from jaxmp._flax._nnx_gradients import Gradient, trained
from jaxmp._flax._nnx_layers import NNX_LAYERS
from jaxmp._flax._nnx_optimizer import Optimizer as Optimizer
from jaxmp._loss_scale import LossScaleLike

__all__ = [
    "EMA",
    "Optimizer",
    "OverwriteWithGradient",
    "attention_fn",
    "compile_step",
    "grad",
    "register_layer",
    "value_and_grad",
]

# ---------------------------------------------------------------------------
# Layers
# ---------------------------------------------------------------------------


def attention_fn(
    *,
    implementation: str | None = None,
    is_causal: bool = False,
    local_window_size: int | tuple[int, int] | None = None,
    padding_mask: bool = False,
) -> AttentionFunction:
    """Returns an `attention_fn` for `flax.nnx.MultiHeadAttention`.

    It calls `jaxmp.dot_product_attention`. 16-bit policies install this function automatically.
    Install it yourself to declare the structure of the mask (causal, window, padding), which lets
    the fused kernel skip masked blocks. A dense mask is read in full.

    Args:
      implementation: as in `dot_product_attention`; None or "auto": the policy decides.
      is_causal: position t attends to positions 0 to t. Do not pass a causal mask as well.
      local_window_size: `(left, right)`, or one number for both.
      padding_mask: the layer's mask hides only the padding at the end of each sequence and what
        the other arguments declare. It is passed to the kernel as lengths.

    Returns:
      A function; equal arguments give equal functions.

    Raises:
      AttentionError: if `implementation` is not valid; when the function is called, the errors of
        `dot_product_attention`, or an error if `sow_weights` or `precision` require all weights and
        the implementation does not store them.

    Example:
      >>> layer = flax.nnx.MultiHeadAttention(
      ...     2, 8, rngs=flax.nnx.Rngs(0), decode=False,
      ...     attention_fn=jaxmp.nnx.attention_fn(is_causal=True),
      ... )
      >>> layer(jnp.ones((1, 4, 8))).shape
      (1, 4, 8)
    """
    hints = implementation, is_causal, local_window_size, padding_mask
    return AttentionFunction(*hints, intermediates=nnx.Intermediate)


def register_layer(
    cls: type[nnx.Module],
    *,
    norm: bool | None = None,
    dtype: str | None = None,
    kernel: str | None = None,
    dot_general: str | None = None,
    einsum: str | None = None,
    attention_fn: str | None = None,
) -> None:
    """Adds a layer class of yours to the table of layer classes, as if Flax had defined it.

    Policies treat a module of an unknown class as user code: its inputs, parameters and outputs are
    cast to the compute dtype. A row in the table changes that. Subclasses inherit the row.

    Call this once, directly below the definition of the class: wrapped models and compiled
    functions depend on the row, so it cannot change after the class has been used under a policy.

    Args:
      cls: a subclass of `flax.nnx.Module`.
      norm: the layer computes statistics. Its inputs and parameters are FP32, and its result is
        returned in the compute dtype.
      dtype: name of the attribute with the dtype in which the layer computes. A policy sets it,
        unless `respect_explicit` is set and the value differs from the constructor's default.
      kernel: name of the parameter `[..., inputs, outputs]` that the dot multiplies by; required
        with `dot_general` and `einsum`. Leading axes are axes that a transformation stacked. If a
        rule sets an output dtype that is wider than the compute dtype, the other parameters, such
        as a bias, are read in the output dtype.
      dot_general: name of the attribute with a function like `jax.lax.dot_general`. It is replaced
        by an FP8 dot under `matmul = "fp8"`, and by one with a wider result if a rule sets it.
        A model that sets the attribute to another function keeps that function.
      einsum: name of an attribute with a function like `jax.numpy.einsum`, replaced in the same
        way.
      attention_fn: name of an attribute with a function like `flax.nnx.dot_product_attention`,
        which is replaced by `jaxmp.nnx.attention_fn()` as in Flax's attention layers.

      Arguments that are None have the values of the nearest base class in the table.

    Raises:
      CompositionError: if an argument is not valid, if the class has a different row, or if the
        class has been used under a policy; from `recipe.wrap`, if an instance lacks an attribute.

    Example:
      >>> class ScaleNorm(nnx.Module):
      ...     def __init__(self):
      ...         self.scale = nnx.Param(jnp.ones(()))
      ...     def __call__(self, x):
      ...         return self.scale * x * jax.lax.rsqrt(jnp.square(x).sum(-1, keepdims=True))
      >>> class Projection(nnx.Module):
      ...     def __init__(self, inputs, outputs, rngs):
      ...         self.weight = nnx.Param(rngs.normal((inputs, outputs)))
      ...         self.dot = jax.lax.dot_general
      ...     def __call__(self, x):
      ...         return self.dot(x, self.weight[...], (((x.ndim - 1,), (0,)), ((), ())))
      >>> jaxmp.nnx.register_layer(ScaleNorm, norm=True)
      >>> jaxmp.nnx.register_layer(Projection, kernel="weight", dot_general="dot")
      >>> model = nnx.Sequential(ScaleNorm(), Projection(16, 32, nnx.Rngs(0)))
      >>> model = jaxmp.load_recipe("fp8").wrap(model)
      >>> "f8_e4m3fn" in str(jax.make_jaxpr(lambda x: model(x))(jnp.ones((2, 16))))
      True
    """
    NNX_LAYERS.register(
        cls,
        norm=norm,
        dot_general=dot_general,
        einsum=einsum,
        dtype=dtype,
        kernel=kernel,
        attention_fn=attention_fn,
    )


# ---------------------------------------------------------------------------
# Gradients
# ---------------------------------------------------------------------------


def value_and_grad(
    fn: Callable[..., Any] | None = None,
    argnums: int | nnx.DiffState | Sequence[int | nnx.DiffState] = 0,
    has_aux: bool = False,
    *,
    loss_scale: LossScaleLike = None,
    wrt: Filter = nnx.Param,
    **options: Any,
) -> Callable[..., Any]:
    """Returns a function that computes the FP32 loss and gradients of a function of Flax objects.

    It corresponds to `flax.nnx.value_and_grad`, for computations in 16 bits. Flax objects (modules,
    `nnx.Rngs`, metrics, Variables) can be in any argument, also inside lists, tuples and dicts.
    Values that `fn` writes to them (batch statistics, RNG counts, metrics, sown values) are written
    to the caller's objects, as in Flax.

    Args:
      fn: returns a scalar loss, or another result that `jaxmp.value_and_grad` allows. None: returns
        a decorator: `@value_and_grad(has_aux=True)`.
      argnums: the arguments to differentiate: numbers, or `nnx.DiffState(number, filter)`.
      has_aux: `fn` returns `(loss, aux)`; `aux` can contain Flax objects.
      loss_scale: a jaxmp or jmp loss scale, a number, or None.
      wrt: filter of the Variables to differentiate. The state of delayed scaling
        (`OverwriteWithGradient`) is always differentiated.
      **options: `weighted`, `microbatches`, `batch_argnums`, `rng_argnums`, `axis_name`,
        `interleave`, `accumulate_dtype` and `reduce_dtype` of `jaxmp.value_and_grad`. Each
        microbatch receives the state of all Flax objects after the previous one, including RNG
        counts, but the original parameters. Sown values are stacked, like auxiliary data.

    Returns:
      A function of the same arguments that returns `(loss, grads)`, or `((loss, aux), grads)`.
      `grads` is a tuple if `argnums` is one. It contains an `nnx.State` for each module, in float32
      for 16-bit parameters. It includes the new values of `OverwriteWithGradient`, if the model has
      any: `Optimizer.update` assigns them, and `nnx.state(grads, nnx.Param)` excludes them. Without
      an `Optimizer`, assign them with `nnx.update(model, nnx.state(grads, OverwriteWithGradient))`.

    Raises:
      JaxmpError: if `fn` is a method of a module, if a Variable is both in an argument to
        differentiate and in another one, or if `jaxmp.value_and_grad` refuses an argument.

    Example:
      >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
      >>> loss, grads = value_and_grad(lambda m, x: m(x).sum())(model, jnp.ones((4, 2)))
      >>> float(grads["bias"][...][0])
      4.0
    """
    if fn is None:
        return functools.partial(
            value_and_grad,
            argnums=argnums,
            has_aux=has_aux,
            loss_scale=loss_scale,
            wrt=wrt,
            **options,
        )
    gradient = Gradient(fn, argnums, has_aux, trained(wrt))
    options = {"loss_scale": loss_scale, **options}
    _gradients.value_and_grad(fn, **options)  # Checks the options before the first call.

    @functools.wraps(fn, updated=())
    def value_and_grad_fn(*args: PyTree, **kwargs: PyTree) -> PyTree:
        out, _ = gradient(args, kwargs, options)
        return out

    return value_and_grad_fn


def grad(
    fn: Callable[..., Any] | None = None,
    argnums: int | nnx.DiffState | Sequence[int | nnx.DiffState] = 0,
    has_aux: bool = False,
    **options: Any,
) -> Callable[..., Any]:
    """Returns a function that computes the FP32 gradients of a function of Flax objects.

    It corresponds to `flax.nnx.grad`, for computations in 16 bits.

    Args:
      fn: as in `value_and_grad`.
      argnums: the arguments to differentiate, as in `value_and_grad`.
      has_aux: `fn` returns `(loss, aux)`.
      **options: the keyword arguments of `value_and_grad`, such as `loss_scale`.

    Returns:
      A function that returns the gradients, or `(grads, aux)` with `has_aux`.

    Example:
      >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
      >>> grads = grad(lambda m, x: m(x).sum(), loss_scale=8.0)(model, jnp.ones((4, 2)))
      >>> float(grads["bias"][...][0])
      4.0
    """
    if fn is None:
        return functools.partial(grad, argnums=argnums, has_aux=has_aux, **options)
    run = value_and_grad(fn, argnums, has_aux, **options)

    @functools.wraps(fn, updated=())
    def grad_fn(*args: PyTree, **kwargs: PyTree) -> PyTree:
        value, grads = run(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return grad_fn


# ---------------------------------------------------------------------------
# Compiled steps
# ---------------------------------------------------------------------------


def compile_step(
    fn: Callable[..., Any], *nodes: PyTree, donate: bool = True, **options: Any
) -> CompiledStep:
    """Compiles a training step on NNX objects that splits them into arrays only once.

    `nnx.jit` splits the objects into arrays and merges them at every call. Use `compile_step` for
    models with many small arrays. Create it once: each new step is compiled again.

    Args:
      fn: `fn(*nodes, *args, **kwargs)` changes the nodes in place, and can return a value.
      *nodes: NNX objects, such as a model and its `Optimizer`.
      donate: let the compiled step reuse the memory of the old state. The arrays of the nodes are
        then deleted until the nodes are updated.
      **options: passed to `jax.jit`; `args` and `kwargs` are arguments 1 and 2, each one pytree.

    Returns:
      A function of `(*args, **kwargs)`. The nodes are updated at the end of
      `with compile_step(...) as step:`, and whenever `step.nodes` is read.

    Raises:
      CompositionError: at the first call, if `fn` changes more of the nodes than arrays.

    Example:
      >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
      >>> optimizer = Optimizer(model, optax.sgd(0.1))
      >>> def train(model, optimizer, x):
      ...     loss, grads = value_and_grad(lambda m, x: m(x).sum())(model, x)
      ...     optimizer.update(model, grads)
      ...     return loss
      >>> with compile_step(train, model, optimizer) as step:
      ...     losses = [float(step(jnp.ones((4, 2)))) for _ in range(3)]
      >>> int(optimizer.step[...]), losses[2] < losses[0]
      (3, True)
    """
    return CompiledStep(fn, nodes, donate, options)
