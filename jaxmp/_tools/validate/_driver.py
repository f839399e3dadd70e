"""Runs a validation: trains reference and candidates, and assembles the report."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from jaxmp._core import _trees
from jaxmp._core._dtypes import is_16bit
from jaxmp._core._typing import PyTree
from jaxmp._policies._recipe import Recipe
from jaxmp._tools.audit import AuditReport, audit
from jaxmp._tools.report._progress import OnRun, OnStep
from jaxmp._tools.report._section import abbreviate, counted, grouped
from jaxmp._tools.report._views import Interrupted
from jaxmp._tools.validate._budget import Budget, choose_metrics, choose_training
from jaxmp._tools.validate._compare import (
    compare_figures,
    compare_metrics,
    compare_training,
    overall,
)
from jaxmp._tools.validate._diagnose import Evidence, diagnose, find_origin
from jaxmp._tools.validate._phases import (
    PhaseSteps,
    at_step,
    make_runs,
    phases_of,
    records_of,
)
from jaxmp._tools.validate._probe import Leaves, Measurements, Probe, leaves_of, make_probe
from jaxmp._tools.validate._pure import PureRun, as_arrays, check_same_params, checksum
from jaxmp._tools.validate._report import ValidationReport
from jaxmp._tools.validate._rows import (
    DIFFERS,
    FAIL,
    INCONCLUSIVE,
    PASS,
    CandidateResult,
    Cause,
    Comparison,
    MetricChoice,
    TrainingRecord,
    TrainingRow,
    figure_text,
)
from jaxmp._tools.validate._run import MakeRun
from jaxmp._tools.validate._train import CompiledRun, Hashes, Schedule, make_program, train
from jaxmp._tools.validate._trials import Trial, repeat_step, step_to_repeat
from jaxmp.errors import ValidationError

_TEST = (
    "The test is a paired t test over the seeds: a candidate passes if the upper bound of the "
    "95 % interval of its mean difference is within the budget, and fails if the lower bound is "
    "above. If the upper bound is below minus the budget, it differs. The interval assumes that "
    "the differences are normal, or skewed as lognormal ones with sigma of at most 0.5."
)
_CORRECTED = (
    " It is wider for {} candidates (Bonferroni): one of them passes wrongly with a probability of "
    "at most 5 %."
)
# Share of seeds, one in so many, of the rare failures that the report mentions.
_RARE = 10
_UNSEEN = " A failure in one of {} seeds does not occur in {} with a probability of {:.0f} %."


class Settings(NamedTuple):
    """Arguments of a validation, checked."""

    reference: tuple[str, Recipe]
    candidates: Mapping[str, Recipe]
    budgets: Mapping[str, Budget]
    directions: Mapping[str, str]
    seeds: tuple[int, ...]
    schedule: Schedule
    # The report whose runs are not repeated.
    earlier: ValidationReport = ValidationReport()

    @property
    def recipes(self) -> dict[str, Recipe]:
        """The recipes by name, the reference first."""
        return dict([self.reference]) | dict(self.candidates)


class Reference(NamedTuple):
    """Values of the reference that candidates are compared with.

    Args:
      initial: seed -> initial parameters.
      steps: compared step -> parameters before it, and measurements.
    """

    initial: dict[int, Leaves]
    steps: dict[int, tuple[Leaves, Probe]]


class Trained(NamedTuple):
    """Records, measurements and audits of one recipe."""

    records: list[TrainingRecord]
    measurements: Measurements
    phases: list[PhaseSteps]
    # First step of each phase -> audit of its step.
    audits: dict[int, AuditReport]
    # True if a parameter is stored in 16 bits and has no FP32 master.
    lacks_masters: bool
    # Repeats a compared step without roundings.
    repeat: Callable[[int], Trial]


def run_validation(
    make_run: MakeRun, settings: Settings, on_run: OnRun, on_step: OnStep
) -> ValidationReport:
    """Trains all recipes and returns the report.

    Raises:
      Interrupted: by Ctrl-C, if a run is finished.
    """
    results: dict[str, Trained] = {}
    saved, runs = Reference({}, {}), list[TrainingRecord]()
    shared = (make_run, settings, saved, runs, on_run, on_step)
    try:
        for name, recipe in settings.recipes.items():
            results[name] = _train_recipe(name, recipe, *shared)
            if name == settings.reference[0]:
                _check_finite(results[name].records)
        return _make_report(settings, results)
    except KeyboardInterrupt:
        if not runs:
            raise
        raise Interrupted(_make_partial(settings, results, runs)) from None


def _make_partial(
    settings: Settings, results: Mapping[str, Trained], runs: Sequence[TrainingRecord]
) -> ValidationReport:
    """Returns the report on the candidates whose runs are all finished, with all other runs."""
    schedule = settings.schedule
    report = ValidationReport(
        reference=settings.reference[0],
        seeds=settings.seeds,
        steps=schedule.steps,
        eval_steps=schedule.eval_steps,
        compare_steps=schedule.compare_steps,
    )
    if len(results) > 1:
        report = _make_report(settings, results)
    counts = [(name, sum(run.name == name for run in runs)) for name in settings.recipes]
    total = len(settings.seeds)
    lacking = [f"{name} has {n} of {counted(total, 'run')}" for name, n in counts if n < total]
    verdict = "A candidate has a verdict after its last run."
    note = f"Interrupted: {', '.join(lacking)}. {verdict}" if lacking else ""
    return dataclasses.replace(
        report,
        runs=tuple(runs),
        unfinished=tuple(name for name in settings.candidates if name not in results),
        notes=(note, *report.notes)[not note :],
    )


def _make_report(settings: Settings, results: Mapping[str, Trained]) -> ValidationReport:
    """Compares the candidates of `results` with the reference."""
    reference = results[settings.reference[0]]
    names = [name for name in settings.candidates if name in results]
    for name in names:
        _check_data(reference.records, results[name].records)
    trained = [record for name in names for record in results[name].records]
    budgets, count = list(settings.budgets.values()), len(settings.candidates)
    metrics = choose_metrics(reference.records, trained, settings.directions, budgets)
    training = choose_training(reference.records, trained, budgets)
    candidates = [_compare(settings, results, metrics, training, name) for name in names]
    others = [each.reason for each in (*metrics[1:], training) if each.scale == "absolute"]
    reason = metrics[0].reason
    reason = " ".join([reason, *(each for each in dict.fromkeys(others) if each not in reason)])
    test, seeds = _TEST + (_CORRECTED.format(count) if count > 2 else ""), len(settings.seeds)
    test += _UNSEEN.format(_RARE, counted(seeds, "run"), 100 * (1 - 1 / _RARE) ** seeds)
    return ValidationReport(
        reference=settings.reference[0],
        seeds=settings.seeds,
        steps=settings.schedule.steps,
        eval_steps=settings.schedule.eval_steps,
        compare_steps=settings.schedule.compare_steps,
        metric=dataclasses.replace(metrics[0], reason=reason),
        test=test,
        candidates=tuple(candidates),
        runs=tuple(record for trained in results.values() for record in trained.records),
        notes=tuple(_notes(candidates, [metric.name for metric in metrics], reference.records[0])),
    )


def _check_finite(reference: Sequence[TrainingRecord]) -> None:
    """Checks that the reference has losses to compare with.

    Raises:
      ValidationError: naming the first step of a run that did not end with finite values.
    """
    for record in reference:
        last = {name: values[-1] for name, values in record.evaluations.items()}
        if np.isfinite([record.losses[-1], *last.values()]).all():
            continue
        broken = np.flatnonzero(~np.isfinite(record.losses))
        start = f", first at step {broken[0]}" if broken.size else ""
        raise ValidationError(
            f"The reference {record.name!r} ends with a training loss of {record.losses[-1]} and "
            f"{last} on held-out data for seed {record.seed}{start}, so nothing can be compared "
            "with it. Correct the run, for example by a smaller learning rate, and start again."
        )


def _notes(
    candidates: Sequence[CandidateResult], metrics: Sequence[str], record: TrainingRecord
) -> Iterator[str]:
    """Yields the comparisons that were not made."""
    others = [name for name in record.evaluations if name not in metrics]
    if others:
        yield f"No verdict uses {', '.join(others)}; declare metrics={{{others[0]!r}: 'max'}}."
    if not any(candidate.gradients for candidate in candidates):
        yield (
            "Gradients were not compared, because the step does not return them: "
            'return state, {"loss": loss, "grads": grads}.'
        )
    rows = [row for candidate in candidates for row in candidate.modules if row.module]
    compared = {row.module for row in rows if row.activation_error is not None}
    missing = list(dict.fromkeys(row.module for row in rows if row.module not in compared))
    if missing:
        yield (
            f"The gradients of {abbreviate(missing)} were compared, and their outputs were not: "
            "these modules have no name scope of their own in the forward pass, run in a branch "
            "that was not taken, or run inside an operation that validate does not enter, such "
            "as lax.platform_dependent."
        )


def _compare(
    settings: Settings,
    results: Mapping[str, Trained],
    metrics: Sequence[MetricChoice],
    scale: MetricChoice,
    name: str,
) -> CandidateResult:
    """Compares a candidate with the reference, and diagnoses a failure.

    Args:
      settings: the arguments of the validation.
      results: results of all recipes by name.
      metrics: the metrics, the deciding one first.
      scale: scale of the training loss.
      name: the candidate.
    """
    reference, candidate = results[settings.reference[0]], results[name]
    budget, records = settings.budgets[name], (reference.records, candidate.records)
    shared = (metrics, budget, scale, len(settings.candidates))
    checks, pairs, power = compare_metrics(*records, *shared)
    parts = []
    for phase in candidate.phases:
        own = records_of(phase, reference.records), records_of(phase, candidate.records)
        rows = candidate.measurements.between(phase.start, phase.stop)
        training = compare_training(*own, scale)
        count = (phase.stop - phase.start) * len(settings.seeds)
        unit = scale.unit if scale.scale == "absolute" else 0.0
        own_figures = compare_figures(rows.gradients, training, budget, count, unit)
        verdict = overall([*compare_metrics(*own, *shared)[0], *own_figures])
        parts.append(_Part(phase, verdict, own_figures, rows, training))
    # Each figure is that of the phase in which it is worst.
    figures = grouped([each for part in parts for each in part.figures], lambda each: each.name)
    checks += map(overall, figures.values())
    decisive, worst = overall(checks), overall([part.verdict for part in parts])
    part = next(part for part in parts if part.verdict is worst)
    causes = ()
    if decisive.verdict in (FAIL, DIFFERS):
        causes = diagnose(_evidence(candidate, part, budget))
    has_phases = len(parts) > 1
    where = part.phase.name if has_phases and decisive.verdict != PASS else ""
    return CandidateResult(
        name=name,
        recipe=settings.candidates[name].name,
        verdict=decisive.verdict,
        headline=_headline(name, where, decisive, causes),
        causes=causes,
        checks=tuple(checks),
        phases=tuple(
            dataclasses.replace(part.verdict, name=part.phase.name)
            for part in parts[: len(parts) * has_phases]
        ),
        pairs=tuple(pairs),
        power=power,
        gradients=candidate.measurements.gradients,
        modules=candidate.measurements.modules,
        patterns=candidate.measurements.patterns,
        origin=find_origin(part.rows.modules),
        training=compare_training(*records, scale),
    )


class _Part(NamedTuple):
    """Comparison of the steps of one phase: what decides, and the figures without an interval."""

    phase: PhaseSteps
    verdict: Comparison
    figures: list[Comparison]
    rows: Measurements
    training: TrainingRow


def _evidence(candidate: Trained, part: _Part, budget: Budget) -> Evidence:
    trial, note, rows = None, "", part.rows.gradients
    try:
        trial = candidate.repeat(step_to_repeat(rows)) if rows else None
    except (TypeError, ValueError, NotImplementedError) as error:
        # A step that cannot be emulated does not invalidate the verdict.
        note = f"The step was not repeated in FP32: {type(error).__name__}: {str(error)[:200]}"
    records = records_of(part.phase, candidate.records)
    return Evidence(
        measurements=part.rows,
        audit=candidate.audits[part.phase.start],
        training=part.training,
        lacks_masters=candidate.lacks_masters,
        scale=min(min(record.loss_scales) for record in records),
        gradient_budget=budget.gradient,
        is_finite=bool(np.isfinite([record.losses[-1] for record in records]).all()),
        trial=trial,
        note=note,
    )


def _headline(name: str, where: str, decisive: Comparison, causes: Sequence[Cause]) -> str:
    figure = functools.partial(figure_text, scale=decisive.scale, sign=False)
    budget = f"budget {figure(decisive.budget)}"
    cause = f"in the phase {where}; " if where else ""
    cause += f"{causes[0].summary}; " if causes else ""
    if decisive.verdict == FAIL:
        excess = decisive.value - decisive.budget
        over = f", over it by {figure(excess)}" if np.isfinite(excess) else ""
        return f"{name} FAILS: {cause}{decisive.text}, {budget}{over}"
    if decisive.verdict == DIFFERS:
        is_other = decisive.name == "loss_error"
        reason = "another loss on the same parameters" if is_other else "better by more than that"
        return f"{name} DIFFERS: {cause}{decisive.text}, {budget}, {reason}"
    if decisive.verdict == INCONCLUSIVE:
        return f"{name} is INCONCLUSIVE: {cause}{decisive.text}, {budget}; use more seeds"
    return f"{name} passes: {decisive.text}, {budget}, margin {figure(decisive.margin)}"


def _check_data(reference: Sequence[TrainingRecord], candidate: Sequence[TrainingRecord]) -> None:
    """Checks that both have the same metrics, and were trained on the same batches in order."""
    for first, second in zip(reference, candidate, strict=True):
        if set(first.evaluations) != set(second.evaluations):
            raise ValidationError(
                f"evaluate of {second.name!r} returned the metrics {sorted(second.evaluations)}, "
                f"and that of {first.name!r} {sorted(first.evaluations)}. Return the same metrics "
                "for every recipe."
            )
        if first.data_checksum != second.data_checksum:
            raise ValidationError(
                f"{second.name!r} was trained on other batches than {first.name!r} for seed "
                f"{first.seed}. Make the batches in make_run from the seed alone, such as with "
                "np.random.default_rng(seed)."
            )


# ---------------------------------------------------------------------------
# One recipe
# ---------------------------------------------------------------------------


def _train_recipe(
    name: str,
    recipe: Recipe,
    make_run: MakeRun,
    settings: Settings,
    saved: Reference,
    runs: list[TrainingRecord],
    on_run: OnRun,
    on_step: OnStep,
) -> Trained:
    """Trains all seeds of a recipe, one after another, and appends their records to `runs`."""
    seeds, schedule = settings.seeds, settings.schedule
    is_reference = name == settings.reference[0]
    phases = phases_of(name, recipe, schedule.steps)
    make = functools.partial(make_runs, make_run, phases, schedule.steps)
    first = make(seeds[0])
    run = first[0]
    params = jax.eval_shape(run.params, run.arrays)
    audits = {}
    for phase in phases:
        audited, objects = first[phase.start].audited
        audits[phase.start] = audit(audited, *objects, run.first, recipe=phase.recipe)
    program = functools.cache(lambda start: make_program(first[start]))
    hashes = {start: Hashes.of(run) for start, run in first.items()}
    comparer = _Comparer(first, saved, is_reference)
    finished = _finished(name, settings)

    def program_of(start: int, run: PureRun, each: Hashes) -> CompiledRun:
        own = program(start) if each.step == hashes[start].step else make_program(run)
        is_known = each.evaluation and each.evaluation == hashes[start].evaluation
        return own if is_known else own.with_evaluation(run)

    def train_one(seed: int) -> TrainingRecord:
        runs_by_start = first if seed == seeds[0] else make(seed)
        current = runs_by_start[0]
        _check_initial(name, seed, current, saved, is_reference)
        on_run(f"{name}, seed {seed}")
        each = {start: Hashes.of(run) for start, run in runs_by_start.items()}
        # The first steps of later phases belong to the program.
        traced = ", ".join(f"{start} " * (start > 0) + h.step for start, h in each.items())
        initial, record = checksum(current.params(current.arrays)), finished.get(seed)
        if record and (record.initial_checksum, record.program) == (f"{initial:08x}", traced):
            for _ in range(schedule.steps):
                on_step()
            runs.append(record)
            return record
        own = {start: program_of(start, run, each[start]) for start, run in runs_by_start.items()}
        # Only the first seed is compared.
        compared = comparer if seed == seeds[0] else lambda *_: None
        record = train(name, seed, current, own, schedule, on_compare=compared, on_step=on_step)
        runs.append(dataclasses.replace(record, program=traced))
        return runs[-1]

    def repeat(step: int) -> Trial:
        current, (leaves, reference) = at_step(make(seeds[0]), step), saved.steps[step]
        batch = as_arrays(next(itertools.islice(current.batches, step, None)))
        return repeat_step(current, _with_leaves(current, leaves), batch, step, reference)

    records = list(map(train_one, seeds))
    if seeds[0] in finished and records[0] is finished[seeds[0]]:
        earlier = settings.earlier[name]
        comparer.measurements = Measurements(
            gradients=earlier.gradients, modules=earlier.modules, patterns=earlier.patterns
        )
    return Trained(
        records=records,
        measurements=comparer.measurements,
        phases=phases,
        audits=audits,
        lacks_masters=any(is_16bit(leaf.dtype) for leaf in jax.tree.leaves(params)),
        repeat=repeat,
    )


def _finished(name: str, settings: Settings) -> dict[int, TrainingRecord]:
    """Returns the earlier runs of a recipe by seed.

    The gradients of the first seed are compared. It is among them if the earlier report has these
    comparisons; that of the reference, whose gradients no report has, is not.
    """
    earlier = settings.earlier
    has_verdict = any(each.name == name for each in earlier.candidates)
    is_compared = has_verdict and earlier.seeds[:1] == settings.seeds[:1]
    runs = {run.seed: run for run in earlier.runs if run.name == name}
    return {n: run for n, run in runs.items() if n != settings.seeds[0] or is_compared}


def _with_leaves(run: PureRun, leaves: Leaves, arrays: PyTree = None) -> PyTree:
    """Returns a state, or the initial one, with parameters by path."""
    arrays = run.arrays if arrays is None else arrays
    params = run.params(arrays)
    new = _trees.map_with_path(lambda path, _: leaves[_trees.parameter_path(path)], params)
    return run.with_params(arrays, new)


def _check_initial(
    name: str, seed: int, run: PureRun, saved: Reference, is_reference: bool
) -> None:
    """Saves the initial parameters of the reference, or compares those of a candidate."""
    params = run.params(run.arrays)
    if is_reference:
        saved.initial[seed] = leaves_of(params)
        return
    leaves = saved.initial[seed]
    expected = _trees.map_with_path(lambda path, _: leaves.get(_trees.parameter_path(path)), params)
    check_same_params(expected, params, name, seed)


class _Comparer:
    """Measures the steps to compare: saves those of the reference, compares those of others."""

    def __init__(self, runs: Mapping[int, PureRun], saved: Reference, is_reference: bool) -> None:
        self._runs, self._saved, self._is_reference = runs, saved, is_reference
        self._probes = {start: make_probe(run) for start, run in runs.items()}
        self.measurements = Measurements()

    def __call__(self, step: int, arrays: PyTree, batch: PyTree) -> None:
        run, probe = at_step(self._runs, step), at_step(self._probes, step)
        if self._is_reference:
            params = leaves_of(run.params(arrays))
            self._saved.steps[step] = params, probe(arrays, batch)
            return
        leaves, reference = self._saved.steps[step]
        candidate = probe(_with_leaves(run, leaves, arrays), batch)
        self.measurements = self.measurements.add(step, reference, candidate)
