"""Runs the tests of Flax with every outermost module under a recipe, and compares with plain Flax.

    python benchmarks/flax_suites.py ~/src/flax                     # runs, prints, compares
    python benchmarks/flax_suites.py ~/src/flax --only nnx          # suites or files by name
    python benchmarks/flax_suites.py ~/src/flax --out suites.json   # also writes JSON
    python benchmarks/flax_suites.py ~/src/flax --keep runs         # continues an earlier run
    python benchmarks/flax_suites.py ~/src/flax --recipe bf16 --crashes
    python benchmarks/flax_suites.py --markdown suites.json         # that JSON as Markdown

The tests come from the checkout, and Flax is the installed package, so use a checkout of the
installed version. Each unedited test file runs twice, in separate processes: with plain Flax, and
with every outermost module wrapped by the plugin `wrap_outermost`, whose docstring describes how.
Under `fp32`, every test that passes with plain Flax must pass when wrapped. Tests that fail with
plain Flax are listed and not counted. The exceptions in `EXPECTED` are listed with their reasons;
any other exception makes the exit status 1.

With a 16-bit recipe, results differ from FP32 as expected, so tests of values, dtypes and printed
text fail. With `--crashes`, only tests that raise an error other than AssertionError are
exceptions.

Tests run on the CPU with most optimizations of XLA disabled, because nothing is timed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from result_file import commit_of, parser_of, table, write_result

SUITES = {
    "linen": ("tests/linen",),
    "nnx": ("tests/nnx/nn", "tests/nnx/bridge"),
}

# Tests that pass plain and fail wrapped in `fp32`, each with the reason.
DTYPE = (
    "The layer has a dtype argument and the test asserts on it. A recipe overrides that argument; "
    "a rule sets another dtype for the layer."
)
CLASS = (
    "The test compares the exact class of the model, or the model itself, with a module that the "
    "plugin did not wrap. The class of a wrapped model is a subclass."
)
EXPECTED = {
    "tests/linen/linen_attention_test.py::AttentionTest"
    "::test_mixed_precision_multihead_attention1": DTYPE,
    "tests/linen/linen_module_test.py::ModuleTest::test_bind_unbind_equality": CLASS,
    "tests/linen/linen_module_test.py::ModuleTest::test_module_apply_method": CLASS,
    "tests/linen/linen_module_test.py::ModuleTest::test_module_paths": CLASS,
    "tests/linen/linen_module_test.py::ModuleTest::test_module_trace": (
        "The test compares the printed text of a running model, in which layers show the dtype "
        "that the recipe sets in place of None."
    ),
    "tests/nnx/nn/lora_test.py::TestLora::test_dtype": DTYPE,
    "tests/nnx/nn/lora_test.py::TestLora::test_lora_base_module": (
        "`recipe.wrap` returns a copy of a model, and the test compares the submodule of the copy "
        "with the object that it passed to the model."
    ),
    "tests/nnx/nn/recurrent_test.py::TestLSTMCell::test_lstm_with_different_dtypes": DTYPE,
    "tests/nnx/nn/recurrent_test.py::TestRNN::test_rnn_with_different_dtypes": DTYPE,
    "tests/nnx/bridge/wrappers_test.py::TestCompatibility::test_to_linen_method_call": (
        "Flax's ToLinen looks up methods on the class that it was constructed with, and jaxmp "
        "asks for a function there. With nnx_method='attend' the call works."
    ),
}

# ---------------------------------------------------------------------------
# Running one file, plain or wrapped
# ---------------------------------------------------------------------------

# With the cache, programs of both the plain and the wrapped run are compiled once.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}
OUTCOMES = "outcomes.json"


def run(
    checkout: Path, files: Iterable[Path], recipe: str | None, cache: Path | None = None
) -> dict[str, dict[str, Any]]:
    """Runs test files in one separate process.

    Args:
      checkout: the folder to which the names of tests are relative.
      files: the test files.
      recipe: of every outermost module; None for plain Flax.
      cache: a folder for JAX's compilation cache.

    Returns:
      The records of the plugin, by the name of the test.

    Raises:
      RuntimeError: if pytest cannot collect the tests, or is terminated.
    """
    names = list(map(str, files))
    settings = checkout / "pyproject.toml"
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "--import-mode=importlib"]
        command += ["-p", "no:cacheprovider", "-p", "wrap_outermost", "--outcomes", OUTCOMES]
        command += ["-c", str(settings) if settings.exists() else os.devnull]
        command += ["--rootdir", str(checkout), "--wrap", recipe or "", *names]
        search = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
        environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": search}
        environment["JAX_COMPILATION_CACHE_DIR"] = str(cache or Path(folder) / "cache")
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            output = f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
            raise RuntimeError(f"pytest could not run {', '.join(names)}:\n{output}")
        return json.loads((Path(folder) / OUTCOMES).read_text())


def test_files(checkout: Path, folders: Iterable[str]) -> Iterator[Path]:
    for folder in folders:
        yield from sorted((checkout / folder).glob("*_test.py"))


# ---------------------------------------------------------------------------
# Comparison
# ---------------------------------------------------------------------------


def is_crash(error: str) -> bool:
    """True if the first line of a traceback's message names a type other than AssertionError."""
    return not error.lstrip().startswith(("AssertionError", "assert ", "Failed:"))


