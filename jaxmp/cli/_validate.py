"""`jaxmp validate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import jaxmp
from jaxmp._report._views import read_report
from jaxmp._validate import ValidationReport
from jaxmp._validate._report import find_regressions
from jaxmp._validate._rows import DIFFERS, FAIL
from jaxmp.cli._arguments import FUNCTION_HELP, HtmlOption, JsonOption, call, load_function
from jaxmp.cli._output import write_report

_EXAMPLE = "jaxmp validate run.py:make_run --recipes bf16,fp16 --steps 500"


def validate(
    function: Annotated[
        str,
        typer.Argument(
            metavar="FUNCTION",
            help=f"{FUNCTION_HELP} It takes a recipe and a seed, and returns a jaxmp.TrainingRun.",
        ),
    ],
    recipes: Annotated[
        str, typer.Option(help="Recipes to compare, separated by commas.")
    ] = "bf16,fp16,fp8",
    reference_recipe: Annotated[str, typer.Option(help="Recipe to compare with.")] = "fp32",
    seeds: Annotated[int, typer.Option(help="Number of seeds.")] = 3,
    steps: Annotated[int, typer.Option(help="Training steps of each run.")] = 200,
    budget: Annotated[
        float | None,
        typer.Option(help="Largest relative increase of the loss, such as 0.005."),
    ] = None,
    metrics: Annotated[
        str, typer.Option(help="Directions of metrics, such as reward=max,loss=min.")
    ] = "",
    baseline: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Earlier JSON result; fail if loss or gradient error are worse.",
        ),
    ] = None,
    json: JsonOption = None,
    full: Annotated[bool, typer.Option("--full", help="Print every module and seed.")] = False,
    html: HtmlOption = None,
) -> None:
    """Train candidate precisions and the reference, and print which are good enough.

    Exits with 1 if a candidate fails or a figure is worse than in the baseline, otherwise with 3 if
    a candidate differs: it is better than the reference by more than its budget, or computes
    another loss. Inconclusive candidates exit with 0.
    """
    directions = [item.partition("=") for item in metrics.split(",") if item]
    before = None if baseline is None else read_report(ValidationReport, baseline)
    make_run = load_function(function, _EXAMPLE, "jaxmp.TrainingRun(...)", "recipe, seed")
    report = call(
        f"validating {function}",
        lambda: jaxmp.validate(
            make_run,
            [name for name in recipes.split(",") if name],
            reference_recipe=reference_recipe,
            seeds=seeds,
            steps=steps,
            budgets=budget,
            metrics={name: direction for name, _, direction in directions},
        ),
    )
    write_report(report, json, html, full=full)
    verdicts = {candidate.verdict for candidate in report.candidates}
    if before is None or not find_regressions(report, before):
        # The printed report begins with the verdicts.
        raise typer.Exit(1 if FAIL in verdicts else 3 if DIFFERS in verdicts else 0)
    report.check(baseline=before)
