"""Layers whose results a model compares or returns: their FP32 sums are not rounded to 16 bits.

The first call of a model, with arguments of these shapes, is traced once more. In this trace each
module labels its floating arguments and results by the primitive `name`, and `Uses` finds the
labels whose values reach a softmax, an order or a loss, or are the results of the model and have no
other use. Layers return the FP32 sums of such results, and modules pass them on without a cast.
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
from jaxmp._core._typing import PyTree
from jaxmp._flax._casts import IsLeaf, computes_in_16_bits
from jaxmp._flax._layer_table import CONV, LayerTraits
from jaxmp._policies._load import PolicyMap
from jaxmp._programs._constructs import scan_of
from jaxmp._programs._interpreter import Frame
from jaxmp._programs._uses import Use, Uses, wide_results
from jaxmp.fp8._explain import recorded

# `Context.decisions` while a model is traced for its labels.
SEARCH = "search"
# Method of a model, and shapes of its arguments -> labels of values -> why they are not rounded.
Decisions: TypeAlias = dict[Any, dict[str, str]]

# ---------------------------------------------------------------------------
# Analysis
# ---------------------------------------------------------------------------


class _LabelUses(Uses):
    """Uses of labeled values. Those of the carry of a loop, and of a branch, have a fixed dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.of_labels: dict[str, Use] = {}

    def equation(self, equation: JaxprEqn, results: list[Any], frame: Frame) -> list[Any]:
        name = equation.primitive.name
        if name == "name":
            label = equation.params["name"]
            self.of_labels[label] = self.of_labels.get(label, Use.NONE) | results[0]
        if name in ("scan", "while", "cond"):
            fixed = scan_of(equation).carry if name == "scan" else len(results)
            results = [Use.NONE] * fixed + results[fixed:]
        return super().equation(equation, results, frame)


def _reason(use: Use) -> str:
    """Returns why a value is not rounded; "" if it is."""
    reasons = {
        Use.ORDER: "argmax, top-k or a sort compares its results",
        Use.SOFTMAX: "a softmax reads its results",
        Use.LOSS: "a loss reads its results",
    }
    if use == Use.RESULT:
        return "its results are those of the model"
    return next((reasons[each] for each in reasons if each in use), "")


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
        known[key] = _search(fn, (state, *args), kwargs)
    return frozenset(known[key])


def _described(leaf: Any) -> Hashable:
    """Returns the shape and dtype of an array, a plain value, or the type of another object."""
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return leaf.shape, leaf.dtype
    return leaf if isinstance(leaf, (bool, int, float, str)) else type(leaf)


def _search(
    fn: Callable[..., PyTree], args: tuple[PyTree, ...], kwargs: dict[str, PyTree]
) -> dict[str, str]:
    """Traces a call of a model with labels."""
    try:
        with context(decisions=SEARCH), recorded(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            traced, _ = trace(fn, args, kwargs)
    except Exception:
        # The call itself raises the same error, or it reads values of arrays outside of `jit`.
        return {}
    uses = _LabelUses()
    jaxpr = traced.closed.jaxpr
    uses.facts(jaxpr, wide_results(jaxpr))
    reasons = {label: _reason(use) for label, use in uses.of_labels.items()}
    return {label: reason for label, reason in reasons.items() if reason}
