"""Limits of benchmarks/overhead.py, its recorded figures, and the page of tables."""

import json

import jax
import pytest

import overhead
import step_counts
import tables
from grids import EXPENSIVE


@pytest.fixture
def two_layers(monkeypatch):
    """Uses two layers, under standard promotion: optax's Adam computes `float ** int`."""
    monkeypatch.setattr(step_counts, "LAYERS", 2)
    step_counts.init_params.cache_clear()
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
    step_counts.init_params.cache_clear()


@EXPENSIVE
def test_operations_of_the_traced_recipe(two_layers):
    """As many as with other libraries, and within the limit over a hand-written guard.

    The others round weight gradients to bfloat16. With FP32 results, each of these matmuls has a
    transposition and conversions of its own.
    """

    def operations(make):
        step, state = make()
        lowered = jax.jit(step).lower(state, step_counts.TOKENS)
        return len(step_counts._STABLEHLO_OP.findall(lowered.as_text()))

    programs = (overhead.OURS, "hand-written, same guard", "Flax DynamicScale", "jmp")
    counts = {name: operations(overhead.PROGRAMS[name]) for name in programs}
    ours, by_hand, *others = counts.values()
    assert ours <= 1.01 * min(others)
    assert ours <= step_counts.LIMITS["b"]["stablehlo_ops"] * by_hand


@pytest.mark.slow
def test_the_compiled_recipe_is_smaller_than_other_guards(two_layers):
    names = (overhead.OURS, "Flax DynamicScale")
    rows = {name: step_counts.count(overhead.PROGRAMS[name]) for name in names}
    assert rows[overhead.OURS]["hlo_ops"] < rows[names[1]]["hlo_ops"] / 2
    assert rows[overhead.OURS]["stablehlo_ops"] < 1.01 * rows[names[1]]["stablehlo_ops"]


def test_a_library_that_is_ahead_is_named():
    rows = {overhead.OURS: {"flops": 1.1, "hlo_ops": 1.3}, "jmp": {"flops": 1.05, "hlo_ops": 9.0}}
    (sentence,) = overhead.peers_ahead(rows)
    assert sentence == "jmp is ahead in flops: 1.05, and the recipe has 1.1"
    assert overhead.peers_ahead({**rows, "jmp": {"skipped": "jmp is not installed"}}) == []


def test_the_recipe_is_ahead_in_the_recorded_rows():
    report = json.loads((tables.RESULTS / "overhead_cpu.json").read_text("utf-8"))
    rows = report["rows"]
    assert set(rows) == set(overhead.PROGRAMS) - {"hand-written"}
    # The libraries that the development environment contains.
    assert not [name for name in ("Flax DynamicScale", "jmp") if "skipped" in rows[name]]
    assert overhead.peers_ahead(rows) == []


def test_the_page_is_that_of_the_recorded_results():
    assert tables.PAGE.read_text("utf-8") == tables.page(), "Run: python benchmarks/tables.py"


def test_a_result_that_was_not_measured_leaves_out_its_table(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    page = tables.page()
    assert page.startswith("# Benchmarks") and "| not measured yet |" in page
    assert "## What a recipe adds" not in page and "w1:" not in page
