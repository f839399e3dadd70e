"""Paths of Linen modules in the cache key of `nn.jit`.

`nn.jit` shares one trace between equal modules, whatever their paths, so a rule by path would reach
only the first of them. The flags of a scope are part of the cache key. The path is added to the
flags of each scope below the root before the module of that scope is called.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
from flax.core import Scope, freeze

from jaxmp._recipe_files._load import PolicyMap


def is_by_path(policies: PolicyMap) -> bool:
    """Returns True if modules of one class can have different policies."""
    return any(rule.path is not None for rule in policies.rules)


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
    for value in [value for value in vars(module).values() if _may_contain_modules(type(value))]:
        for child in modules_in(value):
            if child.scope is not None and "push" not in vars(child.scope):
                key_scopes(child)


def modules_in(value: object) -> list[nn.Module]:
    """Returns the modules in an attribute: the value itself, or those in a container."""
    if not _may_contain_modules(type(value)):
        return []
    return [leaf for leaf in jax.tree.leaves(value) if isinstance(leaf, nn.Module)]


@functools.cache
def _may_contain_modules(cls: type) -> bool:
    return issubclass(cls, (nn.Module, tuple, list, Mapping))
