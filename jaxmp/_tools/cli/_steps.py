"""`jaxmp audit`, `memory`, `validate`, `locate` and `plan`.

The `Args:` of a command's docstring are the help of its arguments. Each command imports the tool
that it runs, so that the others do not load it. Annotations are not strings here, because typer
would evaluate each of them at every start.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

import jaxmp
from jaxmp._core import _compat
from jaxmp._policies import _recipe
from jaxmp._tools.cli import _arguments, _outputs, _show
from jaxmp._tools.report import _progress, _views
from jaxmp.errors import JaxmpError

if TYPE_CHECKING:
    from jaxmp.typing import NonfiniteReport, PlanReport

T = TypeVar("T")
R = TypeVar("R", bound=_views.Report)

# ---------------------------------------------------------------------------
# Scripts
# ---------------------------------------------------------------------------


def in_script(cls: type[R], tool: str, command: list[str], json: str | None, **options: Any) -> R:
    """Runs a tool on a script, prints which functions it has read, and returns its report.

    Args:
      cls: the class of the report.
      tool: the command.
      command: the argument of `--script`, and those of the script; after `-m`, the module and its
        arguments.
      json: the argument of `--json`.
      **options: those of `run_script`.
    """
    from jaxmp._tools.cli import _script

    sentence, text = _script.run_script(tool, command, **options)
    if json != "-":
        _outputs.console().print(_outputs.escape(sentence, "dim"), soft_wrap=True)
    return cls.from_json(text)


# ---------------------------------------------------------------------------
# Audit and memory
# ---------------------------------------------------------------------------


def run_audit(
    function: _arguments.StepArgument = None,
    recipe: str | None = None,
    json: _arguments.JsonOption = None,
    target: _arguments.TargetOption = None,
    script: _arguments.ScriptOption = None,
    name: _arguments.NameOption = None,
    max_seconds: _arguments.SecondsOption = 600.0,
    fail_on: str = "any",
    baseline: Annotated[str | None, typer.Option(metavar="FILE")] = None,
    full: Annotated[bool, typer.Option("--full")] = False,
    try_fixes: Annotated[bool, typer.Option("--try/--no-try")] = True,
    html: _arguments.HtmlOption = None,
) -> None:
    """Print the dtypes in which a training step computes, and what is wrong with them.

    Args:
      recipe: Recipe that the step should follow; the function receives it.
      fail_on: Checks whose errors fail, separated by commas; any; or none.
      baseline: Earlier JSON result; fail if there are other errors.
      full: Print warnings, modules, kernels and notes too.
      try_fixes: Trace the step with each fix before it is printed.
    """
    from jaxmp._tools.audit import _audit, _report

    wanted = [check for check in _arguments.split_items(fail_on) if check != "none"]
    checks = _report.known_checks(None if fail_on == "any" else wanted)
    cls = jaxmp.typing.AuditReport
    before = None if baseline is None else _views.read_report(cls, Path(baseline))
    loaded = None if recipe is None else _recipe.load_recipe(recipe)
    options: dict[str, Any] = {"target": target, "try_fixes": try_fixes}
    if script is None:
        (make,) = function or []
        audit = _progress.busy(f"auditing {make}")(jaxmp.audit)
        run = lambda phase: _run_tool("audit", audit, make, phase, options | {"recipe": phase})
        report = _audit.audit_phases(loaded, run) if loaded and loaded.phases else run(loaded)
    else:
        options |= {"recipe": recipe, "function": name, "max_seconds": max_seconds}
        report = in_script(cls, "audit", [script, *(function or [])], json, **options)
    _outputs.write_report(report, json, html, full=full)
    if fail_on == "any" and baseline is None:
        raise typer.Exit(0 if report.ok else 1)  # the printed report lists the errors
    report.check(checks, baseline=before)


def _run_tool(
    command: str,
    tool: Callable[..., T],
    function: str,
    recipe: _recipe.Recipe | None,
    options: dict[str, Any],
) -> T:
    """Calls a tool with the step of the user's function.

    Args:
      command: the command.
      tool: `jaxmp.audit` or `jaxmp.estimate_memory`.
      function: name of the function.
      recipe: its argument, if it takes one.
      options: those of the tool; "target" is one of them.
    """
    with _compat.unchecked_cuda() if options["target"] else contextlib.nullcontext():
        example = f"jaxmp {command} my_package.train:make_step --recipe bf16"
        recipes = [] if recipe is None else [recipe]
        step, *arguments = _arguments.make_step(function, example, *recipes)
        description = f"the step of {function}"
        return _arguments.call(description, lambda: tool(step, *arguments, **options))


def run_memory(
    function: _arguments.StepArgument = None,
    recipe: str | None = None,
    target: _arguments.TargetOption = None,
    exact: Annotated[bool | None, typer.Option("--exact/--estimate")] = None,
    share: _arguments.ShareOption = None,
    script: _arguments.ScriptOption = None,
    name: _arguments.NameOption = None,
    max_seconds: _arguments.SecondsOption = 600.0,
    json: _arguments.JsonOption = None,
    html: _arguments.HtmlOption = None,
) -> None:
    """Print the memory that a training step requires, by kind, and whether it fits a chip.

    The exit status is 1 if it does not fit, and 0 if it may. Of several steps of a script, and of
    the phases of a recipe, the largest counts.

    Args:
      recipe: Recipe; the function receives it.
      exact: Compile for the target, or estimate. By default, compile for GPUs if XLA's compiler is
        installed.
    """
    del share  # its callback sets the environment variable
    settings: dict[str, Any] = {"target": target, "exact": exact}
    if script is not None:
        if recipe is not None:
            raise JaxmpError(
                "--recipe is for functions: the script loads a recipe itself. Compare recipes with:"
                f"\n    jaxmp plan --script {script} --recipes {recipe} --targets h200"
            )
        settings |= {"function": name, "max_seconds": max_seconds}
        cls = jaxmp.typing.MemoryEstimate
        estimate = in_script(cls, "memory", [script, *(function or [])], json, **settings)
    else:
        (make,) = function or []
        run = lambda phase: _run_tool("memory", jaxmp.estimate_memory, make, phase, settings)
        phases = [None] if recipe is None else _recipe.load_recipe(recipe).split_phases()
        estimate = max(map(run, phases), key=lambda estimate: estimate.total)
    _outputs.write_report(estimate, json, html)
    raise typer.Exit(int(estimate.fits is False))


# ---------------------------------------------------------------------------
# Validate
# ---------------------------------------------------------------------------

_VALIDATE = "jaxmp validate run.py:make_run --recipes bf16,fp16 --steps 500"


def run_validate(
    function: Annotated[str, typer.Argument(metavar="FUNCTION")],
    recipes: str = "bf16,fp16,fp8",
    reference_recipe: str = "fp32",
    seeds: int = 3,
    steps: int = 200,
    budget: float | None = None,
    metrics: str = "",
    baseline: Annotated[Path | None, typer.Option(metavar="FILE")] = None,
    json: _arguments.JsonOption = None,
    resume: Annotated[bool, typer.Option("--resume")] = False,
    full: Annotated[bool, typer.Option("--full")] = False,
    html: _arguments.HtmlOption = None,
) -> None:
    """Train candidate precisions and the reference, and print which are good enough.

    Exits with 1 if a candidate fails or a figure is worse than in the baseline, otherwise with 3 if
    a candidate differs: it is better than the reference by more than its budget, or computes
    another loss. Inconclusive candidates exit with 0.

    Args:
      function: package.module:function, or file.py:function. It takes a recipe and a seed, and
        returns a jaxmp.TrainingRun.
      recipes: Recipes to compare, separated by commas.
      reference_recipe: Recipe to compare with.
      seeds: Number of seeds.
      steps: Training steps of each run.
      budget: Largest relative increase of the loss, such as 0.005.
      metrics: Directions of metrics, such as reward=max,loss=min.
      baseline: Earlier JSON result; fail if loss or gradient error are worse.
      resume: Go on with the runs in the file of --json, which Ctrl-C has left.
      full: Print every module and seed.
    """
    from jaxmp._tools.validate._report import DIFFERS, FAIL, find_regressions

    directions = [item.partition("=") for item in _arguments.split_items(metrics)]
    cls = jaxmp.typing.ValidationReport
    before = None if baseline is None else _views.read_report(cls, baseline)
    make_run = _arguments.load_function(
        function, _VALIDATE, "jaxmp.TrainingRun(...)", "recipe, seed"
    )
    if resume and not (json and Path(json).is_file()):
        raise JaxmpError(
            f"--resume requires the file of an earlier result: {_VALIDATE} --json FILE"
        )
    validate = functools.partial(
        jaxmp.validate,
        make_run,
        _arguments.split_recipes(recipes),
        reference_recipe=reference_recipe,
        seeds=seeds,
        steps=steps,
        budgets=budget,
        metrics={name.strip(): direction.strip() for name, _, direction in directions},
        resume=_views.read_report(cls, Path(str(json))) if resume else None,
    )
    advice = "Run the same command with" if json else "Next time, add --json FILE, and then"
    make = lambda: _arguments.call(f"validating {function}", validate)
    report = _outputs.write_result(make, f"{advice} --resume to go on.", json, html, full=full)
    verdicts = {candidate.verdict for candidate in report.candidates}
    if before is None or not find_regressions(report, before):
        # The printed report begins with the verdicts.
        raise typer.Exit(1 if FAIL in verdicts else 3 if DIFFERS in verdicts else 0)
    report.check(baseline=before)


# ---------------------------------------------------------------------------
# Locate
# ---------------------------------------------------------------------------


def run_locate(
    function: _arguments.StepArgument = None,
    checkpoint: Annotated[Path | None, typer.Option(metavar="DIR")] = None,
    step: int | None = None,
    batches: Annotated[int, typer.Option(min=1)] = 1000,
    script: _arguments.ScriptOption = None,
    name: _arguments.NameOption = None,
    max_seconds: _arguments.SecondsOption = 600.0,
    json: _arguments.JsonOption = None,
    html: _arguments.HtmlOption = None,
) -> None:
    """Run a training step again and print where its first value that is not finite comes from.

    A script runs until the arguments of a step are not finite or a step was skipped. Exits with 1
    if there is such a value, with 0 if the step is finite, and with 2 if it cannot run.

    Args:
      function: package.module:function, or file.py:function. It takes the description of the
        checkpoint, or nothing, and returns the step and its arguments: a state, and a batch or an
        iterator of batches. With --script: the arguments of the script.
      checkpoint: Checkpoint of the state, or of a tuple of the first arguments, such as a model and
        its optimizer, that are restored.
      step: Its step; by default the latest.
      batches: Largest number of batches.
    """
    if step is not None and checkpoint is None:
        raise JaxmpError("--step requires --checkpoint DIR, such as --checkpoint checkpoints.")
    if script is not None:
        if checkpoint is not None:
            raise JaxmpError(
                "--checkpoint is for functions: the script restores the state itself. Write\n"
                f"    jaxmp locate --script {script}"
            )
        cls, command = jaxmp.typing.NonfiniteReport, [script, *(function or [])]
        report = in_script(cls, "locate", command, json, function=name, max_seconds=max_seconds)
    else:
        (make,) = function or []
        report = _located(make, checkpoint, step, batches)
    _outputs.write_report(report, json, html)
    raise typer.Exit(int(report.reproduced))


def _located(
    function: str, checkpoint: Path | None, step: int | None, batches: int
) -> "NonfiniteReport":
    """Restores the arguments of a step, trains until it fails, and follows the values."""
    checkpointer = info = None
    if checkpoint is not None:
        checkpointer, step = _show.open_run(checkpoint, step)
        info = checkpointer.describe(step)
    example = "jaxmp locate run.py:make_step --checkpoint checkpoints"
    train_step, *arguments = _arguments.make_step(function, example, info, least=2)
    if checkpointer is not None and info is not None:
        count = _count(info, arguments[0])
        if count is None:
            arguments[0] = checkpointer.restore(arguments[0], step=step)
        else:
            arguments[:count] = checkpointer.restore(tuple(arguments[:count]), step=step)
    state, *rest = arguments
    if rest and isinstance(rest[-1], Iterator):
        if len(rest) > 1:
            raise JaxmpError(
                f"{function} returned {len(rest)} states and an iterator of batches. An iterator "
                "requires a single state. Return the batch of the failed step instead:\n"
                "    return train_step, model, optimizer, batch"
            )
        training, rows = f"training with {function}", islice(rest[-1], batches)
        with _progress.busy(training):
            state, rest = _arguments.call(training, lambda: _failing(train_step, state, rows))
    with _progress.busy(f"following the values of {function}"):
        return _arguments.call(
            f"the step of {function}", lambda: jaxmp.locate_nonfinite(train_step, state, *rest)
        )


def _count(info: "jaxmp.checkpoint.CheckpointInfo", first: object) -> int | None:
    """Returns the number of arguments that a checkpoint has as a tuple; None if it has the first.

    The paths of a tuple begin with a number.
    """
    keys = {leaf.path.split("/")[0] for leaf in info.leaves}
    is_tuple = not isinstance(first, (tuple, list)) and all(key.isdecimal() for key in keys)
    return 1 + max(map(int, keys)) if is_tuple and keys else None


def _failing(step: Callable[..., Any], state: Any, batches: Iterator[Any]) -> tuple[Any, list[Any]]:
    """Trains until a step is skipped or not finite, and returns its arguments, or the last ones."""
    from jaxmp._tools.nonfinite import _measure

    batch = next(batches, None)
    if batch is None:
        raise JaxmpError(
            "The iterator has no batches. Return those after the checkpoint:\n"
            "    return train_step, state, iter(batches[info.step:])"
        )
    while True:
        results = step(*_measure.copy_arrays((state, batch)))
        following = next(batches, None)
        if following is None or _measure.has_failed(results):
            return state, [batch]
        state = results[0] if type(results) in (tuple, list) else results
        batch = following


# ---------------------------------------------------------------------------
# Plan
# ---------------------------------------------------------------------------


_PLAN = "jaxmp plan run.py:make_step --recipes bf16,fp8 --targets a100,h100"


def run_plan(
    targets: Annotated[str, typer.Option("--targets", "--target")],
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

    The exit status is 1 if no program fits one of the chips without a warning. A script runs once
    for each recipe, which replaces the one that the script loads with jaxmp.load_recipe.

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
        "recipes": _arguments.split_recipes(recipes),
        "targets": _arguments.split_items(targets),
        "prices": _arguments.split_numbers(price, "--price"),
        "rates": _arguments.split_numbers(rate, "--rate", "h100/bf16=39000"),
        "hosts": hosts,
        "links": _arguments.split_numbers(link, "--link", "between=100e9"),
        "cache": cache or None,
    }
    lists = {"batches": _arguments.split_values(batches), "remat": _arguments.split_values(remat)}
    if script is not None and lists != {"batches": None, "remat": None}:
        raise JaxmpError(f"--batches and --remat require a function:\n    {_PLAN}")
    if script is None:
        (path,) = function or []
        step = _arguments.load_function(path, _PLAN, "train_step, state, batch", "recipe")
        options |= lists
        make = lambda: _arguments.call(f"planning {path}", lambda: jaxmp.plan(step, **options))
    else:
        more = {"function": name, "max_seconds": max_seconds}
        make = lambda: _plan_script([script, *(function or [])], json, options, more)
    advice = "Run the same command to go on from the programs that are stored (--cache)."
    report = _outputs.write_result(make, advice, json, html)
    raise typer.Exit(int(not all(choice.recipe for choice in report.choices)))


def _plan_script(
    command: list[str], json: str | None, options: dict[str, Any], more: dict[str, Any]
) -> "PlanReport":
    """Runs a script once for each recipe, and returns the plan of its step."""
    from jaxmp._tools.plan import PlanReport, check_plan, make_plan

    recipes, _ = check_plan(lambda recipe: recipe, **options)
    if whole := next((recipe.whole for recipe in recipes if recipe.whole), None):
        raise JaxmpError(
            f"The recipe {whole.name!r} has phases, and a script runs its first one. Pass a "
            f"function, which receives each phase:\n    {_PLAN}"
        )
    more |= {name: options[name] for name in ("targets", "hosts", "links", "cache")}
    rows = (
        row
        for recipe in options["recipes"]
        for row in in_script(PlanReport, "plan", command, json, recipe=recipe, **more).rows
    )
    return make_plan(command[0], rows, options["prices"], options["rates"])
