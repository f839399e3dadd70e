"""The jitted functions of a script: those that it calls, and the train steps that it defines."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterable
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr

from jaxmp import _core, _programs
from jaxmp._core import _compat
from jaxmp._core._compat import _watch_jit
from jaxmp._programs import Lines
from jaxmp._tools.audit import _auditor, _dataflow

# FLOPs that take a CPU seconds.
_LARGE = 10**10
# Functions that step functions call.
_OF_STEPS = frozenset(
    ("grad", "value_and_grad", "filter_grad", "filter_value_and_grad", "vjp", "linearize")
) | frozenset(("apply_gradients", "apply_updates", "incremental_update"))
# Types of the results of `jax.jit`, `nnx.jit` and `eqx.filter_jit`.
_JITTED = ("PjitFunction", "JitWrapped", "SimpleJitWrapped", "_JitWrapper")


class Watched:
    """Jitted function with the shapes of one call."""

    def __init__(self, call: _watch_jit.JitCall) -> None:
        body = _compat.jaxpr_body(call.jaxpr)[0]
        # The line that defines the function, or else of its first operation.
        lines = (Lines().of((equation,)) for equation in _programs.equations(body))
        self.location = _place([_definition(call.source)]) or _place(lines)
        self.flops = _programs.count_flops(body).total()
        self.takes_gradients = has_backward(body)
        # Most functions are single operations outside of `jit`, such as `jnp.zeros`.
        may_update = bool(_definition(call.source)[0] and not self.flops)
        self.updates = (self.takes_gradients or may_update) and updates_state(body)
        self.inner = {_programs.name_of(equation) for equation in _programs.equations(body)}
        # False for a function of a library, and for an operation outside of `jit`.
        names = [equation.primitive.name for equation in _programs.equations(body, inside=False)]
        is_function = call.source is None and names != [call.name]
        self.is_own = is_function or bool(_definition(call.source)[0])
        self.calls = 0
        self.call = call._replace(args=_shapes(call.args), kwargs=_shapes(call.kwargs))

    @property
    def is_step(self) -> bool:
        """True if the function takes gradients, or updates parameters, such as an average."""
        return self.takes_gradients or self.updates

    @property
    def is_left_out(self) -> bool:
        """True if the function is not executed; the script continues with zeros as results."""
        return self.takes_gradients or (self.flops > _LARGE and jax.default_backend() == "cpu")

    def __str__(self) -> str:
        return f"{self.call.name} ({self.location})" if self.location else self.call.name


def has_backward(jaxpr: Jaxpr | ClosedJaxpr) -> bool:
    """Returns True if a program contains a backward pass."""
    return any("transpose(" in str(e.source_info.name_stack) for e in _programs.equations(jaxpr))


def updates_state(jaxpr: Jaxpr | ClosedJaxpr) -> bool:
    """Returns True if a program returns an argument to which gradients or others were added.

    A train step returns parameters in this way. Gradients and predictions are computed from
    arguments by matmuls, and from each other by `add_any`.
    """
    body = _compat.jaxpr_body(jaxpr)[0]
    auditor = _auditor.Auditor(_auditor.PolicyContext(None))
    for number, var in enumerate(body.invars):
        auditor.flow.mark(var, _dataflow.From(number, _dataflow.PLUS))
    auditor.run(_programs.Scope(body))
    updates = ((var, x) for var in body.outvars for x in auditor.flow.labels(_dataflow.Update, var))
    pairs = [(body.invars[label.number].aval, var.aval) for var, label in updates]
    is_array = lambda aval: aval.size > 1 and jnp.issubdtype(aval.dtype, np.floating)
    return any(is_array(before) and before.shape == after.shape for before, after in pairs)


def _definition(source: Callable[..., Any] | None) -> tuple[str, int]:
    """Returns the file and line of a function of the user; ("", 0) for other functions."""
    return Lines().first_own([_watch_jit.definition_of(source)])


def _place(places: Iterable[tuple[str, int]]) -> str:
    """Returns the first known line as `train.py:12`; "" without one."""
    return next((f"{Path(file).name}:{line}" for file, line in places if file), "")


def defined_steps() -> dict[FunctionType, str]:
    """Returns the jitted functions of the user whose code takes gradients or updates parameters.

    The values are texts such as "update_actor (train.py:12)".
    """
    jitted = [item for item in gc.get_objects() if type(item).__name__ in _JITTED]
    functions = filter(_is_own, map(_watch_jit.python_function, jitted))
    steps = (f for f in functions if not _OF_STEPS.isdisjoint(_names(f)))
    return {step: f"{_watch_jit.title_of(step)} ({_place([_definition(step)])})" for step in steps}


def _is_own(function: Any) -> TypeGuard[FunctionType]:
    return isinstance(function, FunctionType) and bool(_definition(function)[0])


def _names(function: FunctionType) -> set[str]:
    """Returns the names that a function, and functions of the user that it calls, read."""
    functions, names = [function], set[str]()
    for current in functions:
        codes = [current.__code__]
        for code in codes:
            names.update(code.co_names, code.co_freevars)
            codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        cells = zip(current.__code__.co_freevars, current.__closure__ or (), strict=True)
        scope = current.__globals__ | {name: _content(cell) for name, cell in cells}
        values = [scope[name] for name in names & scope.keys()]
        called = {
            _watch_jit.python_function(x) for x in values if callable(x) and not isinstance(x, type)
        }
        functions += [x for x in filter(_is_own, called) if x not in functions]
    return names


def _content(cell: Any) -> object:
    with contextlib.suppress(ValueError):  # An empty cell.
        return cell.cell_contents
    return None


def _shapes(tree: _core.PyTree) -> _core.PyTree:
    """Replaces arrays by shapes; NNX modules, which contain their arrays, are not changed."""
    is_nnx = lambda x: any(c.__module__.startswith("flax.nnx") for c in type(x).__mro__)
    return jax.tree.map(_shape, tree, is_leaf=is_nnx)


def _shape(leaf: object) -> object:
    if isinstance(leaf, jax.Array):
        weak = getattr(jax.typeof(leaf), "weak_type", False)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding, weak_type=weak)
    if isinstance(leaf, np.ndarray):
        # NumPy's int64 is int32 without x64.
        return jax.ShapeDtypeStruct(leaf.shape, _core.canonical(np.empty(0, leaf.dtype)).dtype)
    return leaf
