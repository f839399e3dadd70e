"""State of masters: their layout, their form during an update, and where states contain them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, Self, TypeGuard

import jax
import numpy as np
import optax

from jaxmp import _core
from jaxmp._core import PyTree
from jaxmp._policies._load import PolicyMap
from jaxmp._policies._resolve import storage_dtype
from jaxmp.errors import CompositionError


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """Storage of each parameter, as static data inside the optimizer state.

    `optax.tree.map_params` initializes an optimizer with a placeholder instead of parameters, and
    compares this state with that of the user, whose layout the placeholder's then takes.
    """

    # Policies that determine the storage dtypes; None: each leaf keeps its dtype.
    policies: PolicyMap | None
    # "fp32", "packed" or "none".
    master: str
    # (path, name of the storage dtype), in flattening order; the name is "" if no policy applies.
    storage: tuple[tuple[str, str], ...]
    # Prefix of the names of parameters in the tree of the masters: "params/", or "".
    prefix: str = ""
    # True for that of a placeholder, until it is compared.
    is_open: bool = False

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Layout) or self._settings != other._settings:
            return False
        for layout, source in ((self, other), (other, self)):
            if layout.is_open:
                vars(layout).update(vars(source))
        return (self.storage, self.prefix) == (other.storage, other.prefix)

    def __hash__(self) -> int:
        return hash((*self._settings, self.storage))

    @property
    def _settings(self) -> tuple[object, ...]:
        return self.policies, self.master

    def tree(self, treedef: Any, entries: Sequence[Any]) -> PyTree:
        """Returns `MasterParamsState.masters` with the entry of each parameter."""
        policies = self.policies and (self.policies.default, *self.policies.rules)
        dtypes = [_core.BFLOAT16] if policies is None else [each.param_dtype for each in policies]
        has_masters = self.master != "none" and any(
            d is not None and _core.is_16bit(d) for d in dtypes
        )
        return treedef.unflatten(entries) if has_masters else optax.MaskedNode()

    def dtype(self, index: int) -> np.dtype | None:
        """Returns the storage dtype of leaf `index`; None if no policy applies to it."""
        name = self.storage[index][1]
        return _core.canonical_dtype(name) if name else None

    def has_master(self, index: int) -> bool:
        """Returns True if leaf `index` is stored in 16 bits and has a master."""
        dtype = self.dtype(index)
        return self.master != "none" and dtype is not None and _core.is_16bit(dtype)

    @property
    def key(self) -> str:
        """Name of the masters in tree paths; see `MasterParamsState`."""
        has_any = any(self.has_master(i) for i in range(len(self.storage)))
        return f"{self.master}_masters" if has_any else "no_masters"


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True)
class MasterParamsState:
    """State of `master_params`.

    In tree paths the masters are called `fp32_masters`, `packed_masters` or `no_masters`, according
    to their layout. Libraries that store paths therefore cannot restore a checkpoint into a state
    of another layout; orbax would otherwise cast packed remainders to FP32 masters.

    Attributes:
      masters: a tree like the parameters: float32 masters, or int16 remainders if they are packed,
        and `optax.MaskedNode()` for parameters without a master. If the policies store none in 16
        bits, one `optax.MaskedNode()`.
      overflow: int32 scalar: index in `layout.storage` of the first parameter whose new master was
        too large for its storage dtype in the last update; -1 if there is none. For bfloat16 it
        describes the masters before that update, if `unpack_masters` unpacked them.
      fits: bool scalar; True if no float16 parameter overflowed in the last update.
      inner_state: the state of the inner transformation, in FP32 throughout.
      layout: the storage of each parameter (static).
    """

    masters: PyTree
    overflow: jax.Array
    fits: jax.Array
    inner_state: PyTree
    layout: Layout = dataclasses.field(metadata={"static": True})
    _has_all: ClassVar[bool] = False

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, Any], ...], Layout]:
        names = (self.layout.key, "overflow", "fits", "inner_state")
        keys = map(jax.tree_util.GetAttrKey, names)
        return tuple(zip(keys, self._children, strict=True)), self.layout

    def tree_flatten(self) -> tuple[tuple[Any, ...], Layout]:
        return self._children, self.layout

    @classmethod
    def tree_unflatten(cls, layout: Layout, children: Iterable[Any]) -> Self:
        masters, overflow, fits, inner_state = children
        return cls(masters, overflow, fits, inner_state, layout)

    @property
    def _children(self) -> tuple[Any, ...]:
        return self.masters, self.overflow, self.fits, self.inner_state

    def has_value(self, index: int) -> bool:
        """Returns True if `masters` has a value for parameter `index`."""
        return self._has_all or self.layout.has_master(index)

    def values(self) -> Iterator[tuple[int, str, Any]]:
        """Yields the index, path and value of each parameter that has a value in `masters`."""
        indices = filter(self.has_value, range(len(self.layout.storage)))
        for index, value in zip(indices, jax.tree.leaves(self.masters), strict=True):
            yield index, self.layout.storage[index][0], value

    @property
    def records_overflow(self) -> bool:
        """False if all parameters are wider: `overflow` and `fits` keep their first values."""
        dtypes = map(self.layout.dtype, range(len(self.layout.storage)))
        return any(dtype is None or _core.is_16bit(dtype) for dtype in dtypes)

    @property
    def can_overflow(self) -> bool:
        """True if a float16 parameter may be unable to represent its new value."""
        return any(self.layout.dtype(index) == _core.FLOAT16 for index, _, _ in self.values())


@jax.tree_util.register_pytree_with_keys_class
class UnpackedMasters(MasterParamsState):
    """`MasterParamsState` during one update: all masters are float32.

    The transformation leaves the new masters in this state. `assign` then casts them to the
    parameters, and restores a `MasterParamsState`.
    """


@jax.tree_util.register_pytree_with_keys_class
class UnpackedParameters(UnpackedMasters):
    """`UnpackedMasters` with values for all parameters, including those without a master.

    The update then writes all parameters in one pass, and the emitted updates are not needed.
    """

    _has_all = True


def make_layout(params: PyTree, policies: PolicyMap | None, master: str) -> Layout:
    # Names of dtypes by path.
    storage: dict[str, str] = {}
    for names, leaf in _core.leaves_with_path(params):
        path = _path_of(params, names)
        if path in storage:
            raise CompositionError(
                f"Two parameters have the path {path!r}, because one has a '/' in its name. Rules "
                "and masters cannot distinguish them. Rename one of them."
            )
        dtype = stored_dtype(params, names, leaf, policies)
        if master == "packed" and dtype == _core.FLOAT16:
            raise CompositionError(
                f"master='packed' stores the 16 bits that bfloat16 drops from FP32, but {path!r} "
                "is stored in float16, whose exponent differs. Use master='fp32', or store it in "
                f"bfloat16: Rule({path!r}, 'p=bf16')."
            )
        storage[path] = "" if dtype is None else _core.short_name(dtype)
    # The node without leaves that `optax.tree.map_params` passes.
    is_open = type(params).__name__ == "_ParamsPlaceholder"
    prefix = f"{_core.PARAMS}/" if _core.has_collections(params) else ""
    return Layout(policies, master, tuple(storage.items()), prefix, is_open)


def stored_dtype(
    params: PyTree, names: _core.Path, leaf: Any, policies: PolicyMap | None
) -> np.dtype | None:
    """Returns the dtype in which a leaf of `params` is stored; None if it is no parameter.

    Args:
      params: a tree of parameters, or a dict of Flax collections.
      names: the path of the leaf.
      leaf: the leaf.
      policies: the policies that determine the dtype; None: the leaf keeps its own.
    """
    is_param = not _core.has_collections(params) or names[0] == _core.PARAMS
    if not is_param or not _core.is_castable(leaf):
        return None
    return storage_dtype(policies, _core.rule_names(params, names)) if policies else leaf.dtype


def leaves_by_path(params: PyTree) -> dict[str, Any]:
    """Returns the leaves of a tree of parameters by their paths in the form of rules."""
    return {_path_of(params, n): leaf for n, leaf in _core.leaves_with_path(params)}


def map_by_path(fn: Callable[[str, Any], Any], params: PyTree) -> PyTree:
    """Returns a tree of parameters with the results of `fn(path, leaf)`."""
    return _core.map_with_path(lambda n, leaf: fn(_path_of(params, n), leaf), params)


def _path_of(params: PyTree, names: _core.Path) -> str:
    is_inside = _core.has_collections(params)
    return _core.parameter_path(_core.strip_collection(names) if is_inside else names)


def entries_of(masters: PyTree, treedef: Any) -> list[Any]:
    """Returns the entry of each parameter in `MasterParamsState.masters`."""
    if isinstance(masters, optax.MaskedNode):
        return [masters] * treedef.num_leaves
    return treedef.flatten_up_to(masters)


def _is_master_state(node: object) -> TypeGuard[MasterParamsState]:
    return isinstance(node, MasterParamsState)


def map_master_states(
    fn: Callable[[MasterParamsState], MasterParamsState], state: PyTree
) -> PyTree:
    """Applies `fn` to each MasterParamsState in `state`, at any nesting."""
    return jax.tree.map(
        lambda node: fn(node) if _is_master_state(node) else node, state, is_leaf=_is_master_state
    )


def master_states(state: PyTree) -> list[MasterParamsState]:
    """Returns every MasterParamsState in `state`, in flattening order."""
    leaves = jax.tree.leaves(state, is_leaf=_is_master_state)
    return [leaf for leaf in leaves if _is_master_state(leaf)]
