"""Paired runs, statistics, baselines and the command of a validation."""

import dataclasses
import gc
import math
import re
import weakref

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from scipy import stats

import jaxmp
import models_nnx
import validate_coverage
from grids import EXPENSIVE
from jaxmp._tools.validate import _compare, _train
from jaxmp._tools.validate._budget import (
    ACCURACIES,
    HIGHER,
    LOWER,
    choose_metrics,
    choose_training,
    direction_of,
    resolve_budgets,
)
from jaxmp._tools.validate._compare import compare_figures, compare_metrics, compare_training
from jaxmp._tools.validate._probe import difference
from jaxmp._tools.validate._rows import GradientRow, MetricChoice, TrainingRecord, TrainingRow
from jaxmp._tools.validate._validate import make_model_runs
from jaxmp.errors import ValidationError, ValidationFailedError
from jaxmp.typing import ValidationReport
from models_linen import Perceptron
from sources import text_of
from training_steps import new_state

STEPS = 20


# The defaults of JAX, as users of Flax and optax have them.
pytestmark = pytest.mark.usefixtures("standard_promotion", "rank_promotion")


def data(seed, count=STEPS):
    return np.random.default_rng(seed).normal(size=(count, 16, 8)).astype("float32")


HELD_OUT = [*data(99, 2)]


def squared_error(model, x):
    return jnp.mean((model(x) - jnp.sin(x[..., :4])) ** 2)


TRAINING = {
    "loss_fn": squared_error,
    "batches": data,
    "optimizer": optax.adam(1e-3),
    "held_out": HELD_OUT,
}


def run(model=None, recipes=("bf16",), **options):
    defaults = {"seeds": 2, "steps": STEPS, "compare_steps": [0, 5], **TRAINING}
    return jaxmp.validate(model or Perceptron(), recipes, **{**defaults, **options})


@pytest.fixture(scope="module")
def report():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return run()


# ---------------------------------------------------------------------------
# Interrupts
# ---------------------------------------------------------------------------


trained_run = make_model_runs(Perceptron(), **TRAINING)


def interrupted_after(count):
    """Returns `trained_run` whose call number `count` is interrupted, and the calls."""
    calls = []

    def make(recipe, seed):
        calls.append((recipe.name, seed))
        if len(calls) > count:
            raise KeyboardInterrupt
        return trained_run(recipe, seed)

    return make, calls


@pytest.fixture(scope="module")
def whole():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return resumed(trained_run, None)


def resumed(make, earlier, **options):
    options = {"seeds": 2, "steps": 4, "compare_steps": [0, 3], "progress": False} | options
    return jaxmp.validate(make, ["bf16", "fp16"], resume=earlier, **options)


@pytest.mark.parametrize(
    ("count", "runs", "verdicts"),
    # Runs: of fp32, bf16 and fp16 with two seeds each; a call makes the run of a seed.
    [
        pytest.param(1, 1, [], marks=EXPENSIVE),
        pytest.param(3, 3, [], marks=EXPENSIVE),
        (5, 5, ["bf16"]),
    ],
)
def test_an_interrupted_validation_goes_on(count, runs, verdicts, whole, monkeypatch):
    make, _ = interrupted_after(count)
    with pytest.raises(KeyboardInterrupt) as stop:
        resumed(make, None)
    report = stop.value.report
    assert len(report.runs) == runs and [each.name for each in report.candidates] == verdicts
    assert report.runs == whole.runs[:runs]
    assert report.notes[0].startswith("Interrupted: ") and "fp16 has" in report.notes[0]
    assert report.unfinished == ("bf16", "fp16")[len(verdicts) :] and not report.ok
    with pytest.raises(ValidationFailedError, match="fp16 has no verdict"):
        report.check()
    trained = []
    train = _train.train
    monkeypatch.setattr(
        _train,
        "train",
        lambda name, seed, *a, **k: trained.append((name, seed)) or train(name, seed, *a, **k),
    )
    again = resumed(trained_run, report.to_json())
    assert again == whole
    kept = {(run.name, run.seed) for run in report.runs if run.seed or run.name in verdicts}
    assert len(trained) == 6 - len(kept) and kept.isdisjoint(trained)


