"""Validation with `target`: memory and kernels of the step compiled for an absent GPU."""

import dataclasses
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

import jaxmp
from gpu_compiler import needs_compiler
from grids import EXPENSIVE
from jaxmp import cli
from test_validate import make_run

# The defaults of JAX, as users of Flax and optax have them.
pytestmark = pytest.mark.usefixtures("standard_promotion", "rank_promotion")

OPTIONS = dict(steps=2, seeds=1, budgets=0.9, target="h200")


def make_larger_run(recipe, seed):
    """Returns a run whose step has a sort, and a temporary array, in addition."""
    run = make_run(recipe, seed)

    def step(state, x):
        new, metrics = run.step(state, x)
        rows = jnp.sort(jnp.tile(x.astype(jnp.float32), (64, 1)), axis=0)
        return new, {**metrics, "loss": metrics["loss"] + 0 * jnp.sum(jnp.sin(rows[::2]))}

    return dataclasses.replace(run, step=step)


@needs_compiler
@EXPENSIVE
def test_memory_and_kernels_for_the_target_are_compared_with_the_baseline(tmp_path):
    file = tmp_path / "baseline.json"
    report = jaxmp.validate(make_run, ["bf16"], **OPTIONS)
    report.check()
    program = report["bf16"].program
    assert "H200" in program.target and report.program.target == program.target
    assert program.kernels > 0 and program.argument_bytes > 0
    file.write_text(report.to_json())
    jaxmp.validate(make_run, ["bf16"], **OPTIONS).check(baseline=file)
    with pytest.raises(
        jaxmp.errors.ValidationFailedError, match=r"the compiled program rose from \d+ to"
    ):
        jaxmp.validate(make_larger_run, ["bf16"], **OPTIONS).check(baseline=file)


RUN = """
import sys

sys.path.insert(0, {folder!r})
from test_validate import make_run
from test_validate_target import make_larger_run
"""


@needs_compiler
@EXPENSIVE
def test_the_command_compares_the_program_for_the_target(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "target_run.py").write_text(RUN.format(folder=str(Path(__file__).parent)))

    def run(function, *options):
        common = ["--steps", "2", "--seeds", "1", "--recipes", "bf16", "--target", "h200"]
        with pytest.raises(SystemExit) as stop:
            cli.main(
                ["validate", f"target_run.py:{function}", *common, "--budget", "0.9", *options]
            )
        return stop.value.code, capsys.readouterr()

    code, printed = run("make_run", "--full", "--baseline", "b.json", "--write-baseline")
    assert code == 0 and "kernels" in printed.out
    code, printed = run("make_larger_run", "--baseline", "b.json")
    assert code == 1 and "bf16: the compiled program rose from" in printed.err


def test_an_unknown_target_is_refused_before_the_training():
    def fail(recipe, seed):
        raise AssertionError("make_run was called")

    with pytest.raises(jaxmp.JaxmpError, match="h2000"):
        jaxmp.validate(fail, ["bf16"], steps=4, target="h2000")


def test_a_reference_that_diverges_is_named_before_the_candidates_train():
    trained = []

    def make(recipe, seed):
        trained.append(recipe.name)
        run = make_run(recipe, seed)

        def step(state, x):
            new, metrics = run.step(state, x)
            return new, {**metrics, "loss": jnp.where(new.step > 2, jnp.nan, metrics["loss"])}

        return dataclasses.replace(run, step=step)

    match = r"The reference 'fp32' ends with a training loss of nan .* seed 0, first at step 2"
    with pytest.raises(jaxmp.errors.ValidationError, match=match):
        jaxmp.validate(make, ["bf16"], steps=4, seeds=1)
    assert set(trained) == {"fp32"}
