"""Evaluates a traced step, and returns the outputs of its modules as additional results.

A module is a name scope of the forward pass. Its output is the result of the last operation in its
scope that an operation outside of the scope reads in the forward pass. Modules in jitted functions,
rematerialized regions and scans are included; those in `lax.cond`, `lax.while_loop` and `shard_map`
are not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr

from jaxmp._core._compat import jaxpr_body, scan_counts
from jaxmp._core._jaxprs import (
    FORWARD,
    Atom,
    Equation,
    Path,
    is_literal,
    phase_of,
    scope_names,
    sub_jaxprs,
)
from jaxmp._core._locations import FULL_PRECISION
from jaxmp._core._typing import Array, PyTree

# Elements of an output that are returned: a regular subset, which suffices for its error.
SAMPLES = 65536
# Call primitives, which are evaluated by interpreting their first jaxpr.
_CALLS = {"jit", "pjit", "remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call"}

Outputs = dict[Path, Array]


def with_outputs(fn: Callable[..., PyTree]) -> Callable[..., tuple[PyTree, Outputs]]:
    """Transforms `fn` so that it also returns the outputs of its modules.

    Args:
      fn: a function of pytrees of arrays that computes gradients.

    Returns:
      A function of the same arguments that returns `(result, outputs)`. `outputs` is a dict from
      the name scopes of a module to at most 65,536 elements of its output as a float32 vector, in
      the order of the forward pass.

    Example:
      >>> def loss(w, x):
      ...     with jax.named_scope("dense"):
      ...         y = x @ w
      ...     return y.sum()
      >>> _, outputs = with_outputs(jax.grad(loss))(jnp.ones((2, 3)), jnp.ones((4, 2)))
      >>> {scopes: output.shape for scopes, output in outputs.items()}
      {('dense',): (12,)}
    """

    def observed(*args: PyTree) -> tuple[PyTree, Outputs]:
        closed, shape = jax.make_jaxpr(fn, return_shape=True)(*args)
        results, outputs = _run(closed, jax.tree.leaves(args), (), FORWARD, None)
        return jax.tree.unflatten(jax.tree.structure(shape), results), outputs

    return observed


def _run(
    jaxpr: Jaxpr | ClosedJaxpr, args: list[Any], names: Path, phase: str, returned: int | None
) -> tuple[list[Any], Outputs]:
    """Evaluates a jaxpr inside the scopes `names`.

    Args:
      jaxpr: open or closed.
      args: its arguments.
      names: scopes of the enclosing equations.
      phase: pass of the enclosing equations.
      returned: number of results that the forward pass continues to use; None: all of them.
    """
    body, consts = jaxpr_body(jaxpr)
    values = dict(zip((*body.constvars, *body.invars), (*consts, *args), strict=True))
    places = [_place(equation, names, phase) for equation in body.eqns]
    last = _last_outputs(body, places, names, returned)
    outputs: Outputs = {}
    read = lambda var: var.val if is_literal(var) else values[var]
    for equation, (own, own_phase) in zip(body.eqns, places, strict=True):
        info = equation.source_info
        stack = source_info_util.current_name_stack() + info.name_stack
        operands = list(map(read, equation.invars))
        with source_info_util.user_context(info.traceback, name_stack=stack):
            results, inner = _evaluate(equation, operands, own, own_phase)
        outputs |= inner
        values.update(zip(equation.outvars, results, strict=True))
        for var in equation.outvars:
            for path in last.get(var, ()):
                outputs.pop(path, None)  # moves the module to its position in the forward pass
                outputs[path] = _sampled(values[var])
    return list(map(read, body.outvars)), outputs


def _place(equation: Equation, names: Path, phase: str) -> tuple[Path, str]:
    stack = str(equation.source_info.name_stack)
    return names + scope_names(stack), phase_of(stack, phase)


def _last_outputs(
    body: Any, places: list[tuple[Path, str]], outer: Path, returned: int | None
) -> dict[Atom, list[Path]]:
    """Returns variable -> paths of the modules of which it is the output."""
    consumers: dict[Atom, list[Path | None]] = {}
    for equation, (path, phase) in zip(body.eqns, places, strict=True):
        if phase == FORWARD:
            for var in equation.invars:
                if not is_literal(var):
                    consumers.setdefault(var, []).append(path)
    for var in body.outvars[:returned]:
        if not is_literal(var):
            consumers.setdefault(var, []).append(None)
    last: dict[Path, Atom] = {}
    for equation, (path, phase) in zip(body.eqns, places, strict=True):
        if phase != FORWARD:
            continue
        for var in equation.outvars:
            if var not in consumers or not _is_activation(var):
                continue
            for length in range(len(outer) + 1, len(path) + 1):
                module = path[:length]
                if any(_is_outside(each, module) for each in consumers[var]):
                    last[module] = var
    variables: dict[Atom, list[Path]] = {}
    for module, var in sorted(last.items(), key=lambda item: -len(item[0])):
        if FULL_PRECISION not in module:
            variables.setdefault(var, []).append(module)
    return variables


def _is_outside(path: Path | None, module: Path) -> bool:
    return path is None or path[: len(module)] != module


def _is_activation(var: Atom) -> bool:
    dtype = getattr(var.aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating) and var.aval.ndim > 0


def _evaluate(
    equation: Equation, operands: list[Any], names: Path, phase: str
) -> tuple[list[Any], Outputs]:
    name = equation.primitive.name
    if phase != FORWARD or name not in (*_CALLS, "scan"):
        return _bound(equation, operands), {}
    if name == "scan":
        return _scan(equation, operands, names, phase)
    return _run(sub_jaxprs(equation)[0], operands, names, phase, None)


def _scan(
    equation: Equation, operands: list[Any], names: Path, phase: str
) -> tuple[list[Any], Outputs]:
    params = equation.params
    consts, carried = scan_counts(params)
    first = consts + carried
    paths: list[Path] = []

    def body(carry: Sequence[Any], xs: Sequence[Any]) -> Any:
        args = [*operands[:consts], *carry, *xs]
        results, outputs = _run(params["jaxpr"], args, names, phase, carried)
        paths[:] = outputs
        return results[:carried], (results[carried:], list(outputs.values()))

    options = {key: params[key] for key in ("length", "reverse", "unroll")}
    carry, (ys, outputs) = lax.scan(body, operands[consts:first], operands[first:], **options)
    return [*carry, *ys], dict(zip(paths, map(_sampled, outputs), strict=True))


def _sampled(x: Array) -> Array:
    """Returns at most `SAMPLES` elements at equal distances, as a float32 vector."""
    stride = -(-x.size // SAMPLES)
    return lax.convert_element_type(lax.reshape(x, (x.size,))[:: max(stride, 1)], jnp.float32)


def _bound(equation: Equation, operands: list[Any]) -> list[Any]:
    primitive, params = equation.primitive, equation.params
    if hasattr(primitive, "get_bind_params"):
        params = primitive.get_bind_params(params)
    with equation.ctx.manager:
        outs = primitive.bind(*operands, **params)
    return list(outs) if primitive.multiple_results else [outs]
