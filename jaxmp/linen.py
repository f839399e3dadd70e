"""Linen: a policy per module path, applied to a Flax model without editing it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.core import Scope
from flax.linen.dtypes import promote_dtype
from jax import lax

from jaxmp._attention import fp32_softmax_attention
from jaxmp._compat import context, current_context
from jaxmp._dtypes import FLOAT32, bits, is_half, short_name
from jaxmp._policy import Policy
from jaxmp._products import wide_product
from jaxmp._recipe_data import as_policy_map
from jaxmp._rules import Decision, Explanation, PolicyMap
from jaxmp._trees import cast, is_castable, leaves_with_path, parameter_path
from jaxmp.errors import CompositionError, PolicyError

__all__ = ["apply_policy", "explain", "module_paths"]

M = TypeVar("M", bound=nn.Module)
Path = tuple[str, ...]

# ---------------------------------------------------------------------------
# Facts: what is true of a module class under every policy
# ---------------------------------------------------------------------------

# Statistics, scale and bias in FP32; the result is handed on in the compute dtype.
_NORMS = (nn.BatchNorm, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.InstanceNorm)
# Wrappers that normalise another layer's weights; in FP32 too.
_WEIGHT_NORMS = (nn.SpectralNorm, nn.WeightNorm)
# Their `promote_dtype` casts kernel and bias; nothing is left to do in `param`.
_SELF_CASTING = (nn.Dense, nn.DenseGeneral, nn.Einsum, nn.Conv, nn.ConvLocal, nn.ConvTranspose)


class _Facts(NamedTuple):
    takes_dtype: bool  # its `dtype` field was defined by Flax, not by a user
    norm: bool
    upcasts_params: bool
    casts_params: bool  # itself
    cell: bool
    rnn: bool
    attention: bool


@functools.cache
def _facts(cls: type[nn.Module]) -> _Facts:
    cls = getattr(cls, "_jaxmp_class", cls)
    return _Facts(
        takes_dtype=_is_flax_field(cls, "dtype"),
        norm=issubclass(cls, _NORMS),
        upcasts_params=issubclass(cls, _NORMS + _WEIGHT_NORMS),
        casts_params=cls in _SELF_CASTING,
        cell=issubclass(cls, nn.RNNCellBase),
        rnn=issubclass(cls, (nn.RNN, nn.Bidirectional)),
        attention=issubclass(cls, nn.MultiHeadDotProductAttention),
    )


def _is_flax_field(cls: type, name: str) -> bool:
    for base in cls.__mro__:
        if name in inspect.get_annotations(base):
            return base.__module__.partition(".")[0] == "flax"
    return False


# ---------------------------------------------------------------------------
# Casts
# ---------------------------------------------------------------------------


def _cast_tree(tree: Any, dtype: Any, cast_float64: bool = False) -> Any:
    def cast_leaf(leaf: Any) -> Any:
        # A module among the arguments has an attribute `dtype` too, and is no array.
        if is_castable(leaf, cast_float64) and not isinstance(leaf, nn.Module):
            return cast(leaf, dtype)
        return leaf

    return jax.tree.map(cast_leaf, tree)


def _cast_like(tree: Any, like: Any) -> Any:
    """`tree` in the dtypes of `like` where both have one structure and shapes; else as it is."""
    leaves, structure = jax.tree.flatten(tree)
    models, model_structure = jax.tree.flatten(like)
    if structure != model_structure or list(map(jnp.shape, leaves)) != list(map(jnp.shape, models)):
        return tree
    pairs = zip(leaves, models, strict=True)
    return structure.unflatten(
        cast(leaf, model.dtype) if is_castable(leaf) and is_castable(model) else leaf
        for leaf, model in pairs
    )


# ---------------------------------------------------------------------------
# Plans: what one policy does to one module
# ---------------------------------------------------------------------------


class _Plan(NamedTuple):
    policy: Policy
    facts: _Facts
    output: np.dtype
    # Whether the output dtype was asked for: the root's, or named by the deciding rule.
    asks_output: bool
    # Where the deciding rule asks for an output wider than the compute dtype: that output dtype.
    wide: np.dtype | None
    param_dtype: Callable[[str], np.dtype]

    @property
    def input_dtype(self) -> np.dtype:
        return _upcast(self.policy) if self.facts.norm else self.policy.compute_dtype


def _prepare(module: nn.Module, plan: _Plan) -> bool:
    """Sets the fields and the `param` that `module` computes with; False: its author's stand."""
    policy, facts = plan.policy, plan.facts
    if facts.takes_dtype and policy.respect_explicit:
        author = module.__dict__.setdefault("_jaxmp_author_dtype", module.dtype)
        if author is not None and np.dtype(author) != policy.compute_dtype:
            return False
    if module.__dict__.get("_jaxmp_plan") is plan:
        return True
    set_field = functools.partial(object.__setattr__, module)
    set_field("_jaxmp_plan", plan)
    if facts.takes_dtype:
        set_field("dtype", _upcast(policy) if facts.upcasts_params else policy.compute_dtype)
    if facts.attention and module.attention_fn is nn.dot_product_attention:
        if is_half(policy.compute_dtype):
            set_field("attention_fn", fp32_softmax_attention)
    if plan.wide is not None:
        _widen(module, plan.wide, set_field)
    if not facts.casts_params:
        set_field("param", _casting_param(weakref.ref(module), plan))
    return True


