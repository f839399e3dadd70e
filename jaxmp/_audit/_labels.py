"""What values carry through a program: that they were 16 bits, attention's logits, a loss scale."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

from jaxmp._attention import ASKED, AttentionExplanation
from jaxmp._audit._checks import ERROR, WARNING
from jaxmp._audit._context import OpOccurrence, PendingFinding, PendingFindings, dtype_of, named
from jaxmp._audit._dataflow import (
    GRADIENT,
    SCALAR,
    From,
    is_chosen_scale,
    is_lineage,
    is_scale,
    lineage,
)
from jaxmp._core._dtypes import FLOAT32, FLOAT64, is_16bit, is_fp8
from jaxmp._core._jaxprs import BACKWARD, FORWARD, Inner, inners, is_literal

# An FP32 value that was computed from 16 bits, element by element.
WAS_HALF = "was 16 bits"
# A value that depends on the loss scale.
SCALED = "depends on the loss scale"
_FOLLOWS_ALL = frozenset({SCALED, GRADIENT})


class WasFp8(NamedTuple):
    """A value that was cast up from FP8, and scaled since at most."""

    name: str


class FloatInput(NamedTuple):
    """An FP32 argument of the program, of which elements were moved at most."""

    # Its name, and where it is among the arguments.
    name: str
    location: str


class RoundedInput(NamedTuple):
    """An FP32 argument that was rounded to 16 bits, and shifted or scaled since at most."""

    input: FloatInput
    dtype: str


class ConditionalFinding:
    """A finding that is reported only if the value that it is about does harm."""

    check = ""

    def __init__(self, op: OpOccurrence, message: str, fix: str, severity: str = ERROR) -> None:
        self.op, self.message, self.fix, self.severity = op, message, fix, severity
        self.finding: PendingFinding | None = None

    def report(self, harm: str, findings: PendingFindings, flops: int | None = None) -> None:
        """Adds the finding, once, with the first harm.

        Args:
          harm: what the value does, in words.
          findings: where findings go.
          flops: of the product that the harm consists in; None for other harm.
        """
        if self.finding is None:
            message = f"{self.message}{harm}."
            self.finding = findings.add(
                self.check, self.op, message, self.fix, severity=self.severity
            )
        self.finding.add_harm(flops)


class Promotion(ConditionalFinding):
    """A 16-bit array that an operation promoted to FP32.

    Harm is an FP32 matmul, another 16-bit array that is promoted in turn, or an FP32 result of the
    program. A value that is cast back before that was promoted on purpose or at no cost.
    """

    check = "implicit_promotion"


class Stream:
    """An FP32 value by design: a residual stream, or the carry of a loop."""


STREAM = Stream()


class ForwardUse(ConditionalFinding):
    """A 16-bit exponential in a function that is differentiated.

    Harm is any use in the forward pass. JAX computes some for derivatives alone: that of erf, in an
    exact GELU, is exp(-x**2).
    """

    check = "exp_16bit"


# The gradient of a gather in 16 bits is a sum over devices in 16 bits.
_FIX_GATHER = """\
Gather in 16 bits, and sum the gradient in FP32:
    @jax.custom_vjp
    def gather(w):
        return jax.lax.all_gather(w.astype(jnp.{dtype}), {name}, tiled=True)

    def gather_bwd(_, g):
        g = g.astype(jnp.float32)
        return (jax.lax.psum_scatter(g, {name}, tiled=True),)

    gather.defvjp(lambda w: (gather(w), None), gather_bwd)"""


class HalfReduce:
    """A sum over devices in 16 bits: of activations if a matmul of the backward pass reads it."""

    def __init__(self, op: OpOccurrence, is_gradient: bool) -> None:
        self.op, self.is_gradient = op, is_gradient
        self.is_activation = False

    def report(self, findings: PendingFindings, *, is_asked: bool) -> None:
        """Adds the finding.

        Args:
          findings: where it goes.
          is_asked: True if the policies require that gradients are summed in FP32.
        """
        dtype = dtype_of(self.op.equation.invars[0]).name
        axes = self.op.equation.params.get("axes", self.op.equation.params.get("axis_name"))
        names = axes if isinstance(axes, (tuple, list)) else (axes,)
        name = repr(names[0]) if len(names) == 1 else repr(tuple(names))
        if not self.is_gradient or self.is_activation:
            message = f"activations are summed over devices in {dtype} ({self.op.name})."
            fix = f"jax.lax.psum(x.astype(jnp.float32), {name}).astype(x.dtype)"
            findings.add("all_reduce_16bit", self.op, message, fix, severity=WARNING)
            return
        message = f"gradients are summed over devices in {dtype} ({self.op.name})."
        fix = f"jax.lax.pmean(grads.astype(jnp.float32), {name})"
        if self.op.name == "reduce_scatter" and self.op.location.phase == BACKWARD:
            fix = _FIX_GATHER.format(name=name, dtype=dtype)
        elif self.op.location.phase == BACKWARD:
            fix = (
                "Let JAX sum the gradient of the FP32 parameters, before the loss casts them:\n"
                f"    params = jax.lax.pcast(params, {name}, to='varying')"
            )
        severity = ERROR if is_asked else WARNING
        findings.add("all_reduce_16bit", self.op, message, fix, severity=severity)


class Logits(NamedTuple):
    """The result of a product, scaled, masked or biased since; attention's if a softmax follows."""

    op: OpOccurrence
    normalised: bool = False


