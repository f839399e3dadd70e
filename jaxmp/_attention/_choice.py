"""Chooses the implementation of an attention call, and explains the choice."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Iterable, Iterator
from typing import ClassVar, NamedTuple

import jax
from jax.sharding import AxisType

from jaxmp._attention._arguments import Arguments
from jaxmp._attention._cudnn import padded_size
from jaxmp._attention._explicit import notes_of
from jaxmp._attention._splash import LEAST_BLOCK, padded_positions
from jaxmp._core._capability import (
    FUSED_ATTENTION,
    LARGE_ATTENTION_HEADS,
    capability_text,
    unsupported_gpu,
)
from jaxmp._core._compat import (
    compute_capability,
    cudnn_version,
    load_splash_attention,
    target,
    varying_axes,
)
from jaxmp._core._dtypes import is_16bit
from jaxmp._core._explanation import ExplanationRow, Section
from jaxmp._core._messages import install_command
from jaxmp.errors import AttentionError

_log = logging.getLogger("jaxmp.attention")
_logged: set[tuple[str, str]] = set()

# Reason if the caller named the implementation.
ASKED = "it was asked for"
# Largest size in bytes of the FP32 logits of all pairs for which "auto" chooses "xla": 16 MiB.
# Training stores several arrays of that size for each layer. From about this size on, "blockwise"
# is as fast on a CPU.
_WHOLE_LOGITS = 2**24
# Largest head sizes of cuDNN's fused kernel (jax/_src/cudnn/fused_attention_stablehlo.py), and of
# splash attention with the blocks of `_splash`, compiled for a TPU v5e.
_LARGEST_HEAD, _LARGEST_HEAD_HOPPER, _LARGEST_HEAD_TPU = 128, 256, 256


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
class AttentionExplanation(Section[Blocker]):
    """Implementation of an attention call, with the reason.

    Attributes:
      rows: reasons why the fused kernel cannot serve the call; empty if it can.
      notes: adaptations of the call to the kernel, and their cost.
      implementation: "cudnn", "splash", "blockwise" or "xla".
      reason: why it was chosen.
      kernel: the fused kernel to which `rows` refer: "splash" on TPUs, otherwise "cudnn".
    """

    columns: ClassVar = ("blocks the kernel", "reason", "change")

    implementation: str
    reason: str
    kernel: str = "cudnn"

    @property
    def summary(self) -> str:
        """The implementation and the reason."""
        return f"{self.implementation}: {self.reason}"


class _Kernel(NamedTuple):
    """A fused kernel."""

    title: str
    blockers: Callable[[Arguments], Iterable[Blocker]]
    notes: Callable[[Arguments], Iterable[str]]


def choose(args: Arguments, implementation: str) -> AttentionExplanation:
    """Chooses the implementation for a call.

    Args:
      args: the checked arguments.
      implementation: a name, or "auto". "auto" chooses the fused kernel of the compile target if it
        can serve the call: "splash" on TPUs, otherwise "cudnn"; otherwise "xla" if the FP32 logits
        of all pairs take at most 16 MiB; otherwise "blockwise". An empty result is computed by
        "xla", whatever the name.

    Raises:
      AttentionError: if the named implementation cannot serve the call.
    """
    name = implementation
    if name not in FUSED:
        name = "splash" if target() == "tpu" else "cudnn"
    kernel, moved = FUSED[name], tuple(notes_of(args))
    blockers = tuple(kernel.blockers(args)) if math.prod(args.logits_shape) else ()
    chosen, reason = _choice(args, implementation, name, blockers)
    notes = (*kernel.notes(args), *moved) if chosen == name else moved
    return AttentionExplanation(
        rows=blockers, notes=notes, implementation=chosen, reason=reason, kernel=name
    )


def _choice(
    args: Arguments, implementation: str, name: str, blockers: tuple[Blocker, ...]
) -> tuple[str, str]:
    """Returns the implementation and the reason; `name` is that of the fused kernel."""
    size, kernel = 4 * math.prod(args.logits_shape), FUSED[name]
    if not size:
        return "xla", "the result is empty"
    if implementation in ("blockwise", "xla"):
        return implementation, ASKED
    if implementation == name and blockers:
        raise _refusal(kernel, implementation, blockers)
    if not blockers:
        return name, ASKED if implementation == name else f"{kernel.title} fits"
    if size > _WHOLE_LOGITS:
        return "blockwise", f"the logits of all pairs would take {_mebibytes(size)}"
    return "xla", f"the logits of all pairs take only {_mebibytes(size)}"


def _refusal(kernel: _Kernel, implementation: str, blockers: Iterable[Blocker]) -> AttentionError:
    reasons = "\n".join(f"  {b.argument}: {b.reason}. {b.change}" for b in blockers)
    return AttentionError(
        f"implementation={implementation!r} does not support this call:\n{reasons}\n"
        f"implementation='auto' chooses another one if {kernel.title} does not support the call."
    )


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB in FP32"


def log_once(choice: AttentionExplanation) -> None:
    """Logs a choice to the logger `jaxmp.attention`, once per implementation and first blocker.

    The level is a warning if a program for a GPU or TPU uses no fused kernel, otherwise info.
    """
    blocker = choice.rows[0].argument if choice.rows else ""
    if (choice.implementation, blocker) in _logged:
        return
    _logged.add((choice.implementation, blocker))
    unfused = choice.implementation not in FUSED and target() != "cpu"
    _log.log(logging.WARNING if unfused else logging.INFO, "attention runs as %s", choice)


# ---------------------------------------------------------------------------
# cuDNN
# ---------------------------------------------------------------------------


def cudnn_blockers(args: Arguments) -> Iterator[Blocker]:
    """Yields why `jax.nn.dot_product_attention(implementation="cudnn")` cannot serve a call."""
    yield from _device_blockers()
    yield from _operand_blockers(args)
    yield from _mask_blockers(args)


def _device_blockers() -> Iterator[Blocker]:
    device = target()
    if device != "gpu":
        reason = f"the program is compiled for {device}"
        yield Blocker("device", reason, "Compile the program for a GPU.")
    elif cudnn_version() is None:
        commands = " or ".join(map(install_command, ("cuda12", "cuda13")))
        change = f"Install it: {commands}."
        yield Blocker("device", "JAX finds no cuDNN", change)
    elif gpu := unsupported_gpu(FUSED_ATTENTION):
        first = capability_text(FUSED_ATTENTION)
        reason = f"the kernel requires compute capability {first} or more, this is {gpu}"
        yield Blocker("device", reason, "Use implementation='auto'.")


def _operand_blockers(args: Arguments) -> Iterator[Blocker]:
    dtype = args.query.dtype
    if not is_16bit(dtype):
        reason = f"the kernel takes 16 bits, the operands are {dtype.name}"
        yield Blocker("policy", reason, "Write policy='bfloat16'.")
    # JAX reads the capability of the local GPU, even if it compiles for another one.
    capability = compute_capability()
    is_hopper = capability is not None and capability >= LARGE_ATTENTION_HEADS
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


def _mask_blockers(args: Arguments) -> Iterator[Blocker]:
    bias, dtype = args.bias, args.query.dtype
    if bias is not None and is_16bit(dtype) and bias.dtype != dtype:
        reason = f"the kernel reads the bias as {dtype.name}, and it is {bias.dtype.name}"
        change = "Write bias=bias.astype(query.dtype) if its precision suffices."
        yield Blocker("bias", reason, change)
    for name, array in (("bias", bias), ("mask", args.mask)):
        if array is not None and args.logits_shape[2] == 1:
            reason = f"the kernel's backward pass with a {name} needs even lengths, and padding a "
            reason += "single query would double its work"
            declared = "Declare it by is_causal, local_window_size or lengths, or use two queries."
            yield Blocker(name, reason, declared if name == "mask" else "Use two queries.")


def _cudnn_notes(args: Arguments) -> Iterator[str]:
    if args.scale is not None:
        yield _TRACED_SCALE
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


def _unsplit_heads(args: Arguments) -> Iterator[str]:
    """Describes automatic mesh axes over which XLA must not split the heads of the query.

    XLA chooses the sharding after the implementation has been traced; see `_sharding`.
    """
    if not isinstance(args.query, jax.Array):
        return
    mesh = jax.typeof(args.query).sharding.mesh
    heads, groups = args.query.shape[2], args.key.shape[2]
    sizes = zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
    axes = {
        name: size
        for name, size, kind in sizes
        if kind == AxisType.Auto and heads % size == 0 and groups % size
    }
    if axes:
        yield (
            f"if XLA splits the {heads} heads over {axes}, compilation raises an error, because "
            f"the {groups} heads of key and value cannot be split alike: repeat them, key = "
            f"jnp.repeat(key, {heads // groups}, axis=-2)"
        )


_TRACED_SCALE = "a scale that is an array multiplies the query, in the query's dtype"


# ---------------------------------------------------------------------------
# Splash attention
# ---------------------------------------------------------------------------


def splash_blockers(args: Arguments) -> Iterator[Blocker]:
    """Yields why JAX's splash attention cannot serve a call."""
    device = target()
    if device != "tpu":
        reason = f"the program is compiled for {device}"
        yield Blocker("device", reason, "Compile the program for a TPU.")
    elif load_splash_attention() is None:
        reason = f"JAX {jax.__version__} has no splash attention that jaxmp knows"
        yield Blocker("device", reason, "Use implementation='auto'.")
    else:
        yield from _mesh_blockers(args)
        yield from _splash_operand_blockers(args)
        yield from _splash_mask_blockers(args)


