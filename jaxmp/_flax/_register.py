"""Registers layer classes of users."""

from __future__ import annotations

import flax.linen as nn
from flax import nnx

from jaxmp._flax._linen_fields import LINEN_LAYERS
from jaxmp._flax._nnx_layers import NNX_LAYERS


def register_layer(
    cls: type[nn.Module] | type[nnx.Module],
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
      cls: a subclass of `flax.linen.Module` or `flax.nnx.Module`.
      norm: the layer computes statistics. Its inputs and parameters are FP32, and its result is
        returned in the compute dtype.
      dtype: name of the Linen field or NNX attribute with the dtype in which the layer computes. A
        policy sets it.
      kernel: name of the parameter `[..., inputs, outputs]` that the dot multiplies by; required
        with `dot_general` and `einsum`. If a rule sets an output dtype that is wider than the
        compute dtype, the other parameters, such as a bias, are read in the output dtype.
      dot_general: name of the field or attribute with a function like `jax.lax.dot_general`. It is
        replaced by an FP8 dot under `matmul = "fp8"`, and by one with a wider result if a rule
        sets it.
        A model that sets it to another function than its default keeps that function.
      einsum: name of one with a function like `jax.numpy.einsum`, replaced in the same way.
      attention_fn: name of one with a function like `flax.linen.dot_product_attention`, which
        is replaced by `jaxmp.attention_fn()` as in Flax's attention layers.

      Arguments that are None have the values of the nearest base class in the table.

    Raises:
      CompositionError: if an argument is not valid, if the class has a different row, or if the
        class has been used under a policy; from `recipe.wrap`, if an NNX module lacks an attribute.

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
      >>> jaxmp.register_layer(ScaleNorm, norm=True)
      >>> jaxmp.register_layer(Projection, kernel="kernel", dot_general="dot_general")
      >>> model = jaxmp.load_recipe("fp8").wrap(nn.Sequential([ScaleNorm(), Projection(32)]))
      >>> variables = model.init(jax.random.key(0), jnp.ones((2, 16)))
      >>> "f8_e4m3fn" in str(jax.make_jaxpr(model.apply)(variables, jnp.ones((2, 16))))
      True
    """
    arguments = locals()
    kind = cls if isinstance(cls, type) else type(cls)
    table = NNX_LAYERS if issubclass(kind, nnx.Module) else LINEN_LAYERS
    table.register(**arguments)
