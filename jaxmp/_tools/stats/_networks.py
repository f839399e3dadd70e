"""Networks of a step that have the same modules: which parameters each call of a model reads."""

from __future__ import annotations

import collections
from typing import Any

from jaxmp import _core, _programs
from jaxmp._core._compat import JaxprEqn
from jaxmp._tools.audit import _trace


class _Reads(_programs.Forward):
    """Finds the arguments that are operands of matmuls, also if they are cast or moved before.

    Its facts are numbers of arguments.
    """

    def __init__(self) -> None:
        super().__init__()
        # (Calls that enclose that of the model, name scopes of the matmul, number of the argument).
        self.found: list[tuple[Any, _programs.Path, int]] = []

    def equation(
        self, equation: JaxprEqn, operands: list[Any], frame: _programs.Frame
    ) -> list[Any]:
        read = [number for number in operands if number is not None]
        if read and equation.primitive.name in _programs.MATMULS:
            call, names = _programs.model_call(equation), frame.place.of(equation).names
            self.found += [(call, names, number) for number in read if call]
        if read and equation.primitive.name in _programs.EXACT:
            return read[:1] * len(equation.outvars)
        return self.enter(equation, operands, frame)


def networks_of(traced: _trace.Traced) -> dict[Any, str]:
    """Returns the calls of models -> the argument with the parameters, such as "generator".

    Only networks that have a module of the same path are contained.
    """
    reads = _Reads()
    reads.run(traced.closed, range(len(traced.leaves)))
    modules = list(_programs.modules_of(names for _, names, _ in reads.found))
    of_modules = collections.defaultdict[str, set[str]](set)
    of_calls = collections.defaultdict[Any, set[str]](set)
    for (call, _, number), module in zip(reads.found, modules, strict=True):
        if network := _network(traced, number, module):
            of_modules[module].add(network)
            of_calls[call].add(network)
    shared = set[str]().union(*(own for own in of_modules.values() if len(own) > 1))
    # One line may call two networks, as in a loop.
    return {call: min(own) for call, own in of_calls.items() if len(own) == 1 and own <= shared}


def _network(traced: _trace.Traced, number: int, module: str) -> str:
    """Returns the part of an argument that has the parameters of a module's network; or ""."""
    path = traced.leaves[number].path
    names, parts = _core.path_names(path), module.split("/") if module else []
    # The path may begin with the class of the network.
    for own in (parts, parts[1:]):
        for start in range(len(names) - len(own) - 1, 1, -1):
            if list(names[start : start + len(own)]) == own:
                end = start - (names[start - 1] == _core.PARAMS)
                return traced.text_of(path[1:end]) if end > 1 else ""
    return ""
