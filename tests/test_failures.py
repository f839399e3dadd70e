"""Public failures of precision, re-created in examples/failures."""

import jax.numpy as jnp
import numpy as np
import pytest

import failures
from failures import FAILURES
from grids import fast_cases

pytestmark = pytest.mark.usefixtures("standard_promotion", "rank_promotion")

# `validate` trains twelve times.
PROGRAMS = [
    pytest.param(each, id=each.program, marks=[pytest.mark.slow] * (each.tool == "validate"))
    for each in FAILURES
]


@fast_cases("router", "half_norm")
@pytest.mark.parametrize("failure", PROGRAMS)
def test_a_failure_is_named_and_its_repair_is_not(failure):
    before, after = failures.run(failure, repaired=False), failures.run(failure, repaired=True)
    assert before.named == failure.named
    assert after.named == set()
    if failure.tool != "validate":  # its figures depend on the machine
        page = failures.PAGE.read_text("utf-8")
        assert all(line in page for line in failures.wrap(before.text))


def test_most_failures_are_named():
    assert len({each.thread for each in FAILURES}) == 12
    assert sum(bool(each.named) for each in FAILURES) >= 10
    page = failures.PAGE.read_text("utf-8")
    for each in FAILURES:
        assert len(each.source(repaired=False).splitlines()) <= 30
        assert failures.row(each) in page and each.diff() in page
        assert f"{failures.GITHUB}{each.thread}" in page


def program(name, repaired, tmp_path):
    (failure,) = (each for each in FAILURES if each.program == name)
    return failures.load(failure, repaired, tmp_path)


def test_the_first_update_of_adam_is_too_small_after_an_update_with_zeros(tmp_path):
    sizes = []
    for repaired in (False, True):
        step, params, *args = program("adam_count", repaired, tmp_path).make_step()
        sizes.append(jnp.abs(step(params, *args)[0]["w"] - params["w"]).max())
    assert sizes[1] / sizes[0] == pytest.approx(1.34, abs=0.01)


def test_weight_gradients_are_rounded_before_the_repair(tmp_path):
    rounded = []
    for repaired in (False, True):
        module = program("weight_gradient", repaired, tmp_path)
        module.LEARNING_RATE = -(2.0**60)  # the kernel vanishes beside its update
        step, *args = module.make_step()
        gradient = np.asarray(step(*args))
        short = np.asarray(jnp.asarray(gradient).astype(jnp.bfloat16).astype(jnp.float32))
        rounded.append((gradient == short).mean())
    assert rounded[0] == 1 and rounded[1] < 0.1
