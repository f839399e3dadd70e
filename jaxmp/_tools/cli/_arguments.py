"""Arguments that commands share, and the user's functions that they name."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import importlib.machinery
import importlib.util
import inspect
import math
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, TypeVar, cast, get_args

import typer

import jaxmp
from jaxmp import _core
from jaxmp._core import _compat
from jaxmp.errors import JaxmpError

T = TypeVar("T")


def _check_seconds(seconds: float) -> float:
    if not 0 < seconds < math.inf:
        raise JaxmpError(f"--max-seconds {seconds} is not a positive number of seconds.")
    return seconds


def _set_share(share: float | None) -> float | None:
    if share is not None:
        if not 0 < share <= 1:
            raise JaxmpError(f"--share {share} is not a share of the memory: write --share 0.95.")
        # JAX accepts only one of the two variables.
        os.environ.pop("XLA_CLIENT_MEM_FRACTION", None)
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
        *("--target", "--targets"),
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


def check_options(command: str, parameters: Mapping[str, object], known: Iterable[str]) -> None:
    """Checks the arguments of a command that reads one function, or a script with its arguments.

    Args:
      command: its name.
      parameters: name -> argument of the command line.
      known: the options of the command.

    Raises:
      JaxmpError: without a script, if there is an unknown option, with the option of a similar
        name; if `--function` is passed; or if the arguments are not one function.
    """
    if parameters.get("script", "") is not None:
        return
    arguments = cast(list[str] | None, parameters["function"]) or []
    for option in (text.partition("=")[0] for text in arguments if text.startswith("-")):
        hint = _core.did_you_mean(option, known)
        raise JaxmpError(f"unknown option {option}.{hint} jaxmp {command} --help lists all.")
    if parameters["name"] is not None:
        raise JaxmpError("--function requires --script, such as --script train.py.")
    problem = f"{len(arguments)} arguments instead of 1"
    script = next((text for text in arguments if text.endswith(".py")), "")
    if [script] == arguments:
        problem = f"{script!r} does not name a function"
    if script or len(arguments) != 1:
        raise JaxmpError(
            f"{problem}. Name a function that returns the step, or a script:\n"
            f"    jaxmp {command} my_package.train:make_step\n"
            f"    jaxmp {command} --script {script or 'train.py'}"
        )


def load_function(
    name: str, example: str, returned: str, parameters: str = ""
) -> Callable[..., Any]:
    """Imports a function that is named on the command line.

    Args:
      name: `package.module:function` or `folder/file.py:function`; a function may also be that of a
        class, `Class.function`. Modules are imported from the current directory, and files from the
        directory that contains them.
      example: a command line for error messages.
      returned: what the function returns, as code, for error messages.
      parameters: names of its parameters, for error messages.

    Raises:
      JaxmpError: if the function does not exist, or its module raises an error.
    """
    module_name, colon, function = name.partition(":")
    *classes, function = function.split(".")
    if not colon or not module_name or not all(map(str.isidentifier, (*classes, function))):
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
    owner = functools.reduce(lambda owner, key: getattr(owner, key, None), classes, module)
    made = getattr(owner, function, None)
    form = f" Write it in this form:\n    def {function}({parameters}):\n        return {returned}"
    if not callable(made):
        defined = [key for key in dir(owner) if callable(getattr(owner, key))]
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
    folder, is_apart, is_library = os.getcwd(), False, False
    if file:
        folder, name = os.path.split(file.removesuffix(".py"))
        module = name
        while os.path.exists(os.path.join(folder, "__init__.py")):
            folder, package = os.path.split(folder)
            module = f"{package}.{module}"
        # `step.v2` cannot be imported by its name, and `types` and `flax` are other modules.
        if module in sys.modules:
            is_apart = getattr(sys.modules[module], "__file__", "") != file
        else:
            is_library = _is_library(module, folder)
        is_apart = is_apart or is_library or "." in name
    # The imports of a file called `flax.py` mean the library.
    sys.path.insert(len(sys.path) if is_library else 0, folder)
    if is_apart:
        module = f"{module}.py"
        spec = importlib.util.spec_from_file_location(module, file)
        assert spec is not None and spec.loader is not None
        sys.modules[module] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[module])
        return sys.modules[module]
    return importlib.import_module(module)


def _is_library(module: str, folder: str) -> bool:
    """Returns True if a module is found outside of a folder and of the current directory."""
    paths = [path for path in sys.path if os.path.abspath(path) not in (folder, os.getcwd())]
    return "." not in module and importlib.machinery.PathFinder.find_spec(module, paths) is not None


def split_items(text: str) -> list[str]:
    """Returns the items of a list with commas, once each and without spaces around them."""
    return list(dict.fromkeys(filter(None, map(str.strip, text.split(",")))))


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
    numbers: dict[str, float] = {}
    for item in split_items(text):
        name, _, number = map(str.strip, item.partition("="))
        if name in numbers:
            raise JaxmpError(f"{option} {text!r} has two numbers for {name}. Write one.")
        try:
            numbers[name] = float(number)
        except ValueError:
            raise JaxmpError(
                f"{option} {item!r} is not a name and its number: write {option} {example}."
            ) from None
    return numbers


def split_values(text: str | None) -> Any:
    """Returns the items of a list as numbers, booleans or text; None and "largest" stay as is."""
    named: dict[str, Any] = {"true": True, "false": False}
    items = [named.get(x.lower(), int(x) if x.isdecimal() else x) for x in split_items(text or "")]
    return "largest" if items == ["largest"] else items if text is not None else None


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
            f"{name} requires {missing}, for which no value is passed. Write a default, or a "
            "function that returns the step and its arguments:\n    def make_step():\n"
            "        return train_step, state, batch"
        )
    made = call(f"{name}()", lambda: make(*argument))
    if not isinstance(made, (tuple, list)) or len(made) < least or not callable(made[0]):
        raise JaxmpError(
            f"{name} returned {type(made).__name__}, not a function and its arguments. Return "
            "them:\n    return train_step, state, batch"
        )
    return tuple(made)
