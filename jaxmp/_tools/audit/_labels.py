"""Labels of values in a traced program, and the rules by which equations propagate them.

A label records a property of a value, such as "an FP32 value that was computed from 16 bits".
Checks attach labels to results and read those of operands.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Hashable, Iterable
from typing import Any, ClassVar, NamedTuple, TypeVar

import jax.numpy as jnp

from jaxmp import _core, _programs
from jaxmp._core import _compat
from jaxmp._policies import _op_table
from jaxmp._tools.audit import _checks, _dataflow

# ---------------------------------------------------------------------------
# Labels
# ---------------------------------------------------------------------------

# Primitives that move elements, and the limits of a saturating cast.
_MOVES = _core.named(
    "convert_element_type reshape broadcast_in_dim squeeze expand_dims transpose rev copy slice"
    " dynamic_slice gather split unstack stack concatenate tile clamp select_n stop_gradient"
)


class WasFp8(NamedTuple):
    """Label of a value that was cast up from FP8 and only scaled since."""

    name: str


# Order of creation in the process, by which the labels of one value are sorted.
_NUMBERS = itertools.count()


@dataclasses.dataclass(eq=False)
class ConditionalFinding:
    """Label of a value whose finding is reported only if the value has a harmful consequence."""

    check: ClassVar[_checks.Check]
    # The primitives that propagate the label; None: all but reductions.
    survives: ClassVar[frozenset[str] | None] = None

    op: _checks.OpOccurrence
    message: str
    # The remedy, or a function that makes it.
    remedy: str | Callable[[], str]
    severity: str = ""
    # Sets of labels are reported in this order.
    number: int = dataclasses.field(default_factory=_NUMBERS.__next__)
    finding: _checks.PendingFinding | None = None

    @functools.cached_property
    def fix(self) -> str:
        """The remedy, which is made when it is required."""
        return self.remedy if isinstance(self.remedy, str) else self.remedy()

    def report(self, harm: str, flops: float = math.inf) -> None:
        """Reports the finding once, with its first consequence.

        Args:
          harm: the consequence, as a part of a sentence.
          flops: FLOPs of the matmul that the value makes wide; infinity for another consequence.
        """
        if self.finding is None:
            message = f"{self.message}{harm}."
            self.finding = self.op.add(self.check, message, self.fix, severity=self.severity)
        self.finding.harmed_flops += flops


class Fact:
    """Label that only some primitives of the forward pass propagate."""

    survives: ClassVar[frozenset[str]]


@dataclasses.dataclass(frozen=True)
class FloatInput(Fact):
    """Label of an FP32 or int32 argument of the program whose elements were only moved.

    Attributes:
      location: its key path among the arguments.
    """

    location: str
    survives: ClassVar = _MOVES


@dataclasses.dataclass(frozen=True)
class Summand(Fact):
    """Label of a value that has a parameter of a user's own module as a summand.

    Attributes:
      owner: the keys of its path among the arguments, without the last one.
      name: the last key.
    """

    owner: tuple[str, ...]
    name: str
    survives: ClassVar = _MOVES | _core.named("add sub neg max abs")


@dataclasses.dataclass(frozen=True)
class RoundedInput(Fact):
    """Label of an argument that was rounded to 16 bits and only shifted or scaled since.

    product: the matmul of its coordinates and frequencies; None without one.
    """

    input: FloatInput
    dtype: str
    product: _checks.OpOccurrence | None = dataclasses.field(default=None, compare=False)
    location = property(lambda self: self.input.location)
    survives: ClassVar = _MOVES | _core.named("mul div add sub neg")


class LogProbability(Fact):
    """Label of an FP32 logarithm, and of differences of such."""

    survives = _checks.LAYOUT | _core.named("slice gather select_n sub add neg mul")


class WideValue:
    """Label that an FP32 value loses when it is cast to 16 bits."""


# An FP32 value that was computed from 16 bits, element by element.
WAS_16_BITS = WideValue()


class Stream(WideValue):
    """Label of an FP32 residual stream, or of an FP32 carry of a loop."""


STREAM = Stream()
# The FP32 state of a recurrence that 16-bit gates multiply.
GATED = Stream()


class Reduction16Bit:
    """Label of a sum over devices in 16 bits."""

    def __init__(self, op: _checks.OpOccurrence, is_gradient: bool) -> None:
        self.op, self.is_gradient = op, is_gradient
        # True if a matmul of the backward pass reads the sum.
        self.is_activation = False


class Logits(NamedTuple):
    """Label of a matmul's result that was only scaled, masked or biased since.

    The matmul computes the logits of attention if a softmax follows.
    """

    op: _checks.OpOccurrence
    normalized: bool = False


_Label = TypeVar("_Label")
Labels = frozenset[Any]
_NONE: Labels = frozenset()
# The label that every operation propagates.
_GRADIENT: Labels = frozenset({_dataflow.GRADIENT})

# ---------------------------------------------------------------------------
# Primitives
# ---------------------------------------------------------------------------

# Primitives that propagate `Logits`, besides those that the op table runs in the widest operand
# dtype or in the dtype of the operand.
_KEEPS_LOGITS = _core.named("convert_element_type exp exp2 stop_gradient")
# Primitives that combine elements, so that a promoted array ends there.
REDUCES = _core.named(
    "reduce_sum reduce_prod reduce_max reduce_min argmax argmin reduce_window_sum reduce_window_max"
).union(_programs.MATMULS, _programs.SOLVERS)
_BREAKS = _core.named(
    "reduce_max reduce_min argmax argmin sort top_k approx_top_k gather cummax cummin eq ne lt le"
    " gt ge dynamic_slice"
)
# The operands that an operation selects elements from.
_SELECTED = {"gather": slice(1), "dynamic_slice": slice(1), "select_n": slice(1, None)}
# Labels that special rules propagate.
_SPECIAL = (ConditionalFinding, Fact, _dataflow.Power, Reduction16Bit, Stream)


# ---------------------------------------------------------------------------
# Propagation
# ---------------------------------------------------------------------------


class Flow:
    """Labels of a program's variables.

    Equations are visited in order of execution. The variables of a sub-jaxpr receive the labels of
    the operands when it is entered.
    """

    def __init__(self, ops: _op_table.OpTable) -> None:
        self._labels: dict[Any, Labels] = {}
        # (rule, labels) -> those that the rule selects.
        self._chosen: dict[tuple[Hashable, Labels], Labels] = {}
        self._ops = ops
        # Numbers of the scalar arguments that cotangents are proportional to.
        self.scaled_by: set[int] = set()
        # True if a matmul of the forward pass reads float16.
        self.has_float16 = False
        # True if the backward pass reads a scalar that may be a loss scale, and is no argument.
        self.has_scale = False
        # Numbers of the arguments that a differentiated function reads.
        self.differentiated: set[int] = set()

    def mark(self, var: _programs.Atom, label: Hashable) -> None:
        """Adds a label to a variable."""
        self._labels[var] = self._labels.get(var, _NONE) | {label}

    def of(self, var: _programs.Atom) -> Labels:
        """Returns the labels of an operand."""
        return _NONE if isinstance(var, _compat.Literal) else self._labels.get(var, _NONE)

    def of_all(self, variables: Iterable[_programs.Atom]) -> Labels:
        """Returns the labels of several operands."""
        sets = set(map(self.of, variables)) - {_NONE}
        # A set is shared where it can be.
        return next(iter(sets)) if len(sets) == 1 else _NONE.union(*sets)

    def labels(self, cls: type[_Label], *variables: _programs.Atom) -> list[_Label]:
        """Returns the labels of one class that some operands have, in the same order each time."""
        labels = self.of_all(variables)
        chosen = self._of_classes(cls, labels, lambda each: issubclass(each, cls))
        return sorted(chosen, key=_order_of) if len(chosen) > 1 else list(chosen)

    def copy(
        self, sources: Iterable[_programs.Atom | None], targets: Iterable[_programs.Atom | None]
    ) -> None:
        """Copies labels into or out of a sub-jaxpr; None stands for an unknown variable."""
        for source, target in zip(sources, targets, strict=True):
            if source is not None and target is not None:
                self._labels[target] = self.of(target) | self.of(source)

    def enter(self, inner: _programs.Inner) -> None:
        """Copies the labels of operands into a sub-jaxpr, which may be shared by several calls."""
        for var in inner.jaxpr.invars:
            self._labels.pop(var, None)
        self.copy(inner.operands, inner.jaxpr.invars)

    def step(self, op: _checks.OpOccurrence, *, is_call: bool = False) -> None:
        """Labels the results of an equation.

        Args:
          op: the equation.
          is_call: True for one with sub-jaxprs, before these are entered.
        """
        equation, name = op.equation, op.name
        if name == "optimization_barrier":
            pairs = zip(equation.outvars, equation.invars, strict=True)
            self._labels.update({result: self.of(var) for result, var in pairs})
            return
        labels = self._read(op, is_call)
        # Elements of a gradient that are replaced by a number do not make it a scalar.
        is_plain = labels == _GRADIENT and name == "select_n"
        if is_plain or not (labels or name in _dataflow.MAKES_SCALARS):
            self._label_results(equation, labels)
            return
        special = self._of_classes("special", labels, lambda cls: issubclass(cls, _SPECIAL))
        own = self._of_classes("lineage", labels, lambda cls: issubclass(cls, _dataflow.LINEAGE))
        kept = self._kept(labels - special - own, name)
        sizes = (math.prod(getattr(var.aval, "shape", (0,))) for var in equation.outvars)
        if _dataflow.SCALAR in kept and (is_call or any(size != 1 for size in sizes)):
            kept -= {_dataflow.SCALAR}
        if not is_call:
            kept |= _dataflow.lineage(op, own, self.of) | self._specials_after(op, special)
        elif op.is_forward and all(None not in i.results for i in _programs.inners(equation)[-1:]):
            # All results are known, and have the labels of those of the jaxpr.
            kept -= _GRADIENT
        self._label_results(equation, kept)

    def _read(self, op: _checks.OpOccurrence, is_call: bool) -> Labels:
        """Returns the labels of the operands, as the operation reads them."""
        equation, phase = op.equation, op.location.phase
        labels = self.of_all(equation.invars)
        if phase == _programs.BACKWARD:
            if self.has_float16 and not self.has_scale:
                scales = (x for x in equation.invars if not _dataflow.powers_of(self.of(x)))
                self.has_scale = any(_dataflow.is_scale(op, x, self.of) for x in scales)
            # Zeros, as a cotangent in a loop begins with, are not computed from gradients.
            if labels or not all(_dataflow.number_of(x) == 0 for x in equation.invars):
                labels = labels | _GRADIENT if labels else _GRADIENT
        elif op.location.differentiated and phase == _programs.FORWARD and not is_call:
            self.differentiated.update([x.number for x in labels if isinstance(x, _dataflow.From)])
        if op.name == "convert_element_type":
            return _after_cast(labels, equation)
        return self._still_fp8(labels, equation) if labels else labels

    def _specials_after(self, op: _checks.OpOccurrence, special: Labels) -> Labels:
        if not special:
            return _NONE
        phase = op.location.phase
        lasting = _SPECIAL if phase == _programs.FORWARD else Reduction16Bit
        lasts = lambda cls: issubclass(cls, lasting) and _survives(cls, op.name)
        kept = self._of_classes((op.name, phase), special, lasts)
        if op.name in _SELECTED:
            kept &= self.of_all(op.operands[_SELECTED[op.name]])
        powers: Any = self._of_classes("power", special, lambda cls: cls is _dataflow.Power)
        if powers and phase == _programs.BACKWARD:
            self.scaled_by.update(x.number for x in powers if (x.exponent or 0) > 0)
        return kept | _dataflow.powers_after(op, self.of) if powers else kept

    def _label_results(self, equation: _programs.Equation, labels: Labels) -> None:
        narrow = self._of_classes("narrow", labels, lambda cls: not issubclass(cls, WideValue))
        for var in equation.outvars:
            is_wide = _checks.dtype_of(var) in (_core.FLOAT32, _core.FLOAT64)
            self._labels[var] = labels if is_wide else narrow

    def _of_classes(
        self, rule: Hashable, labels: Labels, is_member: Callable[[type], bool]
    ) -> Labels:
        """Returns the labels of the classes that a rule selects.

        A residual stream has hundreds of labels, and most operations add none to them.
        """
        chosen = self._chosen.get((rule, labels))
        if chosen is None:
            members = {cls for cls in set(map(type, labels)) if is_member(cls)}
            chosen = frozenset([x for x in labels if type(x) in members]) if members else _NONE
            self._chosen[rule, labels] = chosen
        return chosen

    def _still_fp8(self, labels: Labels, equation: _programs.Equation) -> Labels:
        """Removes FP8 labels unless all operands other than scalars have them."""
        fp8 = self._of_classes("fp8", labels, lambda cls: cls is WasFp8)
        arrays = (var for var in equation.invars if math.prod(getattr(var.aval, "shape", ())) > 1)
        return labels if not fp8 or all(fp8 & self.of(var) for var in arrays) else labels - fp8

    def _kept(self, labels: Labels, name: str) -> Labels:
        if name == "sub":
            # A difference of a softmax and labels is the gradient of a loss. The weights of
            # attention are never an operand of a subtraction.
            labels = frozenset(x for x in labels if not (isinstance(x, Logits) and x.normalized))
        if name in _BREAKS:
            return labels & _GRADIENT
        if name not in _KEEPS_LOGITS and self._ops.category(name) not in ("widest", "follow"):
            is_wide = self._ops.category(name) == "fp32"
            return labels & ({_dataflow.GRADIENT, WAS_16_BITS} if is_wide else _GRADIENT)
        if name in ("exp", "exp2"):
            normalized = lambda x: x._replace(normalized=True) if isinstance(x, Logits) else x
            return frozenset(map(normalized, labels))
        return labels


def _order_of(label: Any) -> tuple[int, str]:
    """Returns a key that does not depend on addresses and hashes, unlike the order of a set."""
    label = getattr(label, "rounded", label)
    text = getattr(label, "location", getattr(label, "factor", ""))
    return getattr(label, "number", 0), str(text)


def _survives(cls: type, name: str) -> bool:
    survives = getattr(cls, "survives", None)
    return name not in REDUCES if survives is None else name in survives


def _after_cast(labels: Labels, equation: _programs.Equation) -> Labels:
    source, target = _checks.dtype_of(equation.invars[0]), _checks.dtype_of(equation.outvars[0])
    if target == _core.FLOAT32 and _core.is_16bit(source):
        return labels | {WAS_16_BITS}
    if source in (_core.FLOAT32, jnp.int32) and _core.is_16bit(target):
        rounded = lambda x: RoundedInput(x, target.name) if isinstance(x, FloatInput) else x
        return frozenset(map(rounded, labels))
    if _core.is_fp8(source) and not _core.is_fp8(target):
        return labels | {WasFp8(source.name)}
    return labels
