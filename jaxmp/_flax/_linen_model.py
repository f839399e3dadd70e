"""Applies policies to Linen models through subclasses of their classes, and explains them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import threading
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import Any, TypeAlias, TypeVar, cast

import flax.linen as nn
import jax
from flax.core import DenyList

from jaxmp import _core
from jaxmp._autocast._resolve import trace
from jaxmp._core import Path, PyTree, _compat
from jaxmp._flax import _linen_interceptor
from jaxmp._flax._casts import cast_outputs, resolve_module
from jaxmp._flax._layer_table import author_class
from jaxmp._flax._linen_fields import LINEN_LAYERS, author_fields
from jaxmp._flax._missing_precision import low_precision_share
from jaxmp._flax._search import ModelSearch, copied_arguments
from jaxmp._flax._shardings import constrain_variables
from jaxmp._policies import _device, _load, _required
from jaxmp.errors import CompositionError, RecipeWarning

M = TypeVar("M", bound=nn.Module)


def apply_policy(model: M, recipe: _load.RecipeLike, *, shardings: PyTree = None) -> M:
    """Returns a model that computes under a recipe: `Recipe.wrap` for Linen.

    The result is an instance of a subclass of the model's class, with the same parameter tree.
    `init` returns the parameters that it returns without policies, in the dtypes that the author
    of the model chose; `apply` casts them, and the inputs and outputs of every module, to the
    dtypes of the module's path. Equal models under equal policies are equal.

    Args:
      model: an unbound `flax.linen.Module`. If it has policies, they are replaced.
      recipe: a recipe or policies. Paths are relative to `model`.
      shardings: as in `Recipe.wrap`.

    Raises:
      CompositionError: if `model` is bound; from `apply`, if it contains an NNX module without
        policies.
      JaxmpError: if the shardings are on different meshes; from `apply`, if `shardings` contains a
        path that is not that of a parameter, or lacks one of a parameter without metadata; if a
        sharding has more dimensions than its parameter, does not split it evenly, or is on another
        mesh.
      PolicyError: if a policy is not valid, or names a float8 dtype.
    """
    _check_unbound(model)
    policies = _load.as_policy_map(recipe)
    _required.check_module_dtypes(policies)
    cls = wrapped_class(author_class(type(model)), policies)
    fields = [field.name for field in dataclasses.fields(cls) if field.init]
    # The parent is not copied: a new module belongs to the method in which it is created.
    new = cls(**{name: getattr(model, name) for name in fields if name != "parent"})
    if shardings is not None:
        by_path = _core.shardings_by_path(shardings, "shardings")
        object.__setattr__(new, "_jaxmp_shardings", by_path)
    return cast(M, new)


def explain_model(
    model: nn.Module, recipe: _load.RecipeLike, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]
) -> tuple[_required.PolicyExplanation, Callable[..., PyTree], tuple[PyTree, ...]]:
    """Explains the policies of a model.

    Args:
      model: a Linen module.
      recipe: as in `apply_policy`.
      args, kwargs: arguments of the model: arrays, shapes or other values.

    Returns:
      The explanation, a function that calls the wrapped model, and its arguments before `args`.

    Raises:
      RuleError: if a required rule matches nothing.
      AttentionError: if a mask contradicts its declaration.
    """
    policies, outputs = _load.as_policy_map(recipe), {}
    paths = _linen_interceptor.module_paths(model, args, kwargs, None, outputs)
    _required.check_required(policies, paths)
    rngs = jax.random.key(0)
    wrapped: Any = apply_policy(model, policies)
    with warnings.catch_warnings():
        # The share itself is reported.
        warnings.simplefilter("ignore", RecipeWarning)
        traced, _ = trace(wrapped.init, (rngs, *args), kwargs)
        avals: list[Any] = traced.closed.out_avals
        shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
        variables = traced.results(shapes)
        call = functools.partial(wrapped.apply, rngs=rngs, mutable=DenyList("params"))
        share = low_precision_share(call, variables, *args, **kwargs)
    results, inputs = wrapped.__dict__["_jaxmp_search"].reasons()
    explanation = _required.explain_modules(policies, paths, outputs, results, inputs, share)
    return explanation, call, (variables,)


def _check_unbound(model: nn.Module) -> None:
    if model.scope is not None:
        raise CompositionError(
            f"The {type(model).__name__} at path {'/'.join(model.scope.path)!r} is already bound "
            "to variables. Apply the recipe first: recipe.wrap(model).bind(variables); inside a "
            "compact method, recipe.wrap(Module(..., parent=None))."
        )


# ---------------------------------------------------------------------------
# Wrapped classes
# ---------------------------------------------------------------------------

# Arguments of `wrapped_class` -> the class, while something else refers to it: a model, or a trace
# of JAX. It refers to the class of its author, which therefore has a weak reference here.
_classes: weakref.WeakValueDictionary[Hashable, type[nn.Module]] = weakref.WeakValueDictionary()
_classes_lock = threading.Lock()


def wrapped_class(
    cls: type[nn.Module], policies: _load.PolicyMap, origin: Path = ()
) -> type[nn.Module]:
    """Returns the subclass of `cls` whose methods run under `policies`.

    Equal arguments give the same class, so equal models under equal policies are equal.

    Args:
      cls: the class that the author of the model wrote.
      policies: the policies.
      origin: the path of a submodule that was taken out of its model.
    """
    key = weakref.ref(cls), policies, origin
    with _classes_lock:
        wrapped = _classes.get(key)
        if wrapped is None:
            wrapped = _classes[key] = _make_class(cls, policies, origin)
        return wrapped


def _make_class(cls: type[nn.Module], policies: _load.PolicyMap, origin: Path) -> type[nn.Module]:
    members: dict[str, Any] = {name: _under_policy(cls, name) for name in _methods(cls)}
    members |= {
        # Otherwise Flax would generate them, and override those of the class.
        **{name: getattr(cls, name) for name in ("__init__", "__eq__", "__hash__")},
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "_jaxmp_class": cls,
        "_jaxmp_policies": policies,
        "_jaxmp_origin": origin,
    }
    return type(cls.__name__, (_UnderPolicies, cls), members)


def _methods(cls: type[nn.Module]) -> list[str]:
    """Returns the names of the methods that users call on a bound `cls`, except `setup`."""
    fields = {field.name for field in dataclasses.fields(cls)}
    bases = [base for base in reversed(cls.__mro__) if base not in nn.Module.__mro__]
    members = {name: value for base in bases for name, value in vars(base).items()}
    return [
        name
        for name, value in members.items()
        if inspect.isfunction(value)
        and name not in fields
        and (name == "__call__" or not name.startswith("__"))
        and name != "setup"
        and (not hasattr(value, "nowrap") or hasattr(value, "compact_name_scope"))
    ]


def _under_policy(cls: type[nn.Module], name: str) -> Callable[..., Any]:
    @functools.wraps(getattr(cls, name))
    def method(self: nn.Module, *args: PyTree, **kwargs: PyTree) -> PyTree:
        call = getattr(type(self), name), args, kwargs
        with _entered(self, call):
            # Users may assign another method to the class later.
            return _intercepted(getattr(cls, name))(self, *args, **kwargs)

    return nn.nowrap(method)


def _intercepted(method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a method that Flax intercepts, also if its class is a base that is not a module."""
    return method if hasattr(method, "nowrap") else nn.module.wrap_method_once(method)


