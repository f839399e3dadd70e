"""Linen: a policy per module path, applied to a Flax model without editing it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.core import DenyList
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxmp._attention._arguments import check_implementation
from jaxmp._attention._explained import mask_rows
from jaxmp._attention._layer import Stated
from jaxmp._audit._share import low_precision_share, warn_if_low
from jaxmp._core._compat import context, current_context
from jaxmp._core._trees import is_castable, leaves_with_path, parameter_path
from jaxmp._flax._casts import cast_like, cast_tree, resolve_module
from jaxmp._flax._linen_interceptor import (
    WHOLE,
    Applier,
    AttentionFunction,
    Origin,
    Plain,
    Root,
    author_fields,
    is_by_path,
    key_scopes,
    modules_in,
    root_of,
    traits_of,
)
from jaxmp._overwritten import OVERWRITE
from jaxmp._policies._explanation import PolicyExplanation
from jaxmp._policies._required import check_module_dtypes, check_required, explain_modules
from jaxmp._policies._resolve import PolicyMap
from jaxmp._recipe_files._load import as_policy_map
from jaxmp.errors import CompositionError, RecipeWarning

__all__ = ["apply_policy", "attention_fn", "explain", "module_paths"]

M = TypeVar("M", bound=nn.Module)

# What `init` stores as the author wrote it; other collections follow the compute dtype.
_AUTHORS_COLLECTIONS = ("params", "batch_stats")

# ---------------------------------------------------------------------------
# The policied subclass
# ---------------------------------------------------------------------------

_classes: dict[tuple[type, PolicyMap, Origin], type] = {}
_classes_lock = threading.Lock()


def _policied_class(
    cls: type[nn.Module], policies: PolicyMap, origin: Origin = WHOLE
) -> type[nn.Module]:
    """The one subclass of `cls` whose methods run under `policies`."""
    key = (cls, policies, origin)
    with _classes_lock:
        if key not in _classes:
            _classes[key] = _make_class(*key)
        return _classes[key]


def _make_class(cls: type[nn.Module], policies: PolicyMap, origin: Origin) -> type[nn.Module]:
    members: dict[str, Any] = {name: _under_policy(getattr(cls, name)) for name in _methods(cls)}
    members |= {
        # Else Flax would generate them anew, over a class's own.
        **{name: getattr(cls, name) for name in ("__init__", "__eq__", "__hash__")},
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "__reduce__": nn.nowrap(_reduce),
        "__getattribute__": nn.nowrap(_make_lookup(cls.__getattribute__)),
        "__getattr__": nn.nowrap(_make_lookup(cls.__getattr__)),
        "__post_init__": nn.nowrap(_make_post_init(cls)),
        "clone": nn.nowrap(_make_clone(cls)),
        "apply": nn.nowrap(_make_apply(cls)),
        "init_with_output": nn.nowrap(_make_init_with_output(cls)),
        "tabulate": nn.nowrap(_make_tabulate(cls)),
        "_jaxmp_class": cls,
        "_jaxmp_policies": policies,
        "_jaxmp_origin": origin,
        # Modules that seem to ignore their policy, once a call has seen many; () when reported.
        "_jaxmp_suspects": None,
    }
    return type(cls.__name__, (cls,), members)


def _methods(cls: type[nn.Module]) -> list[str]:
    """Names of the methods that a user of a bound `cls` may call, `setup` left out."""
    fields = {field.name for field in dataclasses.fields(cls)}
    members = {
        name: value
        for base in reversed(cls.__mro__)
        if base not in nn.Module.__mro__
        for name, value in vars(base).items()
    }
    return [
        name
        for name, value in members.items()
        if inspect.isfunction(value)
        and name not in fields
        and (name == "__call__" or not name.startswith("__"))
        and name != "setup"
        and (not hasattr(value, "nowrap") or hasattr(value, "compact_name_scope"))
    ]


def _under_policy(inherited: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(inherited)
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with _entered(self):
            return inherited(self, *args, **kwargs)

    return nn.nowrap(method)


@contextlib.contextmanager
def _entered(module: Any) -> Iterator[None]:
    """Runs a block under the policies of `module`, unless they, or plain `init`, are active."""
    if module.scope is None or isinstance(current_context().policies, Plain):
        yield
        return
    root = _root_of(module)
    if current_context().policies == root:
        yield
        return
    if is_by_path(root.policies):
        key_scopes(module)
    applier = Applier(root, module.scope)
    with nn.intercept_methods(applier), context(policies=root):
        yield
    if type(module)._jaxmp_suspects is None:
        type(module)._jaxmp_suspects = applier.many_suspects() or None


def _root_of(module: Any) -> Root:
    path = module.__dict__.get("_jaxmp_root_path", module.scope.path)
    return root_of(type(module)._jaxmp_policies, path, type(module)._jaxmp_origin)


def _make_apply(cls: type[nn.Module]) -> Callable[..., Any]:
    @functools.wraps(cls.apply)
    def apply(
        self: nn.Module, variables: Any, *args: Any, method: Any = None, **kwargs: Any
    ) -> Any:
        out = cls.apply(self, variables, *args, method=_whole(self, method), **kwargs)
        policied: Any = type(self)
        suspects = policied._jaxmp_suspects
        if suspects:
            policied._jaxmp_suspects = ()
            call = functools.partial(cls.apply, self, method=_whole(self, method))
            warn_if_low(cls, suspects, 2, call, variables, *args, **kwargs)
        return out

    return apply


def _whole(module: nn.Module, method: Any) -> Any:
    """`method` of `apply` as a function that enters the policies and leaves in the output dtype."""
    if isinstance(method, str) and isinstance(getattr(module, method, None), nn.Module):
        return _whole(module, _submodule_caller(method))
    # By name, and by default, it is a method of the policied class, which enters by itself.
    if not callable(method):
        return method
    if inspect.ismethod(method) and isinstance(method.__self__, nn.Module):
        method = method.__func__

    @functools.wraps(method)
    def whole(bound: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with _entered(bound):
            out = method(bound, *args, **kwargs)
        return _cast_to_output(bound, out) if _is_foreign(module, method) else out

    return whole


def _submodule_caller(name: str) -> Callable[..., Any]:
    return lambda bound, *args, **kwargs: getattr(bound, name)(*args, **kwargs)


def _is_foreign(module: nn.Module, function: Callable[..., Any]) -> bool:
    """Whether `function` is no method of the module's class, so that nothing cast its result."""
    own = getattr(type(module), getattr(function, "__name__", ""), None)
    return own is None or inspect.unwrap(own) is not inspect.unwrap(function)


