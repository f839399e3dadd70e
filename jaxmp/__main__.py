"""The entry point of the `jaxmp` command, which needs the extra `cli`."""

import os
import sys

from jaxmp.errors import MissingDependencyError

# Messages of XLA and libtpu about their own work; the first is the default that JAX sets.
if os.environ.get("TF_CPP_MIN_LOG_LEVEL", "1") == "1":
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ.setdefault("TPU_STDERR_LOG_LEVEL", "3")
os.environ.setdefault("TPU_MIN_LOG_LEVEL", "3")

try:
    os.getcwd()
    from jaxmp._tools.cli import main as run
except FileNotFoundError:
    print("jaxmp: the current directory was deleted. Go to another one: cd ~", file=sys.stderr)
    sys.exit(2)
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
