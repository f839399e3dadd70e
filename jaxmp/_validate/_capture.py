"""Evaluates a traced step, and returns the outputs of its modules as additional results.

A module is a name scope of the forward pass. Its output is the result of the last operation in its
scope that an operation outside of the scope reads in the forward pass. Modules in jitted functions,
rematerialized regions, loops, branches and `shard_map` are included:

- in a scan, the outputs of all iterations are joined; in a while loop, those of the last one count;
- a branch that was not taken has no outputs, and neither has a loop without iterations;
- in a `shard_map`, the outputs of all devices are joined.

Modules in other operations that contain functions, such as `lax.custom_linear_solve`,
`lax.platform_dependent` and callbacks, have no outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.sharding import PartitionSpec

from jaxmp._core._compat import is_in_unchecked_shard_map, jaxpr_body, scan_counts, vary
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
from jaxmp._core._programs._constructs import CALLS, CUSTOM_DERIVATIVES, REMATS
from jaxmp._core._typing import Array, PyTree

# Elements of an output that are returned: a regular subset, which suffices for its error.
SAMPLES = 65536


class Output(NamedTuple):
    """Output of a module.

    Args:
      values: at most `SAMPLES` elements as a float32 vector; zeros if the module did not run.
      is_computed: boolean scalar; False in a branch that was not taken.
    """

    values: Array
    is_computed: Array


Outputs = dict[Path, Output]


def with_outputs(fn: Callable[..., PyTree]) -> Callable[..., tuple[PyTree, Outputs]]:
    """Transforms `fn` so that it also returns the outputs of its modules.

    Args:
      fn: a function of pytrees of arrays that computes gradients.

    Returns:
      A function of the same arguments that returns `(result, outputs)`. `outputs` is a dict from
      the name scopes of a module to its `Output`, in the order of the forward pass.

    Example:
      >>> def loss(w, x):
      ...     with jax.named_scope("dense"):
      ...         y = x @ w
      ...     return y.sum()
      >>> _, outputs = with_outputs(jax.grad(loss))(jnp.ones((2, 3)), jnp.ones((4, 2)))
      >>> {scopes: output.values.shape for scopes, output in outputs.items()}
      {('dense',): (12,)}
    """

    def observed(*args: PyTree) -> tuple[PyTree, Outputs]:
        closed, shape = jax.make_jaxpr(fn, return_shape=True)(*args)
        used = [True] * len(jaxpr_body(closed)[0].outvars)
        results, outputs = _run(closed, jax.tree.leaves(args), _Scope((), FORWARD, used))
        return jax.tree.unflatten(jax.tree.structure(shape), results), outputs

    return observed


class _Scope(NamedTuple):
    """Location of a jaxpr.

    Args:
      names: scopes of the enclosing equations.
      phase: pass of the enclosing equations.
      used: for each result, True if the forward pass continues to use it. The other results are
        residuals of the backward pass.
    """

    names: Path
    phase: str
    used: Sequence[bool]


def _run(
    jaxpr: Jaxpr | ClosedJaxpr, args: Sequence[Any], scope: _Scope
) -> tuple[list[Any], Outputs]:
    """Evaluates an open or closed jaxpr."""
    body, consts = jaxpr_body(jaxpr)
    values = dict(zip((*body.constvars, *body.invars), (*consts, *args), strict=True))
    places = [_place(equation, scope.names, scope.phase) for equation in body.eqns]
    consumers = _consumers(body, places, scope.used)
    last = _last_outputs(body, places, scope.names, consumers)
    outputs: Outputs = {}
    read = lambda var: var.val if is_literal(var) else values[var]
    for equation, place in zip(body.eqns, places, strict=True):
        info = equation.source_info
        stack = source_info_util.current_name_stack() + info.name_stack
        operands = list(map(read, equation.invars))
        used = [var in consumers for var in equation.outvars]
        with source_info_util.user_context(info.traceback, name_stack=stack):
            results, inner = _evaluate(equation, operands, _Scope(*place, used))
        outputs |= inner
        values.update(zip(equation.outvars, results, strict=True))
        for var in equation.outvars:
            for path in last.get(var, ()):
                outputs.pop(path, None)  # moves the module to its position in the forward pass
                outputs[path] = Output(_sampled(values[var]), _varying(jnp.array(True)))
    return list(map(read, body.outvars)), outputs


def _place(equation: Equation, names: Path, phase: str) -> tuple[Path, str]:
    stack = str(equation.source_info.name_stack)
    return names + scope_names(stack), phase_of(stack, phase)


def _consumers(
    body: Any, places: list[tuple[Path, str]], used: Sequence[bool]
) -> dict[Atom, list[Path | None]]:
    """Returns variable -> scopes of its forward consumers; None if the jaxpr returns it."""
    consumers: dict[Atom, list[Path | None]] = {}
    for equation, (path, phase) in zip(body.eqns, places, strict=True):
        if phase == FORWARD:
            for var in equation.invars:
                if not is_literal(var):
                    consumers.setdefault(var, []).append(path)
    for var, is_used in zip(body.outvars, used, strict=True):
        if is_used and not is_literal(var):
            consumers.setdefault(var, []).append(None)
    return consumers


def _last_outputs(
    body: Any,
    places: list[tuple[Path, str]],
    outer: Path,
    consumers: Mapping[Atom, list[Path | None]],
) -> dict[Atom, list[Path]]:
    """Returns variable -> paths of the modules of which it is the output."""
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


# ---------------------------------------------------------------------------
# Equations that contain jaxprs
# ---------------------------------------------------------------------------

_Results = tuple[list[Any], Outputs]
# Results, and outputs of modules in a fixed order.
_Carry = tuple[list[Any], list[Output]]


def _evaluate(equation: Equation, operands: list[Any], scope: _Scope) -> _Results:
    rule = _RULES.get(equation.primitive.name)
    if scope.phase != FORWARD or rule is None:
        return _bound(equation, operands), {}
    return rule(equation, operands, scope)


def _call(equation: Equation, operands: list[Any], scope: _Scope) -> _Results:
    return _run(sub_jaxprs(equation)[0], operands, scope)


def _scan(equation: Equation, operands: list[Any], scope: _Scope) -> _Results:
    params = equation.params
    consts, carried = scan_counts(params)
    first = consts + carried
    inner = scope._replace(used=[True] * carried + list(scope.used[carried:]))
    paths: list[Path] = []

    def body(carry: Sequence[Any], xs: Sequence[Any]) -> Any:
        results, outputs = _run(params["jaxpr"], [*operands[:consts], *carry, *xs], inner)
        paths[:] = outputs
        return results[:carried], (results[carried:], list(outputs.values()))

    options = {key: params[key] for key in ("length", "reverse", "unroll")}
    carry, (ys, outputs) = lax.scan(body, operands[consts:first], operands[first:], **options)
    return [*carry, *ys], dict(zip(paths, map(_joined, outputs), strict=True))


def _while(equation: Equation, operands: list[Any], scope: _Scope) -> _Results:
    params = equation.params
    first = params["cond_nconsts"]
    second = first + params["body_nconsts"]
    inner = scope._replace(used=[True] * len(equation.outvars))
    looped = _Branch(params["body_jaxpr"], inner)
    none = looped.absent(operands[first:])

    def test(carry: _Carry) -> Array:
        args = [*operands[:first], *carry[0]]
        return _run(params["cond_jaxpr"], args, scope._replace(used=[True]))[0][0]

    def body(carry: _Carry) -> _Carry:
        results, outputs = looped(*operands[first:second], *carry[0])
        return results, [outputs[path] for path in none]

    results, outputs = lax.while_loop(test, body, (operands[second:], list(none.values())))
    return results, dict(zip(none, outputs, strict=True))


def _cond(equation: Equation, operands: list[Any], scope: _Scope) -> _Results:
    index, *args = operands
    if equation.params.get("branches_platforms") is not None:
        # Of `lax.platform_dependent`: a branch may not lower on other platforms.
        return _bound(equation, operands), {}
    branches = [_Branch(branch, scope) for branch in equation.params["branches"]]
    none: Outputs = {}
    for branch in branches:
        for path, output in branch.absent(args).items():
            # A module of the same name with another output in two branches has none.
            same = path not in none or none[path].values.shape == output.values.shape
            none[path] = output if same else Output(jnp.zeros(0), output.is_computed)

    def padded(branch: _Branch) -> Callable[..., _Carry]:
        def run(*args: Any) -> _Carry:
            results, outputs = branch(*args)
            outputs = {
                path: outputs[path]
                if path in outputs and outputs[path].values.shape == default.values.shape
                else default
                for path, default in none.items()
            }
            return results, list(outputs.values())

        return run

    results, outputs = lax.switch(index, list(map(padded, branches)), *args)
    return results, dict(zip(none, outputs, strict=True))


class _Branch(NamedTuple):
    """Function of arrays that evaluates a jaxpr."""

    jaxpr: Jaxpr | ClosedJaxpr
    scope: _Scope

    def __call__(self, *args: Any) -> _Results:
        return _run(self.jaxpr, args, self.scope)

    def absent(self, args: Sequence[Any]) -> Outputs:
        """Returns the outputs of its modules for the case that it is not evaluated."""
        paths: list[Path] = []

        def traced(*args: Any) -> list[Output]:
            outputs = self(*args)[1]
            paths[:] = outputs
            return list(outputs.values())

        shapes = [output.values.shape for output in jax.eval_shape(traced, *args)]
        zeros = [_varying(jnp.zeros(shape, jnp.float32)) for shape in shapes]
        false = _varying(jnp.array(False))
        return {path: Output(zero, false) for path, zero in zip(paths, zeros, strict=True)}


def _shard_map(equation: Equation, operands: list[Any], scope: _Scope) -> _Results:
    params = equation.params
    axes = params["newly_manual_axes"]
    ordered = tuple(axis for axis in params["mesh"].axis_names if axis in axes)
    paths: list[Path] = []

    def shard(*args: Any) -> tuple[tuple[Any, ...], list[Output]]:
        results, outputs = _run(params["jaxpr"], args, scope)
        paths[:] = outputs
        rows = [Output(x, jnp.reshape(is_computed, 1)) for x, is_computed in outputs.values()]
        return tuple(results), rows

    results, outputs = jax.shard_map(
        shard,
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=(tuple(params["out_specs"]), PartitionSpec(ordered)),
        check_vma=params["check_vma"],
        axis_names=axes,
    )(*operands)
    return list(results), dict(zip(paths, map(_joined, outputs), strict=True))


_RULES: dict[str, Callable[[Equation, list[Any], _Scope], _Results]] = {
    "cond": _cond,
    "scan": _scan,
    "shard_map": _shard_map,
    "while": _while,
    **dict.fromkeys(CALLS | REMATS | CUSTOM_DERIVATIVES, _call),
}


def _joined(output: Output) -> Output:
    """Returns the output of all iterations or devices."""
    return Output(_sampled(output.values), jnp.any(output.is_computed))


def _sampled(x: Array) -> Array:
    """Returns at most `SAMPLES` elements at equal distances, as a float32 vector."""
    if any(axis is not None for axis in jax.typeof(x).sharding.spec):
        # Axes of an explicit mesh, over which JAX does not reshape.
        x = jax.sharding.reshard(x, PartitionSpec())
    stride = -(-x.size // SAMPLES)
    sample = lax.reshape(x, (x.size,))[:: max(stride, 1)]
    return _varying(lax.convert_element_type(sample, jnp.float32))


def _varying(x: Array) -> Array:
    """Casts to varying over the axes of a `shard_map`, so that all branches have one type."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or is_in_unchecked_shard_map():
        return x
    return vary(x, mesh.manual_axes)


def _bound(equation: Equation, operands: list[Any]) -> list[Any]:
    primitive, params = equation.primitive, equation.params
    if hasattr(primitive, "get_bind_params"):
        params = primitive.get_bind_params(params)
    with equation.ctx.manager:
        outs = primitive.bind(*operands, **params)
    return list(outs) if primitive.multiple_results else [outs]
