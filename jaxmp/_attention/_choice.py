"""Which implementation of attention serves a call, and why the others do not."""

from __future__ import annotations

import dataclasses
import logging
import math
from typing import NamedTuple

from jaxmp._attention._arguments import Arguments
from jaxmp._attention._cudnn import padded_size
from jaxmp._compat import compute_capability, cudnn_version, target
from jaxmp._dtypes import bits, is_half
from jaxmp.errors import AttentionError

_log = logging.getLogger("jaxmp.attention")
_logged: set[tuple[str, str]] = set()

# The reason for an implementation that is no choice.
ASKED = "it was asked for"
# Above it the logits of all pairs are not held in memory: 16 MiB, in FP32. Training keeps several
# arrays of that size for each layer; on a CPU blocks are as fast from about there on.
_WHOLE_LOGITS = 2**24
# Head sizes that cuDNN's fused kernel takes (jax/_src/cudnn/fused_attention_stablehlo.py).
_LARGEST_HEAD, _LARGEST_HEAD_HOPPER = 128, 256


class Blocker(NamedTuple):
    """One thing that keeps an implementation from serving a call."""

    # The argument, or "device".
    argument: str
    reason: str
    # What would lift it, as code where it is code.
    change: str


@dataclasses.dataclass(frozen=True)
class AttentionChoice:
    """What `explain_attention` found.

    Args:
      implementation: "cudnn", "blockwise" or "xla".
      reason: why this one, in a sentence.
      blockers: what keeps cuDNN's fused kernel from serving the call; empty where it could.
      notes: what is done for the kernel's sake, and what it costs.

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


def choose(given: Arguments, implementation: str) -> AttentionChoice:
    """The implementation for a call; what is asked for, or the best one that is right.

    Raises:
      AttentionError: if `implementation` is asked for and cannot serve the call.
    """
    if implementation in ("blockwise", "xla"):
        return AttentionChoice(implementation, ASKED, tuple(cudnn_blockers(given)))
    blockers = tuple(cudnn_blockers(given))
    if implementation == "cudnn" and blockers:
        words = "\n".join(f"  {b.argument}: {b.reason}. {b.change}" for b in blockers)
        raise AttentionError(
            f"implementation='cudnn' cannot serve this call:\n{words}\n"
            "implementation='auto' takes another where cuDNN cannot serve."
        )
    if not blockers:
        reason = ASKED if implementation == "cudnn" else "cuDNN's fused kernel fits"
        return AttentionChoice("cudnn", reason, notes=tuple(_notes(given)))
    size = 4 * math.prod(given.logits_shape)
    if size > _WHOLE_LOGITS:
        reason = f"the logits of all pairs would take {_mebibytes(size)}"
        return AttentionChoice("blockwise", reason, blockers)
    reason = f"the logits of all pairs take {_mebibytes(size)} only"
    return AttentionChoice("xla", reason, blockers)


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB in FP32"


def log_once(choice: AttentionChoice) -> None:
    """Says on the logger `jaxmp.attention` what was chosen: a warning if a GPU does without."""
    blocker = choice.blockers[0].argument if choice.blockers else ""
    if (choice.implementation, blocker) in _logged:
        return
    _logged.add((choice.implementation, blocker))
    unfused = choice.implementation != "cudnn" and target() == "gpu"
    _log.log(logging.WARNING if unfused else logging.INFO, "attention runs as %s", choice)


# ---------------------------------------------------------------------------
# cuDNN
# ---------------------------------------------------------------------------


def cudnn_blockers(given: Arguments) -> list[Blocker]:
    """What keeps `jax.nn.dot_product_attention(implementation="cudnn")` from serving a call."""
    return [*_device_blockers(), *_operand_blockers(given), *_mask_blockers(given)]


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


def _operand_blockers(given: Arguments) -> list[Blocker]:
    found = []
    dtype = given.query.dtype
    if not is_half(dtype):
        reason = f"the kernel takes 16 bits, the operands are {dtype.name}"
        found.append(Blocker("policy", reason, "Write policy='bfloat16'."))
    capability = compute_capability()
    largest = _LARGEST_HEAD_HOPPER if capability and capability >= (9, 0) else _LARGEST_HEAD
    padded = padded_size(given.query.shape[-1], given.value.shape[-1])
    if padded > largest:
        unknown = " (without a GPU here JAX assumes an A100)" if capability is None else ""
        reason = f"heads of {padded} are larger than {largest}{unknown}"
        found.append(Blocker("query", reason, f"Use more heads, of at most {largest}."))
    if given.dropout_rng is not None:
        reason = "JAX has no dropout in the fused kernel"
        found.append(Blocker("dropout_rate", reason, "Write dropout_rate=0.0."))
    window = given.settings.window
    if window is not None and not given.settings.is_causal:
        reason = f"the kernel has windows of past positions only, not {window}"
        found.append(Blocker("local_window_size", reason, "Write is_causal=True."))
    return found


def _mask_blockers(given: Arguments) -> list[Blocker]:
    found = []
    _, _, queries, keys = given.logits_shape
    bias, dtype = given.bias, given.query.dtype
    if bias is not None and is_half(dtype) and bits(bias.dtype) > bits(dtype):
        reason = f"the kernel reads the bias as {dtype.name}, and it is {bias.dtype.name}"
        change = "Write bias=bias.astype(query.dtype) if its digits can be spared."
        found.append(Blocker("bias", reason, change))
    for name, array in (("bias", bias), ("mask", given.mask)):
        if array is not None and (queries % 2 or keys % 2):
            reason = f"the kernel's backward pass with a {name} needs even lengths, not {queries}"
            reason += f" and {keys}"
            stated = "State it by is_causal, local_window_size or lengths, or pad to even lengths."
            padding = "Pad to even lengths."
            found.append(Blocker(name, reason, stated if name == "mask" else padding))
    return found


def _notes(given: Arguments) -> list[str]:
    notes = []
    sizes = given.query.shape[-1], given.value.shape[-1]
    padded = padded_size(*sizes)
    if sizes != (padded, padded):
        notes.append(
            f"heads of {' and '.join(map(str, sorted(set(sizes))))} are padded to {padded}"
        )
    if given.mask is not None:
        notes.append(
            "a bool mask is added to the logits as an array of all pairs, and its gradient may be "
            "computed; is_causal, local_window_size and lengths cost nothing"
        )
    return notes
