"""Table of Linen's layer classes, and what a policy replaces on a bound Linen module."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.core.scope import union_filters
from flax.linen.dtypes import promote_dtype
from opt_einsum.parser import parse_einsum_input

from jaxmp import _core, _programs
from jaxmp._core import PyTree, _compat
from jaxmp._flax import _fp8_layers, _labels
from jaxmp._flax._casts import ModulePolicy, cast_like, written_back
from jaxmp._flax._layer_table import (
    CONV,
    DOT_GENERAL,
    PREFERRED,
    LayerTable,
    LayerTraits,
    author_class,
    layer_changes,
)
from jaxmp._flax._method_call import MethodCall
from jaxmp.errors import CompositionError
from jaxmp.fp8._overwritten import OVERWRITE

_UNSET = object()


# ---------------------------------------------------------------------------
# Fields
# ---------------------------------------------------------------------------


def prepare(module: nn.Module, module_policy: ModulePolicy, keeps_dtype: bool) -> None:
    """Sets the fields of a module that its policy replaces.

    Args:
      module: a bound module.
      module_policy: its policy.
      keeps_dtype: the module requires the dtype that its author chose.
    """
    traits = module_policy.traits
    author = module.__dict__.get("_jaxmp_author", {})
    if keeps_dtype:
        _restore(module, author)
        return
    if module.__dict__.get("_jaxmp_policy") is module_policy:
        return
    object.__setattr__(module, "_jaxmp_policy", module_policy)
    object.__setattr__(module, "_jaxmp_author", author)
    fields, ref = _layer_fields(module, module_policy), weakref.ref(module)
    if traits.caches:
        fields["variable"] = functools.partial(_variable, ref, module_policy)
    if traits.is_rnn and hasattr(module, "variable_broadcast"):
        # All steps of an `nn.RNN` share the FP8 states of its cell, as they share its parameters.
        fields["variable_broadcast"] = union_filters(module.variable_broadcast, OVERWRITE)
    if not traits.casts_params:
        fields["param"] = functools.partial(_param, ref, module_policy)
        if type(module).perturb is nn.Module.perturb and "perturb" not in module.__dict__:
            fields["perturb"] = functools.partial(_perturbed, ref)
    for name, value in fields.items():
        author.setdefault(name, module.__dict__.get(name, _UNSET))
        object.__setattr__(module, name, value)


def author_fields(module: nn.Module) -> dict[str, Any]:
    """Returns the author's values of the fields that `prepare` replaced."""
    author = module.__dict__.get("_jaxmp_author", {})
    fields = {field.name for field in dataclasses.fields(module)}
    return {name: value for name, value in author.items() if name in fields and value is not _UNSET}


def _restore(module: nn.Module, author: dict[str, Any]) -> None:
    """Restores the author's values until the next `prepare`."""
    if module.__dict__.pop("_jaxmp_policy", None) is None:
        return
    for name, value in author.items():
        if value is _UNSET:
            module.__dict__.pop(name, None)
        else:
            object.__setattr__(module, name, value)


# ---------------------------------------------------------------------------
# Parameters and caches in the compute dtype
# ---------------------------------------------------------------------------


# Of a custom_vjp that is traced, and then differentiated.
LATE = (
    "forward function of a custom_vjp after the model has ended, where its policies do not cast. "
    "Differentiate before you compile, jax.jit(jax.grad(loss_fn)), or do not wrap the model: "
    "loss_fn = jaxmp.autocast(loss_fn, recipe)."
)


def _param(
    ref: Callable[[], Any], module_policy: ModulePolicy, /, name: str, *args: Any, **kwargs: Any
) -> PyTree:
    """Computes `module.param`, and casts its result. The stored parameter keeps its dtype."""
    module = ref()
    if _compat.current_context().policies is None:
        raise CompositionError(f"{'/'.join(module.path)!r} is called by the {LATE}")
    value = type(module).param(module, name, *args, **kwargs)
    return _labels.read_param(module_policy, name, value)


def _perturbed(
    ref: Callable[[], Any], name: str, value: PyTree, collection: str = "perturbations"
) -> PyTree:
    """Computes `module.perturb` in the dtype of `value`. The stored perturbation keeps its own."""
    module = ref()
    stored = module.get_variable(collection, name, default=value)
    out = type(module).perturb(module, name, cast_like(value, stored), collection)
    return cast_like(out, value)


