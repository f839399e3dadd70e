"""Paired runs, statistics, resume, baselines and the command of a validation."""

import dataclasses
import gc
import json
import math
import re
import sys
import weakref
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from scipy import stats

import jaxmp
from grids import EXPENSIVE
from jaxmp import cli
from jaxmp._validate import _statistics
from jaxmp._validate._budget import choose_metric, resolve_budgets
from jaxmp._validate._compare import compare_metrics
from jaxmp._validate._probe import difference
from jaxmp._validate._rows import MetricChoice, TrainingRecord
from jaxmp._validate._store import Store
from jaxmp.testing import assert_equivalent, equivalent  # noqa: F401

STEPS = 20


# The defaults of JAX, as users of Flax and optax have them.
pytestmark = pytest.mark.usefixtures("standard_promotion", "rank_promotion")


def data(seed, count=STEPS):
    return np.random.default_rng(seed).normal(size=(count, 16, 8)).astype("float32")


HELD_OUT = [*data(99, 2)]


def squared_error(model, x):
    return jnp.mean((model(x) - jnp.sin(x[..., :4])) ** 2)


class Perceptron(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(4, name="out")(nn.tanh(nn.Dense(16, name="hidden")(x)))


class NnxPerceptron(nnx.Module):
    def __init__(self, seed):
        self.hidden = nnx.Linear(8, 16, rngs=nnx.Rngs(seed))
        self.out = nnx.Linear(16, 4, rngs=nnx.Rngs(seed + 100))

    def __call__(self, x):
        return self.out(nnx.tanh(self.hidden(x)))


def run(model=None, candidates=("bf16",), **options):
    defaults = dict(
        seeds=2,
        steps=STEPS,
        compare_steps=[0, 5],
        loss_fn=squared_error,
        batches=data,
        optimizer=optax.adam(1e-3),
        held_out=HELD_OUT,
    )
    return jaxmp.validate(model or Perceptron(), candidates, **{**defaults, **options})


@pytest.fixture(scope="module")
def report():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return run()


# ---------------------------------------------------------------------------
# Report
# ---------------------------------------------------------------------------


def test_a_healthy_recipe_passes_first_line_first(report):
    line = str(report).split("\n")[0]
    assert line == report["bf16"].headline
    assert line.startswith("bf16 passes: held-out loss ")
    assert report.ok
    report.check()


def test_records_have_an_item_per_step_and_evaluation(report):
    assert [(run.name, run.seed) for run in report.runs] == [
        ("fp32", 0),
        ("fp32", 1),
        ("bf16", 0),
        ("bf16", 1),
    ]
    for record in report.runs:
        assert len(record.losses) == len(record.gradient_norms) == len(record.loss_scales) == STEPS
        assert record.eval_steps == report.eval_steps == (*range(0, STEPS, 2), STEPS)
        assert len(record.evaluations["loss"]) == len(record.weight_norms) == len(report.eval_steps)
        assert min(record.gradient_norms) > 0


def test_differences_have_a_sign_and_errors_none(report):
    rows = [re.split(r" {2,}", line.strip()) for line in str(report).splitlines()]
    values = {row[1]: row[2] for row in rows if row[0] == "bf16" and len(row) > 3}
    assert values["held-out loss"][0] in "+-"
    assert values["gradient error"][0].isdigit()


def test_comparisons_are_paired(report):
    first, second, third, fourth = report.runs
    assert first.data_checksum == third.data_checksum != second.data_checksum
    assert second.data_checksum == fourth.data_checksum
    assert first.initial_checksum == third.initial_checksum != second.initial_checksum
    pair = report["bf16"].pairs[1]
    assert pair.difference == math.log(pair.candidate / pair.reference)
    assert pair.reference == second.evaluations["loss"][-1]


def test_gradients_are_those_of_the_same_parameters(report):
    """bfloat16 has 8 bits, so that errors on the same parameters are below a percent."""
    assert [row.step for row in report["bf16"].gradients] == [0, 5]
    for row in report["bf16"].gradients:
        assert 1e-4 < row.error < 0.02
        assert row.cosine == pytest.approx(1 - row.error**2 / 2, abs=1e-4)
    modules = {row.module: row for row in report["bf16"].modules if row.step == 0}
    assert [module for module, row in modules.items() if row.gradient_error] == ["hidden", "out"]
    assert modules["hidden"].order < modules["out"].order
    assert 1e-4 < modules["hidden"].activation_error < 0.01


def test_json_round_trip(report):
    assert jaxmp.ValidationReport.from_json(report.to_json()) == report
    broken = dataclasses.replace(
        report.runs[0], losses=(1.0, math.inf), loss_scales=(-math.inf, 2.0)
    )
    changed = dataclasses.replace(report, runs=(broken,))
    assert jaxmp.ValidationReport.from_json(changed.to_json()) == changed
    text = report.to_json().replace('"schema_version": 1', '"schema_version": 99')
    with pytest.raises(jaxmp.ValidationError, match=r"its schema is \('jaxmp.validation', 99\)"):
        jaxmp.ValidationReport.from_json(text)
    with pytest.raises(jaxmp.ValidationError, match="no candidate 'fp8'; it has 'bf16'"):
        report["fp8"]


@EXPENSIVE
def test_nnx_gives_the_same_kind_of_report():
    report = run(NnxPerceptron, seeds=1)
    assert report["bf16"].verdict == "pass"
    assert "one seed" in report["bf16"].power.text
    modules = [row.module for row in report["bf16"].modules if row.gradient_error]
    assert modules == ["hidden", "out"] * 2
    assert all(row.activation_error for row in report["bf16"].modules if row.module == "hidden")


class NnxDropout(nnx.Module):
    def __init__(self, rngs):
        self.out = nnx.Linear(8, 4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.out(x))


@EXPENSIVE
def test_the_held_out_loss_of_nnx_has_no_dropout():
    report = run(lambda seed: NnxDropout(nnx.Rngs(seed)), seeds=1, steps=1, compare_steps=[0])
    model = NnxDropout(nnx.Rngs(0))
    expected = np.mean([squared_error(model.out, x) for x in HELD_OUT])
    np.testing.assert_allclose(report.runs[0].evaluations["loss"][0], expected, rtol=1e-5)
    assert abs(np.mean([squared_error(model, x) for x in HELD_OUT]) - expected) > 0.1 * expected


# ---------------------------------------------------------------------------
# Resume, seeds in one program
# ---------------------------------------------------------------------------


def test_a_stopped_validation_resumes(report, tmp_path):
    made = []

    def batches(seed, stop_at):
        made.append(seed)
        number = len(made)
        for step, batch in enumerate(data(seed)):
            if number == 6 and step == stop_at:  # the candidate's second seed
                raise KeyboardInterrupt
            yield batch

    with pytest.raises(KeyboardInterrupt):
        run(batches=lambda seed: batches(seed, 7), directory=tmp_path)
    files = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert files == ["bf16.0.json", "fp32.0.json", "fp32.1.json"]
    resumed = run(directory=tmp_path)
    strip = lambda report: [dataclasses.replace(run, seconds=0.0) for run in report.runs]
    assert strip(resumed) == strip(report)
    assert resumed.candidates == report.candidates
    with pytest.raises(jaxmp.ValidationError, match=r"its seeds is \[0, 1\], and now \[0, 1, 2\]"):
        run(directory=tmp_path, seeds=3)
    with pytest.raises(jaxmp.ValidationError, match=r"The training step of 'fp32' changed since"):
        run(directory=tmp_path, optimizer=optax.adam(2e-3))
    with pytest.raises(jaxmp.ValidationError, match=r"The evaluation of 'fp32' changed since"):
        run(directory=tmp_path, held_out=[2 * batch for batch in HELD_OUT])
    with pytest.raises(jaxmp.ValidationError, match=r"The first batch of 'fp32' changed since"):
        run(directory=tmp_path, batches=lambda seed: data(seed + 5))
    changed = {"step": "", "evaluation": "", "parameters": 1, "batch": 2}
    store = Store(None, {})
    store.save_record(report.runs[0], changed)
    assert store.record("fp32", 0, changed) == report.runs[0]
    with pytest.raises(jaxmp.ValidationError, match="The initial parameters and the first batch"):
        store.record("fp32", 0, changed | {"parameters": 3, "batch": 4})


@EXPENSIVE
@pytest.mark.parametrize("vectorize", [False, True])
def test_an_evaluation_that_depends_on_the_seed_is_that_of_its_seed(vectorize):
    def make(recipe, seed):
        run = make_run(recipe, seed)
        return dataclasses.replace(run, evaluate=lambda state: run.evaluate(state) * 0 + seed + 1)

    report = jaxmp.validate(make, ["bf16"], steps=2, seeds=[3, 6], vectorize=vectorize)
    assert [run.evaluations["loss"][-1] for run in report.runs] == [4, 7, 4, 7]


def test_states_of_few_seeds_are_in_memory_at_once():
    made = []
    most = 0

    def make_run(recipe, seed):
        nonlocal most
        state = {"params": jnp.zeros(4)}
        step = lambda state, batch: (state, {"loss": jnp.sum(batch)})
        evaluate = lambda state: jnp.sum(state["params"])
        new = jaxmp.TrainingRun(state=state, step=step, batches=[*data(0)], evaluate=evaluate)
        made.append(weakref.ref(new))
        gc.collect()
        most = max(most, sum(run() is not None for run in made))
        return new

    jaxmp.validate(make_run, ["bf16"], seeds=5, steps=2, vectorize=False)
    # That of the first seed, which defines the program, and that of the current seed; those of the
    # reference and of a candidate are not in memory together.
    assert most == 2


@EXPENSIVE
def test_seeds_in_one_program_give_the_same_numbers(report):
    together = run(vectorize=True)
    for first, second in zip(together["bf16"].gradients, report["bf16"].gradients, strict=True):
        np.testing.assert_allclose(
            dataclasses.astuple(first), dataclasses.astuple(second), rtol=1e-4, atol=1e-6
        )
    for first, second in zip(report.runs, together.runs, strict=True):
        assert first.data_checksum == second.data_checksum
        np.testing.assert_allclose(first.losses, second.losses, rtol=1e-3)
        np.testing.assert_allclose(first.evaluations["loss"], second.evaluations["loss"], rtol=1e-3)


# ---------------------------------------------------------------------------
# Statistics and metrics
# ---------------------------------------------------------------------------


def test_the_interval_is_that_of_a_t_test():
    values = np.random.default_rng(0).normal(size=5)
    interval = _statistics.paired_interval(values)
    expected = stats.ttest_1samp(values, 0).confidence_interval(0.9)
    np.testing.assert_allclose([interval.low, interval.high], expected)


def test_power_agrees_with_simulation():
    deviation, budget = 0.004, 0.005
    seeds = _statistics.seeds_needed(deviation, budget)
    rng = np.random.default_rng(1)

    def share(verdict, shift, count):
        samples = rng.normal(shift, deviation, size=(2000, count))
        verdicts = [
            _statistics.judge_interval(_statistics.paired_interval(row), budget) for row in samples
        ]
        return np.mean(np.array(verdicts) == verdict)

    assert share("pass", 0.0, seeds) >= 0.77
    assert share("pass", 0.0, seeds - 1) < 0.8
    excess = _statistics.detectable_excess(deviation, seeds)
    assert share("fail", budget + excess, seeds) == pytest.approx(0.8, abs=0.03)
    # A difference as large as the budget fails, or passes, in 5 % of all cases.
    assert share("fail", budget, seeds) == pytest.approx(0.05, abs=0.015)


def records(name, finals, accuracy=None, first=2.0):
    evaluations = [{"loss": (first, final)} for final in finals]
    if accuracy is not None:
        evaluations = [{**each, "accuracy": (0.1, accuracy)} for each in evaluations]
    return [
        TrainingRecord(
            name=name,
            seed=seed,
            losses=(2.0, each["loss"][-1]),
            evaluations=each,
            eval_steps=(0, 1),
        )
        for seed, each in enumerate(evaluations)
    ]


@pytest.mark.parametrize(("shift", "verdict"), [(0.0, "pass"), (0.01, "fail")])
def test_a_planted_difference_is_detected_through_the_spread_of_seeds(shift, verdict):
    """Seeds differ by 2 %, and the recipes by 0 or 1 % with a deviation of 0.1 %."""
    budget = resolve_budgets(None, {"bf16": jaxmp.load_recipe("bf16")})["bf16"]
    rng, verdicts = np.random.default_rng(2), []
    for _ in range(20):
        reference = 1.5 * np.exp(rng.normal(0, 0.02, 3))
        candidate = reference * np.exp(rng.normal(shift, 0.001, 3))
        checks, _, power = compare_metrics(
            records("fp32", reference), records("bf16", candidate), MetricChoice(), budget
        )
        verdicts.append(checks[0].verdict)
        assert power.unpaired_deviation > 3 * power.deviation
    assert verdicts.count(verdict) >= 19


def test_a_small_loss_is_judged_by_accuracy_and_absolute_loss():
    reference = records("fp32", [0.030, 0.032, 0.031], accuracy=0.99)
    metric = choose_metric(reference)
    assert (metric.name, metric.scale) == ("accuracy", "absolute")
    assert "from 2 to 0.031" in metric.reason
    budget = resolve_budgets(None, {"bf16": jaxmp.load_recipe("bf16")})["bf16"]
    candidate = records("bf16", [0.032, 0.034, 0.033], accuracy=0.988)
    checks, _, _ = compare_metrics(reference, candidate, metric, budget)
    assert [(check.name, check.verdict) for check in checks] == [
        ("held_out_accuracy", "pass"),
        ("held_out_loss", "pass"),
        ("final_loss", "pass"),
    ]
    assert checks[0].value == pytest.approx(0.002)
    worse, _, _ = compare_metrics(
        reference, records("bf16", [0.03, 0.032, 0.031], accuracy=0.9), metric, budget
    )
    assert worse[0].verdict == "fail"
    assert choose_metric(records("fp32", [1.5, 1.6])).scale == "relative"


def test_a_mean_within_the_rounding_of_fp32_metrics_is_zero():
    """Two accuracies differ by one image of 450 in both directions, rounded to FP32."""
    reference, candidate = (
        [
            dataclasses.replace(
                record, evaluations={"accuracy": (0.1, float(np.float32(count / 450)))}
            )
            for record, count in zip(records("x", [1.0] * 3), counts, strict=True)
        ]
        for counts in ((441, 439, 442), (440, 441, 441))
    )
    differences = [
        x.evaluations["accuracy"][1] - y.evaluations["accuracy"][1]
        for x, y in zip(reference, candidate, strict=True)
    ]
    assert np.mean(differences) != 0
    metric = choose_metric(reference)
    check, *_ = compare_metrics(reference, candidate, metric, jaxmp.Budget())[0]
    assert check.value == 0 and "accuracy 0 (-0.00" in check.text
    assert check.high == -check.low > 0
    # A difference of one image is not rounding.
    higher = dataclasses.replace(candidate[0], evaluations={"accuracy": (0.1, 441 / 450)})
    check, *_ = compare_metrics(reference, [higher, *candidate[1:]], metric, jaxmp.Budget())[0]
    assert check.value == pytest.approx(-1 / 450 / 3, rel=1e-3)


def test_a_diverged_run_fails():
    budget = resolve_budgets(0.5, {"bf16": jaxmp.load_recipe("bf16")})["bf16"]
    checks, _, _ = compare_metrics(
        records("fp32", [1.0, 1.0]), records("bf16", [1.0, math.nan]), MetricChoice(), budget
    )
    assert checks[0].verdict == "fail"


# ---------------------------------------------------------------------------
# Differences of arrays
# ---------------------------------------------------------------------------


def test_differences_are_exact():
    row = difference(np.array([3.0, 4.0]), np.array([0.0, 4.0]))
    assert (row.error, row.cosine, row.norm) == (0.6, 0.8, 5.0)
    assert difference(np.zeros(2), np.zeros(2)).error == 0
    assert difference(np.ones(2), np.array([1.0, np.nan])).error == math.inf


# ---------------------------------------------------------------------------
# Mistakes
# ---------------------------------------------------------------------------


def make_run(recipe, seed, *, params_seed=None, batch_seed=None):
    model = Perceptron()
    apply = recipe.wrap(model).apply
    params = model.init(jax.random.key(params_seed or seed), HELD_OUT[0])
    tx = recipe.optimizer(optax.adam(1e-3))
    state = jaxmp.TrainState.create(apply_fn=apply, params=params, tx=tx)
    loss_fn = lambda params, x: squared_error(lambda x: apply(params, x), x)

    def step(state, x):
        loss, grads = state.value_and_grad(loss_fn)(x)
        return state.apply_gradients(grads=grads), {"loss": loss}

    def evaluate(state):
        return float(loss_fn(state.params, HELD_OUT[0]))  # JAX cannot trace this

    x = data(seed if batch_seed is None else batch_seed, 4)
    return jaxmp.TrainingRun(state=state, step=step, batches=iter(x), evaluate=evaluate)


@EXPENSIVE
def test_steps_without_gradients_are_compared_by_loss():
    report = jaxmp.validate(make_run, ["bf16"], steps=4, seeds=2)
    assert report["bf16"].gradients == () and "grads" in report.notes[0]
    assert len(report.runs[0].evaluations["loss"]) == 5


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"params_seed": 7}, "initial parameter 'hidden:kernel' of 'bf16' differs .* seed 0"),
        ({"batch_seed": 7}, "'bf16' was trained on other batches than 'fp32' for seed 0"),
    ],
)
def test_other_parameters_or_batches_are_refused(changed, match):
    def make(recipe, seed):
        return make_run(recipe, seed, **(changed if recipe.name == "bf16" else {}))

    with pytest.raises(jaxmp.ValidationError, match=match):
        jaxmp.validate(make, ["bf16"], steps=4, seeds=1)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (dict(steps=5), r"fp32, seed 0 has 4 batches.*steps=4"),
        (dict(steps=0), "steps=0 is not a positive integer"),
        (dict(steps=4, candidates="bf16"), r"candidates=\['bf16'\]"),
        (dict(steps=4, candidates=[]), "candidates is empty"),
        (dict(steps=4, candidates=["fp32"]), "both the reference and a candidate"),
        (dict(steps=4, candidates=["bf16", "bf16"]), "Two candidates have the name 'bf16'"),
        (dict(steps=4, budgets={"bf61": 0.1}), r"budgets\['bf61'\].*Did you mean 'bf16'"),
        (dict(steps=4, budgets=-1), "a budget is a positive number"),
        (dict(steps=4, seeds=[1, 1]), "different integers"),
        (dict(steps=4, seeds=0), "seeds=0: pass a positive number"),
        (dict(steps=4, seeds=2.0), "seeds=2.0: pass a positive number"),
        (dict(steps=4, candidates=jaxmp.load_recipe("bf16")), "is not a list of recipes"),
        (dict(steps=4, compare_steps=3), r"compare_steps=\[0, 3\]"),
        (dict(steps=4, directory=__file__), "is a file. Pass a directory"),
        (dict(steps=4, compare_steps=[4]), "4 is not between 0 and 3"),
        (dict(steps=4, loss_fn=squared_error), r"without \['batches', 'optimizer', 'held_out'\]"),
    ],
)
def test_bad_arguments_raise(options, match):
    options = {"candidates": ["bf16"], "seeds": 1, **options}
    with pytest.raises(jaxmp.ValidationError, match=match):
        jaxmp.validate(make_run, **options)


