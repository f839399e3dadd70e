"""The entry point of the `jaxmp` command, which needs the extra `cli`."""

import sys

from jaxmp.errors import MissingDependencyError

try:
    from jaxmp._tools.cli import main as run
except MissingDependencyError as error:
    print(f"jaxmp: {error}", file=sys.stderr)
    sys.exit(2)


def main() -> None:
    """Runs the command; Ctrl-C ends it with status 130 and one line."""
    try:
        run()
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
