"""Interceptor that applies policies to the calls of Linen modules, and their initialization."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from flax.core import Scope, freeze
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxmp import _core
from jaxmp._autocast._resolve import trace
from jaxmp._core import Path, PyTree, _compat
from jaxmp._flax import _labels
from jaxmp._flax._casts import ModulePolicy, cast_like, is_complex, keeps_dtype, resolve_module
from jaxmp._flax._layer_table import author_class
from jaxmp._flax._linen_fields import LATE, LINEN_LAYERS, method_under_policy, prepare
from jaxmp._flax._method_call import MethodCall, running
from jaxmp._policies._load import PolicyMap
from jaxmp._policies._required import check_required
from jaxmp.errors import CompositionError
from jaxmp.fp8._overwritten import OVERWRITE

# ---------------------------------------------------------------------------
# Paths in the cache key of `nn.jit`
# ---------------------------------------------------------------------------


def _key_scope(scope: Scope) -> None:
    """Adds the path of a scope, and of all scopes that it creates, to their flags."""
    if "push" in vars(scope):
        return
    scope.flags = freeze({**scope.flags, "jaxmp_path": "/".join(scope.path)})
    scope.push = functools.partial(_push_keyed, weakref.ref(scope))


def _push_keyed(parent: Callable[[], Any], *args: Any, **kwargs: Any) -> Scope:
    child = Scope.push(parent(), *args, **kwargs)
    _key_scope(child)
    return child


def key_scopes(module: nn.Module) -> None:
    """Adds paths to the scopes of a bound module and of the modules in its attributes."""
    assert module.scope is not None
    _key_scope(module.scope)
    # A copy of the attributes, because access to a child can run its `setup`.
    for value in list(vars(module).values()):
        for child in modules_in(value):
            if child.scope is not None and "push" not in vars(child.scope):
                key_scopes(child)


def modules_in(value: object) -> list[nn.Module]:
    """Returns the modules in an attribute: the value itself, or those in a container."""
    if not isinstance(value, (nn.Module, tuple, list, Mapping)):
        return []
    return [leaf for leaf in jax.tree.leaves(value) if isinstance(leaf, nn.Module)]


# ---------------------------------------------------------------------------
# Roots
# ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Root:
    """Policies of a model and its location; part of the jit cache key.

    JAX hashes its cache keys at every call of a jitted function. `make_root` returns one object for
    equal arguments, so roots are compared and hashed by identity.
    """

    policies: PolicyMap
    path: Path
    # Path of the module in the model from which it was taken, which has the policies.
    origin: Path = ()
    # Of the modules that were called; those of a class die with it.
    _module_policies: weakref.WeakKeyDictionary[type, dict[Hashable, ModulePolicy]] = (
        dataclasses.field(default_factory=weakref.WeakKeyDictionary)
    )

    @functools.cached_property
    def is_by_path(self) -> bool:
        """True if modules of one class can have different policies.

        `nn.jit` shares one trace between equal modules, whatever their paths, so a rule by path
        would reach only the first of them. `key_scopes` adds the path to the flags of each scope,
        which are part of the cache key, before the module of that scope is called.
        """
        return any(rule.path is not None for rule in self.policies.rules)

    def path_of(self, module: nn.Module) -> Path:
        """Returns the path of a bound module in the model that has the policies."""
        assert module.scope is not None
        path, depth = module.scope.path, len(self.path)
        # A module from outside of the root keeps its path.
        return self.origin + path[depth:] if path[:depth] == self.path else path

    def module_policy(self, module: nn.Module) -> ModulePolicy:
        """Returns the policy of a bound module."""
        cls, path = type(module), self.path_of(module)
        outputs = LINEN_LAYERS.outputs(module, module.parent)
        module_policies, key = self._module_policies.setdefault(cls, {}), (path, outputs)
        if key not in module_policies:
            _check_bridge(module, path)
            traits = LINEN_LAYERS.traits(cls)
            module_policy = resolve_module(self.policies, path, cls, traits, outputs)
            # Calls of one module are compared by their policies, also if threads make two.
            module_policies.setdefault(key, module_policy)
        return module_policies[key]


# Models with equal policies share what was resolved for their modules.
make_root = functools.cache(Root)


class Plain(NamedTuple):
    """Replacement of a `Root` while a model runs as its author wrote it."""

    # A new object prevents the use of traces that `nn.jit` has cached.
    token: Any = None


# ---------------------------------------------------------------------------
# Bridges from NNX
# ---------------------------------------------------------------------------


def _check_bridge(module: nn.Module, path: Path) -> None:
    """Refuses an NNX module without policies, because Linen policies do not reach it."""
    # A function can return a module with policies; a class returns one without.
    if isinstance(module, nnx.bridge.ToLinen) and isinstance(module.nnx_class, type):
        name = module.nnx_class.__name__
        raise CompositionError(
            f"The ToLinen at {'/'.join(path)!r} contains an NNX {name}, which Linen policies "
            "do not reach. Apply its policies inside the bridge: nnx.bridge.to_linen(lambda *args, "
            f"**kwargs: recipe.wrap({name}(*args, **kwargs)), ...)."
        )


def _check_mixins(cls: type, path: Path, module_policy: ModulePolicy) -> None:
    """Warns of a forward pass that a plain class defines, which Flax does not intercept."""
    for name in ("__call__", *module_policy.policy.forward_methods):
        base = next((base for base in cls.__mro__ if name in vars(base)), nn.Module)
        if not issubclass(base, nn.Module) and not hasattr(vars(base)[name], "nowrap"):
            own, plain = cls.__name__, base.__name__
            _core.warn_user(
                f"Policies do not cast the arguments of {name!r} of {'/'.join(path)!r}, because "
                f"{plain}, which is not a Flax module, defines it. Flax wraps what the class of "
                f"the module names:\n    class {own}({plain}, nn.Module):\n"
                f"        {name} = {plain}.{name}"
            )


# ---------------------------------------------------------------------------
# The interceptor
# ---------------------------------------------------------------------------


def intercept(
    root: Root,
    call: Callable[..., Any],
    args: tuple[PyTree, ...],
    kwargs: dict[str, PyTree],
    where: nn.module.InterceptorContext,
) -> PyTree:
    """Applies the policies of one root to a method that is called below it."""
    module, method = where.module, where.method_name
    # An inner root applies its own policies, and an unbound module has nothing to cast.
    if module.scope is None or _compat.current_context().policies != root:
        return call(*args, **kwargs)
    caller = running()[-1] if running() else None
    is_inside = caller is not None and caller.module is module
    module_policy = root.module_policy(module)
    if _labels.is_decision(module_policy, method):
        module_policy = module_policy.decision
    if caller is not None and (caller.keeps_dtype or is_inside):
        keeps_dtype = caller.keeps_dtype
    else:
        keeps_dtype = _keeps_dtype(module, module_policy, (args, kwargs))
        keeps_dtype = keeps_dtype or _labels.is_exact(module_policy, method, (args, kwargs))
    prepare(module, module_policy, keeps_dtype)
    if root.is_by_path:
        key_scopes(module)
    if method == "setup":
        _check_mixins(type(module), root.path_of(module), module_policy)
        return call(*args, **kwargs)
    is_function = not hasattr(type(module), method)
    is_lifted = isinstance(module.parent, Scope) and not is_inside
    # The transformation whose body is called, such as "scan(block)".
    lifted = next(reversed(module.scope.debug_path), "") if is_lifted else ""
    is_primal = lifted.startswith("custom_vjp(") and kwargs.get("needs_residual") is False
    if is_primal and any(_compat.trace_of(leaf) for leaf in jax.tree.leaves(args)):
        text = f"A gradient of this call of {module.name!r} would run the {LATE}"
        _core.warn_user(text)
    under_policy = MethodCall(
        module, module_policy, method, _own_params, keeps_dtype, is_function, lifted
    )
    return under_policy.run(method_under_policy(under_policy, call), (args, kwargs))


def _keeps_dtype(module: Any, module_policy: ModulePolicy, operands: PyTree) -> bool:
    """Returns True if a layer of Flax computes in its author's dtype."""
    name = module_policy.traits.dtype
    if not name:
        return False
    dtype = module.__dict__.get("_jaxmp_author", {}).get(name, getattr(module, name))
    is_chosen = is_complex(dtype) or is_complex(getattr(module, "param_dtype", None))
    return is_chosen or keeps_dtype((operands, _params(module)))


