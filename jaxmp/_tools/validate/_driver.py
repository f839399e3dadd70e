"""Runs a validation: trains reference and candidates, and assembles the report."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxmp import _core
from jaxmp._policies import _recipe
from jaxmp._tools.audit import _audit
from jaxmp._tools.audit._rows import NOT_INSPECTED
from jaxmp._tools.report._progress import OnRun, OnStep
from jaxmp._tools.report._section import abbreviate, counted, grouped
from jaxmp._tools.report._views import Interrupted
from jaxmp._tools.validate import _budget, _compare, _probe, _report, _rows, _run, _train, _trials
from jaxmp._tools.validate._diagnose import Trained, diagnose, find_origin
from jaxmp._tools.validate._pure import as_arrays, check_same_params, checksum, leaves_of
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
    """Arguments of a validation, checked.

    Args:
      recipes: the recipes by name, the reference first.
      budgets: the budget of each candidate, by its name.
      directions: declared directions of metrics.
      plan: the report before the first run: the name of the reference, seeds and steps.
      earlier: the report whose runs are not repeated.
    """

    recipes: Mapping[str, _recipe.Recipe]
    budgets: Mapping[str, _budget.Budget]
    directions: Mapping[str, str]
    plan: _report.ValidationReport
    earlier: _report.ValidationReport = _report.ValidationReport()


def run_validation(
    make_run: _run.MakeRun, settings: Settings, on_run: OnRun, on_step: OnStep
) -> _report.ValidationReport:
    """Trains all recipes and returns the report.

    Raises:
      Interrupted: by Ctrl-C, if a run is finished.
    """
    trainer, results = _Trainer(make_run, settings, on_run, on_step), dict[str, Trained]()
    try:
        for name, recipe in settings.recipes.items():
            results[name] = trainer.train(name, recipe)
            if name == settings.plan.reference:
                _check_finite(results[name].records)
        return _make_report(settings, results)
    except KeyboardInterrupt:
        if not trainer.runs:
            raise
        raise Interrupted(_make_partial(settings, results, trainer.runs)) from None


def _make_partial(
    settings: Settings, results: Mapping[str, Trained], runs: Sequence[_rows.TrainingRecord]
) -> _report.ValidationReport:
    """Returns the report on the candidates whose runs are all finished, with all other runs."""
    report = _make_report(settings, results) if len(results) > 1 else settings.plan
    counts = [(name, sum(run.name == name for run in runs)) for name in settings.recipes]
    total = len(settings.plan.seeds)
    lacking = [f"{name} has {n} of {counted(total, 'run')}" for name, n in counts if n < total]
    verdict = "A candidate has a verdict after its last run."
    note = f"Interrupted: {', '.join(lacking)}. {verdict}" if lacking else ""
    return dataclasses.replace(
        report,
        runs=tuple(runs),
        unfinished=tuple(name for name in settings.budgets if name not in results),
        notes=(note, *report.notes)[not note :],
    )


def _make_report(settings: Settings, results: Mapping[str, Trained]) -> _report.ValidationReport:
    """Compares the candidates of `results` with the reference."""
    reference = results[settings.plan.reference]
    names = [name for name in settings.budgets if name in results]
    for name in names:
        _check_data(reference.records, results[name].records)
    trained = [record for name in names for record in results[name].records]
    budgets, count = list(settings.budgets.values()), len(settings.budgets)
    metrics = _budget.choose_metrics(reference.records, trained, settings.directions, budgets)
    training = _budget.choose_training(reference.records, trained, budgets)
    candidates = [
        _compare_candidate(settings, reference, results[name], metrics, training) for name in names
    ]
    others = [each.reason for each in (*metrics[1:], training) if each.scale == "absolute"]
    reason = metrics[0].reason
    reason = " ".join([reason, *(each for each in dict.fromkeys(others) if each not in reason)])
    test, seeds = _TEST + (_CORRECTED.format(count) if count > 2 else ""), len(settings.plan.seeds)
    test += _UNSEEN.format(_RARE, counted(seeds, "run"), 100 * (1 - 1 / _RARE) ** seeds)
    return dataclasses.replace(
        settings.plan,
        metric=dataclasses.replace(metrics[0], reason=reason),
        test=test,
        candidates=tuple(candidates),
        runs=tuple(record for trained in results.values() for record in trained.records),
        notes=tuple(_notes(candidates, [metric.name for metric in metrics], reference)),
    )


def _check_finite(reference: Sequence[_rows.TrainingRecord]) -> None:
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
    candidates: Sequence[_rows.CandidateResult],
    metrics: Sequence[str],
    reference: Trained,
) -> Iterator[str]:
    """Yields the comparisons that were not made."""
    unknown = (note for audit in reference.audits for note in audit.notes)
    for note in dict.fromkeys(each for each in unknown if each.endswith(NOT_INSPECTED)):
        yield f"{note[0].upper()}{note[1:]}, compared or rounded."
    others = [name for name in reference.records[0].evaluations if name not in metrics]
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
            "as lax.custom_linear_solve."
        )


def _compare_candidate(
    settings: Settings,
    reference: Trained,
    candidate: Trained,
    metrics: Sequence[_rows.MetricChoice],
    scale: _rows.MetricChoice,
) -> _rows.CandidateResult:
    """Compares a candidate with the reference, and diagnoses a failure.

    Args:
      settings: the arguments of the validation.
      reference, candidate: their results.
      metrics: the metrics, the deciding one first.
      scale: scale of the training loss.
    """
    name, records = candidate.result.name, (reference.records, candidate.records)
    budget = settings.budgets[name]
    shared = (metrics, budget, scale, len(settings.budgets))
    checks, pairs, power = _compare.compare_metrics(*records, *shared)
    parts = [
        _compare_phase(number, reference, candidate, shared)
        for number in range(len(candidate.phases))
    ]
    # Each figure is that of the phase in which it is worst.
    figures = grouped((each for part in parts for each in part.result.checks), lambda x: x.name)
    checks += map(_compare.overall, figures.values())
    verdicts = [each for part in parts for each in part.result.phases]
    decisive, worst = _compare.overall(checks), _compare.overall(verdicts)
    worst_part = parts[verdicts.index(worst)]
    is_failed = decisive.verdict in (_rows.FAIL, _rows.DIFFERS)
    causes = diagnose(worst_part, budget.gradient) if is_failed else ()
    phases = verdicts if len(parts) > 1 else []
    where = worst.name if phases and decisive.verdict != _rows.PASS else ""
    return dataclasses.replace(
        candidate.result,
        recipe=settings.recipes[name].name,
        verdict=decisive.verdict,
        headline=_headline(name, where, decisive, causes),
        causes=causes,
        checks=tuple(checks),
        phases=tuple(phases),
        pairs=tuple(pairs),
        power=power,
        origin=worst_part.result.origin,
        training=_compare.compare_training(*records, scale),
    )


def _compare_phase(
    number: int,
    reference: Trained,
    candidate: Trained,
    shared: tuple[Sequence[_rows.MetricChoice], _budget.Budget, _rows.MetricChoice, int],
) -> Trained:
    """Compares one phase of a candidate with the same steps of the reference.

    Args:
      number: the phase.
      reference, candidate: the whole runs.
      shared: further arguments of `compare_metrics`.

    Returns:
      The runs of the candidate in this phase. Their result has the comparisons without an interval
      as `checks`, and the one that decides as its only item of `phases`.
    """
    (_, budget, scale, _), phase = shared, candidate.phases[number]
    first, second = (
        list(map(phase.record_of, each)) for each in (reference.records, candidate.records)
    )
    result = phase.differences_of(candidate.result)
    training = _compare.compare_training(first, second, scale)
    steps = (phase.stop - phase.start) * len(second)
    unit = scale.unit if scale.scale == "absolute" else 0.0
    figures = _compare.compare_figures(result.gradients, training, budget, steps, unit)
    decisive = _compare.overall([*_compare.compare_metrics(first, second, *shared)[0], *figures])
    result = dataclasses.replace(
        result,
        checks=tuple(figures),
        phases=(dataclasses.replace(decisive, name=phase.name),),
        origin=find_origin(result.modules),
        training=training,
    )
    audits = [candidate.audits[number]]
    return candidate._replace(records=second, result=result, phases=[phase], audits=audits)


def _headline(
    name: str, where: str, decisive: _rows.Comparison, causes: Sequence[_rows.Cause]
) -> str:
    figure = functools.partial(_rows.figure_text, scale=decisive.scale, sign=False)
    budget = f"budget {figure(decisive.budget)}"
    cause = f"in the phase {where}; " if where else ""
    cause += f"{causes[0].summary}; " if causes else ""
    if decisive.verdict == _rows.FAIL:
        excess = decisive.value - decisive.budget
        over = f", over it by {figure(excess)}" if np.isfinite(excess) else ""
        return f"{name} FAILS: {cause}{decisive.text}, {budget}{over}"
    if decisive.verdict == _rows.DIFFERS:
        is_other = decisive.name == "loss_error"
        reason = "another loss on the same parameters" if is_other else "better by more than that"
        return f"{name} DIFFERS: {cause}{decisive.text}, {budget}, {reason}"
    if decisive.verdict == _rows.INCONCLUSIVE:
        return f"{name} is INCONCLUSIVE: {cause}{decisive.text}, {budget}; use more seeds"
    return f"{name} passes: {decisive.text}, {budget}, margin {figure(decisive.margin)}"


def _check_data(
    reference: Sequence[_rows.TrainingRecord], candidate: Sequence[_rows.TrainingRecord]
) -> None:
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


class _Trainer:
    """Trains recipes, the reference first, and compares the others with it.

    `runs` are the records of the finished runs.
    """

    def __init__(
        self, make_run: _run.MakeRun, settings: Settings, on_run: OnRun, on_step: OnStep
    ) -> None:
        self.runs: list[_rows.TrainingRecord] = []
        self._make_run, self._settings = make_run, settings
        self._on_run, self._on_step = on_run, on_step
        # Of the reference: seed -> initial parameters.
        self._initial: dict[int, _probe.Leaves] = {}
        # Of the reference: compared step -> parameters before it, and measurements.
        self._steps: dict[int, tuple[_probe.Leaves, _probe.Probe]] = {}

    def train(self, name: str, recipe: _recipe.Recipe) -> Trained:
        """Trains all seeds of a recipe, one after another."""
        plan, finished = self._settings.plan, _finished(name, self._settings)
        is_reference, result = name == plan.reference, _rows.CandidateResult(name=name)
        phases = _train.phases_of(name, recipe, plan.steps)
        make = functools.partial(_train.make_runs, self._make_run, phases, plan.steps)
        runs = make(plan.seeds[0])
        first = runs[0]
        params = jax.eval_shape(first.params, first.arrays)
        audits = [
            _audit.audit(*runs[phase.start].audited, first.first, recipe=phase.recipe)
            for phase in phases
        ]
        known: dict[str, Callable[..., Any]] = {}  # hash -> jitted function of the first seed
        probes = {start: _probe.make_probe(run) for start, run in runs.items()}

        def compare(step: int, arrays: _core.PyTree, batch: _core.PyTree) -> None:
            nonlocal result
            run, probe = _train.at_step(runs, step), _train.at_step(probes, step)
            if is_reference:
                self._steps[step] = leaves_of(run.params(arrays)), probe(arrays, batch)
                return
            leaves, reference = self._steps[step]
            candidate = probe(run.with_params(arrays, leaves), batch)
            result = _probe.with_step(result, step, reference, candidate)

        def train_one(seed: int) -> _rows.TrainingRecord:
            is_first = seed == plan.seeds[0]
            own = runs if is_first else make(seed)
            current = own[0]
            params = current.params(current.arrays)
            reference = self._initial.setdefault(seed, leaves_of(params))
            check_same_params(reference, params, name, seed)
            self._on_run(f"{name}, seed {seed}")
            # Functions of another seed alone, which may contain large constants, are not kept.
            shared = known if is_first else dict(known)
            programs = {n: _train.program_of(run, shared) for n, run in own.items()}
            # The first steps of later phases belong to the program.
            traced = ", ".join(f"{n} " * (n > 0) + each.hash for n, each in programs.items())
            record, initial = finished.get(seed), f"{checksum(params):08x}"
            if record and (record.initial_checksum, record.program) == (initial, traced):
                for _ in range(plan.steps):
                    self._on_step()
                return record
            # Only the first seed is compared.
            on_compare = compare if is_first else lambda *_: None
            record = _train.train(name, seed, current, programs, plan, on_compare, self._on_step)
            return dataclasses.replace(record, initial_checksum=initial, program=traced)

        records = []
        for seed in plan.seeds:
            records.append(train_one(seed))
            self.runs.append(records[-1])
            _budget.check_metrics(
                records[-1], self._settings.directions, self._settings.budgets.values()
            )
        if records[0] is finished.get(plan.seeds[0]):
            result = self._settings.earlier[name]

        def repeat(step: int) -> _trials.Trial:
            current = _train.at_step(make(plan.seeds[0]), step)
            leaves, reference = self._steps[step]
            batch = as_arrays(next(itertools.islice(current.batches, step, None)))
            arrays = current.with_params(current.arrays, leaves)
            return _trials.repeat_step(current, arrays, batch, step, reference)

        lacks_masters = any(_core.is_16bit(leaf.dtype) for leaf in jax.tree.leaves(params))
        return Trained(records, result, phases, audits, lacks_masters, repeat)


def _finished(name: str, settings: Settings) -> dict[int, _rows.TrainingRecord]:
    """Returns the earlier runs of a recipe by seed.

    The gradients of the first seed are compared. It is among them if the earlier report has these
    comparisons; that of the reference, whose gradients no report has, is not.
    """
    earlier = settings.earlier
    has_verdict = any(each.name == name for each in earlier.candidates)
    is_compared = has_verdict and earlier.seeds[:1] == settings.plan.seeds[:1]
    runs = {run.seed: run for run in earlier.runs if run.name == name}
    return {n: run for n, run in runs.items() if n != settings.plan.seeds[0] or is_compared}


def planned_report(
    seeds: tuple[int, ...],
    steps: int,
    eval_every: int | None,
    compare_steps: Sequence[int] | None,
    recipes: Mapping[str, _recipe.Recipe],
) -> _report.ValidationReport:
    """Returns the report of a validation before its first run.

    Args:
      seeds: the seeds.
      steps: number of training steps.
      eval_every: steps between two evaluations; None: a tenth of the steps.
      compare_steps: numbers of updates before a comparison; None: 0, a tenth, all but one, and
        the first steps of phases.
      recipes: all recipes by name, the reference first.

    Raises:
      ValidationError: if a number, or the first step of a phase, is not within the run.
    """
    if not isinstance(steps, int) or steps < 1:
        raise ValidationError(f"steps={steps!r} is not a positive integer, such as steps=500.")
    every = max(1, steps // 10) if eval_every is None else eval_every
    if not isinstance(every, int) or every < 1:
        raise ValidationError(f"eval_every={eval_every!r} is not a positive integer.")
    if compare_steps is not None and not isinstance(compare_steps, Sequence):
        raise ValidationError(
            f"compare_steps={compare_steps!r} is not a list. Pass numbers of updates, such as "
            f"compare_steps=[0, {steps - 1}]."
        )
    phases = [phase for each in recipes.items() for phase in _train.phases_of(*each, steps)]
    starts = {phase.start for phase in phases}
    compared = {0, steps // 10, steps - 1} | starts if compare_steps is None else {*compare_steps}
    for step in compared:
        if not 0 <= step < steps:
            raise ValidationError(
                f"compare_steps={sorted(compared)}: {step} is not between 0 and {steps - 1}."
            )
    return _report.ValidationReport(
        reference=next(iter(recipes)),
        seeds=seeds,
        steps=steps,
        eval_steps=tuple(sorted({*range(0, steps, every), steps} | starts)),
        compare_steps=tuple(sorted(compared)),
    )