class _CastVariable(nn.Variable):
    """Variable that is read in one dtype and stored in another."""

    def __init__(self, source: nn.Variable, dtype: np.dtype) -> None:
        super().__init__(source.scope, source.collection, source.name, source.unbox)
        self.dtype = dtype

    @property
    def value(self) -> Any:
        stored = super().value
        return _core.cast(stored, self.dtype) if _core.is_castable(stored) else stored

    @value.setter
    def value(self, value: PyTree) -> None:
        read, stored = self.value, super().value
        if _core.is_castable(stored):
            value = written_back(value, read, stored)
        nn.Variable.value.fset(self, value)  # pyright: ignore


def _variable(
    ref: Callable[[], Any], policy: ModulePolicy, /, collection: str, *args: Any, **kwargs: Any
) -> nn.Variable:
    """Computes `module.variable`, which reads caches in the compute dtype."""
    module = ref()
    source = type(module).variable(module, collection, *args, **kwargs)
    if collection not in policy.traits.caches or not _core.is_castable(source.value):
        return source
    return _CastVariable(source, policy.policy.compute_dtype)


# ---------------------------------------------------------------------------
# Layers
# ---------------------------------------------------------------------------


def _layer_fields(module: nn.Module, module_policy: ModulePolicy) -> dict[str, Any]:
    """Returns the fields by which a layer computes in other dtypes, in FP8, or with a wider dot."""
    attributes, dot, is_default = vars(module), module_policy.traits.dot, False
    if dot is not None:
        value, own = attributes[dot.name], (_fp8_layers.LayerDot, _fp8_layers.LayerEinsum)
        # A clone, such as `nn.remat` makes, has the dot of its original, but another state.
        default = cast(Any, module).__dataclass_fields__[dot.name].default
        is_default = value is default or isinstance(value, own)
    attention = nn.dot_product_attention
    fields = layer_changes(
        attributes, module_policy, promote_dtype, attention, is_default=is_default
    )
    if dot is not None and _fp8_layers.is_stateful(layer := fields.get(dot.name)):
        state = functools.partial(_fp8_layers.read_linen_state, weakref.ref(module), layer.scaling)
        fields[dot.name] = dataclasses.replace(layer, state=state)
    return fields


# ---------------------------------------------------------------------------
# Methods that a policy replaces
# ---------------------------------------------------------------------------


