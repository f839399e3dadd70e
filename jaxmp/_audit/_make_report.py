"""From what was counted on the walk to the report."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from jaxmp._audit._auditor import Auditor
from jaxmp._audit._check_hlo import program_findings
from jaxmp._audit._checks import CHECKS, ERROR, WARNING
from jaxmp._audit._compile import Compiled
from jaxmp._audit._context import PendingFinding
from jaxmp._audit._hlo_stats import read
from jaxmp._audit._report import AuditReport, CastRow, Finding, MatmulRow, ModuleRow, RuleRow
from jaxmp._core._jaxprs import Path
from jaxmp._core._locations import FULL_PRECISION, module_of, root_of
from jaxmp._core._matmuls import MULTIPLES
from jaxmp._policies._policy import without_inputs
from jaxmp._policies._rules import Rule, rule_text

_EMULATED = (
    "real FP8 matmuls: this is a CPU, which emulates them; it rounds to FP8 and multiplies in a"
    " wider dtype"
)
# Below this share of all FLOPs are notes: a misaligned matmul, all FP32 matmuls together, and a
# promotion that does harm to such matmuls alone.
_SHARE = 0.01


def make_report(
    auditor: Auditor, others: Iterable[Finding], compiled: Compiled | None, held: list[bool]
) -> AuditReport:
    """The report.

    Args:
      auditor: after its walk.
      others: findings about arguments and results.
      compiled: the program for a GPU, if there is one.
      held: for each argument that is an array, whether an optimizer state or loss scale holds it.
    """
    root = root_of(auditor.locations.names)
    total = sum(flops for flops, _ in auditor.matmuls.values())
    notes = [*auditor.notes, *auditor.masks.check(root)]
    auditor.masks.report(root, auditor.findings)
    findings = [d for d in auditor.findings if not (d.outside and auditor.has_backward)]
    wide = sum(finding.flops for finding in findings if finding.check == "fp32_matmul")
    few = {"fp32_matmul"} if wide < _SHARE * total else set()
    findings = [*_joined(_finding(finding, root, total, few) for finding in findings), *others]
    modules, rules = _decisions(auditor, root)
    findings += [_never_fired(row) for row in rules if row.required and not row.modules]
    policies = auditor.context.policies
    gpu: dict[str, Any] = {}
    if auditor.context.target == "cpu" and any("float8" in lhs for *_, lhs, _ in auditor.matmuls):
        notes.append(_EMULATED)
    if compiled is not None:
        found = read(compiled, auditor.locations.names, root, held)
        fp8 = {
            (module_of(names, root), phase, *line): dtype
            for (names, phase, line), dtype in auditor.fp8.items()
        }
        findings += program_findings(found, auditor.context, root, list(findings), fp8)
        notes += found.notes
        gpu = found._asdict() | {"notes": tuple(notes), "gpu": _gpu_words(compiled)}
    return AuditReport(
        findings=tuple(sorted(findings, key=_gravity)),
        matmuls=_rows(MatmulRow, auditor.matmuls, root),
        casts=_rows(CastRow, auditor.casts, root),
        aligned=tuple((multiple, auditor.aligned[multiple]) for multiple in MULTIPLES),
        modules=modules,
        rules=rules,
        policies="" if policies is None else str(without_inputs(policies.default)),
        equations=auditor.equations,
        **{"notes": tuple(notes), **gpu},
    )


def _gpu_words(compiled: Compiled) -> str:
    cards = f"{compiled.devices} x {compiled.gpu}" if compiled.devices > 1 else compiled.gpu
    return cards if compiled.is_real else f"{cards} (no such GPU on this machine)"


def _finding(finding: PendingFinding, root: Path, total: int, few: set[str]) -> Finding:
    """The finding of a finding; `few` are checks whose matmuls together take a small share."""
    file, line = finding.line
    flops = finding.harmed_flops if finding.check == "implicit_promotion" else finding.flops
    is_small = 0 < flops < _SHARE * total and not finding.has_other_harm
    alone = finding.check in ("misaligned_matmul", "implicit_promotion") and is_small
    return Finding(
        check=finding.check,
        severity=WARNING if alone or finding.check in few else finding.severity,
        module=module_of(finding.names, root),
        primitive=finding.primitive,
        file=file,
        line=line,
        message=finding.message,
        fix=finding.fix,
        count=finding.count,
        flops=finding.flops,
    )


def _joined(findings: Iterable[Finding]) -> list[Finding]:
    """One finding for what differs in its scopes and not in its module."""
    found: dict[Any, Finding] = {}
    for finding in findings:
        key = finding.check, finding.severity, finding.module, finding.file, finding.line
        same = found.get(key)
        found[key] = finding if same is None else _added(same, finding)
    return list(found.values())


def _added(first: Finding, second: Finding) -> Finding:
    count, flops = first.count + second.count, first.flops + second.flops
    return dataclasses.replace(first, count=count, flops=flops)


def _gravity(finding: Finding) -> Any:
    checks = list(CHECKS)
    return finding.severity != ERROR, checks.index(finding.check), -finding.flops


def _rows(cls: Any, counted: dict[Any, list[int]], root: Path) -> tuple[Any, ...]:
    """Rows of one class, added up over scopes of the same module, the largest first."""
    sums: dict[Any, list[int]] = {}
    for (names, *rest), (size, count) in counted.items():
        row = sums.setdefault((module_of(names, root), *rest), [0, 0])
        row[0] += size
        row[1] += count
    fields = [field.name for field in dataclasses.fields(cls)]
    rows = (cls(**dict(zip(fields, (*key, *row), strict=True))) for key, row in sums.items())
    return tuple(sorted(rows, key=lambda row: -getattr(row, fields[4])))


# ---------------------------------------------------------------------------
# Rules
# ---------------------------------------------------------------------------


def _decisions(auditor: Auditor, root: Path) -> tuple[tuple[ModuleRow, ...], tuple[RuleRow, ...]]:
    """Which rule decided for each module that the program names, and what each rule decided."""
    policies = auditor.context.policies
    if policies is None:
        return (), ()
    modules: dict[str, ModuleRow] = {}
    decided: dict[Rule, dict[str, None]] = {rule: {} for rule in policies.rules}
    for names in auditor.locations.names:
        if FULL_PRECISION in names:
            continue
        resolved = auditor.context.resolve(names)
        rule = resolved.rule
        module = module_of(names, root)
        if rule is not None:
            decided[rule][module] = None
        words = "" if rule is None else rule_text(rule, with_reason=False)
        modules[module] = ModuleRow(module=module, policy=str(resolved.policy), rule=words)
    rules = tuple(
        RuleRow(
            rule=rule_text(rule, with_reason=False),
            why=rule.why,
            modules=tuple(found),
            required=rule.required and rule.module_type is None and not rule.addresses_parameter,
        )
        for rule, found in decided.items()
    )
    return tuple(modules.values()), rules


def _never_fired(row: RuleRow) -> Finding:
    return Finding(
        check="unused_rule",
        message=f"the required rule {row.rule} decided for no module of this program.",
        fix=CHECKS["unused_rule"].fix,
    )
