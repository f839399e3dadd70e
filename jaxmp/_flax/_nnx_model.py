"""Applies policies to NNX models, and explains them."""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
from flax import linen, nnx
from jax.sharding import NamedSharding

from jaxmp import _core
from jaxmp._core import Path, PyTree
from jaxmp._flax._layer_table import author_class
from jaxmp._flax._missing_precision import low_precision_share
from jaxmp._flax._nnx_cast_on_read import bound_of, is_member
from jaxmp._flax._nnx_layers import NNX_LAYERS
from jaxmp._flax._nnx_subclass import bind, unbind
from jaxmp._flax._shardings import SPEC
from jaxmp._policies import _load, _required
from jaxmp._policies._resolve import ResolvedPolicy, resolve_policy, storage_dtype
from jaxmp.errors import CompositionError, RecipeWarning, RuleError

M = TypeVar("M", bound=nnx.Module)


# ---------------------------------------------------------------------------
# Modules and their paths
# ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ModuleEntry:
    """Module of a model, with all paths that lead to it.

    Attributes:
      module: the module.
      paths: its paths; more than one if several modules share it.
      has_own_policies: it is a model with policies of its own, or a part of one.
      params: path below the module and Variable of each parameter.
    """

    module: nnx.Module
    paths: list[Path]
    has_own_policies: bool
    params: list[tuple[Path, nnx.Param[Any]]]


def find_modules(model: nnx.Module) -> list[ModuleEntry]:
    """Lists the modules of a model, each once, the root first.

    Raises:
      CompositionError: if a bridge contains modules that NNX policies do not reach.
    """
    entries: dict[int, ModuleEntry] = {}
    root = bound_of(model)

    def visit(module: nnx.Module, path: Path, open_ids: frozenset[int], own: bool) -> None:
        bound = bound_of(module)
        own = own or (bound is not None and (root is None or bound.policies != root.policies))
        entry = entries.get(id(module))
        if entry is None:
            entry = entries[id(module)] = ModuleEntry(module, [], own, [])
        is_first = not entry.paths
        entry.paths.append(path)
        for names, leaf in _members(module):
            if isinstance(leaf, nnx.Module):
                if id(leaf) not in open_ids:
                    visit(leaf, path + names, open_ids | {id(leaf)}, own)
            elif is_first and isinstance(leaf, nnx.Param):
                entry.params.append((names, leaf))
        if is_first and not own and isinstance(module, (nnx.bridge.ToNNX, nnx.bridge.Module)):
            _check_bridge(module, path)

    visit(model, (), frozenset({id(model)}), own=False)
    return list(entries.values())


def _check_bridge(module: nnx.bridge.ToNNX | nnx.bridge.Module, path: Path) -> None:
    if isinstance(module, nnx.bridge.Module):
        raise CompositionError(
            f"The {type(module).__name__} at {'/'.join(path)!r} is an nnx.bridge.Module, which "
            "creates its layers while it runs, so policies cannot be applied to them beforehand. "
            "Apply them to the whole function: jaxmp.autocast(model.apply, policies)."
        )
    inner = module.to_nnx__module
    if isinstance(inner, linen.Module) and not hasattr(type(inner), "_jaxmp_class"):
        raise CompositionError(
            f"The ToNNX at {'/'.join(path)!r} contains a Linen {type(inner).__name__}, which NNX "
            "policies do not reach. Apply its policies before the bridge: "
            f"nnx.bridge.ToNNX(recipe.wrap({type(inner).__name__}(...)), "
            "rngs=rngs)."
        )


def _members(module: nnx.Module) -> list[tuple[Path, Any]]:
    """Lists the modules and Variables directly below a module, also in lists and dicts."""
    return [
        ((name, *_core.path_names(key_path)), leaf)
        for name, value in sorted(vars(module).items())
        if not name.startswith("_pytree__")
        for key_path, leaf in jax.tree.leaves_with_path(value, is_leaf=is_member)
        if is_member(leaf)
    ]


