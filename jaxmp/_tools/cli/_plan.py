"""`jaxmp plan`.

Annotations are not strings here, because typer would evaluate each of them at every start.
"""

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

import jaxmp
from jaxmp._core import _plain
from jaxmp._tools.cli import _arguments, _output, _steps
from jaxmp._tools.report import _views
from jaxmp.errors import JaxmpError

if TYPE_CHECKING:
    from jaxmp.typing import PlanReport

_PLAN = "jaxmp plan run.py:make_step --recipes bf16,fp8 --targets a100,h100"


def run_plan(
    targets: str,
    function: _arguments.StepArgument = None,
    recipes: str = "bf16,fp8",
    batches: str | None = None,
    remat: str | None = None,
    price: str = "",
    rate: str = "",
    hosts: int | None = None,
    link: str = "",
    share: _arguments.ShareOption = None,
    cache: Annotated[str, typer.Option(metavar="FOLDER")] = "~/.cache/jaxmp",
    script: _arguments.ScriptOption = None,
    name: _arguments.NameOption = None,
    max_seconds: _arguments.SecondsOption = 600.0,
    json: _arguments.JsonOption = None,
    html: _arguments.HtmlOption = None,
) -> None:
    """Compile a training step for recipes and chips, and recommend a recipe for each chip.

    The exit status is 1 if no program fits one of the chips. A script runs once for each recipe,
    which replaces the one that the script loads with jaxmp.load_recipe.

    Args:
      targets: Chips, or TOML files that describe them, separated by commas; they do not have to be
        present.
      recipes: Recipes, separated by commas.
      batches: Batch sizes, separated by commas, or "largest" for the one that fits. The function
        takes batch_size.
      remat: Values of the argument remat, such as false,true.
      price: Prices of a device for an hour, such as h100=2.10,a100=1.2; adds the cost of a billion
        tokens.
      rate: Measured tokens per second of all devices, such as h100/bf16=39000, for the cost.
      hosts: Hosts of the devices; by default as few as the links of a chip allow.
      link: Bytes per second of each device in both directions, within and between hosts, such as
        within=900e9,between=100e9, instead of those of the data sheet.
      cache: Folder for compiled programs; empty for none.
    """
    del share  # its callback sets the environment variable
    options: dict[str, Any] = {
        "recipes": _arguments.split_items(recipes),
        "targets": _arguments.split_items(targets),
    }
    options |= {"prices": _numbers(price, "--price"), "rates": _numbers(rate, "--rate")}
    options |= {"hosts": hosts, "links": _numbers(link, "--link", "between=100e9")}
    lists = {"batches": _values(batches), "remat": _values(remat)}
    if script is not None and lists != {"batches": None, "remat": None}:
        raise JaxmpError(f"--batches and --remat require a function:\n    {_PLAN}")
    is_stopped = False
    try:
        if script is None:
            path = _arguments.only_function("plan", function, name)
            make = _arguments.load_function(path, _PLAN, "train_step, state, batch", "recipe")
            options |= {**lists, "cache": cache or None}
            report = _arguments.call(f"planning {path}", lambda: jaxmp.plan(make, **options))
        else:
            more = {"function": name, "max_seconds": max_seconds, "cache": cache or None}
            report = _plan_script([script, *(function or [])], json, options, more)
    except _views.Interrupted as stop:
        is_stopped, report = True, stop.report
        text = "Interrupted: the programs that are compiled are in the cache."
        print(text, "Run the same command to go on.", file=sys.stderr)
    assert isinstance(report, jaxmp.typing.PlanReport)
    _output.write_report(report, json, html)
    is_good = all(choice.recipe for choice in report.choices)
    raise typer.Exit(130 if is_stopped else int(not is_good))


def _plan_script(
    command: list[str], json: str | None, options: dict[str, Any], more: dict[str, Any]
) -> "PlanReport":
    """Runs a script once for each recipe, and returns the plan of its step."""
    from jaxmp._tools.plan import MeasuredRow, PlanRow, check_plan, make_plan

    recipes, chips = check_plan(lambda recipe: recipe, **options)
    if whole := next((recipe.whole for recipe in recipes if recipe.whole), None):
        raise JaxmpError(
            f"The recipe {whole.name!r} has phases, and a script runs its first one. Pass a "
            f"function, which receives each phase:\n    {_PLAN}"
        )
    more |= {name: options[name] for name in ("targets", "hosts", "links")}
    measured: dict[str, list[MeasuredRow]] = {}
    ended = (command[0], measured, options["prices"], options["rates"])
    try:
        for recipe in options["recipes"]:
            values = _steps.in_script("plan", command[0], command[1:], json, recipe=recipe, **more)
            for chip, (row, seconds) in zip(chips, values, strict=True):
                made = MeasuredRow(_plain.from_plain(PlanRow, row), seconds)
                measured.setdefault(chip.name, []).append(made)
    except KeyboardInterrupt:
        if not measured:
            raise
        raise _views.Interrupted(make_plan(*ended)) from None
    return make_plan(*ended)


def _numbers(text: str, option: str, example: str = "h100=2.5") -> dict[str, float]:
    """Returns the numbers of `name=number,...`."""
    numbers = {}
    for item in _arguments.split_items(text):
        name, _, number = item.partition("=")
        try:
            numbers[name.strip()] = float(number)
        except ValueError:
            raise JaxmpError(
                f"{option} {item!r} is not a number: write {option} {example}."
            ) from None
    return numbers


def _values(text: str | None) -> Any:
    """Returns numbers, booleans and words; "largest" is not a list."""
    named: dict[str, Any] = {"true": True, "false": False}
    items = [
        named.get(x, int(x) if x.isdecimal() else x) for x in _arguments.split_items(text or "")
    ]
    return text if text in (None, "largest") else items
