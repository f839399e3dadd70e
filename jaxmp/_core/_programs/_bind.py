"""Binds recorded equations again with other operands, keeping source lines and scopes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from jax import lax
from jax.extend import source_info_util
from jax.extend.core import JaxprEqn

# These primitives contain a jaxpr of two scalars in the recorded dtype. For another dtype, JAX's
# public function builds a new one.
SCATTERS: dict[str, Callable[..., Any]] = {
    "scatter-add": lax.scatter_add,
    "scatter-sub": lax.scatter_sub,
    "scatter-mul": lax.scatter_mul,
    "scatter-min": lax.scatter_min,
    "scatter-max": lax.scatter_max,
}
_OF_SCATTER = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")


def bind(equation: JaxprEqn, arrays: list[Any], **changes: object) -> Any:
    """Returns the result of an equation for other operands, and with changed parameters."""
    primitive, params = equation.primitive, {**equation.params, **changes}
    scatter = SCATTERS.get(primitive.name)
    if scatter is not None and arrays[0].dtype != getattr(equation.invars[0].aval, "dtype", None):
        return scatter(*arrays, **scatter_of(equation))
    if hasattr(primitive, "get_bind_params"):
        params = primitive.get_bind_params(params)
    results = primitive.bind(*arrays, **params)
    # JAX 0.12 returns the results of `shard_map` in a tree of its own.
    return list(results) if primitive.multiple_results else results


def scatter_of(equation: JaxprEqn) -> dict[str, Any]:
    """Returns the options of a scatter that the functions of `SCATTERS` accept."""
    return {name: equation.params[name] for name in _OF_SCATTER}


@contextlib.contextmanager
def as_recorded(equation: JaxprEqn) -> Iterator[None]:
    """Runs a block with the source line, scopes and context (such as the mesh) of an equation."""
    info = equation.source_info
    stack = source_info_util.current_name_stack() + info.name_stack
    with source_info_util.user_context(info.traceback, name_stack=stack), equation.ctx.manager:
        yield
