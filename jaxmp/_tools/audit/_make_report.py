"""Construction of the report from the findings and counts of the walk."""

from __future__ import annotations

import dataclasses
import functools
import linecache
import re
from collections.abc import Callable, Iterable
from typing import Any

from jax.extend.core import JaxprEqn

from jaxmp import _core, _programs
from jaxmp._core._compat import _watch_jit
from jaxmp._policies import _load, _patterns, _policy, _resolve
from jaxmp._programs import MATMULS, Frame
from jaxmp._tools.audit import _auditor, _checks, _compile, _dataflow, _hlo_stats
from jaxmp._tools.audit._check_matmuls import (
    FP32_MATMUL,
    IMPLICIT_PROMOTION,
    MISALIGNED_MATMUL,
    MIXED_OPERANDS,
)
from jaxmp._tools.audit._check_ops import LOSS_16BIT
from jaxmp._tools.audit._check_speed import WIDE_GATHER
from jaxmp._tools.audit._labels import REDUCES
from jaxmp._tools.audit._report import AuditReport
from jaxmp._tools.audit._rows import SEVERITIES, Finding, MatmulRow, merged
from jaxmp._tools.fixes import _source, _trial
from jaxmp._tools.report import _section

# Checks whose fixes cast to 16 bits.
_NARROWED = frozenset(x.id for x in (FP32_MATMUL, IMPLICIT_PROMOTION, MIXED_OPERANDS, WIDE_GATHER))


def _leave_out_optimizer(auditor: _auditor.Auditor) -> None:
    """Removes the findings of checks that do not apply to the optimizer.

    An operation belongs to the optimizer if it reads values that were computed from gradients, and
    if updated parameters or the optimizer's state are computed from its result; or if its result is
    a statistic of examples, as of an evolution strategy, and parameters or state are computed from
    it without a further sum, such as that of a loss. Its matmuls follow the optimizer's precision
    and not the policies; a note gives their share of the FLOPs.
    """
    is_suspect = lambda f: f.of_updates and not f.check.includes_optimizer
    suspects = list(filter(is_suspect, auditor.findings))
    if not suspects and not auditor.of_updates:
        return
    updates = [auditor.flow.labels(_dataflow.Update, var) for var in auditor.results]
    has_gradient = [any(x.has_gradient for x in row) for row in updates]
    # They update an argument, or replace the one of the same key.
    pairs = zip(updates, auditor.traced.replaced, strict=True)
    are_state = [bool(row or numbers) for row, numbers in pairs]
    sums = lambda e: id(e) in auditor.statistics or e.primitive.name in REDUCES.difference(MATMULS)
    by_kind = [
        (True, _Sources(), has_gradient),
        (False, _Sources(sums), are_state),
    ]
    sources: set[tuple[Any, bool]] = set()
    for is_after, search, is_updated in by_kind:
        search.run(auditor.program.jaxpr, is_updated)
        sources.update((var, is_after) for var in search.found)
    _note_matmuls(auditor, sources)
    for finding in (f for f in suspects if not sources.isdisjoint(f.of_updates)):
        auditor.findings.remove(finding)
        if not finding.flops:
            note = f"{finding.check.id} at {finding.op.where} is not reported in the optimizer"
            auditor.notes[note] = None


class _Sources(_programs.Backward):
    """Finds the variables at any depth that some results depend on.

    A loop depends on all that its body computes. The search ends at equations of `is_end`.
    """

    nothing = False

    def __init__(self, is_end: Callable[[JaxprEqn], bool] = lambda _: False) -> None:
        self.found: set[Any] = set()
        self._is_end = is_end

    def equation(self, equation: JaxprEqn, results: list[Any], frame: Frame) -> list[Any]:
        if not any(results):
            return [False] * len(equation.invars)
        pairs = zip(equation.outvars, results, strict=True)
        self.found.update(var for var, is_needed in pairs if is_needed)
        if not _programs.inners(equation):
            return [not self._is_end(equation)] * len(equation.invars)
        is_loop = _programs.loop_of(equation) is not None
        operands = self.enter(equation, [True] * len(results) if is_loop else results, frame)
        if _programs.form_of(equation) is _programs.Form.BRANCH:
            operands[0] = True  # The index of the branch.
        return operands

    def join(self, first: bool, second: bool) -> bool:
        return first or second


