"""Subclasses of the classes of NNX models, whose methods run under policies."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import nnx

from jaxmp._core._compat import declares_pytree
from jaxmp._core._typing import DTypeLike, PyTree
from jaxmp._flax._layer_table import is_flax
from jaxmp._flax._nnx_bound import bound_of
from jaxmp._flax._nnx_calls import call_method, warn_of_unwrapped
from jaxmp._flax._nnx_cast_on_read import CastOnRead, cast_on_read
from jaxmp._flax._nnx_layers import NNX_LAYERS

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
