"""The entry point of the `jaxmp` command, which needs the extra `cli`."""

import sys

from jaxmp.errors import MissingDependencyError

try:
    from jaxmp.cli import main
except MissingDependencyError as error:
    sys.exit(f"jaxmp: {error}")
except KeyboardInterrupt:
    sys.exit("Interrupted.")

if __name__ == "__main__":
    main()