Labels = frozenset[Any]
_NONE: Labels = frozenset()
# What keeps logits logits, besides everything that the op table lets follow or promotes.
_KEEPS = frozenset({"convert_element_type", "exp", "exp2", "stop_gradient"})
# What keeps an argument that argument: moves, and the limits of a cast that saturates.
_MOVES = named(
    "convert_element_type reshape broadcast_in_dim squeeze expand_dims transpose rev copy slice"
    " dynamic_slice gather split unstack stack concatenate tile clamp select_n stop_gradient"
)
# A rounded argument stays rounded by these too.
_SCALES = _MOVES | named("mul div add sub neg")
# After these a value has other elements than those that were promoted.
REDUCES = named(
    "reduce_sum reduce_prod reduce_max reduce_min argmax argmin dot_general conv_general_dilated"
    " ragged_dot_general reduce_window_sum reduce_window_max"
)
_BREAKS = named(
    "reduce_max reduce_min argmax argmin sort top_k approx_top_k gather cummax cummin eq ne lt le"
    " gt ge dynamic_slice"
)


_ONLY_GRADIENT: Labels = frozenset({GRADIENT})
# Frequent operations after which a gradient has no other label.
_PLAIN = named(
    "mul div dot_general transpose reshape reduce_sum select_n neg sqrt rsqrt max min exp"
)
# Labels that `Flow` hands on by rules of their own.
_OWN = (ConditionalFinding, HalfReduce, Stream)


