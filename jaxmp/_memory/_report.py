"""The estimate of a step's memory, as plain data and as text."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, NamedTuple

from jaxmp._report._section import Section, bytes_text, share_text
from jaxmp._report._views import Report
from jaxmp.errors import AuditError

STATE = ("parameters", "masters", "moments", "FP8 state", "inputs")
TEMPORARY = ("working copies", "gradients", "activations", "logits")
KINDS = (*STATE, *TEMPORARY, "results")
# The share of a GPU's memory that JAX allocates when it starts.
PREALLOCATED = 0.75
_MEANING = {
    "parameters": "as the step receives them",
    "masters": "FP32 parameters, or their low bits, in the optimizer's state",
    "moments": "the rest of the optimizer's state",
    "FP8 state": "scales and their histories",
    "inputs": "the batch, and other arguments",
    "working copies": "of parameters, in the dtype of the computation",
    "gradients": "of parameters",
    "activations": "and other temporary arrays",
    "logits": "the result of the last matmul of the forward pass, and its gradient",
    "results": "that do not replace donated arguments",
}


class CompiledMemory(NamedTuple):
    """Bytes on each device that XLA reports for the compiled program.

    Args:
      arguments: bytes of the arguments.
      results: bytes of the results that do not replace donated arguments.
      temporary: all other memory.
      kinds: kind -> bytes of the arguments of the compiled program.
    """

    arguments: int
    results: int
    temporary: int
    kinds: dict[str, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryEstimate(Report):
    """Memory of a training step on each device. Frozen; contains plain data.

    Args:
      function: name of the step.
      target: name of the chip; "" without one.
      memory: bytes of the chip's memory; 0 without a target.
      preallocates: True if JAX allocates 75% of the memory when it starts, as it does on GPUs.
      kinds: kind -> bytes at the moment of the largest use: parameters, masters, moments, FP8 state
        and inputs are arguments; working copies, gradients, activations and logits are temporary;
        results are those that do not replace donated arguments.
      compiled: the figures of XLA; None without `exact=True`.

    Example:
      >>> step = lambda w, x: jax.grad(lambda w: jnp.sum(x @ w))(w)
      >>> estimate = jaxmp.estimate_memory(step, jnp.ones((8, 8)), jnp.ones((2, 8)), target="h200")
      >>> estimate.arguments, estimate.fits
      (320, True)
    """

    _subject = "memory estimate"
    _title = "Memory"
    _command = "jaxmp memory my_package.train:make_step --json memory.json"
    _error = AuditError
    _schema: ClassVar = {"schema_version": 1}
    _summary = ("total", "usable", "fits")

    function: str = ""
    target: str = ""
    memory: int = 0
    preallocates: bool = False
    kinds: dict[str, int] = dataclasses.field(default_factory=dict)
    compiled: CompiledMemory | None = None

    @property
    def arguments(self) -> int:
        """Bytes of the arguments, which are exact."""
        return sum(self.kinds.get(kind, 0) for kind in STATE)

    @property
    def temporary(self) -> int:
        """Estimated bytes of temporary arrays."""
        return sum(self.kinds.get(kind, 0) for kind in TEMPORARY)

    @property
    def total(self) -> int:
        """Bytes that the step requires: those of the compiled program if they are known."""
        return sum(self.kinds.values()) if self.compiled is None else sum(self.compiled[:3])

    @property
    def usable(self) -> int:
        """Bytes that JAX uses by default; 0 without a target."""
        return int(self.memory * (PREALLOCATED if self.preallocates else 1))

    @property
    def fits(self) -> bool | None:
        """True if the step fits into the usable memory; None without a target."""
        return self.total <= self.usable if self.target else None

    def __repr__(self) -> str:
        return f"<MemoryEstimate of {bytes_text(self.total)}>"

    def _sections(self, full: bool) -> list[Section]:
        del full
        return [self._verdict(), self._table()]

    def _verdict(self) -> Section:
        by = "estimated" if self.compiled is None else "compiled"
        title = f"Memory of {self.function or 'the step'}: {bytes_text(self.total)} ({by})"
        if not self.target:
            return Section(title, "On each device, at the moment of the largest use.")
        room = self.usable - self.total
        text = f"It fits in {self.target}, and leaves {bytes_text(room)}" if self.fits else ""
        text = text or f"It does not fit in {self.target}: it lacks {bytes_text(-room)}"
        text += f" of the usable {bytes_text(self.usable)}."
        if self.preallocates:
            text += f" JAX uses {PREALLOCATED:.0%} of {bytes_text(self.memory)} by default;"
            text += " XLA_PYTHON_CLIENT_MEM_FRACTION changes the share."
        return Section(title, text, mood="good" if self.fits else "bad")

    def _table(self) -> Section:
        whole, columns = sum(self.kinds.values()), ("kind", "bytes", "share")
        rows = [
            (kind, bytes_text(size), share_text(size, whole)) for kind, size in self.kinds.items()
        ]
        if self.compiled is None:
            cells = tuple((*row, _MEANING[row[0]]) for row in rows)
            return Section("By kind", "", (*columns, "content"), cells)
        known = self.compiled.kinds | {"results": self.compiled.results}
        cells = tuple((*row, bytes_text(known[row[0]]) if row[0] in known else "") for row in rows)
        text = f"XLA reports {bytes_text(self.compiled.temporary)} of temporary arrays; estimated: "
        return Section("By kind", text + bytes_text(self.temporary), (*columns, "XLA"), cells)
