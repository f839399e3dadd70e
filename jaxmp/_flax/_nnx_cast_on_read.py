"""Location of an NNX module below its root, and attributes that are cast when they are read."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxmp import _core
from jaxmp._core import Array, Mark, Path, PyTree, _compat
from jaxmp._flax import _labels
from jaxmp._flax._casts import resolve_module, written_back
from jaxmp._flax._fp8_layers import is_stateful
from jaxmp._flax._layer_table import LayerTraits
from jaxmp._flax._nnx_layers import NNX_LAYERS, read_fp8_state
from jaxmp._flax._search import ModelSearch
from jaxmp._policies._load import PolicyMap

# Flax does not list attributes with this prefix as a user's: in the items of an `nnx.Dict`, in the
# variables of a `ToNNX`, in a `repr`.
ATTRIBUTE = "_pytree__jaxmp"


@dataclasses.dataclass(repr=False)
class Bound:
    """Location of a module below the root that has the policies.

    It is a static attribute of the module and hashable, so it is part of every jit cache key.

    Args:
      policies: the policies of the root.
      path: path from the root to the module.
      cls: the module's class as the author of the model wrote it.
      author: names and previous values of the attributes that the policy replaced.
      outputs: number of outputs of a linear layer; None for other modules.
      is_decision: as in `resolve_policy`.
    """

    policies: PolicyMap
    path: Path
    cls: type
    author: tuple[tuple[str, Any], ...] = ()
    outputs: int | None = None
    is_decision: bool = False

    def __post_init__(self) -> None:
        traits, decides = NNX_LAYERS.traits(self.cls), self.is_decision
        self.module_policy = resolve_module(
            self.policies, self.path, self.cls, traits, self.outputs, is_decision=decides
        )
        self.mark, self.search = Mark(), ModelSearch()
        self._hash = hash(self._key)

    @functools.cached_property
    def decision(self) -> Bound:
        """The same location, for a call whose result is not rounded."""
        return dataclasses.replace(self, is_decision=True)

    @property
    def _key(self) -> tuple[Any, ...]:
        return self.policies, self.path, self.cls, self.author, self.outputs, self.is_decision

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[type[Bound], tuple[Any, ...]]:
        return Bound, self._key

    def __repr__(self) -> str:
        return f"Bound({'/'.join(self.path)!r}, {self.module_policy.policy})"


def bound_of(module: nnx.Module) -> Bound | None:
    """Returns the location of a module below its root; None for a module without policies."""
    return vars(module).get(ATTRIBUTE)


# ---------------------------------------------------------------------------
# Attributes
# ---------------------------------------------------------------------------


def cast_on_read(module: nnx.Module, traits: LayerTraits) -> frozenset[str]:
    """Returns the names of the attributes of a module that are cast when they are read."""
    if traits.caches:
        return frozenset(traits.caches)
    return frozenset(name for name, value in vars(module).items() if _is_cast_on_read(value))


def _is_cast_on_read(value: PyTree) -> bool:
    leaves = jax.tree.leaves(value, is_leaf=is_member)
    return any(isinstance(leaf, nnx.Param) or is_stateful(leaf) for leaf in leaves)


def is_member(value: object) -> bool:
    """Returns True for modules and Variables."""
    return isinstance(value, (nnx.Variable, nnx.Module))


class CastOnRead:
    """Attribute that user code reads in the compute dtype while its module runs.

    Parameters are read in the compute dtype. A dot that requires a state is read with the state of
    its module, which is a different module in each trace. Other values, and the attributes of a
    module that does not run, are returned as they are stored.

    Args:
      owner: the wrapped class that has this attribute.
      name: of the attribute.
    """

    def __init__(self, owner: type, name: str) -> None:
        self.owner, self.name = owner, name

    def __getattribute__(self, attribute: str) -> Any:
        # Flax does not record an attribute that has a setter as data or static. Python takes the
        # setter from the class, so it calls `__set__`, which Flax does not find.
        if attribute == "__set__":
            raise AttributeError(attribute)
        return object.__getattribute__(self, attribute)

    def __get__(self, module: nnx.Module | None, owner: type | None = None) -> Any:
        if module is None:
            return getattr(super(self.owner, owner), self.name, self)
        if self.name not in vars(module):
            # Another instance of the class has a parameter of this name.
            try:
                return getattr(super(self.owner, module), self.name)
            except AttributeError:
                raise AttributeError(
                    f"{type(module).__name__!r} object has no attribute {self.name!r}"
                ) from None
        value = vars(module)[self.name]
        bound = bound_of(module)
        if bound is None or _compat.current_context().policies != bound.policies:
            return value
        if _keeps_kernel(bound, module, self.name):
            return value
        cast = functools.partial(_labels.read_param, bound.module_policy, self.name)

        def read(leaf: object) -> object:
            if isinstance(leaf, (nnx.Param, nnx.Cache)):
                return read_as(leaf, cast)
            if is_stateful(leaf):
                state = functools.partial(read_fp8_state, module, leaf)
                return dataclasses.replace(leaf, state=state)
            return leaf

        return jax.tree.map(read, value, is_leaf=is_member)

    def __set__(self, module: nnx.Module, value: object) -> None:
        vars(module)[self.name] = value

    def __delete__(self, module: nnx.Module) -> None:
        del vars(module)[self.name]


def _keeps_kernel(bound: Bound, module: nnx.Module, name: str) -> bool:
    """Returns True for the kernel of a layer of Flax that its FP8 dot reads as it is stored."""
    traits, promotion = bound.module_policy.traits, vars(module).get("promote_dtype")
    if name != traits.kernel or not getattr(promotion, "keeps_kernel", False):
        return False
    method = "__call__"  # of a subclass, it may compute with the kernel itself
    return getattr(bound.cls, method, None) is getattr(traits.layer, method, bound)


# ---------------------------------------------------------------------------
# Variables
# ---------------------------------------------------------------------------


def read_as(source: nnx.Variable[Any], cast: Callable[[Any], Array]) -> nnx.Variable[Any]:
    """Returns a Variable of the same type whose value is cast, and that writes to `source`."""
    value = source.get_raw_value()
    castable = isinstance(value, (jax.Array, np.ndarray)) and _core.is_castable(value)
    # In a `jax.Ref`, or of a hijax type.
    is_special = getattr(source, "ref", False) or getattr(source, "hijax", False)
    if not castable or is_special or (read := cast(value)) is value:
        return source
    variable = _cast_class(type(source)).from_metadata(read, source.get_metadata())
    object.__setattr__(variable, "_source", source)
    return variable


# One class for each class of Variables, which JAX compares in pytrees. Flax registers both with
# JAX, which keeps them.
@functools.cache
def _cast_class(cls: type) -> Any:
    """Returns the subclass of a Variable class whose objects write to their source."""

    class CastVariable(cls):
        __slots__ = ("_source",)

        def __setattr__(self, name: str, value: PyTree) -> None:
            source = _source_of(self)
            if name != "_raw_value" or source is None:
                super().__setattr__(name, value)
                return
            read = object.__getattribute__(self, "_raw_value")
            source.set_raw_value(written_back(value, read, source.get_raw_value()))
            object.__setattr__(self, name, _core.cast(value, read.dtype))

        def set_value(self, value: PyTree, **index: Any) -> None:
            source = _source_of(self)
            if source is None:
                super().set_value(value, **index)
                return
            read, stored = object.__getattribute__(self, "_raw_value"), source.get_raw_value()
            if index.get("index", ...) is ...:
                value = written_back(value, read, stored)
            else:
                value = _core.cast(value, stored.dtype) if _core.is_float(value) else value
            source.set_value(value, **index)
            object.__setattr__(self, "_raw_value", _core.cast(source.get_raw_value(), read.dtype))

    CastVariable.__name__ = CastVariable.__qualname__ = cls.__name__
    CastVariable.__module__ = cls.__module__
    return CastVariable


def _source_of(variable: nnx.Variable[Any]) -> Any:
    """Returns the Variable to which one writes; None if a transformation created a copy of it."""
    try:
        return object.__getattribute__(variable, "_source")
    except AttributeError:
        return None
