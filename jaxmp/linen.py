"""Policies for Flax Linen models: a policy for each module path, without changes to the model."""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from typing import Any, TypeVar, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.core import DenyList

from jaxmp._attention._explained import mask_rows
from jaxmp._attention._layer import AttentionFunction
from jaxmp._core._shardings import shardings_by_path
from jaxmp._core._typing import PyTree
from jaxmp._flax import _linen_init
from jaxmp._flax._linen_layers import LINEN_LAYERS
from jaxmp._flax._linen_subclass import wrapped_class
from jaxmp._flax._share import low_precision_share
from jaxmp._policies._explanation import PolicyExplanation
from jaxmp._policies._required import check_module_dtypes, check_required, explain_modules
from jaxmp._recipe_files._load import RecipeLike, as_policy_map
from jaxmp.errors import CompositionError, RecipeWarning

__all__ = ["apply_policy", "attention_fn", "explain", "module_paths", "register_layer"]

M = TypeVar("M", bound=nn.Module)

# ---------------------------------------------------------------------------
# Policies
# ---------------------------------------------------------------------------


def apply_policy(model: M, policies: RecipeLike, *, shardings: PyTree = None) -> M:
    """Returns a model that computes under `policies`. The original model is not changed.

    The result is an instance of a subclass of the model's class, with the same parameter tree.
    `init` returns the parameters that it returns without policies, in the dtypes that the author
    of the model chose; `apply` casts them, and the inputs and outputs of every module, to the
    dtypes of the module's path.

    Args:
      model: an unbound `flax.linen.Module`. If it has policies, they are replaced.
      policies: a recipe name, a policy string, a `Policy`, a `PolicyMap` or a `Recipe`. Paths are
        relative to `model`.
      shardings: a `NamedSharding` for each parameter, in a tree like the parameters, to which
        `apply` constrains them. None: parameters with Flax's metadata (`nn.with_partitioning`) are
        constrained to the sharding that it specifies.

    Returns:
      The model under the policies, usable alone or as a submodule. Equal models under equal
      policies are equal.

    Raises:
      CompositionError: if `model` is not an unbound Linen module; from `apply`, if it contains an
        NNX module without policies.
      JaxmpError: if the shardings are on different meshes; from `apply`, if `shardings` contains a
        path that is not that of a parameter, or lacks one of a parameter without metadata; if a
        sharding has more dimensions than its parameter, does not split it evenly, or is on another
        mesh.
      PolicyError: if a policy is not valid, or names a float8 dtype.

    Example:
      >>> model = apply_policy(nn.Dense(4), "p=f32,c=bf16,o=f32")
      >>> params = model.init(jax.random.key(0), jnp.ones((2, 3)))
      >>> model.apply(params, jnp.ones((2, 3))).dtype
      dtype('float32')
    """
    _check_model(model, "apply_policy")
    _check_unbound(model)
    policies = as_policy_map(policies)
    check_module_dtypes(policies)
    cls = wrapped_class(getattr(type(model), "_jaxmp_class", type(model)), policies)
    fields = [field.name for field in dataclasses.fields(cls) if field.init]
    # The parent is not copied: a new module belongs to the method in which it is created.
    new = cls(**{name: getattr(model, name) for name in fields if name != "parent"})
    if shardings is not None:
        by_path = shardings_by_path(shardings, "shardings")
        object.__setattr__(new, "_jaxmp_shardings", by_path)
    return cast(M, new)


def module_paths(
    model: nn.Module, *args: PyTree, rngs: PyTree = None, **kwargs: PyTree
) -> dict[str, type | None]:
    """Lists every path that a rule can match in a model, without computing anything.

    Args:
      model: a Linen module, with or without policies.
      *args, **kwargs: arguments of the model: arrays, `jax.ShapeDtypeStruct`s or other values.
      rngs: as in `model.init`; None: one key for every stream.

    Returns:
      A dict from module path to the module's class, `''` being the model itself, and from
      `path:name` to None for every parameter.

    Example:
      >>> list(module_paths(nn.Dense(4), jnp.ones((2, 3))))
      ['', ':bias', ':kernel']
    """
    _check_model(model, "module_paths")
    return _linen_init.module_paths(model, args, kwargs, rngs, {})


