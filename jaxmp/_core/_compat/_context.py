"""Policies and compile target on which a trace depends, and the mesh."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

import jax

from jaxmp._core._compat._private import load_private

_mesh = load_private("jax._src.mesh")


class Context(NamedTuple):
    """Values other than arguments on which a trace depends; part of the jit cache key."""

    # The active policies, with the path of their root; None if none are active.
    policies: Hashable = None
    # Compile target: "cpu", "gpu" or "tpu". None: the default backend.
    target: str | None = None
    # Compute capability of the target GPU, such as (9, 0). None: that of the local GPU.
    capability: tuple[int, int] | None = None
    # Name of the target chip, such as "h200"; "" if only its type is known.
    chip: str = ""


_context = jax.make_user_context(default_value=Context())


def current_context() -> Context:
    """Returns the active context."""
    return _context.value


@contextlib.contextmanager
def context(**changes: object) -> Iterator[None]:
    """Changes the context of a block, and of all that it traces."""
    with _context(_context.value._replace(**changes)):
        yield


def target() -> str:
    """Returns the type of the compile target: "cpu", "gpu" or "tpu"."""
    return platform_of(current_context().target or jax.default_backend())


def platform_of(backend: str) -> str:
    """Returns the type of the devices of a backend: "cpu", "gpu" or "tpu"."""
    return {"cuda": "gpu", "rocm": "gpu"}.get(backend, backend)


def current_mesh() -> Any:
    """Returns the mesh of `jax.set_mesh`, else that of `with mesh:`; it may be empty."""
    if _mesh is None:
        return jax.sharding.get_mesh()
    mesh = _mesh.get_concrete_mesh()
    return _mesh.thread_resources.env.physical_mesh if mesh.empty else mesh


def cudnn_version() -> int | None:
    """Returns the cuDNN version for which JAX lowers attention, such as 91200; None without it."""
    try:
        return load_private("jax._src.cudnn.fused_attention_stablehlo").check_cudnn_version()
    except Exception:
        # RuntimeError without the CUDA plugin; any error if the installation is broken.
        return None


def compute_capability() -> tuple[int, int] | None:
    """Returns the compute capability of the local GPU, such as (9, 0); None without a GPU."""
    try:
        (gpu, *_) = jax.local_devices(backend="gpu")
        major, _, minor = gpu.compute_capability.partition(".")
        return int(major), int(minor)
    except (RuntimeError, AttributeError, ValueError):
        return None


def target_capability() -> tuple[int, int] | None:
    """Returns the compute capability of the target GPU; None if it is unknown."""
    return current_context().capability or compute_capability()
