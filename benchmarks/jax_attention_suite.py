"""Runs the attention tests of JAX with `jaxmp.dot_product_attention`.

    git clone --depth 1 https://github.com/jax-ml/jax ~/src/jax
    python benchmarks/jax_attention_suite.py ~/src/jax
    python benchmarks/jax_attention_suite.py ~/src/jax --out table.json     # also writes JSON

Loads `tests/nn_test.py` of the checkout and replaces the name `dot_product_attention` in it. The
tests that call this function run on the CPU with the installed JAX, four times:

- everywhere: each call is passed to jaxmp, with the arguments of the test.
- xla, auto, blockwise: calls with `implementation=None`, which the tests use as their reference,
  are passed to JAX. All other calls are passed to jaxmp, with the implementation of that name.

Prints the counts, and the name and reason of each test that fails or is skipped. A test that passes
without calling jaxmp's function counts as failed. The exit status is 1 if a test failed.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
import unittest
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax

import jaxmp
from result_file import commit_of, parser_of, write_result

NAME = "dot_product_attention"
RUNS = ("everywhere", "xla", "auto", "blockwise")
NOT_CALLED = f"passed without a call of jaxmp.{NAME}"


class Replaced:
    """Module object with some attributes replaced."""

    def __init__(self, module: ModuleType, **attributes: Any) -> None:
        self._module = module
        vars(self).update(attributes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class FunctionUnderTest:
    """Function that calls jaxmp, or JAX where the tests call their reference."""

    def __init__(self) -> None:
        self.run = "everywhere"
        self.calls = 0

    def __call__(self, *args: Any, **options: Any) -> Any:
        if self.run != "everywhere":
            if options.get("implementation", self.run) is None:
                return jax.nn.dot_product_attention(*args, **options)
            options["implementation"] = self.run
        self.calls += 1
        return jaxmp.dot_product_attention(*args, **options)


class Result(unittest.TestResult):
    """Outcome and reason of each test, by name."""

    def __init__(self, function: FunctionUnderTest) -> None:
        super().__init__()
        self.function = function
        self.outcomes: dict[str, tuple[str, str]] = {}

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self.function.calls = 0

    def addSuccess(self, test: unittest.TestCase) -> None:
        called = self.function.calls > 0
        self.outcomes[test.id()] = ("passed", "") if called else ("failed", NOT_CALLED)

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self.outcomes[test.id()] = ("skipped", reason)

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        self.outcomes[test.id()] = ("failed", f"{err[0].__name__}: {err[1]}")

    addFailure = addError


def load(checkout: Path, function: Callable[..., Any]) -> ModuleType:
    """Returns the tests of JAX, with `dot_product_attention` replaced by `function`."""
    path = checkout / "tests/nn_test.py"
    if not path.is_file():
        raise SystemExit(f"{path} does not exist. Give the root of a checkout of JAX.")
    spec = importlib.util.spec_from_file_location("nn_test", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.argv = sys.argv[:1]  # The tests of JAX parse the command line.
    spec.loader.exec_module(module)
    nn = Replaced(jax.nn, **{NAME: function})
    vars(module).update(nn=nn, jax=Replaced(jax, nn=nn))
    return module


def attention_tests(module: ModuleType) -> Iterator[unittest.TestCase]:
    for suite in unittest.defaultTestLoader.loadTestsFromModule(module):
        for test in suite:
            if "dotproductattention" in test.id().lower():
                yield test


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("checkout", type=Path, help="clone of https://github.com/jax-ml/jax")
    options = parser.parse_args()
    function, runs = FunctionUnderTest(), {}
    module = load(options.checkout, function)
    for function.run in RUNS:
        result = Result(function)
        unittest.TestSuite(attention_tests(module)).run(result)
        runs[function.run] = report(function.run, result.outcomes)
    tests = commit_of(options.checkout)
    write_result(options.out, machine=platform.machine(), jax_tests=tests, runs=runs)
    return 1 if any(run["failed"] for run in runs.values()) else 0


def report(name: str, outcomes: dict[str, tuple[str, str]]) -> dict[str, Any]:
    """Prints the results of one run, and returns them for JSON."""
    counts = {
        kind: sum(outcome == kind for outcome, _ in outcomes.values())
        for kind in ("passed", "failed", "skipped")
    }
    print(f"\n{name}: " + ", ".join(f"{count} {kind}" for kind, count in counts.items()))
    others = {
        test.split(".", 1)[1]: f"{outcome}: {reason}"
        for test, (outcome, reason) in outcomes.items()
        if outcome != "passed"
    }
    for test, outcome in others.items():
        first, *rest = outcome.splitlines()
        print(f"  {test}\n    {first}" + " ..." * bool(rest))
    return {**counts, "not_passed": others}


if __name__ == "__main__":
    sys.exit(main())