def method_under_policy(under_policy: MethodCall, call: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function that replaces `call`, a method of a Flax layer.

    A method that a user overrides in a subclass is called as it is.
    """
    module, module_policy = under_policy.module, under_policy.module_policy
    traits, method = module_policy.traits, under_policy.method
    own = getattr(author_class(type(module)), method, None)
    is_replaced = traits.embedding or traits.layer is nn.Einsum
    is_own = own is getattr(traits.layer, method, call)
    if not (is_replaced and is_own and under_policy.is_cast):
        return call
    wide = module_policy.resolved.wide_output
    if method == "attend" and wide is not None:
        return functools.partial(_wide_attend, module, wide)
    if method == "__call__" and _looks_up_float32(module, module_policy):
        return functools.partial(_lookup, module, module_policy, call)
    if method == "__call__" and _is_wide_einsum(module):
        return functools.partial(_wide_einsum, module)
    return call


def _wide_attend(module: Any, wide: np.dtype, query: jax.Array) -> jax.Array:
    """Computes `Embed.attend` with a wide result. The dot of the layer is not a field."""
    query, embedding = module.promote_dtype(query, module.embedding, dtype=module.dtype)
    return _core.wide_product(jnp.dot, query, embedding.T, wide)


def _is_wide_einsum(module: nn.Module) -> bool:
    promotion = getattr(module, "promote_dtype", None)
    is_wide = isinstance(promotion, _fp8_layers.Promotion) and promotion.wide is not None
    return isinstance(module, nn.Einsum) and is_wide and module.has_variable(_core.PARAMS, "kernel")


def _wide_einsum(module: Any, inputs: jax.Array, einsum_str: str | None = None) -> jax.Array:
    """Computes `Einsum.__call__` with a wide result. The function that it calls is not a field."""
    equation = nn.merge_param("einsum_str", module.einsum_str, einsum_str).replace(" ", "")
    names = ("kernel", "bias") if module.use_bias else ("kernel",)
    params = [nn.unbox(module.get_variable(_core.PARAMS, name)) for name in names]
    inputs, kernel, *biases = module.promote_dtype(inputs, *params, dtype=module.dtype)
    product = functools.partial(jnp.einsum, equation, precision=module.precision)
    out = _programs.wide_matmul(product, inputs, kernel, module.preferred_element_type)
    if not biases:
        return out
    terms, result, _ = parse_einsum_input((equation, inputs, kernel))
    sizes = dict(zip(terms.split(",")[1], kernel.shape, strict=True))
    return out + biases[0].reshape([sizes.get(axis, 1) for axis in result])


def _looks_up_float32(module: nn.Module, module_policy: ModulePolicy) -> bool:
    """Returns True if a call looks up rows of an FP32 table under a policy in 16 bits."""
    is_default = module_policy.traits.embedding and module.promote_dtype is promote_dtype
    if not (is_default and _core.is_16bit(module_policy.policy.compute_dtype)):
        return False
    return _stored_table(module, module_policy).dtype == np.float32


def _stored_table(module: nn.Module, module_policy: ModulePolicy) -> jax.Array:
    return nn.unbox(module.get_variable(_core.PARAMS, module_policy.traits.embedding))


def _lookup(
    module: nn.Module,
    module_policy: ModulePolicy,
    call: Callable[..., Any],
    *args: PyTree,
    **kwargs: PyTree,
) -> jax.Array:
    """Computes `Embed.__call__`, and casts the rows and not the table, which has the same result.

    The gradient of a row is a sum over all positions that looked it up; this sum is in FP32.
    """
    stored = [_stored_table(module, module_policy)]
    object.__setattr__(module, "promote_dtype", lambda *_, **__: stored)
    try:
        return _core.cast(call(*args, **kwargs), module_policy.policy.compute_dtype)
    finally:
        object.__setattr__(module, "promote_dtype", promote_dtype)


# ---------------------------------------------------------------------------
# Table of layer classes
# ---------------------------------------------------------------------------

_NORM = LayerTraits(is_norm=True, upcasts_params=True)
_DENSE = LayerTraits(casts_params=True, kernel="kernel", dot=DOT_GENERAL, outputs="features")
_CONV = LayerTraits(casts_params=True, kernel="kernel", dot=CONV)
_OTHER_DOT = LayerTraits(casts_params=True, kernel="kernel", dot=PREFERRED)

ROWS = {
    nn.Dense: _DENSE,
    nn.DenseGeneral: _DENSE,
    nn.Einsum: _OTHER_DOT,
    nn.Conv: _CONV,
    nn.ConvLocal: _CONV,
    nn.ConvTranspose: _OTHER_DOT,
    nn.Embed: LayerTraits(embedding="embedding"),
    nn.BatchNorm: _NORM,
    nn.LayerNorm: _NORM,
    nn.RMSNorm: _NORM,
    nn.GroupNorm: _NORM,
    nn.InstanceNorm: _NORM,
    nn.SpectralNorm: LayerTraits(upcasts_params=True),
    nn.WeightNorm: LayerTraits(upcasts_params=True),
    nn.MultiHeadDotProductAttention: LayerTraits(attention_fn="attention_fn", caches=("cache",)),
    nn.RNNCellBase: LayerTraits(is_cell=True),
    nn.RNN: LayerTraits(is_rnn=True),
    nn.Bidirectional: LayerTraits(is_rnn=True),
}


def _flax_dtype(cls: type) -> str:
    """Returns "dtype" if a class of Flax, not one of a user, defines that field."""
    for base in cls.__mro__:
        if "dtype" in inspect.get_annotations(base):
            return "dtype" if base.__module__.partition(".")[0] == "flax" else ""
    return ""


def _check_field(cls: type, argument: str, name: str) -> None:
    fields = [field.name for field in dataclasses.fields(cls)]  # pyright: ignore[reportArgumentType]
    if argument != "kernel" and name not in fields:
        own = [field for field in fields if field not in ("parent", "name")]
        raise CompositionError(
            f"jaxmp.register_layer({cls.__name__}, {argument}={name!r}): the class has no "
            f"field {name!r}. Its fields are {', '.join(map(repr, own)) or 'none'}. Add the field "
            f"to {cls.__name__}, for example {_FIELDS[argument].format(name)}."
        )


_FIELDS = {
    "dtype": "{}: Any = None",
    "dot_general": "{}: Callable = jax.lax.dot_general",
    "einsum": "{}: Callable = jax.numpy.einsum",
    "attention_fn": "{}: Callable = flax.linen.dot_product_attention",
}

LINEN_LAYERS = LayerTable(nn.Module, ROWS, _flax_dtype, _check_field)
