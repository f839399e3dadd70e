"""Arguments and outputs that commands share, and the user's functions that they name."""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.util
import inspect
import itertools
import json
import math
import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, TypeVar, get_args

import rich.box
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

import jaxmp
from jaxmp import _core
from jaxmp._core import _compat
from jaxmp._tools.report import _section
from jaxmp._tools.report._views import Interrupted, Report
from jaxmp.errors import JaxmpError

T = TypeVar("T")
R = TypeVar("R", bound=Report)


def _check_seconds(seconds: float) -> float:
    if not 0 < seconds < math.inf:
        raise JaxmpError(f"--max-seconds {seconds} is not a positive number of seconds.")
    return seconds


def _set_share(share: float | None) -> float | None:
    if share is not None:
        if not 0 < share <= 1:
            raise JaxmpError(f"--share {share} is not a share of the memory: write --share 0.95.")
        os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = str(share)
    return share


def _check_target(target: str | None) -> str | None:
    if target is not None:
        _core.get_target(target)
    return target


JsonOption = Annotated[
    str | None,
    typer.Option(
        "--json", metavar="FILE", help="Write the result as JSON; - prints it instead of the text."
    ),
]
HtmlOption = Annotated[
    str | None, typer.Option(metavar="FILE", help="Write the report as an HTML page.")
]
ScriptOption = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="Run a training script, and read the steps that it calls. -m MODULE runs a module.",
    ),
]
NameOption = Annotated[
    str | None,
    typer.Option("--function", metavar="NAME", help="With --script: read only this function."),
]
SecondsOption = Annotated[
    float, typer.Option(callback=_check_seconds, help="With --script: maximum run time of it.")
]
TargetOption = Annotated[
    str | None,
    typer.Option(
        callback=_check_target,
        help="Chip, such as h200 or v6e, or a TOML file that describes one. It does not have to be"
        " present.",
    ),
]
ShareOption = Annotated[
    float | None,
    typer.Option(
        callback=_set_share,
        help="Share of the memory that JAX allocates, by default that of the environment variable"
        " XLA_PYTHON_CLIENT_MEM_FRACTION, or 0.75.",
    ),
]
PathArgument = Annotated[
    Path, typer.Argument(help="Directory of a run, or of one of its steps.", metavar="PATH")
]
StepOption = Annotated[int | None, typer.Option(help="The step; by default the latest.")]
StepArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="FUNCTION | ARGUMENTS...",
        help="package.module:function, or file.py:function. It takes the recipe, or nothing, and"
        " returns the step and its arguments, which may be shapes. With --script: the arguments of"
        " the script; those that are also options of this command go after --.",
    ),
]


def document(function: Callable[..., Any]) -> str:
    """Returns the docstring of a command before `Args:`, and gives its options the help in them."""
    help_, _, rest = inspect.cleandoc(function.__doc__ or "").partition("\nArgs:\n")
    entries = re.findall(r"^  (\w+): (.+?)(?=\n  \w|\Z)", rest, re.DOTALL | re.MULTILINE)
    for name, text in entries:
        hint = function.__annotations__[name]
        plain, option = get_args(hint) if hasattr(hint, "__metadata__") else (hint, typer.Option())
        option = copy.copy(option)
        option.help = " ".join(text.split())
        function.__annotations__[name] = Annotated[plain, option]
    return help_


def only_function(command: str, arguments: list[str] | None, name: str | None) -> str:
    """Returns the name of the function, if it is the only argument of a command without a script.

    Args:
      command: the command.
      arguments: its arguments.
      name: the option `--function`, which is for scripts.

    Raises:
      JaxmpError: if there are other arguments, or none.
    """
    if name is not None:
        raise JaxmpError("--function requires --script, such as --script train.py.")
    arguments = arguments or []
    if len(arguments) == 1:
        return arguments[0]
    raise JaxmpError(
        f"{len(arguments)} arguments instead of 1. Name a function that returns the step, or a "
        f"script:\n    jaxmp {command} my_package.train:make_step\n"
        f"    jaxmp {command} --script train.py"
    )


def check_options(command: str, parameters: Mapping[str, object]) -> None:
    """Checks that there are no unknown options; with a script, they are its options.

    Args:
      command: its name.
      parameters: name -> argument of the command line.

    Raises:
      JaxmpError: with the option of a similar name.
    """
    arguments = parameters.get("function")
    if isinstance(arguments, list) and parameters.get("script") is None:
        known = [f"--{name.replace('_', '-')}" for name in parameters]
        for option in (text.partition("=")[0] for text in arguments if text.startswith("-")):
            hint = _core.did_you_mean(option, known)
            raise JaxmpError(f"unknown option {option}.{hint} jaxmp {command} --help lists all.")