def explain(
    model: nn.Module, policies: RecipeLike, *args: PyTree, rngs: PyTree = None, **kwargs: PyTree
) -> PolicyExplanation:
    """Lists the policy and the deciding rule of each module of a model, and the unused rules.

    Args:
      model: a Linen module.
      policies: as in `apply_policy`.
      *args, **kwargs, rngs: as in `module_paths`. Declared attention masks are compared with the
        masks that follow from these arguments.

    Returns:
      A row for every module, and for every parameter that a `path:name` rule decides; the share of
      the matmul FLOPs in 16 bits or fewer; and in `masks` a row for every attention layer with a
      declared mask.

    Raises:
      RuleError: if a required rule matches nothing.
      AttentionError: if a mask contradicts its declaration.

    Example:
      >>> explain(nn.Dense(4), "p=f32,c=bf16,o=f32", jnp.ones((2, 3))).rows[0].policy
      Policy('p=f32,c=bf16,o=f32')
    """
    _check_model(model, "explain")
    policies, outputs = as_policy_map(policies), {}
    paths = _linen_init.module_paths(model, args, kwargs, rngs, outputs)
    check_required(policies, paths)
    share = _share(apply_policy(model, policies), args, rngs, kwargs)
    explanation = explain_modules(policies, paths, outputs)
    explanation = dataclasses.replace(explanation, low_precision_share=share)
    wrapped: Any = apply_policy(model, policies)
    object.__setattr__(wrapped, "_jaxmp_tabulated", True)
    rngs = jax.random.key(0) if rngs is None else rngs

    def call(args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> PyTree:
        return wrapped.init_with_output(rngs, *args, **kwargs)

    return dataclasses.replace(explanation, masks=mask_rows(call, policies, args, kwargs))


def _share(
    model: nn.Module, args: tuple[PyTree, ...], rngs: PyTree, kwargs: dict[str, PyTree]
) -> float | None:
    """Returns the share of a wrapped model's matmul FLOPs in 16 bits or fewer; None: no matmul."""
    rngs = jax.random.key(0) if rngs is None else rngs

    def initialize_and_apply(rngs: PyTree, *args: PyTree, **kwargs: PyTree) -> PyTree:
        variables = jax.eval_shape(lambda: model.init(rngs, *args, **kwargs))
        variables = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), variables)
        return model.apply(variables, *args, rngs=rngs, mutable=DenyList("params"), **kwargs)

    with warnings.catch_warnings():
        # The share itself is reported.
        warnings.simplefilter("ignore", RecipeWarning)
        return low_precision_share(initialize_and_apply, rngs, *args, **kwargs)


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


# ---------------------------------------------------------------------------
# Checks
# ---------------------------------------------------------------------------

# The arguments of each public function after the model, here and in `jaxmp.nnx`.
_CALLS = {
    "apply_policy": (", policies", ", policies"),
    "explain": (", policies, *args", ", policies"),
    "module_paths": (", *args", ""),
}


def _check_model(model: object, function: str) -> None:
    here, nnx_call = _CALLS[function]
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise CompositionError(
            f"{function} received the class {model.__name__} instead of a model. Pass an instance: "
            f"{function}({model.__name__}(...){here})."
        )
    if not isinstance(model, nn.Module):
        cls = type(model)
        fix = "Pass a flax.linen.Module"
        if any(base.__module__.startswith("flax.nnx") for base in inspect.getmro(cls)):
            fix = f"Use jaxmp.nnx.{function}(model{nnx_call})"
        elif callable(model) and function == "apply_policy":
            fix = "For a plain JAX function use jaxmp.autocast(fn, policies)"
        raise CompositionError(
            f"{function} received a {cls.__module__}.{cls.__qualname__}, which is not a "
            f"flax.linen.Module. {fix}."
        )


def _check_unbound(model: nn.Module) -> None:
    if model.scope is not None:
        raise CompositionError(
            f"The {type(model).__name__} at path {'/'.join(model.scope.path)!r} is already bound "
            "to variables. Apply the policy first: apply_policy(model, policies).bind(variables); "
            "inside a compact method, apply_policy(Module(..., parent=None), policies)."
        )