def _note_matmuls(auditor: _auditor.Auditor, sources: set[tuple[Any, bool]]) -> None:
    total = sum(flops for flops, _ in auditor.matmuls.values())
    for where, rows in auditor.of_updates.items():
        flops = sum(flops for results, flops in rows if not sources.isdisjoint(results))
        if flops:
            matmuls = f"the optimizer's matmuls at {where} ({flops / total:.1%} of the FLOPs)"
            auditor.notes[f"{matmuls} are not compared with the policies"] = None


_EMULATED = (
    "FP8 matmuls are emulated on a CPU: operands are rounded to FP8 and multiplied in a wider dtype"
)
# Findings about less than this share of all FLOPs are warnings: all FP32 matmuls together, and a
# promotion that makes only such matmuls wide.
_SMALL_SHARE = 0.01
# Padding that costs at least this share of all FLOPs is an error.
_LARGE_SHARE = 0.25


def make_report(
    auditor: _auditor.Auditor,
    compiled: _compile.Compiled | None,
    *,
    function: Callable[..., Any],
    chip: _core.Target | None,
) -> AuditReport:
    """Returns the report.

    Args:
      auditor: after its walk.
      compiled: the program compiled for a GPU, if there is one.
      function: the audited function.
      chip: the chip that `audit` received.
    """
    of_program = [f for function in _checks.ON[_checks.PROGRAM] for f in function(auditor) or ()]
    findings = [*_final_findings(auditor), *of_program]
    policies = auditor.context.policies
    rows: dict[str, Any] = {}
    if auditor.context.target == "cpu" and any("float8" in lhs for *_, lhs, _ in auditor.matmuls):
        auditor.notes[_EMULATED] = None
    if compiled is not None:
        names = auditor.locations.names
        traced = auditor.traced
        flags = traced.in_optimizer(), traced.may_be_weights()
        program = _hlo_stats.read_program(compiled, names, auditor.root, *flags)
        findings += [
            f for function in _checks.ON[_checks.COMPILED] for f in function(program, auditor)
        ]
        rows = program._asdict() | {"gpu": _gpu_text(compiled)}
        del rows["origins"], rows["compiled"]
    recipe, definition = auditor.context.recipe, _watch_jit.definition_of(function)
    notes = [*auditor.notes, *rows.pop("notes", ())]
    if chip is not None and chip.uncompiled:
        notes.append(f"the program was not compiled for {chip.name!r}: {chip.uncompiled}")
    if chip is not None and recipe is not None and (lacking := lacking_format(chip, recipe)):
        notes.append(lacking)
    matmuls = (
        MatmulRow(module=auditor.module_of(names), phase=phase, lhs=lhs, rhs=rhs, flops=f, count=n)
        for (names, phase, lhs, rhs), (f, n) in auditor.matmuls.items()
    )
    findings = [_with_line(finding, definition) for finding in findings]
    return AuditReport(
        function=_watch_jit.title_of(function),
        target="" if chip is None else chip.name,
        recipe="" if recipe is None else recipe.name,
        findings=tuple(sorted(findings, key=_sort_key)),
        matmuls=merged(matmuls, "flops", "count"),
        policies="" if policies is None else str(_policy.summarized(policies.default)),
        equations=auditor.equations,
        notes=tuple(notes),
        **rows,
    )