def test_only_runs_of_the_same_program_are_taken(whole):
    with pytest.raises(ValidationError, match="was made with steps=4, and this"):
        resumed(trained_run, whole, steps=8)
    changed = tuple(dataclasses.replace(run, program="0", losses=(9.0,) * 4) for run in whole.runs)
    assert resumed(trained_run, dataclasses.replace(whole, runs=changed)).runs == whole.runs
    make, calls = interrupted_after(0)
    with pytest.raises(KeyboardInterrupt) as stop:
        resumed(make, None)
    assert not hasattr(stop.value, "report") and len(calls) == 1


def test_the_command_writes_what_it_has_and_goes_on(write, tmp_path, monkeypatch, command, whole):
    write("import test_validate\nmake = None\n", "run_stop.py")
    make, _ = interrupted_after(5)
    monkeypatch.setattr("jaxmp._tools.cli._arguments.load_function", lambda *a: make)
    validate = ["validate", "run_stop.py:make", "--recipes", "bf16,fp16", "--seeds", "2"]
    validate += ["--steps", "4", "--json", "v.json", "--html", "v.html"]
    code, _, error = command(*validate, "--resume")
    assert code == 2 and "--resume requires the file" in error
    code, _, error = command(*validate)
    assert code == 130 and "with --resume to go on" in error
    report = ValidationReport.from_json((tmp_path / "v.json").read_text())
    assert [each.name for each in report.candidates] == ["bf16"] and len(report.runs) == 5
    assert (tmp_path / "v.html").read_text().startswith("<!doctype html>")
    make, _ = interrupted_after(100)
    code, _, _ = command(*validate, "--resume")
    report = ValidationReport.from_json((tmp_path / "v.json").read_text())
    assert code in (0, 1, 3) and report.runs == whole.runs


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
    pairs = [(name, seed) for name in ("fp32", "bf16") for seed in (0, 1)]
    assert [(run.name, run.seed) for run in report.runs] == pairs
    for record in report.runs:
        assert len(record.losses) == len(record.gradient_norms) == len(record.loss_scales) == STEPS
        assert record.eval_steps == report.eval_steps == (*range(0, STEPS, 2), STEPS)
        assert len(record.evaluations["loss"]) == len(report.eval_steps)
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
    assert ValidationReport.from_json(report.to_json()) == report
    broken = dataclasses.replace(
        report.runs[0], losses=(1.0, math.inf), loss_scales=(-math.inf, 2.0)
    )
    changed = dataclasses.replace(report, runs=(broken,))
    assert ValidationReport.from_json(changed.to_json()) == changed
    text = report.to_json().replace('"schema_version": 3', '"schema_version": 99')
    with pytest.raises(ValidationError, match=r"schema_version is 99, and must be 3"):
        ValidationReport.from_json(text)
    with pytest.raises(ValidationError, match="no candidate 'fp8'; it has 'bf16'"):
        report["fp8"]


@EXPENSIVE
def test_nnx_gives_the_same_kind_of_report():
    report = run(lambda seed: models_nnx.Dropout(nnx.Rngs(seed)), seeds=1)
    assert report["bf16"].verdict == "inconclusive"
    assert "one seed" in report["bf16"].power.text
    shown = report.to_text(full=True)
    assert "distance of the loss curves" in shown and "distance between seeds" not in shown
    assert "nan" not in shown.split()
    modules = [row.module for row in report["bf16"].modules if row.gradient_error]
    assert modules == ["hidden", "out"] * 2
    assert all(row.activation_error for row in report["bf16"].modules if row.module == "hidden")
    # The held-out loss has no dropout.
    model = models_nnx.Dropout(nnx.Rngs(0))
    expected = np.mean([squared_error(nnx.view(model, deterministic=True), x) for x in HELD_OUT])
    np.testing.assert_allclose(report.runs[0].evaluations["loss"][0], expected, rtol=1e-5)
    assert abs(np.mean([squared_error(model, x) for x in HELD_OUT]) - expected) > 0.1 * expected


def test_an_evaluation_that_depends_on_the_seed_is_that_of_its_seed():
    evaluate = lambda run, _, seed: lambda state: run.evaluate(state) * 0 + seed + 1
    report = jaxmp.validate(changed_run("evaluate", evaluate), ["bf16"], steps=2, seeds=[3, 6])
    assert [run.evaluations["loss"][-1] for run in report.runs] == [4, 7, 4, 7]


