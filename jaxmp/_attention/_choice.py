"""Chooses the implementation of an attention call, and explains the choice."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
from collections.abc import Iterator
from typing import ClassVar

import jax
from jax.sharding import AxisType

from jaxmp import _core
from jaxmp._attention._arguments import AttentionArguments
from jaxmp._attention._cudnn import padded_size
from jaxmp._core import _compat
from jaxmp.errors import AttentionError

_log = logging.getLogger("jaxmp.attention")
# (implementation, reason) of the messages that were logged: once each in a process.
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
class Blocker(_core.ExplanationRow):
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
class AttentionExplanation(_core.ExplanationSection[Blocker]):
    """Implementation of an attention call, with the reason.

    Attributes:
      rows: reasons why cuDNN's kernel cannot serve the call; empty if it can.
      notes: adaptations of the call to the kernel, and their cost.
      implementation: "cudnn", "blockwise" or "xla".
      reason: why it was chosen.
    """

    columns: ClassVar = ("blocks the kernel", "reason", "change")

    implementation: str
    reason: str

    @property
    def summary(self) -> str:
        """The implementation and the reason."""
        return f"{self.implementation}: {self.reason}"


def choose_implementation(args: AttentionArguments, implementation: str) -> AttentionExplanation:
    """Chooses the implementation for a call.

    Args:
      args: the checked arguments.
      implementation: a name, or "auto". "auto" chooses cuDNN's fused kernel if it can serve the
        call; otherwise "xla" if the FP32 logits of all pairs take at most 16 MiB, or if their shape
        is symbolic; otherwise "blockwise". An empty result is computed by "xla", whatever the name.

    Raises:
      AttentionError: if the named implementation cannot serve the call.
    """
    checks = _device_blockers(), _operand_blockers(args), _mask_blockers(args)
    blockers = tuple(itertools.chain(*checks)) if math.prod(args.logits_shape) else ()
    chosen, reason = _choice(args, implementation, blockers)
    notes = tuple(_cudnn_notes(args)) if chosen == "cudnn" else ()
    return AttentionExplanation(
        rows=blockers,
        notes=notes,
        implementation=chosen,
        reason=reason,
    )


def _choice(
    args: AttentionArguments, implementation: str, blockers: tuple[Blocker, ...]
) -> tuple[str, str]:
    """Returns the implementation and the reason."""
    size = 4 * math.prod(args.logits_shape)
    if not size:
        return "xla", "the result is empty"
    if implementation in ("blockwise", "xla"):
        return implementation, ASKED
    if implementation == "cudnn" and blockers:
        reasons = "\n".join(f"  {b.argument}: {b.reason}. {b.change}" for b in blockers)
        raise AttentionError(
            f"implementation='cudnn' does not support this call:\n{reasons}\n"
            "implementation='auto' chooses another one if cuDNN's fused kernel does not support "
            "the call."
        )
    if not blockers:
        return "cudnn", ASKED if implementation == "cudnn" else "cuDNN's fused kernel fits"
    if not isinstance(size, int):
        return "xla", "the shape of its logits is symbolic"
    mebibytes = f"{size / 2**20:,.1f} MiB in FP32"
    if size > _WHOLE_LOGITS:
        return "blockwise", f"the logits of all pairs would take {mebibytes}"
    return "xla", f"the logits of all pairs take only {mebibytes}"


def log_once(choice: AttentionExplanation) -> None:
    """Logs a choice to the logger `jaxmp.attention`, once per implementation and first blocker.

    The level is a warning if a program for a GPU or TPU uses no fused kernel for logits that are
    too many to store, although the caller named no other implementation; otherwise info.
    """
    blocker = choice.rows[0].argument if choice.rows else ""
    if (choice.implementation, blocker) in _logged:
        return
    _logged.add((choice.implementation, blocker))
    # A call with few logits, as with the short batch of an `init`, is fast without a fused kernel.
    is_slow = (
        choice.implementation == "blockwise"
        and choice.reason != ASKED
        and _compat.target() != "cpu"
    )
    _log.log(logging.WARNING if is_slow else logging.INFO, "attention runs as %s", choice)


# ---------------------------------------------------------------------------
# cuDNN
# ---------------------------------------------------------------------------


def _device_blockers() -> Iterator[Blocker]:
    device = _compat.target()
    if device != "gpu":
        reason = f"the program is compiled for {device}"
        splash = "Call jax.experimental.pallas.ops.tpu.splash_attention in an attention function."
        change = splash if device == "tpu" else "Compile the program for a GPU."
        yield Blocker("device", reason, change)
    elif _compat.cudnn_version() is None:
        commands = " or ".join(map(_core.install_command, ("cuda12", "cuda13")))
        change = f"Install it: {commands}."
        yield Blocker("device", "JAX finds no cuDNN", change)
    elif gpu := _core.unsupported_gpu(_core.FUSED_ATTENTION):
        first = _core.capability_text(_core.FUSED_ATTENTION)
        reason = f"the kernel requires compute capability {first} or more, this is {gpu}"
        yield Blocker("device", reason, "Use implementation='auto'.")


def _operand_blockers(args: AttentionArguments) -> Iterator[Blocker]:
    dtype = args.query.dtype
    if not _core.is_16bit(dtype):
        reason = f"the kernel takes 16 bits, the operands are {dtype.name}"
        yield Blocker("policy", reason, "Write policy='bfloat16'.")
    # JAX reads the capability of the local GPU, even if it compiles for another one.
    capability = _compat.compute_capability()
    is_hopper = capability is not None and capability >= _core.LARGE_ATTENTION_HEADS
    largest = _LARGEST_HEAD_HOPPER if is_hopper else _LARGEST_HEAD
    padded = padded_size(args.query.shape[-1], args.value.shape[-1])
    if padded > largest:
        unknown = " (without a GPU here JAX assumes an A100)" if capability is None else ""
        reason = f"heads of {padded} are larger than {largest}{unknown}"
        yield Blocker("query", reason, f"Use more heads, of at most {largest}.")
    if args.dropout_rng is not None:
        reason = "JAX has no dropout in the fused kernel"
        yield Blocker("dropout_rate", reason, "Write dropout_rate=0.0.")
    window = args.settings.window
    if window is not None and not args.settings.is_causal:
        reason = f"the kernel has windows of past positions only, not {window}"
        yield Blocker("local_window_size", reason, "Write is_causal=True.")


def _mask_blockers(args: AttentionArguments) -> Iterator[Blocker]:
    bias, dtype = args.bias, args.query.dtype
    if bias is not None and _core.is_16bit(dtype) and bias.dtype != dtype:
        reason = f"the kernel reads the bias as {dtype.name}, and it is {bias.dtype.name}"
        change = "Write bias=bias.astype(query.dtype) if its precision suffices."
        yield Blocker("bias", reason, change)
    for name, array in (("bias", bias), ("mask", args.mask)):
        if array is not None and args.logits_shape[2] == 1:
            reason = f"the kernel's backward pass with a {name} needs even lengths, and padding a "
            reason += "single query would double its work"
            declared = "Declare it by is_causal, local_window_size or lengths, or use two queries."
            yield Blocker(name, reason, declared if name == "mask" else "Use two queries.")


def _cudnn_notes(args: AttentionArguments) -> Iterator[str]:
    if args.scale is not None:
        yield "a scale that is an array multiplies the query, in the query's dtype"
    sizes = args.query.shape[-1], args.value.shape[-1]
    padded = padded_size(*sizes)
    if sizes != (padded, padded):
        yield f"heads of {' and '.join(map(str, sorted(set(sizes))))} are padded to {padded}"
    _, _, queries, keys = args.logits_shape
    for positions in dict.fromkeys((queries, keys)):
        if positions % 2:
            yield (
                f"{positions} positions are padded to {positions + 1} in training, because JAX "
                "defines no gradient of the kernel for odd lengths"
            )
    if args.mask is not None:
        yield (
            "a bool mask is added to the logits as an array of all pairs, and its gradient may be "
            "computed; is_causal, local_window_size and lengths cost nothing"
        )
    yield from _unsplit_heads(args)


def _unsplit_heads(args: AttentionArguments) -> Iterator[str]:
    """Describes mesh axes over which XLA must not split the heads of the query.

    XLA chooses the sharding after the implementation has been traced; see `_sharding`.
    """
    mesh = jax.typeof(args.query).sharding.mesh
    heads, groups = args.query.shape[2], args.key.shape[2]
    sizes = zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
    axes = {
        name: size
        for name, size, kind in sizes
        if kind != AxisType.Manual and heads % size == 0 and groups % size
    }
    if axes:
        yield (
            f"if XLA splits the {heads} heads over {axes}, compilation raises an error, because "
            f"the {groups} heads of key and value cannot be split alike: repeat them, key = "
            f"jnp.repeat(key, {heads // groups}, axis=-2)"
        )
