"""The optimizer step in programs cross-compiled for an H200."""

import pytest

import optimizer_bytes
from gpu_compiler import needs_compiler
from grids import EXPENSIVE, pairwise

STORAGE = ("fp32 parameters", "bf16 + FP32 masters", "bf16, packed")

pytestmark = [needs_compiler, pytest.mark.usefixtures("standard_promotion", "rank_promotion")]


def check_floor(row):
    extra_pass = row["clip"] or row["skip"] == "auto"
    assert row["passes_over_gradients"] == (2 if extra_pass else 1), row
    # A pass over the gradients reads them once; scalars are negligible.
    floor = row["floor"] + row["gradient_bytes"] * extra_pass
    assert row["bytes_per_parameter"] == pytest.approx(floor, abs=0.02), row
    assert row["temp_bytes_per_parameter"] < 0.01, row


@EXPENSIVE
def test_the_guard_reads_the_gradients_once_and_nothing_more_when_clipping_does():
    # The script measures all 24 combinations.
    combinations = pairwise(STORAGE, (False, True), ("none", "auto"), ("FP32", "bf16"))
    # Masters, clipping and a guard together are what XLA is most likely to split.
    combinations += [
        (storage, True, "auto", gradients)
        for storage in STORAGE[1:]
        for gradients in ("FP32", "bf16")
        if (storage, True, "auto", gradients) not in combinations
    ]
    rows = optimizer_bytes.measure(combinations)
    assert len(rows) == len(combinations)
    for row in rows:
        check_floor(row)


@EXPENSIVE
def test_a_program_with_one_matrix_reaches_the_floor():
    combinations = [(storage, True, "auto", "FP32") for storage in STORAGE]
    for row in optimizer_bytes.measure(combinations, [(4096, 4096)]):
        check_floor(row)
