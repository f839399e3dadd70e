"""Assembles the commands, and prints errors."""

import platform
import sys
from collections.abc import Sequence
from typing import Annotated

import jax
import typer
from rich.console import Console

import jaxmp
from jaxmp._tools.cli import _show, _steps
from jaxmp._tools.cli._output import console, escape
from jaxmp.errors import AuditFailedError, JaxmpError, ValidationFailedError

app = typer.Typer(
    help="Mixed precision for JAX and Flax: recipes, and reports on models and training steps.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("recipes")(_show.show_recipes)
app.command("show")(_show.show_recipe)
app.command("doctor")(_show.show_doctor)
app.command("validate")(_steps.run_validate)
# With `--script`, other options are those of the script.
_WITH_SCRIPT = {"ignore_unknown_options": True}
app.command("audit", context_settings=_WITH_SCRIPT)(_steps.run_audit)
app.command("memory", context_settings=_WITH_SCRIPT)(_steps.run_memory)
app.command("plan", context_settings=_WITH_SCRIPT)(_steps.run_plan)
app.command("locate", context_settings=_WITH_SCRIPT)(_steps.run_locate)
app.add_typer(_show.checkpoint, name="checkpoint")


@app.callback(invoke_without_command=True)
def _print_version(
    version: Annotated[bool, typer.Option("--version", help="Print versions and exit.")] = False,
) -> None:
    if version:
        python = platform.python_version()
        console().print(f"jaxmp {jaxmp.__version__} (jax {jax.__version__}, Python {python})")
        raise typer.Exit


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command. An error prints as one red message.

    Args:
      arguments: command-line arguments after `jaxmp`. None: those of the process.

    Raises:
      SystemExit: always. 0: success. 1: an audit or validation failed. 2: any other error. 3: no
        candidate of a validation failed, and one differs from the reference without being worse.
        130: Ctrl-C.
    """
    try:
        app(args=None if arguments is None else list(arguments), prog_name="jaxmp")
    except JaxmpError as error:
        Console(stderr=True, soft_wrap=True).print(escape(f"Error: {error}", "red"))
        is_failure = isinstance(error, (AuditFailedError, ValidationFailedError))
        raise SystemExit(1 if is_failure else 2) from None
    except SystemExit as stop:
        if stop.code == 130:  # Ctrl-C
            print("Interrupted.", file=sys.stderr)
        raise
