"""Checks of precision for the tests of a project.

    from jaxmp.testing import assert_equivalent, equivalent  # a function, and a fixture of pytest

    def test_bf16_trains_like_fp32():
        assert_equivalent(make_run, "bf16", steps=200)

    def test_bf16_is_not_worse_than_before(equivalent):
        equivalent(make_run, "bf16", steps=200)

The fixture compares with a baseline next to the test file, so that a change that makes loss,
gradient error, memory or kernel count worse fails. Import it in the test file: as a plugin of
pytest, it would import JAX before the `conftest.py` of the project can set JAX's flags.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jaxmp._recipe_files._load import RecipeLike
from jaxmp._validate import ValidationReport, validate
from jaxmp._validate._run import MakeRun

try:
    import pytest
except ModuleNotFoundError:
    pytest = None

__all__ = ["assert_equivalent", "equivalent"]

# Environment variable with which the fixture writes baselines instead of reading them.
_WRITE_BASELINE = "JAXMP_WRITE_BASELINE"


def assert_equivalent(
    make_run: MakeRun,
    recipe: RecipeLike,
    *,
    reference_recipe: RecipeLike = "fp32",
    baseline: str | os.PathLike[str] | None = None,
    **options: Any,
) -> ValidationReport:
    """Trains with a candidate and a reference precision, and raises unless they are equivalent.

    A candidate that is better than the reference by more than its budget raises, too. An
    inconclusive result does not: the report that is returned states how many seeds would decide.

    Args:
      make_run: `make_run(recipe, seed)` returns a `jaxmp.TrainingRun`.
      recipe: the recipe to check.
      reference_recipe: the recipe to compare with.
      baseline: an earlier report in a file that ends in `.json`. Figures may not be worse.
      **options: further arguments of `jaxmp.validate`, such as `steps`, `seeds`, `budgets`
        and `metrics`.

    Returns:
      The report.

    Raises:
      ValidationFailedError: with the first line of the report, which names the cause.
      ValidationError: if the runs cannot be compared.

    Example:
      >>> from jaxmp.testing import assert_equivalent
      >>> x = np.random.default_rng(0).normal(size=(21, 8, 4)).astype(np.float32)
      >>> report = assert_equivalent(
      ...     nn.Dense(4),
      ...     "bf16",
      ...     steps=20,
      ...     loss_fn=lambda model, x: jnp.mean((model(x) - 2 * x) ** 2),
      ...     batches=x[:20],
      ...     optimizer=optax.sgd(0.01),
      ...     held_out=x[20:],
      ... )
      >>> report.ok
      True
    """
    report = validate(make_run, [recipe], reference_recipe=reference_recipe, **options)
    report.check(baseline=baseline)
    return report


def _check_against_file(file: Path) -> Callable[..., ValidationReport]:
    """Returns `assert_equivalent` with a baseline in a file, which it writes if asked to."""

    def check(make_run: MakeRun, recipe: RecipeLike, **options: Any) -> ValidationReport:
        if os.environ.get(_WRITE_BASELINE):
            report = assert_equivalent(make_run, recipe, **options)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(report.to_json(), encoding="utf-8")
            return report
        return assert_equivalent(
            make_run, recipe, baseline=file if file.exists() else None, **options
        )

    return check


if pytest is not None:

    @pytest.fixture
    def equivalent(request: Any) -> Iterator[Callable[..., ValidationReport]]:
        """Fixture: `assert_equivalent` with the baseline `baselines/TEST.json` of the test.

        The file is in the directory of the test file. With the environment variable
        `JAXMP_WRITE_BASELINE=1`, it is written; if it does not exist, only the budgets apply.
        """
        name = "".join(c if c.isalnum() or c in "-_." else "_" for c in request.node.name)
        yield _check_against_file(request.path.parent / "baselines" / f"{name}.json")
