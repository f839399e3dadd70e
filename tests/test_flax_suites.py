"""The comparison of Flax's tests with and without a recipe, on a small artificial checkout."""

import json

import pytest

import flax_suites
from grids import EXPENSIVE
from sources import ROOT, text_of

MEASURED = sorted((ROOT / "benchmarks/results").glob("flax_suites_*.json"))

TESTS = {
    "tests/linen/tiny_test.py": """
import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest


def test_dense():
    x = jnp.full((1, 2), 1.001)
    dense = nn.Dense(1, use_bias=False, kernel_init=nn.initializers.ones)
    out, _ = dense.init_with_output(jax.random.key(0), x)
    assert abs(out.item() - 2.002) < 1e-6


def test_fails_plain():
    assert nn.Dense(1) is None


@pytest.mark.skip
def test_skipped():
    pass


def test_without_a_module():
    assert jnp.ones(()) == 1
""",
    "tests/nnx/nn/tiny_test.py": """
import jax.numpy as jnp
from flax import nnx


class TwoLayers(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(2, 2, use_bias=False, kernel_init=nnx.initializers.ones, rngs=rngs)
        self.second = nnx.Linear(2, 1, use_bias=False, kernel_init=nnx.initializers.ones, rngs=rngs)

    def __call__(self, x):
        return self.second(self.first(x))


def test_two_layers():
    out = TwoLayers(nnx.Rngs(0))(jnp.full((1, 2), 1.001))
    assert abs(out.item() - 4.004) < 1e-6


def test_raises_on_other_dtypes():
    out = TwoLayers(nnx.Rngs(0))(jnp.ones((1, 2)))
    {"float32": None}[str(out.dtype)]
""",
}
LINEN, NNX = "tests/linen/tiny_test.py::", "tests/nnx/nn/tiny_test.py::"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    folder = tmp_path_factory.mktemp("flax")
    for name, text in TESTS.items():
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture(scope="module")
def outcomes(checkout):
    """Returns the outcomes of all tests by recipe; `c=bf16,o=bf16` fails tests that assert FP32."""
    files = list(flax_suites.test_files(checkout, ("tests/linen", "tests/nnx/nn")))
    recipes = None, "fp32", "p=f32,c=bf16,o=bf16"
    return [flax_suites.run(checkout, files, recipe) for recipe in recipes]


@pytest.mark.slow
def test_fp32_gives_plain_results(outcomes):
    plain, fp32, _ = outcomes
    compared = flax_suites.compare(plain, fp32)
    assert compared == {
        "counted": 4,
        "passed": 4,
        "with_wrapped_module": 3,
        "fails_plain": [f"{LINEN}test_fails_plain"],
        "skipped": [f"{LINEN}test_skipped"],
        "exceptions": {},
    }


@pytest.mark.slow
def test_a_wrong_wrap_is_an_exception(outcomes):
    plain, _, wrong = outcomes
    exceptions = flax_suites.compare(plain, wrong)["exceptions"]
    assert set(exceptions) == {
        f"{LINEN}test_dense",
        f"{NNX}test_two_layers",
        f"{NNX}test_raises_on_other_dtypes",
    }
    assert exceptions[f"{NNX}test_raises_on_other_dtypes"] == "KeyError: 'bfloat16'"
    report = {"suites": {"all": {"exceptions": exceptions}}}
    assert flax_suites.unexplained(report) == list(exceptions)


@pytest.mark.slow
def test_crashes_leave_failed_assertions_out(outcomes):
    plain, _, wrong = outcomes
    crashes = flax_suites.compare(plain, wrong, crashes=True)
    assert list(crashes["exceptions"]) == [f"{NNX}test_raises_on_other_dtypes"]


def test_a_test_that_did_not_run_is_an_exception():
    plain = {"a": {"outcome": "passed", "error": ""}}
    assert list(flax_suites.compare(plain, {})["exceptions"]) == ["a"]


@EXPENSIVE
def test_a_broken_test_file_is_named(tmp_path):
    file = tmp_path / "broken_test.py"
    file.write_text("import a_package_that_does_not_exist\n")
    with pytest.raises(RuntimeError, match=r"broken_test\.py"):
        flax_suites.run(tmp_path, [file], None)


def test_outcomes_are_kept_and_used_again(tmp_path):
    outcomes = {"tests/linen/a_test.py::test_a": {"outcome": "passed", "error": ""}}
    for recipe in ("plain", "fp32"):
        (tmp_path / f"linen-a_test-{recipe}.json").write_text(json.dumps(outcomes))
    (tmp_path / "tests/linen").mkdir(parents=True)
    (tmp_path / "tests/linen/a_test.py").write_text("raise RuntimeError('this must not run')")
    report = flax_suites.measure(tmp_path, {"linen": ("tests/linen",)}, "fp32", tmp_path)
    assert report["suites"]["linen"]["passed"] == 1


def test_the_page_shows_what_was_measured_and_explains_every_exception():
    reports = [json.loads(file.read_text()) for file in MEASURED]
    assert reports and not [name for report in reports for name in flax_suites.unexplained(report)]
    page = text_of("docs/compatibility.md")
    for table in flax_suites.markdown(reports):
        assert table in page
