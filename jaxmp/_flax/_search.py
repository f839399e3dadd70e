"""Search of the first call of a model: results that must not be rounded, and missing precision.

The first call with arguments of these shapes is traced once more. In this trace each module labels
its floating arguments and results by the primitive `name`, and `Uses` finds the labels whose values
reach a softmax, an order or a loss, or are the results of the model, which no matmul reads. Layers
return the FP32 sums of such results, and modules pass them on without a cast. Nor do they cast FP32
arguments and parameters with such a use, or of which a sine, a solve or a difference is computed.

The same trace shows matmuls that compute in FP32 although the policy of their module does not say
so: of classes that cast their operands themselves, and of layers that `wrap` does not reach; and a
model of which no layer uses FP8.
"""

from __future__ import annotations

import copy
import enum
import functools
import inspect
import types
import warnings
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any, TypeAlias

import jax
import numpy as np

from jaxmp import _core, _programs
from jaxmp._autocast._resolve import is_traced_by_autocast
from jaxmp._core import PyTree, _compat
from jaxmp._flax import _labels, _missing_precision
from jaxmp._flax._method_call import lacks_16bit_form
from jaxmp._gradients import _hints
from jaxmp._policies._device import computes_in_16_bits
from jaxmp._policies._load import PolicyMap
from jaxmp._policies._required import check_required
from jaxmp.errors import RuleError
from jaxmp.fp8 import _explain

# ---------------------------------------------------------------------------
# Search
# ---------------------------------------------------------------------------


# Class, policies and path of a model in the model that has the policies.
_Key: TypeAlias = tuple[type, PolicyMap, tuple[str, ...]]
# The program of a call, the variables that it reads, and its matmuls in FP8.
_Traced: TypeAlias = tuple[_compat.ClosedJaxpr, PyTree, _explain.Record]
# Returns a function of arrays that calls the model, the arrays, and the variables among them.
_Prepare: TypeAlias = Callable[[], tuple[Callable[..., PyTree], PyTree, PyTree]]


