"""Traces the function that autocast interprets."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Mapping
from typing import Any

from jax.extend import source_info_util

from jaxmp._autocast._resolve import AutocastConfig
from jaxmp._core._compat import is_in_custom_vjp
from jaxmp._core._jaxprs import Traced
from jaxmp._core._jaxprs import trace as trace_function
from jaxmp._policies._op_table import OpTable
from jaxmp._recipe_files._load import RecipeLike, as_op_table, as_policy_map
from jaxmp.errors import PolicyError

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


def trace(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Traced, bool]:
    """Traces the function of `autocast`; leaves that are not arrays are passed unchanged.

    Returns:
      The traced function, and True if it was traced inside a rule of a `custom_vjp`.
    """
    in_custom_vjp = False

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal in_custom_vjp
        in_custom_vjp = is_in_custom_vjp(source_info_util.current())
        return fn(*args, **kwargs)

    token = _traces.set(True)
    try:
        return trace_function(run, args, kwargs), in_custom_vjp
    finally:
        _traces.reset(token)