def load_function(
    name: str, example: str, returned: str, parameters: str = ""
) -> Callable[..., Any]:
    """Imports a function that is named on the command line.

    Args:
      name: `package.module:function` or `folder/file.py:function`. Modules are imported from the
        current directory, and files from the directory that contains them.
      example: a command line for error messages.
      returned: what the function returns, as code, for error messages.
      parameters: names of its parameters, for error messages.

    Raises:
      JaxmpError: if the function does not exist, or its module raises an error.
    """
    module_name, colon, function = name.partition(":")
    if not colon or not module_name or not function.isidentifier():
        raise JaxmpError(
            f"{name!r} does not name a function. Write package.module:function or "
            f"file.py:function, such as:\n    {example}"
        )
    file = ""
    if module_name.endswith(".py"):
        file = os.path.abspath(module_name)
        if not os.path.exists(file):
            raise JaxmpError(
                f"The file {module_name!r} does not exist in {os.getcwd()}. Name a file relative to"
                f" this directory, such as:\n    {example}"
            )
    # A parser of arguments in the module reads those of `python file.py`.
    sys.argv = [file or module_name]
    module = call(f"importing {module_name!r}", lambda: _import(file, module_name))
    made = getattr(module, function, None)
    form = f" It has the form:\n    def {function}({parameters}):\n        return {returned}"
    if not callable(made):
        defined = [key for key, value in vars(module).items() if callable(value)]
        hint = _core.did_you_mean(function, defined)
        raise JaxmpError(f"{module_name!r} does not define a function {function!r}.{hint}{form}")
    if parameters and inspect.isfunction(made):
        signature = inspect.signature(made)
        try:
            signature.bind(*parameters.split(", "))
        except TypeError as error:
            raise JaxmpError(f"{name} has the parameters {signature}.{form}") from error
    return made


def _import(file: str, module: str) -> ModuleType:
    """Imports a module by its name from the current directory, or a file by its path."""
    folder = os.getcwd()
    if file:
        folder, name = os.path.split(file)
        module = name.removesuffix(".py")
        while os.path.exists(os.path.join(folder, "__init__.py")):
            folder, package = os.path.split(folder)
            module = f"{package}.{module}"
    sys.path.insert(0, folder)
    if file and module in sys.modules and getattr(sys.modules[module], "__file__", "") != file:
        # Another module has this name, such as `types` or `jax`.
        module = f"{module}.py"
        spec = importlib.util.spec_from_file_location(module, file)
        assert spec is not None and spec.loader is not None
        sys.modules[module] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[module])
        return sys.modules[module]
    return importlib.import_module(module)


def split_items(text: str) -> list[str]:
    """Returns the items of a list with commas, once each and without spaces around them."""
    items = (item.strip() for item in text.split(","))
    return list(dict.fromkeys(item for item in items if item))


def split_recipes(text: str) -> list[str]:
    """Returns the recipes of a list with commas, of which some may be policies: `p=f32,c=bf16`."""
    recipes: list[str] = []
    for item in map(str.strip, text.split(",")):
        key, equals, _ = item.partition("=")
        is_next = bool(recipes) and "=" in recipes[-1] and f"{key}=" not in recipes[-1]
        if equals and is_next and not item.endswith(".toml"):
            recipes[-1] += f",{item}"
        elif item:
            recipes.append(item)
    return list(dict.fromkeys(recipes))


def split_numbers(text: str, option: str, example: str = "h100=2.5") -> dict[str, float]:
    """Returns the numbers of `name=number,...`."""
    numbers = {}
    for item in split_items(text):
        name, _, number = item.partition("=")
        try:
            numbers[name.strip()] = float(number)
        except ValueError:
            raise JaxmpError(
                f"{option} {item!r} is not a number: write {option} {example}."
            ) from None
    return numbers


def split_values(text: str | None) -> Any:
    """Returns the items of a list as numbers, booleans or text; None and "largest" stay as is."""
    named: dict[str, Any] = {"true": True, "false": False}
    items = [named.get(x, int(x) if x.isdecimal() else x) for x in split_items(text or "")]
    return text if text in (None, "largest") else items


