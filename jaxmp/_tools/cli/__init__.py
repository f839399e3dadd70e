"""The `jaxmp` command. It requires the extra `cli`."""

from jaxmp import _core

try:
    from jaxmp._tools.cli._app import main as main
except ModuleNotFoundError as error:
    package = str(error.name).partition(".")[0]
    if package not in ("rich", "typer"):
        raise
    raise _core.missing_dependency(package, "the jaxmp command", "cli") from None