class ModelSearch:
    """Findings of the calls of one model. Copies of it share them; a pickled one begins anew."""

    def __init__(self) -> None:
        # Path in the model, method, and shapes of its arguments -> labels of values -> why they are
        # not rounded.
        self._labels: dict[tuple[Any, ...], dict[str, str]] = {}
        # The same keys -> number of searches that failed.
        self._failed: Counter[Hashable] = Counter()
        # Why the last search failed, and True if a warning has shown it.
        self._failure, self._is_told = "", False
        # Labels of the results of linear layers.
        self._layers: set[str] = set()
        self._messages: list[str] = []
        # Warnings of layers whose FP32 sums strict promotion refuses.
        self._refused: set[str] = set()

    def __reduce__(self) -> tuple[type[ModelSearch], tuple[()]]:
        return ModelSearch, ()

    def of_call(self, key: _Key, called: Any, arguments: PyTree, prepare: _Prepare) -> Hashable:
        """Returns the labels of the values of a call of a model that are not rounded.

        Args:
          key: class, policies and path of the model. A part of a model has a path.
          called: its method.
          arguments: of the call.
          prepare: returns a function that calls the model, all arrays that it reads, and those of
            them that are variables of the model, which come first: collections of Linen, or a list.
        """
        active, policies = _compat.current_context().decisions, key[1]
        is_low = policies.default.matmul == "fp8" or computes_in_16_bits(policies)
        if active is not None or not is_low:
            return active
        name = getattr(called, "__qualname__", "")
        call = key[2], name, _described_function(called), *_described_tree(arguments)
        try:
            is_known = call in self._labels
        except Exception:
            # Static fields of a pytree, such as NumPy arrays, that cannot be compared.
            call = *call[:3], *map(str, call[3:])
            is_known = call in self._labels
        if not is_known:
            self._failure = ""
            # Only a call of the whole model shows that no layer uses FP8; `explain` lists them.
            is_whole = name.endswith("__call__") and not _explain.is_recording()
            labels = self._search(key, prepare, is_whole=is_whole)
            if labels is None:
                # The call itself will raise, or it cannot be searched. If it is repeated, it may
                # succeed with other variables, or with the RNG that was missing.
                self._failed[call] += 1
                if self._failed[call] < _MAX_FAILED:
                    return frozenset()
            # Another thread may have found them, but none may see an unfinished search.
            self._labels.setdefault(call, labels or {})
        return frozenset(self._labels[call])

    def warn(self) -> None:
        """Reports what a search showed, once."""
        messages, self._messages = self._messages, []
        if self._failure and not self._is_told:  # The call itself has succeeded.
            self._is_told = True
            messages.append(self._failure)
        for message in messages:
            _core.warn_user(message)

    def reasons(self) -> tuple[dict[str, str], dict[str, str]]:
        """Returns path -> why results of the layer are not rounded, and the same of its inputs."""
        rows = [row for labels in self._labels.values() for row in labels.items()]
        path = lambda label: label.removeprefix(_labels.PREFIX).rpartition(".")[0]
        results = {path(label): reason for label, reason in rows if label in self._layers}
        inputs = {
            path(label): reason
            for label, reason in rows
            # A layer that returns FP32 sums adds its bias to them.
            if _labels.is_input(label)
            and (f" {_labels.ARGUMENT} " in label or path(label) not in results)
        }
        return results, inputs

    def _trace(
        self, key: _Key, prepare: _Prepare, *, casts: bool = True
    ) -> tuple[_labels.Labeling, _Traced] | None:
        """Returns the labeling of a call, and the results of `_traced`; None if that fails.

        If JAX refuses 16 bits in an operation, such as `fft`, or tangents, modules cast nothing.
        """
        labeling = _labels.Labeling(casts)
        try:
            return labeling, _traced(prepare, labeling)
        except Exception as error:
            is_tangent = any(text in str(error) for text in ("tangent", "VJP function"))
            if casts and (is_tangent or lacks_16bit_form(error)):
                labeling.modules.clear()
                return self._trace(key, prepare, casts=False)
            # The call itself raises the same error, or it reads values of arrays outside of `jit`.
            self._failure = _failure_text(key, labeling, error)
            labeling.modules.clear()
            return None

    def _search(self, key: _Key, prepare: _Prepare, *, is_whole: bool) -> dict[str, str] | None:
        """Returns label -> why its value is not rounded; None if the call cannot be traced."""
        is_cast = is_traced_by_autocast()
        searched = self._trace(key, prepare)
        if searched is None:
            return None
        labeling, (closed, variables, fp8) = searched
        uses = _labels.LabelUses()
        uses.facts(closed.jaxpr, _programs.wide_results(closed.jaxpr))
        differences, nothing = _labels.Differences(), [frozenset[str]()] * len(closed.jaxpr.invars)
        differences.run(closed, nothing)
        for label in differences.labels & uses.of_labels.keys():
            uses.of_labels[label] |= _programs.Use.DISTANCE
        reasons = {
            label: _reason(use, is_layer=label in labeling.layers)
            for label, use in uses.of_labels.items()
        }
        cls, policies, path = key
        in_fp8 = policies.default.matmul == "fp8"
        if in_fp8 and len(labeling.layers) == 1:  # It is a part of a model.
            reasons = {label: reason for label, reason in reasons.items() if reason != _OF_MODEL}
        reasons = {label: reason for label, reason in reasons.items() if reason}
        if not labeling.casts:
            method = lambda label: label.rpartition(" ")[0].rpartition(" ")[0]
            layers = set(map(method, labeling.layers))
            labels = filter(lambda label: method(label) not in layers, uses.of_labels)
            reasons = dict.fromkeys(labels, _REFUSED) | reasons
        self._layers |= labeling.layers
        is_strict = jax.config.jax_numpy_dtype_promotion == "strict"  # pyright: ignore
        arguments = set(filter(_labels.is_input, reasons))
        reached = _labels.Reached(labeling.layers & reasons.keys(), arguments, is_strict)
        reached.run(closed, nothing)
        labels = {
            label: reasons[label]
            for label in reached.labels & reasons.keys()
            if not (labeling.casts and label in reached.multiplied and reasons[label] in _CHEAP)
        }
        # Other operands of a matmul by hand determine its dtype.
        labels |= {x + _labels.WEAK: why for x, why in labels.items() if x in reached.multiplied}
        may_meet = reached.meets or not (labeling.casts and reached.fixed.isdisjoint(labels))
        labels, error = _accepted(prepare, labels, reached.fixed) if may_meet else (labels, None)
        if error is not None and is_strict:
            rounded = [label for label in reached.rounded if reasons[label] != _OF_MODEL]
            if rounded and not path:
                dtype = policies.default.compute_dtype
                refused = _missing_precision.refused_sums(rounded, dtype, reasons, error)
                self._messages += [refused] if refused not in self._refused else []
                self._refused.add(refused)
        if not path and all(parts for parts, *_ in self._labels):
            count = len(jax.tree.leaves(variables))
            is_changed = is_cast or not labeling.casts
            low = "" if is_changed else _missing_precision.low_share(cls, closed, count, labeling)
            unused = unmatched = ""
            if in_fp8 and is_whole:
                unused = _missing_precision.unused_fp8(cls, fp8.rows, labels, closed.jaxpr)
            if is_whole and _core.has_collections(variables):
                unmatched = _unmatched_rule(policies, labeling, variables[_core.PARAMS])
            stored = _missing_precision.stored_parameters(reached.stored, reasons)
            self._messages += filter(None, (low, unused, unmatched, *stored))
        # JAX's caches keep the context of a trace, but the classes of modules may die.
        labeling.modules.clear()
        return labels


