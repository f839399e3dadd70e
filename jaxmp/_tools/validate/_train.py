"""Trains one recipe with one seed, in the phases of the recipe."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxmp import _core
from jaxmp._policies import _recipe
from jaxmp._tools.report import _progress
from jaxmp._tools.validate import _pure, _report, _rows, _run
from jaxmp.errors import ValidationError

T = TypeVar("T")


class PhaseSteps(NamedTuple):
    """Steps in which a run trains with a recipe without phases, from `start` to before `stop`."""

    name: str
    recipe: _recipe.Recipe
    start: int
    stop: int

    def record_of(self, record: _rows.TrainingRecord) -> _rows.TrainingRecord:
        """Returns a record of the steps of the phase, with the evaluations until its end."""
        start, stop, steps = self.start, self.stop, slice(self.start, self.stop)
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

    def differences_of(self, result: _rows.CandidateResult) -> _rows.CandidateResult:
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
    make_run: _run.MakeRun, phases: Sequence[PhaseSteps], steps: int, seed: int
) -> dict[int, _pure.PureRun]:
    """Returns the run of each phase by its first step. All phases have the state of the first one.

    Raises:
      ValidationError: if they have states of other shapes.
    """
    runs = {}
    for phase in phases:
        call = f"make_run({phase.name!r}, {seed})"
        runs[phase.start] = _pure.as_pure(make_run(phase.recipe, seed), call, steps)
        difference = _run.first_difference(runs[0].arrays, runs[phase.start].arrays)
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


# ---------------------------------------------------------------------------
# Programs
# ---------------------------------------------------------------------------


# Called before step `n` with (n, arrays, batch), if `n` is a step to compare.
OnCompare = Callable[[int, _core.PyTree, _core.PyTree], None]

# Addresses of functions in the text of a jaxpr.
_ADDRESS = re.compile(r"0x[0-9a-f]+")
# Norm of a step that returns no gradients.
_NO_NORM = -1.0
_UNTRACEABLE = (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError)


# Loss, norm of the gradient, loss scale, and number of skipped updates of one step.
StepRow = tuple[_core.Array, _core.Array, _core.Array, _core.Array]


class Program(NamedTuple):
    """Program of a run, compiled when it is called first.

    Args:
      hash: hash of the traced step.
      advance: (arrays, batch) -> (arrays, measurements); it donates the arrays.
      evaluate: arrays -> metrics.
    """

    hash: str
    advance: Callable[[_core.PyTree, _core.PyTree], tuple[_core.PyTree, StepRow]]
    evaluate: Callable[[_core.PyTree], dict[str, _core.Array]]


def program_of(run: _pure.PureRun, known: dict[str, Callable[..., Any]]) -> Program:
    """Returns the program of a run, which runs with the same traced functions share.

    Args:
      run: the run.
      known: hash of a traced step or evaluation -> jitted function; those of the run are added.
    """

    def advance(arrays: _core.PyTree, batch: _core.PyTree) -> tuple[_core.PyTree, StepRow]:
        before = run.opt_state(arrays)
        new, result = run.step(arrays, batch)
        skipped = _pure.skipped_of(run.opt_state(new)) - _pure.skipped_of(before)
        norm = jnp.float32(_NO_NORM) if result.grads is None else global_norm(result.grads)
        return new, (result.loss, norm, _pure.loss_scale_of(before), skipped)

    try:
        evaluate = known.setdefault(_hash(run.evaluate, run.arrays), jax.jit(run.evaluate))
    except _UNTRACEABLE:
        evaluate = run.evaluate
    step = _hash(run.step, run.arrays, run.first)
    return Program(step, known.setdefault(step, jax.jit(advance, donate_argnums=0)), evaluate)


def global_norm(tree: _core.PyTree) -> _core.Array:
    """Returns the norm of all floating-point leaves of a tree, summed in FP32."""
    floats = [leaf.astype(jnp.float32) for leaf in jax.tree.leaves(tree) if _core.is_float(leaf)]
    return jnp.asarray(optax.tree.norm(floats), jnp.float32)


def _hash(function: Callable[..., _core.PyTree], *args: _core.PyTree) -> str:
    """Returns a hash of a traced function, its constants, and the structure of its arguments."""
    closed = jax.make_jaxpr(function)(*args)
    text = _ADDRESS.sub("", str(closed.jaxpr))
    structure = _ADDRESS.sub("", str(jax.tree.structure(args)))
    constants = _pure.checksum(closed.consts)
    return hashlib.sha256(f"{text}\n{structure}\n{constants}".encode()).hexdigest()[:16]


# ---------------------------------------------------------------------------
# Training
# ---------------------------------------------------------------------------


def train(
    name: str,
    seed: int,
    run: _pure.PureRun,
    programs: Mapping[int, Program],
    plan: _report.ValidationReport,
    on_compare: OnCompare,
    on_step: _progress.OnStep,
) -> _rows.TrainingRecord:
    """Trains a run.

    Args:
      name: name of the recipe.
      seed: the seed.
      run: the run; that of the first phase of a recipe.
      programs: first step of each phase -> its programs.
      plan: report with the steps.
      on_compare: called before a step of `plan.compare_steps`.
      on_step: called after each step.

    Raises:
      ValidationError: if there are fewer batches than steps, or a batch has another shape.
    """
    arrays, data, steps = _core.owned(run.arrays), 0, plan.steps
    rows: list[StepRow] = []
    evaluations: list[dict[str, Any]] = []
    # A state is evaluated by the phase that has trained it.
    evaluate = lambda step, arrays: at_step(programs, max(step - 1, 0)).evaluate(arrays)
    for step, batch in enumerate(itertools.islice(run.batches, steps)):
        if step in plan.eval_steps:
            evaluations.append(jax.device_get(evaluate(step, arrays)))
        data = _pure.checksum(batch, data)
        loaded = _pure.as_arrays(batch)
        if path := _run.first_difference(run.first, loaded):
            raise ValidationError(
                f"Batch {step} of {name}, seed {seed}, differs from batch 0 in {path}. All batches "
                "need the same structure, shapes and dtypes: leave out the last batch if it is "
                "smaller."
            )
        if step in plan.compare_steps:
            on_compare(step, arrays, loaded)
        arrays, row = at_step(programs, step).advance(arrays, loaded)
        rows.append(row)
        on_step()
    if len(rows) < steps:
        raise _pure.too_few_batches(f"{name}, seed {seed}", len(rows), steps)
    evaluations.append(jax.device_get(evaluate(steps, arrays)))
    losses, norms, scales, skipped = map(np.stack, zip(*jax.device_get(rows), strict=True))
    floats = lambda values: tuple(float(value) for value in values)
    return _rows.TrainingRecord(
        name=name,
        seed=seed,
        losses=floats(losses),
        gradient_norms=() if (norms == _NO_NORM).all() else floats(norms),
        loss_scales=floats(scales),
        skipped=tuple(int(step) for step in np.flatnonzero(skipped)),
        eval_steps=plan.eval_steps,
        evaluations={name: floats(row[name] for row in evaluations) for name in evaluations[0]},
        data_checksum=f"{data:08x}",
    )
