"""Traces the function that autocast interprets."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr

from jaxmp._autocast._resolve import AutocastConfig
from jaxmp._core._compat import is_in_custom_vjp
from jaxmp._core._trees import canonical
from jaxmp._core._typing import Array, PyTree
from jaxmp._policies._op_table import OpTable
from jaxmp._recipe_files._load import RecipeLike, as_op_table, as_policy_map
from jaxmp.errors import PolicyError


class Traced(NamedTuple):
    """Traced function and the assembly of its results."""

    closed: ClosedJaxpr
    # Leaves of the arguments that are arrays, in the dtypes in which they were traced.
    arrays: list[Any]
    # Arrays that the jaxpr returns -> results of the function.
    results: Callable[[list[Any]], Any]
    # True if the function was traced inside a rule of a `custom_vjp`.
    in_custom_vjp: bool


# True while autocast traces a function.
_traces: contextvars.ContextVar[bool] = contextvars.ContextVar("traces", default=False)


def is_traced_by_autocast() -> bool:
    """Returns True in a function whose operations autocast casts."""
    return _traces.get()


def make_config(
    fn: Callable[..., Any],
    recipe: RecipeLike,
    ops: Mapping[str, str] | OpTable | None,
    name: str,
) -> AutocastConfig:
    """Checks the arguments of the public function `name` and returns them as `AutocastConfig`.

    Raises:
      PolicyError: if `fn` is not a function, or the recipe is not valid.
      RuleError, CompositionError, OpError: as `autocast`.
    """
    if not callable(fn):
        raise PolicyError(
            f"{name} received {fn!r} instead of a function. Pass the function first, and then the "
            f"recipe: {name}(loss_fn, 'bf16')."
        )
    table = as_op_table(recipe).replace({} if ops is None else ops)
    return AutocastConfig(as_policy_map(recipe), table)


def trace(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
    """Traces `fn` for some arguments; leaves that are not arrays are passed unchanged."""
    leaves, structure = jax.tree.flatten((args, kwargs))
    positions = [index for index, leaf in enumerate(leaves) if _is_array(leaf)]
    static_out: dict[str, Any] = {}

    def flat(*arrays: Array) -> list[Array]:
        static_out["in_custom_vjp"] = is_in_custom_vjp(source_info_util.current())
        filled = list(leaves)
        for index, array in zip(positions, arrays, strict=True):
            filled[index] = array
        args, kwargs = structure.unflatten(filled)
        out, static_out["structure"] = jax.tree.flatten(fn(*args, **kwargs))
        static_out["leaves"] = [None if _is_array(leaf) else leaf for leaf in out]
        return [leaf for leaf in out if _is_array(leaf)]

    def results(arrays: list[Array]) -> PyTree:
        rest = iter(arrays)
        out = [next(rest) if leaf is None else leaf for leaf in static_out["leaves"]]
        return static_out["structure"].unflatten(out)

    arrays = [canonical(leaves[index]) for index in positions]
    token = _traces.set(True)
    try:
        closed = jax.make_jaxpr(flat)(*arrays)
    finally:
        _traces.reset(token)
    return Traced(closed, arrays, results, static_out["in_custom_vjp"])


def _is_array(leaf: object) -> bool:
    if isinstance(leaf, (np.ndarray, np.generic)):
        return leaf.dtype.kind in "biufcV"
    return isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct))