@pytest.mark.parametrize("is_shared", [True, False])
def test_states_of_few_seeds_are_in_memory_at_once(is_shared):
    made = []
    most = 0

    def make_run(recipe, seed):
        nonlocal most
        state = {"params": jnp.zeros(4)}
        step = lambda state, batch: (state, {"loss": jnp.sum(batch)})
        # A constant that depends on the seed makes another program.
        evaluate = lambda state: jnp.sum(state["params"]) + (0 if is_shared else seed)
        new = jaxmp.TrainingRun(state=state, step=step, batches=[*data(0)], evaluate=evaluate)
        made.append(weakref.ref(new))
        gc.collect()
        most = max(most, sum(run() is not None for run in made))
        return new

    jaxmp.validate(make_run, ["bf16"], seeds=5, steps=2)
    # That of the first seed, which defines the program, and that of the current seed; those of the
    # reference and of a candidate are not in memory together.
    assert most == 2


# ---------------------------------------------------------------------------
# Statistics and metrics
# ---------------------------------------------------------------------------


def test_the_interval_is_that_of_a_t_test():
    values = np.array([-3.0, -1.0, 0.0, 1.0, 3.0])  # not skewed
    for candidates, confidence in ((1, 0.95), (2, 0.95), (4, 0.975)):
        interval = _compare.paired_interval(values, candidates)
        expected = stats.ttest_1samp(values, 0).confidence_interval(confidence)
        np.testing.assert_allclose([interval.low, interval.high], expected)
    skewed = _compare.paired_interval([-1.0, -1.0, 0.0, 0.0, 4.0])
    low, high = stats.ttest_1samp([-1.0, -1.0, 0.0, 0.0, 4.0], 0).confidence_interval(0.95)
    assert skewed.low == pytest.approx(low) and skewed.high > 1.3 * high


@pytest.mark.parametrize(
    ("name", "seeds"),
    [
        *((name, 3) for name in list(validate_coverage.DISTRIBUTIONS)[:4]),
        ("lognormal, sigma 0.5", 5),
        ("lognormal, sigma 1", 20),
    ],
)
def test_intervals_cover_the_mean_in_93_percent_of_samples(name, seeds):
    sampler = validate_coverage.DISTRIBUTIONS[name]
    coverage, passes = validate_coverage.measure(sampler, seeds, 2000)
    assert coverage > 0.93 - 2 * math.sqrt(0.93 * 0.07 / 2000)
    assert passes < 0.06


def test_an_outlier_from_four_seeds_on_does_not_pass():
    judge = lambda values: _compare.judge_interval(_compare.paired_interval(values), 0.005)
    assert [judge([x]) for x in (0.001, 0.006)] == ["inconclusive", "fail"]  # one seed alone
    usual = [0.0001, 0.0002, 0.0, 0.0001, 0.0002, 0.0001, 0.0, 0.0002, 0.0001]
    for spike in (0.0035, -0.0035):
        assert judge([*usual, 0.0001]) == "pass"
        assert judge([*usual, spike]) == "inconclusive"
        assert judge([*usual, spike / 2]) == "pass"  # less than half of the budget
    assert judge([*(0.02 + value for value in map(float, usual)), 0.03]) == "fail"
    # The report says why.
    reference = records("fp32", [1.0] * 10)
    candidate = records("bf16", [math.exp(value) for value in (*usual, 0.0035)])
    (check, *_) = compared(reference, candidate)
    assert "with an outlier, one seed at 0.341 % from the others" in check.text


def test_another_loss_on_identical_parameters_differs():
    row = GradientRow(step=0, error=0.0, cosine=1.0, norm=1.0, loss_error=0.16, loss=0.5)
    for unit, value, verdict in ((0.0, 0.16, "differs"), (8.0, 0.01, "pass")):
        _, check, _ = compare_figures([row], TrainingRow(), jaxmp.Budget(), 20, unit)
        assert (check.name, check.verdict) == ("loss_error", verdict)
        assert check.value == pytest.approx(value)