class Flow:
    """The labels of variables. Equations are taken in order; sub-jaxprs are bound to operands."""

    def __init__(self, ops: Any) -> None:
        self._labels: dict[Any, Labels] = {}
        self._ops = ops
        # True if a value that depends on the loss scale reached a backward pass.
        self.scale_used = False
        # True if a matmul of the forward pass reads float16, and if a backward pass reads a scalar
        # that may be a loss scale.
        self.has_float16 = self.has_scale = False
        # Numbers of the arguments that a differentiated function reads.
        self.differentiated: set[int] = set()

    def mark(self, var: Any, label: Any) -> None:
        """Starts a label."""
        self._labels[var] = self._labels.get(var, _NONE) | {label}

    def of(self, var: Any) -> Labels:
        """The labels of an operand."""
        return _NONE if is_literal(var) else self._labels.get(var, _NONE)

    def copy(self, sources: Iterable[Any], targets: Iterable[Any]) -> None:
        """Hands labels in or out of a sub-jaxpr."""
        for source, target in zip(sources, targets, strict=True):
            if source is not None and target is not None:
                found = self.of(source)
                if found:
                    self._labels[target] = self.of(target) | found

    def enter(self, inner: Inner) -> None:
        """Labels of operands for a sub-jaxpr, which may have been entered before for others."""
        for var in inner.jaxpr.invars:
            self._labels.pop(var, None)
        self.copy(inner.operands, inner.jaxpr.invars)

    def leave(self, inner: Inner) -> None:
        """Labels of results from a sub-jaxpr."""
        self.copy(inner.jaxpr.outvars, inner.results)

    def call(self, op: OpOccurrence) -> None:
        """Labels of the results of an equation that holds jaxprs, before these are entered.

        `leave` adds those that come out of them.
        """
        self._step(op, is_call=True)

    def step(self, op: OpOccurrence) -> None:
        """Labels of an equation's results."""
        self._step(op, is_call=False)

    def _step(self, op: OpOccurrence, *, is_call: bool) -> None:
        equation, phase = op.equation, op.location.phase
        found = _NONE
        for var in equation.invars:
            if not is_literal(var) and var in self._labels:
                found |= self._labels[var]
        name = equation.primitive.name
        if phase == BACKWARD:
            if self.has_float16 and not self.has_scale:
                self.has_scale = is_scale(op, self.of)
            found |= _ONLY_GRADIENT
        elif op.location.differentiated and phase == FORWARD and not is_call:
            self.differentiated.update(x.number for x in found if isinstance(x, From))
        if name == "convert_element_type":
            found = _after_cast(found, equation)
        elif found:
            found = self._still_fp8(found, equation)
        if self.has_float16 and is_chosen_scale(equation):
            found |= {SCALAR}
        if found == _ONLY_GRADIENT and name in _PLAIN:
            for var in equation.outvars:
                self._labels[var] = _ONLY_GRADIENT
            return
        if not found and name != "broadcast_in_dim":
            for var in equation.outvars:
                self._labels.pop(var, None)
            return
        if phase == BACKWARD and SCALED in found:
            self.scale_used = True
        own = frozenset(x for x in found if isinstance(x, _OWN) or is_lineage(x))
        kept = self._kept(found - own, name) | _inputs_after(found, name)
        if _are_scalars(equation) and not is_call:
            kept |= found & {SCALAR}
        else:
            kept -= {SCALAR}
        if is_call:
            kept -= {GRADIENT} if phase == FORWARD and _is_matched(equation) else set()
        else:
            kept |= lineage(op, self.of)
            if name not in REDUCES:
                lasting = (
                    (ConditionalFinding, HalfReduce, Stream) if phase == FORWARD else HalfReduce
                )
                kept |= {x for x in own if isinstance(x, lasting)}
        for var in equation.outvars:
            wide = dtype_of(var) in (FLOAT32, FLOAT64)
            self._labels[var] = kept if wide else frozenset(x for x in kept if not _is_wide(x))

    def _still_fp8(self, found: Labels, equation: Any) -> Labels:
        """Without FP8 labels where something else, no scalar, comes in too."""
        fp8 = {label for label in found if isinstance(label, WasFp8)}
        others = (var for var in equation.invars if math.prod(getattr(var.aval, "shape", ())) > 1)
        if fp8 and not all(fp8 & self.of(var) for var in others):
            return found - fp8
        return found

    def _kept(self, found: Labels, name: str) -> Labels:
        found = frozenset(x for x in found if not isinstance(x, (FloatInput, RoundedInput)))
        if name == "sub":
            # Softmax less the label: the gradient of a loss. Attention's weights are never part of
            # a difference.
            found = frozenset(x for x in found if not (_is_logits(x) and x.normalised))
        if name in _BREAKS:
            return found & _FOLLOWS_ALL
        if name not in _KEEPS and self._ops.category(name) not in ("widest", "follow"):
            wide = self._ops.category(name) == "fp32"
            return found & (_FOLLOWS_ALL | {WAS_HALF} if wide else _FOLLOWS_ALL)
        if name in ("exp", "exp2"):
            return frozenset(x._replace(normalised=True) if _is_logits(x) else x for x in found)
        return found


def _inputs_after(found: Labels, name: str) -> Labels:
    return frozenset(
        label
        for label in found
        if (isinstance(label, FloatInput) and name in _MOVES)
        or (isinstance(label, RoundedInput) and name in _SCALES)
    )


def _are_scalars(equation: Any) -> bool:
    return all(math.prod(getattr(var.aval, "shape", (0,))) == 1 for var in equation.outvars)


