"""Programs of sharded training steps, compiled for H200, within the limits of docs/sharding.md."""

import json
import sys

import jax
import pytest

import sharded_programs
from gpu_compiler import needs_compiler
from grids import EXPENSIVE
from sources import results_of

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


@needs_compiler
def test_the_memory_of_all_gathered_layers_exceeds_the_limit():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        memory = sharded_programs.measure_memory("bf16", "Linen", "plain", "FSDP", 8)
    row = {"layout": "ZeRO-1", "recipe": "bf16", "parameters": 1, "gathered": {}, "sums_16_bit": 0}
    assert sharded_programs.violations({**row, **memory}) == []
    # The program with `regather=False`, which gathers 75 MB in one pass.
    kept = memory["needed_limit"] + 75_497_472 // 2
    assert sharded_programs.violations({**row, **memory, "needed": kept}) == [f"needed: {kept}"]
    assert kept - memory["needed"] > 0.6 * 75_497_472


def test_a_run_continues_its_file(tmp_path, monkeypatch, capsys):
    compiled = []

    def measure(*program):
        compiled.append(program)
        names = ("recipe", "framework", "form", "layout", "devices")
        sizes = {"sums_16_bit": 0, "sums_fp32": 1, "gathered": {}, "parameters": 1, "weights": 1}
        sizes |= {"gathered_weights": 1, "kept": 0, "temporary": 1}
        return {**dict(zip(names, program, strict=True)), **sizes}

    def run(*options):
        compiled.clear()
        arguments = ["", "--recipes", "bf16", "--devices", "8", "--out", str(path), *options]
        monkeypatch.setattr(sys, "argv", arguments)
        sharded_programs.main()
        return len(compiled)

    path = tmp_path / "programs.json"
    monkeypatch.setattr(sharded_programs, "measure", measure)
    subset = run()
    assert 0 < subset < 12
    assert run() == 0
    assert run("--full") == 12 - subset
    assert len(json.loads(path.read_text())["rows"]) == 12
    monkeypatch.setattr(sharded_programs, "versions", lambda: {"jax": "another"})
    assert run() == subset


def test_recorded_programs_are_within_the_limits():
    rows = results_of("sharded_programs_h200")["rows"]
    assert {row["devices"] for row in rows} == {8, 16}
    assert {row["form"] for row in rows if "needed" in row} == {"plain", "scan", "remat"}
    for row in rows:
        is_jaxmp = row["recipe"] in sharded_programs.RECIPES
        assert bool(row["sums_16_bit"]) == (not is_jaxmp)
        assert not is_jaxmp or sharded_programs.violations(row) == []


def test_recorded_programs_of_the_oldest_version():
    rows = results_of("sharded_programs_h200_oldest")["rows"]
    own = [row for row in rows if row["recipe"] in sharded_programs.RECIPES]
    assert len(own) > 5 and not any(map(sharded_programs.violations, own))