def test_power_agrees_with_simulation():
    deviation, budget = 0.004, 0.005
    seeds = _compare.seeds_needed(deviation, budget)
    rng = np.random.default_rng(1)

    def share(verdict, shift, count):
        samples = rng.normal(shift, deviation, size=(2000, count))
        verdicts = [
            _compare.judge_interval(_compare.paired_interval(row), budget) for row in samples
        ]
        return np.mean(np.array(verdicts) == verdict)

    assert share("pass", 0.0, seeds) >= 0.77
    assert share("pass", 0.0, seeds - 2) < 0.8
    # A difference as large as the budget fails, or passes, in at most 2.5 % of all cases.
    assert share("fail", budget, seeds) <= 0.03
    assert share("pass", budget, seeds) <= 0.03
    assert _compare.seeds_needed(budget / 20, budget) == 2
    large = _compare.seeds_needed(4 * budget, budget)
    assert 80 < large < 160


def records(name, finals, accuracy=None, first=2.0, metric="loss", losses=None):
    """Returns records whose training losses default to 2 and the final metric."""
    evaluations = [{metric: (first, final)} for final in finals]
    if accuracy is not None:
        evaluations = [{**each, "accuracy": (0.1, accuracy)} for each in evaluations]
    return [
        TrainingRecord(
            name=name,
            seed=seed,
            losses=(2.0, each[metric][-1]) if losses is None else tuple(losses),
            evaluations=each,
            eval_steps=(0, 1),
            loss_scales=(1.0,) * len(losses or (0, 1)),
        )
        for seed, each in enumerate(evaluations)
    ]


def compared(reference, candidate, metrics=None, budget=None):
    """Returns the checks of the metrics."""
    metrics, budget = metrics or [MetricChoice()], budget or jaxmp.Budget()
    training = choose_training(reference, candidate, [budget])
    return compare_metrics(reference, candidate, metrics, budget, training)[0]


@pytest.mark.parametrize(("shift", "verdict"), [(0.0, "pass"), (0.01, "fail")])
def test_a_planted_difference_is_detected_through_the_spread_of_seeds(shift, verdict):
    """Seeds differ by 2 %, and the recipes by 0 or 1 % with a deviation of 0.1 %."""
    budget = resolve_budgets(None, {"bf16": jaxmp.load_recipe("bf16")})["bf16"]
    rng, verdicts = np.random.default_rng(2), []
    for _ in range(20):
        reference = 1.5 * np.exp(rng.normal(0, 0.02, 5))
        candidate = reference * np.exp(rng.normal(shift, 0.001, 5))
        pair = records("fp32", reference), records("bf16", candidate)
        verdicts.append(compared(*pair, budget=budget)[0].verdict)
    assert verdicts.count(verdict) >= 19


def test_a_small_loss_is_judged_by_accuracy_and_absolute_loss():
    reference = records("fp32", [0.030, 0.032, 0.031], accuracy=0.99)
    metrics = choose_metrics(reference)
    assert [(each.name, each.scale, each.direction) for each in metrics] == [
        ("accuracy", "absolute", "max"),
        ("loss", "absolute", "min"),
    ]
    assert (
        "from 2 to 0.031" in metrics[0].reason
        and "shares of 2, its initial value" in metrics[0].reason
    )
    budget = resolve_budgets(None, {"bf16": jaxmp.load_recipe("bf16")})["bf16"]
    candidate = records("bf16", [0.032, 0.034, 0.033], accuracy=0.988)
    checks = compared(reference, candidate, metrics, budget)
    assert [(check.name, check.verdict) for check in checks] == [
        ("held_out_accuracy", "pass"),
        ("held_out_loss", "pass"),
        ("final_loss", "pass"),
    ]
    assert checks[0].value == pytest.approx(0.002)
    worse = records("bf16", [0.03, 0.032, 0.031], accuracy=0.9)
    assert compared(reference, worse, metrics, budget)[0].verdict == "fail"
    assert choose_metrics(records("fp32", [1.5, 1.6]))[0].scale == "relative"


