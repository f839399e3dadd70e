"""Labels of the arguments and results of modules, by which the search of a model finds values.

The primitive `name` labels an array while a model is searched. In other calls, the labels that the
search returned select the values that are not rounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxmp._core._compat import current_context
from jaxmp._core._dtypes import is_16bit
from jaxmp._core._typing import PyTree
from jaxmp._flax._casts import IsLeaf, ModulePolicy
from jaxmp._flax._layer_table import LayerTraits, author_class


class CalledModule(NamedTuple):
    """Module that was called.

    Attributes:
      cls: name of its class.
      method: the method, if it is not a forward pass; otherwise "".
      is_low: True if its matmuls should read 16 bits.
    """

    cls: str
    method: str
    is_low: bool


class Labeling:
    """`Context.decisions` while a model is traced with labels: the modules that were called."""

    def __init__(self) -> None:
        self.modules: dict[str, CalledModule] = {}
        # Labels of the results of linear layers.
        self.layers: set[str] = set()


ARGUMENT, RESULT = "argument", "result"
PREFIX = "jaxmp "


def label_owner(path: str, method: str, kind: str) -> str:
    """Returns the first part of the labels of the arguments or results of a method."""
    return f"{PREFIX}{path}.{method} {kind} "


def labeled(
    module_policy: ModulePolicy, method: str, kind: str, tree: PyTree, is_leaf: IsLeaf
) -> PyTree:
    """Labels the floating arrays of arguments or results while a model is searched.

    Args:
      module_policy, method: of the module.
      kind: `ARGUMENT` or `RESULT`.
      tree: the arguments or results.
      is_leaf: as in `jax.tree.map`.
    """
    if not isinstance(current_context().decisions, Labeling):
        return tree
    owner = label_owner(module_policy.resolved.path, method, kind)
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_leaf)
    is_float = lambda leaf: isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.floating)
    return structure.unflatten(
        checkpoint_name(leaf, f"{owner}{n}") if is_float(leaf) else leaf
        for n, leaf in enumerate(leaves)
    )


def unrounded(
    module_policy: ModulePolicy, method: str, kind: str, tree: PyTree, is_leaf: IsLeaf
) -> frozenset[int]:
    """Returns the ids of the arrays that are not rounded; arguments as in `labeled`."""
    decisions: Any = current_context().decisions
    if not decisions or isinstance(decisions, Labeling):
        return frozenset()
    owner = label_owner(module_policy.resolved.path, method, kind)
    leaves = enumerate(jax.tree.leaves(tree, is_leaf=is_leaf))
    return frozenset(id(leaf) for n, leaf in leaves if f"{owner}{n}" in decisions)


def is_decision(traits: LayerTraits, cls: type, path: Sequence[str], method: str) -> bool:
    """Returns True if a method of a module is the matmul of a layer with an unrounded result.

    A method that a user overrides in a subclass may multiply by the kernel itself.
    """
    decisions: Any = current_context().decisions
    name = "/".join(path)
    is_matmul = method == ("attend" if traits.embedding else "__call__")
    is_layer = bool(traits.kernel or traits.embedding) and not traits.is_convolution
    if not decisions or not is_matmul or not is_layer:
        return False
    author, owner = author_class(cls), traits.registered or traits.layer
    if getattr(author, method) is not getattr(owner, method, None):
        return False
    label = f"{label_owner(name, method, RESULT)}0"
    if isinstance(decisions, Labeling):
        decisions.layers.add(label)
        return False
    return label in decisions


def note_module(module_policy: ModulePolicy, method: str, *, is_forward: bool) -> None:
    """Records a call of a module while a model is searched."""
    labeling = current_context().decisions
    if isinstance(labeling, Labeling):
        traits, dtype = module_policy.traits, module_policy.policy.compute_dtype
        # Those of Flax's layers that do not are meant to be in FP32.
        is_low = is_16bit(dtype) and not (traits.is_norm or traits.upcasts_params or traits.dtype)
        module = CalledModule(module_policy.cls.__name__, "" if is_forward else method, is_low)
        labeling.modules[module_policy.resolved.path] = module
