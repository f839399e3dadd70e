"""Applies policies to Linen models, and explains them."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any, TypeVar, cast

import flax.linen as nn
import jax
from flax.core import DenyList

from jaxmp._autocast._resolve import trace
from jaxmp._core._shardings import shardings_by_path
from jaxmp._core._typing import PyTree
from jaxmp._flax import _linen_init
from jaxmp._flax._check_model import check_model
from jaxmp._flax._linen_subclass import wrapped_class
from jaxmp._flax._share import low_precision_share
from jaxmp._policies._device import note_policies
from jaxmp._policies._required import (
    PolicyExplanation,
    check_module_dtypes,
    check_required,
    explain_modules,
)
from jaxmp._recipe_files._load import RecipeLike, as_policy_map
from jaxmp.errors import CompositionError, RecipeWarning

M = TypeVar("M", bound=nn.Module)


def apply_policy(model: M, recipe: RecipeLike, *, shardings: PyTree = None) -> M:
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
      CompositionError: if `model` is not an unbound Linen module; from `apply`, if it contains an
        NNX module without policies.
      JaxmpError: if the shardings are on different meshes; from `apply`, if `shardings` contains a
        path that is not that of a parameter, or lacks one of a parameter without metadata; if a
        sharding has more dimensions than its parameter, does not split it evenly, or is on another
        mesh.
      PolicyError: if a policy is not valid, or names a float8 dtype.
    """
    check_model(model, nn.Module)
    _check_unbound(model)
    policies = as_policy_map(recipe)
    check_module_dtypes(policies)
    note_policies(policies)
    cls = wrapped_class(getattr(type(model), "_jaxmp_class", type(model)), policies)
    fields = [field.name for field in dataclasses.fields(cls) if field.init]
    # The parent is not copied: a new module belongs to the method in which it is created.
    new = cls(**{name: getattr(model, name) for name in fields if name != "parent"})
    if shardings is not None:
        by_path = shardings_by_path(shardings, "shardings")
        object.__setattr__(new, "_jaxmp_shardings", by_path)
    return cast(M, new)


def module_paths(
    model: nn.Module, *args: PyTree, rngs: PyTree = None, **kwargs: PyTree
) -> dict[str, type | None]:
    """Lists every path that a rule can match in a model, without computing anything.

    Returns:
      A dict from module path to the module's class, `''` being the model itself, and from
      `path:name` to None for every parameter.
    """
    check_model(model, nn.Module)
    return _linen_init.module_paths(model, args, kwargs, rngs, {})


def explain_model(
    model: nn.Module, recipe: RecipeLike, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]
) -> tuple[PolicyExplanation, Callable[..., PyTree], tuple[PyTree, ...]]:
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
    check_model(model, nn.Module)
    policies, outputs = as_policy_map(recipe), {}
    paths = _linen_init.module_paths(model, args, kwargs, None, outputs)
    check_required(policies, paths)
    explanation = explain_modules(policies, paths, outputs)
    rngs = jax.random.key(0)
    wrapped: Any = apply_policy(model, policies)
    with warnings.catch_warnings():
        # The share itself is reported.
        warnings.simplefilter("ignore", RecipeWarning)
        traced, _ = trace(wrapped.init, (rngs, *args), kwargs)
        shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in traced.closed.out_avals]
        variables = traced.results(shapes)
        call = functools.partial(wrapped.apply, rngs=rngs, mutable=DenyList("params"))
        share = low_precision_share(call, variables, *args, **kwargs)
    explanation = dataclasses.replace(explanation, low_precision_share=share)
    return explanation, call, (variables,)


def _check_unbound(model: nn.Module) -> None:
    if model.scope is not None:
        raise CompositionError(
            f"The {type(model).__name__} at path {'/'.join(model.scope.path)!r} is already bound "
            "to variables. Apply the recipe first: recipe.wrap(model).bind(variables); inside a "
            "compact method, recipe.wrap(Module(..., parent=None))."
        )
