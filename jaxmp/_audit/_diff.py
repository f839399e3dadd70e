"""Differences between two audits."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

from jaxmp._audit._render import plain_text
from jaxmp._audit._rows import Finding
from jaxmp._audit._sections import difference_sections

if TYPE_CHECKING:
    from jaxmp._audit._report import AuditReport
    from jaxmp._audit._rich import Renderable


@dataclasses.dataclass(frozen=True, kw_only=True)
class AuditDiff:
    """Differences between two audits, such as those before and after a change; prints as a table.

    Args:
      before: the earlier report.
      after: the later report.

    Example:
      >>> x = jnp.ones((8, 8), jnp.bfloat16)
      >>> change = audit(lambda x: x @ x, x).diff(audit(lambda x: jax.nn.softmax(x @ x), x))
      >>> [finding.check for finding in change.added], change.removed
      (['softmax_16bit'], ())
    """

    before: AuditReport
    after: AuditReport

    @property
    def added(self) -> tuple[Finding, ...]:
        """Findings that only the later report has; lines that moved do not count."""
        return _without(self.after.findings, self.before.findings)

    @property
    def removed(self) -> tuple[Finding, ...]:
        """Findings that only the earlier report has."""
        return _without(self.before.findings, self.after.findings)

    @property
    def matmul_flops(self) -> dict[tuple[str, str], int]:
        """Operand dtypes -> FLOPs that were added (negative: removed), where they changed."""
        before, after = self.before.matmul_flops, self.after.matmul_flops
        pairs = dict.fromkeys([*after, *before])
        changes = {pair: after.get(pair, 0) - before.get(pair, 0) for pair in pairs}
        return {pair: change for pair, change in changes.items() if change}

    @property
    def cast_bytes(self) -> int:
        """Bytes of casts that were added (negative: removed)."""
        return self.after.cast_bytes - self.before.cast_bytes

    def __str__(self) -> str:
        return plain_text(difference_sections(self))

    def __rich__(self) -> Renderable:
        rich = importlib.import_module("jaxmp._audit._rich")
        return rich.Renderable(difference_sections(self))


def _without(findings: Iterable[Finding], others: Iterable[Finding]) -> tuple[Finding, ...]:
    known = {_identity(finding) for finding in others}
    return tuple(finding for finding in findings if _identity(finding) not in known)


def _identity(finding: Finding) -> tuple[str, ...]:
    return finding.check, finding.severity, finding.module, finding.primitive, finding.file