def _params(module: Any) -> Mapping[str, PyTree]:
    return module.scope.variables().get(_core.PARAMS, {})


def _own_params(module: Any) -> list[Any]:
    own = (value for value in _params(module).values() if not isinstance(value, Mapping))
    return jax.tree.leaves(list(own))


# ---------------------------------------------------------------------------
# Variables
# ---------------------------------------------------------------------------

# Collections that `init` returns in the author's dtypes. Others have those that `apply` writes.
_AUTHORS_COLLECTIONS = (_core.PARAMS, _core.BATCH_STATS)


def add_policy_state(
    module: Any, variables: PyTree, wrapped_init: Callable[[], tuple[PyTree, PyTree]]
) -> PyTree:
    """Adds to the variables of a model what its policies require.

    Caches and other computed state get the dtypes that `apply` writes, and layers with delayed
    scaling get their state. Parameters and batch statistics keep the dtypes that the author of the
    model chose.

    Args:
      module: the wrapped model.
      variables: the result of `init` without policies.
      wrapped_init: returns the results of `init_with_output` under the policies.
    """
    computed = {
        name: collection
        for name, collection in variables.items()
        if name not in _AUTHORS_COLLECTIONS
        and any(map(_core.is_castable, jax.tree.leaves(collection)))
    }
    scaling = type(module)._jaxmp_policies.fp8
    has_state = scaling is not None and scaling.is_stateful
    if not computed and not has_state:
        return variables
    shapes = jax.eval_shape(lambda: wrapped_init()[1])
    cast = {name: cast_like(value, shapes[name]) for name, value in computed.items()}
    variables = {**variables, **cast}
    if not has_state or OVERWRITE not in shapes:
        return variables
    # The state before the first step is zero. State of the author's own layers is kept.
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes[OVERWRITE])
    state = {**flatten_dict(zeros), **flatten_dict(variables.get(OVERWRITE, {}))}
    return {**variables, OVERWRITE: unflatten_dict(state)}


