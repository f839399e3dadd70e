"""Branches in which delayed scaling measures a tensor before its first quantization.

XLA for GPUs stores a tensor that a branch reads, copies each row of an array that a loop reads, and
waits for the predicate on the host. Inside a loop over layers, these costs arise in each step and
layer. `with_branches_outside` therefore has two versions of a loop, and one branch in front of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_batching import custom_vmap
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, jaxpr_as_fun

from jaxmp._core import _compat
from jaxmp._core._jaxprs import FIRST_STEP, equations, sub_jaxprs
from jaxmp._core._programs._constructs import CALLS, REMATS, call_of
from jaxmp._core._programs._interpreter import Frame, Interpreter
from jaxmp._core._typing import PyTree
from jaxmp.fp8._scaling import DelayedScaling
from jaxmp.fp8._state import AGE, OPERANDS, State

_T = TypeVar("_T")

# Prefix of the names of predicates of `if_known`; `amax_compute` follows.
_IS_KNOWN = "jaxmp_fp8_is_known_"


def if_known(
    scaling: DelayedScaling,
    is_known: jax.Array,
    known: Callable[[], _T],
    measure: Callable[[], _T],
) -> _T:
    """Returns `known()` if amaxes of earlier steps are known, otherwise `measure()`.

    `measure` must also be correct for known amaxes.
    """
    named = checkpoint_name(is_known, _IS_KNOWN + scaling.amax_compute)
    return lax.cond(named, known, measure)


def with_branches_outside(evaluate: Callable[[], PyTree], states: Sequence[State]) -> PyTree:
    """Returns `evaluate()`, in which loops over layers contain no branches of `if_known`.

    Args:
      evaluate: computes gradients; it is traced once.
      states: the active states of all layers that it runs.
    """
    if not any(map(_may_branch_in_loop, states)):
        return evaluate()
    results: list[Any] = []

    def arrays() -> list[jax.Array]:
        leaves, structure = jax.tree.flatten(evaluate())
        results[:] = [structure, leaves]
        return [leaf for leaf in leaves if isinstance(leaf, jax.Array)]

    closed = jax.make_jaxpr(arrays)()
    structure, leaves = results
    names = _predicates(closed)
    if names:
        values = iter(_BranchesOutside(_are_known(states, names)).run(closed, []))
    else:
        values = iter(jaxpr_as_fun(closed)())
    leaves = [next(values) if isinstance(leaf, jax.Array) else leaf for leaf in leaves]
    return structure.unflatten(leaves)


def _may_branch_in_loop(state: State) -> bool:
    """Returns True for stacked layers that measure partial maxima."""
    return state[AGE].ndim > 0 and state[f"{OPERANDS[0]}_amax_history"].shape[-2] > 1


def _predicates(jaxpr: Jaxpr | ClosedJaxpr) -> set[str]:
    return {each.params["name"] for each in equations(jaxpr) if _is_predicate(each)}


def _is_predicate(equation: Any) -> bool:
    is_name = equation.primitive.name == "name"
    return is_name and equation.params["name"].startswith(_IS_KNOWN)


def _are_known(states: Sequence[State], names: set[str]) -> jax.Array:
    """Returns True if all predicates of these names are True."""
    # A scale comes from the largest or the newest entry of the history, or from a stored amax.
    entry = 1 if names == {_IS_KNOWN + "max"} else 2
    amaxes = [
        state[f"{role}_amax"][..., entry].reshape(-1) for state in states for role in OPERANDS
    ]
    smallest = _smallest(jnp.concatenate(amaxes))
    axes = tuple(sorted(_compat.varying_axes(smallest), key=str))
    return (_compat.smallest(smallest, axes) if axes else smallest) > np.float32(0)


@custom_vmap
def _smallest(amaxes: jax.Array) -> jax.Array:
    return jnp.min(amaxes)


# If the predicates of examples differed, `vmap` would run both versions of a loop.
@_smallest.def_vmap
def _(axis_size: int, in_batched: list[bool], amaxes: jax.Array) -> Any:
    del axis_size, in_batched
    return _smallest(amaxes.reshape(-1)), False


class _BranchesOutside(Interpreter):
    """Interpreter with one branch in front of each loop that contains branches."""

    def __init__(self, are_known: jax.Array) -> None:
        super().__init__()
        self.are_known = are_known

    def equation(self, equation: JaxprEqn, operands: list[Any], frame: Frame) -> list[Any]:
        name = equation.primitive.name
        inner = next(iter(sub_jaxprs(equation)), None)
        if inner is not None and _predicates(inner):
            if name == "scan":
                return self._branch(equation, operands, frame)
            if name in CALLS | REMATS and any(e.primitive.name == "scan" for e in equations(inner)):
                return self.enter(equation, operands, frame)
        return self.bound(equation, operands)

    def _branch(self, equation: JaxprEqn, operands: list[Any], frame: Frame) -> list[Any]:
        """Evaluates the version of a loop for known or for unknown amaxes."""

        def version(is_known: bool) -> Callable[..., list[Any]]:
            return lambda *operands: _Version(is_known).enter(equation, list(operands), frame)

        measure = version(False)
        measure.__name__ = FIRST_STEP
        return lax.cond(self.are_known, version(True), jax.jit(measure), *operands)


class _Version(Interpreter):
    """Interpreter of a loop with a constant instead of the predicates of `if_known`."""

    def __init__(self, is_known: bool) -> None:
        super().__init__()
        self.is_known = is_known

    def equation(self, equation: JaxprEqn, operands: list[Any], frame: Frame) -> list[Any]:
        if _is_predicate(equation):
            # XLA evaluates the comparison of a value with itself.
            compare = lax.eq if self.is_known else lax.ne
            return [compare(operands[0], operands[0])]
        if not any(map(_predicates, sub_jaxprs(equation))):
            return self.bound(equation, operands)
        if equation.primitive.name != "jit":
            return self.enter(equation, operands, frame)
        # Jitted again, because `jaxmp.with_stats` and the audit read the names of functions.
        call, place = call_of(equation), frame.place.of(equation)

        def function(*args: Any) -> list[Any]:
            return self.run(call.jaxpr, args, place)

        function.__name__ = call.name
        return jax.jit(function)(*operands)