# Function of a module, and the other arguments of a call.
_Call: TypeAlias = tuple[Callable[..., PyTree], tuple[PyTree, ...], dict[str, PyTree]]


@contextlib.contextmanager
def _entered(module: Any, call: _Call | None = None) -> Iterator[None]:
    """Runs a block under the policies of `module`, unless they, or plain `init`, are active.

    Args:
      module: a bound module.
      call: the call that the block is; None for another block.
    """
    policies = _compat.current_context().policies
    if module.scope is None or isinstance(policies, _linen_interceptor.Plain):
        yield
        return
    root = _root_of(module)
    if policies == root:
        yield
        return
    if root.is_by_path:
        _linen_interceptor.key_scopes(module)
    mark = module.__dict__["_jaxmp_mark"]
    # Before the model is searched: in that trace no warning is shown.
    inputs = lambda: (module.variables.get("params", {}), (call or ())[1:])
    _device.check_training(root.policies, inputs, mark)
    decisions = None if call is None else _decisions_of(module, root, call)
    under_policies = _compat.context(policies=root, decisions=decisions)
    interceptor = functools.partial(_linen_interceptor.intercept, root)
    is_written = module.scope.is_mutable_collection(_core.BATCH_STATS)
    kept = _linen_interceptor.keeping_finite_statistics if is_written else contextlib.nullcontext
    with nn.intercept_methods(interceptor), under_policies, kept(module.scope):
        yield


def _decisions_of(module: Any, root: _linen_interceptor.Root, called: _Call) -> Hashable:
    """Returns the labels of the values of a call that are not rounded."""
    function, args, kwargs = called

    def run(arrays: PyTree) -> PyTree:
        variables, rngs, args, kwargs = arrays
        unbound, _ = module.unbind()
        call = nn.apply(function, unbound, mutable=True)
        return call(variables, *args, rngs=rngs, **kwargs)[0]

    def prepare() -> tuple[Callable[[PyTree], PyTree], PyTree, PyTree]:
        rngs = {name: rng.as_jax_rng() for name, rng in module.scope.rngs.items()}
        variables = module.variables
        arrays = variables, rngs, *copied_arguments((args, kwargs))
        return run, arrays, variables

    key = type(module)._jaxmp_class, root.policies, root.path_of(module)
    search = module.__dict__["_jaxmp_search"]
    return search.of_call(key, function, (args, kwargs), prepare)