@contextlib.contextmanager
def keeping_finite_statistics(scope: Scope) -> Iterator[None]:
    """Runs a block that writes only finite batch statistics.

    A loop may store them anywhere, so that the optimizer, which skips the step, cannot restore
    them.
    """
    before = _statistics(scope)
    yield
    for name, new in _statistics(scope).items():
        if name in before and _core.are_alike(new, before[name]):
            scope.put_variable(_core.BATCH_STATS, name, _core.keep_finite(new, before[name]))


def _statistics(scope: Scope) -> Mapping[str, PyTree]:
    """Returns a copy of the batch statistics."""
    return jax.tree.map(lambda leaf: leaf, scope.variables().get(_core.BATCH_STATS, {}))


# ---------------------------------------------------------------------------
# Module paths and required rules
# ---------------------------------------------------------------------------


def check_required_rules(
    module: Any, rngs: PyTree, args: tuple[PyTree, ...], kwargs: Mapping[str, PyTree]
) -> None:
    """Raises an error if a required rule matches nothing in a wrapped model.

    Args:
      module: the wrapped model. A part of a model, which lacks the other paths, is not checked.
      rngs, args, kwargs: arguments of its `init`.
    """
    policies = type(module)._jaxmp_policies
    if not type(module)._jaxmp_origin and any(rule.required for rule in policies.all_rules):
        check_required(policies, module_paths(module, args, kwargs, rngs, {}))


def module_paths(
    model: nn.Module,
    args: tuple[PyTree, ...],
    kwargs: Mapping[str, PyTree],
    rngs: PyTree,
    outputs: dict[str, int | None],
) -> dict[str, type | None]:
    """Lists every path that a rule can match; adds the numbers of outputs to `outputs`."""
    paths: dict[str, type | None] = {}

    def record(
        call: Callable[..., PyTree],
        args: tuple[PyTree, ...],
        kwargs: dict[str, PyTree],
        where: nn.module.InterceptorContext,
    ) -> PyTree:
        cls = type(where.module)
        if where.module.scope is not None and hasattr(cls, where.method_name):
            key_scopes(where.module)
            path = "/".join(where.module.path)
            paths.setdefault(path, author_class(cls))
            outputs[path] = LINEN_LAYERS.outputs(where.module, where.module.parent)
        return call(*args, **kwargs)

    rngs = jax.random.key(0) if rngs is None else rngs
    with _compat.context(policies=Plain(object())), nn.intercept_methods(record):
        try:
            traced, _ = trace(model.init, (rngs, *args), dict(kwargs))
            variables = traced.results(traced.closed.out_avals)
        except jax.errors.JAXTypeError:  # The model reads values of arrays.
            variables = model.init(rngs, *args, **kwargs)
    names = [path for path, _ in _core.leaves_with_path(variables.get("params", {}))]
    return {**paths, **dict.fromkeys(map(_core.parameter_path, names))}