def with_trials(
    report: AuditReport,
    edits: list[_source.Edit],
    again: Callable[[bool], tuple[AuditReport, list[_source.Edit]]],
) -> AuditReport:
    """Returns a report in which the code of fixes was tried.

    Args:
      report: the report.
      edits: the expressions that fixes replace.
      again: traces and audits the function once more, with fixes if its argument is True, and
        returns the report and the expressions that fixes replace.
    """
    groups: dict[Any, list[Finding]] = {}
    edits = printed(edits, report.findings)
    # A check may report two expressions of one line.
    lines = [
        dataclasses.replace(group[0], fix=functools.reduce(_source.both, [f.fix for f in group]))
        for group in _section.grouped(report.findings, _place).values()
    ]
    for finding in lines if edits else report.findings:
        fix, group = _trial.unified(finding.fix, finding.file, finding.line, edits)
        groups.setdefault(group, []).append(dataclasses.replace(finding, fix=fix))
    # New code of several lines is in the first one.
    spans = sorted((edit for edit in edits if edit.line < edit.end_line), reverse=True)
    first = {(e.file, n): e.line for e in spans for n in range(e.line, e.end_line + 1)}
    key = lambda f: (f.check, f.file, first.get((f.file, f.line), f.line))

    def problems(has_fixes: bool) -> _trial.Problems:
        report, edits = again(has_fixes)
        edits = printed(edits, report.findings)
        # A new warning does not speak against a fix.
        known = lambda f: f.severity == _checks.ERROR or (key(f), f.severity) in severities
        relevant = filter(known, report.findings)
        return {key(f): _trial.unified(f.fix, f.file, f.line, edits) for f in relevant}

    before = set(map(key, report.findings))
    severities = {(key(f), f.severity) for f in report.findings}
    tried = [group for group in groups if group is not None]
    removed = [set(map(key, groups[group])) for group in tried]
    trials = {None: _trial.FixTrial(_trial.NOT_TRIED)}
    if tried:
        results = _trial.try_edits(tried, problems, before, removed)
        trials |= zip(tried, results, strict=True)
    findings = [
        _with_trial(finding, group or frozenset(), trials[group])
        for group, members in groups.items()
        for finding in (members if group is None else _joined(members))
    ]
    return dataclasses.replace(report, findings=tuple(sorted(findings, key=_sort_key)))


def _place(finding: Finding) -> tuple[Any, ...]:
    return finding.check, finding.file, finding.line, finding.severity, finding.module


def _joined(findings: list[Finding]) -> list[Finding]:
    """Joins the findings of several checks that have the same fix, except for those of matmuls."""
    # That a result is a scalar is the least specific of them.
    findings = sorted(findings, key=lambda f: (_sort_key(f)[0], f.check == LOSS_16BIT.id))
    first = findings[0]
    others = {f.check: f for f in findings if f.check != first.check and not f.flops}
    message = first.message
    for f in others.values():
        message += f" The same code removes {f.check} at {f.location}: {f.message}"
    kept = [f for f in findings if f.check not in others]
    return [dataclasses.replace(first, message=message), *kept[1:]]


def printed(edits: list[_source.Edit], findings: Iterable[Finding]) -> list[_source.Edit]:
    """Returns the edits that are in the fixes of some findings."""
    codes = {code for finding in findings for code in _source.codes_of(finding.fix)}
    return [edit for edit in edits if edit.code in codes]


def _with_trial(finding: Finding, group: _trial.Edits, trial: _trial.FixTrial) -> Finding:
    if not any(is_code for is_code, _ in _section.fix_parts(finding.fix)):
        return finding
    if trial.state != _trial.FAILS:
        fix = _trial.with_edits(finding.fix, group, trial.edits) if trial.edits else finding.fix
        fix = functools.reduce(_source.both, trial.more, fix)
        return dataclasses.replace(finding, fix=fix, trial=trial.state)
    sentences = (text for is_code, text in _section.fix_parts(finding.fix) if not is_code)
    remedy = " ".join(sentence.rstrip(":.") + "." for sentence in sentences)
    if finding.check in _NARROWED:
        remedy = "Cast the wide arrays that this line reads to 16 bits."
    tried = "what it tried fails, keeps the finding, or leads to another one."
    return dataclasses.replace(finding, fix=f"{remedy} jaxmp prints no code: {tried}")


def lacking_format(chip: _core.Target, recipe: _load.RecipeData) -> str:
    """Returns that a chip lacks the formats of a recipe, and one that fits; "" otherwise."""
    default = recipe.policies.default
    name, has_fp8 = str(default.compute_dtype), "float8_e4m3fn" in chip.native
    if not has_fp8 and _resolve.matmul_scaling(recipe.policies) is not None:
        has_others = any(dtype.startswith("float8") for dtype in chip.native)
        name = "float8_e4m3fn" if has_others else "FP8"
    elif name in chip.native or not _core.is_16bit(default.compute_dtype):
        return ""
    fitting = "bf16" if "bfloat16" in chip.native else "fp16"
    fitting += "_params" * _core.is_16bit(default.param_dtype)
    text = f"the recipe computes in {name}, which {chip.kind} does not multiply natively"
    return f"{text}; this one fits: jaxmp.load_recipe({fitting!r})"