def _upcast(policy: Policy) -> np.dtype:
    return FLOAT32 if is_half(policy.compute_dtype) else policy.compute_dtype


def _casting_param(ref: weakref.ref[nn.Module], plan: _Plan) -> Callable[..., Any]:
    """`module.param` in the compute dtype; what is stored keeps the dtype it was made in."""

    def param(name: str, init_fn: Callable[..., Any], *init_args: Any, **kwargs: Any) -> Any:
        module = ref()
        value = type(module).param(module, name, init_fn, *init_args, **kwargs)
        dtype = _upcast(plan.policy) if plan.facts.upcasts_params else plan.param_dtype(name)
        return _cast_tree(value, dtype, plan.policy.cast_float64)

    return param


# ---------------------------------------------------------------------------
# Wide outputs: 16-bit operands, FP32 result
# ---------------------------------------------------------------------------


def _widen(module: nn.Module, wide: np.dtype, set_field: Callable[..., None]) -> None:
    """Makes the product of a Flax layer emit `wide`, through the fields Flax has for it."""
    if getattr(module, "promote_dtype", None) is not promote_dtype:
        return
    for field, product in (
        ("dot_general", lax.dot_general),
        ("conv_general_dilated", lax.conv_general_dilated),
    ):
        if hasattr(module, field):
            if getattr(module, field) is None and getattr(module, f"{field}_cls") is None:
                set_field(field, _wide_operator(product, wide))
                set_field("promote_dtype", _wide_promote(wide))
            return
    if getattr(module, "preferred_element_type", wide) is None:
        set_field("preferred_element_type", wide)
        set_field("promote_dtype", _wide_promote(wide))


@functools.cache
def _wide_operator(product: Callable[..., Any], wide: np.dtype) -> Callable[..., jax.Array]:
    """`product` that emits `wide`; one object per dtype, so that equal modules stay equal."""

    def operator(lhs: Any, rhs: Any, *args: Any, **kwargs: Any) -> jax.Array:
        def bound(lhs: Any, rhs: Any, preferred_element_type: Any = None) -> jax.Array:
            return product(lhs, rhs, *args, **kwargs, preferred_element_type=preferred_element_type)

        return wide_product(bound, lhs, rhs, wide)

    return operator


@functools.cache
def _wide_promote(wide: np.dtype) -> Callable[..., Any]:
    """Flax's `promote_dtype`, with the bias as wide as the sum it is added to."""

    def promote(*arrays: Any, dtype: Any = None, inexact: bool = True) -> list[Any]:
        operands = promote_dtype(*arrays[:2], dtype=dtype, inexact=inexact)
        return operands + [None if bias is None else jnp.asarray(bias, wide) for bias in arrays[2:]]

    return promote


