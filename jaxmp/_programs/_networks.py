"""Networks of a step that have the same modules: which parameters each call of a model reads."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any

from jaxmp import _core
from jaxmp._core._compat import ClosedJaxpr, JaxprEqn
from jaxmp._programs._analysis import Forward
from jaxmp._programs._interpreter import Frame
from jaxmp._programs._jaxprs import Path
from jaxmp._programs._locations import model_call
from jaxmp._programs._matmuls import MATMULS
from jaxmp._programs._observe import modules_of
from jaxmp._programs._uses import EXACT


class _Reads(Forward):
    """Finds the arguments that are operands of matmuls, also if they are cast or moved before.

    Its facts are numbers of arguments.
    """

    def __init__(self) -> None:
        super().__init__()
        # (Calls that enclose that of the model, name scopes of the matmul, number of the argument).
        self.found: list[tuple[Any, Path, int]] = []

    def equation(self, equation: JaxprEqn, operands: list[Any], frame: Frame) -> list[Any]:
        read = [number for number in operands if number is not None]
        if read and equation.primitive.name in MATMULS:
            call, names = model_call(equation), frame.place.of(equation).names
            self.found += [(call, names, number) for number in read if call]
        if read and equation.primitive.name in EXACT:
            return read[:1] * len(equation.outvars)
        return self.enter(equation, operands, frame)


def networks_of(
    jaxpr: ClosedJaxpr, paths: Sequence[Path], name_of: Callable[[int, int], str]
) -> dict[Any, str]:
    """Returns the calls of models -> the name of their network, such as "generator".

    Only networks that have a module of the same path are contained.

    Args:
      jaxpr: the step.
      paths: the path of each of its arrays, such as that of a parameter in the state.
      name_of: returns the name of the network with the parameter of that number, from the number of
        names in its path before the modules.
    """
    reads = _Reads()
    reads.run(jaxpr, range(len(paths)))
    modules = list(modules_of(names for _, names, _ in reads.found))
    of_modules = collections.defaultdict[str, set[str]](set)
    of_calls = collections.defaultdict[Any, set[str]](set)
    for (call, _, number), module in zip(reads.found, modules, strict=True):
        length = _length(paths[number], module)
        if length is not None:
            of_modules[module].add(name_of(number, length))
            of_calls[call].add(name_of(number, length))
    shared = set[str]().union(*(own for own in of_modules.values() if len(own) > 1))
    # One line may call two networks, as in a loop.
    return {call: min(own) for call, own in of_calls.items() if len(own) == 1 and own <= shared}


def _length(path: Path, module: str) -> int | None:
    """Returns the number of names before those of a module; None for another parameter."""
    parts = module.split("/") if module else []
    # The path may begin with the class of the network. Other arrays are not below a module.
    for own in (parts, parts[1:] or parts):
        for start in range(len(path) - len(own) - 1, -1, -1):
            if list(path[start : start + len(own)]) == own:
                return start - (path[:start][-1:] == (_core.PARAMS,))
    return None
