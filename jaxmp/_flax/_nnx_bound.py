"""Location of an NNX module below the root of its policies, stored on the module."""

from __future__ import annotations

from typing import Any, TypeAlias

from flax import nnx

from jaxmp._flax._casts import resolve_module
from jaxmp._flax._nnx_layers import NNX_LAYERS
from jaxmp._recipe_files._load import PolicyMap

Path: TypeAlias = tuple[str, ...]

# Flax does not list attributes with this prefix as a user's: in the items of an `nnx.Dict`, in the
# variables of a `ToNNX`, in a `repr`.
ATTRIBUTE = "_pytree__jaxmp"


# Replaces `Bound.author` of a module that keeps its dtypes, because of `respect_explicit`.
AUTHOR_KEPT: tuple[tuple[str, Any], ...] = (("is_overridden", False),)


class Bound:
    """Location of a module below the root that has the policies.

    It is a static attribute of the module and hashable, so it is part of every jit cache key.

    Args:
      policies: the policies of the root.
      path: path from the root to the module.
      cls: the module's class as the author of the model wrote it.
      author: names and previous values of the attributes that the policy replaced.
      outputs: number of outputs of a linear layer; None for other modules.
    """

    __slots__ = (*("_hash", "author", "cls", "module_policy", "outputs", "path", "policies"),)

    def __init__(
        self,
        policies: PolicyMap,
        path: Path,
        cls: type,
        author: tuple[tuple[str, Any], ...] = (),
        outputs: int | None = None,
    ) -> None:
        self.policies, self.path, self.cls = policies, path, cls
        self.author, self.outputs = author, outputs
        traits = NNX_LAYERS.traits(cls)
        self.module_policy = resolve_module(policies, path, cls, traits, outputs)
        self._hash = hash(self._key)

    @property
    def _key(self) -> tuple[Any, ...]:
        return self.policies, self.path, self.cls, self.author, self.outputs

    @property
    def is_overridden(self) -> bool:
        """True if the policy replaces the dtypes that the author of the model chose."""
        return self.author != AUTHOR_KEPT

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Bound) and self._hash == other._hash and self._key == other._key

    def __reduce__(self) -> tuple[type[Bound], tuple[Any, ...]]:
        return Bound, self._key

    def __repr__(self) -> str:
        return f"Bound({'/'.join(self.path)!r}, {self.module_policy.policy})"


def bound_of(module: nnx.Module) -> Bound | None:
    """Returns the location of a module below its root; None for a module without policies."""
    return vars(module).get(ATTRIBUTE)


def author_class(module: nnx.Module) -> type:
    """Returns the class of a module as the author of the model wrote it."""
    return getattr(type(module), "_jaxmp_class", type(module))