def call(description: str, function: Callable[[], T]) -> T:
    """Calls the user's code, and converts its exceptions to errors of one message.

    What it prints goes to standard error: standard output has the result of the command alone.

    Args:
      description: what is called, for the message, such as "importing 'my_package.train'".
      function: the call.

    Raises:
      JaxmpError: with the exception's type, its text, and its line in the user's own file; with
        the text alone if JAX starts on no device.
    """
    try:
        with contextlib.redirect_stdout(sys.stderr):
            return function()
    except JaxmpError:
        raise
    except (Exception, SystemExit) as error:
        reason = f": {error}" if str(error) else ""
        text = f"{description} raised {type(error).__name__}{reason}{_user_line(error)}"
        if isinstance(error, SystemExit) and error.code == 2:
            text += _PARSER
        failure = isinstance(error, (RuntimeError, AssertionError)) and _compat.device_failure()
        if failure:
            text = f"JAX finds no device: {failure}. Run:\n    unset JAX_PLATFORMS"
        raise JaxmpError(text) from error


# Status 2 is that of parsers of arguments.
_PARSER = (
    ". The command passes no arguments to a parser. Give them defaults, or parse them in the script"
    ' alone:\n    if __name__ == "__main__":\n        args = parser.parse_args()'
)


def _user_line(error: BaseException) -> str:
    """Returns the file and line of the last frame in the user's own code; "" if there is none."""
    others = (os.path.dirname(jaxmp.__file__), "<", sys.prefix, sys.base_prefix)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(others)]
    return f" ({os.path.basename(own[-1].filename)}, line {own[-1].lineno})" if own else ""


def make_step(name: str, example: str, *argument: object, least: int = 1) -> tuple[Any, ...]:
    """Calls the user's function, with an argument if it takes one, and returns its result.

    Args:
      name: the function, as in `load_function`.
      example: a command line for error messages.
      *argument: a recipe, or the description of a checkpoint or None; none, to pass nothing.
      least: smallest number of values that the function returns.
    """
    make = load_function(name, example, "train_step, state, batch")
    parameters = inspect.signature(make).parameters
    required = [each for each, p in parameters.items() if p.default is p.empty and p.kind < 2]
    # None, without a checkpoint, does not replace a default.
    argument = argument if required or (parameters and argument != (None,)) else ()
    if missing := ", ".join(required[len(argument) :]):
        raise JaxmpError(
            f"{name} requires {missing}, for which no value is passed. Write a default, or\n"
            f"    {example}"
        )
    made = call(f"{name}()", lambda: make(*argument))
    if not isinstance(made, (tuple, list)) or len(made) < least or not callable(made[0]):
        raise JaxmpError(
            f"{name} returned {type(made).__name__}, not a function and its arguments. Return "
            "them:\n    return train_step, state, batch"
        )
    return tuple(made)


# ---------------------------------------------------------------------------
# Tables, escaped text and files that the commands write
# ---------------------------------------------------------------------------


# Command -> a key that its JSON results have, by which an earlier result is recognized.
_KEYS = {
    **{"recipes": "loss_scale", "show": "policy", "doctor": "problems", "audit": "gemms"},
    **{"memory": "kinds", "plan": "choices", "validate": "compare_steps", "locate": "reproduced"},
    **{"checkpoint show": "leaves", "checkpoint verify": "leaves"},
}
# Columns that are never wrapped.
_WHOLE_COLUMNS = ("operation", "recipe", "policy", "loss scale")


def console() -> Console:
    """Returns a console for standard output. It does not color numbers or paths."""
    return Console(highlight=False)


def escape(text: str, style: str = "") -> Text:
    """Returns text without markup, in which control characters are visible."""
    return Text("\n".join(map(_section.printable, text.split("\n"))), style=style)


def make_table(*columns: str) -> Table:
    """Returns an empty table with a header and without borders."""
    table = Table(box=rich.box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column in _WHOLE_COLUMNS)
    return table


def write_json(file: str | None, value: object) -> bool:
    """Writes the JSON result of a command, and returns True if it replaces the printed text.

    Args:
      file: the argument of `--json`: None, a path, or "-" for standard output.
      value: JSON text, or an object of dicts, lists, strings and numbers.
    """
    if file is None:
        return False
    text = value if isinstance(value, str) else json.dumps(value, indent=1)
    if file == "-":
        print(text)
        return True
    write_file(file, text)
    return False


