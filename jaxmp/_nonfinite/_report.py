"""Report on the first value of a step that is not finite."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from jaxmp._nonfinite._arguments import ArgumentRow
from jaxmp._nonfinite._measure import ArrayRow

# Version of the JSON text, which is increased if a field changes; `docs/debugging.md` describes it.
SCHEMA_VERSION = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class NonfiniteReport:
    """Origin of values of a training step that are not finite; prints as a text.

    Args:
      reproduced: True if the step has results that are not finite for these arguments.
      reason: why the step was not reproduced; "" if it was.
      cause: id of the cause, such as "division_by_zero"; `docs/debugging.md` lists them. "" if no
        measurement shows a cause.
      message: the measurement that shows the cause, in one or two sentences.
      fix: the remedy: a sentence, and its code in lines that are indented by four spaces.
      expression: the expression of the source line that this code replaces; "" for other code.
      module: the module path; "" for the root and for code outside of modules.
      primitive: the operation, as a jaxpr prints it; "" for an argument.
      phase: "forward", "backward" or "recompute" (a forward operation that the backward pass runs
        again); "" for an argument.
      file: path of the user's source file; "" if it is not known.
      line: line number in `file`; 0 if it is not known.
      text: text of this line, without indentation.
      iteration: iteration of each enclosing loop, outermost first; () outside of loops.
      device: number of the device in the mesh of a `shard_map`; None outside of one.
      index: index of the first element of the operation's result that is not finite.
      argument: the argument that was not finite before the step, as code; "" if the cause is an
        operation.
      result: the first result of the step that is not finite.
      loss_scale: the loss scale with which the step was reproduced; None without one.
      operands: the operands of the operation.
      results: its results.
      in_fp32: its results, computed from the same operands in FP32; empty for kernels.
      arguments: all arguments that are not finite.

    Example:
      >>> report = locate_nonfinite(jax.grad(lambda x: jnp.sqrt(x).sum()), jnp.array([4.0, 0.0]))
      >>> report.cause, report.phase
      ('root_of_zero', 'backward')
    """

    reproduced: bool
    reason: str = ""
    cause: str = ""
    message: str = ""
    fix: str = ""
    expression: str = ""
    module: str = ""
    primitive: str = ""
    phase: str = ""
    file: str = ""
    line: int = 0
    text: str = ""
    iteration: tuple[int, ...] = ()
    device: int | None = None
    index: tuple[int, ...] = ()
    argument: str = ""
    result: str = ""
    loss_scale: float | None = None
    operands: tuple[ArrayRow, ...] = ()
    results: tuple[ArrayRow, ...] = ()
    in_fp32: tuple[ArrayRow, ...] = ()
    arguments: tuple[ArgumentRow, ...] = ()

    @property
    def location(self) -> str:
        """The source line as `model.py:12`; "" if it is not known."""
        return f"{Path(self.file).name}:{self.line}" if self.file else ""

    def to_json(self) -> str:
        """Returns the report as JSON text; numbers that are not finite become strings."""
        fields = {"schema_version": SCHEMA_VERSION, **dataclasses.asdict(self)}
        return json.dumps(_plain(fields), indent=1)

    def __str__(self) -> str:
        if not self.reproduced:
            rows = [f"  {_argument_text(row)}" for row in self.arguments]
            return "\n".join([f"Not reproduced: {self.reason}", *rows])
        lines = [self._headline(), *([f"    {self.text}"] if self.text else [])]
        if self.operands:
            lines += ["", *_table(self._rows())]
        known = self.cause.replace("_", " ") or "not known"
        lines += ["", f"Cause: {known}. {self.message}"]
        if self.fix:
            lines += ["", f"Fix: {self.fix}"]
        return "\n".join(lines)

    def _headline(self) -> str:
        """Returns the location in one line."""
        if self.argument:
            return f"Not finite before the step: {self.argument}, index {list(self.index)}."
        parts = [
            f"{self.primitive} in the {self.phase} pass",
            *([f"module {self.module}"] if self.module else []),
            *([self.location] if self.location else []),
            *[f"iteration {n}" for n in self.iteration],
            *([f"device {self.device}"] if self.device is not None else []),
            f"index {list(self.index)}",
        ]
        scale = "" if self.loss_scale is None else f" with loss scale {self.loss_scale:g}"
        return f"First value that is not finite{scale}: {', '.join(parts)}"

    def _rows(self) -> list[tuple[str, ArrayRow]]:
        rows = [(f"operand {n}", row) for n, row in enumerate(self.operands)]
        rows += [("result", row) for row in self.results]
        return rows + [("in FP32", row) for row in self.in_fp32]


def _table(rows: list[tuple[str, ArrayRow]]) -> list[str]:
    head = ("", "type", "smallest", "largest", "zero", "subnormal", "near largest", "not finite")
    cells = [head]
    for name, row in rows:
        kind = f"{row.dtype}[{','.join(map(str, row.shape))}]"
        limits = [f"{x:.4g}" if math.isfinite(x) else "-" for x in (row.low, row.high)]
        shares = (row.zero, row.subnormal, row.near_largest, row.nonfinite)
        cells.append((name, kind, *limits, *(f"{share:.1%}" for share in shares)))
    widths = [max(len(line[n]) for line in cells) for n in range(len(head))]
    texts = []
    for line in cells:
        left = [text.ljust(width) for text, width in zip(line[:2], widths[:2], strict=True)]
        right = [text.rjust(width) for text, width in zip(line[2:], widths[2:], strict=True)]
        texts.append("  " + "  ".join([*left, *right]).rstrip())
    return texts


def _argument_text(row: ArgumentRow) -> str:
    return f"{row.name} ({row.role}) is {row.value:g} at {list(row.index)}."


def _plain(value: Any) -> Any:
    """Returns JSON data in which numbers that are not finite are strings."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
