"""Dtypes of train steps that are compiled for Google TPUs, read without the parser of jaxmp."""

import json

import pytest

import tpu_programs
from gpu_compiler import needs_libtpu
from grids import EXPENSIVE
from processes import run_script
from sources import ROOT, results_of

ROWS = results_of("tpu_programs")["rows"]

TEXT = """
%fused (p.1: bf16[8,4], p.2: f32[4,4]) -> f32[8,4] {
  %p.1 = bf16[8,4]{1,0:T(8,128)(2,1)} parameter(0)
  %p.2 = f32[4,4]{1,0:T(8,128)} parameter(1)
  ROOT %c.1 = f32[8,4]{1,0:T(8,128)} convolution(%p.1, %p.2), dim_labels=bf_io->bf
}
ENTRY %main (a: bf16[4,8]) -> bf16[8,8] {
  %a = bf16[4,8]{1,0} parameter(0)
  %gathered = bf16[8,8]{1,0} all-gather(%a), dimensions={0}
  %summed = bf16[8,8]{1,0} all-reduce(%gathered), to_apply=%add
  ROOT %d = bf16[8,8]{1,0} dot(%gathered, /*index=1*/%summed), lhs_contracting_dims={1}
}
"""


def test_matmuls_and_collectives_of_a_text():
    assert tpu_programs.read_program(TEXT) == {
        "matmuls": {"bf16 x f32": 1, "bf16 x bf16": 1},
        "kernels": {},
        "sent": {"all-gather bf16": 1, "all-reduce bf16": 1},
        "rounded": {"[8,8]": 1},
    }


def check(row):
    if row["recipe"] == "fp16":
        *warning, note = row["refused"]  # The warning is shown once in a process.
        assert all("multiply bfloat16 natively, and not float16" in each for each in warning)
        assert all("jaxmp.load_recipe('bf16')" in each for each in (*warning, note))
        return warning
    assert row["refused"] == [] and row["agrees"]
    assert row["matmuls"]["bf16 x bf16"] > 10
    # The attention of this Llama is in FP32 by its authors, which the audit reports.
    assert row["wide"] == (10 if row["model"] == "llama" else 0)
    assert bool(row["sent"]) == (row["devices"] > 1)
    if row["model"] != "nnx":
        # Vectors that are gathered by a reduction; gradients of weights have two axes.
        assert all("," not in shape for shape in row["rounded"])


def test_recorded_programs_have_no_wide_matmuls():
    for column, values in {
        "chip": tpu_programs.CHIPS,
        "recipe": tpu_programs.RECIPES,
        "model": tpu_programs.MODELS,
        "devices": (1, 4),
    }.items():
        assert {row[column] for row in ROWS} >= set(values)
    assert len(ROWS) == 3 * (2 * 4 + 4 + 1)
    assert any([check(row) for row in ROWS])


@needs_libtpu
@EXPENSIVE
@pytest.mark.parametrize("recipe", ["bf16", "fp16"])
def test_a_program_for_a_tpu(recipe, tmp_path):
    # In a process of its own, because libtpu prints.
    out = tmp_path / "rows.json"
    options = ["--chips", "v6e", "--models", "linen", "--recipes", recipe, "--out", out]
    done = run_script(ROOT / "benchmarks/tpu_programs.py", *options)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads(out.read_text("utf-8"))["rows"]
    assert [row["devices"] for row in rows] == ([1, 4] if recipe == "bf16" else [1])
    for row in rows:
        check(row)
