"""Report on the first value of a step that is not finite."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

from jaxmp._tools.fixes import _trial
from jaxmp._tools.nonfinite._measure import ArgumentRow, ArrayRow
from jaxmp._tools.report._section import Fix, Located, Section, fix_parts, share_text
from jaxmp._tools.report._views import Report
from jaxmp.errors import JaxmpError


@dataclasses.dataclass(frozen=True, kw_only=True)
class NonfiniteReport(Report, Located):
    """Origin of values of a training step that are not finite. Frozen; contains plain data.

    Args:
      reproduced: True if the step has results that are not finite for these arguments, or if
        all its gradients are zero and a value in the loss is not finite.
      reason: why the step was not reproduced; "" if it was.
      cause: id of the cause, such as "division_by_zero"; `docs/debugging.md` lists them. "" if no
        measurement shows a cause.
      message: the measurement that shows the cause, in one or two sentences.
      fix: the remedy: a sentence, and its code in lines that are indented by four spaces.
      expression: the expression of the source line that this code replaces; "" for other code.
      trial: "works" if the step was run with this code and is finite there, "not tried" if that was
        not possible; "" without code.
      module: the module path; "" for the root and for code outside of modules.
      primitive: the operation, as a jaxpr prints it; "" for an argument.
      phase: "forward", "backward" or "recompute" (a forward operation that the backward pass runs
        again); "" for an argument.
      file: path of the user's source file; "" if it is not known.
      line: line number in `file`; 0 if it is not known.
      text: text of this line, without indentation.
      iteration: iteration of each enclosing loop, outermost first; () outside of loops.
      device: number of the device in the mesh of a `shard_map`; None outside of one.
      index: index of the first element that is not finite, of the result or the argument.
      argument: the argument that was not finite before the step, as code; "" if an operation
        made the values.
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

    _subject = "diagnosis"
    _title = "First value that is not finite"
    _command = "jaxmp locate run.py:make_step --json diagnosis.json"
    _error = JaxmpError
    _schema: ClassVar = {"schema": "jaxmp.nonfinite", "schema_version": 1}
    _summary = ()

    reproduced: bool
    reason: str = ""
    cause: str = ""
    message: str = ""
    fix: str = ""
    expression: str = ""
    trial: str = ""
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
    loss_scale: float | None = None
    operands: tuple[ArrayRow, ...] = ()
    results: tuple[ArrayRow, ...] = ()
    in_fp32: tuple[ArrayRow, ...] = ()
    arguments: tuple[ArgumentRow, ...] = ()

    def _sections(self, full: bool) -> list[Section]:
        others = tuple((row.name, row.role, str(list(row.index))) for row in self.arguments)
        columns = "argument that is not finite", "role", "first index"
        if not self.reproduced:
            return [Section("Not reproduced", self.reason, columns, others)]
        title = "Fix" + f" ({_trial.NOT_TRIED})" * (self.trial == _trial.NOT_TRIED)
        fixes = (Fix(title, fix_parts(self.fix)),) if self.fix else ()
        cause = self.cause.replace("_", " ") or "cause not known"
        sections = [
            Section(f"Not finite: {self.argument or self._where()}", self.text, mood="bad"),
            Section(cause.capitalize(), self.message, fixes=fixes),
        ]
        if self.operands:
            sections.insert(1, Section("Operands", "", _COLUMNS, self._array_rows()))
        if full and others:
            sections.append(Section("Arguments", "", columns, others))
        return sections

    def _where(self) -> str:
        made = f"{self.primitive} in the {self.phase} pass"
        parts = [
            made if self.primitive else "not a recorded operation",
            f"module {self.module}" if self.module else "",
            self.location,
            *(f"iteration {n}" for n in self.iteration),
            "" if self.device is None else f"device {self.device}",
            f"index {list(self.index)}" if self.index else "",
            "" if self.loss_scale is None else f"loss scale {self.loss_scale:.9g}",
        ]
        return ", ".join(filter(None, parts))

    def _array_rows(self) -> tuple[tuple[str, ...], ...]:
        named = [(str(n), row) for n, row in enumerate(self.operands)]
        named += [("result", row) for row in self.results]
        named += [("in FP32", row) for row in self.in_fp32]
        return tuple((name, *_cells(row)) for name, row in named)


_COLUMNS = ("", "type", "finite range", "zero", "subnormal", "large", "nan/inf")


def _cells(row: ArrayRow) -> tuple[str, ...]:
    kind = f"{row.dtype}[{','.join(map(str, row.shape))}]"
    limits = "" if math.isnan(row.low) else f"{row.low:.4g} to {row.high:.4g}"
    shares = row.zero, row.subnormal, row.near_largest, row.nonfinite
    return kind, limits, *map(share_text, shares)
