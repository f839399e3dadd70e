"""Validation: training in candidate precisions compared with training in a reference precision.

`_report` documents the JSON layout of a report, `_compare` the test, and `_diagnose` the causes
that it finds.
"""

from __future__ import annotations

from jaxmp._tools.validate._budget import Budget as Budget
from jaxmp._tools.validate._report import ValidationReport as ValidationReport
from jaxmp._tools.validate._rows import CandidateResult as CandidateResult
from jaxmp._tools.validate._run import TrainingRun as TrainingRun
from jaxmp._tools.validate._validate import validate as validate
