"""Phases of a recipe in a validation: their steps, and the parts of records that belong to each."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

from jaxmp._policies import _recipe
from jaxmp._tools.validate._pure import PureRun, as_pure
from jaxmp._tools.validate._rows import CandidateResult, TrainingRecord
from jaxmp._tools.validate._run import MakeRun, first_difference
from jaxmp.errors import ValidationError

T = TypeVar("T")


class PhaseSteps(NamedTuple):
    """Steps in which a run trains with a recipe without phases, from `start` to before `stop`."""

    name: str
    recipe: _recipe.Recipe
    start: int
    stop: int

    def record_of(self, record: TrainingRecord) -> TrainingRecord:
        """Returns a record of the steps of the phase, with the evaluations until its end."""
        steps, (start, stop) = slice(self.start, self.stop), self[2:]
        count = sum(step <= stop for step in record.eval_steps)
        return dataclasses.replace(
            record,
            losses=record.losses[steps],
            gradient_norms=record.gradient_norms[steps],
            loss_scales=record.loss_scales[steps],
            skipped=tuple(n - start for n in record.skipped if start <= n < stop),
            eval_steps=record.eval_steps[:count],
            evaluations={name: values[:count] for name, values in record.evaluations.items()},
        )

    def differences_of(self, result: CandidateResult) -> CandidateResult:
        """Returns a result with its differences at the compared steps of the phase."""
        is_own = lambda row: self.start <= row.step < self.stop
        rows = {name: getattr(result, name) for name in ("gradients", "modules", "patterns")}
        return dataclasses.replace(result, **{n: tuple(filter(is_own, rows[n])) for n in rows})


def phases_of(name: str, recipe: _recipe.Recipe, steps: int) -> list[PhaseSteps]:
    """Returns the phases of a run; one phase for a recipe without phases.

    Args:
      name: name of the reference or candidate; that of a phase is such as "mine@900".
      recipe: its recipe.
      steps: number of steps of the run.

    Raises:
      ValidationError: if the run ends before a phase begins.
    """
    starts = [0, *(phase.from_step for phase in recipe.phases)]
    if starts[-1] >= steps:
        earlier = [
            {**phase.settings(), "rules": list(phase.rules), "from_step": number}
            for number, phase in enumerate(recipe.phases, start=max(1, steps // 2))
        ]
        raise ValidationError(
            f"The recipe {name!r} has a phase from step {starts[-1]}, and validate trains for "
            f"{steps} steps. Pass steps={starts[-1] + 1} or more, or move the phase:\n"
            f"    recipe = recipe.replace(phases={earlier})"
        )
    stops = [*starts[1:], steps]
    names = [name] if len(starts) == 1 else [f"{name}@{start}" for start in starts]
    return [
        PhaseSteps(*each) for each in zip(names, recipe.split_phases(), starts, stops, strict=True)
    ]


def make_runs(
    make_run: MakeRun, phases: Sequence[PhaseSteps], steps: int, seed: int
) -> dict[int, PureRun]:
    """Returns the run of each phase by its first step. All phases have the state of the first one.

    Raises:
      ValidationError: if they have states of other shapes.
    """
    runs = {}
    for phase in phases:
        call = f"make_run({phase.name!r}, {seed})"
        runs[phase.start] = as_pure(make_run(phase.recipe, seed), call, steps)
        difference = first_difference(runs[0].arrays, runs[phase.start].arrays)
        if difference is not None:
            raise ValidationError(
                f"{call} returned another state than for {phases[0].name!r}: {difference}. All "
                "phases have one train state. Make it from the recipe alone:\n"
                "    variables = recipe.wrap(model).init(jax.random.key(seed), x)"
            )
    return runs


def at_step(phases: Mapping[int, T], step: int) -> T:
    """Returns the value of the phase of a step, from the values by the first step of each."""
    return phases[max(start for start in phases if start <= step)]
