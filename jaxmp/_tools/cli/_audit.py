"""`jaxmp audit`, `jaxmp memory`, `jaxmp plan` and `jaxmp validate`."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import Annotated, Any

import typer

import jaxmp
from jaxmp._core._compat import unchecked_cuda
from jaxmp._core._targets import get_target
from jaxmp._policies._recipe import load_recipe
from jaxmp._tools.audit import AuditReport
from jaxmp._tools.audit._report import known_checks
from jaxmp._tools.audit._script import ScriptAudit, audit_script
from jaxmp._tools.cli._arguments import (
    FUNCTION_HELP,
    HtmlOption,
    JsonOption,
    call,
    load_function,
    make_step,
)
from jaxmp._tools.cli._output import console, escape, write_report
from jaxmp._tools.report._views import read_report
from jaxmp._tools.validate import ValidationReport
from jaxmp._tools.validate._report import find_regressions
from jaxmp._tools.validate._rows import DIFFERS, FAIL
from jaxmp.errors import JaxmpError


def audit(
    function: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FUNCTION | ARGUMENTS...",
            help=f"{FUNCTION_HELP} It takes the recipe, or nothing, and returns the step and its"
            " arguments, which may be shapes. With --script: the arguments of the script; those"
            " that are also options of this command go after --.",
        ),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(help="Recipe that the step should follow; the function receives it."),
    ] = None,
    json: JsonOption = None,
    target: Annotated[
        str | None,
        typer.Option(help="GPU to compile for, such as h200 or l4. No GPU is required."),
    ] = None,
    script: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Run a training script until its train step is traced, and audit that step."
            " -m MODULE runs a module.",
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option("--function", metavar="NAME", help="With --script: audit this function."),
    ] = None,
    max_seconds: Annotated[
        float, typer.Option(help="With --script: maximum run time of the script.")
    ] = 600.0,
    fail_on: Annotated[
        str,
        typer.Option(help="Checks whose errors fail, separated by commas; any; or none."),
    ] = "any",
    baseline: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Earlier JSON result; fail if there are other errors."),
    ] = None,
    full: Annotated[
        bool,
        typer.Option("--full", help="Print warnings, modules, kernels and notes too."),
    ] = False,
    try_fixes: Annotated[
        bool,
        typer.Option("--try/--no-try", help="Trace the step with each fix before it is printed."),
    ] = True,
    html: HtmlOption = None,
) -> None:
    """Print the dtypes in which a training step computes, and what is wrong with them."""
    arguments = function or []
    wanted = (
        None if fail_on == "any" else [check for check in fail_on.split(",") if check != "none"]
    )
    checks = known_checks(wanted)
    before = None if baseline is None else read_report(AuditReport, Path(baseline))
    if not 0 < max_seconds < math.inf:
        raise JaxmpError(f"--max-seconds {max_seconds} is not a positive number of seconds.")
    if script is None:
        if name is not None:
            raise JaxmpError("--function requires --script, such as --script train.py.")
        report = _audit_function(_only_argument(arguments), recipe, target, try_fixes)
    else:
        options = {"recipe": recipe, "target": target, "function": name, "try_fixes": try_fixes}
        result = _audit_script(script, arguments, max_seconds=max_seconds, **options)
        if json != "-":
            console().print(escape(result.sentence, "dim"), soft_wrap=True)
        report = result.report
    write_report(report, json, html, full=full)
    if fail_on == "any" and baseline is None:
        raise typer.Exit(0 if report.ok else 1)  # the printed report lists the errors
    report.check(checks, baseline=before)


def _only_argument(arguments: list[str]) -> str:
    """Returns the name of the function, if it is the only argument.

    Raises:
      JaxmpError: if there are other arguments, or none.
    """
    option = next((a for a in arguments if a.startswith("-")), None)
    if len(arguments) == 1 and option is None:
        return arguments[0]
    problem = f"unknown option {option}" if option else f"{len(arguments)} arguments instead of 1"
    raise JaxmpError(
        f"{problem}. Name a function that returns the step, or a script:\n"
        "    jaxmp audit my_package.train:make_step --recipe bf16\n"
        "    jaxmp audit --script train.py --recipe bf16"
    )


def _audit_function(
    name: str, recipe: str | None, target: str | None, try_fixes: bool
) -> AuditReport:
    loaded = None if recipe is None else load_recipe(recipe)
    with contextlib.nullcontext() if target is None else unchecked_cuda():
        step, *arguments = make_step(name, recipe)
        return call(
            f"the step of {name}",
            lambda: jaxmp.audit(
                step, *arguments, recipe=loaded, target=target, try_fixes=try_fixes
            ),
        )


def _audit_script(script: str, arguments: list[str], **options: Any) -> ScriptAudit:
    """Audits a script, after checks of the options that do not require the script to run."""
    if options["recipe"] is not None:
        load_recipe(options["recipe"])
    if options["target"] is not None:
        get_target(options["target"])
    is_module = script == "-m"
    if is_module and not arguments:
        raise JaxmpError("-m requires a module: jaxmp audit --script -m my_package.train")
    command = arguments if is_module else [script, *arguments]
    return audit_script(command, module=is_module, **options)


def memory(
    function: Annotated[
        str,
        typer.Argument(
            help=f"{FUNCTION_HELP} It takes the recipe, or nothing, and returns the step and its"
            " arguments, which may be shapes."
        ),
    ],
    recipe: Annotated[str | None, typer.Option(help="Recipe; the function receives it.")] = None,
    target: Annotated[
        str | None, typer.Option(help="Chip, such as h200 or v6e; it does not have to be present.")
    ] = None,
    exact: Annotated[
        bool, typer.Option("--exact", help="Compile for the target, and print XLA's figures too.")
    ] = False,
    json: JsonOption = None,
    html: HtmlOption = None,
) -> None:
    """Print the memory that a training step requires, by kind, and whether it fits a chip.

    The exit status is 1 if it does not fit.
    """
    with contextlib.nullcontext() if target is None else unchecked_cuda():
        step, *arguments = make_step(function, recipe)
        estimate = call(
            f"the step of {function}",
            lambda: jaxmp.estimate_memory(step, *arguments, target=target, exact=exact),
        )
    write_report(estimate, json, html)
    raise typer.Exit(int(estimate.fits is False))


_PLAN = "jaxmp plan run.py:make_step --recipes bf16,fp8 --targets a100,h100"


def plan(
    function: Annotated[
        str,
        typer.Argument(
            metavar="FUNCTION",
            help=f"{FUNCTION_HELP} It takes a recipe, and returns the step and its arguments,"
            " which may be shapes; for --batches and --remat, it also takes batch_size and remat.",
        ),
    ],
    targets: Annotated[
        str, typer.Option(help="Chips, separated by commas; they do not have to be present.")
    ],
    recipes: Annotated[str, typer.Option(help="Recipes, separated by commas.")] = "bf16,fp8",
    batches: Annotated[
        str | None,
        typer.Option(help='Batch sizes, separated by commas, or "largest" for the one that fits.'),
    ] = None,
    remat: Annotated[
        str | None, typer.Option(help="Values of the argument remat, such as false,true.")
    ] = None,
    cache: Annotated[
        str, typer.Option(metavar="FOLDER", help="Folder for compiled programs; empty for none.")
    ] = "~/.cache/jaxmp",
    json: JsonOption = None,
    html: HtmlOption = None,
) -> None:
    """Compile a training step for recipes and chips, and recommend a recipe for each chip.

    The exit status is 1 if no program fits one of the chips.
    """
    make = load_function(function, _PLAN, "train_step, state, batch", "recipe")
    report = call(
        f"planning {function}",
        lambda: jaxmp.plan(
            make,
            recipes=_items(recipes),
            targets=_items(targets),
            batches=_values(batches),
            remat=_values(remat),
            cache=cache or None,
        ),
    )
    write_report(report, json, html)
    raise typer.Exit(0 if all(choice.recipe for choice in report.choices) else 1)


def _items(text: str) -> list[str]:
    return [item for item in text.split(",") if item]


def _values(text: str | None) -> Any:
    """Returns numbers, booleans and words; "largest" is not a list."""
    named: dict[str, Any] = {"true": True, "false": False}
    items = [named.get(x, int(x) if x.isdecimal() else x) for x in _items(text or "")]
    return text if text in (None, "largest") else items


_VALIDATE = "jaxmp validate run.py:make_run --recipes bf16,fp16 --steps 500"


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
    make_run = load_function(function, _VALIDATE, "jaxmp.TrainingRun(...)", "recipe, seed")
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
