"""The HTML page of a validation."""

import dataclasses
import importlib.util
import math
import re
from xml.etree import ElementTree

import pytest

from jaxmp._report._chart import Curve, chart
from jaxmp._validate._rows import (
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


def images(page):
    """Returns the charts as parsed SVG by their captions; the keys of the legend are left out."""
    pattern = r"<figure><figcaption>([^<]+).*?</figcaption>(<svg.*?</svg>)</figure>"
    return {
        title.strip(): ElementTree.fromstring(svg)
        for title, svg in re.findall(pattern, page, re.DOTALL)
    }


def groups(image, name):
    """Returns the paths of the groups of a class, such as "curve"."""
    found = (group for group in image.iter("g") if name in group.get("class", "").split())
    return [path for group in found for path in group.iter("path")]


def curves(image):
    return groups(image, "curve")


def points(path):
    return [tuple(map(float, pair)) for pair in re.findall(r"([\d.]+) ([\d.]+)", path.get("d"))]


def labels(image):
    return ["".join(text.itertext()) for text in image.iter("text")]


# ---------------------------------------------------------------------------
# Page
# ---------------------------------------------------------------------------


def test_verdicts_come_first_and_then_figures_charts_and_modules():
    page = REPORT.to_html()
    order = ['<h1 class="good">bf16', '<h1 class="bad">fp16', "Figures and budgets", "<figure>"]
    order += ["bf16: errors of modules", "fp16: gradients", "fp16: errors of modules"]
    positions = [page.index(text) for text in order]
    assert positions == sorted(positions)
    assert "the cause" in page and "fix(1)" in page


def test_the_page_has_no_scripts_and_loads_nothing():
    page = REPORT.to_html()
    assert not re.search(r"<script|<link|<img|src=|href=|url\(|@import", page)
    assert "prefers-color-scheme: dark" in page and 'name="viewport"' in page


def test_colours_of_charts_follow_the_scheme():
    for image in images(REPORT.to_html()).values():
        assert {"figure", "style"}.isdisjoint(element.tag for element in image.iter())
        for element in image.iter():
            assert element.get("id") is None
            colours = re.findall(r"(?:fill|stroke): ([^;]+)", element.get("style", ""))
            assert all(colour == "none" or "var(--" in colour for colour in colours)


def test_a_page_without_matplotlib_names_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    page = REPORT.to_html()
    assert "<figure>" not in page and "charts require matplotlib: pip install " in page
    assert "Figures and budgets" in page and "errors of modules" in page
    assert "matplotlib" not in ValidationReport().to_html()


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


def test_an_empty_report_has_a_page():
    assert "<figure>" not in ValidationReport().to_html()


# ---------------------------------------------------------------------------
# Charts of training
# ---------------------------------------------------------------------------


def test_charts_of_the_training():
    charts = images(REPORT.to_html())
    titles = ["Held-out loss", "Difference of held-out loss", "Training loss", "Gradient norm"]
    assert list(charts) == [*titles, "Loss scale"]
    assert [len(curves(charts[title])) for title in charts] == [3, 2, 3, 3, 1]


def test_the_reference_has_a_band_of_its_seeds():
    image = images(REPORT.to_html())["Held-out loss"]
    (band,) = groups(image, "band")
    middle, around = points(curves(image)[0]), points(band)
    for x, y in middle:
        ys = [other for at, other in around if at == pytest.approx(x, abs=0.01)]
        assert min(ys) < y < max(ys)


def test_differences_are_paired_by_seed():
    # 2 % at every evaluation and seed, although the seeds of the reference differ by 50 %.
    image = images(REPORT.to_html())["Difference of held-out loss"]
    bf16, fp16 = map(points, curves(image))
    assert len({y for _, y in bf16}) == len({y for _, y in fp16}) == 1
    assert "0 %" in labels(image) and "2 %" in labels(image)
    assert len(groups(image, "limit")) == 2  # the budget in both directions


def test_a_candidate_without_a_loss_scale_has_no_curve_of_it():
    image = images(REPORT.to_html())["Loss scale"]
    assert len(curves(image)) == len(groups(image, "s2")) / 2 == 1  # and its band


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_values_that_are_not_finite_interrupt_a_curve(value):
    image = images(chart("x", "", [Curve(range(5), [1, 2, value, 2, 1], 0)]))["x"]
    (path,) = curves(image)
    assert path.get("d").count("M") == 2 and len(points(path)) == 4
    assert chart("x", "", [Curve([0], [value], 0)]) == ""


def test_logarithmic_axes():
    values = [1e-6, 1e-3, 1.0]
    (path,) = curves(images(chart("x", "", [Curve([0, 1, 2], values, 0)], log=10))["x"])
    (_, low), (_, high) = points(path)[0], points(path)[-1]
    middle = [y for _, y in points(path)[1:-1]]  # collinear points may be left out
    assert low > high and all(y == pytest.approx((low + high) / 2, abs=0.2) for y in middle)
    positive = images(chart("x", "", [Curve([0, 1, 2], [0.0, 1.0, 20.0], 0)], log=10))["x"]
    assert len(points(curves(positive)[0])) == 2


def test_long_curves_are_averaged_in_bins():
    (path,) = curves(images(chart("x", "", [Curve(range(10_000), [1.0, 3.0] * 5_000, 0)]))["x"])
    assert len(points(path)) <= 250
    assert len({y for _, y in points(path)}) == 1


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


def test_cells_of_wide_tables_have_names_for_phones():
    """A style sheet shows the attribute before each cell, where the row is a list."""
    page = REPORT.to_html()
    table = page[page.index("Figures and budgets") :]
    assert table.index('<div class="wide stacked">') < table.index("<table>")
    cells = re.findall(r'<td[^>]* data-name="([^"]*)"', table[: table.index("</table>")])
    assert cells[:6] == ["candidate", "figure", "value", "95 % interval", "budget", "verdict"]
    assert "content: attr(data-name)" in page
    narrow = table[table.index("bf16: training") :]
    assert "data-name" not in narrow[: narrow.index("</table>")]
