"""Warning of a program that is lowered for another platform than it was traced for."""

from __future__ import annotations

import warnings
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from jaxmp._core._compat._context import current_context, platform_of, target
from jaxmp.errors import RecipeWarning


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
