"""Trains one recipe with one seed."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmp._core import _trees
from jaxmp._core._typing import Array, PyTree
from jaxmp._policies._recipe import Recipe
from jaxmp._tools.report._progress import OnStep
from jaxmp._tools.validate._phases import at_step, phases_of
from jaxmp._tools.validate._pure import PureRun, as_arrays, checksum, too_few_batches
from jaxmp._tools.validate._rows import TrainingRecord
from jaxmp._tools.validate._run import check_batch
from jaxmp.errors import ValidationError

# Called before step `n` with (n, arrays, batch), if `n` is a step to compare.
OnCompare = Callable[[int, PyTree, PyTree], None]

# Addresses of functions in the text of a jaxpr.
_ADDRESS = re.compile(r"0x[0-9a-f]+")
# Norm of a step that returns no gradients.
_NO_NORM = -1.0
_UNTRACEABLE = (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError)


class Schedule(NamedTuple):
    """Steps of a run: their number, and those at which it is evaluated and compared."""

    steps: int
    eval_steps: tuple[int, ...]
    compare_steps: tuple[int, ...]


def make_schedule(
    steps: int,
    eval_every: int | None,
    compare_steps: Sequence[int] | None,
    recipes: Mapping[str, Recipe],
) -> Schedule:
    """Returns the steps of a run.

    Args:
      steps: number of training steps.
      eval_every: steps between two evaluations; None: a tenth of the steps.
      compare_steps: numbers of updates before a comparison; None: 0, a tenth, all but one, and
        the first steps of phases.
      recipes: all recipes by name.

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
    phases = [phase for each in recipes.items() for phase in phases_of(*each, steps)]
    starts = {phase.start for phase in phases}
    compared = {0, steps // 10, steps - 1} | starts if compare_steps is None else {*compare_steps}
    for step in compared:
        if not 0 <= step < steps:
            raise ValidationError(
                f"compare_steps={sorted(compared)}: {step} is not between 0 and {steps - 1}."
            )
    evaluated = {*range(0, steps, every), steps} | starts
    return Schedule(steps, tuple(sorted(evaluated)), tuple(sorted(compared)))


class StepRow(NamedTuple):
    """Measurements of one step, or of all."""

    loss: Array | np.ndarray
    norm: Array | np.ndarray
    scale: Array | np.ndarray
    skipped: Array | np.ndarray


@dataclasses.dataclass
class CompiledRun:
    """Compiled step and evaluation of a recipe.

    Args:
      advance: (arrays, batch) -> (arrays, StepRow); donates the arrays.
      evaluate: arrays -> metrics.
    """

    advance: Callable[[PyTree, PyTree], tuple[PyTree, StepRow]]
    evaluate: Callable[[PyTree], dict[str, Array]]

    def with_evaluation(self, run: PureRun) -> CompiledRun:
        """Returns the program of a run with the same step and another evaluation."""
        return dataclasses.replace(self, evaluate=_traceable(run.evaluate, run.arrays))


def make_program(run: PureRun) -> CompiledRun:
    """Compiles the step of a run."""
    lowered = jax.jit(_advance(run), donate_argnums=0).lower(run.arrays, run.first)
    return CompiledRun(lowered.compile(), _traceable(run.evaluate, run.arrays))


def _advance(run: PureRun) -> Callable[[PyTree, PyTree], tuple[PyTree, StepRow]]:
    def advance(arrays: PyTree, batch: PyTree) -> tuple[PyTree, StepRow]:
        scale, before = run.scale(arrays), run.skipped(arrays)
        new, result = run.step(arrays, batch)
        norm = jnp.float32(_NO_NORM) if result.grads is None else global_norm(result.grads)
        return new, StepRow(result.loss, norm, scale, run.skipped(new) - before)

    return advance


def global_norm(tree: PyTree) -> Array:
    """Returns the norm of all floating-point leaves of a tree, summed in FP32."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if _trees.is_float(leaf)]
    squares = [jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in leaves]
    return jnp.sqrt(jnp.sum(jnp.stack(squares))) if squares else jnp.float32(0)


def _traceable(
    evaluate: Callable[[PyTree], dict[str, Array]], arrays: PyTree
) -> Callable[[PyTree], dict[str, Array]]:
    """Returns the jitted evaluation, or the evaluation itself if JAX cannot trace it."""
    try:
        jax.eval_shape(evaluate, arrays)
    except _UNTRACEABLE:
        return evaluate
    return jax.jit(evaluate)


class Hashes(NamedTuple):
    """Hashes of a traced run: seeds with equal ones share a compiled program.

    Args:
      step: hash of the step.
      evaluation: hash of the evaluation; "" if JAX cannot trace it.
    """

    step: str
    evaluation: str

    @classmethod
    def of(cls, run: PureRun) -> Hashes:
        """Returns the hashes of a run."""
        try:
            evaluation = _hash(run.evaluate, run.arrays)
        except _UNTRACEABLE:
            evaluation = ""
        return cls(_hash(run.step, run.arrays, run.first), evaluation)


def _hash(function: Callable[..., PyTree], *args: PyTree) -> str:
    """Returns a hash of a traced function, its constants, and the structure of its arguments."""
    closed = jax.make_jaxpr(function)(*args)
    text = _ADDRESS.sub("", str(closed.jaxpr))
    structure = _ADDRESS.sub("", str(jax.tree.structure(args)))
    constants = checksum(closed.consts)
    return hashlib.sha256(f"{text}\n{structure}\n{constants}".encode()).hexdigest()[:16]


def take_batches(run: PureRun, steps: int, name: str) -> Iterator[PyTree]:
    """Yields the first `steps` batches.

    Raises:
      ValidationError: if there are fewer.
    """
    count = 0
    for batch in itertools.islice(run.batches, steps):
        count += 1
        yield batch
    if count < steps:
        raise too_few_batches(name, count, steps)


# ---------------------------------------------------------------------------
# Training
# ---------------------------------------------------------------------------


def train(
    name: str,
    seed: int,
    run: PureRun,
    programs: Mapping[int, CompiledRun],
    schedule: Schedule,
    *,
    on_compare: OnCompare,
    on_step: OnStep,
) -> TrainingRecord:
    """Trains a run.

    Args:
      name: name of the recipe.
      seed: the seed.
      run: the run; that of the first phase of a recipe.
      programs: first step of each phase -> its compiled program.
      schedule: the steps.
      on_compare: called before a step of `schedule.compare_steps`.
      on_step: called after each step.
    """
    arrays = _trees.owned(run.arrays)
    data, initial = 0, checksum(run.params(run.arrays))
    rows: list[StepRow] = []
    evaluations: list[dict[str, Any]] = []
    # A state is evaluated by the phase that has trained it.
    evaluate = lambda step, arrays: at_step(programs, max(step - 1, 0)).evaluate(arrays)
    for step, batch in enumerate(take_batches(run, schedule.steps, f"{name}, seed {seed}")):
        if step in schedule.eval_steps:
            evaluations.append(jax.device_get(evaluate(step, arrays)))
        data = checksum(batch, data)
        loaded = as_arrays(batch)
        check_batch(run.first, loaded, f"{name}, seed {seed},", step)
        if step in schedule.compare_steps:
            on_compare(step, arrays, loaded)
        arrays, row = at_step(programs, step).advance(arrays, loaded)
        rows.append(row)
        on_step()
    evaluations.append(jax.device_get(evaluate(schedule.steps, arrays)))
    return _record(
        StepRow(*(np.stack(c) for c in zip(*jax.device_get(rows), strict=True))),
        evaluations,
        name=name,
        seed=seed,
        eval_steps=schedule.eval_steps,
        initial_checksum=f"{initial:08x}",
        data_checksum=f"{data:08x}",
    )


def _record(columns: StepRow, evaluations: list[dict[str, Any]], **fields: Any) -> TrainingRecord:
    """Returns the record of a seed from its measurements and other fields."""
    floats = lambda values: tuple(float(value) for value in values)
    has_gradients = not (columns.norm == _NO_NORM).all()
    return TrainingRecord(
        losses=floats(columns.loss),
        gradient_norms=floats(columns.norm) if has_gradients else (),
        loss_scales=floats(columns.scale),
        skipped=tuple(int(step) for step in np.flatnonzero(columns.skipped)),
        evaluations={name: floats(row[name] for row in evaluations) for name in evaluations[0]},
        **fields,
    )
