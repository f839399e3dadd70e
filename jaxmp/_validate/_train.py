"""Trains one recipe with one seed, or with several seeds in one vmapped program."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmp._core import _trees
from jaxmp._core._typing import Array, PyTree
from jaxmp._validate._check_run import check_batch
from jaxmp._validate._pure import PureRun, as_arrays, checksum, too_few_batches
from jaxmp._validate._rows import TrainingRecord

# Called before step `n` with (seed index, n, arrays, batch), if `n` is a step to compare.
OnCompare = Callable[[int, int, PyTree, PyTree], None]
# Called after each step with the number of seeds that made it.
OnStep = Callable[[int], None]

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


class StepRow(NamedTuple):
    """Measurements of one step; arrays with a leading axis of seeds if the program is vmapped."""

    loss: Array | np.ndarray
    norm: Array | np.ndarray
    scale: Array | np.ndarray
    skipped: Array | np.ndarray


@dataclasses.dataclass
class Program:
    """Compiled step and evaluation of a recipe.

    Args:
      advance: (arrays, batch) -> (arrays, StepRow); donates the arrays.
      evaluate: arrays -> metrics.
      norm: arrays -> norm of all parameters.
      compiled: the executable of `advance`, for its size.
    """

    advance: Callable[[PyTree, PyTree], tuple[PyTree, StepRow]]
    evaluate: Callable[[PyTree], dict[str, Array]]
    norm: Callable[[PyTree], Array]
    compiled: Any

    def with_evaluation(self, run: PureRun) -> Program:
        """Returns the program of a run with the same step and another evaluation."""
        return dataclasses.replace(self, evaluate=_traceable(run.evaluate, run.arrays))


def make_program(run: PureRun, arrays: PyTree, batch: PyTree, seeds: int | None) -> Program:
    """Compiles the step of a run.

    Args:
      run: the run whose step is compiled.
      arrays: its state, or the stacked states of several seeds.
      batch: its first batch, or the stacked batches.
      seeds: None for one state; otherwise the step is vmapped over a leading axis.
    """
    advance, evaluate = _advance(run), run.evaluate
    norm = lambda arrays: global_norm(run.params(arrays))
    if seeds is not None:
        advance, evaluate, norm = jax.vmap(advance), jax.vmap(evaluate), jax.vmap(norm)
    compiled = jax.jit(advance, donate_argnums=0).lower(arrays, batch).compile()
    return Program(compiled, _traceable(evaluate, arrays), jax.jit(norm), compiled)


def _advance(run: PureRun) -> Callable[[PyTree, PyTree], tuple[PyTree, StepRow]]:
    def advance(arrays: PyTree, batch: PyTree) -> tuple[PyTree, StepRow]:
        scale, before = run.scale(arrays), run.skipped(arrays)
        new, result = run.step(arrays, batch)
        norm = jnp.float32(_NO_NORM) if result.grads is None else global_norm(result.grads)
        return new, StepRow(result.loss, norm, scale, run.skipped(new) - before)

    return advance


def global_norm(tree: PyTree) -> Array:
    """Returns the norm of all floating-point leaves of a tree, summed in FP32."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if _trees.is_castable(leaf, True)]
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


