"""Applies policies to NNX models, and explains them."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import TypeVar

import jax
from flax import nnx

from jaxmp._core._shardings import shardings_by_path
from jaxmp._core._typing import PyTree
from jaxmp._flax import _nnx_binding
from jaxmp._flax._check_model import check_model
from jaxmp._flax._nnx_binding import bind_model
from jaxmp._flax._share import low_precision_share
from jaxmp._policies._device import note_policies
from jaxmp._policies._required import (
    PolicyExplanation,
    check_module_dtypes,
    check_required,
    explain_modules,
)
from jaxmp._recipe_files._load import RecipeLike, as_policy_map
from jaxmp.errors import RecipeWarning

M = TypeVar("M", bound=nnx.Module)


def apply_policy(model: M, recipe: RecipeLike, *, shardings: PyTree = None) -> M:
    """Returns a model that computes under a recipe: `Recipe.wrap` for NNX.

    The result shares its Variables with `model`: training one trains the other. A parameter that a
    rule stores in another dtype gets a new Variable, which keeps value and dtype until `Optimizer`
    or `recipe.cast_params` casts it. Delayed scaling adds FP8 state of type `OverwriteWithGradient`
    to the layers of the result, but not to `model`.

    Args:
      model: a `flax.nnx.Module`. If it has policies, they are replaced. Submodules to which other
        policies were applied before keep them.
      recipe: a recipe or policies. Paths are those of `nnx.iter_modules(model)`: attribute names
        and list indices, joined by `/`.
      shardings: as in `Recipe.wrap`, in a tree like `nnx.state(model, nnx.Param)`. Such a parameter
        gets a new Variable with the sharding in its metadata.

    Returns:
      A model whose modules are instances of subclasses of their classes.

    Raises:
      CompositionError: if `model` is not an NNX module, or contains a Linen module without policies
        or an `nnx.bridge.Module`, which creates its layers while it runs.
      JaxmpError: if `shardings` contains a path that is not that of a Variable of the model, or
        lacks one of a parameter without metadata; if a sharding has more dimensions than its
        parameter, does not split it evenly, or is on another mesh.
      PolicyError: if a policy is not valid, or names a float8 dtype.
      RuleError: if a required rule matches nothing, or the paths of a shared module have different
        policies.
    """
    check_model(model, nnx.Module)
    policies = as_policy_map(recipe)
    check_module_dtypes(policies)
    note_policies(policies)
    by_path = {} if shardings is None else shardings_by_path(shardings, "shardings")
    return bind_model(model, policies, by_path)


def module_paths(model: nnx.Module) -> dict[str, type | None]:
    """Lists every path that a rule can match in a model.

    Returns:
      A dict from module path to the module's class, `''` being the model itself, and from
      `path:name` to None for every parameter. A shared module is listed under each of its paths.
    """
    check_model(model, nnx.Module)
    return _nnx_binding.module_paths(_nnx_binding.find_modules(model))


def explain_model(
    model: nnx.Module, recipe: RecipeLike, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]
) -> tuple[PolicyExplanation, Callable[..., PyTree] | None, tuple[PyTree, ...]]:
    """Explains the policies of a model.

    Args:
      model: an NNX module.
      recipe: as in `apply_policy`.
      args, kwargs: arguments of the model. If there are any, the model is traced.

    Returns:
      The explanation, a function that calls the wrapped model (None if there are no arguments), and
      its arguments before `args`.

    Raises:
      RuleError: if a required rule matches nothing.
      AttentionError: if a mask contradicts its declaration.
    """
    policies, paths = as_policy_map(recipe), module_paths(model)
    check_required(policies, paths)
    outputs = _nnx_binding.layer_outputs(_nnx_binding.find_modules(model))
    explanation = explain_modules(policies, paths, outputs)
    if not args and not kwargs:
        return explanation, None, ()
    definition, state = nnx.split(apply_policy(model, policies))
    # Nothing depends on the values of parameters, so they are not copied.
    state = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)

    def call(state: PyTree, *args: PyTree, **kwargs: PyTree) -> PyTree:
        return nnx.merge(definition, state)(*args, **kwargs)  # pyright: ignore

    with warnings.catch_warnings():
        # The share itself is reported.
        warnings.simplefilter("ignore", RecipeWarning)
        share = low_precision_share(call, state, *args, **kwargs)
    explanation = dataclasses.replace(explanation, low_precision_share=share)
    return explanation, call, (state,)