@pytest.mark.parametrize("offset", [-100.0, -2.0, -1.0, 0.0])
def test_losses_that_are_not_positive_are_compared_in_units_of_their_range(offset):
    """A planted difference of 1 % of the range fails, and one of zero or 0.1 % passes."""
    first, last = (1.0, 0.0) if offset == 0 else (2.0 + offset, 1.0 + offset)

    def trained(shift):
        losses = list(np.linspace(2.0, 1.0 + shift, 40) + offset)
        return records("x", [last + shift] * 2, first=first, losses=losses)

    reference = trained(0.0)
    metrics = choose_metrics(reference)
    assert metrics[0].scale == "absolute" and f"{metrics[0].unit:.3g}" in metrics[0].reason
    for shift, verdict in ((0.0, "pass"), (0.001, "pass"), (0.01, "fail")):
        candidate = trained(shift)
        checks = compared(reference, candidate, metrics)
        assert checks[0].verdict == verdict
        training = choose_training(reference, candidate)
        assert all(check.budget > 0 for check in checks)
        assert math.isfinite(compare_training(reference, candidate, training).curve_distance)


def test_a_candidate_with_a_loss_below_zero_is_compared_by_absolute_differences():
    reference = records("fp32", [0.5, 0.5])
    (metric,) = choose_metrics(reference, records("bf16", [-0.1, 0.4]))
    assert metric.scale == "absolute"


def test_near_zero_training_losses_do_not_decide():
    overfit = lambda final: records("x", [1.0, 1.1], losses=list(np.geomspace(1.0, final, 40)))
    assert [(each.name, each.verdict) for each in compared(overfit(1e-5), overfit(2e-5))] == [
        ("held_out_loss", "pass"),
        ("final_loss", "pass"),
    ]


def test_directions_of_names_are_those_of_the_page():
    page = text_of("docs/validate.md")
    for name in (*ACCURACIES, *HIGHER, *LOWER):
        assert f"`{name}`" in page
        assert direction_of(name) == ("min" if name in LOWER else "max")
    assert direction_of("val/Mean-Accuracy") == "max" and direction_of("test_loss") == "min"
    for name in ("fid_score", "mAP", "recall@5", "top_1", "z", "accuracy_loss", "loss_accuracy"):
        assert direction_of(name) == "two-sided"


def test_a_score_of_an_unknown_direction_fails_in_both_directions():
    reference = records("fp32", [0.8, 0.82], metric="z")
    for factor, verdict in ((1.02, "fail"), (0.98, "fail"), (1.001, "pass"), (0.999, "pass")):
        candidate = records("x", [0.8 * factor, 0.82 * factor], metric="z")
        metrics = choose_metrics(reference)
        assert metrics[0].direction == "two-sided"
        assert compared(reference, candidate, metrics)[0].verdict == verdict
        declared = choose_metrics(reference, directions={"z": "max"})
        better = "differs" if factor == 1.02 else verdict
        assert compared(reference, candidate, declared)[0].verdict == better


def test_budgets_of_metrics_are_relative_or_absolute():
    reference, candidate = (
        records("x", finals, first=90.0, metric="reward") for finals in ([200, 210], [197, 207])
    )
    verdicts = {}
    for budget in (
        jaxmp.Budget(),
        jaxmp.Budget(relative={"reward": 0.02}),
        jaxmp.Budget(absolute={"reward": 4.0}),
        jaxmp.Budget(absolute={"reward": 2.0}),
    ):
        metrics = choose_metrics(reference, candidate, {"reward": "max"}, [budget])
        check = compared(reference, candidate, metrics, budget)[0]
        verdicts[check.scale, round(check.budget, 6)] = check.verdict
    assert verdicts == {
        ("relative", 0.005): "fail",
        ("relative", 0.02): "pass",
        ("absolute", 4.0): "pass",
        ("absolute", 2.0): "fail",
    }


def test_a_mean_within_the_rounding_of_fp32_metrics_is_zero():
    """Two accuracies differ by one image of 450 in both directions, rounded to FP32."""
    reference, candidate = (
        records(
            "x",
            [float(np.float32(count / 450)) for count in counts],
            first=0.1,
            metric="accuracy",
            losses=[2.0, 1.0],
        )
        for counts in ((441, 439, 442), (440, 441, 441))
    )
    differences = [
        x.evaluations["accuracy"][1] - y.evaluations["accuracy"][1]
        for x, y in zip(reference, candidate, strict=True)
    ]
    assert np.mean(differences) != 0
    metrics = choose_metrics(reference)
    (check, *_) = compared(reference, candidate, metrics)
    assert check.value == 0 and "accuracy 0 (-0.0" in check.text
    assert check.high > 0 > check.low
    # A difference of one image is not rounding.
    higher = dataclasses.replace(candidate[0], evaluations={"accuracy": (0.1, 441 / 450)})
    (check, *_) = compared(reference, [higher, *candidate[1:]], metrics)
    assert check.value == pytest.approx(-1 / 450 / 3, rel=1e-3)


