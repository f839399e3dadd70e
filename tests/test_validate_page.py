"""The HTML page of a validation."""

import base64
import dataclasses
import importlib.util
import math
import re

import numpy as np
import pytest

from jaxmp._tools.validate import _report
from jaxmp._tools.validate._report import Curve, chart
from jaxmp._tools.validate._rows import (
    CandidateResult,
    Cause,
    Comparison,
    GradientRow,
    MetricChoice,
    ModuleRow,
    TrainingRecord,
)
from jaxmp.typing import ValidationReport

STEPS, SEEDS = 60, (0, 1)


def record(name, seed, factor=1.0, scale=1.0):
    evaluations = tuple(factor * (2 + seed + 1 / (n + 1)) for n in range(3))
    return TrainingRecord(
        name=name,
        seed=seed,
        losses=tuple(factor * (3 - n / STEPS) for n in range(STEPS)),
        gradient_norms=tuple(10.0 ** -(n / STEPS) for n in range(STEPS)),
        loss_scales=(scale,) * STEPS,
        eval_steps=(0, 30, 60),
        evaluations={"loss": evaluations},
    )


def candidate(name, verdict, error):
    modules = [
        ModuleRow(module=module, step=step, order=order, gradient_error=error, activation_error=0.5)
        for step in (0, 59)
        for order, module in enumerate(("embedding", "block/mlp", "head"))
    ]
    return CandidateResult(
        name=name,
        verdict=verdict,
        headline=f"{name}: {verdict}",
        causes=(Cause(id="x", summary="the cause", evidence="evidence", fix="fix(1)"),)
        if verdict == "fail"
        else (),
        checks=(Comparison(name="held_out_loss", verdict=verdict, value=0.01, budget=0.005),),
        gradients=tuple(
            GradientRow(step=step, error=error, cosine=1 - error**2, norm=1.0) for step in (0, 59)
        ),
        modules=tuple(modules),
    )


REPORT = ValidationReport(
    reference="fp32",
    seeds=SEEDS,
    steps=STEPS,
    eval_steps=(0, 30, 60),
    compare_steps=(0, 59),
    metric=MetricChoice(name="loss", reason="The loss decides."),
    candidates=(candidate("bf16", "pass", 0.004), candidate("fp16", "fail", 0.3)),
    runs=tuple(
        record(name, seed, factor, scale)
        for name, factor, scale in (("fp32", 1.0, 1.0), ("bf16", 1.001, 1.0), ("fp16", 1.02, 4.0))
        for seed in SEEDS
    ),
)


@pytest.fixture
def charts(monkeypatch):
    """Returns the curves of each chart of a page by its title, without drawing them."""

    def of(report):
        found = {}

        def record(title, note, curves, **options):
            found[title] = curves, options
            return ""

        monkeypatch.setattr(_report, "chart", record)
        report.to_html()
        return found

    return of


# ---------------------------------------------------------------------------
# Page
# ---------------------------------------------------------------------------


def test_verdicts_come_first_and_then_figures_charts_and_modules():
    page = REPORT.to_html()
    order = ['<h1 class="good">bf16', '<h1 class="bad">fp16', "the cause", "Figures and budgets"]
    order += ["<figure>", "bf16: errors of modules", "fp16: gradients", "fp16: errors of modules"]
    positions = [page.index(text) for text in order]
    assert positions == sorted(positions)
    assert "fix(1)" in page


def test_candidates_with_equal_causes_share_one_remedy():
    names = [f"fp16_{n}" for n in range(22)]
    failed = [dataclasses.replace(REPORT.candidates[1], name=name) for name in names]
    page = dataclasses.replace(REPORT, candidates=tuple(failed)).to_html()
    assert page.count("fix(1)") == page.count("evidence") == 1
    assert all(page.count(f"{name}, ") for name in names[:-1])


def test_the_page_loads_nothing_and_charts_have_a_light_and_a_dark_image():
    page = REPORT.to_html()
    assert not re.search(r"<script|<link|href=|url\(|@import", page) and 'name="viewport"' in page
    sources = re.findall(r'(?:src|srcset)="([^"]{22})', page)
    assert set(sources) == {"data:image/png;base64,"}
    pattern = r'dark\)" srcset="([^"]+)"><img src="([^"]+)" alt="([^"]+)"'
    rows = re.findall(pattern, page)
    assert len(rows) == 5 and all(dark != light for dark, light, _ in rows)
    assert rows[0][2] == "Held-out loss, mean of the seeds, range of the reference"
    images = [base64.b64decode(image.partition(",")[2]) for row in rows for image in row[:2]]
    assert all(image.startswith(b"\x89PNG") and len(image) < 100_000 for image in images)


