"""The audit: dtypes and precision defects of a program, as traced and as compiled.

The checks register themselves in `_checks` when they are imported here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from jaxmp import _core, _programs

# The order of these imports is that of the checks in reports and in the documentation.
# isort: off
from jaxmp._tools.audit import _check_matmuls as _check_matmuls
from jaxmp._tools.audit import _check_ops as _check_ops
from jaxmp._tools.audit import _check_float16 as _check_float16
from jaxmp._tools.audit import _check_integers as _check_integers
from jaxmp._tools.audit import _check_losses as _check_losses
from jaxmp._tools.audit import _check_random as _check_random
from jaxmp._tools.audit import _check_state as _check_state
from jaxmp._tools.audit import _check_carried as _check_carried
from jaxmp._tools.audit import _check_sums as _check_sums
from jaxmp._tools.audit import _check_compiled as _check_compiled
from jaxmp._tools.audit import _check_sharding as _check_sharding
from jaxmp._tools.audit import _check_speed as _check_speed
from jaxmp._tools.audit import _check_attention as _check_attention

# isort: on
from jaxmp._core import _compat
from jaxmp._policies import _load, _recipe
from jaxmp._tools.audit import _auditor, _checks, _make_report, _rows, _trace
from jaxmp._tools.audit._compile import Compiled, compile_for, compile_lowered, compiling_for
from jaxmp._tools.audit._report import AuditReport
from jaxmp._tools.fixes import _source, _trial
from jaxmp.optim._find import check_plain_loop


def audit(
    fn: Callable[..., Any],
    *args: _core.PyTree,
    recipe: _load.RecipeLike | None = None,
    target: _core.TargetLike | None = None,
    try_fixes: bool = True,
    **kwargs: _core.PyTree,
) -> AuditReport:
    """Reports the dtypes of a program's operations, and precision defects with their fixes.

    The function is traced, and with `target` also compiled, but never run. The recipe is only
    compared with the program, not applied to it.

    Args:
      fn: any JAX function, such as a whole train step, jitted or not.
      *args: its arguments. Arrays may be `jax.ShapeDtypeStruct`. Objects that are not pytrees of
        arrays are passed to `fn` unchanged.
      recipe: the recipe that the program should follow: its name, a policy string, a
        `Policy`, a `PolicyMap` or a `Recipe`. None: an FP32 matmul is an error if an operand was
        cast up from 16 bits. A program contains no module types, so a dtype that a rule by type
        requires is allowed in every module. A recipe with phases must be an argument of `fn`, too:
        each phase is audited, and modules are such as "mine@900/dense".
      target: a chip, such as "h200" or "v6e", to compile the program for it, too; docs/chips.md
        lists them. A mapping or a TOML file describes another one: {"like": "h100", "memory":
        96e9}. It does not have to be present (the extras `aot` and `tpu-aot` of jaxmp). For
        "v100", "cpu" and the chips of other vendors the program is only traced, and a note has
        the reason. The report then has `.gemms`,
        `.attention`, `.collectives` and `.memory`. If the arguments are sharded over a mesh, or a
        `jit`, `shard_map` or constraint of the program names one, the program is compiled for as
        many GPUs, whatever the devices of the mesh are. None: the chip of
        `jaxmp.default_target`; without it, the program is not compiled.
      try_fixes: True to trace the function again with the code of the fixes. Code that does not
        remove its finding, or leads to another error, is not printed.
      **kwargs: keyword arguments of `fn`.

    Returns:
      The report, with `.findings`, `.matmul_flops` and `.ok`; it prints as a table.

    Raises:
      AuditError: if `fn` is not a function or does not take the arguments, or changes an NNX object
        that is not among its arguments, or if XLA cannot compile the program.
      CompositionError: as `jaxmp.get_loss_scale`, for an optimizer state among the arguments.
      TargetError: if `target` is not a known chip, or the program does not fit a TPU.
      MissingDependencyError: if neither the chip nor XLA's compiler for it is installed.
      PolicyError, RecipeError: if the recipe is not valid.

    Example:
      >>> def attend(q, k):
      ...     return jax.nn.softmax(q @ k.T)
      >>> x = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)
      >>> [finding.check for finding in audit(attend, x, x, recipe="bf16").findings]
      ['softmax_16bit', 'rounded_output']
    """
    _trace.check_arguments(fn, args, kwargs)
    return audit_call(fn, args, kwargs, recipe=recipe, target=target, try_fixes=try_fixes)


def audit_call(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    recipe: _load.RecipeLike | None,
    target: _core.TargetLike | None,
    try_fixes: bool = True,
) -> AuditReport:
    """Audits a function whose keyword arguments may have any name, such as `target`."""
    _trace.check_function(fn, "audit")
    chip = _compat.current_context().chip if target is None else _core.get_target(target)
    data = None if recipe is None else _recipe.load_recipe(recipe)
    if data is not None and data.phases:
        options: Any = {"target": target, "try_fixes": try_fixes}
        call = lambda phase: (fn, *_with_phase((args, kwargs), phase))
        return audit_phases(data, lambda phase: audit_call(*call(phase), recipe=phase, **options))
    name = recipe if isinstance(recipe, str) else "bf16" if recipe is None else ""
    code = repr(name) if name else "recipe"
    device = _compat.target() if chip is None else chip.platform
    context = _auditor.PolicyContext(data, device, code)
    return audit_program(context, fn, args, kwargs, chip, try_fixes=try_fixes)[0]


def _with_phase(call: _core.PyTree, phase: _recipe.Recipe) -> _core.PyTree:
    """Returns the arguments of a function with a phase of a recipe instead of the recipe.

    Raises:
      RecipeError: if the recipe is not among them.
    """
    is_whole = lambda node: isinstance(node, _recipe.Recipe) and node == phase.whole
    leaves, structure = jax.tree.flatten(call, is_leaf=is_whole)
    if phase.whole is not None and not any(map(is_whole, leaves)):
        _load.as_policy_map(phase.whole)
    return structure.unflatten(phase if is_whole(leaf) else leaf for leaf in leaves)


def audit_phases(
    recipe: _recipe.Recipe, audit_one: Callable[[_recipe.Recipe], AuditReport]
) -> AuditReport:
    """Returns one report on all phases of a recipe, whose names precede the paths of modules."""
    reports = []
    for phase in recipe.split_phases():
        report = audit_one(phase)
        moved = {
            name: tuple(
                dataclasses.replace(row, module=f"{phase.name}/{row.module}".rstrip("/"))
                for row in getattr(report, name)
            )
            for name in ("findings", "matmuls", "gemms", "attention", "collectives")
        }
        notes = tuple(f"{phase.name}: {note}" for note in report.notes)
        reports.append(dataclasses.replace(report, **moved, notes=notes))
    policies = ", then ".join(dict.fromkeys(report.policies for report in reports))
    return dataclasses.replace(join_reports(reports), recipe=recipe.name, policies=policies)


def join_reports(reports: list[AuditReport]) -> AuditReport:
    """Returns one report for several programs; its memory is that of the largest one."""
    first = reports[0]
    if len(reports) == 1:
        return first
    every = lambda field: [row for report in reports for row in getattr(report, field)]
    severity = lambda finding: _rows.SEVERITIES.index(finding.severity)
    memories = [report.memory for report in reports if report.memory is not None]
    return dataclasses.replace(
        first,
        function=", ".join(dict.fromkeys(report.function for report in reports)),
        equations=sum(report.equations for report in reports),
        findings=tuple(sorted(dict.fromkeys(every("findings")), key=severity)),
        memory=max(memories, key=lambda row: row.arguments + row.temporary, default=None),
        notes=tuple(dict.fromkeys(every("notes"))),
        attention=tuple(every("attention")),
        collectives=tuple(every("collectives")),
        matmuls=_rows.merged(every("matmuls"), "flops", "count"),
        gemms=_rows.merged(every("gemms"), "flops", "count"),
    )


def audit_program(
    context: _auditor.PolicyContext,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    chip: _core.Target | None,
    compiler: Callable[[Any, Any], tuple[str, Any]] = compile_lowered,
    *,
    try_fixes: bool = False,
) -> tuple[AuditReport, Compiled | None]:
    """Audits a function, and returns the report and the compiled program, if there is one."""

    def walked(has_fixes: bool = True) -> _auditor.Auditor:
        """Traces the function, and walks over its program."""
        with _trial.without_collection():
            traced = _trace.trace(fn, args, kwargs)
            auditor = _auditor.Auditor(context.of_program(traced.closed, traced.module_paths()))
            auditor.findings.reads_source = has_fixes
            auditor.traced = traced
            _check_state.label_arguments(auditor)
            # Masks that attention makes for its own derivative are not the model's.
            auditor.run(_programs.Scope(traced.closed, stops=_checks.is_attention))
        return auditor

    def again(has_fixes: bool) -> tuple[AuditReport, list[_source.Edit]]:
        auditor = walked(has_fixes)
        report = _make_report.make_report(auditor, None, function=fn, chip=None)
        return report, auditor.findings.edits

    # JAX may start its backends at any step of an audit.
    with compiling_for(chip):
        for arg in (*args, *kwargs.values()):
            check_plain_loop(arg)
        auditor = walked()
        compiled = None
        if chip is not None and not chip.uncompiled:
            compiled = compile_for(chip, auditor.traced, compiler)
        report = _make_report.make_report(auditor, compiled, function=fn, chip=chip)
        if try_fixes:
            report = _make_report.with_trials(report, auditor.findings.edits, again)
    fix_of = lambda f: _source.without_repetition([_source.with_names_of(f.file, f.fix)])
    named = lambda f: dataclasses.replace(f, fix=fix_of(f))
    return dataclasses.replace(report, findings=tuple(map(named, report.findings))), compiled