@pytest.mark.parametrize(
    ("tables", "match"),
    [
        (dict(relative=0.1), r"Budget\(relative=0.1\): .*Budget\(relative=\{'reward': 0.01\}\)"),
        (dict(absolute={"reward": 0}), "a budget is a positive number"),
        (dict(relative={"x": 1.0}, absolute={"x": 2.0}), r"absolute=\{'x': 2.0\}"),
    ],
)
def test_wrong_budgets_of_metrics_are_named(tables, match):
    with pytest.raises(ValidationError, match=match):
        jaxmp.Budget(**tables)


def test_a_diverged_run_fails():
    budget = resolve_budgets(0.5, {"bf16": jaxmp.load_recipe("bf16")})["bf16"]
    pair = records("fp32", [1.0, 1.0]), records("bf16", [1.0, math.nan])
    assert compared(*pair, budget=budget)[0].verdict == "fail"


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
    state = new_state(params, recipe, optax.adam(1e-3), apply_fn=apply)
    loss_fn = lambda params, x: squared_error(lambda x: apply(params, x), x)

    def step(state, x):
        loss, grads = state.value_and_grad(loss_fn)(x)
        return state.apply_gradients(grads=grads), {"loss": loss}

    def evaluate(state):
        return float(loss_fn(state.params, HELD_OUT[0]))  # JAX cannot trace this

    x = data(seed if batch_seed is None else batch_seed, 4)
    return jaxmp.TrainingRun(state=state, step=step, batches=iter(x), evaluate=evaluate)


def changed_run(field, make):
    """Returns `make_run` with a field of `make(run, recipe, seed)`."""

    def changed(recipe, seed):
        run = make_run(recipe, seed)
        return dataclasses.replace(run, **{field: make(run, recipe, seed)})

    return changed


def test_a_run_that_is_not_finite_in_one_seed_has_a_report():
    def make(run, recipe, seed):
        def step(state, x):
            loss_fn = lambda params, x: squared_error(lambda x: state.apply_fn(params, x), x)
            loss, grads = state.value_and_grad(loss_fn)(x)
            if recipe.name == "bf16" and seed == 0:
                loss, grads = loss * jnp.inf, jax.tree.map(lambda g: g * jnp.nan, grads)
            return state.apply_gradients(grads=grads), {"loss": loss, "grads": grads}

        return step

    make = changed_run("step", make)
    report = jaxmp.validate(make, ["bf16"], steps=2, seeds=2, compare_steps=[0, 1])
    assert report["bf16"].verdict == "fail" and not report.ok
    assert len(report.runs[2].gradient_norms) == len(report.runs[3].gradient_norms) == 2
    assert ValidationReport.from_json(report.to_json()).to_json() == report.to_json()
    assert report.to_html() and "bf16 FAILS" in report.to_text(full=True)


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

    with pytest.raises(ValidationError, match=match):
        jaxmp.validate(make, ["bf16"], steps=4, seeds=1)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (dict(steps=5), r"fp32, seed 0 has 4 batches.*steps=4"),
        (dict(steps=0), "steps=0 is not a positive integer"),
        (dict(recipes="bf16"), r"recipes=\['bf16'\]"),
        (dict(recipes=[]), "recipes is empty"),
        (dict(recipes=["fp32"]), "both the reference and a candidate"),
        (dict(recipes=["bf16", "bf16"]), "Two recipes have the name 'bf16'"),
        (dict(budgets={"bf61": 0.1}), r"budgets\['bf61'\].*Did you mean 'bf16'"),
        (dict(budgets=-1), "a budget is a positive number"),
        (dict(metrics={"loss": "up"}), r"metrics=\{'loss': 'up'\}: pass the direction of each"),
        (dict(metrics="max"), r"metrics='max': pass the direction"),
        (dict(metrics={"los": "min"}), r"no metric 'los', which metrics or budgets.* mean 'loss'"),
        (
            dict(budgets=jaxmp.Budget(absolute={"x": 1.0})),
            "no metric 'x', which metrics or budgets",
        ),
        (dict(seeds=[1, 1]), "different integers"),
        (dict(seeds=0), "seeds=0: pass a positive number"),
        (dict(seeds=2.0), "seeds=2.0: pass a positive number"),
        (dict(recipes=jaxmp.load_recipe("bf16")), "is not a list of recipes"),
        (dict(compare_steps=3), r"compare_steps=\[0, 3\]"),
        (dict(compare_steps=[4]), "4 is not between 0 and 3"),
        (dict(loss_fn=squared_error), r"without \['batches', 'optimizer', 'held_out'\]"),
    ],
)
def test_bad_arguments_raise(options, match):
    options = {"recipes": ["bf16"], "seeds": 1, "steps": 4, **options}
    with pytest.raises(ValidationError, match=match):
        jaxmp.validate(make_run, **options)


