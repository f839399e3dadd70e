"""Figures of docs/fp8.md against the recorded results."""

import re

from jaxmp import fp8
from jaxmp.fp8._explain import explain_exclusion
from sources import results_of, text_of

PAGE = text_of("docs/fp8.md", "docs/measurements.md")


def test_memory_traffic():
    rows = results_of("fp8_program_h200")["rows"]
    counted = {
        (f"{row['megabytes']:,.0f}", f"{row['kernels']}", f"{row['temporary']:.0f}") for row in rows
    }
    table = PAGE.split("| | MB | kernels | temporary MB |")[1].split("\n\n")[0]
    shown = re.findall(r"\| ([\d,]+) \| (\d+) \| (\d+) \|", table)
    assert len(shown) >= 4 and set(shown) <= counted


def test_models_that_gain():
    rows = results_of("fp8_gain_h200")["rows"]
    assert len(rows) == 15 and all(row["is_right"] for row in rows)
    assert {row["is_admitted"] for row in rows} == {True, False}
    for row in rows:
        rule = fp8.CurrentScaling(tokens=row["tokens"])
        admitted = explain_exclusion(row["width"], 4 * row["width"], rule, "gpu") == ""
        assert admitted == row["is_admitted"]
        before, after = row["temporary_mb"]
        cell = f"{row['speed']:.2f}, {row['kernels'][1]}, {after / before:.2f}"
        (line,) = (line for line in PAGE.splitlines() if line.startswith(f"| {row['width']:,} | "))
        assert cell in line


def test_signal_to_noise():
    columns = ("output", "gradient of the input", "gradient of the kernel")
    ratios = {
        name: " | ".join(str(row[column]) for column in columns)
        for name, row in results_of("fp8_accuracy_cpu")["decibels"].items()
    }
    assert ratios["rowwise"] == ratios["mx"]
    for name in ("current", "current, gradients in E4M3"):
        assert f"| {name} | {ratios[name]} |" in PAGE
    assert f"| rowwise, mx | {ratios['mx']} |" in PAGE


def test_llama_step():
    checks = results_of("program_h200")["checks"]
    ratios = {c["program"]: c["value"] for c in checks if c["quantity"] == "bytes / bf16"}
    sentence = PAGE[PAGE.index("The step of `examples/llama.py`") :].split("(*compiled*")[0]
    shown = re.findall(r"[\d.]{5}", sentence)
    expected = ("fp8", "fp8_delayed", "fp8_delayed, calibrate=False")
    assert shown == [f"{ratios[recipe]:.3f}" for recipe in expected]
