"""Private attributes of Flax objects."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flax import nnx


def plain_array(leaf: Any) -> Any:
    """Returns the array of a Flax NNX Variable; any other leaf is returned unchanged."""
    return leaf.get_value() if hasattr(leaf, "get_value") else leaf


def can_update(variable: nnx.Variable) -> bool:
    """Returns True if a Flax NNX Variable belongs to the function that is being traced now."""
    return variable._can_update


def declares_pytree(cls: type, base: type) -> bool | None:
    """Returns the `pytree` option of a Flax NNX module class; None if it is that of `base`."""
    option = getattr(cls, "_pytree__is_pytree", True)
    return None if option == getattr(base, "_pytree__is_pytree", True) else option


def gradient_trace(leaf: Any) -> Any:
    """Returns the trace of `jax.grad`, or a similar transformation, that a value belongs to.

    It is None for other values. The names of the classes are those of JAX 0.10 to 0.12.
    """
    return leaf._trace if type(leaf).__name__ in ("JVPTracer", "LinearizeTracer") else None
