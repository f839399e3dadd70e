"""Layers of Flax Linen: attention for jaxmp's kernels, and layer classes of your own."""

from __future__ import annotations

import flax.linen as nn

from jaxmp._attention._layer import AttentionFunction
from jaxmp._flax._linen_layers import LINEN_LAYERS

__all__ = ["attention_fn", "register_layer"]


def attention_fn(
    *,
    implementation: str | None = None,
    is_causal: bool = False,
    local_window_size: int | tuple[int, int] | None = None,
    padding_mask: bool = False,
) -> AttentionFunction:
    """Returns an `attention_fn` for `flax.linen.MultiHeadDotProductAttention`.

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
        `dot_product_attention`, or an error if `sow_weights`, `precision` or custom einsums
        require all weights and the implementation does not store them.

    Example:
      >>> layer = flax.linen.MultiHeadDotProductAttention(
      ...     num_heads=2, attention_fn=jaxmp.linen.attention_fn(is_causal=True)
      ... )
      >>> x = jnp.ones((1, 4, 8))
      >>> layer.init_with_output(jax.random.key(0), x)[0].shape
      (1, 4, 8)
    """
    return AttentionFunction(implementation, is_causal, local_window_size, padding_mask)


def register_layer(
    cls: type[nn.Module],
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

    Call this once, directly below the definition of the class: compiled functions depend on the
    row, so it cannot change after the class has been used under a policy.

    Args:
      cls: a subclass of `flax.linen.Module`.
      norm: the layer computes statistics. Its inputs and parameters are FP32, and its result is
        returned in the compute dtype.
      dtype: name of the field with the dtype in which the layer computes. A policy sets it, unless
        `respect_explicit` is set and the field is not None.
      kernel: name of the parameter that the dot multiplies by; required with `dot_general` and
        `einsum`. If a rule sets an output dtype that is wider than the compute dtype, the other
        parameters, such as a bias, are read in the output dtype.
      dot_general: name of the field with a function like `jax.lax.dot_general`. It is replaced by
        an FP8 dot under `matmul = "fp8"`, and by one with a wider result if a rule sets it.
        A model that sets the field to another function than its default keeps that function.
      einsum: name of a field with a function like `jax.numpy.einsum`, replaced in the same way.
      attention_fn: name of a field with a function like `flax.linen.dot_product_attention`, which
        is replaced by `jaxmp.linen.attention_fn()` as in Flax's attention layers.

      Arguments that are None have the values of the nearest base class in the table.

    Raises:
      CompositionError: if an argument is not valid, if the class has a different row, or if the
        class has been used under a policy.

    Example:
      >>> class ScaleNorm(nn.Module):
      ...     @nn.compact
      ...     def __call__(self, x):
      ...         scale = self.param("scale", nn.initializers.ones, ())
      ...         return scale * x * jax.lax.rsqrt(jnp.square(x).sum(-1, keepdims=True))
      >>> class Projection(nn.Module):
      ...     features: int
      ...     dot_general: Callable = jax.lax.dot_general
      ...     @nn.compact
      ...     def __call__(self, x):
      ...         shape = x.shape[-1], self.features
      ...         kernel = self.param("kernel", nn.initializers.lecun_normal(), shape)
      ...         return self.dot_general(x, kernel, (((x.ndim - 1,), (0,)), ((), ())))
      >>> jaxmp.linen.register_layer(ScaleNorm, norm=True)
      >>> jaxmp.linen.register_layer(Projection, kernel="kernel", dot_general="dot_general")
      >>> model = jaxmp.load_recipe("fp8").wrap(nn.Sequential([ScaleNorm(), Projection(32)]))
      >>> variables = model.init(jax.random.key(0), jnp.ones((2, 16)))
      >>> "f8_e4m3fn" in str(jax.make_jaxpr(model.apply)(variables, jnp.ones((2, 16))))
      True
    """
    LINEN_LAYERS.register(
        cls,
        norm=norm,
        dot_general=dot_general,
        einsum=einsum,
        dtype=dtype,
        kernel=kernel,
        attention_fn=attention_fn,
    )