def paths_of(entries: list[ModuleEntry]) -> dict[str, type | None]:
    """Returns every path that a rule can match; a shared module has each of its paths.

    Returns:
      A dict from module path to the module's class, `''` being the model itself, and from
      `path:name` to None for every parameter.
    """
    located = [(path, entry) for entry in entries for path in entry.paths]
    paths = {"/".join(path): author_class(type(entry.module)) for path, entry in located}
    # As in the model's state: `a/layers:0` for a parameter in a list.
    names = (path + name for path, entry in located for name, _ in entry.params)
    return {**paths, **dict.fromkeys(map(_core.parameter_path, names))}


# ---------------------------------------------------------------------------
# Models
# ---------------------------------------------------------------------------


def apply_policy(model: M, recipe: _load.RecipeLike, *, shardings: PyTree = None) -> M:
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
      CompositionError: if `model` contains a Linen module without policies, or an
        `nnx.bridge.Module`, which creates its layers while it runs.
      JaxmpError: if `shardings` contains a path that is not that of a Variable of the model, or
        lacks one of a parameter without metadata; if a sharding has more dimensions than its
        parameter, does not split it evenly, or is on another mesh.
      PolicyError: if a policy is not valid, or names a float8 dtype.
      RuleError: if a required rule matches nothing, or the paths of a shared module have different
        policies.
    """
    policies = _load.as_policy_map(recipe)
    _required.check_module_dtypes(policies)
    by_path = {} if shardings is None else _core.shardings_by_path(shardings, "shardings")
    entries = find_modules(model)
    _check_shardings(model, by_path)
    _required.check_required(policies, paths_of(entries))
    _check_shared(entries, policies)
    variables, (graphdef, state) = _separated(entries, policies, by_path), nnx.split(model)
    replace = lambda leaf: variables.get(id(leaf), leaf)
    copy: Any = nnx.merge(graphdef, jax.tree.map(replace, state, is_leaf=is_member))
    copies = [entry for entry in find_modules(copy) if not entry.has_own_policies]
    for entry in copies:
        unbind(entry.module)
    outputs = _outputs(copies)
    for entry in copies:
        path = _deciding_path(entry, policies)
        bind(entry.module, policies, path, outputs["/".join(path)])
    return copy


def explain_model(
    model: nnx.Module, recipe: _load.RecipeLike, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]
) -> tuple[_required.PolicyExplanation, Callable[..., PyTree] | None, tuple[PyTree, ...]]:
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
    policies, entries = _load.as_policy_map(recipe), find_modules(model)
    paths = paths_of(entries)
    _required.check_required(policies, paths)
    outputs = _outputs(entries)
    if not args and not kwargs:
        return _required.explain_modules(policies, paths, outputs), None, ()
    wrapped = apply_policy(model, policies)
    definition, state = nnx.split(wrapped)
    # Nothing depends on the values of parameters, so they are not copied.
    state = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)

    def call(state: PyTree, *args: PyTree, **kwargs: PyTree) -> PyTree:
        return nnx.merge(definition, state)(*args, **kwargs)  # pyright: ignore

    with warnings.catch_warnings():
        # The share itself is reported.
        warnings.simplefilter("ignore", RecipeWarning)
        share = low_precision_share(call, state, *args, **kwargs)
    search = bound_of(wrapped).search  # pyright: ignore[reportOptionalMemberAccess]
    explanation = _required.explain_modules(policies, paths, outputs, *search.reasons(), share)
    return explanation, call, (state,)


# ---------------------------------------------------------------------------
# Modules and parameters with several paths
# ---------------------------------------------------------------------------


def _paths_of_params(
    entries: Iterable[ModuleEntry],
) -> Iterable[tuple[nnx.Param[Any], list[Path]]]:
    """Returns each parameter of some modules, with all its paths."""
    params: dict[int, tuple[nnx.Param[Any], list[Path]]] = {}
    for entry in entries:
        for name, param in entry.params:
            _, paths = params.setdefault(id(param), (param, []))
            paths += [path + name for path in entry.paths]
    return params.values()


def _check_shared(entries: list[ModuleEntry], policies: _load.PolicyMap) -> None:
    """Raises an error if a module or a parameter has different policies under its paths."""
    for entry in entries:
        if not entry.has_own_policies:
            _check_shared_module(entry, policies)
    for _, paths in _paths_of_params(entries):
        stored = {_core.parameter_path(path): storage_dtype(policies, path) for path in paths}
        _check_equal("The parameter", stored, "p=f32")


def _check_shared_module(entry: ModuleEntry, policies: _load.PolicyMap) -> None:
    name = f"The {author_class(type(entry.module)).__name__}"
    resolved = {"/".join(path): _resolve(entry, path, policies) for path in entry.paths}
    _check_equal(name, {path: each.policy for path, each in resolved.items()}, "c=f32")
    # Modules with equal policies differ if the rule of one path names an output dtype.
    rules = {path: each.rule if each.rule_names_output else None for path, each in resolved.items()}
    required = [rule for rule in rules.values() if rule is not None and rule.required]
    if required:
        output = f"o={_core.short_name(required[0].output_dtype)}"
        outputs = {path: output if rule else "the compute dtype" for path, rule in rules.items()}
        _check_equal(name, outputs, output)


def _check_equal(subject: str, resolved: Mapping[str, Any], fix: str) -> None:
    if len(set(resolved.values())) < 2:
        return
    listed = ", ".join(f"{path!r}: {value}" for path, value in resolved.items())
    first = next(iter(resolved))
    raise RuleError(
        f"{subject} has several paths, and its policies differ ({listed}). It is one object and "
        "can have only one policy. Give all its paths the same rule, such as "
        f"Rule('re:{'|'.join(map(re.escape, resolved))}', {fix!r}), or exclude {first!r}."
    )


def _outputs(entries: Iterable[ModuleEntry]) -> dict[str, int | None]:
    """Returns path of a module -> number of outputs of a linear layer; None for other modules."""
    modules = {path: entry.module for entry in entries for path in entry.paths}
    return {
        "/".join(path): NNX_LAYERS.outputs(module, modules.get(path[:-1]))
        for path, module in modules.items()
    }


def _resolve(entry: ModuleEntry, path: Path, policies: _load.PolicyMap) -> ResolvedPolicy:
    """Resolves the policy of a module under one of its paths."""
    return resolve_policy(policies, path, author_class(type(entry.module)))


def _deciding_path(entry: ModuleEntry, policies: _load.PolicyMap) -> Path:
    """Returns the path that determines the policy of a module.

    If there are several, it is the first whose rule does not name an output dtype: an optional rule
    for `lm_head` must not widen the output of an embedding with the same table. Otherwise, all
    paths agree.
    """
    unwidened = (
        path for path in entry.paths if not _resolve(entry, path, policies).rule_names_output
    )
    return next(unwidened, entry.paths[0])


# ---------------------------------------------------------------------------
# Storage dtypes and shardings
# ---------------------------------------------------------------------------


def _check_shardings(model: nnx.Module, shardings: Mapping[Path, NamedSharding]) -> None:
    """Raises an error if shardings are not those of a model's parameters."""
    if shardings:
        flat = _core.leaves_with_path(nnx.state(model))
        shapes = {names: np.shape(leaf) for names, leaf in flat}
        params = nnx.to_flat_state(nnx.state(model, nnx.Param))
        required = (
            tuple(map(str, path))
            for path, param in params
            if param.get_metadata().get("out_sharding") is None and tuple(map(str, path)) in shapes
        )
        _core.check_tree("shardings", shardings, "the model", shapes, required)


def _separated(
    entries: list[ModuleEntry], policies: _load.PolicyMap, shardings: Mapping[Path, NamedSharding]
) -> dict[int, nnx.Variable[Any]]:
    """Returns id -> copy, for the Variables of parameters with a storage dtype or a sharding."""
    copies: dict[int, nnx.Variable[Any]] = {}
    for param, paths in _paths_of_params(e for e in entries if not e.has_own_policies):
        value = param.get_raw_value()
        sharding = next((shardings[path] for path in paths if path in shardings), None)
        is_stored = _core.is_castable(value) and value.dtype != storage_dtype(policies, paths[0])
        if is_stored or sharding is not None:
            copies[id(param)] = param.copy()
            if sharding is not None:
                copies[id(param)].set_metadata(SPEC, sharding.spec)
    return copies
