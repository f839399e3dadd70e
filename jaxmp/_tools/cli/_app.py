"""Assembles the commands, and prints errors."""

import inspect
import platform
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import jax
import typer
import typer.core
from rich.console import Console

import jaxmp
from jaxmp._core import _compat
from jaxmp._tools.cli import _show, _steps
from jaxmp._tools.cli._arguments import check_options, document
from jaxmp._tools.cli._outputs import check_outputs, console, escape
from jaxmp.errors import AuditFailedError, JaxmpError, ValidationFailedError

app = typer.Typer(
    help="Mixed precision for JAX and Flax: recipes, and reports on models and training steps.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


class _Command(typer.core.TyperCommand):
    """Command that checks its options and files, and whose summary is not cut."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        own = args[: args.index("--")] if "--" in args else args
        for option in self.params:
            passed = {name for name in (*option.opts, *option.secondary_opts) if name in own}
            if len(passed) > 1:
                both = " and ".join(sorted(passed))
                raise JaxmpError(f"{both} exclude each other. Pass one of them, or neither.")
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        command = ctx.command_path.partition(" ")[2]
        options = (name for each in self.params for name in (*each.opts, *each.secondary_opts))
        check_options(command, ctx.params, options)
        check_outputs(command, ctx.params)
        return super().invoke(ctx)

    def get_short_help_str(self, limit: int = 45) -> str:
        del limit
        return inspect.cleandoc(self.help or "").partition("\n")[0]


_COMMANDS = {
    "recipes": _show.show_recipes,
    "show": _show.show_recipe,
    "doctor": _show.show_doctor,
    "validate": _steps.run_validate,
    "audit": _steps.run_audit,
    "memory": _steps.run_memory,
    "plan": _steps.run_plan,
    "locate": _steps.run_locate,
}
for _name, _function in _COMMANDS.items():
    # With `--script`, other options are those of the script.
    _is_script = _name in ("audit", "memory", "plan", "locate")
    _settings = {"ignore_unknown_options": True} if _is_script else None
    app.command(_name, context_settings=_settings)(_function)
for _registered in (*app.registered_commands, *_show.checkpoint.registered_commands):
    assert _registered.callback is not None
    _registered.cls, _registered.help = _Command, document(_registered.callback)
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
    _compat.hide_plugin_errors()
    try:
        app(args=None if arguments is None else list(arguments), prog_name="jaxmp")
    except (JaxmpError, OSError) as error:
        Console(stderr=True, soft_wrap=True).print(escape(f"Error: {error}", "red"))
        is_failure = isinstance(error, (AuditFailedError, ValidationFailedError))
        raise SystemExit(1 if is_failure else 2) from None
    except SystemExit as stop:
        if stop.code == 130:  # Ctrl-C
            print("Interrupted.", file=sys.stderr)
        raise
