"""The report of an audit, and its comparison with a baseline."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Iterable
from typing import ClassVar

import jax

from jaxmp import __version__
from jaxmp._audit._checks import CHECKS, ERROR, WARNING
from jaxmp._audit._rows import (
    AttentionRow,
    CollectiveRow,
    Finding,
    GemmRow,
    MatmulRow,
    MemoryRow,
)
from jaxmp._audit._sections import report_sections
from jaxmp._core._messages import did_you_mean
from jaxmp._report._section import Section
from jaxmp._report._views import Report, read_report
from jaxmp.errors import AuditError, AuditFailedError

# Findings that an error message lists.
_MAX_LISTED = 20
# Operand dtypes of more than 16 bits.
_WIDE = frozenset({"float32", "float64", "complex64", "complex128"})

# ---------------------------------------------------------------------------
# The report
# ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class AuditReport(Report):
    """Report of an audit: findings, and FLOPs and bytes by dtype. Frozen; contains plain data.

    `print(report)` shows the verdict, the errors with their fixes, the matmuls and the memory;
    `report.to_text(full=True)` shows everything. rich and notebooks render it, too.

    Args:
      function: name of the audited function.
      target: the GPU that it was compiled for, as `audit` received it; "" if it was only traced.
      recipe: name of the recipe; "" without policies.
      jaxmp_version, jax_version: the versions that made the report.
      policies: the default policy, as a string; "" without policies.
      equations: number of operations of the program.
      gpu: the GPUs that it was compiled for; "" without `target`. Then `gemms`, `memory`,
        `attention` and `collectives` are empty.
      findings: errors first, then by check and by FLOPs.
      matmuls: FLOPs per module, pass and operand dtypes.
      gemms: the matmuls of the GPU and their dtypes.
      memory: bytes on each device, and the bytes that the optimizer update moves.
      attention: the fused attention kernels.
      collectives: the arrays that devices send to one another.
      notes: the parts of the program that were not counted, and why, and how FP8 matmuls depend on
        the rest of the batch.

    Example:
      >>> report = audit(lambda x, w: x @ w, jnp.ones((8, 8)), jnp.ones((8, 8)))
      >>> report.matmul_flops, report.ok
      ({('float32', 'float32'): 1024}, True)
    """

    _subject = "audit"
    _title = "Precision audit"
    _command = "jaxmp audit my_package.train:make_step --json audit.json"
    _error = AuditError
    # The version is increased if a field changes; `docs/audit.md` describes them.
    _schema: ClassVar = {"schema_version": 2}
    _summary = ("ok", "low_precision_share")

    function: str = ""
    target: str = ""
    recipe: str = ""
    jaxmp_version: str = __version__
    jax_version: str = jax.__version__
    policies: str = ""
    equations: int = 0
    gpu: str = ""
    findings: tuple[Finding, ...] = ()
    matmuls: tuple[MatmulRow, ...] = ()
    gemms: tuple[GemmRow, ...] = ()
    memory: MemoryRow | None = None
    attention: tuple[AttentionRow, ...] = ()
    collectives: tuple[CollectiveRow, ...] = ()
    notes: tuple[str, ...] = ()

    # -- counts -----------------------------------------------------------------------------

    @property
    def ok(self) -> bool:
        """True if there are no errors; warnings are allowed."""
        return not self.errors

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings with severity "error"."""
        return tuple(finding for finding in self.findings if finding.severity == ERROR)

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """The findings with severity "warning"."""
        return tuple(finding for finding in self.findings if finding.severity == WARNING)

    @property
    def matmul_flops(self) -> dict[tuple[str, str], int]:
        """(lhs dtype, rhs dtype) -> FLOPs of matmuls and convolutions, largest first."""
        return {(lhs, rhs): flops for (lhs, rhs), flops in self.flops_by("lhs", "rhs").items()}

    @property
    def flops(self) -> int:
        """The FLOPs of all matmuls and convolutions."""
        return sum(row.flops for row in self.matmuls)

    @property
    def low_precision_share(self) -> float:
        """The share of matmul FLOPs with both operands in 16 bits or fewer, from 0 to 1.

        Without floating-point matmuls it is 0.

        Example:
          >>> x = jnp.ones((8, 8))
          >>> report = audit(lambda x, y: (x @ x, y @ y), x, x.astype(jnp.bfloat16))
          >>> report.low_precision_share
          0.5
        """
        narrow = (row.flops for row in self.matmuls if {row.lhs, row.rhs}.isdisjoint(_WIDE))
        return sum(narrow) / max(self.flops, 1)

    def flops_by(self, *fields: str) -> dict[tuple[str, ...], int]:
        """Returns FLOPs by some fields of `MatmulRow`, largest first.

        Args:
          *fields: "module", "phase", "lhs", "rhs".

        Example:
          >>> report = audit(lambda x: x @ x, jnp.ones((8, 8)))
          >>> report.flops_by("phase")
          {('forward',): 1024}
        """
        sums: Counter[tuple[str, ...]] = Counter()
        for row in self.matmuls:
            sums[tuple(getattr(row, field) for field in fields)] += row.flops
        return dict(sums.most_common())

    def counts(self) -> dict[str, int]:
        """Returns check id -> number of operations, arguments or rules with an error; sorted."""
        sums: Counter[str] = Counter()
        for finding in self.errors:
            sums[finding.check] += finding.count
        return dict(sorted(sums.items()))

    # -- comparisons ------------------------------------------------------------------------

    def check(
        self,
        fail_on: Iterable[str] | str | None = None,
        *,
        baseline: AuditReport | str | os.PathLike[str] | None = None,
    ) -> None:
        """Raises an exception if the program has errors; for the tests of a project.

        Args:
          fail_on: checks that may not find anything, warnings included; None: no errors at all.
          baseline: an earlier report, its JSON text, or a path that ends in `.json`. Only findings
            fail that the baseline does not contain: those with another check, module or text of
            the source line. Line numbers may differ.

        Raises:
          AuditFailedError: listing each finding with module, line and fix.
          AuditError: if a check does not exist, if the baseline cannot be read, or if it was made
            for another target.

        Example:
          >>> audit(lambda x: x @ x, jnp.ones((8, 8))).check(fail_on=["mixed_operands"])
        """
        checks = known_checks(fail_on)
        failed = [f for f in self.findings if _fails(f, checks)]
        if baseline is not None:
            before = read_report(AuditReport, baseline)
            self._check_target(before)
            failed = _without(failed, (f for f in before.findings if _fails(f, checks)))
        if failed:
            more = ", which the baseline does not contain" if baseline is not None else ""
            lines = [f"  {finding}" for finding in failed[:_MAX_LISTED]]
            lines += [f"  and {len(failed) - _MAX_LISTED} more"] * (len(failed) > _MAX_LISTED)
            raise AuditFailedError("\n".join([f"The audit found errors{more}:", *lines]))

    def _check_target(self, baseline: AuditReport) -> None:
        if baseline.target != self.target:
            raise AuditError(
                f"The baseline was made with target={baseline.target or None!r} and this report "
                f"with target={self.target or None!r}, so that they have different findings. Use "
                "the same target, or write a new baseline:\n"
                "    pathlib.Path('audit.json').write_text(report.to_json())"
            )

    # -- views ------------------------------------------------------------------------------

    def __repr__(self) -> str:
        errors = ", ".join(f"{check}: {count}" for check, count in self.counts().items())
        return f"<AuditReport of {self.equations} equations; {errors or 'ok'}>"

    def _sections(self, full: bool) -> list[Section]:
        return report_sections(self, full)


def known_checks(fail_on: Iterable[str] | str | None) -> frozenset[str] | None:
    """Returns the checks as a set; None for all errors.

    Raises:
      AuditError: naming a check that does not exist.
    """
    if fail_on is None:
        return None
    checks = frozenset([fail_on] if isinstance(fail_on, str) else fail_on)
    for check in sorted(checks - set(CHECKS)):
        raise AuditError(
            f"fail_on={check!r} is not a check.{did_you_mean(check, CHECKS)} Allowed: "
            f"{', '.join(CHECKS)}; for example report.check(fail_on=['fp32_matmul'])."
        )
    return checks


def _fails(finding: Finding, checks: frozenset[str] | None) -> bool:
    return finding.severity == ERROR if checks is None else finding.check in checks


def _without(findings: Iterable[Finding], others: Iterable[Finding]) -> tuple[Finding, ...]:
    """Returns the findings without equal ones among the others, each of which stands for one."""
    known = Counter((finding.identity, finding.severity) for finding in others)
    rest = []
    for finding in findings:
        key = finding.identity, finding.severity
        if known[key]:
            known[key] -= 1
        else:
            rest.append(finding)
    return tuple(rest)