def _cast_to_output(module: Any, out: Any) -> Any:
    cls = type(module)
    (path, above), author = cls._jaxmp_origin, cls._jaxmp_class
    module_policy = resolve_module(cls._jaxmp_policies, path, author, above, traits_of(author))
    return cast_tree(out, module_policy.resolved.output_dtype, module_policy.policy.cast_float64)


# What Flax's own machinery reads; never a submodule.
_FLAX_NAMES = frozenset(
    {
        *dir(nn.Module),
        *("scope", "parent", "name", "_id", "_state", "_parent_ref"),
        *("_jaxmp_class", "_jaxmp_policies", "_jaxmp_origin", "_jaxmp_root_path", "_jaxmp_above"),
        "_jaxmp_suspects",
    }
)


def _make_lookup(inherited: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    """`__getattribute__`, or `__getattr__`, which runs `setup`: both hand out submodules."""

    @functools.wraps(inherited)
    def lookup(self: nn.Module, name: str) -> Any:
        if name in _FLAX_NAMES or name.startswith("__") or self.scope is None:
            return inherited(self, name)
        active = current_context().policies
        if isinstance(active, Plain) or active == _root_of(self):
            return inherited(self, name)
        with _entered(self):
            value = inherited(self, name)
        return _policied_views(self, value)

    return lookup


def _policied_views(owner: nn.Module, value: Any) -> Any:
    """Submodules of a bound model, for a caller outside it, under the policies of the model."""
    if not modules_in(value):
        return value
    return jax.tree.map(functools.partial(_policied_view, owner), value)


def _policied_view(owner: Any, child: Any) -> Any:
    if not isinstance(child, nn.Module) or child.scope is None or _is_policied(child):
        return child
    cls, root = type(owner), _root_of(owner)
    view = object.__new__(_policied_class(type(child), cls._jaxmp_policies, cls._jaxmp_origin))
    # One dictionary for both: what a call changes in the view changes in the submodule.
    object.__setattr__(view, "__dict__", child.__dict__)
    object.__setattr__(view, "_jaxmp_root_path", root.path)
    # Now, because a module refers to its parent weakly.
    object.__setattr__(view, "_jaxmp_above", _classes_above(child))
    return view


def _classes_above(module: Any) -> tuple[type, ...]:
    """The classes of the modules above a bound module, the nearest first."""
    classes, parent = [], module.parent
    while isinstance(parent, nn.Module) and parent.scope is not None:
        classes.append(getattr(type(parent), "_jaxmp_class", type(parent)))
        parent = parent.parent
    return tuple(classes)


def _is_policied(module: nn.Module) -> bool:
    return hasattr(type(module), "_jaxmp_class")


def _make_clone(cls: type[nn.Module]) -> Callable[..., Any]:
    @functools.wraps(cls.clone)
    def clone(self: nn.Module, **changes: Any) -> nn.Module:
        with context(policies=Plain()), _author_fields_in(self):
            copy = cls.clone(self, **changes)
        if "_jaxmp_root_path" not in self.__dict__:
            return copy
        # A submodule that leaves its model takes its policies along; in the model they reach it.
        is_unbound = copy.scope is None
        object.__setattr__(copy, "__class__", _taken_out(self) if is_unbound else cls)
        return copy

    return clone


@contextlib.contextmanager
def _author_fields_in(module: Any) -> Iterator[None]:
    """Runs a block in which a module, and those in its fields, have their author's fields."""
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


def _with_submodules(module: Any) -> list[Any]:
    """A module and the modules in its fields, at any depth."""
    values = [module.__dict__.get(field.name) for field in dataclasses.fields(module)]
    below = [child for value in values for child in modules_in(value)]
    return [module, *(part for child in below for part in _with_submodules(child))]


def _taken_out(view: Any) -> type[nn.Module]:
    """The class of a submodule outside of its model; rules match its path within the model."""
    root, cls = _root_of(view), type(view)
    path = root.origin.path + view.scope.path[len(root.path) :]
    above = (*view.__dict__["_jaxmp_above"], *root.origin.above)
    origin = Origin(path, above[: len(path)])
    return _policied_class(cls._jaxmp_class, cls._jaxmp_policies, origin)


def _make_post_init(cls: type[nn.Module]) -> Callable[..., None]:
    @functools.wraps(cls.__post_init__)
    def __post_init__(self: nn.Module) -> None:
        with context(policies=Plain()):
            cls.__post_init__(self)

    return __post_init__


def _reduce(self: Any) -> tuple[Any, ...]:
    cls = type(self)
    key = cls._jaxmp_class, cls._jaxmp_policies, cls._jaxmp_origin
    return _rebuild, key, self.__getstate__()


def _rebuild(cls: type[nn.Module], policies: PolicyMap, origin: Origin = WHOLE) -> nn.Module:
    return object.__new__(_policied_class(cls, policies, origin))


# ---------------------------------------------------------------------------
# Initialisation: as the model's author wrote it
# ---------------------------------------------------------------------------


def _make_init_with_output(cls: type[nn.Module]) -> Callable[..., Any]:
    @functools.wraps(cls.init_with_output)
    def init_with_output(
        self: nn.Module, rngs: Any, *args: Any, method: Any = None, **kwargs: Any
    ) -> tuple[Any, Any]:
        def init(*, plain: bool) -> tuple[Any, Any]:
            how = method if plain else _whole(self, method)
            return cls.init_with_output(self, rngs, *args, method=how, **kwargs)

        if "_jaxmp_tabulated" in self.__dict__:
            return init(plain=False)
        if isinstance(current_context().policies, Plain):
            return init(plain=True)
        if method is None:
            _check_required(self, rngs, args, kwargs)
        with context(policies=Plain()):
            out, variables = init(plain=True)
        policied = lambda: init(plain=False)[1]
        variables = _with_fp8_state(self, _computed_as(variables, policied), policied)
        return _cast_to_output(self, out), variables

    return init_with_output


def _computed_as(variables: Any, policied_init: Callable[[], Any]) -> Any:
    """`variables` whose caches and other computed state have the dtypes that `apply` writes."""
    computed = [
        name
        for name, collection in variables.items()
        if name not in _AUTHORS_COLLECTIONS
        and any(is_castable(leaf, True) for leaf in jax.tree.leaves(collection))
    ]
    if not computed:
        return variables
    shapes = jax.eval_shape(policied_init)
    return {
        name: cast_like(value, shapes[name], True) if name in computed else value
        for name, value in variables.items()
    }


def _with_fp8_state(module: Any, variables: Any, policied_init: Callable[[], Any]) -> Any:
    """`variables` with the state of delayed scaling, of which a plain `init` knows nothing."""
    scaling = type(module)._jaxmp_policies.fp8
    if scaling is None or not scaling.is_stateful:
        return variables
    made = jax.eval_shape(policied_init).get(OVERWRITE)
    if made is None:
        return variables
    # All of it is zero before the first step. What the author's own layers have there stays.
    fresh = flatten_dict(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), made))
    kept = flatten_dict(variables.get(OVERWRITE, {}))
    return {**variables, OVERWRITE: unflatten_dict({**fresh, **kept})}


