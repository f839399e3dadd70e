"""Layers whose results a model compares or returns: their FP32 sums are not rounded to 16 bits.

The first call of a model, with arguments of these shapes, is traced once more. In this trace each
module labels its floating arguments and results by the primitive `name`. An analysis of the program
follows values backward: from softmax, top-k and argmax, and from the results of the model, through
casts, biases, scalings, soft-caps, masks, slices and reshapes, to the labels.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import JaxprEqn

from jaxmp._autocast._resolve import trace
from jaxmp._core._compat import context, current_context
from jaxmp._core._dtypes import is_16bit
from jaxmp._core._typing import PyTree
from jaxmp._flax._casts import IsLeaf, computes_in_16_bits
from jaxmp._flax._layer_table import CONV, LayerTraits
from jaxmp._policies._load import PolicyMap
from jaxmp._policies._resolve import resolve_policy
from jaxmp._programs._analysis import Backward
from jaxmp._programs._constructs import scan_of
from jaxmp._programs._interpreter import Frame
from jaxmp._programs._jaxprs import sub_jaxprs
from jaxmp.fp8._explain import recorded

# `Context.decisions` while a model is traced for its labels.
SEARCH = "search"
# Method of a model, and shapes of its arguments -> labels of values -> why they are not rounded.
Decisions: TypeAlias = dict[Any, dict[str, str]]

# ---------------------------------------------------------------------------
# Analysis
# ---------------------------------------------------------------------------

# What becomes of a value.
_OUTPUT, _CHOICE, _MAXIMUM, _EXPONENTIAL = "output", "choice", "maximum", "exponential"
# It is multiplied by another matrix; a construct fixes its dtype; anything else.
_MATMUL, _FIXED, _OTHER = "matmul", "fixed", "other"

# Primitives whose results are used as their operands are.
_PASSING = frozenset(
    "name stop_gradient convert_element_type reduce_precision reshape squeeze expand_dims transpose "
    "slice rev copy broadcast_in_dim neg tanh add sub mul div max min select_n clamp concatenate pad gather "
    "dynamic_slice optimization_barrier sharding_constraint mesh_cast scatter".split()
)
_ENDS = {
    **dict.fromkeys(("argmax", "argmin", "top_k", "approx_top_k", "sort"), _CHOICE),
    **dict.fromkeys(("dot_general", "ragged_dot_general"), _MATMUL),
    **dict.fromkeys(("dynamic_update_slice", "while", "cond"), _FIXED),
    "reduce_max": _MAXIMUM,
}


class _Uses(Backward):
    """What becomes of each value of a model, as a set of the words above."""

    nothing: frozenset[str] = frozenset()

    def __init__(self) -> None:
        # Label -> what becomes of the values that have it.
        self.labels: dict[str, frozenset[str]] = {}

    def join(self, first: frozenset[str], second: frozenset[str]) -> frozenset[str]:
        return first | second

    def equation(
        self, equation: JaxprEqn, results: list[Any], frame: Frame
    ) -> list[frozenset[str]]:
        name = equation.primitive.name
        uses = frozenset[str]().union(*results)
        if name in _ENDS:
            inside = self.enter(equation, [frozenset((_FIXED,))] * len(results), frame)
            return [each or frozenset((_ENDS[name],)) for each in inside]
        if not uses:
            return [uses] * len(equation.invars)
        if name == "name":
            label = equation.params["name"]
            self.labels[label] = self.labels.get(label, frozenset()) | uses
        if name in _PASSING:
            return [uses] * len(equation.invars)
        if name == "exp":
            # The probabilities of attention are multiplied by values; those of a router also choose.
            is_attention = _MATMUL in uses and _CHOICE not in uses
            return [frozenset((_OTHER if is_attention else _EXPONENTIAL,))]
        if name == "scan":
            carried = scan_of(equation).carry
            results = [uses and uses | {_FIXED} for uses in results[:carried]] + results[carried:]
        if sub_jaxprs(equation):
            return self.enter(equation, results, frame)
        return [frozenset((_OTHER,))] * len(equation.invars)


def _reason(uses: frozenset[str]) -> str:
    """Returns why a value is not rounded; "" if it is."""
    if _FIXED in uses:
        return ""
    if _CHOICE in uses:
        return "its result is compared by argmax, top-k or sort"
    if {_MAXIMUM, _EXPONENTIAL} <= uses:
        return "its result enters a softmax"
    return "its result is that of the model" if uses == {_OUTPUT} else ""


# ---------------------------------------------------------------------------
# Labels of values
# ---------------------------------------------------------------------------


def labeled(tree: PyTree, owner: str, is_leaf: IsLeaf) -> PyTree:
    """Labels the floating arrays of arguments or results while a model is searched.

    Args:
      tree: the arguments or results.
      owner: path and method of the module, and which of them they are.
      is_leaf: as in `jax.tree.map`.
    """
    if current_context().decisions != SEARCH:
        return tree
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_leaf)
    new = [
        checkpoint_name(leaf, f"{owner}{n}")
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.floating)
        else leaf
        for n, leaf in enumerate(leaves)
    ]
    return structure.unflatten(new)


def unrounded(tree: PyTree, owner: str, is_leaf: IsLeaf) -> frozenset[int]:
    """Returns the ids of the arrays that are not rounded; arguments as in `labeled`."""
    found = current_context().decisions or ()
    if found == SEARCH:
        return frozenset()
    if not any(label.startswith(owner) for label in found):
        return frozenset()
    leaves = jax.tree.leaves(tree, is_leaf=is_leaf)
    return frozenset(id(leaf) for n, leaf in enumerate(leaves) if f"{owner}{n}" in found)


def is_decision(traits: LayerTraits, path: Sequence[str], method: str) -> bool:
    """Returns True if a method of a module is the matmul of a layer with an unrounded result."""
    found = current_context().decisions
    if not found or found == SEARCH or traits.dot is CONV:
        return False
    is_matmul = method == ("attend" if traits.embedding else "__call__")
    is_layer = bool(traits.kernel or traits.embedding) and is_matmul
    return is_layer and f"{owner_of('/'.join(path), method, 'result')}0" in found


def owner_of(path: str, method: str, kind: str) -> str:
    """Returns the first part of the labels of the arguments or results of a method."""
    return f"jaxmp {path}.{method} {kind} "


# ---------------------------------------------------------------------------
# Search
# ---------------------------------------------------------------------------


def decisions_of(
    known: Decisions,
    policies: PolicyMap,
    path: tuple[str, ...],
    called: Any,
    fn: Callable[..., PyTree],
    state: PyTree,
    args: tuple[PyTree, ...],
    kwargs: dict[str, PyTree],
) -> Hashable:
    """Returns the labels of the values of a call of a model that are not rounded.

    Args:
      known: the results of earlier calls of the same model, to which this adds its own.
      policies, path: of the model.
      called: its method.
      fn: function of `state`, `args` and `kwargs` that calls the model.
      state: the variables of the model.
      args, kwargs: its arguments.
    """
    if current_context().decisions is not None or not computes_in_16_bits(policies):
        return current_context().decisions
    leaves, structure = jax.tree.flatten((args, kwargs))
    key = path, called.__qualname__, called.__code__, structure, *map(_described, leaves)
    if key not in known:
        known[key] = _search(policies, path, fn, (state, *args), kwargs)
    return frozenset(known[key])


def _described(leaf: Any) -> Hashable:
    """Returns the shape and dtype of an array, a plain value, or the type of another object."""
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return leaf.shape, leaf.dtype
    return leaf if isinstance(leaf, (bool, int, float, str)) else type(leaf)


def _search(
    policies: PolicyMap,
    path: tuple[str, ...],
    fn: Callable[..., PyTree],
    args: tuple[PyTree, ...],
    kwargs: dict[str, PyTree],
) -> dict[str, str]:
    """Traces a call of a model with labels."""
    try:
        with context(decisions=SEARCH), recorded(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            traced, _ = trace(fn, args, kwargs)
    except Exception:
        # The call itself raises the same error, or it reads values of arrays outside of `jit`.
        return {}
    is_rounded = is_16bit(resolve_policy(policies, path).output_dtype)
    use = frozenset((_OTHER if is_rounded else _OUTPUT,))
    uses = _Uses()
    uses.run(traced.closed, [use] * len(traced.closed.jaxpr.outvars))
    reasons = {label: _reason(each) for label, each in uses.labels.items()}
    return {label: reason for label, reason in reasons.items() if reason}