def _mesh_blockers(args: Arguments) -> Iterator[Blocker]:
    if not isinstance(args.query, jax.Array):
        return
    mesh = jax.typeof(args.query).sharding.mesh
    sizes = zip(mesh.axis_types, mesh.shape.values(), strict=True)
    kinds = {kind for kind, size in sizes if size > 1}
    if varying_axes(args.query):
        reason = "the kernel does not declare the mesh axes over which its results vary"
        yield Blocker("device", reason, "Write jax.shard_map(..., check_vma=False).")
    elif AxisType.Auto in kinds:
        reason = f"XLA cannot partition the kernel over the automatic axes of the mesh {mesh.shape}"
        change = "Make the axes explicit (AxisType.Explicit), or map all of them in jax.shard_map."
        yield Blocker("device", reason, change)
    elif len(kinds) > 1:
        reason = "jax.shard_map maps only some axes of the mesh"
        yield Blocker("device", reason, "Map all axes of the mesh.")


def _splash_operand_blockers(args: Arguments) -> Iterator[Blocker]:
    if args.query.dtype.name != "bfloat16":
        reason = f"the kernel multiplies in bfloat16, the operands are {args.query.dtype.name}"
        yield Blocker("policy", reason, "Write policy='bfloat16'.")
    _, _, queries, keys = args.logits_shape
    for name, positions in (("query", queries), ("key", keys)):
        if positions < LEAST_BLOCK:
            reason = f"the kernel computes blocks of {LEAST_BLOCK} positions, not {positions}"
            yield Blocker(name, reason, "Use implementation='auto' for short sequences.")
    for name, array in (("query", args.query), ("value", args.value)):
        if array.shape[-1] > _LARGEST_HEAD_TPU:
            reason = f"heads of {array.shape[-1]} are larger than {_LARGEST_HEAD_TPU}"
            yield Blocker(name, reason, f"Use more heads, of at most {_LARGEST_HEAD_TPU}.")
    if args.dropout_rng is not None:
        yield Blocker("dropout_rate", "the kernel has no dropout", "Write dropout_rate=0.0.")
    if args.settings.residual:
        reason = "the kernel has no gradient if it returns the log-sum-exp"
        yield Blocker("return_residual", reason, "Write return_residual=False.")


