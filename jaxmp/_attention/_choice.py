"""Chooses the implementation of an attention call, and explains the choice."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Iterable
from typing import ClassVar

from jaxmp._attention._arguments import Arguments
from jaxmp._attention._cudnn import padded_size
from jaxmp._core._capability import (
    FUSED_ATTENTION,
    LARGE_ATTENTION_HEADS,
    capability_text,
    unsupported_gpu,
)
from jaxmp._core._compat import compute_capability, cudnn_version, target
from jaxmp._core._dtypes import bits, is_16bit
from jaxmp._core._explanation import Explanation, ExplanationRow
from jaxmp.errors import AttentionError

_log = logging.getLogger("jaxmp.attention")
_logged: set[tuple[str, str]] = set()

# Reason if the caller named the implementation.
ASKED = "it was asked for"
# Largest size in bytes of the FP32 logits of all pairs for which "auto" chooses "xla": 16 MiB.
# Training stores several arrays of that size for each layer. From about this size on, "blockwise"
# is as fast on a CPU.
_WHOLE_LOGITS = 2**24
# Largest head sizes of cuDNN's fused kernel (jax/_src/cudnn/fused_attention_stablehlo.py).
_LARGEST_HEAD, _LARGEST_HEAD_HOPPER = 128, 256


@dataclasses.dataclass(frozen=True)
class Blocker(ExplanationRow):
    """Reason why an implementation cannot serve a call.

    Attributes:
      argument: name of the argument, or "device".
      reason: why it blocks the implementation.
      change: change that removes the blocker, as code where possible.
    """

    argument: str
    reason: str
    change: str

    def cells(self) -> tuple[str, ...]:
        return self.argument, self.reason, self.change


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionExplanation(Explanation[Blocker]):
    """Implementation of an attention call, with the reason, as `explain_attention` returns it.

    Attributes:
      rows: reasons why cuDNN's fused kernel cannot serve the call; empty if it can.
      notes: adaptations of the call to the kernel, and their cost.
      implementation: "cudnn", "blockwise" or "xla".
      reason: why it was chosen.

    Example:
      >>> q = jax.ShapeDtypeStruct((2, 128, 8, 64), jnp.bfloat16)
      >>> explain_attention(q, q, q, is_causal=True).implementation
      'xla'
    """

    columns: ClassVar = ("blocks cudnn", "reason", "change")

    implementation: str
    reason: str

    @property
    def summary(self) -> str:
        """The implementation and the reason."""
        return f"{self.implementation}: {self.reason}"


def choose(args: Arguments, implementation: str) -> AttentionExplanation:
    """Chooses the implementation for a call.

    Args:
      args: the checked arguments.
      implementation: a name, or "auto". "auto" chooses "cudnn" if cuDNN's fused kernel can serve
        the call; otherwise "xla" if the FP32 logits of all pairs take at most 16 MiB; otherwise
        "blockwise". An empty result is computed by "xla", whatever the name.

    Raises:
      AttentionError: if the named implementation cannot serve the call.
    """
    if not math.prod(args.logits_shape):
        return _explain("xla", "the result is empty")
    if implementation in ("blockwise", "xla"):
        return _explain(implementation, ASKED, cudnn_blockers(args))
    blockers = tuple(cudnn_blockers(args))
    if implementation == "cudnn" and blockers:
        raise _refusal(implementation, blockers)
    if not blockers:
        reason = ASKED if implementation == "cudnn" else "cuDNN's fused kernel fits"
        return _explain("cudnn", reason, notes=_notes(args))
    size = 4 * math.prod(args.logits_shape)
    if size > _WHOLE_LOGITS:
        reason = f"the logits of all pairs would take {_mebibytes(size)}"
        return _explain("blockwise", reason, blockers)
    reason = f"the logits of all pairs take only {_mebibytes(size)}"
    return _explain("xla", reason, blockers)


def _explain(
    implementation: str,
    reason: str,
    blockers: Iterable[Blocker] = (),
    notes: Iterable[str] = (),
) -> AttentionExplanation:
    return AttentionExplanation(
        rows=tuple(blockers), notes=tuple(notes), implementation=implementation, reason=reason
    )


def _refusal(implementation: str, blockers: Iterable[Blocker]) -> AttentionError:
    reasons = "\n".join(f"  {b.argument}: {b.reason}. {b.change}" for b in blockers)
    return AttentionError(
        f"implementation={implementation!r} does not support this call:\n{reasons}\n"
        "implementation='auto' chooses another one if cuDNN does not support the call."
    )


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB in FP32"


def log_once(choice: AttentionExplanation) -> None:
    """Logs a choice to the logger `jaxmp.attention`, once per implementation and first blocker.

    The level is a warning if a program for a GPU does not use cuDNN, otherwise info.
    """
    blocker = choice.rows[0].argument if choice.rows else ""
    if (choice.implementation, blocker) in _logged:
        return
    _logged.add((choice.implementation, blocker))
    unfused = choice.implementation != "cudnn" and target() == "gpu"
    _log.log(logging.WARNING if unfused else logging.INFO, "attention runs as %s", choice)


# ---------------------------------------------------------------------------
# cuDNN
# ---------------------------------------------------------------------------


def cudnn_blockers(args: Arguments) -> list[Blocker]:
    """Lists why `jax.nn.dot_product_attention(implementation="cudnn")` cannot serve a call."""
    return [*_device_blockers(), *_operand_blockers(args), *_mask_blockers(args)]


def _device_blockers() -> list[Blocker]:
    device = target()
    if device != "gpu":
        return [
            Blocker(
                "device", f"the program is compiled for {device}", "Compile the program for a GPU."
            )
        ]
    if cudnn_version() is None:
        change = 'Install it: pip install "jaxmp[cuda12]" or "jaxmp[cuda13]".'
        return [Blocker("device", "JAX finds no cuDNN", change)]
    gpu = unsupported_gpu(FUSED_ATTENTION)
    if gpu:
        first = capability_text(FUSED_ATTENTION)
        reason = f"the kernel requires compute capability {first} or more, this is {gpu}"
        return [Blocker("device", reason, "Use implementation='auto'.")]
    return []


def _operand_blockers(args: Arguments) -> list[Blocker]:
    blockers = []
    dtype = args.query.dtype
    if not is_16bit(dtype):
        reason = f"the kernel takes 16 bits, the operands are {dtype.name}"
        blockers.append(Blocker("policy", reason, "Write policy='bfloat16'."))
    # JAX reads the capability of the local GPU, even if it compiles for another one.
    capability = compute_capability()
    is_hopper = capability is not None and capability >= LARGE_ATTENTION_HEADS
    largest = _LARGEST_HEAD_HOPPER if is_hopper else _LARGEST_HEAD
    padded = padded_size(args.query.shape[-1], args.value.shape[-1])
    if padded > largest:
        unknown = " (without a GPU here JAX assumes an A100)" if capability is None else ""
        reason = f"heads of {padded} are larger than {largest}{unknown}"
        blockers.append(Blocker("query", reason, f"Use more heads, of at most {largest}."))
    if args.dropout_rng is not None:
        reason = "JAX has no dropout in the fused kernel"
        blockers.append(Blocker("dropout_rate", reason, "Write dropout_rate=0.0."))
    window = args.settings.window
    if window is not None and not args.settings.is_causal:
        reason = f"the kernel has windows of past positions only, not {window}"
        blockers.append(Blocker("local_window_size", reason, "Write is_causal=True."))
    return blockers


def _mask_blockers(args: Arguments) -> list[Blocker]:
    blockers = []
    _, _, queries, keys = args.logits_shape
    bias, dtype = args.bias, args.query.dtype
    if bias is not None and is_16bit(dtype) and bits(bias.dtype) > bits(dtype):
        reason = f"the kernel reads the bias as {dtype.name}, and it is {bias.dtype.name}"
        change = "Write bias=bias.astype(query.dtype) if the lower precision suffices."
        blockers.append(Blocker("bias", reason, change))
    for name, array in (("bias", bias), ("mask", args.mask)):
        if array is not None and (queries % 2 or keys % 2):
            reason = f"the kernel's backward pass with a {name} needs even lengths, not {queries}"
            reason += f" and {keys}"
            declared = (
                "Declare it by is_causal, local_window_size or lengths, or pad to even lengths."
            )
            padding = "Pad to even lengths."
            blockers.append(Blocker(name, reason, declared if name == "mask" else padding))
    return blockers


def _notes(args: Arguments) -> list[str]:
    notes = []
    if args.scale is not None:
        notes.append("a scale that is an array multiplies the query, in the query's dtype")
    sizes = args.query.shape[-1], args.value.shape[-1]
    padded = padded_size(*sizes)
    if sizes != (padded, padded):
        notes.append(
            f"heads of {' and '.join(map(str, sorted(set(sizes))))} are padded to {padded}"
        )
    if args.mask is not None:
        notes.append(
            "a bool mask is added to the logits as an array of all pairs, and its gradient may be "
            "computed; is_causal, local_window_size and lengths cost nothing"
        )
    return notes
