"""Roles of the leaves of a training state.

The classes and collections that own a leaf determine its role; the name of a parameter never does.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax.tree_util as jtu
import optax

from jaxmp import _core
from jaxmp._core import PyTree
from jaxmp._gradients._loss_scale import LossScale
from jaxmp.fp8 import _overwritten
from jaxmp.optim._master import MasterParamsState
from jaxmp.optim._moments import MOMENT_COUNT, MomentState
from jaxmp.optim._skip import SkipStats

PARAMETER, MASTER, REMAINDER, MOMENT = "parameter", "master", "remainder", "moment"
AVERAGE, STATISTICS, INPUT = "average", "batch statistics", "input"
LOSS_SCALE, FP8, COUNTER, OTHER = "loss_scale", "fp8", "counter", ""

KeyPath = tuple[Any, ...]
# Collections of Flax, which are also fields of train states.
COLLECTIONS = {
    _overwritten.OVERWRITE: FP8,
    _core.PARAMS: PARAMETER,
    _core.BATCH_STATS: STATISTICS,
}
# Fields of Flax's train states and NNX optimizers, and of the states of users.
OPTIMIZER_FIELDS = frozenset({"opt_state", "optimizer_state"})


class StateLeaf(NamedTuple):
    """A leaf, or a node above it, of a training state.

    path: its key path.
    value: the leaf.
    role: one of the roles of this module; `OTHER` if no class or collection determines it.
    in_optimizer: True if the state of an optimizer contains it.
    owner: the innermost loss scale or state of an optimizer that contains it; None outside of them.
    below: the part of `path` below the owner.
    """

    path: KeyPath
    value: Any
    role: str = OTHER
    in_optimizer: bool = False
    owner: Any = None
    below: KeyPath = ()

    @property
    def field(self) -> str:
        """The field of the owner that contains the leaf."""
        return "/".join(_core.path_names(self.below[:1]))


def leaves_with_roles(tree: PyTree) -> list[StateLeaf]:
    """Returns the leaves of a state with their roles, in flattening order."""
    return list(_leaves(StateLeaf((), tree)))


def _leaves(above: StateLeaf) -> Iterator[StateLeaf]:
    is_below = lambda node: node is not above.value
    for keys, child in jtu.tree_flatten_with_path(above.value, is_leaf=is_below)[0]:
        if keys:
            yield from _leaves(_child(above, keys, child))
        else:
            default = MOMENT if above.in_optimizer else OTHER
            yield above._replace(role=above.role or default)


def _child(above: StateLeaf, keys: KeyPath, child: Any) -> StateLeaf:
    name = "/".join(_core.path_names(keys))
    is_owner = _is_optimizer_state(child) or is_loss_scale(child)
    is_field = isinstance(keys[0], jtu.GetAttrKey) and name in OPTIMIZER_FIELDS
    in_optimizer = above.in_optimizer or is_field or _is_optimizer_state(child)
    role = above.role
    if role in (OTHER, PARAMETER):
        role = _role_of_class(child) or _role_of_field(above.value, name) or role
        role = OTHER if in_optimizer and role == PARAMETER else role
    owner = child if is_owner else above.owner
    below = () if is_owner or owner is None else (*above.below, *keys)
    return StateLeaf((*above.path, *keys), child, role, in_optimizer, owner, below)


def is_loss_scale(node: object) -> bool:
    """Returns True for a loss scale of jaxmp or Flax."""
    cls = type(node)
    is_flax = (cls.__module__, cls.__name__) == ("flax.training.dynamic_scale", "DynamicScale")
    return isinstance(node, LossScale) or is_flax


def _is_optimizer_state(node: object) -> bool:
    return type(node).__module__.startswith(("optax.", "jaxmp.optim."))


def _role_of_class(node: object) -> str:
    if isinstance(node, SkipStats):
        return COUNTER
    if is_loss_scale(node):
        return LOSS_SCALE
    # Flax is an optional dependency.
    nnx, own = sys.modules.get("flax.nnx"), sys.modules.get("jaxmp.nnx")
    if own is not None and isinstance(node, own.OverwriteWithGradient):
        return FP8
    if nnx is None:
        return OTHER
    classes = {nnx.EMA: AVERAGE, nnx.BatchStat: STATISTICS, nnx.Param: PARAMETER}
    return next((role for cls, role in classes.items() if isinstance(node, cls)), OTHER)


def _role_of_field(node: object, name: str) -> str:
    """Returns the role that a node determines for one of its fields."""
    if isinstance(node, MasterParamsState) and name != "inner_state":
        of_masters = REMAINDER if node.layout.master == "packed" else MASTER
        return of_masters if name == node.layout.key else COUNTER
    if isinstance(node, MomentState) and name == MOMENT_COUNT:
        return COUNTER
    if isinstance(node, optax.EmaState) and name == "ema":
        return AVERAGE
    if isinstance(node, Mapping):
        is_fp8 = name in _overwritten.names_of_state(node)
        return FP8 if is_fp8 else COLLECTIONS.get(name, OTHER)
    is_train_state = any(cls.__qualname__ == "TrainState" for cls in type(node).__mro__)
    return COLLECTIONS.get(name, OTHER) if is_train_state else OTHER