def test_a_reference_that_diverges_is_named_before_the_candidates_train():
    trained = []

    def make(run, recipe, seed):
        trained.append(recipe.name)

        def step(state, x):
            new, metrics = run.step(state, x)
            return new, {**metrics, "loss": jnp.where(new.step > 2, jnp.nan, metrics["loss"])}

        return step

    match = r"The reference 'fp32' ends with a training loss of nan .* seed 0, first at step 2"
    with pytest.raises(ValidationError, match=match):
        jaxmp.validate(changed_run("step", make), ["bf16"], steps=4, seeds=1)
    assert set(trained) == {"fp32"}


def test_a_list_of_too_few_batches_is_refused_before_the_training():
    def make(recipe, seed):
        def step(state, x):
            raise AssertionError("the step was traced")

        return dataclasses.replace(make_run(recipe, seed), batches=data(seed, 4), step=step)

    match = r"make_run\('fp32', 0\) has 4 batches, and validate trains for 5 steps\. Pass steps=4"
    with pytest.raises(ValidationError, match=match):
        jaxmp.validate(make, ["bf16"], steps=5, seeds=1)


DROPOUT = nn.Sequential([nn.Dense(4), nn.Dropout(0.5, deterministic=False)])


class NnxWithRngs(nnx.Module):
    def __init__(self, rngs):
        self.out = nnx.Linear(8, 4, rngs=rngs)


@pytest.mark.parametrize(
    ("model", "options", "match"),
    [
        (Perceptron, {}, r"the class Perceptron\. Pass a Linen module, such as Net\(\)"),
        (NnxWithRngs, {}, r"the class NnxWithRngs\. .* lambda seed: Net\(rngs=nnx.Rngs\(seed\)\)"),
        (NnxWithRngs(nnx.Rngs(0)), {}, r"of type NnxWithRngs\. .*trains a new one"),
        (3, {}, "The model is of type int"),
        (Perceptron(), dict(batches=iter(data(0))), "can be read only once"),
        (Perceptron(), dict(batches={"x": data(0)}), "batches is a dict, which has no batches"),
        (Perceptron(), dict(held_out=iter(HELD_OUT)), r"held_out=\[batch\]"),
        (Perceptron(), dict(held_out=[]), "held_out is empty"),
        (Perceptron(), dict(optimizer=optax.adam), "is not an optax transformation"),
        (Perceptron(), dict(loss_fn=3), "loss_fn=3 is not a function"),
        (DROPOUT, {}, r"layers_1 needs PRNG.*\n?.*rngs=\{'dropout': key\}"),
    ],
)
def test_a_wrong_argument_of_a_model_is_named(model, options, match):
    with pytest.raises(ValidationError, match=match):
        run(model, **options)


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
        ("step", with_bf16_params, r"hidden/kernel': bfloat16\[8,16\] instead of float32\[8,16\]"),
        ("step", lambda run: lambda state, x: ({}, 1.0), "the type: dict instead of TrainState"),
        ("batches", lambda run: None, "batches are of type NoneType"),
        ("batches", lambda run: iter([]), "returned no batches. Make a new list"),
        ("state", lambda run: {"params": {"w": print}}, "leaf params/w of the state is a function"),
        ("batches", lambda run: [*data(0, 3), data(0)[0, :5]], r"Batch 3 of fp32, seed 0.*\[5,8\]"),
    ],
)
def test_a_wrong_run_is_named(field, make, match):
    make_wrong = changed_run(field, lambda run, *_: make(run))
    with pytest.raises(ValidationError, match=match):
        jaxmp.validate(make_wrong, ["bf16"], steps=4, seeds=1)


