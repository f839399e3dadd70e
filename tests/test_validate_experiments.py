"""Recorded validations of the examples, the calibration of the verdicts, and their page."""

import dataclasses
import json
from pathlib import Path

import pytest

import validate_calibration
import validate_models
from jaxmp._validate._rows import TrainingRecord
from validate_calibration import cut, judge, plant

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/validate.md").read_text("utf-8")
RESULTS = {
    path.name.removeprefix("validation_").removesuffix("_cpu.json"): json.loads(
        path.read_text("utf-8")
    )
    for path in sorted((ROOT / "benchmarks/results").glob("validation_*_cpu.json"))
}
CALIBRATION = json.loads(
    (ROOT / "benchmarks/results/validate_calibration_cpu.json").read_text("utf-8")
)


def record(seed, final):
    return TrainingRecord(
        name="x",
        seed=seed,
        losses=(5.0, 4.0, 3.0, final),
        loss_scales=(1.0,) * 4,
        eval_steps=(0, 2, 4),
        evaluations={"loss": (5.0, 3.5, final)},
        weight_norms=(1.0,) * 3,
    )


REFERENCE = [record(seed, 2.0 + 0.1 * seed) for seed in range(3)]


# ---------------------------------------------------------------------------
# Calibration
# ---------------------------------------------------------------------------


def test_a_planted_difference_changes_the_held_out_loss_alone():
    planted = plant(REFERENCE[0], 0.01)
    assert planted.evaluations["loss"][-1] == pytest.approx(2.02)
    assert dataclasses.replace(planted, evaluations={}) == dataclasses.replace(
        REFERENCE[0], evaluations={}
    )


def test_verdicts_of_planted_differences():
    assert judge(REFERENCE, REFERENCE) == "pass"
    assert judge(REFERENCE, [plant(each, 0.004) for each in REFERENCE]) == "pass"
    assert judge(REFERENCE, [plant(each, 0.01) for each in REFERENCE]) == "fail"
    noisy = [plant(each, size) for each, size in zip(REFERENCE, (0.0, 0.02, -0.02), strict=True)]
    assert judge(REFERENCE, noisy) == "inconclusive"


def test_a_shorter_run_ends_with_an_earlier_evaluation():
    shorter = cut(REFERENCE[0], 1)
    assert shorter.losses == (5.0, 4.0) and shorter.evaluations == {"loss": (5.0, 3.5)}
    assert shorter.eval_steps == (0, 2) and len(shorter.weight_norms) == 2


def test_recorded_verdicts_are_calibrated():
    """With the seeds and steps of the documentation: the last row of each candidate."""
    rows = {row["candidate"]: row for row in CALIBRATION["rows"]}
    repetitions = CALIBRATION["repetitions"]
    assert repetitions == 20
    for name in validate_calibration.HEALTHY:
        assert rows[name]["seeds"] == rows[f"{name} + 1 %"]["seeds"] == 3
        assert all(row["fail"] == 0 for row in CALIBRATION["rows"] if row["candidate"] == name)
        assert rows[name]["pass"] == repetitions
        assert rows[f"{name} + 1 %"]["fail"] >= 19


def test_the_page_shows_the_calibration():
    assert validate_calibration.table(CALIBRATION) in PAGE


# ---------------------------------------------------------------------------
# Models
# ---------------------------------------------------------------------------


def test_recorded_experiments_exist():
    assert set(RESULTS) <= set(validate_models.EXPERIMENTS)
    for name, report in RESULTS.items():
        experiment = validate_models.EXPERIMENTS[name]
        names = [candidate["name"] for candidate in report["candidates"]]
        assert names == list(experiment.candidates)


@pytest.mark.parametrize("name", RESULTS)
def test_the_page_shows_the_experiments(name):
    assert validate_models.table(name, RESULTS[name]) in PAGE


@pytest.mark.parametrize("name", RESULTS)
def test_healthy_recipes_pass_and_others_fail(name):
    unhealthy = {"fp16, epsilon 1e-8", "clip, then unscale"}
    for candidate in RESULTS[name]["candidates"]:
        if candidate["name"] in validate_models.HEALTHY:
            assert candidate["verdict"] == "pass", candidate["headline"]
        elif candidate["name"] in unhealthy:
            assert candidate["verdict"] == "fail", candidate["headline"]
            assert candidate["causes"], candidate["headline"]


def test_recipes_that_pass_in_the_small_model_pass_in_the_large_model():
    small, large = (
        {each["name"]: each["verdict"] for each in RESULTS[name]["candidates"]}
        for name in ("small", "large")
    )
    assert small.pop("bf16, no masters") == "fail"
    assert large.pop("bf16, no masters") == "inconclusive"  # stated in the page
    assert small == large == dict.fromkeys(small, "pass")