def _traced(prepare: _Prepare, decisions: Hashable) -> _Traced:
    """Traces a call with some decisions."""
    fn, arrays, variables = prepare()
    search = _compat.context(decisions=decisions)
    # The loss in which the model is called does not differentiate this trace.
    outside = _compat.assigned(_hints.traced, None)
    with search, outside, _explain.recorded() as fp8, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _programs.trace(fn, (arrays,), {}).closed, variables, fp8


def _unmatched_rule(policies: PolicyMap, labeling: _labels.Labeling, params: PyTree) -> str:
    """Returns a warning of a required rule that matches nothing in a Linen model; "" without one.

    The model has the modules that its call has entered, and those that have parameters. `init` of a
    wrapped model, and `wrap` of an NNX model, raise an error instead.
    """
    names = [names for names, _ in _core.leaves_with_path(params)]
    above = {"/".join(path[:n]) for path in names for n in range(len(path))}
    called = {path: module.cls for path, module in labeling.modules.items()}
    paths = dict.fromkeys([*map(_core.parameter_path, names), *above]) | called
    # The classes of modules that the call has not entered are not known.
    rules = [each for each in policies.all_rules if not each.module_type or above <= called.keys()]
    try:
        check_required(policies, paths, rules)
    except RuleError as error:
        return str(error)
    return ""


def _accepted(
    prepare: _Prepare, labels: dict[str, str], fixed: frozenset[str]
) -> tuple[dict[str, str], Exception | None]:
    """Returns the labels of values that JAX accepts in FP32, and its error if it accepts none.

    A carry in 16 bits, and strict promotion, may refuse them. If JAX refuses the values that reach
    a carry, arguments, or the results of the model, it may accept the others.

    Args:
      prepare: as in `ModelSearch.of_call`.
      labels: label -> why its value is not rounded.
      fixed: labels of the layers whose results reach a carry.
    """
    refusal, of_inputs = None, set(filter(_labels.is_input, labels))
    cheap = {label for label in of_inputs if labels[label] in _CHEAP}
    of_model = {label for label, reason in labels.items() if reason == _OF_MODEL}
    refused = {label for label, reason in labels.items() if reason == _REFUSED}
    every = [labels.keys() - left_out for left_out in (refused, (), cheap, of_inputs)]
    every = [each for own in every for each in (own, own - fixed)]
    candidates = map(frozenset, [*every, *(own - of_model for own in every)])
    for accepted in filter(None, dict.fromkeys(candidates)):
        try:
            _traced(prepare, accepted)
            return {label: labels[label] for label in accepted}, None
        except Exception as error:
            refusal = error
    return {}, refusal


