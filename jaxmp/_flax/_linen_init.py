"""Initialization of wrapped Linen models: their variables, module paths and required rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxmp._autocast._resolve import trace
from jaxmp._core._compat import context
from jaxmp._core._trees import is_castable, leaves_with_path, parameter_path
from jaxmp._core._typing import PyTree
from jaxmp._flax._casts import cast_like
from jaxmp._flax._linen_interceptor import Plain, key_scopes
from jaxmp._flax._linen_layers import LINEN_LAYERS
from jaxmp._overwritten import OVERWRITE
from jaxmp._policies._required import check_required

# ---------------------------------------------------------------------------
# Variables
# ---------------------------------------------------------------------------

# Collections that `init` returns in the author's dtypes. Others have those that `apply` writes.
_AUTHORS_COLLECTIONS = ("params", "batch_stats")


def add_policy_state(module: Any, variables: PyTree, wrapped_init: Callable[[], PyTree]) -> PyTree:
    """Adds to the variables of a model what its policies require.

    Caches get the dtypes that `apply` writes, and layers with delayed scaling get their state.
    Parameters and batch statistics keep the dtypes that the author of the model chose.

    Args:
      module: the wrapped model.
      variables: the result of `init` without policies.
      wrapped_init: returns the result of `init` under the policies.
    """
    variables = _cast_computed(variables, wrapped_init)
    return _add_fp8_state(module, variables, wrapped_init)


def _cast_computed(variables: PyTree, wrapped_init: Callable[[], PyTree]) -> PyTree:
    """Casts caches and other computed state to the dtypes that `apply` writes."""
    computed = [
        name
        for name, collection in variables.items()
        if name not in _AUTHORS_COLLECTIONS
        and any(is_castable(leaf) for leaf in jax.tree.leaves(collection))
    ]
    if not computed:
        return variables
    shapes = jax.eval_shape(wrapped_init)
    return {
        name: cast_like(value, shapes[name]) if name in computed else value
        for name, value in variables.items()
    }


def _add_fp8_state(module: Any, variables: PyTree, wrapped_init: Callable[[], PyTree]) -> PyTree:
    """Adds the state of delayed scaling, which `init` without policies does not create."""
    scaling = type(module)._jaxmp_policies.fp8
    if scaling is None or not scaling.is_stateful:
        return variables
    shapes = jax.eval_shape(wrapped_init).get(OVERWRITE)
    if shapes is None:
        return variables
    # The state before the first step is zero. State of the author's own layers is kept.
    fresh = flatten_dict(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes))
    kept = flatten_dict(variables.get(OVERWRITE, {}))
    return {**variables, OVERWRITE: unflatten_dict({**fresh, **kept})}


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
    if not type(module)._jaxmp_origin and any(rule.required for rule in policies.rules):
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
            paths.setdefault(path, getattr(cls, "_jaxmp_class", cls))
            outputs[path] = LINEN_LAYERS.outputs(where.module)
        return call(*args, **kwargs)

    rngs = jax.random.key(0) if rngs is None else rngs
    with context(policies=Plain(object())), nn.intercept_methods(record):
        traced, _ = trace(model.init, (rngs, *args), dict(kwargs))
    variables = traced.results(traced.closed.out_avals)
    names = [path for path, _ in leaves_with_path(variables.get("params", {}))]
    return {**paths, **dict.fromkeys(map(parameter_path, names))}
