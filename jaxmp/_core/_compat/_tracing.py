"""Traces of gradients, flags of tracing, and references to arrays (`jax.new_ref`) in programs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import jax

from jaxmp._core._compat import load_private, trace_of
from jaxmp._core._typing import PyTree

if TYPE_CHECKING:
    from jaxmp._core._compat import ClosedJaxpr

# Flags of JAX 0.12 for what it calls the future of `jax.checkpoint` and of custom derivatives. (It
# cannot differentiate the loops of a fourth one, JAX_SCAN3=1.)
_UPGRADES = ("remat3", "custom_jvp3", "custom_vjp3")


def gradient_traces(tree: PyTree) -> set[Any]:
    """Returns the traces of `jax.grad`, or a similar transformation, that leaves belong to.

    The names of the classes are those of JAX 0.10 to 0.12.
    """
    names = "JVPTracer", "LinearizeTracer"
    return {trace_of(leaf) for leaf in jax.tree.leaves(tree) if type(leaf).__name__ in names}


def outer_traces(trace: Any) -> Iterator[Any]:
    """Yields the traces around a trace, innermost first."""
    while (trace := getattr(trace, "parent_trace", None)) is not None:
        yield trace


@contextlib.contextmanager
def with_default_flags(kept: str = "") -> Iterator[None]:
    """Traces calls, loops and functions with derivatives as JAX does by default.

    With the upgrade flags, such as JAX_REMAT3=1, JAX records each of these functions as an object
    with rules of its own, whose dtypes no interpreter can change; its values and derivatives are
    equal. With JAX_DISABLE_JIT=1, it runs loops and calls in Python.

    Args:
      kept: a flag that keeps the user's value.
    """
    config = load_private("jax._src.config")
    with contextlib.ExitStack() as stack:
        for name in ("disable_jit", *_UPGRADES):
            if name != kept and hasattr(config, name):
                stack.enter_context(getattr(config, name)(False))
        yield


def are_made(effects: Iterable[object]) -> bool:
    """Returns True for the effects of a program or an equation that makes references."""
    return any(type(effect).__name__ == "InternalMutableArrayEffect" for effect in effects)


def are_received(effects: Iterable[object]) -> bool:
    """Returns True for the effects of a program that reads or writes references of its caller."""
    names = {type(effect).__name__ for effect in effects}
    return not names.isdisjoint({"ReadEffect", "WriteEffect", "AccumEffect"})


def discharged(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Returns a program of which the references are values that its loops and branches carry."""
    discharge = load_private("jax._src.state.discharge")
    return discharge.discharge_state(closed, should_discharge=False, lower=False)
