"""Jaxprs and sources of equations."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax

from jaxmp._core._compat._private import load_private

if TYPE_CHECKING:
    from jax.extend import source_info_util
    from jax.extend.core import (
        ClosedJaxpr,
        Jaxpr,
        JaxprEqn,
        Literal,
        Primitive,
        Var,
        jaxpr_as_fun,
    )
else:
    # `jax.extend` loads Pallas.
    source_info_util = load_private("jax._src.source_info_util")
    _core = load_private("jax._src.core")
    Jaxpr, JaxprEqn, Literal, Var = _core.Jaxpr, _core.JaxprEqn, _core.Literal, _core.Var
    Primitive, jaxpr_as_fun = _core.Primitive, _core.jaxpr_as_fun
    # JAX 0.12 has one class for both.
    ClosedJaxpr = getattr(_core, "ClosedJaxpr", Jaxpr)


# Code of the frame in which JAX calls a `custom_vjp` function and its two rules.
_CUSTOM_VJP_CALL = inspect.unwrap(jax.custom_vjp.__call__).__code__


def is_within(source_info: source_info_util.SourceInfo, function: Callable[..., Any]) -> bool:
    """Returns True for the source of an equation that a call of a Python function made."""
    traceback = source_info.traceback
    return traceback is not None and function.__code__ in traceback.raw_frames()[0]


def is_in_custom_vjp(source_info: source_info_util.SourceInfo) -> bool:
    """Returns True for the source of an equation that a `custom_vjp` function or its rules made.

    Differentiation replaces a `custom_vjp_call` equation by those of its rules. Their tracebacks
    still contain the call; JAX cuts each traceback off at the function that is being traced.
    """
    traceback = source_info.traceback
    return traceback is not None and _CUSTOM_VJP_CALL in traceback.raw_frames()[0]


def jaxpr_body(jaxpr: Jaxpr | ClosedJaxpr) -> tuple[Any, tuple[Any, ...]]:
    """Returns the jaxpr with equations, and its constants, of an open or a closed jaxpr."""
    return getattr(jaxpr, "jaxpr", jaxpr), tuple(getattr(jaxpr, "consts", ()))


def jaxpr_like(new: ClosedJaxpr, old: Jaxpr | ClosedJaxpr) -> Any:
    """Converts a closed jaxpr to the form, open or closed, of the jaxpr that it replaces."""
    if type(old) is type(new):
        return new
    if new.consts:
        raise ValueError("a jaxpr with constants cannot replace an open jaxpr")
    return new.jaxpr


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """Returns the number of constants and the number of carried operands of a `scan` equation."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    # JAX 0.12: a tree of constants, carry and scanned operands.
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)
