"""Variables of a jaxpr that are the outputs of modules in the forward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from jaxmp._core._compat import jaxpr_body
from jaxmp._core._jaxprs import FORWARD, Atom, Path, equations, is_literal
from jaxmp._core._locations import FULL_PRECISION
from jaxmp._core._programs._constructs import scan_of
from jaxmp._core._programs._interpreter import Place


class ModuleOutputs:
    """Consumers in the forward pass, and outputs of modules, of one jaxpr."""

    def __init__(
        self, jaxpr: Jaxpr | ClosedJaxpr, place: Place, used: Sequence[bool] | None
    ) -> None:
        body, _ = jaxpr_body(jaxpr)
        used = [True] * len(body.outvars) if used is None else used
        places = [place.of(equation) for equation in equations(body, inside=False)]
        self.consumers = _consumers(body, places, used)
        self.last = _last_outputs(body, places, place.scopes, self.consumers)


def used_inside(equation: JaxprEqn, used: list[bool]) -> list[bool]:
    """Returns which results of the jaxpr of an equation are used, for those of the equation."""
    name = equation.primitive.name
    carried = scan_of(equation).carry if name == "scan" else len(used) if name == "while" else 0
    return [True] * carried + used[carried:]


def _consumers(
    body: Any, places: list[Place], used: Sequence[bool]
) -> dict[Atom, list[Path | None]]:
    """Returns variable -> scopes of its forward consumers; None if the jaxpr returns it."""
    consumers: dict[Atom, list[Path | None]] = {}
    for equation, (path, phase) in zip(equations(body, inside=False), places, strict=True):
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
    places: list[Place],
    outer: Path,
    consumers: Mapping[Atom, list[Path | None]],
) -> dict[Atom, list[Path]]:
    """Returns variable -> paths of the modules of which it is the output."""
    last: dict[Path, Atom] = {}
    for equation, (path, phase) in zip(equations(body, inside=False), places, strict=True):
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