def _is_matched(equation: Any) -> bool:
    """Returns True if the results of an equation are known to be those of its jaxprs."""
    return all(None not in inner.results for inner in inners(equation)[-1:])


def _is_wide(label: Any) -> bool:
    """Returns True for a label that an FP32 value loses where it is cast to 16 bits."""
    return label == WAS_HALF or isinstance(label, (Promotion, Stream))


def _is_logits(label: Any) -> bool:
    return isinstance(label, Logits)


def _after_cast(found: Labels, equation: Any) -> Labels:
    source, target = dtype_of(equation.invars[0]), dtype_of(equation.outvars[0])
    if target == FLOAT32 and is_16bit(source):
        return found | {WAS_HALF}
    if source == FLOAT32 and is_16bit(target):
        return frozenset(
            RoundedInput(x, target.name) if isinstance(x, FloatInput) else x for x in found
        )
    if is_fp8(source) and not is_fp8(target):
        return found | {WasFp8(source.name)}
    return found


# ---------------------------------------------------------------------------
# Attention
# ---------------------------------------------------------------------------


def attention_logits(op: OpOccurrence, flow: Flow) -> OpOccurrence | None:
    """The product q k^T, if this product multiplies the softmax of it by the values."""
    if op.location.phase != FORWARD or op.name != "dot_general":
        return None
    contracted, batch = op.equation.params["dimension_numbers"]
    for index, var in enumerate(op.equation.invars[:2]):
        for label in flow.of(var):
            if not _is_logits(label) or not label.normalised or len(contracted[index]) != 1:
                continue
            logits = label.op.equation
            batches = logits.params["dimension_numbers"][1][0]
            size = math.prod(logits.outvars[0].aval.shape)
            if len(batches) == len(batch[0]) and size == math.prod(var.aval.shape):
                return label.op
    return None


def why_unfused(logits: OpOccurrence) -> str:
    """Why the fused kernel does not run in its place."""
    equation = logits.equation
    operand = equation.invars[0].aval
    (axes, _), _ = equation.params["dimension_numbers"]
    head = math.prod(operand.shape[axis] for axis in axes)
    if not is_16bit(operand.dtype):
        return f"its operands are {operand.dtype.name}, and cuDNN's fused kernel takes 16 bits"
    if head % 8 or head > 256:
        return f"heads of {head} are no multiple of 8 up to 128, or 256 on H100 and later"
    return "it is written as two matmuls around a softmax, and XLA keeps what is between them"


# What each of jaxmp's implementations does with the logits.
_KEPT = {
    "xla": "holds the logits of all pairs in memory",
    "blockwise": "goes through its blocks in a loop",
}


def attention_words(
    implementation: str, argument: str, choice: AttentionExplanation | None
) -> tuple[str, str]:
    """What to say of jaxmp's own attention, and the fix.

    Args:
      implementation: "xla" or "blockwise".
      argument: what keeps cuDNN's kernel from serving the call; "" if nothing does.
      choice: why this implementation, where that is known.
    """
    words = f"attention runs as {implementation!r}, which {_KEPT[implementation]}"
    if choice is None:
        fix = "jaxmp.explain_attention(query, key, value, ...) says what to change"
        return f"{words}; no fused kernel because of: {argument or 'what was asked for'}.", fix
    blockers = [f"{one.argument}: {one.reason}" for one in choice.rows]
    why = f"; not cuDNN's kernel, {'; '.join(blockers)}" * bool(blockers)
    # A device that is not there is no error of the call: what else blocks is mended first.
    others = [one for one in choice.rows if one.argument != "device"]
    changes = [one.change for one in others or choice.rows]
    if choice.reason == ASKED:
        changes.insert(0, f"Leave out {implementation!r}, so that attention is 'auto'.")
    if choice.rows and not others:
        changes.append("audit(..., target='h200') shows what a GPU would take.")
    return f"{words}: {choice.reason}{why}.", " ".join(changes)


def logits_bytes(logits: OpOccurrence) -> int:
    """Bytes of QK^T in all runs."""
    aval = logits.equation.outvars[0].aval
    return math.prod(aval.shape) * aval.dtype.itemsize * logits.times
