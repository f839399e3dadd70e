"""Subclasses of the classes of NNX models, what a policy replaces in them, and their calls."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype

from jaxmp import _core
from jaxmp._core import DTypeLike, Path, PyTree, _compat
from jaxmp._flax import _labels, _search
from jaxmp._flax._casts import ModulePolicy, is_complex, is_opaque, keeps_dtype
from jaxmp._flax._layer_table import is_flax, layer_changes
from jaxmp._flax._method_call import CallArguments, Method, MethodCall, running
from jaxmp._flax._nnx_cast_on_read import (
    ATTRIBUTE,
    Bound,
    CastOnRead,
    bound_of,
    cast_on_read,
    is_member,
)
from jaxmp._flax._nnx_layers import NNX_LAYERS, check_attributes, set_fp8_state
from jaxmp._policies import _device
from jaxmp._policies._load import PolicyMap

# ---------------------------------------------------------------------------
# Classes
# ---------------------------------------------------------------------------

# Class of the author -> its wrapped class. Flax registers each class of NNX with JAX, and both keep
# it until the process ends.
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
    pytree = _compat.declares_pytree(cls, nnx.Module)
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
        return call_method(bound, self, name, call, (args, kwargs))

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
        _warn_of_unwrapped(bound, name, vars(self).get(name))
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


def bind(module: nnx.Module, policies: PolicyMap, path: Path, outputs: int | None) -> None:
    """Applies policies to a module in place.

    Args:
      module: a module that belongs to the new model alone.
      policies: the policies of the model.
      path: path of the module in the model.
      outputs: number of outputs of a linear layer; None for other modules.
    """
    cls = type(module)
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
    attributes, dot, attention = vars(module), module_policy.traits.dot, nnx.dot_product_attention
    is_default = dot is not None and attributes.get(dot.name) in (None, dot.function)
    return layer_changes(attributes, module_policy, promote_dtype, attention, is_default=is_default)


# ---------------------------------------------------------------------------
# Calls
# ---------------------------------------------------------------------------


def _own_params(module: nnx.Module) -> list[Any]:
    own = (value for value in vars(module).values() if isinstance(value, nnx.Param))
    return [value.get_raw_value() for value in own]


def call_method(
    bound: Bound, module: nnx.Module, name: str, call: Method, incoming: CallArguments
) -> PyTree:
    """Calls a method of a wrapped module under the policies of its model.

    Args:
      bound: location of the module.
      module: the module.
      name: name of the method.
      call: the method, bound to the module.
      incoming: its arguments.
    """
    if bound.is_decision or any(isinstance(call.module, nnx.Module) for call in running()):
        return _call(bound, module, name, call, incoming)
    # Before the model is searched: in that trace no warning is shown.
    leaves = functools.partial(jax.tree.leaves, incoming, is_leaf=is_opaque)
    inputs = lambda: (nnx.state(module, nnx.Param), [x for x in leaves() if not is_opaque(x)])
    _device.check_training(bound.policies, inputs, bound.mark)
    key = bound.cls, bound.policies, bound.path
    prepare = functools.partial(_separated, module, name, incoming)
    # An attribute may choose a head, as an argument does.
    own = [value for value in vars(module).values() if isinstance(value, (bool, int, str))]
    operands, method = (*incoming, own), getattr(bound.cls, name)
    with _compat.context(decisions=bound.search.of_call(key, method, operands, prepare)):
        out = _call(bound, module, name, call, incoming)
    bound.search.warn()
    return out


def _separated(
    module: nnx.Module, name: str, incoming: CallArguments
) -> tuple[Callable[[PyTree], PyTree], PyTree, PyTree]:
    """Returns a function that calls a method of a copy of a module, as `ModelSearch` requires."""
    graph, state = nnx.split((module, *_search.copied_arguments(incoming)))

    def call(state: PyTree) -> PyTree:
        module, args, kwargs = nnx.merge(graph, state)
        return getattr(module, name)(*args, **kwargs)

    return call, state, jax.tree.leaves(nnx.state(module))


def _call(
    bound: Bound, module: nnx.Module, name: str, call: Method, incoming: CallArguments
) -> PyTree:
    """Calls a method as `call_method` does, when the results of layers are known."""
    own = (value for value in vars(module).values() if isinstance(value, nnx.BatchStat))
    statistics = [(value, value.get_raw_value()) for value in own]
    under_policy = MethodCall(module, bound.module_policy, name, _own_params)
    if under_policy.caller is None:
        # Modules may have been added to a Python list or dict.
        containers = (item for item in vars(module).items() if type(item[1]) in (list, dict))
        for attribute, value in containers:
            _warn_of_unwrapped(bound, attribute, value)
    if under_policy.at_boundary:
        is_decision = _labels.is_decision(bound.module_policy, name)
        is_exact = _labels.is_exact(bound.module_policy, name, incoming)
        if is_exact or _keeps_dtype(bound, module, incoming):
            under_policy = dataclasses.replace(under_policy, keeps_dtype=True)
            call = functools.partial(_call_copy, _author_copy(bound, module), module, name)
        elif is_decision and not bound.is_decision:
            copy = _author_copy(bound, module)
            vars(copy).update(_changes(copy, bound.decision.module_policy))
            vars(copy)[ATTRIBUTE] = bound.decision
            object.__setattr__(copy, "__class__", type(module))
            args, kwargs = incoming
            return _call_copy(copy, module, name, *args, **kwargs)
        else:
            call = _replaced(bound, module, name, call)
    out = under_policy.run(call, incoming, _scope(bound, under_policy))
    for variable, before in statistics:
        after = variable.get_raw_value()
        if after is not before and _core.are_alike(after, before):
            # An optimizer of Flax, which skips the step, would not restore them.
            variable.set_raw_value(_core.keep_finite(after, before))
    return out


def _write_as_stored(module: Any, call: Method, *args: PyTree, **kwargs: PyTree) -> PyTree:
    """Calls a wrapper that writes normalized weights to its layer, in the dtype that they have."""
    params = jax.tree.leaves(nnx.state(module.layer_instance, nnx.Param))
    field, kernel = module.dtype, max(params, key=np.ndim)
    object.__setattr__(module, "dtype", kernel.dtype)
    try:
        return call(*args, **kwargs)
    finally:
        object.__setattr__(module, "dtype", field)


def _replaced(bound: Bound, module: nnx.Module, name: str, call: Method) -> Method:
    """Returns the function that replaces `call`, a method of a Flax layer."""
    wide, traits = bound.module_policy.resolved.wide_output, bound.module_policy.traits
    if traits.upcasts_params and not traits.is_norm and hasattr(module, "layer_instance"):
        return functools.partial(_write_as_stored, module, call)
    is_own = getattr(bound.cls, name) is getattr(traits.layer, name, None)
    if not traits.embedding or not is_own:
        return call
    if name == "__call__" and _looks_up_float32(bound, module):
        return functools.partial(_lookup, bound, module)
    if wide is not None and name == "attend":
        return functools.partial(_wide_attend, module, wide)
    return call


def _warn_of_unwrapped(bound: Bound, name: str, value: PyTree) -> None:
    """Warns about modules without policies in an attribute of a wrapped model."""
    for leaf in jax.tree.leaves(value, is_leaf=is_member):
        if isinstance(leaf, nnx.Module) and bound_of(leaf) is None:
            path = "/".join((*bound.path, name))
            _core.warn_user(
                f"The {type(leaf).__name__} in {path!r} was added after the model was wrapped, so "
                "it computes in its author's dtypes. Wrap the model again: model = "
                "recipe.wrap(model)."
            )
            return


def _keeps_dtype(bound: Bound, module: nnx.Module, operands: PyTree) -> bool:
    """Returns True if a Flax layer, or an enclosing one, computes in its author's dtype."""
    if running() and running()[-1].keeps_dtype:
        return True
    name = bound.module_policy.traits.dtype
    if not name:
        return False
    author = dict(bound.author).get(name, vars(module).get(name))
    return is_complex(author) or keeps_dtype((_own_params(module), operands))


