"""The optimizer step in programs cross-compiled for an H200."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gpu_compiler import needs_compiler
from grids import pairwise

ROOT = Path(__file__).parent.parent
STORAGE = ("fp32 parameters", "bf16 + FP32 masters", "bf16, packed")

pytestmark = needs_compiler


def test_the_guard_reads_the_gradients_once_and_nothing_more_when_clipping_does():
    # The script measures all twelve combinations.
    combinations = pairwise(STORAGE, (False, True), ("none", "auto"))
    code = (
        "import json, optimizer_bytes as o;"
        f"print(json.dumps([o.measure({combinations}), o.FLOORS]))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'benchmarks'}", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    rows, floors = json.loads(result.stdout.splitlines()[-1])
    assert len(rows) == len(combinations)
    for row in rows:
        extra_pass = row["clip"] or row["skip"] == "auto"
        assert row["passes_over_gradients"] == (2 if extra_pass else 1), row
        # 4 bytes per parameter for each pass over FP32 gradients; scalars are negligible for 16 M
        # parameters.
        floor = floors[row["storage"]] + 4 * extra_pass
        assert row["bytes_per_parameter"] == pytest.approx(floor, abs=0.02), row
        assert row["temp_bytes_per_parameter"] < 0.01, row