def test_a_list_of_too_few_batches_is_refused_before_the_training():
    def make(recipe, seed):
        def step(state, x):
            raise AssertionError("the step was traced")

        return dataclasses.replace(make_run(recipe, seed), batches=data(seed, 4), step=step)

    match = r"make_run\('fp32', 0\) has 4 batches, and validate trains for 5 steps\. Pass steps=4"
    with pytest.raises(jaxmp.ValidationError, match=match):
        jaxmp.validate(make, ["bf16"], steps=5, seeds=1)


class Dropout(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dropout(0.5, deterministic=False)(nn.Dense(4)(x))


class NnxWithRngs(nnx.Module):
    def __init__(self, rngs):
        self.out = nnx.Linear(8, 4, rngs=rngs)


@pytest.mark.parametrize(
    ("model", "options", "match"),
    [
        (Perceptron, {}, r"the class Perceptron\. Pass a module, such as Perceptron\(\)"),
        (NnxWithRngs, {}, r"takes rngs.* lambda seed: NnxWithRngs\(rngs=nnx.Rngs\(seed\)\)"),
        (NnxWithRngs(nnx.Rngs(0)), {}, r"trains a new one.* lambda seed: NnxWithRngs\("),
        (3, {}, "The model is of type int"),
        (Perceptron(), dict(batches=iter(data(0))), "can be read only once"),
        (Perceptron(), dict(batches={"x": data(0)}), "batches is a dict, which has no batches"),
        (Perceptron(), dict(held_out=iter(HELD_OUT)), r"held_out=\[batch\]"),
        (Perceptron(), dict(held_out=[]), "held_out is empty"),
        (Perceptron(), dict(optimizer=optax.adam), "is not an optax transformation"),
        (Perceptron(), dict(loss_fn=3), "loss_fn=3 is not a function"),
        (Dropout(), {}, r"Dropout_0 needs PRNG.*\n?.*rngs=\{'dropout': key\}"),
    ],
)
def test_a_wrong_argument_of_a_model_is_named(model, options, match):
    with pytest.raises(jaxmp.ValidationError, match=match):
        run(model, **options)


def run_without_arguments():
    return make_run(None, 0)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (run_without_arguments, r"run_without_arguments\(\) \(test_validate.py, line \d+\) cannot"),
        (lambda seed, recipe: None, "has the seed as first argument"),
    ],
)
def test_a_make_run_with_other_arguments_is_named(make, match):
    with pytest.raises(jaxmp.ValidationError, match=match) as caught:
        jaxmp.validate(make, ["bf16"], steps=4)
    assert "    def make_run(recipe, seed):\n" in str(caught.value)