def _author_copy(bound: Bound, module: nnx.Module) -> nnx.Module:
    """Returns a copy of a layer without its policy, which shares its Variables."""
    copy = object.__new__(bound.cls)
    vars(copy).update({**vars(module), **dict(bound.author)})
    del vars(copy)[ATTRIBUTE]
    return copy


def _call_copy(
    copy: nnx.Module, module: nnx.Module, name: str, *args: PyTree, **kwargs: PyTree
) -> PyTree:
    """Calls a method of a copy of a layer; new attributes, such as sown values, are the layer's."""
    before = dict(vars(copy))
    out = getattr(copy, name)(*args, **kwargs)
    for attribute, value in vars(copy).items():
        if before.get(attribute, before) is not value and not attribute.startswith("_pytree__"):
            setattr(module, attribute, value)
    return out


def _looks_up_float32(bound: Bound, module: nnx.Module) -> bool:
    """Returns True if a call looks up rows of an FP32 table under a policy in 16 bits."""
    table = vars(module)[bound.module_policy.traits.embedding].get_raw_value()
    is_fp32 = table.dtype == dict(bound.author).get("dtype") == np.float32
    return is_fp32 and _core.is_16bit(bound.module_policy.policy.compute_dtype)


def _lookup(bound: Bound, module: nnx.Module, *args: PyTree, **kwargs: PyTree) -> jax.Array:
    """Calls `Embed.__call__` and casts the rows and not the table, which has the same result.

    The gradient of a row is a sum over all positions that looked it up; this sum is in FP32.
    """
    rows = _call_copy(_author_copy(bound, module), module, "__call__", *args, **kwargs)
    return _core.cast(rows, bound.module_policy.policy.compute_dtype)


def _wide_attend(
    module: Any, wide: np.dtype, query: jax.Array, out_sharding: Any = None
) -> jax.Array:
    """Computes `Embed.attend` with a wide result. The dot of the layer is not an attribute."""
    query, embedding = module.promote_dtype((query, module.embedding[...]), dtype=module.dtype)
    product = functools.partial(jnp.dot, out_sharding=out_sharding)
    return _core.wide_product(product, query, embedding.T, wide)


@contextlib.contextmanager
def _scope(bound: Bound, under_policy: MethodCall) -> Iterator[None]:
    """Runs one method under its name scope, and a forward pass under its policies."""
    is_active = _compat.current_context().policies == bound.policies
    policies = _compat.context(policies=bound.policies)
    is_entered = under_policy.is_forward and not is_active
    with policies if is_entered else contextlib.nullcontext(), _named(bound, under_policy.method):
        yield


def _named(bound: Bound, method: str) -> contextlib.AbstractContextManager[Any]:
    """Opens a name scope with the module's path below its caller, as Linen does."""
    caller = bound_of(running()[-1].module) if running() else None
    names = bound.path or (bound.cls.__name__,)
    if caller is not None and caller.policies == bound.policies:
        if caller.path == bound.path:
            return contextlib.nullcontext()
        depth = len(caller.path)
        if bound.path[:depth] == caller.path:
            names = bound.path[depth:]
    suffix = "" if method == "__call__" else f".{method}"
    return jax.named_scope("/".join(names) + suffix)