_TABULATE_OPTIONS = frozenset(inspect.signature(nn.Module.tabulate).parameters)


def _make_tabulate(cls: type[nn.Module]) -> Callable[..., str]:
    @functools.wraps(cls.tabulate)
    def tabulate(self: nn.Module, rngs: Any, *args: Any, **kwargs: Any) -> str:
        called_with = {key: kwargs[key] for key in kwargs if key not in _TABULATE_OPTIONS}
        _check_required(self, rngs, args, called_with)
        shown = self.clone()
        object.__setattr__(shown, "_jaxmp_tabulated", True)
        return cls.tabulate(shown, rngs, *args, **kwargs)

    return tabulate


def _check_required(module: Any, rngs: Any, args: Any, kwargs: Any) -> None:
    policies = type(module)._jaxmp_policies
    # A part of a model does not have the paths of the rest.
    if not type(module)._jaxmp_origin.path and any(rule.required for rule in policies.rules):
        check_required(policies, module_paths(module, *args, rngs=rngs, **kwargs))


# ---------------------------------------------------------------------------
# API
# ---------------------------------------------------------------------------


def apply_policy(model: M, policies: Any) -> M:
    """The same model, computing as `policies` say; the model that was given is untouched.

    The result is an instance of a subclass of the model's class, with the same parameter tree.
    `init` draws the very parameters that the plain model draws, in the dtypes its author chose;
    `apply` casts them, and inputs and outputs of every module, to the dtypes of its path.

    Args:
      model: an unbound `flax.linen.Module`; if it has policies already, these replace them.
      policies: a recipe's name, a policy string, a `Policy`, a `PolicyMap` or a `Recipe`. Paths are
        relative to `model`.

    Returns:
      The model under the policies, usable alone or as a submodule. Equal models under equal
      policies are equal.

    Raises:
      CompositionError: if `model` is not an unbound Linen module; from `apply`, if it holds an NNX
        module without a policy.
      PolicyError: if a policy names a float8 dtype, or cannot be understood.

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
    cls = _policied_class(getattr(type(model), "_jaxmp_class", type(model)), policies)
    fields = [field.name for field in dataclasses.fields(cls) if field.init]
    # Without its parent: like any new module it belongs to the method that it is made in.
    return cast(M, cls(**{name: getattr(model, name) for name in fields if name != "parent"}))


def attention_fn(
    *,
    implementation: str | None = None,
    is_causal: bool = False,
    local_window_size: int | tuple[int, int] | None = None,
    padding_mask: bool = False,
) -> Callable[..., jax.Array]:
    """`jaxmp.dot_product_attention` for `flax.linen.MultiHeadDotProductAttention(attention_fn=…)`.

    A policy in 16 bits puts it there by itself. Put it there yourself to state what a mask only
    shows: cuDNN's fused kernel skips what causality and lengths hide, and reads a mask as an array.

    Args:
      implementation: as in `dot_product_attention`; None or "auto" leaves it to the policy.
      is_causal: position t sees positions 0 to t. Leave the causal mask out.
      local_window_size: `(left, right)`, or one number for both.
      padding_mask: the layer's mask hides what stands behind the end of each sequence, and nothing
        else but what is stated here; it is handed on as lengths.

    Returns:
      A function; the same one for the same arguments.

    Raises:
      AttentionError: if `implementation` is unknown; when it is called, what
        `dot_product_attention` raises, or for `sow_weights`, `precision` or custom einsums, which
        need all weights, with an implementation that never holds them.

    Example:
      >>> layer = flax.linen.MultiHeadDotProductAttention(
      ...     num_heads=2, attention_fn=jaxmp.linen.attention_fn(is_causal=True)
      ... )
      >>> x = jnp.ones((1, 4, 8))
      >>> layer.init_with_output(jax.random.key(0), x)[0].shape
      (1, 4, 8)
    """
    asked = check_implementation(implementation)
    return AttentionFunction(Stated(asked, is_causal, local_window_size, padding_mask))


# The arguments of each public function behind the model, here and in `jaxmp.nnx`.
_CALLS = {
    "apply_policy": (", policies", ", policies"),
    "explain": (", policies, *args", ", policies"),
    "module_paths": (", *args", ""),
}


def _check_model(model: Any, function: str) -> None:
    here, nnx_call = _CALLS[function]
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise CompositionError(
            f"{function} was given the class {model.__name__}, not a model. Give an instance: "
            f"{function}({model.__name__}(...){here})."
        )
    if not isinstance(model, nn.Module):
        kind = type(model)
        fix = "Give a flax.linen.Module"
        if any(base.__module__.startswith("flax.nnx") for base in inspect.getmro(kind)):
            fix = f"Use jaxmp.nnx.{function}(model{nnx_call})"
        elif callable(model) and function == "apply_policy":
            fix = "For a plain JAX function use jaxmp.autocast(fn, policies)"
        raise CompositionError(
            f"{function} was given a {kind.__module__}.{kind.__qualname__}, which is not a "
            f"flax.linen.Module. {fix}."
        )


def _check_unbound(model: nn.Module) -> None:
    if model.scope is not None:
        raise CompositionError(
            f"{type(model).__name__} at path {'/'.join(model.scope.path)!r} is bound to variables "
            "already. Apply the policy first: apply_policy(model, policies).bind(variables); "
            "inside a compact method, apply_policy(Module(..., parent=None), policies)."
        )


def module_paths(
    model: nn.Module, *args: Any, rngs: Any = None, **kwargs: Any
) -> dict[str, type | None]:
    """Every path that a rule can name in a model, found without computing anything.

    Args:
      model: a Linen module, with or without policies.
      *args, **kwargs: what the model is called with: arrays, `jax.ShapeDtypeStruct`s, other values.
      rngs: as in `model.init`; None: one key for every stream.

    Returns:
      Module path -> the module's class, `''` being the model itself; `path:name` -> None for every
      parameter.

    Example:
      >>> list(module_paths(nn.Dense(4), jnp.ones((2, 3))))
      ['', ':bias', ':kernel']
    """
    _check_model(model, "module_paths")
    paths: dict[str, type | None] = {}
    leaves, structure = jax.tree.flatten((args, kwargs))
    arrays = [index for index, leaf in enumerate(leaves) if hasattr(leaf, "shape")]

    def init(rngs: Any, values: list[Any]) -> Any:
        filled = leaves.copy()
        for index, value in zip(arrays, values, strict=True):
            filled[index] = value
        args, kwargs = structure.unflatten(filled)
        return model.init(rngs, *args, **kwargs)

    def record(call: Callable[..., Any], args: Any, kwargs: Any, where: Any) -> Any:
        cls = type(where.module)
        if where.module.scope is not None and hasattr(cls, where.method_name):
            key_scopes(where.module)
            paths.setdefault("/".join(where.module.path), getattr(cls, "_jaxmp_class", cls))
        return call(*args, **kwargs)

    with context(policies=Plain(object())), nn.intercept_methods(record):
        rngs = jax.random.key(0) if rngs is None else rngs
        variables = jax.eval_shape(init, rngs, [leaves[index] for index in arrays])
    names = [path for path, _ in leaves_with_path(variables.get("params", {}))]
    return {**paths, **dict.fromkeys(map(parameter_path, names))}


def explain(
    model: nn.Module, policies: Any, *args: Any, rngs: Any = None, **kwargs: Any
) -> PolicyExplanation:
    """Which rule decides for each module of a model, and which rules decide nothing.

    Args:
      model: a Linen module.
      policies: as in `apply_policy`.
      *args, **kwargs, rngs: as in `module_paths`. A declared attention mask is compared with the
        mask that follows from the arrays among them.

    Returns:
      A row for every module, and for every parameter that a `path:name` rule decides; the share of
      the matmul FLOPs that run in 16 bits or fewer; and a row in `masks` for every attention layer
      whose mask is declared.

    Raises:
      RuleError: if a required rule matches nothing.
      AttentionError: if a mask contradicts its declaration.

    Example:
      >>> explain(nn.Dense(4), "p=f32,c=bf16,o=f32", jnp.ones((2, 3))).rows[0].policy
      Policy('p=f32,c=bf16,o=f32')
    """
    _check_model(model, "explain")
    policies = as_policy_map(policies)
    paths = module_paths(model, *args, rngs=rngs, **kwargs)
    check_required(policies, paths)
    share = _share(apply_policy(model, policies), args, rngs, kwargs)
    explanation = dataclasses.replace(explain_modules(policies, paths), low_precision_share=share)
    shown: Any = apply_policy(model, policies)
    object.__setattr__(shown, "_jaxmp_tabulated", True)
    rngs = jax.random.key(0) if rngs is None else rngs

    def call(args: Any, kwargs: Any) -> Any:
        return shown.init_with_output(rngs, *args, **kwargs)

    return dataclasses.replace(explanation, masks=mask_rows(call, policies, args, kwargs))


def _share(model: nn.Module, args: Any, rngs: Any, kwargs: Any) -> float | None:
    """Share of the matmul FLOPs of a wrapped model in 16 bits or fewer; None without any."""
    rngs = jax.random.key(0) if rngs is None else rngs

    def initialize_and_apply(rngs: Any, *args: Any, **kwargs: Any) -> Any:
        variables = jax.eval_shape(lambda: model.init(rngs, *args, **kwargs))
        variables = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), variables)
        return model.apply(variables, *args, rngs=rngs, mutable=DenyList("params"), **kwargs)

    with warnings.catch_warnings():
        # The share itself is reported.
        warnings.simplefilter("ignore", RecipeWarning)
        return low_precision_share(initialize_and_apply, rngs, *args, **kwargs)