def with_metrics(metrics):
    return lambda run: lambda state, x: (run.step(state, x)[0], metrics)


def with_bf16_params(run):
    def step(state, x):
        state, metrics = run.step(state, x)
        params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), state.params)
        return dataclasses.replace(state, params=params), metrics

    return step


@pytest.mark.parametrize(
    ("field", "make", "match"),
    [
        ("evaluate", lambda run: None, "evaluate=None, which is not a function"),
        ("evaluate", lambda run: lambda state: None, "evaluate returned the metric 'loss' = None"),
        ("evaluate", lambda run: lambda state: jnp.ones(3), r"of shape \(3,\).*jnp.mean\(loss\)"),
        ("evaluate", lambda run: lambda state: {}, "evaluate returned no metrics"),
        ("step", lambda run: 3, r"step=3, which is not a function"),
        ("step", with_metrics(jnp.ones(3)), r"step returned the metric 'loss' of shape \(3,\)"),
        ("step", with_metrics({"grads": 1}), r"the metrics \['grads'\] without 'loss'"),
        ("step", with_metrics({"loss": 1.0, "grads": {"x": jnp.ones(3)}}), "gradients that the"),
        ("step", with_bf16_params, r"hidden/bias': bfloat16\[16\] instead of float32\[16\]"),
        ("step", lambda run: lambda state, x: ({}, 1.0), "the type: dict instead of TrainState"),
        ("batches", lambda run: None, "batches are of type NoneType"),
        ("batches", lambda run: iter([]), "returned no batches. Make a new list"),
        ("batches", lambda run: [*data(0, 3), data(0)[0, :5]], r"Batch 3 of fp32, seed 0.*\[5,8\]"),
    ],
)
def test_a_wrong_run_is_named(field, make, match):
    def make_wrong(recipe, seed):
        run = make_run(recipe, seed)
        return dataclasses.replace(run, **{field: make(run)})

    with pytest.raises(jaxmp.ValidationError, match=match):
        jaxmp.validate(make_wrong, ["bf16"], steps=4, seeds=1)


