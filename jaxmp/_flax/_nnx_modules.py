"""Modules of an NNX model and the paths that lead to them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from flax import linen, nnx

from jaxmp._core import _trees
from jaxmp._flax._nnx_bound import Path, author_class, bound_of
from jaxmp._flax._nnx_cast_on_read import is_member
from jaxmp._flax._nnx_layers import NNX_LAYERS
from jaxmp.errors import CompositionError

# Module path -> class of the module; `path:name` -> None for parameters.
ModulePaths = Mapping[str, type | None]


@dataclasses.dataclass(frozen=True)
class ModuleEntry:
    """Module of a model, with all paths that lead to it.

    Attributes:
      module: the module.
      paths: its paths; more than one if several modules share it.
      has_own_policies: it is a model with policies of its own, or a part of one.
      params: name and Variable of each parameter; `layers/0` for one in a list.
    """

    module: nnx.Module
    paths: list[Path]
    has_own_policies: bool
    params: list[tuple[str, nnx.Param[Any]]]


def find_modules(model: nnx.Module, path: Path = ()) -> list[ModuleEntry]:
    """Lists the modules of a model at `path`, each once, the root first.

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
                entry.params.append(("/".join(names), leaf))
        if is_first and not own and isinstance(module, (nnx.bridge.ToNNX, nnx.bridge.Module)):
            _check_bridge(module, path)

    visit(model, path, frozenset({id(model)}), own=False)
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
        ((name, *_trees.path_names(key_path)), leaf)
        for name, value in sorted(vars(module).items())
        if not name.startswith("_pytree__")
        for key_path, leaf in jax.tree.leaves_with_path(value, is_leaf=is_member)
        if is_member(leaf)
    ]


def module_paths(entries: list[ModuleEntry]) -> dict[str, type | None]:
    """Returns all paths that a rule can match."""
    paths: dict[str, type | None] = {}
    for entry in entries:
        for path in entry.paths:
            paths["/".join(path)] = author_class(entry.module)
    for entry in entries:
        for path in entry.paths:
            paths |= {_param_path(path, name): None for name, _ in entry.params}
    return paths


def layer_outputs(entries: list[ModuleEntry]) -> dict[str, int | None]:
    """Returns the number of outputs of each module, by its paths; None if not a linear layer."""
    modules = ((path, entry.module) for entry in entries for path in entry.paths)
    return {"/".join(path): NNX_LAYERS.outputs(module) for path, module in modules}


def _param_path(owner: Path, name: str) -> str:
    """Returns the path of a parameter as in the model's state: `a/layers:0` for one in a list."""
    return _trees.parameter_path((*owner, *name.split("/")))