def _failure_text(key: _Key, labeling: _labels.Labeling, error: Exception) -> str:
    """Returns a warning of a call that cannot be traced, and so is not searched."""
    paths = [path for path in labeling.modules if path] or ["head"]
    text = next(iter(str(error).splitlines()), "").rstrip(".")
    return (
        f"{key[0].__name__} cannot be traced: {type(error).__name__}: {text}. So jaxmp does not "
        "know which of its results a softmax, a choice or a loss reads, and rounds them all to "
        f"{key[1].default.compute_dtype}. Make it a function that jax.jit can trace, or name the "
        f"layers whose results must stay in FP32: Rule({paths[-1]!r}, 'o=f32')."
    )


# Searches of one call that may fail; later calls are not searched.
_MAX_FAILED = 3


def copied_arguments(arguments: PyTree) -> PyTree:
    """Copies the arguments of a call that are not arrays, because the call may change them.

    Integers and bools of NumPy become those of Python, whose values a model may read.
    """

    def copy_of(leaf: Any) -> Any:
        if isinstance(leaf, (np.bool_, np.integer)):
            return leaf.item()
        is_array = hasattr(leaf, "shape") and hasattr(leaf, "dtype")
        return leaf if is_array else copy.deepcopy(leaf)

    return jax.tree.map(copy_of, arguments)


# A larger number, or one with a fraction, does not cause another search: a step or a time.
_MAX_CHOICE = 32


def _described(leaf: Any) -> Hashable:
    """Returns what a search depends on: the shape and dtype of an array, or a value that chooses.

    Values that choose are bools, text, members of an enum, and small numbers, such as the number of
    a head. Functions are described by their code, and other objects by their type.
    """
    number = leaf.item() if isinstance(leaf, (np.bool_, np.integer)) else leaf
    is_choice = isinstance(number, int) and abs(number) < _MAX_CHOICE
    if is_choice or isinstance(number, (bool, str, enum.Enum)):
        return type(number), number
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return leaf.shape, leaf.dtype
    return getattr(leaf, "__code__", type(leaf))


def _described_tree(tree: PyTree) -> tuple[Hashable, ...]:
    leaves, structure = jax.tree.flatten(tree)
    return structure, *map(_described, leaves)


def _described_function(function: Any) -> Hashable:
    """Returns what a search depends on in a function: its code, and all that it contains.

    It contains no array, so that it outlives the transformation that called the function.
    """
    function = inspect.unwrap(function)
    if isinstance(function, functools.partial):
        bound = function.args, function.keywords
        return _described_function(function.func), *_described_tree(bound)
    if not hasattr(function, "__code__"):
        return function
    cells = getattr(function, "__closure__", None) or ()
    # Not those in a list, to which a call may append.
    values = (_described(cell.cell_contents) for cell in cells if cell != _EMPTY)
    defaults = function.__defaults__, function.__kwdefaults__
    return function.__code__, *values, *_described_tree(defaults)


# The cell of a variable that is not assigned yet.
_EMPTY = types.CellType()


_OF_MODEL = "its results are those of the model"
# Of values in a model that cannot be traced if they are all rounded.
_REFUSED = "JAX refuses 16 bits in an operation that reads this or another value"
# Reasons for which an argument is not kept in FP32 if a matmul outside of layers reads it.
_CHEAP = _OF_MODEL, *map(_programs.why_wide, (_programs.Use.LOSS, _programs.Use.PART))
# Uses of a result that the model divides by its norm, or adds to another array.
_OF_NORM = _programs.Use.PART | _programs.Use.SUMMED | _programs.Use.MAGNIFIED
# Uses of a value that may be rounded. Matmuls on the results of layers are in 16 bits, also those
# of distances, and a sum or product of a result is rounded as often as the residual stream.
_ROUNDED = _programs.Use.RESULT | _programs.Use.MAGNIFIED | _programs.Use.SOLUTION
_ROUNDED_RESULT = _ROUNDED | _programs.Use.DISTANCE | _programs.Use.PART | _programs.Use.DIGITS


def _reason(use: _programs.Use, *, is_layer: bool) -> str:
    """Returns why a value is not rounded; "" if it is."""
    if use & ~_OF_NORM == _programs.Use.RESULT:
        return _OF_MODEL
    return _programs.why_wide(use & ~(_ROUNDED_RESULT if is_layer else _ROUNDED))