def test_metrics_that_differ_between_recipes_are_named():
    def make(recipe, seed):
        run = make_run(recipe, seed)
        return dataclasses.replace(run, evaluate=lambda state: {recipe.name: jnp.float32(1)})

    with pytest.raises(jaxmp.ValidationError, match=r"metrics \['bf16'\], and that of 'fp32'"):
        jaxmp.validate(make, ["bf16"], steps=1, seeds=1)


def test_a_wrong_result_of_make_run_is_named():
    with pytest.raises(
        jaxmp.ValidationError, match=r"returned int instead of a jaxmp\.TrainingRun"
    ):
        jaxmp.validate(lambda recipe, seed: 3, ["bf16"], steps=4)


# ---------------------------------------------------------------------------
# Baselines, pytest, command line
# ---------------------------------------------------------------------------


def worse(report, **changes):
    candidate = dataclasses.replace(report.candidates[0], **changes)
    return dataclasses.replace(report, candidates=(candidate,))


def test_a_baseline_detects_each_regression(report, tmp_path):
    file = tmp_path / "baseline.json"
    file.write_text(report.to_json())
    report.check(baseline=file)
    (candidate,) = report.candidates
    pairs = tuple(
        dataclasses.replace(pair, candidate=1.01 * pair.candidate) for pair in candidate.pairs
    )
    gradients = tuple(
        dataclasses.replace(row, error=1.5 * row.error) for row in candidate.gradients
    )
    size = candidate.program
    assert size.temporary_bytes > 0 and size.kernels > 0
    program = dataclasses.replace(
        size, temporary_bytes=2 * size.temporary_bytes, kernels=2 * size.kernels
    )
    for changes, match in [
        ({"pairs": pairs}, r"bf16: the held-out loss is worse by \+1 %"),
        ({"gradients": gradients}, "bf16: the gradient error rose"),
        ({"program": program}, "temporary memory rose.*\n.*the compiled program rose"),
    ]:
        with pytest.raises(jaxmp.ValidationFailedError, match=match):
            worse(report, **changes).check(baseline=file)
    with pytest.raises(jaxmp.ValidationError, match="steps=20, and this report with 10"):
        dataclasses.replace(report, steps=10).check(baseline=file)
    with pytest.raises(jaxmp.ValidationError, match="no candidate 'bf16_v2'; it has 'bf16'"):
        worse(report, name="bf16_v2").check(baseline=file)
    other = dataclasses.replace(report, metric=MetricChoice(name="accuracy", scale="absolute"))
    with pytest.raises(jaxmp.ValidationError, match="relative difference of 'loss' decides"):
        other.check(baseline=file)
    with pytest.raises(jaxmp.ValidationError, match="--write-baseline"):
        report.check(baseline=tmp_path / "missing.json")


