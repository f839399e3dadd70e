"""Type aliases of the public API that need no class of jaxmp."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Protocol, TypeAlias

import jax
from jax.typing import ArrayLike as ArrayLike
from jax.typing import DTypeLike as DTypeLike

Array: TypeAlias = jax.Array
# A nested structure of containers that are registered with JAX, with arrays or other leaves. Python
# types cannot describe registered containers, so this is `Any` to a type checker.
PyTree: TypeAlias = Any
# Name of a mapped axis of `vmap`, `pmap` or `shard_map`, or several of them; None: no axis.
AxisNames: TypeAlias = Hashable | Sequence[Hashable]


class RichRenderable(Protocol):
    """Object that rich prints."""

    def __rich_console__(self, console: Any, options: Any) -> Iterable[Any]: ...
