"""The report of a validation, and its JSON layout.

`ValidationReport.to_dict()` returns the fields of the dataclasses below, with the same names, as
dicts, lists, strings and numbers; tuples become lists. Two fields precede them: `schema`
("jaxmp.validation") and `schema_version` (2; it increases when a field is removed or changes its
meaning; version 1, without the verdict "differs", the directions of metrics and `loss` of the
gradients, can be read, too). Non-finite numbers are the strings "nan", "inf" and "-inf", which
`float` converts. The lists of a `TrainingRecord` are parallel: `losses`, `gradient_norms` and
`loss_scales` have an item per step, `evaluations` and `weight_norms` an item per item of
`eval_steps`.

    {
      "schema": "jaxmp.validation", "schema_version": 2,
      "ok": false, "reference": "fp32", "seeds": [0, 1, 2], "steps": 250,
      "eval_steps": [0, 50, 100, 150, 200, 250], "compare_steps": [0, 16, 249],
      "metric": {"name": "loss", "scale": "relative", "reason": "...", "direction": "min",
                 "unit": 2.19},
      "test": "Paired t interval ...",
      "candidates": [{
        "name": "fp16", "recipe": "fp16", "verdict": "fail", "headline": "fp16 FAILS: ...",
        "causes": [{"id": "fp16_underflow", "summary": "...", "evidence": "...", "fix": "..."}],
        "checks": [{"name": "held_out_loss", "verdict": "fail", "value": 0.031, "low": 0.028,
                    "high": 0.034, "budget": 0.005, "margin": -0.026, "scale": "relative",
                    "text": "..."}],
        "pairs": [{"seed": 0, "reference": 2.1975, "candidate": 2.2650, "difference": 0.0303}],
        "power": {"deviation": 0.001, "interval": 0.0017, "seeds_needed": 2, "text": "..."},
        "gradients": [{"step": 0, "error": 0.41, "cosine": 0.93, "underflow": 0.31, ...}],
        "modules": [{"module": "block_0/attention", "step": 0, "gradient_error": 0.41, ...}],
        "origin": {"forward": "...", "backward": "...", "text": "..."},
        "training": {"curve_distance": 0.02, "curve_band": 0.015, ...},
        "program": {"findings": {"missing_loss_scale": 1}, "kernels": 0, ...}
      }],
      "runs": [{"name": "fp32", "seed": 0, "losses": [...], ...}],
      "program": {...}, "notes": []
    }
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
from pathlib import Path

from jaxmp._audit._render import WIDTH, plain_text
from jaxmp._core._typing import RichRenderable
from jaxmp._validate._baseline import find_regressions
from jaxmp._validate._budget import direction_of
from jaxmp._validate._page import render_page
from jaxmp._validate._rows import (
    DIFFERS,
    FAIL,
    CandidateResult,
    JSONValue,
    MetricChoice,
    ProgramRow,
    TrainingRecord,
    from_plain,
    to_plain,
)
from jaxmp._validate._sections import report_sections
from jaxmp.errors import ValidationError, ValidationFailedError

SCHEMA, SCHEMA_VERSION = "jaxmp.validation", 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValidationReport:
    """Report of a validation: a verdict for each candidate. Frozen; contains plain data.

    `print(report)` shows the verdicts, the causes and the main figures; `report.to_text(full=True)`
    shows every module. rich and notebooks render it, too.

    Args:
      reference: name of the reference.
      seeds: the seeds.
      steps: number of training steps of each run.
      eval_steps: numbers of updates at which `evaluate` was called.
      compare_steps: numbers of updates after which gradients and activations were compared.
      metric: the metric that decides, and the reason.
      test: description of the statistical test.
      candidates: results in the order of the argument.
      runs: records of all runs, those of the reference first.
      program: audit and size of the reference's training step.
      notes: measurements that were not made, and why.
    """

    reference: str = "fp32"
    seeds: tuple[int, ...] = ()
    steps: int = 0
    eval_steps: tuple[int, ...] = ()
    compare_steps: tuple[int, ...] = ()
    metric: MetricChoice = dataclasses.field(default_factory=MetricChoice)
    test: str = ""
    candidates: tuple[CandidateResult, ...] = ()
    runs: tuple[TrainingRecord, ...] = ()
    program: ProgramRow = dataclasses.field(default_factory=ProgramRow)
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """True if no candidate fails or differs; a candidate may be inconclusive."""
        return all(candidate.verdict not in (FAIL, DIFFERS) for candidate in self.candidates)

    def __getitem__(self, name: str) -> CandidateResult:
        """Returns the result of a candidate.

        Raises:
          ValidationError: if the report contains no such candidate.
        """
        for candidate in self.candidates:
            if candidate.name == name:
                return candidate
        names = ", ".join(repr(candidate.name) for candidate in self.candidates)
        raise ValidationError(f"The report has no candidate {name!r}; it has {names}.")

    def check(self, *, baseline: ValidationReport | str | os.PathLike[str] | None = None) -> None:
        """Raises an exception if a candidate fails or differs; for the tests of a project.

        Args:
          baseline: an earlier report of the same seeds and steps, its JSON text, or a path that
            ends in `.json`. A larger held-out loss, gradient error, temporary memory or number of
            kernels than there fails, too.

        Raises:
          ValidationFailedError: with the headline of each candidate that fails or differs, and
            each figure that is worse than in the baseline.
          ValidationError: if the baseline cannot be read, or has other seeds or steps.
        """
        failed = [each.headline for each in self.candidates if each.verdict in (FAIL, DIFFERS)]
        if baseline is not None:
            failed += find_regressions(self, read_report(baseline))
        if failed:
            raise ValidationFailedError("\n".join(failed))

    # -- views ------------------------------------------------------------------------------

    def __str__(self) -> str:
        return self.to_text()

    def __repr__(self) -> str:
        verdicts = ", ".join(f"{each.name}: {each.verdict}" for each in self.candidates)
        return f"<ValidationReport of {verdicts or 'no candidates'}>"

    def to_text(self, *, full: bool = False, width: int = WIDTH) -> str:
        """Returns the report as plain text, as `print(report)` does.

        Args:
          full: True for every module, every seed and the audit, too.
          width: characters per line; only code may be longer.
        """
        return plain_text(report_sections(self, full), width)

    def to_rich(self, *, full: bool = False) -> RichRenderable:
        """Returns an object that rich prints in colour, in the width of its console.

        Args:
          full: as in `to_text`.

        Raises:
          MissingDependencyError: if rich is not installed.
        """
        return importlib.import_module("jaxmp._audit._rich").Renderable(report_sections(self, full))

    def __rich__(self) -> RichRenderable:
        return self.to_rich()

    def to_html(self) -> str:
        """Returns the report as one HTML page with charts, without scripts or links.

        Example:
          >>> page = ValidationReport(steps=100).to_html()
          >>> _ = Path("validation.html").write_text(page, encoding="utf-8")
        """
        return render_page(self)

    def _repr_html_(self) -> str:
        return self.to_html()

    def to_dict(self) -> dict[str, JSONValue]:
        """Returns the report as plain data, in the layout above."""
        head = {"schema": SCHEMA, "schema_version": SCHEMA_VERSION, "ok": self.ok}
        plain = to_plain(dataclasses.asdict(self))
        assert isinstance(plain, dict)
        return {**head, **plain}

    def to_json(self) -> str:
        """Returns the report as JSON text; `ValidationReport.from_json` reads it."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> ValidationReport:
        """Reads the JSON text that `to_json` returns.

        Args:
          text: the JSON text.

        Raises:
          ValidationError: if the text is not a report, or has another schema version.
        """
        try:
            data = json.loads(text)
            schema = data.pop("schema"), data.pop("schema_version")
            data.pop("ok")
            if schema == (SCHEMA, 1):
                data["metric"]["direction"] = direction_of(data["metric"]["name"])
            elif schema != (SCHEMA, SCHEMA_VERSION):
                raise ValueError(f"its schema is {schema}, not {(SCHEMA, SCHEMA_VERSION)}")
            return from_plain(cls, data)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValidationError(
                f"{text[:80]!r} is not the JSON text of a validation ({error}). Write one with:\n"
                "    pathlib.Path('validation.json').write_text(report.to_json())"
            ) from None


def read_report(source: ValidationReport | str | os.PathLike[str]) -> ValidationReport:
    """Returns a report, given itself, its JSON text, or a path that ends in `.json`.

    Raises:
      ValidationError: if it cannot be read.
    """
    if isinstance(source, ValidationReport):
        return source
    if isinstance(source, str) and not source.endswith(".json"):
        return ValidationReport.from_json(source)
    try:
        text = Path(source).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValidationError(
            f"The baseline {str(source)!r} cannot be read ({error}). Write it with:\n"
            f"    jaxmp validate run.py:make_run --baseline {source} --write-baseline"
        ) from None
    return ValidationReport.from_json(text)
