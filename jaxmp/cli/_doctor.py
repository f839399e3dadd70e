"""`jaxmp doctor`."""

from __future__ import annotations

import typer

from jaxmp._doctor import doctor as describe
from jaxmp.cli._arguments import JsonOption
from jaxmp.cli._output import console, escape, write_json


def doctor(json: JsonOption = None) -> None:
    """Describe this machine, the recipe that fits it, and what is wrong with its installation."""
    report = describe()
    problems = [problem._asdict() for problem in report.problems]
    values = report._asdict() | {"machine": report.machine._asdict(), "problems": problems}
    if not write_json(json, values):
        console().print(escape(str(report)))
    if report.problems:
        raise typer.Exit(1)