def write_report(report: Report, json: str | None, html: str | None, *, full: bool = False) -> None:
    """Prints a report, and writes it to the files of `--json` and `--html`."""
    if not write_json(json, report.to_json()):
        # Code is not wrapped, so that it can be pasted.
        console().print(report.to_rich(full=full), soft_wrap=True)
    if html is not None:
        write_file(html, report.to_html(full=full))


def write_result(
    make: Callable[[], R], advice: str, json: str | None, html: str | None, *, full: bool = False
) -> R:
    """Writes the report that a function makes, and returns it; after Ctrl-C, ends the command.

    Args:
      make: the function.
      advice: the message after Ctrl-C.
      json, html, full: as in `write_report`.

    Raises:
      Exit: by Ctrl-C, after the report on what is finished is written.
    """
    try:
        report = make()
    except Interrupted as stop:
        write_report(stop.report, json, html, full=full)
        print(f"Interrupted: {advice}", file=sys.stderr)
        raise typer.Exit(130) from None
    write_report(report, json, html, full=full)
    return report


def check_outputs(command: str, parameters: Mapping[str, object]) -> None:
    """Checks before the work that the outputs of a command can be written.

    Args:
      command: its name.
      parameters: name -> argument of the command line. Files among them are inputs, also as a part:
        `file.py:function`, or one of several recipes.

    Raises:
      JaxmpError: if an output is a directory, or its directory does not exist or is not writable;
        if it would replace an input, another result, or any file but an earlier result.
    """
    passed = {name: value for name, value in parameters.items() if value is not None}
    outputs = {name: str(passed[name]) for name in ("json", "html") if name in passed}
    used: dict[str, str] = {}
    inputs = [value for name, value in parameters.items() if name not in outputs]
    lists = (value if isinstance(value, list) else [value] for value in inputs)
    for text in map(str, itertools.chain.from_iterable(lists)):
        for file in (text, *re.split(r"\s*[,:]\s*", text.strip())):
            used |= {os.path.realpath(file): "an input"} if os.path.isfile(file) else {}
    for name, file in outputs.items():
        if (name, file) == ("json", "-"):
            continue
        path = os.path.realpath(file)
        target = file if os.path.exists(file) else os.path.dirname(path)
        is_name = file not in ("", "-")
        may_be_file = is_name and not os.path.islink(path) and not os.path.isdir(file)
        if not (may_be_file and os.access(target, os.W_OK)):
            raise JaxmpError(
                f"{file!r} cannot be written. Name a file in a directory that exists, and that this"
                " user may write to."
            )
        if path in used:
            raise JaxmpError(
                f"--{name} {file!r} is {used[path]} of this command. "
                f"Write another file: --{name} result.{name}"
            )
        used[path] = f"the --{name}"
        if os.path.isfile(path) and not _is_earlier(command, name, path):
            raise JaxmpError(
                f"--{name} {file!r} exists, and is not an earlier result of jaxmp {command}. "
                f"Remove it, or write another file: --{name} result.{name}"
            )


def _is_earlier(command: str, kind: str, path: str) -> bool:
    """Returns True for an empty file, and for an earlier result of a command.

    Args:
      command: its name.
      kind: "json" or "html".
      path: the file.
    """
    try:
        text = Path(path).read_text("utf-8")
        if not text or kind == "html":
            return not text or (text.startswith("<!doctype html>") and 'class="jaxmp"' in text)
        rows = json.loads(text)
        first = rows[0] if isinstance(rows, list) else rows
        return isinstance(first, dict) and _KEYS[command] in first
    except (OSError, ValueError, IndexError, RecursionError):
        return False


def write_file(file: str, text: str) -> None:
    """Writes a file; a regular one is replaced atomically, through symbolic links.

    Raises:
      JaxmpError: if it cannot be written; an old file is then unchanged.
    """
    try:
        if os.path.exists(file) and not os.path.isfile(file):
            # A device or a FIFO; a FIFO that no process reads is an error.
            descriptor = os.open(file, os.O_WRONLY | os.O_NONBLOCK)
            os.set_blocking(descriptor, True)
            with open(descriptor, "w", encoding="utf-8") as stream:
                stream.write(text)
            return
        path = os.path.realpath(file)
        partial = f"{path}.partial-{os.getpid()}"
        with open(partial, "w", encoding="utf-8") as stream:
            stream.write(text)
        os.replace(partial, path)
    except OSError as error:
        raise JaxmpError(f"{file!r} cannot be written: {error.strerror}.") from None