def _root_of(module: Any) -> _linen_interceptor.Root:
    path = module.__dict__.get("_jaxmp_root_path", module.scope.path)
    return _linen_interceptor.make_root(
        type(module)._jaxmp_policies, path, type(module)._jaxmp_origin
    )


# Argument `method` of `apply` and `init`.
_Method: TypeAlias = str | Callable[..., PyTree] | None


def _method_of_apply(module: nn.Module, method: _Method) -> _Method:
    """Returns the `method` argument of `apply` as a function that runs under the policies."""
    if isinstance(method, str) and isinstance(getattr(module, method, None), nn.Module):
        name = method
        return _method_of_apply(
            module, lambda bound, *args, **kwargs: getattr(bound, name)(*args, **kwargs)
        )
    # A name, or None, means a method of the wrapped class, which runs under the policies anyway.
    if not callable(method):
        return method
    if inspect.ismethod(method) and isinstance(method.__self__, nn.Module):
        method = method.__func__

    @functools.wraps(method)
    def run(bound: nn.Module, *args: PyTree, **kwargs: PyTree) -> PyTree:
        is_foreign = _is_foreign(module, method)
        with _entered(bound, (run, args, kwargs)):
            out = (method if is_foreign else _intercepted(method))(bound, *args, **kwargs)
        return _cast_to_output(bound, out) if is_foreign else out

    return run


def _is_foreign(module: nn.Module, function: Callable[..., Any]) -> bool:
    """Returns True if `function` is not a method of the module's class: nothing cast its result."""
    own = getattr(type(module), getattr(function, "__name__", ""), None)
    return own is None or inspect.unwrap(own) is not inspect.unwrap(function)


def _cast_to_output(module: Any, out: PyTree) -> PyTree:
    """Casts the result of a function that `apply` called with the module to its output dtype."""
    cls = type(module)
    author = cls._jaxmp_class
    traits, outputs = LINEN_LAYERS.traits(author), LINEN_LAYERS.outputs(module, module.parent)
    module_policy = resolve_module(cls._jaxmp_policies, cls._jaxmp_origin, author, traits, outputs)
    return cast_outputs(module_policy, out)


# Attributes that Flax itself reads; none of them is a submodule.
_FLAX_NAMES = frozenset(
    {
        *dir(nn.Module),
        *("scope", "parent", "name", "_id", "_state", "_parent_ref"),
        *("_jaxmp_class", "_jaxmp_policies", "_jaxmp_origin", "_jaxmp_root_path"),
    }
)


def _lookup(module: Any, name: str, inherited: Callable[[str], Any]) -> Any:
    """Returns an attribute of a wrapped module; for a caller outside, submodules have policies."""
    if module.scope is None:
        return inherited(name)
    active = _compat.current_context().policies
    if isinstance(active, _linen_interceptor.Plain) or active == _root_of(module):
        return inherited(name)
    with _entered(module):
        value = inherited(name)
    if not _linen_interceptor.modules_in(value):
        return value
    return jax.tree.map(functools.partial(_submodule_with_policies, module), value)


def _submodule_with_policies(owner: Any, child: object) -> object:
    if not isinstance(child, nn.Module) or child.scope is None or is_wrapped(child):
        return child
    cls, root = type(owner), _root_of(owner)
    wrapped = object.__new__(wrapped_class(type(child), cls._jaxmp_policies, cls._jaxmp_origin))
    # Both share one dictionary, so a call of the wrapped module also changes the submodule.
    object.__setattr__(wrapped, "__dict__", child.__dict__)
    object.__setattr__(wrapped, "_jaxmp_root_path", root.path)
    for name in ("_jaxmp_mark", "_jaxmp_search"):
        object.__setattr__(wrapped, name, owner.__dict__[name])
    return wrapped


def is_wrapped(module: nn.Module) -> bool:
    """Returns True if a module has policies of its own."""
    return hasattr(type(module), "_jaxmp_class")


@contextlib.contextmanager
def _author_fields_in(module: nn.Module) -> Iterator[None]:
    """Runs a block in which a module, and the modules in its fields, have their author's values."""
    modules = _with_submodules(module)
    own = [(part.__dict__, author_fields(part)) for part in modules]
    prepared = [(fields, {name: fields[name] for name in author}) for fields, author in own]
    for fields, author in own:
        fields.update(author)
    try:
        yield
    finally:
        for fields, current in prepared:
            fields.update(current)


