"""Programs of sharded training steps, compiled for H200, within the limits of docs/sharding.md."""

import json
from pathlib import Path

import jax
import pytest

import sharded_programs
from gpu_compiler import needs_compiler
from grids import EXPENSIVE

# Recipe, framework, form, layout and number of GPUs.
PROGRAMS = [
    ("bf16", "Linen", "plain", "FSDP", 8),
    ("fp8", "Linen", "plain", "FSDP x TP", 16),
    ("bf16", "NNX", "remat", "ZeRO-1", 8),
    ("fp16_params", "NNX", "remat", "FSDP", 16),
]


def measure(*program, **changes):
    """Measures a program; optax requires standard promotion."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return sharded_programs.measure(*program, **changes)


@needs_compiler
@pytest.mark.parametrize("program", PROGRAMS, ids=str)
@EXPENSIVE
def test_programs_are_within_the_limits(program):
    assert sharded_programs.violations(measure(*program)) == []


@needs_compiler
@EXPENSIVE
def test_gathered_weights_that_are_kept_exceed_the_limits():
    row = measure("bf16", "Linen", "plain", "FSDP", 8, regather=False)
    exceeded = {text.partition(":")[0] for text in sharded_programs.violations(row)}
    assert exceeded == {"gathered_weights", "kept"}


def test_recorded_programs_are_within_the_limits():
    path = Path(__file__).parents[1] / "benchmarks/results/sharded_programs_h200.json"
    rows = json.loads(path.read_text())["rows"]
    assert {row["devices"] for row in rows} == {8, 16}
    for row in rows:
        is_jaxmp = row["recipe"] in sharded_programs.RECIPES
        assert bool(row["sums_16_bit"]) == (not is_jaxmp)
        assert not is_jaxmp or sharded_programs.violations(row) == []
