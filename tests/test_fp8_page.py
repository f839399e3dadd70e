"""Figures of docs/fp8.md against the recorded results."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = "".join((ROOT / f"docs/{name}.md").read_text("utf-8") for name in ("fp8", "measurements"))


def recorded(name):
    return json.loads((ROOT / f"benchmarks/results/{name}.json").read_text("utf-8"))


def test_memory_traffic():
    rows = recorded("fp8_program_h200")["rows"]
    counted = {
        (f"{row['megabytes']:,.0f}", f"{row['kernels']}", f"{row['temporary']:.0f}") for row in rows
    }
    table = PAGE.split("| | MB | kernels | temporary MB |")[1].split("\n\n")[0]
    shown = re.findall(r"\| ([\d,]+) \| (\d+) \| (\d+) \|", table)
    assert len(shown) >= 4 and set(shown) <= counted


def test_signal_to_noise():
    columns = ("output", "gradient of the input", "gradient of the kernel")
    ratios = {
        name: " | ".join(str(row[column]) for column in columns)
        for name, row in recorded("fp8_accuracy_cpu")["decibels"].items()
    }
    assert ratios["rowwise"] == ratios["mx"]
    for name in ("current", "current, gradients in E4M3"):
        assert f"| {name} | {ratios[name]} |" in PAGE
    assert f"| rowwise, mx | {ratios['mx']} |" in PAGE


def test_llama_step():
    checks = recorded("program_h200")["checks"]
    ratios = {c["program"]: c["value"] for c in checks if c["quantity"] == "bytes / bf16"}
    sentence = PAGE[PAGE.index("The step of `examples/llama.py`") :].split("(*compiled*")[0]
    shown = re.findall(r"[\d.]{5}", sentence)
    expected = ("fp8", "fp8_delayed", "fp8_delayed, calibrate=False")
    assert shown == [f"{ratios[recipe]:.3f}" for recipe in expected]