def _splash_mask_blockers(args: Arguments) -> Iterator[Blocker]:
    if args.bias is not None:
        yield Blocker("bias", "the kernel has no bias", "Remove the bias.")
    if args.mask is not None:
        change = "Declare it by is_causal, local_window_size or lengths."
        yield Blocker("mask", "the kernel reads no mask array", change)
    _, _, queries, keys = args.logits_shape
    window = args.settings.window
    if window is not None and queries > keys + window[0]:
        reason = f"queries from {keys + window[0]} on see no key, and the kernel divides by zero"
        yield Blocker("local_window_size", reason, f"Use at most {keys + window[0]} queries.")


def _splash_notes(args: Arguments) -> Iterator[str]:
    if args.scale is not None:
        yield _TRACED_SCALE
    scale = abs(args.settings.scale)
    if scale and math.frexp(scale)[0] != 0.5:
        yield f"the query is multiplied by the scale {scale:.4g} and rounded"
    for positions in dict.fromkeys(args.logits_shape[2:]):
        if padded_positions(positions) != positions:
            yield f"{positions} positions are padded to {padded_positions(positions)}"


FUSED: dict[str, _Kernel] = {
    "cudnn": _Kernel("cuDNN's fused kernel", cudnn_blockers, _cudnn_notes),
    "splash": _Kernel("JAX's splash attention", splash_blockers, _splash_notes),
}
