"""Labels of the arguments and results of modules, by which the search of a model finds values.

The primitive `name` labels an array while a model is searched. In other calls, the labels that the
search returned select the values that are not rounded.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jaxmp import _core, _programs
from jaxmp._core import PyTree, _compat, named
from jaxmp._flax._casts import ModulePolicy, is_opaque
from jaxmp._programs import Form, Frame


class CalledModule(NamedTuple):
    """Module that was called.

    Attributes:
      cls: its class.
      method: the method, if it is not a forward pass; otherwise "".
      is_low: True if its matmuls should read 16 bits.
    """

    cls: type
    method: str
    is_low: bool


class Labeling:
    """`Context.decisions` while a model is traced with labels: the modules that were called.

    Args:
      casts: False if modules cast neither arguments, parameters nor results in this trace.
    """

    def __init__(self, casts: bool) -> None:
        self.casts = casts
        self.modules: dict[str, CalledModule] = {}
        # Labels of the results of linear layers.
        self.layers: set[str] = set()

    def note_module(self, module_policy: ModulePolicy, method: str, *, is_forward: bool) -> None:
        """Records a call of a module."""
        traits, dtype = module_policy.traits, module_policy.policy.compute_dtype
        # Those of Flax's layers that do not are meant to be in FP32.
        is_fp32 = traits.is_norm or traits.upcasts_params or traits.dtype
        is_low = _core.is_16bit(dtype) and not is_fp32
        module = CalledModule(module_policy.cls, "" if is_forward else method, is_low)
        self.modules[module_policy.resolved.path] = module


def labeling() -> Labeling | None:
    """Returns the labeling of the search that traces the model; None in other calls."""
    decisions = _compat.current_context().decisions
    return decisions if isinstance(decisions, Labeling) else None


ARGUMENT, PARAMETER, RESULT = "argument", "parameter", "result"
PREFIX = "jaxmp "
# Ends the label of an argument in FP32 that takes the dtype of another operand.
WEAK = " weak"


def label_owner(path: str, method: str, kind: str) -> str:
    """Returns the first part of the labels of the arguments or results of a method."""
    return f"{PREFIX}{path}.{method} {kind} "


def is_input(label: str) -> bool:
    """Returns True for the label of an argument of a method, or of a parameter."""
    return f" {ARGUMENT} " in label or f" {PARAMETER} " in label


def labeled(owner: str, tree: PyTree) -> PyTree:
    """Labels the floating arrays of arguments or results while a model is searched.

    Args:
      owner: from `label_owner`.
      tree: the arguments or results.
    """
    if labeling() is None:
        return tree
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_opaque)
    is_floating = lambda x: isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.floating)
    return structure.unflatten(
        checkpoint_name(leaf, f"{owner}{n}") if is_floating(leaf) else leaf
        for n, leaf in enumerate(leaves)
    )


def unrounded(owner: str, tree: PyTree) -> dict[int, bool]:
    """Returns id -> True for weak types, of the arrays that are not rounded.

    The arguments are those of `labeled`.
    """
    decisions: Any = _compat.current_context().decisions
    leaves = enumerate(jax.tree.leaves(tree, is_leaf=is_opaque))
    if isinstance(decisions, Labeling):
        return {} if decisions.casts else {id(leaf): False for _, leaf in leaves}
    if not decisions:
        return {}
    rows = ((id(leaf), f"{owner}{n}") for n, leaf in leaves)
    return {key: label + WEAK in decisions for key, label in rows if label in decisions}


def is_decision(module_policy: ModulePolicy, method: str) -> bool:
    """Returns True if a method is the matmul of a layer with a result that is not rounded."""
    decisions: Any = _compat.current_context().decisions
    if not decisions or not module_policy.method(method).is_dot:
        return False
    label = f"{label_owner(module_policy.resolved.path, method, RESULT)}0"
    if isinstance(decisions, Labeling):
        decisions.layers.add(label)
        return False
    return label in decisions


def is_exact(module_policy: ModulePolicy, method: str, operands: PyTree) -> bool:
    """Returns True if a method is the matmul of a layer that reads coordinates, in FP32."""
    owner = label_owner(module_policy.resolved.path, method, ARGUMENT)
    leaves = jax.tree.leaves(operands)[:1]
    is_fp32 = [getattr(leaf, "dtype", None) == _core.FLOAT32 for leaf in leaves] == [True]
    return (
        not labeling()
        and is_fp32
        and module_policy.method(method).is_dot
        and bool(unrounded(owner, leaves))
    )


def read_param(module_policy: ModulePolicy, name: str, value: PyTree) -> PyTree:
    """Returns a parameter of a module in the dtype in which the module reads it."""
    owner = label_owner(module_policy.resolved.path, name, PARAMETER)
    if labeling():
        if module_policy.traits.dtype:  # Flax's layers cast their parameters.
            return _core.cast_floating(value, module_policy.param_dtype(name))
        value = labeled(owner, value)
    if kept := unrounded(owner, value):
        return _core.weakly_typed(value) if any(kept.values()) else value
    return _core.cast_floating(value, module_policy.param_dtype(name))


# ---------------------------------------------------------------------------
# Labels in a traced program
# ---------------------------------------------------------------------------


def _count_of_fixed(equation: _compat.JaxprEqn) -> int:
    """Returns how many of the first results have the dtype of another array, such as a carry."""
    loop = _programs.loop_of(equation)
    if loop is not None:
        return len(loop.carried)
    is_fixed = _programs.form_of(equation) is Form.BRANCH
    is_fixed = is_fixed or equation.primitive.name == "dynamic_update_slice"
    return len(equation.outvars) if is_fixed else 0


_ARITHMETIC = frozenset(("add", "add_any", "sub", "mul", "div"))
# Not of equality, by which a write finds the elements of a parameter that have changed.
_COMPARISONS = frozenset(("lt", "le", "gt", "ge", "lt_to", "le_to"))
# Functions of the difference of their operand and 1, of its last digits, or without a 16-bit form.
_OF_DIGITS = named("log1p atanh asin erf_inv rem fft")


class LabelUses(_programs.Uses):
    """Uses of labeled values.

    If another array, such as a carry, fixes the dtype of a value, only its uses as an angle or for
    its last digits count.
    """

    orders_squares = True

    def __init__(self) -> None:
        super().__init__()
        self.of_labels: dict[str, _programs.Use] = {}

    def equation(self, equation: _compat.JaxprEqn, results: list[Any], frame: Frame) -> list[Any]:
        name = equation.primitive.name
        if name == "name":
            label = _programs.label_of(equation)
            self.of_labels[label] = self.of_labels.get(label, _programs.Use.NONE) | results[0]
        fixed = _count_of_fixed(equation)
        # A loop may add up a phase in its carry.
        passed = _programs.Use.ANGLE | _programs.Use.DIGITS
        results = [each & passed for each in results[:fixed]] + results[fixed:]
        used = super().equation(equation, results, frame)
        if name == "dot_general" and _programs.terms_of(equation) in _programs.FEW_TERMS:
            # The coordinates of points are not rounded. In a wider matmul, roundings average out.
            own = _programs.exact_uses(equation, results[0] | self.of_call(equation))
            options = _programs.arithmetic_of(equation)
            if options and options.is_highest:  # as for a covariance
                own |= _programs.Use.DIGITS
            used = [each | own for each in used]
        if name in _ARITHMETIC:
            is_part = results[0] and not results[0] & ~(_programs.Use.RESULT | _programs.Use.PART)
            part = _programs.Use.PART if is_part else _programs.Use.NONE
            used = [each & ~_programs.Use.PART | part for each in used]
        has_literal = any(map(_programs.is_literal, equation.invars))
        is_compared = name in _COMPARISONS and not has_literal
        # `log(1 - x)` and `y / (1 - x)`.
        is_nearly = name == "sub" and has_literal and results[0] & _programs.Use.MAGNIFIED
        if is_compared or is_nearly or name in _OF_DIGITS:
            used = [each | _programs.Use.DIGITS for each in used]
        return used


class _OfLabels(_programs.Forward):
    """Analysis whose facts are sets of labels."""

    nothing = frozenset()

    def join(self, first: frozenset[str], second: frozenset[str]) -> frozenset[str]:
        return first | second


# Operations that move elements, without those that compare them, as a softmax does. A fraction is
# the difference of a number and an integer.
_MOVED = _programs.EXACT - _core.named(
    "max min reduce_max reduce_min cummax cummin reduce_window_max reduce_window_min pmax pmin"
) | {"floor", "ceil", "round"}


# A further label of each value that is computed from an FP32 argument or parameter.
_IN_FP32 = "FP32"


class Differences(_OfLabels):
    """Finds the labels of values of which a difference of elements is computed, as of positions.

    The fact of a value is the set of labels of the values whose elements it contains, also if it is
    their mean over points. The difference of two values counts if none is computed from a matmul.
    """

    def __init__(self) -> None:
        super().__init__()
        self.labels = frozenset[str]()

    def equation(self, equation: _compat.JaxprEqn, operands: list[Any], frame: Frame) -> list[Any]:
        if _programs.sub_jaxprs(equation) or not equation.outvars:
            return self.enter(equation, operands, frame)
        name, labels = equation.primitive.name, frozenset[str]()
        aval = _programs.array_aval(equation.outvars[0])
        if name == "sub":
            both, either = operands[0] & operands[1], operands[0] | operands[1]
            self.labels |= either if _IN_FP32 in both else both
        if name in _MOVED or (name == "reduce_sum" and _sums_points(equation)):
            # Not those of a mask.
            labels = labels.union(*operands[name == "select_n" :])
        elif name in _ARITHMETIC:
            pairs = zip(equation.invars, operands, strict=True)
            arrays = [fact for var, fact in pairs if _programs.array_aval(var).ndim]
            labels = arrays[0] if len(arrays) == 1 else labels  # It is shifted or scaled.
        if name == "name" and (label := _programs.label_of(equation)).startswith(PREFIX):
            labels |= {label} if _core.is_16bit(aval.dtype) else {label, _IN_FP32}
        return [labels] * len(equation.outvars)


def _sums_points(equation: _compat.JaxprEqn) -> bool:
    """Returns True for a sum over points or times, but not over features, as of a norm."""
    return _programs.array_aval(equation.invars[0]).ndim - 1 not in _programs.axes_of(equation)


class Reached(_OfLabels):
    """Finds the labels of values that are computed from FP32 values, without another matmul.

    The fact of a value is the set of labels of the FP32 arguments that modules do not cast, and of
    the layers that return FP32 sums; "" is that of another FP32 matmul.

    Args:
      layers: labels of the results of the layers that return their sums.
      arguments: labels of arguments that are not cast, if they are FP32.
      is_strict: True under strict promotion, in which only these layers return FP32.
    """

    def __init__(self, layers: set[str], arguments: set[str], is_strict: bool) -> None:
        super().__init__()
        self._layers, self._arguments, self._is_strict = layers, arguments, is_strict
        self.labels = set[str]()
        # Labels of layers whose results are rounded, or take the dtype of another operand.
        self.rounded: dict[str, None] = {}
        # Facts of values that may reach one with the dtype of another array, such as a carry.
        self.fixed = frozenset[str]()
        # Arguments that a matmul outside of layers reads, which would multiply FP32.
        self.multiplied = frozenset[str]()
        # Parameters in 16 bits that should be in FP32.
        self.stored: dict[str, np.dtype] = {}
        # True if such a value and a 16-bit array may be operands of one operation.
        self.meets = False

    def equation(self, equation: _compat.JaxprEqn, operands: list[Any], frame: Frame) -> list[Any]:
        if _programs.sub_jaxprs(equation) or not equation.outvars:
            results = self.enter(equation, operands, frame)
            self.fixed = self.fixed.union(*results[: _count_of_fixed(equation)])
            return results
        name, aval = equation.primitive.name, _programs.array_aval(equation.outvars[0])
        layers = frozenset[str]().union(*operands)
        if name == "name":
            label = _programs.label_of(equation)
            is_16bit = _core.is_16bit(aval.dtype)
            if label in self._layers:
                layers |= {label}
                self.rounded |= {label: None} if is_16bit or aval.weak_type else {}
            elif label in self._arguments:
                layers |= set() if is_16bit else {label}
                is_stored = is_16bit and f" {PARAMETER} " in label
                self.stored |= {label: aval.dtype} if is_stored else {}
            elif is_input(label):
                layers -= self._arguments  # The module casts it.
            self.labels |= {label} if layers else set()
        elif name in _programs.MATMULS:
            self.multiplied |= layers & self._arguments
            # The author of a layer, or a rule, may return FP32.
            is_reached = aval.dtype == _core.FLOAT32 and not self._is_strict
            layers = frozenset({""} if is_reached else ())
        elif layers if self._is_strict else layers & self._arguments:
            self.meets |= sum(_is_strong_16bit(var.aval) for var in equation.invars) > 1
        return [layers] * len(equation.outvars)


def _is_strong_16bit(aval: Any) -> bool:
    return _core.is_float(aval) and _core.is_16bit(aval.dtype) and not aval.weak_type
