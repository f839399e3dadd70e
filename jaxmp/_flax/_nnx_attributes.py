"""Attributes that a policy replaces on an NNX module."""

from __future__ import annotations

from typing import Any

import numpy as np
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype as flax_promote_dtype

from jaxmp._attention._layer import attention_under_policy
from jaxmp._core._typing import DTypeLike
from jaxmp._flax._casts import ModulePolicy
from jaxmp._flax._dots import Promotion, wide_operator
from jaxmp._flax._fp8_layers import quantizes_float32_kernels
from jaxmp._flax._layer_table import PREFERRED, DotAttribute, LayerTraits
from jaxmp._flax._nnx_bound import ATTRIBUTE, AUTHOR_KEPT, Bound, Path, bound_of
from jaxmp._flax._nnx_cast_on_read import cast_on_read
from jaxmp._flax._nnx_fp8 import set_fp8_state
from jaxmp._flax._nnx_layers import NNX_LAYERS, check_attributes, default_dtype
from jaxmp._flax._nnx_subclass import wrapped_class
from jaxmp._recipe_files._load import PolicyMap

# ---------------------------------------------------------------------------
# One module
# ---------------------------------------------------------------------------


def bind(module: nnx.Module, policies: PolicyMap, path: Path) -> None:
    """Applies policies to a module in place.

    Args:
      module: a module that belongs to the new model alone.
      policies: the policies of the model.
      path: path of the module in the model.
    """
    cls = type(module)
    outputs = NNX_LAYERS.outputs(module)
    module_policy = Bound(policies, path, cls, (), outputs).module_policy
    traits = module_policy.traits
    check_attributes(module, traits, module_policy.resolved.path)
    changes = _changes(module, module_policy)
    author = tuple((name, vars(module)[name]) for name in changes)
    if _keeps_explicit_dtype(module, module_policy):
        changes, author = {}, AUTHOR_KEPT
    for name, value in changes.items():
        object.__setattr__(module, name, value)
    set_fp8_state(module, traits, changes)
    setattr(module, ATTRIBUTE, Bound(policies, path, cls, author, outputs))
    object.__setattr__(module, "__class__", wrapped_class(cls, cast_on_read(module, traits)))


def unbind(module: nnx.Module) -> None:
    """Restores the class and the attributes that the author of the model chose."""
    bound = bound_of(module)
    if bound is None:
        return
    object.__setattr__(module, "__class__", bound.cls)
    delattr(module, ATTRIBUTE)
    for name, value in bound.author if bound.is_overridden else ():
        object.__setattr__(module, name, value)


def _keeps_explicit_dtype(module: nnx.Module, module_policy: ModulePolicy) -> bool:
    """Returns True if the policy respects a different dtype that the author of the model chose."""
    traits, policy = module_policy.traits, module_policy.policy
    if not (traits.dtype and policy.respect_explicit):
        return False
    dtype = vars(module).get(traits.dtype)
    return _is_explicit(module, traits, dtype) and np.dtype(dtype) != policy.compute_dtype


def _is_explicit(module: nnx.Module, traits: LayerTraits, dtype: DTypeLike | None) -> bool:
    """Returns True if the author of a model chose the `dtype` of a layer."""
    table = vars(module).get(traits.embedding)
    default = default_dtype(type(module), traits.registered, traits.dtype)
    return dtype is not None and not any(
        implied is not None and np.dtype(implied) == np.dtype(dtype)
        for implied in (default, getattr(table, "dtype", None))
    )


def _changes(module: nnx.Module, module_policy: ModulePolicy) -> dict[str, Any]:
    """Returns the attributes of a layer that its policy replaces."""
    changes: dict[str, Any] = {}
    attributes, traits = vars(module), module_policy.traits
    if traits.dtype in attributes:
        changes[traits.dtype] = module_policy.field_dtype
    if traits.attention_fn in attributes:
        current, default = attributes[traits.attention_fn], nnx.dot_product_attention
        policy, path = module_policy.policy, module_policy.resolved.path
        function = attention_under_policy(current, default, policy, path)
        changes[traits.attention_fn] = function
    return changes | _dot_changes(attributes, module_policy)


# ---------------------------------------------------------------------------
# Dots
# ---------------------------------------------------------------------------


def _dot_changes(attributes: dict[str, Any], module_policy: ModulePolicy) -> dict[str, Any]:
    """Returns the attributes by which a layer's dot runs in FP8 or has a wider result."""
    dot, resolved = module_policy.traits.dot, module_policy.resolved
    # An author who replaced Flax's promotion of the operands has chosen their dtypes.
    if dot is None or attributes.get("promote_dtype", flax_promote_dtype) is not flax_promote_dtype:
        return {}
    changes: dict[str, Any] = {}
    wide = resolved.wide_output
    if wide is not None and attributes.get(PREFERRED.name) is None:
        changes = _wide_changes(attributes, dot, wide)
    is_default = attributes.get(dot.name) in (None, dot.function)
    if resolved.scaling is not None and dot.fp8 is not None and is_default:
        changes[dot.name] = dot.fp8(resolved.scaling, wide, resolved.path)
        if quantizes_float32_kernels(resolved.scaling) and "promote_dtype" in attributes:
            has_wide_bias = "promote_dtype" in changes
            changes["promote_dtype"] = Promotion(wide if has_wide_bias else None, True)
    return changes


def _wide_changes(attributes: dict[str, Any], dot: DotAttribute, wide: np.dtype) -> dict[str, Any]:
    """Returns the attributes by which a layer's dot has a result in `wide`."""
    if attributes.get(f"{dot.name}_cls") is not None:
        return {}
    function: Any = wide
    if dot.function is not None and attributes.get(dot.name) in (None, dot.function):
        function = wide_operator(dot.function, wide)
    elif PREFERRED.name in attributes:
        dot = PREFERRED
    else:
        return {}
    changes = {dot.name: function}
    if "promote_dtype" in attributes:
        changes["promote_dtype"] = Promotion(wide, False)
    return changes