def _wide_attend(module: nn.Module, wide: np.dtype, call: Callable[..., Any]) -> Any:
    """`Embed.attend` has no field for its product; another class's `attend` is left alone."""
    if getattr(type(module), "attend", None) is not nn.Embed.attend:
        return call

    def attend(query: jax.Array) -> jax.Array:
        query, embedding = module.promote_dtype(query, module.embedding, dtype=module.dtype)
        return wide_product(jnp.dot, query, embedding.T, wide)

    return attend


# ---------------------------------------------------------------------------
# The interceptor
# ---------------------------------------------------------------------------


class _Root(NamedTuple):
    """Which policies are applied below which module; part of the jit cache key."""

    policies: PolicyMap
    path: Path


class _Plain(NamedTuple):
    """In the place of a `_Root`: the model runs as its author wrote it."""

    # A fresh object where no trace that `nn.jit` cached may be used.
    token: Any = None


# What `init` stores as the author wrote it; other collections follow the compute dtype.
_AUTHORS_COLLECTIONS = ("params", "batch_stats")

_PRECISIONS = {"highest": "highest", "tf32": "tensorfloat32"}


class _Frame(NamedTuple):
    module: nn.Module
    path: Path
    precision: str | None


class _Applier:
    """Carries out the policies in every module method that is called below one root."""

    def __init__(self, root: _Root) -> None:
        self.root = root
        self.frames: list[_Frame] = []
        self.plans: dict[Any, _Plan] = {}
        self.types: dict[Path, type] = {}
        self.by_subtree = any(rule.subtree for rule in root.policies.rules)
        self.by_path = _is_by_path(root.policies)
        self.precision = jax.config.jax_default_matmul_precision

    def __call__(
        self, call: Callable[..., Any], args: Any, kwargs: Any, where: nn.module.InterceptorContext
    ) -> Any:
        module, method = where.module, where.method_name
        # An inner root owns its subtree, and an unbound module has nothing to cast.
        if module.scope is None or current_context().policies != self.root:
            return call(*args, **kwargs)
        path = self._relative(module.scope.path)
        plan = self._plan(module, path)
        follows = _prepare(module, plan)
        if self.by_path:
            _key_scopes(module)
        if method == "setup":
            return call(*args, **kwargs)
        body = self._lifted_body(module)
        crosses = hasattr(type(module), method) and not self._is_inside(module, path)
        incoming = args, kwargs
        if crosses and follows:
            args, kwargs = _cast_inputs(plan, method, args, kwargs)
        if crosses and plan.wide is not None and method == "attend":
            call = _wide_attend(module, plan.wide, call)
        with self._frame(module, path, plan):
            out = call(*args, **kwargs)
        out, carry = _split_carry(plan.facts, module, method, body, out, *incoming)
        if crosses and (follows or plan.asks_output):
            out = _cast_tree(out, plan.output, plan.policy.cast_float64)
        return carry(out)

    # -- where are we -----------------------------------------------------------------------

    def _relative(self, path: Path) -> Path:
        """Below the root; a module that was handed in from elsewhere keeps its whole path."""
        depth = len(self.root.path)
        return path[depth:] if path[:depth] == self.root.path else path

    def _is_inside(self, module: nn.Module, path: Path) -> bool:
        """Whether a module calls its own method: no boundary is crossed."""
        if not self.frames:
            return False
        caller = self.frames[-1]
        return caller.path == path and type(caller.module) is type(module)

    def _lifted_body(self, module: nn.Module) -> str:
        """The transformation whose body this call is, such as "scan(block)"; "" if none."""
        lifted = isinstance(module.parent, Scope) and not (
            self.frames and self.frames[-1].module is module
        )
        debug_path = module.scope.debug_path
        return debug_path[-1] if lifted and debug_path else ""

    @contextlib.contextmanager
    def _frame(self, module: nn.Module, path: Path, plan: _Plan) -> Iterator[None]:
        outer = self.frames[-1].precision if self.frames else self.precision
        precision = _PRECISIONS.get(plan.policy.matmul, self.precision)
        self.frames.append(_Frame(module, path, precision))
        try:
            if precision == outer:
                yield
            else:
                with jax.default_matmul_precision(precision):
                    yield
        finally:
            self.frames.pop()

    # -- which policy -----------------------------------------------------------------------

    def _plan(self, module: nn.Module, path: Path) -> _Plan:
        cls = type(module)
        ancestors = self._ancestors(module, path) if self.by_subtree else ()
        key = (path, cls, ancestors)
        if key not in self.plans:
            self.plans[key] = self._make_plan(path, cls, ancestors)
        return self.plans[key]

    def _ancestors(self, module: nn.Module, path: Path) -> tuple[type, ...]:
        self.types.setdefault(path, type(module))
        parent, above = module.parent, path[:-1]
        while isinstance(parent, nn.Module) and parent.scope is not None:
            self.types.setdefault(self._relative(parent.scope.path), type(parent))
            parent = parent.parent
        prefixes = [above[:length] for length in range(len(above), -1, -1)] if path else []
        return tuple(self.types[prefix] for prefix in prefixes if prefix in self.types)

    def _make_plan(self, path: Path, cls: type, ancestors: tuple[type, ...]) -> _Plan:
        policies, name = self.root.policies, "/".join(path)
        policy = policies.resolve(name, cls, ancestors)
        rule = policies.deciding_rule(name, cls, ancestors)
        named = rule is not None and rule.output_dtype is not None
        asks = named or not path
        wide = named and bits(policy.output_dtype) > bits(policy.compute_dtype)
        return _Plan(
            policy=policy,
            facts=_facts(cls),
            output=policy.output_dtype if asks else policy.compute_dtype,
            asks_output=asks,
            wide=policy.output_dtype if wide else None,
            param_dtype=lambda param: (
                policies.resolve(f"{name}:{param}", cls, ancestors).compute_dtype
            ),
        )


