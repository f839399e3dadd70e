"""Traversal of jaxprs: their equations, sub-jaxprs, name scopes and consumers."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray

from jaxmp import _core
from jaxmp._core import PyTree, _compat
from jaxmp._core._compat import _tracing
from jaxmp._programs._constructs import is_jaxpr, sub_jaxprs

Path = tuple[str, ...]
# A variable or a literal. To a type checker, the abstract value of JAX's own types has no shape or
# dtype.
Atom: TypeAlias = Any


class Equation(Protocol):
    """Equation of a jaxpr, such as `jax.extend.core.JaxprEqn`."""

    primitive: Any
    invars: list[Any]
    outvars: list[Any]
    params: dict[str, Any]
    effects: Any
    source_info: Any
    ctx: Any

    @property
    def replace(self) -> Callable[..., Any]: ...


# Transformations around a scope in a name stack: `transpose(jvp(block))`, `vmap(block)`.
_TRANSFORM = re.compile(r"\b[\w.]+\(|\)")
# Scope of the casts that autocast inserts.
AUTOCAST = "jaxmp_autocast"
# Prefix of the names of jitted functions that quantize to FP8; the operand's role follows.
QUANTIZE = "jaxmp_fp8_quantize_"
# Scopes that are not modules. JAX adds two for a rematerialized function. (It also adds
# "ij,jk->ik" for an einsum.)
_NO_MODULES = frozenset({"rematted_computation", "checkpoint", AUTOCAST})


class Traced(NamedTuple):
    """Traced function and the assembly of its results.

    closed: its jaxpr.
    arrays: the leaves of the arguments that are arrays, in the dtypes in which they were traced.
    results: arrays that the jaxpr returns -> results of the function.
    """

    closed: _compat.ClosedJaxpr
    arrays: list[Any]
    results: Callable[[list[Any]], Any]


def trace(fn: Callable[..., Any], args: PyTree, kwargs: Mapping[str, PyTree]) -> Traced:
    """Traces a function for some arguments; leaves that are not arrays are passed unchanged.

    Args:
      fn: any JAX function.
      args, kwargs: its arguments. Arrays may be `jax.ShapeDtypeStruct`.
    """
    leaves, structure = jax.tree.flatten((args, kwargs))
    positions = [n for n, leaf in enumerate(leaves) if _is_array(leaf)]
    static: list[Any] = []

    def flat(*arrays: jax.Array) -> list[jax.Array]:
        filled = dict(enumerate(leaves)) | dict(zip(positions, arrays, strict=True))
        args, kwargs = structure.unflatten(filled.values())
        out, tree = jax.tree.flatten(fn(*args, **kwargs))
        # Results may contain anything, such as NumPy arrays of strings.
        static[:] = tree, [None if isinstance(leaf, jax.Array) else leaf for leaf in out]
        return [leaf for leaf in out if isinstance(leaf, jax.Array)]

    def results(arrays: list[Any]) -> PyTree:
        tree, leaves = static
        rest = iter(arrays)
        return tree.unflatten([next(rest) if leaf is None else leaf for leaf in leaves])

    arrays = [_core.canonical(leaves[n]) for n in positions]
    return Traced(record(flat, *arrays)[0], arrays, results)


def record(fn: Callable[..., Any], *args: PyTree) -> tuple[_compat.ClosedJaxpr, PyTree]:
    """Returns the program of a function that an analysis can follow, and shapes of its results."""
    make = jax.make_jaxpr(fn, return_shape=True)
    try:
        with _tracing.with_default_flags():
            closed, shapes = make(*args)
    except NotImplementedError:
        # `custom_vjp.defremat` requires this flag.
        with _tracing.with_default_flags(kept="custom_vjp3"):
            closed, shapes = make(*args)
    return _without_references(closed), shapes


def _without_references(closed: _compat.ClosedJaxpr) -> _compat.ClosedJaxpr:
    """Returns a program whose references to arrays, of `jax.new_ref`, are values instead.

    Loops carry these values, so that an analysis follows them from the operation that writes a
    value to those that read it. JAX compiles the same program. References remain that the program
    receives, and those inside of functions with a derivative of their own, which would lose it.
    """
    if not _tracing.are_made(closed.effects) or _tracing.are_received(closed.effects):
        return closed
    are_inside = any(
        each.primitive.name in ("custom_jvp_call", "custom_vjp_call")
        and _tracing.are_made(each.effects)
        for each in equations(closed)
    )
    return closed if are_inside else _tracing.discharged(closed)


def as_jax_array(result: Any) -> jax.Array:
    """Returns a result of a program as an array: a literal, such as a count, is a Python number."""
    return result if isinstance(result, jax.Array) else jnp.asarray(result)


def _is_array(leaf: object) -> bool:
    if isinstance(leaf, (np.ndarray, np.generic)):
        return leaf.dtype.kind in "biufcV"
    return isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct))


def equations(jaxpr: _compat.AnyJaxpr, *, inside: bool = True) -> Iterator[Any]:
    """Yields every equation of a jaxpr; those of a sub-jaxpr follow the equation that contains it.

    Args:
      jaxpr: open or closed.
      inside: False for the equations of the jaxpr itself alone.
    """
    for equation in _compat.jaxpr_body(jaxpr)[0].eqns:
        yield equation
        for inner in sub_jaxprs(equation) if inside else ():
            yield from equations(inner)


def equations_inside(equation: Equation) -> Iterator[Any]:
    """Yields the equations in the jaxprs of an equation, at any depth; none for an operation."""
    for jaxpr in sub_jaxprs(equation):
        yield from equations(jaxpr)


def without_unused(jaxpr: _compat.Jaxpr) -> _compat.Jaxpr:
    """Returns an open jaxpr without the equations that its results do not depend on."""
    used = {var for var in jaxpr.outvars if not is_literal(var)}
    needed = []
    for equation in reversed(jaxpr.eqns):
        if equation.effects or not used.isdisjoint(equation.outvars):
            needed.append(equation)
            used |= {var for var in equation.invars if not is_literal(var)}
    return jaxpr.replace(eqns=needed[::-1])


def is_literal(var: Atom) -> bool:
    """Returns True if an operand is a literal, such as the scalar in `mul x 2.0`."""
    return isinstance(var, _compat.Literal)


# The operations of a layer share a name stack.
@functools.lru_cache(maxsize=65536)
def scope_names(name_stack: str) -> Path:
    """Returns the named scopes of a name stack as in the forward pass, without transformations.

    Example:
      >>> scope_names("transpose(jvp(Net))/layers/0")
      ('Net', 'layers', '0')
      >>> scope_names("transpose(jvp(Net))/rematted_computation/jvp(Net)/block")
      ('Net', 'block')
    """
    names = tuple(name for name in _TRANSFORM.sub("", name_stack).split("/") if name)
    names = tuple(name for name in names if name not in _NO_MODULES and "->" not in name)
    return collapsed(names) if "transpose(" in name_stack else names


def collapsed(names: Path) -> Path:
    """Removes a repeated prefix, such as that of `Net/Net/block`.

    Name stacks in the backward pass of a rematerialized function contain its scopes twice.
    """
    for length in range(len(names) // 2, 0, -1):
        if names[:length] == names[length : 2 * length]:
            return names[length:]
    return names


def module_paths_of(names: Path) -> tuple[str, ...]:
    """Returns candidate module paths for scopes: without the first scope, and with it.

    The first scope is the class of the root in Flax; a function without a root module lacks
    this scope.
    """
    plain = without_methods(names)
    return ("/".join(plain[1:]), "/".join(plain)) if plain else ("",)


def without_methods(names: Path) -> Path:
    """Returns the names of modules for scopes.

    Flax adds the method to a name unless it is `__call__`, such as `embed.attend`. A module that
    calls its own method, or a function by `nn.cond`, has two scopes: `odds/odds.<lambda>`. Names
    with more dots, such as Equinox's `eqx.nn.Linear`, are unchanged.

    Example:
      >>> without_methods(("Net", "odds", "odds.helper", "dense"))
      ('Net', 'odds', 'dense')
    """
    modules: list[str] = []
    before = ""
    for name in names:
        own = name.partition(".")[0] if name.count(".") == 1 else name
        if not (modules and modules[-1] == own and "." in before + name):
            modules.append(own)
        before = name
    return tuple(modules)


def with_parameters(jaxpr: _compat.AnyJaxpr, change: Callable[[Any], Any]) -> _compat.AnyJaxpr:
    """Applies a function to all parameters of a jaxpr's equations, at any depth.

    Args:
      jaxpr: open or closed.
      change: parameter -> new parameter; called for each element of a tuple or list.

    Returns:
      The new jaxpr, open or closed as `jaxpr` is.
    """

    def changed(value: Any) -> Any:
        if is_jaxpr(value):
            return with_parameters(value, change)
        if type(value) in (tuple, list):
            return type(value)(map(changed, value))
        return change(value)

    body, _ = _compat.jaxpr_body(jaxpr)
    equations = [
        equation.replace(params={key: changed(value) for key, value in equation.params.items()})
        for equation in body.eqns
    ]
    new = body.replace(eqns=equations)
    return new if body is jaxpr else jaxpr.replace(jaxpr=new)


# ---------------------------------------------------------------------------
# Forward, backward, recompute
# ---------------------------------------------------------------------------

FORWARD, BACKWARD, RECOMPUTE = "forward", "backward", "recompute"


def phase_of(name_stack: str, outer: str = FORWARD) -> str:
    """Returns the pass of an equation: "forward", "backward" or "recompute".

    Args:
      name_stack: the name stack of the equation.
      outer: the pass of the equation that contains it, if its name stack does not specify one.

    Example:
      >>> phase_of("jvp(Net)/head"), phase_of("transpose(jvp(Net))/head")
      ('forward', 'backward')
      >>> phase_of("rematted_computation/head", outer="backward")
      'recompute'
    """
    backward, recompute = name_stack.rfind("transpose("), name_stack.rfind("rematted_computation")
    if backward == recompute == -1:
        return outer
    return BACKWARD if backward > recompute else RECOMPUTE


def array_aval(var: _compat.Var | _compat.Literal) -> ShapedArray:
    """Returns the recorded type of a variable that is an array."""
    return var.aval  # type: ignore[return-value]
