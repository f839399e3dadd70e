"""Fixture of pytest that trains, and compares the result with an earlier one.

    from jaxmp.testing import equivalent  # a fixture of pytest

    def test_bf16_is_not_worse_than_before(equivalent):
        equivalent(make_run, "bf16", steps=200)

The fixture compares with a baseline next to the test file, so that a change that makes the loss or
the gradient error worse fails. Import it in the test file: as a plugin of
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

__all__ = ["equivalent"]

# Environment variable with which the fixture writes baselines instead of reading them.
_WRITE_BASELINE = "JAXMP_WRITE_BASELINE"


def _check_against_file(file: Path) -> Callable[..., ValidationReport]:
    """Returns a function that compares with a baseline in a file, which it writes if asked to."""

    def check(make_run: MakeRun, recipe: RecipeLike, **options: Any) -> ValidationReport:
        report = validate(make_run, [recipe], **options)
        if os.environ.get(_WRITE_BASELINE):
            report.check()
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(report.to_json(), encoding="utf-8")
        else:
            report.check(baseline=file if file.exists() else None)
        return report

    return check


if pytest is not None:

    @pytest.fixture
    def equivalent(request: Any) -> Iterator[Callable[..., ValidationReport]]:
        """Fixture: a function like `jaxmp.validate`, for one recipe, that checks its report.

        It raises as `ValidationReport.check` does, also if a figure is worse than in the baseline
        `baselines/TEST.json` of the test.

        The file is in the directory of the test file. With the environment variable
        `JAXMP_WRITE_BASELINE=1`, it is written; if it does not exist, only the budgets apply.

        Example:
          >>> def test_bf16_is_not_worse_than_before(equivalent):
          ...     equivalent(make_run, "bf16", steps=200)
        """
        name = "".join(c if c.isalnum() or c in "-_." else "_" for c in request.node.name)
        yield _check_against_file(request.path.parent / "baselines" / f"{name}.json")