def _gpu_text(compiled: _compile.Compiled) -> str:
    gpus = f"{compiled.devices} x {compiled.gpu}" if compiled.devices > 1 else compiled.gpu
    missing = f"{gpus} (no such {compiled.chip.platform.upper()} on this machine)"
    return gpus if compiled.is_real else missing


# ---------------------------------------------------------------------------
# Findings
# ---------------------------------------------------------------------------


def _final_findings(auditor: _auditor.Auditor) -> list[Finding]:
    """Returns the findings of the traced program with their modules and severities.

    Findings of scopes that differ but belong to the same module are merged.
    """
    total = sum(flops for flops, _ in auditor.matmuls.values())
    _leave_out_optimizer(auditor)
    pending = list(auditor.findings)
    fp32_flops = sum(finding.flops for finding in pending if finding.check is FP32_MATMUL)
    are_few = fp32_flops < _SMALL_SHARE * total
    findings: list[Finding] = []
    for item in pending:
        severity = item.severity
        is_minor = item.check is IMPLICIT_PROMOTION and 0 < item.harmed_flops < _SMALL_SHARE * total
        if item.check is MISALIGNED_MATMUL and item.harmed_flops >= _LARGE_SHARE * total:
            severity = _checks.ERROR
        elif is_minor or (item.check is FP32_MATMUL and are_few):
            severity = severity if severity == _checks.NOTE else _checks.WARNING
        module = auditor.module_of(item.op.location.names)
        fields = {"primitive": item.op.name, "count": item.count, "flops": item.flops}
        fields |= {"severity": severity, "module": module}
        findings.append(item.check.finding(item.message, item.fix, item.op, **fields))
    findings = [
        dataclasses.replace(
            group[0], count=sum(f.count for f in group), flops=sum(f.flops for f in group)
        )
        for group in _section.grouped(findings, _place).values()
    ]
    modules = {auditor.context.rule_path(names) for names in auditor.locations.names}
    return _with_patterns(findings, modules | set(auditor.context.modules))


# The path of a rule in a fix.
_RULE_PATH = re.compile(r"(?<=jaxmp\.Rule\(')[^']*(?=')")


def _with_patterns(findings: list[Finding], modules: set[str]) -> list[Finding]:
    """Returns findings with one rule for all modules that differ only in numbers.

    Args:
      findings: the findings, of which each has the rule of its own module.
      modules: the paths of all modules.
    """
    numberless = lambda path: _section.numberless(path[0])
    alike = lambda f: (*_place(f)[:4], _RULE_PATH.sub(numberless, f.fix))
    fixes = {finding: finding.fix for finding in findings}
    for group in _section.grouped(findings, alike).values():
        paths = zip(*(_RULE_PATH.findall(finding.fix) for finding in group), strict=True)
        patterns = iter([_pattern_of(set(column), modules) for column in paths])
        fix = _RULE_PATH.sub(lambda _, patterns=patterns: next(patterns), group[0].fix)
        fixes |= dict.fromkeys(group, fix)
    return [dataclasses.replace(finding, fix=fix) for finding, fix in fixes.items()]


def _pattern_of(paths: set[str], modules: set[str]) -> str:
    """Returns a pattern, as within quotes, that matches some modules and no other ones."""
    numbers = re.compile(r"(\d+)")
    columns = zip(*map(numbers.split, paths), strict=True)
    pattern = "".join(parts[0] if len(set(parts)) == 1 else "#" for parts in columns)
    if len(paths) > 1 and not all(
        path in paths or _patterns.compile_pattern(pattern).fullmatch(path) is None
        for path in modules
    ):
        pattern = f"re:{'|'.join(map(re.escape, sorted(paths)))}"
    return repr(pattern)[1:-1]


def _with_line(finding: Finding, definition: tuple[str, int]) -> Finding:
    """Returns a finding with the text of its line, or else with the line of the function."""
    if not finding.file:
        return dataclasses.replace(finding, file=definition[0], line=definition[1])
    return dataclasses.replace(finding, text=linecache.getline(finding.file, finding.line).strip())


def _sort_key(finding: Finding) -> tuple[int, int, int]:
    """Sorts errors before warnings, then by check and by FLOPs; notes keep their order."""
    order = SEVERITIES.index(finding.severity)
    return order, order < 2 and list(_checks.CHECKS).index(finding.check), -finding.flops