def compare(
    plain: dict[str, dict[str, Any]], wrapped: dict[str, dict[str, Any]], *, crashes: bool = False
) -> dict[str, Any]:
    """Classifies tests by their outcomes without and with the recipe.

    Args:
      plain, wrapped: results of `run`.
      crashes: True to count a failed assertion of the wrapped test as passed.

    Returns:
      `counted`: number of tests that pass with plain Flax; `passed`: number of these that also pass
      wrapped; `with_wrapped_module`: number of these in which the plugin wrapped a module;
      `fails_plain`, `skipped`: names; `exceptions`: name -> error of tests that fail only wrapped.
    """
    by_outcome = {"passed": [], "failed": [], "skipped": []}
    for name, test in plain.items():
        by_outcome[test["outcome"]].append(name)
    missing = {"outcome": "failed", "error": "NotRun: the wrapped run ended before this test"}
    exceptions = {}
    for name in by_outcome["passed"]:
        test = wrapped.get(name, missing)
        if test["outcome"] != "passed" and (not crashes or is_crash(test["error"])):
            exceptions[name] = test["error"].strip().partition("\n")[0][:300]
    counted = by_outcome["passed"]
    return {
        "counted": len(counted),
        "passed": len(counted) - len(exceptions),
        "with_wrapped_module": sum(wrapped.get(n, {}).get("wrapped", 0) > 0 for n in counted),
        "fails_plain": by_outcome["failed"],
        "skipped": by_outcome["skipped"],
        "exceptions": exceptions,
    }


def unexplained(report: dict[str, Any]) -> list[str]:
    """Returns the names of the exceptions that `EXPECTED` does not explain."""
    names = [name for suite in report["suites"].values() for name in suite["exceptions"]]
    return [name for name in names if name not in EXPECTED]


# ---------------------------------------------------------------------------
# The report
# ---------------------------------------------------------------------------


def show(report: dict[str, Any]) -> None:
    for name, suite in report["suites"].items():
        print(
            f"{name}: {suite['passed']} of {suite['counted']} pass, "
            f"{suite['with_wrapped_module']} with a wrapped module; "
            f"{len(suite['fails_plain'])} fail plain, {len(suite['skipped'])} skipped"
        )
        for name in suite["fails_plain"]:
            print(f"fails plain, not counted: {name}")
        for name, error in suite["exceptions"].items():
            print(
                f"fails only wrapped: {name}\n    {error}\n    {EXPECTED.get(name, 'UNEXPLAINED')}"
            )


def markdown(reports: Iterable[dict[str, Any]]) -> tuple[str, str]:
    """Returns the tables of docs/compatibility.md: the counts, and the exceptions by name."""
    counts, names = [], {}
    for report in reports:
        jax, flax = report["versions"]["jax"], report["versions"]["flax"]
        for name, suite in report["suites"].items():
            counts.append((jax, flax, name, f"{suite['counted']:,}", f"{suite['passed']:,}"))
            names |= dict.fromkeys(suite["exceptions"])
    exceptions = [(f"`{_short(name)}`", EXPECTED.get(name, "unexplained")) for name in names]
    header = "JAX", "Flax", "tests", "pass plain", "pass wrapped"
    return table(header, counts), table(("fails only wrapped", "reason"), exceptions)


def _short(name: str) -> str:
    file, _, test = name.rpartition("/")[2].partition("::")
    return f"{file}, {test.rpartition('::')[2]}"


def measure(
    checkout: Path,
    suites: dict[str, tuple[str, ...]],
    recipe: str,
    keep: Path,
    *,
    only: str = "",
    crashes: bool = False,
) -> dict[str, Any]:
    """Runs the files whose suite or name contains `only`, and compares each test.

    Outcomes are stored in the folder `keep`; files with stored outcomes are not run again.
    """
    report = {"recipe": recipe, "checkout": commit_of(checkout), "suites": {}}
    keep.mkdir(parents=True, exist_ok=True)
    for suite, folders in suites.items():
        plain, wrapped, files = {}, {}, []
        for file in test_files(checkout, folders):
            if only in suite or only in file.name:
                files.append(file.name)
                plain |= run_once(keep, suite, checkout, file, None)
                wrapped |= run_once(keep, suite, checkout, file, recipe)
        if plain:
            compared = compare(plain, wrapped, crashes=crashes)
            report["suites"][suite] = {"files": files, **compared}
    return report


def run_once(
    keep: Path, suite: str, checkout: Path, file: Path, recipe: str | None
) -> dict[str, dict[str, Any]]:
    """Returns the stored outcomes of one file, or runs it and stores them in `keep`."""
    kept = keep / f"{suite}-{file.stem}-{recipe or 'plain'}.json"
    if not kept.exists():
        print(f"{suite}: {file.name}, {recipe or 'plain'}", file=sys.stderr)
        outcomes = run(checkout, [file], recipe, keep / "compilation_cache")
        kept.write_text(json.dumps(outcomes, indent=1))
    return json.loads(kept.read_text())


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("checkout", type=Path, nargs="?", help="a checkout of the Flax repository")
    parser.add_argument("--recipe", default="fp32", help="the recipe of every module")
    parser.add_argument("--only", default="", help="suites or files whose name contains this")
    parser.add_argument("--crashes", action="store_true", help="failed assertions do not count")
    parser.add_argument("--keep", type=Path, help="folder to store the outcomes of each file")
    parser.add_argument("--markdown", type=Path, nargs="+", help="JSON files to print as Markdown")
    args = parser.parse_args()
    if args.markdown:
        reports = [json.loads(file.read_text()) for file in args.markdown]
        print("\n\n".join(markdown(reports)))
        return
    if args.checkout is None:
        parser.error("give the path of a checkout of the Flax repository")
    checkout = args.checkout.resolve()
    with tempfile.TemporaryDirectory() as temporary:
        keep = args.keep.resolve() if args.keep else Path(temporary)
        report = measure(checkout, SUITES, args.recipe, keep, only=args.only, crashes=args.crashes)
    write_result(args.out, **report)
    show(report)
    sys.exit(bool(unexplained(report)))


if __name__ == "__main__":
    main()
