"""Policies and compile target on which a trace depends, and the mesh."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

import jax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from jaxmp._core._compat._private import load_private
from jaxmp.errors import RecipeWarning

_mesh = load_private("jax._src.mesh")


class Context(NamedTuple):
    """Values other than arguments on which a trace depends; part of the jit cache key."""

    # The active policies, with the path of their root; None if none are active.
    policies: Hashable = None
    # Compile target: "cpu", "gpu" or "tpu". None: the default backend.
    target: str | None = None
    # Compute capability of the target GPU, such as (9, 0). None: that of the local GPU.
    capability: tuple[int, int] | None = None
    # The target chip, a `Target`; None if only its type is known.
    chip: Any = None


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
    return {"cuda": "gpu"}.get(backend, backend)


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


def mark_target(x: jax.Array) -> jax.Array:
    """Returns `x`, and lets JAX warn when it lowers the program for another platform than assumed.

    Without a stated target, a trace assumes the platform of the default backend. The platform of
    `lower(lowering_platforms=...)` and `jax.export` is known only after the trace.
    """
    return x if current_context().target else _mark.bind(x, platform=target())


# The identity. Differentiation is not defined, because FP8 dots define theirs.
_mark = Primitive("jaxmp_mark_target")
_mark.def_impl(lambda x, *, platform: x)
_mark.def_abstract_eval(lambda x, *, platform: x)
batching.defvectorized(_mark)


def _lower(context: Any, x: Any, *, platform: str) -> list[Any]:
    others = [p for p in context.module_context.platforms or () if platform_of(p) != platform]
    if others:
        name = {"gpu": "h200", "tpu": "v6e"}.get(platform_of(others[0]), "cpu")
        warnings.warn(
            f"A program with FP8 matmuls was traced for a {platform.upper()}, the default backend, "
            f"and is lowered for {others[0]!r}: the results of its matmuls are wider, and it moves "
            "more bytes, than if it was traced for its chip. Name the chip around the trace:\n"
            f"    with jaxmp.default_target({name!r}):\n"
            f"        lowered = jax.jit(f).trace(x).lower(lowering_platforms=({others[0]!r},))",
            RecipeWarning,
            stacklevel=2,
        )
    return [x]


mlir.register_lowering(_mark, _lower)