def test_a_page_without_matplotlib_names_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    page = REPORT.to_html()
    assert "<figure>" not in page and "charts require matplotlib: pip install " in page
    assert "Figures and budgets" in page and "errors of modules" in page
    empty = ValidationReport().to_html()
    assert "matplotlib" not in empty and "<figure>" not in empty


def test_names_are_escaped():
    name = "<b>x</b>"
    hostile = dataclasses.replace(
        REPORT,
        reference=name,
        metric=MetricChoice(name=name),
        candidates=(dataclasses.replace(candidate(name, "pass", 0.1), headline=name),),
        runs=tuple(dataclasses.replace(run, name=name) for run in REPORT.runs),
    )
    module = dataclasses.replace(hostile.candidates[0].modules[0], module=name)
    hostile = dataclasses.replace(
        hostile, candidates=(dataclasses.replace(hostile.candidates[0], modules=(module,)),)
    )
    page = hostile.to_html()
    assert "<b>x" not in page.replace("<b>the cause", "") and "&lt;b&gt;x" in page


# ---------------------------------------------------------------------------
# Charts of training
# ---------------------------------------------------------------------------


def test_charts_of_the_training(charts):
    titles = ["Held-out loss", "Difference of held-out loss", "Training loss", "Gradient norm"]
    drawn = charts(REPORT)
    assert list(drawn) == [*titles, "Loss scale"]
    names = {title: [curve.name for curve in curves] for title, (curves, _) in drawn.items()}
    assert names["Held-out loss"] == ["fp32", "bf16", "fp16"]
    assert names["Difference of held-out loss"] == ["bf16", "fp16"]
    assert names["Loss scale"] == ["fp16"]  # the others have none


def test_the_reference_has_a_band_of_its_seeds(charts):
    reference, bf16, _ = charts(REPORT)["Held-out loss"][0]
    rows = zip(reference.low, reference.y, reference.high, strict=True)
    assert all(low < mean < high for low, mean, high in rows) and not bf16.low


def test_differences_are_paired_by_seed(charts):
    # 2 % at every evaluation and seed, although the seeds of the reference differ by 50 %.
    (_, fp16), options = charts(REPORT)["Difference of held-out loss"]
    np.testing.assert_allclose([*fp16.y, *fp16.low, *fp16.high], 0.02)
    assert options["limits"] == [-0.005, 0.005] and options["label"](0.02) == "2 %"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_values_that_are_not_finite(value):
    assert "<img" in chart("x", "", [Curve(range(5), [1, 2, value, 2, 1], 0, "$x$")])
    assert chart("x", "", [Curve([0], [value], 0, "x")]) == ""
    assert chart("x", "", [Curve([0], [-1.0], 0, "x")], log=10) == ""


# ---------------------------------------------------------------------------
# Tables
# ---------------------------------------------------------------------------


def test_modules_have_a_column_per_quantity_and_step():
    root = dataclasses.replace(REPORT.candidates[1].modules[0], module="block", gradient_error=None)
    fp16 = dataclasses.replace(REPORT.candidates[1], modules=(*REPORT.candidates[1].modules, root))
    page = dataclasses.replace(REPORT, candidates=(fp16,)).to_html()
    table = page[page.index("fp16: errors of modules by step") :]
    head, *rows = re.findall(r"<tr>(.*?)</tr>", table[: table.index("</table>")])
    cells = lambda row: re.findall(r"<t[dh][^>]*>([^<]*(?:<wbr>[^<]*)?)</t[dh]>", row)
    assert cells(head) == ["module", "output 0", "output 59", "gradient 0", "gradient 59"]
    assert [cells(row)[0] for row in rows] == ["embedding", "block/<wbr>mlp", "head", "block"]
    assert cells(rows[0])[1:] == ["50 %", "50 %", "30 %", "30 %"]
    assert cells(rows[3])[1:] == ["50 %", "", "", ""]
