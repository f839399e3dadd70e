"""Jaxprs: equations, the modules they come from, who reads what. The only jaxpr walker."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from jaxmp._compat import jaxpr_body

Path = tuple[str, ...]

# What JAX writes around a scope: `transpose(jvp(block))`, `vmap(block)`.
_TRANSFORM = re.compile(r"\b[\w.]+\(|\)")
# The scope of a cast that autocast puts in.
AUTOCAST = "jaxmp_autocast"
# Scopes that are no modules. JAX adds two for a rematerialised region; for an einsum it adds
# "ij,jk->ik".
_NO_MODULES = frozenset({"rematted_computation", "checkpoint", AUTOCAST})


def equations(jaxpr: Any) -> Iterator[Any]:
    """Every equation of a jaxpr, those of its sub-jaxprs after the equation that holds them.

    Args:
      jaxpr: open or closed.
    """
    for equation in jaxpr_body(jaxpr)[0].eqns:
        yield equation
        for inner in sub_jaxprs(equation):
            yield from equations(inner)


def sub_jaxprs(equation: Any) -> list[Any]:
    """The jaxprs among the parameters of an equation, in their order."""
    found = []
    for value in equation.params.values():
        values = value if isinstance(value, (tuple, list)) else (value,)
        found += [inner for inner in values if is_jaxpr(inner)]
    return found


def is_jaxpr(value: Any) -> bool:
    """Whether a value is a jaxpr, open or closed."""
    return hasattr(value, "eqns") and hasattr(value, "outvars")


def consumers(jaxpr: Any) -> dict[Any, list[Any]]:
    """Variable -> the equations that read it; None stands for the jaxpr's own result."""
    body = jaxpr_body(jaxpr)[0]
    found: dict[Any, list[Any]] = {}
    for equation in body.eqns:
        for var in equation.invars:
            if not is_literal(var):
                found.setdefault(var, []).append(equation)
    for var in body.outvars:
        if not is_literal(var):
            found.setdefault(var, []).append(None)
    return found


def is_literal(var: Any) -> bool:
    """Whether an equation's operand is a constant written into it."""
    return hasattr(var, "val")


@functools.lru_cache(maxsize=65536)
def scope_names(name_stack: str) -> Path:
    """The named scopes of a name stack, as they were in the forward pass.

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
    """The backward pass of a rematerialised region names the way there twice: here it is once."""
    for length in range(len(names) // 2, 0, -1):
        if names[:length] == names[length : 2 * length]:
            return names[length:]
    return names


def module_paths_of(names: Path) -> tuple[str, ...]:
    """Module paths that scopes may stand for: whole, and below the root's own scope.

    Flax names the root by its class; a function without a root module has no such scope. Methods
    other than `__call__` stand behind a dot: `embed.attend`. Equinox names a layer by its class,
    `eqx.nn.Linear`.
    """
    plain = tuple(n.partition(".")[0] if n.count(".") == 1 else n for n in names)
    return ("/".join(plain[1:]), "/".join(plain)) if plain else ("",)


def with_parameters(jaxpr: Any, change: Callable[[Any], Any]) -> Any:
    """A jaxpr whose equations' parameters, at any depth, went through a function.

    Args:
      jaxpr: open or closed.
      change: parameter -> what takes its place; tuples are handed over element by element.
    """

    def changed(value: Any) -> Any:
        if is_jaxpr(value):
            return with_parameters(value, change)
        if type(value) in (tuple, list):
            return type(value)(map(changed, value))
        return change(value)

    body, _ = jaxpr_body(jaxpr)
    equations = [
        equation.replace(params={key: changed(value) for key, value in equation.params.items()})
        for equation in body.eqns
    ]
    new = body.replace(eqns=equations)
    return new if body is jaxpr else jaxpr.replace(jaxpr=new)


# ---------------------------------------------------------------------------
# Sub-jaxprs: whose operands they are given, how often they run
# ---------------------------------------------------------------------------


class Inner(NamedTuple):
    """A jaxpr inside an equation, and what its variables are outside."""

    jaxpr: Any  # without its constants
    # For each of its invars and outvars: the variable of the equation, or None if unknown.
    operands: list[Any]
    results: list[Any]
    # How often it runs each time that the equation does; 1 for a loop that ends by a test.
    times: int


def inners(equation: Any) -> list[Inner]:
    """The jaxprs of an equation, each with its operands and results."""
    params, name = equation.params, equation.primitive.name
    if name == "while":
        return _inner_while(equation)
    operands = equation.invars[1:] if name == "cond" else equation.invars
    times = params["length"] if name == "scan" else _devices(params) if name == "shard_map" else 1
    return [
        Inner(
            body, _matched(operands, body.invars), _matched(equation.outvars, body.outvars), times
        )
        for body in (jaxpr_body(jaxpr)[0] for jaxpr in sub_jaxprs(equation))
    ]


def _inner_while(equation: Any) -> list[Inner]:
    params, invars = equation.params, equation.invars
    tested, looped = (jaxpr_body(params[key])[0] for key in ("cond_jaxpr", "body_jaxpr"))
    first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    return [
        Inner(tested, [*invars[:first], *invars[second:]], [None], 1),
        Inner(looped, list(invars[first:]), list(equation.outvars), 1),
    ]


def _matched(outside: Any, inside: Any) -> list[Any]:
    same = len(outside) == len(inside)
    return list(outside) if same else [None] * len(inside)


def _devices(params: Any) -> int:
    """Over how many devices a `shard_map` spreads: its jaxpr has the shapes of one."""
    count = 1
    for axis in params.get("manual_axes", params.get("newly_manual_axes", ())):
        count *= params["mesh"].shape[axis]
    return count


# ---------------------------------------------------------------------------
# Forward, backward, recompute
# ---------------------------------------------------------------------------

FORWARD, BACKWARD, RECOMPUTE = "forward", "backward", "recompute"


def phase_of(name_stack: str, outer: str = FORWARD) -> str:
    """Which pass a name stack stands in, within an equation of the pass `outer`.

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