# ---------------------------------------------------------------------------
# Across a module's boundary
# ---------------------------------------------------------------------------


def _cast_inputs(plan: _Plan, method: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Arguments in the dtype that the module computes with; recurrent carries as they came."""
    skipped, name = 0, ""
    if plan.facts.cell and method == "__call__":
        skipped, name = 1, "carry"
    elif plan.facts.rnn:
        name = "initial_carry"
    cast_in = functools.partial(
        _cast_tree, dtype=plan.input_dtype, cast_float64=plan.policy.cast_float64
    )
    return (*args[:skipped], *cast_in(args[skipped:])), {
        key: value if key == name else cast_in(value) for key, value in kwargs.items()
    }


def _split_carry(
    facts: _Facts, module: Any, method: str, body: str, out: Any, args: Any, kwargs: Any
) -> tuple[Any, Callable[[Any], Any]]:
    """What of `out` is handed on, and how the carry, in its incoming dtypes, is put back.

    A loop needs its carry to keep its dtypes; a recurrent state is kept as precise as it came.
    """
    pair = type(out) is tuple and len(out) == 2
    if pair and ("scan(" in body or (facts.cell and method == "__call__")):
        incoming = args[0] if args else kwargs.get("carry")
        carry = _cast_like(out[0], incoming)
        return out[1], lambda handed_on: (carry, handed_on)
    if pair and facts.rnn and kwargs.get("return_carry", module.return_carry):
        return out[1], lambda handed_on: (out[0], handed_on)
    if "while_loop(" in body and args:
        carry = _cast_like(out, args[0])
        return (), lambda _: carry
    return out, lambda handed_on: handed_on


# ---------------------------------------------------------------------------
# Keys for nn.jit
# ---------------------------------------------------------------------------
#
# `nn.jit` shares one trace between equal modules, wherever they stand, so a rule by path would
# reach only the first of them. The flags of a scope are part of its cache key; there the path
# goes, of every scope below the root, before the module of that scope is called.


def _is_by_path(policies: PolicyMap) -> bool:
    return any(rule.path is not None or rule.subtree for rule in policies.rules)


def _key_scope(scope: Scope) -> None:
    if "push" in vars(scope):
        return
    scope.flags = {**scope.flags, "jaxmp_path": "/".join(scope.path)}
    scope.push = functools.partial(_push_keyed, weakref.ref(scope))


def _push_keyed(parent: weakref.ref[Scope], *args: Any, **kwargs: Any) -> Scope:
    child = Scope.push(parent(), *args, **kwargs)
    _key_scope(child)
    return child


def _key_scopes(module: nn.Module) -> None:
    """Keys a bound module and those it holds already, in fields or since `setup`."""
    _key_scope(module.scope)
    for value in list(vars(module).values()):
        for child in _modules_in(value):
            if child.scope is not None and "push" not in vars(child.scope):
                _key_scopes(child)


def _modules_in(value: Any) -> list[nn.Module]:
    if isinstance(value, nn.Module):
        return [value]
    if isinstance(value, (tuple, list, Mapping)):
        return [leaf for leaf in jax.tree.leaves(value) if isinstance(leaf, nn.Module)]
    return []


# ---------------------------------------------------------------------------
# The policied subclass
# ---------------------------------------------------------------------------

_classes: dict[tuple[type, PolicyMap], type] = {}
_classes_lock = threading.Lock()


def _policied_class(cls: type[nn.Module], policies: PolicyMap) -> type[nn.Module]:
    """The one subclass of `cls` whose methods run under `policies`."""
    with _classes_lock:
        found = _classes.get((cls, policies))
        if found is None:
            found = _classes[cls, policies] = _make_class(cls, policies)
        return found


def _make_class(cls: type[nn.Module], policies: PolicyMap) -> type[nn.Module]:
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
def _entered(module: nn.Module) -> Iterator[None]:
    """Runs a block under the policies of `module`, unless they, or plain `init`, are active."""
    if module.scope is None or isinstance(current_context().policies, _Plain):
        yield
        return
    root = _root_of(module)
    if current_context().policies == root:
        yield
        return
    if _is_by_path(root.policies):
        _key_scopes(module)
    with nn.intercept_methods(_Applier(root)), context(policies=root):
        yield


def _root_of(module: nn.Module) -> _Root:
    path = module.__dict__.get("_jaxmp_root_path", module.scope.path)
    return _Root(type(module)._jaxmp_policies, path)


def _make_apply(cls: type[nn.Module]) -> Callable[..., Any]:
    @functools.wraps(cls.apply)
    def apply(
        self: nn.Module, variables: Any, *args: Any, method: Any = None, **kwargs: Any
    ) -> Any:
        return cls.apply(self, variables, *args, method=_whole(self, method), **kwargs)

    return apply


def _whole(module: nn.Module, method: Any) -> Any:
    """`method` of `apply` as a method that enters the policies and leaves in the output dtype."""
    if isinstance(method, str) and isinstance(getattr(module, method, None), nn.Module):
        return _whole(module, _submodule_caller(method))
    # The overrides of the class enter by themselves.
    if not inspect.isroutine(method) or inspect.ismethod(method):
        return method

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


def _cast_to_output(module: nn.Module, out: Any) -> Any:
    policy = type(module)._jaxmp_policies.resolve("", type(module))
    return _cast_tree(out, policy.output_dtype, policy.cast_float64)


# What Flax's own machinery reads; never a submodule.
_FLAX_NAMES = frozenset({*dir(nn.Module), "scope", "parent", "name"})


def _make_lookup(inherited: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    """`__getattribute__`, or `__getattr__`, which runs `setup`: both hand out submodules."""

    @functools.wraps(inherited)
    def lookup(self: nn.Module, name: str) -> Any:
        if name[0] == "_" or name in _FLAX_NAMES or self.scope is None:
            return inherited(self, name)
        active = current_context().policies
        if isinstance(active, _Plain) or active == _root_of(self):
            return inherited(self, name)
        with _entered(self):
            value = inherited(self, name)
        return _policied_views(self, value)

    return lookup


def _policied_views(owner: nn.Module, value: Any) -> Any:
    """Submodules of a bound model, for a caller outside it, under the policies of the model."""
    if not _modules_in(value):
        return value
    return jax.tree.map(functools.partial(_policied_view, owner), value)


def _policied_view(owner: nn.Module, child: Any) -> Any:
    if not isinstance(child, nn.Module) or child.scope is None or _is_policied(child):
        return child
    view = object.__new__(_policied_class(type(child), type(owner)._jaxmp_policies))
    # One dictionary for both: what a call changes in the view changes in the submodule.
    object.__setattr__(view, "__dict__", child.__dict__)
    object.__setattr__(view, "_jaxmp_root_path", _root_of(owner).path)
    return view


def _is_policied(module: nn.Module) -> bool:
    return hasattr(type(module), "_jaxmp_class")


def _make_clone(cls: type[nn.Module]) -> Callable[..., Any]:
    @functools.wraps(cls.clone)
    def clone(self: nn.Module, **changes: Any) -> nn.Module:
        with context(policies=_Plain()):
            copy = cls.clone(self, **changes)
        # Away from its root, a submodule would be matched by the wrong paths: it is plain again.
        if "_jaxmp_root_path" in self.__dict__:
            object.__setattr__(copy, "__class__", cls)
        return copy

    return clone


def _make_post_init(cls: type[nn.Module]) -> Callable[..., None]:
    @functools.wraps(cls.__post_init__)
    def __post_init__(self: nn.Module) -> None:
        with context(policies=_Plain()):
            cls.__post_init__(self)

    return __post_init__


def _reduce(self: nn.Module) -> tuple[Any, ...]:
    cls = type(self)
    return _rebuild, (cls._jaxmp_class, cls._jaxmp_policies), self.__getstate__()


def _rebuild(cls: type[nn.Module], policies: PolicyMap) -> nn.Module:
    return object.__new__(_policied_class(cls, policies))


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
        if isinstance(current_context().policies, _Plain):
            return init(plain=True)
        if method is None:
            _check_required(self, rngs, args, kwargs)
        with context(policies=_Plain()):
            out, variables = init(plain=True)
        return _cast_to_output(self, out), _computed_as(variables, lambda: init(plain=False)[1])

    return init_with_output


def _computed_as(variables: Any, policied_init: Callable[[], Any]) -> Any:
    """`variables` whose caches and other computed state have the dtypes that `apply` writes."""
    computed = [
        name
        for name, collection in variables.items()
        if name not in _AUTHORS_COLLECTIONS and any(map(is_castable, jax.tree.leaves(collection)))
    ]
    if not computed:
        return variables
    shapes = jax.eval_shape(policied_init)
    return {
        name: _cast_like(value, shapes[name]) if name in computed else value
        for name, value in variables.items()
    }


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


def _check_required(module: nn.Module, rngs: Any, args: Any, kwargs: Any) -> None:
    policies = type(module)._jaxmp_policies
    if any(rule.required for rule in policies.rules):
        policies.check_required(module_paths(module, *args, rngs=rngs, **kwargs))


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
      CompositionError: if `model` is not an unbound Linen module.
      PolicyError: if a policy names a float8 dtype, or cannot be understood.

    Example:
      >>> model = apply_policy(nn.Dense(4), "p=f32,c=bf16,o=f32")
      >>> params = model.init(jax.random.key(0), jnp.ones((2, 3)))
      >>> model.apply(params, jnp.ones((2, 3))).dtype
      dtype('float32')
    """
    _check_model(model)
    policies = as_policy_map(policies)
    _check_dtypes(policies)
    cls = _policied_class(getattr(type(model), "_jaxmp_class", type(model)), policies)
    fields = [field.name for field in dataclasses.fields(cls) if field.init]
    return cls(**{name: getattr(model, name) for name in fields if name != "parent"})


def _check_model(model: Any) -> None:
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise CompositionError(
            f"apply_policy was given the class {model.__name__}, not a model. Give an instance: "
            f"apply_policy({model.__name__}(...), policies)."
        )
    if not isinstance(model, nn.Module):
        kind = type(model)
        nnx = any(base.__module__.startswith("flax.nnx") for base in kind.__mro__)
        fix = "jaxmp.nnx.apply_policy(model, policies)" if nnx else "jaxmp.autocast(fn, policies)"
        raise CompositionError(
            f"apply_policy was given a {kind.__module__}.{kind.__qualname__}, which is not a "
            f"flax.linen.Module. Use {fix}."
        )
    if model.scope is not None:
        raise CompositionError(
            f"{type(model).__name__} at path {'/'.join(model.path)!r} is bound to variables "
            "already. Apply the policy first: apply_policy(model, policies).bind(variables); "
            "inside a compact method, apply_policy(Module(..., parent=None), policies)."
        )


def _check_dtypes(policies: PolicyMap) -> None:
    for owner in (policies.default, *policies.rules):
        for field in ("param_dtype", "compute_dtype", "output_dtype"):
            dtype = getattr(owner, field)
            if dtype is not None and bits(dtype) < 16:
                raise PolicyError(
                    f"{field}={short_name(dtype)} in {owner!r}: a module cannot compute or store in "
                    "fewer than 16 bits; FP8 is a property of single products. Keep 16 bits here, "
                    "such as apply_policy(model, 'p=f32,c=bf16,o=f32')."
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
            _key_scopes(where.module)
            paths.setdefault("/".join(where.module.path), getattr(cls, "_jaxmp_class", cls))
        return call(*args, **kwargs)

    with context(policies=_Plain(object())), nn.intercept_methods(record):
        rngs = jax.random.key(0) if rngs is None else rngs
        variables = jax.eval_shape(init, rngs, [leaves[index] for index in arrays])
    names = [path for path, _ in leaves_with_path(variables.get("params", {}))]
    return {**paths, **dict.fromkeys(map(parameter_path, names))}


def explain(
    model: nn.Module, policies: Any, *args: Any, rngs: Any = None, **kwargs: Any
) -> Explanation:
    """Which rule decides for each module of a model, and which rules decide nothing.

    Args:
      model: a Linen module.
      policies: as in `apply_policy`.
      *args, **kwargs, rngs: as in `module_paths`.

    Returns:
      A row for every module, and for every parameter that a `path:name` rule decides.

    Raises:
      RuleError: if a required rule matches nothing.

    Example:
      >>> explain(nn.Dense(4), "p=f32,c=bf16,o=f32", jnp.ones((2, 3))).rows[0].policy
      Policy('p=f32,c=bf16,o=f32')
    """
    policies = as_policy_map(policies)
    paths = module_paths(model, *args, rngs=rngs, **kwargs)
    policies.check_required(paths)
    rows = [
        _decision(policies, path, paths)
        for path in paths
        if ":" not in path or _names_parameter(policies, path)
    ]
    deciding = {row.rule for row in rows}
    unused = [rule for index, rule in enumerate(policies.rules) if index not in deciding]
    return Explanation(tuple(rows), tuple(unused))


def _names_parameter(policies: PolicyMap, path: str) -> bool:
    rule = policies.deciding_rule(path)
    return rule is not None and rule.addresses_parameter


def _decision(policies: PolicyMap, path: str, paths: dict[str, type | None]) -> Decision:
    names = path.split("/") if path else []
    above = ["/".join(names[:length]) for length in range(len(names) - 1, -1, -1)]
    where = path, paths[path], tuple(paths[prefix] for prefix in above if paths.get(prefix))
    rule = policies.deciding_rule(*where)
    kind = paths[path]
    return Decision(
        path,
        kind.__name__ if kind else "",
        policies.resolve(*where),
        None if rule is None else policies.rules.index(rule),
        "" if rule is None else rule.why,
    )