def _with_submodules(module: nn.Module) -> list[nn.Module]:
    """Returns a module and the modules in its fields, at any depth."""
    values = [module.__dict__.get(field.name) for field in dataclasses.fields(module)]
    below = [child for value in values for child in _linen_interceptor.modules_in(value)]
    return [module, *(part for child in below for part in _with_submodules(child))]


def _rebuild(cls: type[nn.Module], policies: _load.PolicyMap, origin: Path = ()) -> nn.Module:
    return object.__new__(wrapped_class(cls, policies, origin))


# ---------------------------------------------------------------------------
# Methods of all wrapped classes
# ---------------------------------------------------------------------------

_TABULATE_OPTIONS = frozenset(inspect.signature(nn.Module.tabulate).parameters)
# To a type checker, `super()` has all attributes.
_Base: Any = object


class _UnderPolicies(_Base):
    """First base of a wrapped class; the class that the author of the model wrote follows."""

    def __getattribute__(self, name: str) -> Any:
        inherited = super().__getattribute__
        is_flax = name in _FLAX_NAMES or name.startswith("__")
        return inherited(name) if is_flax else _lookup(self, name, inherited)

    def __getattr__(self, name: str) -> Any:
        return _lookup(self, name, super().__getattr__)

    def __post_init__(self) -> None:
        with _compat.context(policies=_linen_interceptor.Plain()):
            super().__post_init__()
        object.__setattr__(self, "_jaxmp_mark", _core.Mark())
        object.__setattr__(self, "_jaxmp_search", ModelSearch())

    def __reduce__(self) -> tuple[Any, ...]:
        cls: Any = type(self)
        key = cls._jaxmp_class, cls._jaxmp_policies, cls._jaxmp_origin
        return _rebuild, key, self.__getstate__()

    def clone(self: Any, **changes: Any) -> nn.Module:
        """Copies the module. Fields that a policy replaced have their author's values."""
        with _compat.context(policies=_linen_interceptor.Plain()), _author_fields_in(self):
            copy = super().clone(**changes)
        kept = {"_jaxmp_shardings", "_jaxmp_mark", "_jaxmp_search"} & self.__dict__.keys()
        if self.scope is None and changes.keys() - {"parent", "name", "_deep_clone"}:
            # A model with other fields, such as another head, is searched again.
            kept -= {"_jaxmp_search"}
        for name in kept:
            object.__setattr__(copy, name, self.__dict__[name])
        if "_jaxmp_root_path" not in self.__dict__:
            return copy
        # A submodule that leaves its model keeps its policies; inside, the model applies them.
        cls = self._jaxmp_class
        if copy.scope is None:
            # Rules match its path in the model.
            cls = wrapped_class(cls, self._jaxmp_policies, _root_of(self).path_of(self))
        object.__setattr__(copy, "__class__", cls)
        return copy

    def apply(
        self: Any, variables: PyTree, *args: PyTree, method: _Method = None, **kwargs: PyTree
    ) -> PyTree:
        """Applies the module to variables under its policies."""
        variables = constrain_variables(variables, self.__dict__.get("_jaxmp_shardings", {}))
        call = functools.partial(super().apply, method=_method_of_apply(self, method))
        out = call(variables, *args, **kwargs)
        self.__dict__["_jaxmp_search"].warn()
        return out

    def init_with_output(
        self: Any, rngs: PyTree, *args: PyTree, method: _Method = None, **kwargs: PyTree
    ) -> tuple[PyTree, PyTree]:
        """Initializes the module, in the dtypes that the author of the model chose."""
        init = functools.partial(super().init_with_output, rngs, *args, **kwargs)
        under_policies = functools.partial(init, method=_method_of_apply(self, method))
        if "_jaxmp_tabulated" in self.__dict__:
            return under_policies()
        if isinstance(_compat.current_context().policies, _linen_interceptor.Plain):
            return init(method=method)
        if method is None:
            _linen_interceptor.check_required_rules(self, rngs, args, kwargs)
        with _compat.context(policies=_linen_interceptor.Plain()):
            out, variables = init(method=method)
        variables = _linen_interceptor.add_policy_state(self, variables, under_policies)
        return _cast_to_output(self, out), variables

    def tabulate(self, rngs: PyTree, *args: PyTree, **kwargs: PyTree) -> str:
        """Returns Flax's table of the module under its policies."""
        called_with = {key: kwargs[key] for key in kwargs if key not in _TABULATE_OPTIONS}
        _linen_interceptor.check_required_rules(self, rngs, args, called_with)
        shown: Any = self.clone()
        object.__setattr__(shown, "_jaxmp_tabulated", True)
        return super(_UnderPolicies, shown).tabulate(rngs, *args, **kwargs)
