"""The optimizer step in programs cross-compiled for an H200."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gpu_compiler import needs_compiler
from grids import EXPENSIVE, pairwise

ROOT = Path(__file__).parent.parent
STORAGE = ("fp32 parameters", "bf16 + FP32 masters", "bf16, packed")

pytestmark = needs_compiler


@EXPENSIVE
def test_the_guard_reads_the_gradients_once_and_nothing_more_when_clipping_does():
    # The script measures all 24 combinations.
    combinations = pairwise(STORAGE, (False, True), ("none", "auto"), ("FP32", "bf16"))
    code = f"import json, optimizer_bytes as o; print(json.dumps(o.measure({combinations})))"
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'benchmarks'}", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    rows = json.loads(result.stdout.splitlines()[-1])
    assert len(rows) == len(combinations)
    for row in rows:
        extra_pass = row["clip"] or row["skip"] == "auto"
        assert row["passes_over_gradients"] == (2 if extra_pass else 1), row
        # A pass over the gradients reads them once; scalars are negligible for 16 M parameters.
        floor = row["floor"] + row["gradient_bytes"] * extra_pass
        assert row["bytes_per_parameter"] == pytest.approx(floor, abs=0.02), row
        assert row["temp_bytes_per_parameter"] < 0.01, row
