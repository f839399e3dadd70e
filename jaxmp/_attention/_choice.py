"""Chooses the implementation of an attention call, and explains the choice."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Iterable
from typing import NamedTuple

from jaxmp._attention._arguments import Arguments
from jaxmp._attention._cudnn import padded_size
from jaxmp._core._compat import (
    compute_capability,
    cudnn_version,
    has_fp8_attention,
    target,
    target_capability,
)
from jaxmp._core._dtypes import bits, is_half
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
# Head size, and multiple of the sequence lengths, that cuDNN's FP8 kernel requires for gradients
# (same file).
_FP8_HEAD, _FP8_MULTIPLE = 128, 128
# Causal training on longer sequences is slower in FP8 than in bfloat16. Speed of FP8 relative to
# bfloat16, forward and backward: 1.13 at 2,048 positions, 1.08 at 4,096, 0.90 at 8,192 and 0.75 at
# 32,768. These are NVIDIA's figures for cuDNN 9.19.1 on one H200, with 64 query heads and 8 key
# heads of size 128 (cudnn-frontend, sdpa_benchmark_training/results/h200_919_only_cudnn).
LONGEST_CAUSAL_FP8 = 4096


class Blocker(NamedTuple):
    """Reason why an implementation cannot serve a call."""

    # Name of the argument, or "device".
    argument: str
    reason: str
    # Change that removes the blocker, as code where possible.
    change: str


@dataclasses.dataclass(frozen=True)
class AttentionChoice:
    """Implementation of an attention call, with the reason, as `explain_attention` returns it.

    Args:
      implementation: "cudnn", "blockwise", "xla" or "cudnn_fp8".
      reason: why it was chosen.
      blockers: reasons why cuDNN's fused kernel cannot serve the call; empty if it can.
      notes: adaptations of the call to the kernel, and their cost.

    Example:
      >>> q = jax.ShapeDtypeStruct((2, 128, 8, 64), jnp.bfloat16)
      >>> explain_attention(q, q, q, is_causal=True).implementation
      'xla'
    """

    implementation: str
    reason: str
    blockers: tuple[Blocker, ...] = ()
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.implementation}: {self.reason}"]
        lines += [f"  not cudnn: {b.argument}: {b.reason}. {b.change}" for b in self.blockers]
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])


def choose(args: Arguments, implementation: str) -> AttentionChoice:
    """Chooses the implementation for a call.

    Args:
      args: the checked arguments.
      implementation: a name, or "auto". "auto" chooses "cudnn" if cuDNN's fused kernel can serve
        the call; otherwise "xla" if the FP32 logits of all pairs take at most 16 MiB; otherwise
        "blockwise". An empty result is computed by "xla", whatever the name, except "cudnn_fp8".

    Raises:
      AttentionError: if the named implementation cannot serve the call.
    """
    if implementation != "cudnn_fp8" and not math.prod(args.logits_shape):
        return AttentionChoice("xla", "the result is empty")
    if implementation in ("blockwise", "xla"):
        return AttentionChoice(implementation, ASKED, tuple(cudnn_blockers(args)))
    if implementation == "cudnn_fp8":
        return _fp8_choice(args)
    blockers = tuple(cudnn_blockers(args))
    if implementation == "cudnn" and blockers:
        raise _refusal(implementation, blockers)
    if not blockers:
        reason = ASKED if implementation == "cudnn" else "cuDNN's fused kernel fits"
        return AttentionChoice("cudnn", reason, notes=tuple(_notes(args)))
    size = 4 * math.prod(args.logits_shape)
    if size > _WHOLE_LOGITS:
        reason = f"the logits of all pairs would take {_mebibytes(size)}"
        return AttentionChoice("blockwise", reason, blockers)
    reason = f"the logits of all pairs take {_mebibytes(size)} only"
    return AttentionChoice("xla", reason, blockers)


def _refusal(implementation: str, blockers: Iterable[Blocker]) -> AttentionError:
    reasons = "\n".join(f"  {b.argument}: {b.reason}. {b.change}" for b in blockers)
    return AttentionError(
        f"implementation={implementation!r} cannot serve this call:\n{reasons}\n"
        "implementation='auto' takes another where cuDNN cannot serve."
    )


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB in FP32"


def log_once(choice: AttentionChoice) -> None:
    """Logs a choice to the logger `jaxmp.attention`, once per implementation and first blocker.

    The level is a warning if a program for a GPU does not use cuDNN, otherwise info.
    """
    blocker = choice.blockers[0].argument if choice.blockers else ""
    if (choice.implementation, blocker) in _logged:
        return
    _logged.add((choice.implementation, blocker))
    unfused = choice.implementation not in ("cudnn", "cudnn_fp8") and target() == "gpu"
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
        return [Blocker("device", f"the program is compiled for {device}", "Run it on a GPU.")]
    if cudnn_version() is None:
        change = 'Install it: pip install "jaxmp[cuda12]" or "jaxmp[cuda13]".'
        return [Blocker("device", "JAX finds no cuDNN", change)]
    capability = compute_capability()
    if capability is not None and capability < (8, 0):
        reason = f"the kernel needs an A100 or later, this GPU has capability {capability}"
        return [Blocker("device", reason, "Use implementation='auto'.")]
    return []


def _operand_blockers(args: Arguments) -> list[Blocker]:
    blockers = []
    dtype = args.query.dtype
    if not is_half(dtype):
        reason = f"the kernel takes 16 bits, the operands are {dtype.name}"
        blockers.append(Blocker("policy", reason, "Write policy='bfloat16'."))
    capability = compute_capability()
    largest = _LARGEST_HEAD_HOPPER if capability and capability >= (9, 0) else _LARGEST_HEAD
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
    if bias is not None and is_half(dtype) and bits(bias.dtype) > bits(dtype):
        reason = f"the kernel reads the bias as {dtype.name}, and it is {bias.dtype.name}"
        change = "Write bias=bias.astype(query.dtype) if its digits can be spared."
        blockers.append(Blocker("bias", reason, change))
    for name, array in (("bias", bias), ("mask", args.mask)):
        if array is not None and (queries % 2 or keys % 2):
            reason = f"the kernel's backward pass with a {name} needs even lengths, not {queries}"
            reason += f" and {keys}"
            stated = "State it by is_causal, local_window_size or lengths, or pad to even lengths."
            padding = "Pad to even lengths."
            blockers.append(Blocker(name, reason, stated if name == "mask" else padding))
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


# ---------------------------------------------------------------------------
# cuDNN in FP8
# ---------------------------------------------------------------------------


def _fp8_choice(args: Arguments) -> AttentionChoice:
    """Returns the choice of FP8 attention, which the caller named; "auto" never chooses it.

    Raises:
      AttentionError: if it cannot serve the call, or would be slower than cuDNN's 16-bit kernel.
    """
    # A CPU has the same restrictions as a GPU, so that a program tested on a CPU runs on a GPU.
    blockers = [*_fp8_device_blockers(), *_fp8_operand_blockers(args), *_fp8_mask_blockers(args)]
    if blockers:
        raise _refusal("cudnn_fp8", blockers)
    rounding = "query, key, value, weights, result and all gradients are rounded to E4M3"
    if target() == "gpu":
        return AttentionChoice("cudnn_fp8", ASKED, notes=(rounding,))
    device = Blocker("device", f"the program is compiled for {target()}", "Run it on a GPU.")
    size = _mebibytes(4 * math.prod(args.logits_shape))
    emulated = f"the FP8 kernel is emulated, slowly: the logits of all pairs take {size}"
    return AttentionChoice("cudnn_fp8", ASKED, (device,), (rounding, emulated))


def _fp8_device_blockers() -> list[Blocker]:
    device, change = target(), "Write implementation='auto'."
    if device == "cpu":
        return []
    if device != "gpu":
        return [Blocker("device", f"the program is compiled for {device}", change)]
    version = cudnn_version()
    if version is None:
        return _device_blockers()
    if not has_fp8_attention():
        return [Blocker("device", "this version of JAX has no FP8 attention", change)]
    capability = target_capability()
    if capability is not None and capability < (9, 0):
        reason = f"the kernel needs an H100 or later, this GPU has capability {capability}"
        return [Blocker("device", reason, change)]
    # Versions from the checks of cudnn-frontend (include/cudnn_frontend/node/sdpa_fp8_bwd.h); XLA
    # checks for 9.1 only.
    blackwell = capability is not None and capability >= (10, 0)
    if version < 90100 or version == 91000 or (blackwell and version < 91900):
        major, minor = version // 10000, version % 10000 // 100
        reason = f"cuDNN {major}.{minor} has no FP8 kernel that is right on this GPU"
        package = "nvidia-cudnn-cu13>=9.19"
        return [Blocker("device", reason, f"Install a later one: pip install '{package}'.")]
    return []


def _fp8_operand_blockers(args: Arguments) -> list[Blocker]:
    blockers = []
    sizes = sorted({args.query.shape[-1], args.value.shape[-1]})
    if sizes != [_FP8_HEAD]:
        reason = f"heads are of {' and '.join(map(str, sizes))}, and the backward kernel takes 128"
        change = "Use heads of 128, or write implementation='auto'."
        blockers.append(Blocker("query", reason, change))
    _, _, queries, keys = args.logits_shape
    for name, length in (("query", queries), ("key", keys)):
        if length % _FP8_MULTIPLE:
            reason = f"its {length} positions are no multiple of {_FP8_MULTIPLE}"
            whole = -(-length // _FP8_MULTIPLE) * _FP8_MULTIPLE
            # With a causal mask, no query of the text sees padding at its end.
            pad = f"Pad the text to {whole}, or write" if args.settings.is_causal else "Write"
            blockers.append(Blocker(name, reason, f"{pad} implementation='auto'."))
    longest = max(queries, keys)
    if args.settings.is_causal and longest > LONGEST_CAUSAL_FP8:
        reason = (
            f"over {longest} positions causal training is slower in FP8: 0.90 of bfloat16's speed "
            "at 8,192 positions and 0.75 at 32,768, by NVIDIA's figures for an H200"
        )
        blockers.append(Blocker("is_causal", reason, "Write implementation='auto'."))
    return blockers


def _fp8_mask_blockers(args: Arguments) -> list[Blocker]:
    without = "the FP8 kernel knows causal attention and full attention only"
    reasons = {
        "bias": (args.bias, without),
        "mask": (args.mask, without),
        "query_seq_lengths": (args.query_lengths, without),
        "key_value_seq_lengths": (args.key_lengths, without),
        "local_window_size": (args.settings.window, without),
        "dropout_rate": (args.dropout_rng, "JAX has no dropout in the fused kernel"),
        "return_residual": (args.settings.residual or None, "JAX does not return it in FP8"),
    }
    changes = {
        "mask": "State a causal mask by is_causal=True; else write implementation='auto'.",
        "dropout_rate": "Write dropout_rate=0.0.",
    }
    other = "Leave {} out, or write implementation='auto'."
    return [
        Blocker(name, reason, changes.get(name, other.format(name)))
        for name, (value, reason) in reasons.items()
        if value is not None
    ]
