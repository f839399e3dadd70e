"""Subclasses of the classes of NNX models, and the attributes that a policy replaces."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype as flax_promote_dtype

from jaxmp._attention._layer import attention_under_policy
from jaxmp._core._compat import declares_pytree
from jaxmp._core._typing import DTypeLike, PyTree
from jaxmp._flax._casts import ModulePolicy
from jaxmp._flax._fp8_layers import Promotion, quantizes_float32_kernels, wide_operator
from jaxmp._flax._layer_table import PREFERRED, DotAttribute, is_flax
from jaxmp._flax._nnx_calls import call_method, warn_of_unwrapped
from jaxmp._flax._nnx_cast_on_read import (
    ATTRIBUTE,
    Bound,
    CastOnRead,
    Path,
    bound_of,
    cast_on_read,
)
from jaxmp._flax._nnx_fp8 import set_fp8_state
from jaxmp._flax._nnx_layers import NNX_LAYERS, check_attributes
from jaxmp._recipe_files._load import PolicyMap

# ---------------------------------------------------------------------------
# Classes
# ---------------------------------------------------------------------------

_classes: dict[type, type] = {}
_classes_lock = threading.Lock()


def wrapped_class(cls: type, names: frozenset[str]) -> type:
    """Returns the subclass of `cls` whose methods run under the policy of their module.

    There is one such subclass, so a module that gets its parameters inside a transformation has
    the same class inside and outside of it. The attributes of all its instances accumulate in it.

    Args:
      cls: the class that the author of the model wrote.
      names: attributes of an instance that are cast when they are read.
    """
    with _classes_lock:
        wrapped = _classes.get(cls)
        if wrapped is None:
            wrapped = _classes[cls] = _make_class(cls)
        for name in sorted(names):
            if name not in vars(wrapped):
                setattr(wrapped, name, CastOnRead(wrapped, name))
        return wrapped


def _make_class(cls: Any) -> type:
    members = {name: _wrap_method(cls, name, member) for name, member in _methods(cls).items()}
    if NNX_LAYERS.traits(cls).caches and hasattr(cls, "init_cache"):
        members["init_cache"] = _make_init_cache(cls.init_cache)
    members |= {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "__reduce__": _reduce,
        "__setattr__": _make_setattr(cls.__setattr__),
        "_jaxmp_class": cls,
    }
    pytree = declares_pytree(cls, nnx.Module)
    options = {} if pytree is None else {"pytree": pytree}
    metaclass: Any = type(cls)
    return metaclass(cls.__name__, (cls,), members, **options)


def _methods(cls: type) -> dict[str, Any]:
    """Returns the methods that run under the policy, by name.

    These are all methods of users' classes, and those of Flax's classes that compute.
    """
    methods: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if base in nnx.Module.__mro__:
            continue
        for name, member in vars(base).items():
            computes = name in ("__call__", "attend") or not (is_flax(base) or name[:2] == "__")
            is_method = callable(member) and hasattr(member, "__get__")
            if computes and is_method and not isinstance(member, (type, staticmethod)):
                methods[name] = member
            else:
                methods.pop(name, None)
    return methods


def _wrap_method(cls: type, name: str, inherited: Any) -> Callable[..., Any]:
    @functools.wraps(inherited)
    def method(self: nnx.Module, *args: PyTree, **kwargs: PyTree) -> PyTree:
        # Users may assign another method to the class later.
        call = getattr(super(_classes[cls], self), name)
        bound = bound_of(self)
        if bound is None:
            return call(*args, **kwargs)
        return call_method(bound, self, name, call, args, kwargs)

    return method


def _make_init_cache(inherited: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(inherited)
    def init_cache(
        self: nnx.Module, input_shape: tuple[int, ...], dtype: DTypeLike | None = None
    ) -> None:
        """Creates the cache as Flax does; by default it has the compute dtype."""
        bound = bound_of(self)
        if dtype is None:
            dtype = jnp.float32 if bound is None else bound.module_policy.policy.compute_dtype
        inherited(self, input_shape, dtype)

    return init_cache


def _make_setattr(inherited: Callable[[Any, str, Any], None]) -> Callable[[Any, str, Any], None]:
    """Returns `__setattr__` that reports assigned modules, and casts assigned parameters."""

    @functools.wraps(inherited)
    def __setattr__(self: nnx.Module, name: str, value: object) -> None:
        inherited(self, name, value)
        bound = bound_of(self)
        if bound is None or not isinstance(value, _CONTAINERS) or name.startswith("_pytree__"):
            return
        # `nnx.data` returns a field, and the setter of a property assigns another attribute.
        warn_of_unwrapped(bound, name, vars(self).get(name))
        if name in cast_on_read(self, bound.module_policy.traits):
            wrapped_class(bound.cls, frozenset({name}))

    return __setattr__


# Types of modules and parameters, and of values that can contain them. `nnx.data` returns a field.
_CONTAINERS = (nnx.Module, nnx.Param, dataclasses.Field, list, tuple, dict)


def _reduce(self: Any) -> tuple[Any, ...]:
    members = vars(type(self)).items()
    names = frozenset(name for name, member in members if isinstance(member, CastOnRead))
    return _rebuild, (type(self)._jaxmp_class, names), self.__getstate__()


def _rebuild(cls: type, names: frozenset[str]) -> nnx.Module:
    return object.__new__(wrapped_class(cls, names))


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
    for name, value in bound.author:
        object.__setattr__(module, name, value)


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
