"""The report of an audit, its comparison with a baseline, and its tables."""

from __future__ import annotations

import dataclasses
import os
import re
from collections import Counter
from collections.abc import Iterable
from typing import ClassVar

import jax

from jaxmp import __version__, _core
from jaxmp._tools.audit import _rows
from jaxmp._tools.audit._checks import CHECKS, ERROR, NOTE, WARNING
from jaxmp._tools.audit._rows import Finding
from jaxmp._tools.fixes import _source
from jaxmp._tools.report import _section, _views
from jaxmp.errors import AuditError, AuditFailedError

# Findings that an error message lists.
_MAX_LISTED = 20
# Operand dtypes of more than 16 bits.
_WIDE = frozenset({"float32", "float64", "complex64", "complex128"})

# ---------------------------------------------------------------------------
# The report
# ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class AuditReport(_views.Report):
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
      findings: errors first, then warnings, by check and by FLOPs; then notes, by bytes.
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
    # The version is increased if a field changes; `docs/findings.md` describes them.
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
    matmuls: tuple[_rows.MatmulRow, ...] = ()
    gemms: tuple[_rows.GemmRow, ...] = ()
    memory: _rows.MemoryRow | None = None
    attention: tuple[_rows.AttentionRow, ...] = ()
    collectives: tuple[_rows.CollectiveRow, ...] = ()
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
        speed: bool = False,
    ) -> None:
        """Raises an exception if the program has errors; for the tests of a project.

        Args:
          fail_on: checks that may not find anything, warnings included; None: no errors at all.
          speed: True to fail on notes of speed, too.
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
        failed = [f for f in self.findings if _fails(f, checks, speed)]
        if baseline is not None:
            before = _views.read_report(AuditReport, baseline)
            self._check_target(before)
            failed = _without(failed, (f for f in before.findings if _fails(f, checks, speed)))
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

    def _sections(self, full: bool) -> list[_section.Section]:
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
            f"fail_on={check!r} is not a check.{_core.did_you_mean(check, CHECKS)} Allowed: "
            f"{', '.join(CHECKS)}; for example report.check(fail_on=['fp32_matmul'])."
        )
    return checks


def _fails(finding: Finding, checks: frozenset[str] | None, speed: bool) -> bool:
    is_failure = finding.severity == ERROR if checks is None else finding.check in checks
    return is_failure or (speed and finding.severity == NOTE)


def _without(findings: Iterable[Finding], others: Iterable[Finding]) -> tuple[Finding, ...]:
    """Returns the findings without equal ones among the others, each of which stands for one."""
    key_of = lambda finding: (finding.identity, finding.severity)
    known, rest = Counter(map(key_of, others)), list[Finding]()
    for finding in findings:
        known[key_of(finding)] -= 1
        rest += [finding] if known[key_of(finding)] < 0 else []
    return tuple(rest)


# ---------------------------------------------------------------------------
# Tables
# ---------------------------------------------------------------------------

# Rows of the table of errors in the short report.
_MAX_ERRORS = 20


def _by_row(findings: Iterable[Finding]) -> list[list[Finding]]:
    """Groups the findings that share one row: their modules differ in numbers only."""
    key_of = lambda f: (f.check, _section.numberless(f.module), f.file, f.line, f.fix)
    return list(_section.grouped(findings, key_of).values())


def _by_fix(findings: Iterable[Finding]) -> list[list[Finding]]:
    return list(_section.grouped(findings, lambda f: (f.check, f.fix)).values())


def _finding_sections(
    title: str, groups: list[list[Finding]], fixes: str, most: int | None = None
) -> list[_section.Section]:
    """Returns a numbered table of findings, and the fix of each.

    Args:
      title: of the table.
      groups: findings, one group for each row.
      fixes: title of the fixes.
      most: the number of rows; None: all.
    """
    more, groups = len(groups) - len(groups[:most]), groups[:most]
    text = f"The first {len(groups)}; the full report has {more} more." if more else ""
    rows = tuple((str(n), *_row(group)) for n, group in enumerate(groups, start=1))
    # Notes of other code may have the same sentence.
    sentences = lambda fix: "\n".join(x for x in fix.splitlines() if not x.startswith("    "))
    key_of = lambda finding: (sentences if finding.severity == NOTE else str)(finding.fix)
    by_fix = _section.grouped(range(len(groups)), lambda number: key_of(groups[number][0]))
    remedies = tuple(
        _section.Fix(_fix_title(numbers, groups[numbers[0]][0]), _section.fix_parts(fix))
        for numbers in by_fix.values()
        if (fix := _shared_fix([groups[number][0] for number in numbers]))
    )
    table = _section.Section(title, text, ("#", "check", "location", "finding"), rows)
    return [table, _section.Section(fixes, fixes=remedies)]


def _row(group: list[Finding]) -> tuple[str, ...]:
    first, count = group[0], sum(finding.count for finding in group)
    modules = _section.abbreviate(sorted({finding.module for finding in group}))
    # The message of a finding about an argument contains its count.
    times = f" ({_section.counted(count, 'operation')})" if count > 1 and first.primitive else ""
    lines = len({(finding.file, finding.line) for finding in group})
    more = f" and {_section.counted(lines - 1, 'more line')}" if lines > 1 else ""
    line = first.location + more
    location = f"{modules}, {line}" if line else modules
    return first.check, location, first.message + times


def _shared_fix(findings: list[Finding]) -> str:
    """Returns the fix of several findings, with the line of each code if that differs."""
    places = {finding.fix: finding.location for finding in findings}
    if len(places) == 1:
        return findings[0].fix
    codes = (re.sub("(?m)(?<=^    )(.*)", rf"\1  # {place}", fix) for fix, place in places.items())
    return _source.without_repetition(codes)


def _fix_title(numbers: list[int], finding: Finding) -> str:
    """Returns `1 (model.py:12)`, or `1, 3` for the remedy of several rows."""
    title = ", ".join(str(number + 1) for number in numbers)
    parts = [finding.location if len(numbers) == 1 else "", finding.trial.replace("works", "")]
    more = ", ".join(filter(None, parts))
    return f"{title} ({more})" if more else title


def report_sections(report: AuditReport, full: bool = False) -> list[_section.Section]:
    """Returns the sections of a report; empty ones are omitted.

    Args:
      report: the report.
      full: False for verdict, errors with their fixes, matmuls and memory; True for everything.
    """
    groups, kernels = _by_row(report.errors), (*report.gemms, *report.attention)
    speed = _by_fix(finding for finding in report.findings if finding.severity == NOTE)
    sections = [
        _verdict(report, len(groups)),
        *_finding_sections("Errors", groups, "Fixes", None if full else _MAX_ERRORS),
        _matmuls(report),
        _rows.compiled_matmuls(kernels),
        _rows.memory(report.memory),
        *_finding_sections("Speed", speed, "Faster"),
    ]
    if full:
        sections += [
            *_finding_sections("Warnings", _by_fix(report.warnings), "Suggestions"),
            _modules(report),
            _rows.compiled_lines(kernels),
            _rows.collectives(report.collectives),
            _section.Section("Notes", "", ("note",), tuple((note,) for note in report.notes)),
        ]
    else:
        sections.append(_details(report))
    return _section.nonempty(sections)


# ---------------------------------------------------------------------------
# The traced program
# ---------------------------------------------------------------------------


def _verdict(report: AuditReport, errors: int) -> _section.Section:
    share = "The program has no floating-point matmuls."
    if report.flops:
        total = _section.flops_text(report.flops)
        share = f"No matmul ({total}) runs in 16 bits or FP8"
        if report.low_precision_share:
            share = f"{_section.share_text(report.low_precision_share)} of the matmul FLOPs"
            share += f" ({total}) run in 16 bits or FP8"
        fp8 = sum(flops for pair, flops in report.matmul_flops.items() if "float8" in pair[0])
        share += f", {_section.share_text(fp8, report.flops)} in FP8." if fp8 else "."
    unseen = [note for note in report.notes if note.endswith(_rows.NOT_INSPECTED)]
    uncounted = [] if report.flops else report.notes
    missing = unseen or [note for note in uncounted if note.endswith(_rows.NOT_COUNTED)]
    if missing:
        share = f"{share[:-1]}; {'; '.join(missing[:2])}."
    checked = f", checked against the policy {report.policies}"
    size = _section.counted(report.equations, "operation")
    size += checked if report.policies else ", checked without a recipe"
    if report.gpu:
        # The name of a GPU that is not present on this machine ends with a remark in parentheses.
        verb = "cross-compiled" if report.gpu.endswith(")") else "compiled"
        size += f", {verb} for {report.gpu}"
    verdict = _section.counted(errors, "error") if errors else "incomplete" if unseen else "ok"
    if not errors and report.flops and not (report.low_precision_share or report.policies):
        # A training whose recipe was forgotten would otherwise be approved.
        verdict = "FP32 training" if ("backward",) in report.flops_by("phase") else "FP32"
    mood = "bad" if errors else "good" if verdict == "ok" else "open"
    return _section.Section(f"Precision audit: {verdict}", f"{share} {size}.", mood=mood)


def _details(report: AuditReport) -> _section.Section:
    """Returns the number of warnings, and the command that prints everything."""
    counts = Counter(finding.check for finding in report.warnings)
    text = ", ".join(f"{check}: {count}" for check, count in counts.items())
    warnings = f"{_section.counted(counts.total(), 'warning')} ({text}), " if counts else ""
    return _section.Section(
        "Details",
        f"Use --full or report.to_text(full=True) to print {warnings}modules, kernels and notes.",
    )


def _matmuls(report: AuditReport) -> _section.Section:
    phases = [phase for phase in _section.PHASES if (phase,) in report.flops_by("phase")]
    by_phase = report.flops_by("lhs", "rhs", "phase")
    rows = tuple(
        (
            " x ".join(pair),
            *(_section.flops_text(by_phase.get((*pair, phase), 0)) for phase in phases),
            _section.flops_text(flops),
            _section.share_text(flops, report.flops),
        )
        for pair, flops in report.matmul_flops.items()
    )
    return _section.Section(
        "Matmuls by operand dtype", "", ("operands", *phases, "total", "share"), rows
    )


def _modules(report: AuditReport) -> _section.Section:
    """Returns a row for each module with matmuls; modules that differ in a number share one."""
    matmuls = _section.grouped(report.matmuls, lambda row: row.module)
    flops = report.flops_by("module")

    def key_of(module: str) -> tuple[str, str]:
        dtypes = {_section.pair_text(row.lhs, row.rhs) for row in matmuls[module]}
        return _section.numberless(module), ", ".join(sorted(dtypes))

    rows = []
    for (_, operands), modules in _section.grouped((module for (module,) in flops), key_of).items():
        total = _section.flops_text(sum(flops[module,] for module in modules))
        rows.append((_section.abbreviate(modules), total, operands))
    columns = ("module", "FLOPs", "operands")
    return _section.largest_rows("Matmuls by module", columns, rows, "matmuls")
