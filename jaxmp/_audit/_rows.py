"""Findings and counts of an audit, as plain data."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

ERROR, WARNING = "error", "warning"

Row = TypeVar("Row", bound=Any)


def merged(rows: Iterable[Row], *sums: str) -> tuple[Row, ...]:
    """Returns one row for those that are equal except for some counts, the largest first.

    Args:
      rows: frozen dataclasses.
      *sums: the fields that are added up; the rows are sorted by the first of them.
    """
    groups: dict[Row, list[Row]] = {}
    for row in rows:
        key = dataclasses.replace(row, **dict.fromkeys(sums, 0))
        groups.setdefault(key, []).append(row)
    totals = (
        dataclasses.replace(key, **{n: sum(getattr(row, n) for row in group) for n in sums})
        for key, group in groups.items()
    )
    return tuple(sorted(totals, key=lambda row: -getattr(row, sums[0])))


class Located:
    """Row about one source line."""

    file: str
    line: int

    @property
    def location(self) -> str:
        """File name and line of the source, joined by a colon; "" if they are not known."""
        return f"{Path(self.file).name}:{self.line}" if self.file else ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding(Located):
    """Result of one check of an audit, at one source line of the audited program.

    `AuditReport.findings` contains them; `docs/audit.md` explains every check.

    Args:
      check: id of the check, such as "fp32_matmul".
      severity: "error" for a defect that should be fixed, "warning" for a fact worth knowing.
      module: the module path; "" for the root and for code outside of modules.
      primitive: the operation, as a jaxpr prints it; "" for a finding about an argument or a rule.
      file: path of the user's source file; "" if it is not known.
      line: line number in `file`; 0 if it is not known.
      text: text of this line, without indentation; a baseline compares it instead of the number.
      message: the defect and its consequence.
      fix: the remedy: a sentence and its code in lines that are indented by four spaces, or one
        statement of code.
      count: number of operations of the traced program that the finding covers, or of launches of
        the compiled program.
      flops: FLOPs of the matmuls among them in one step, including iterations of loops.

    Example:
      >>> x = jnp.ones((8, 8), jnp.bfloat16)
      >>> (finding,) = audit(lambda x: jax.nn.softmax(x), x).errors
      >>> finding.check, finding.severity
      ('softmax_16bit', 'error')
    """

    check: str
    severity: str = ERROR
    module: str = ""
    primitive: str = ""
    file: str = ""
    line: int = 0
    text: str = ""
    message: str = ""
    fix: str = ""
    count: int = 1
    flops: int = 0

    @property
    def identity(self) -> tuple[str, ...]:
        """The values by which the same finding is known in another version of the program."""
        return self.check, self.module, self.text or self.message

    def __str__(self) -> str:
        where = " at ".join(part for part in (self.module or "(root)", self.location) if part)
        times = f" ({self.count} times)" if self.count > 1 and self.primitive else ""
        return f"{self.check} in {where}{times}: {self.message} Fix: {self.fix}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatmulRow:
    """The matmuls and convolutions of one module, pass and pair of operand dtypes."""

    module: str
    phase: str  # "forward", "backward" or "recompute"
    lhs: str
    rhs: str
    flops: int
    count: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class CastRow:
    """The casts of one module, pass and pair of dtypes."""

    module: str
    phase: str
    source: str
    target: str
    bytes: int  # read and written, if each cast were a kernel of its own
    count: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class RuleRow:
    """One rule and the modules for which it decides."""

    rule: str
    why: str
    modules: tuple[str, ...]
    required: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModuleRow:
    """One module of the program, its policy, and the rule that decides."""

    module: str
    policy: str
    rule: str  # "" if the default policy applies