def test_metrics_that_differ_between_recipes_are_named():
    evaluate = lambda _, recipe, __: lambda state: {recipe.name: jnp.float32(1)}
    with pytest.raises(ValidationError, match=r"metrics \['bf16'\], and that of 'fp32'"):
        jaxmp.validate(changed_run("evaluate", evaluate), ["bf16"], steps=1, seeds=1)


def test_a_wrong_result_of_make_run_is_named():
    with pytest.raises(ValidationError, match=r"returned int instead of a jaxmp\.TrainingRun"):
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
    for changes, match in [
        ({"pairs": pairs}, r"bf16: the held-out loss is worse by \+1 %"),
        ({"gradients": gradients}, "bf16: the gradient error rose"),
    ]:
        with pytest.raises(ValidationFailedError, match=match):
            worse(report, **changes).check(baseline=file)
    with pytest.raises(ValidationError, match="steps=20, and this report with 10"):
        dataclasses.replace(report, steps=10).check(baseline=file)
    with pytest.raises(ValidationError, match="no candidate 'bf16_v2'; it has 'bf16'"):
        worse(report, name="bf16_v2").check(baseline=file)
    other = dataclasses.replace(report, metric=MetricChoice(name="accuracy", scale="absolute"))
    with pytest.raises(ValidationError, match="relative difference of 'loss' decides"):
        other.check(baseline=file)
    with pytest.raises(ValidationError, match=r"--json validation\.json"):
        report.check(baseline=tmp_path / "missing.json")


def test_the_check_raises_the_headline():
    def make(run, recipe, seed):
        factor = 1.1 if recipe.name == "bf16" else 1.0
        return lambda state: factor * run.evaluate(state)

    make = changed_run("evaluate", make)
    report = jaxmp.validate(make, ["bf16"], steps=4, seeds=2, budgets=0.05)
    with pytest.raises(ValidationFailedError, match=r"^bf16 FAILS: held-out loss \+10\.?"):
        report.check()
    # The step of `make_run` returns no gradients.
    assert report["bf16"].gradients == () and "grads" in report.notes[0]
    assert len(report.runs[0].evaluations["loss"]) == 5


@pytest.mark.parametrize(
    ("verdicts", "status"),
    [(["pass", "inconclusive"], 0), (["pass", "differs"], 3), (["differs", "fail"], 1)],
)
def test_the_command_exits_with_3_if_a_candidate_differs(
    report, monkeypatch, tmp_path, command, verdicts, status
):
    candidates = tuple(
        dataclasses.replace(report.candidates[0], name=f"x{index}", verdict=verdict)
        for index, verdict in enumerate(verdicts)
    )
    changed = dataclasses.replace(report, candidates=candidates)
    passed = {}
    monkeypatch.setattr(jaxmp, "validate", lambda *_, **options: passed.update(options) or changed)
    file = tmp_path / "run.py"
    file.write_text("def make_run(recipe, seed): ...\n")
    (tmp_path / "b.json").write_text(changed.to_json())
    common = ["validate", f"{file}:make_run", "--metrics", "reward=max,loss=min", "--budget", "0.9"]
    for options in ([], ["--baseline", tmp_path / "b.json"]):
        assert command(*common, *options)[0] == status
        assert passed["metrics"] == {"reward": "max", "loss": "min"} and passed["budgets"] == 0.9
    pairs = [dataclasses.replace(x, candidate=0.5 * x.candidate) for x in candidates[0].pairs]
    better = worse(changed, pairs=tuple(pairs)).candidates + candidates[1:]
    (tmp_path / "b.json").write_text(dataclasses.replace(changed, candidates=better).to_json())
    code, out, error = command(*common, "--baseline", tmp_path / "b.json")
    assert code == 1 and "x0: the held-out loss is worse by +100 %" in error
    assert out.startswith(candidates[0].headline)
    assert changed.ok == (status == 0)
    if status:
        with pytest.raises(ValidationFailedError):
            changed.check()