class Fingerprint(NamedTuple):
    """Hashes of what the results of a run depend on.

    Args:
      step: hash of the traced step: runs with equal hashes can share a compiled step.
      evaluation: hash of the traced evaluation; "" if JAX cannot trace it.
      parameters: checksum of the initial parameters.
      batch: checksum of the first batch.
    """

    step: str
    evaluation: str
    parameters: int
    batch: int

    @classmethod
    def of(cls, run: PureRun) -> Fingerprint:
        """Returns the fingerprint of a run."""
        try:
            evaluation = _hash(run.evaluate, run.arrays)
        except _UNTRACEABLE:
            evaluation = ""
        return cls(
            step=_hash(run.step, run.arrays, run.first),
            evaluation=evaluation,
            parameters=checksum(run.params(run.arrays)),
            batch=checksum(run.first),
        )

    def has_evaluation_of(self, other: Fingerprint) -> bool:
        """Returns True if both evaluations are known to be the same."""
        return self.evaluation == other.evaluation != ""


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
    seeds: Sequence[int],
    runs: Sequence[PureRun],
    program: Program,
    schedule: Schedule,
    *,
    on_compare: OnCompare,
    on_step: OnStep,
) -> list[TrainingRecord]:
    """Trains all runs, in one vmapped program if there are several.

    Args:
      name: name of the recipe.
      seeds: the seeds.
      runs: a run for each seed.
      program: the compiled program; vmapped if there are several runs.
      schedule: the steps.
      on_compare: called before a step of `schedule.compare_steps` with the first run's state.
      on_step: called after each step.

    Returns:
      A record for each seed.
    """
    start, excluded = time.perf_counter(), 0.0
    stacked = len(runs) > 1
    join = stack if stacked else (lambda trees: trees[0])
    arrays = join([_trees.owned(run.arrays) for run in runs])
    sums, initial = [0] * len(runs), [checksum(run.params(run.arrays)) for run in runs]
    rows: list[StepRow] = []
    evaluations: list[dict[str, Any]] = []
    norms: list[Any] = []

    def evaluate() -> None:
        evaluations.append(jax.device_get(program.evaluate(arrays)))
        norms.append(jax.device_get(program.norm(arrays)))

    streams = [
        take_batches(run, schedule.steps, f"{name}, seed {s}")
        for run, s in zip(runs, seeds, strict=True)
    ]
    for step, batches in enumerate(zip(*streams, strict=True)):
        if step in schedule.eval_steps:
            evaluate()
        sums = [checksum(batch, start) for batch, start in zip(batches, sums, strict=True)]
        loaded = [as_arrays(each) for each in batches]
        for seed, run, each in zip(seeds, runs, loaded, strict=True):
            check_batch(run.first, each, f"{name}, seed {seed},", step)
        batch = join(loaded)
        if step in schedule.compare_steps:
            paused = time.perf_counter()
            pick = (lambda tree: jax.tree.map(lambda x: x[0], tree)) if stacked else (lambda x: x)
            on_compare(0, step, pick(arrays), pick(batch))
            excluded += time.perf_counter() - paused
        arrays, row = program.advance(arrays, batch)
        rows.append(row)
        on_step(len(runs))
    evaluate()
    seconds = time.perf_counter() - start - excluded
    columns = StepRow(*(np.stack(c) for c in zip(*jax.device_get(rows), strict=True)))
    of_seed = (lambda x, index: np.asarray(x)[..., index]) if stacked else (lambda x, _: x)
    return [
        _record(
            *jax.tree.map(lambda x, n=index: of_seed(x, n), (columns, evaluations, norms)),
            name=name,
            seed=seed,
            eval_steps=schedule.eval_steps,
            initial_checksum=f"{initial[index]:08x}",
            data_checksum=f"{sums[index]:08x}",
            seconds=seconds / len(runs),
        )
        for index, seed in enumerate(seeds)
    ]


def stack(trees: list[PyTree]) -> PyTree:
    """Stacks the arrays of several trees."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def _record(
    columns: StepRow, evaluations: list[dict[str, Any]], norms: list[Any], **fields: Any
) -> TrainingRecord:
    """Returns the record of a seed from its measurements and other fields."""
    floats = lambda values: tuple(float(value) for value in values)
    has_gradients = not (columns.norm == _NO_NORM).all()
    return TrainingRecord(
        losses=floats(columns.loss),
        gradient_norms=floats(columns.norm) if has_gradients else (),
        loss_scales=floats(columns.scale),
        skipped=tuple(int(step) for step in np.flatnonzero(columns.skipped)),
        evaluations={name: floats(row[name] for row in evaluations) for name in evaluations[0]},
        weight_norms=floats(norms),
        **fields,
    )
