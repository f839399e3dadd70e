"""Memory traffic of FP8 programs that are compiled for an H200."""

import sys
from pathlib import Path

import pytest

from gpu_compiler import needs_compiler
from grids import fast_cases

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import fp8_program


@needs_compiler
@pytest.mark.parametrize("name", [name for name, row in fp8_program.VARIANTS.items() if row.limits])
@fast_cases("bf16, functional.gelu", "current", "delayed", "current, remat, kernels")
def test_an_mlp_stays_within_its_limits(name):
    variant = fp8_program.VARIANTS[name]
    counts = fp8_program.count(variant)
    assert fp8_program.exceeded(counts, variant.limits) == []
    assert counts.fp8 == (0 if name.startswith("bf16") else fp8_program.MATMULS)


def test_the_limits_can_fail():
    limits = fp8_program.Limits(100, 10, 0.5)
    counts = fp8_program.Counts(101, 11, 200, 17, 1)
    over = ["megabytes", "kernels", "temporary", "matmuls"]
    assert fp8_program.exceeded(counts, limits) == over
