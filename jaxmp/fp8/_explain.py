"""Decides which linear layers run in FP8, and records the decisions for `explain`."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

from jaxmp import _core
from jaxmp._core import _compat
from jaxmp.errors import CompositionError
from jaxmp.fp8._scaling import MX_BLOCK, Scaling

# cuBLAS requires the rows of FP8 operands to be multiples of 16 bytes (cuBLASLt, "Narrow precision
# data types usage"). XLA would pad other sizes, in a copy of the operand.
MULTIPLE = 16


def explain_exclusion(k: int, n: int, scaling: Scaling, target: str) -> str:
    """Returns the reason why a linear layer does not run in FP8, or "" if it does.

    K and N must be multiples of 16, or with `MXScaling` of its block size 32. On an accelerator, a
    layer must also be large enough for FP8 to save more time than the quantization costs. By
    default (`min_width="auto"`), this is decided for `scaling.tokens` rows of the input. With
    per-tensor scales, the rule is a fit to 15 MLP blocks that were compiled for an H200, with the
    rates of its matmuls and of its memory as they were measured. No such fit exists for rowwise
    scales, which use the limits of torchao's `auto_filter_for_recipe`, chosen for an H100: layers
    with N <= 2048, with K <= 1024, or with N <= 4096 and K <= 2048 are too narrow. `MXScaling` uses
    them, too, because both quantize each operand twice. An integer `min_width` is a minimum of both
    K and N. `fp8.dot_general` itself applies no limits and always quantizes.

    Args:
      k: K, the contracted size of the forward dot: the input features of the layer.
      n: N, the output features of the layer.
      scaling: the scaling.
      target: "cpu", where widths do not matter, "gpu" or "tpu".

    Returns:
      A clause such as "N = 10 is not a multiple of 16", or "".
    """
    multiple = MX_BLOCK if scaling.kind == "mx" else MULTIPLE
    odd = [f"{name} = {size}" for name, size in (("K", k), ("N", n)) if size % multiple]
    if odd:
        relation = "is not a multiple" if len(odd) == 1 else "are not multiples"
        return f"{' and '.join(odd)} {relation} of {multiple}"
    return "" if target == "cpu" else _too_narrow(k, n, scaling)


def _too_narrow(k: int, n: int, scaling: Scaling) -> str:
    if isinstance(scaling.min_width, int):
        narrow = min(k, n) < scaling.min_width
        return f"K = {k} or N = {n} is below min_width = {scaling.min_width}" if narrow else ""
    if scaling.kind not in ("rowwise", "mx"):
        gains = _saved_seconds(k, n, scaling.tokens) > _added_seconds(k, n, scaling.tokens)
        return "" if gains else f"K = {k} and N = {n} are too narrow for {scaling.tokens} tokens"
    for most_k, most_n in _ROWWISE:
        if (most_k is None or k <= most_k) and (most_n is None or n <= most_n):
            of_k = [f"K = {k} <= {most_k}"] if most_k else []
            of_n = [f"N = {n} <= {most_n}"] if most_n else []
            return f"{' and '.join(of_k + of_n)}: too narrow to gain"
    return ""


def decides_otherwise(k: int, n: int, scaling: Scaling, tokens: int, target: str) -> bool:
    """Returns True if a layer whose input has `tokens` rows would be decided on differently.

    A symbolic dimension, as in `jax.export`, is not a number.
    """
    if not isinstance(tokens, int) or min(k, n, tokens) < 1:
        return False
    by_rows = dataclasses.replace(scaling, tokens=tokens)
    decisions = {explain_exclusion(k, n, each, target) == "" for each in (scaling, by_rows)}
    return len(decisions) == 2


def other_tokens(path: str, tokens: int, count: int) -> str:
    """Returns the note on layers that are decided on for another number of tokens."""
    others = f" (and {count - 1} more)" if count > 1 else ""
    return (
        f"{path or '(root)'}{others} has {tokens} rows in this program, with which FP8 would be "
        f"decided on differently: write tokens = {tokens} in the table [fp8]"
    )


# The three matmuls of a layer have 6 T K N FLOPs. Measured rates of an H200 (`benchmarks/
# ceilings.py`): 737e12 FLOP/s in bfloat16 and 1337e12 in FP8.
_FLOPS = 6
_SECONDS_SAVED = 1 / 737e12 - 1 / 1337e12
# Fit to the compiled blocks of `benchmarks/fp8_gain.py`, at 4.22e12 bytes per second: seconds for
# each element of the input and of the gradient of the output, seconds for each element of the
# kernel, and additional kernels, of about 2 microseconds each.
_SECONDS_OF_ACTIVATION, _SECONDS_OF_KERNEL, _LAUNCHES = 1.23e-12, 1.9e-12, 10.5 * 2e-6


def _saved_seconds(k: int, n: int, tokens: int) -> float:
    return _FLOPS * _SECONDS_SAVED * tokens * k * n


def _added_seconds(k: int, n: int, tokens: int) -> float:
    return _SECONDS_OF_ACTIVATION * (k + n) * tokens + _SECONDS_OF_KERNEL * k * n + _LAUNCHES


# (largest K, largest N) of layers that are too narrow for rowwise FP8; None: any size.
_ROWWISE = ((None, 2048), (1024, None), (2048, 4096))


@dataclasses.dataclass(frozen=True)
class LayerDecision(_core.ExplanationRow):
    """FP8 decision for one linear layer.

    Attributes:
      path: path of the layer's module; under `autocast`, the name scopes of the matmul.
      k: number of input features; 0 if it cannot be determined.
      n: number of output features; 0 if it cannot be determined.
      exclusion_reason: why the layer does not run in FP8; "" if it does.
    """

    path: str
    k: int
    n: int
    exclusion_reason: str

    def cells(self) -> tuple[str, ...]:
        return self.path or "(root)", str(self.k), str(self.n), self.exclusion_reason or "FP8"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fp8Explanation(_core.ExplanationSection[LayerDecision]):
    """FP8 decisions for the linear layers of a model or function.

    Attributes:
      rows: a `LayerDecision` for each layer, in the order of the calls. Under `autocast`, one for
        each traced matmul.
    """

    columns: ClassVar = ("path", "K", "N", "decision")

    @property
    def summary(self) -> str:
        """Number of layers that run in FP8."""
        count = sum(not row.exclusion_reason for row in self.rows)
        return f"{count} of {len(self.rows)} layers with matmul = 'fp8' run in FP8."


class Record(NamedTuple):
    """Decisions of the functions that a block traces."""

    rows: list[LayerDecision]
    # The scalings of the layers in FP8.
    scalings: dict[Scaling, None]
    # False if it suffices to record one call of a function that is called several times.
    is_full: bool
    # Path -> rows of the input in this program, with which another decision would be made.
    otherwise: dict[str, int]


# The record of the innermost such block. The functions that the block traces read it here, because
# no argument passes it to them.
_record: contextvars.ContextVar[Record | None] = contextvars.ContextVar(
    "jaxmp_fp8_record", default=None
)


def decisions(is_examined: bool) -> contextlib.AbstractContextManager[Record]:
    """Records the decisions of a block, unless it is not examined or an outer one records them."""
    is_recorded = is_examined and not is_recording()
    return recorded() if is_recorded else contextlib.nullcontext(Record([], {}, False, {}))


def recorded(*, is_full: bool = False) -> contextlib.AbstractContextManager[Record]:
    """Records the decisions of a block."""
    return _compat.assigned(_record, Record([], {}, is_full, {}))


def is_recording() -> bool:
    """Returns True in a function whose decisions are recorded."""
    return _record.get() is not None


def is_explained() -> bool:
    """Returns True while `explain` traces a function."""
    record = _record.get()
    return record is not None and record.is_full


def note_unsupported(path: str, why: str) -> None:
    """Records an operation that FP8 does not support, unless `explain` traces the function."""
    record = _record.get()
    if record is not None and not record.is_full:
        record.rows.append(LayerDecision(path, 0, 0, why))


def note_decision(path: str, kernel: Sequence[int]) -> None:
    """Records, if `explain` traces the function, a layer whose FP32 sums decide.

    Args:
      path: path of the layer's module.
      kernel: shape of its kernel, the output features last.
    """
    record = _record.get()
    if record is not None and record.is_full:
        why = "a softmax, a choice, a loss or the caller reads its FP32 sums"
        record.rows.append(LayerDecision(path, math.prod(kernel[:-1]), kernel[-1], why))


UNKNOWN_DOT = "has no dot that jaxmp replaces"
_REGISTER = (
    " Register classes of linear layers (jaxmp.register_layer), or "
    "apply the recipe to operations: loss_fn = jaxmp.autocast(loss_fn, 'fp8')."
)
_WIDEN = " For FP8 in narrow layers, write min_width = 0 in the table [fp8]."


def unused_text(subject: str, rows: list[LayerDecision]) -> str:
    """Returns a warning if the decisions on a model or function, if any, exclude all matmuls."""
    if not rows or not all(row.exclusion_reason for row in rows):
        return ""
    # A path may have several matmuls.
    reasons = {row.path or "(root)": row.exclusion_reason for row in rows}
    listed = [f"{path!r}: {why}" for path, why in list(reasons.items())[:3]]
    text = "; ".join(listed) + (f"; and {len(reasons) - 3} more" if len(reasons) > 3 else "")
    fix = _REGISTER if UNKNOWN_DOT in text else ""
    fix += _WIDEN if "narrow" in text or "min_width" in text else ""
    return (
        f"The policies of {subject} set matmul = 'fp8', but none of its matmuls computes in FP8 "
        f"({text}).{fix} The recipe 'bf16' computes the same as now."
    )


def decide(scaling: Scaling, path: str, k: int, n: int, why: str = "", tokens: int = 0) -> bool:
    """Decides if a layer runs in FP8, and records the decision for `explain`.

    Args:
      scaling: the FP8 scaling of the policies.
      path: path of the layer's module, or the name scopes of a matmul.
      k, n: input and output features of the layer; 0 if they cannot be determined.
      why: reason to exclude the layer whatever its sizes are; "" if there is none.
      tokens: rows of the layer's input in this program, which only a note of `explain` reads.

    Returns:
      True if the layer runs in FP8.

    Raises:
      CompositionError: on a GPU without FP8 matmuls, unless the scaling sets `emulate=True`.
    """
    reason = excluded(scaling, path, k, n, why)
    record = _record.get()
    if record is not None:
        target = "cpu" if scaling.emulate else _compat.target()
        if not why and decides_otherwise(k, n, scaling, tokens, target):
            record.otherwise[path] = tokens
        record.rows.append(LayerDecision(path, k, n, reason))
        record.scalings.update({} if reason else {scaling: None})
    return not reason


def excluded(scaling: Scaling, path: str, k: int, n: int, why: str = "") -> str:
    """Returns why a layer does not run in FP8; "" if it does. The arguments are those of `decide`.

    Raises:
      CompositionError: as in `decide`.
    """
    target = "cpu" if scaling.emulate else _compat.target()
    if not scaling.emulate:
        _check_device(path)
    return why or explain_exclusion(max(k, 1), max(n, 1), scaling, target)


def _check_device(path: str) -> None:
    """Raises if the GPU that is compiled for has no FP8 matmuls."""
    gpu = _core.unsupported_gpu(_core.FP8_MATMULS)
    if gpu:
        first = _core.capability_text(_core.FP8_MATMULS)
        raise CompositionError(
            f'matmul = "fp8" for {path!r}: {gpu} has no FP8 matmuls, which begin with {first}. Use '
            'a recipe without them, such as "bf16". To round to FP8 and multiply in 16 bits '
            "instead, write\n    [fp8]\n    emulate = true"
        )
