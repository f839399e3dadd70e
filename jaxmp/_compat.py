"""Every branch on a JAX or Flax version, every private import, and the compile target."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

import jax


class Context(NamedTuple):
    """What traced code may depend on besides its arguments; part of the jit cache key."""

    # The policies that are being applied, with the path they are rooted at; None outside.
    policies: Hashable = None
    # "cpu", "gpu" or "tpu": what is compiled for. None: the default backend.
    target: str | None = None


_context = jax.make_user_context(default_value=Context())


def current_context() -> Context:
    """The active context."""
    return _context.value


@contextlib.contextmanager
def context(**changes: Any) -> Iterator[None]:
    """Runs a block, and whatever it traces, under a changed context."""
    with _context(_context.value._replace(**changes)):
        yield


def target() -> str:
    """The kind of device that is compiled for: "cpu", "gpu" or "tpu"."""
    backend = current_context().target or jax.default_backend()
    return {"cuda": "gpu", "rocm": "gpu"}.get(backend, backend)