def test_assert_equivalent_raises_the_headline():
    def make(recipe, seed):
        run = make_run(recipe, seed)
        factor = 1.1 if recipe.name == "bf16" else 1.0
        return dataclasses.replace(run, evaluate=lambda state: factor * run.evaluate(state))

    with pytest.raises(jaxmp.ValidationFailedError, match=r"^bf16 FAILS: held-out loss \+10\.?"):
        assert_equivalent(make, "bf16", steps=4, seeds=2, budgets=0.05)


def test_the_fixture_reads_the_baseline_of_the_test(request, monkeypatch, tmp_path, equivalent):  # noqa: F811
    monkeypatch.setenv("JAXMP_WRITE_BASELINE", "1")
    check = equivalent
    file = check.__closure__[0].cell_contents
    assert file.parent == request.path.parent / "baselines"
    assert file.name == f"{request.node.name}.json"


RUN = """
import sys

sys.path.insert(0, {folder!r})
from test_validate import make_run
"""


@EXPENSIVE
def test_the_command_exits_with_1_where_the_baseline_is_better(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "my_run.py").write_text(RUN.format(folder=str(Path(__file__).parent)))

    def run(*options):
        common = ["validate", "my_run.py:make_run", "--steps", "4", "--seeds", "2"]
        with pytest.raises(SystemExit) as stop:
            cli.main([*common, "--candidates", "bf16", "--budget", "0.9", *options])
        return stop.value.code, capsys.readouterr()

    code, printed = run("--baseline", "b.json")
    assert code == 2 and "does not exist" in printed.err
    code, printed = run(
        "--baseline", "b.json", "--write-baseline", "--html", "page.html", "--json", "-"
    )
    assert code == 0 and json.loads(printed.out)["schema"] == "jaxmp.validation"
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    baseline = jaxmp.ValidationReport.from_json((tmp_path / "b.json").read_text())
    better = [
        dataclasses.replace(pair, candidate=0.5 * pair.candidate) for pair in baseline["bf16"].pairs
    ]
    (tmp_path / "b.json").write_text(worse(baseline, pairs=tuple(better)).to_json())
    code, printed = run("--baseline", "b.json")
    assert code == 1 and "bf16: the held-out loss is worse by +100 %" in printed.err
    assert printed.out.startswith("bf16 passes: ")
