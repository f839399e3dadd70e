"""Prints the lowest versions that pyproject.toml allows, as arguments of pip, one a line.

    python .ci/lowest.py flax cli examples

Reads `dependencies` and the named extras, and the extras of jaxmp that these name in turn. Each
lower bound, `package>=version`, becomes `package==version`. jaxlib, which jax pins itself to a
range, gets the version of jax.
"""

import re
import sys
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).parent.parent / "pyproject.toml"
BOUND = re.compile(r"(?P<name>[A-Za-z0-9._-]+)(?P<extras>\[[^\]]*\])?>=(?P<version>[0-9.]+)(,.*)?")
OWN = re.compile(r"jaxmp\[([^\]]*)\]")


def lowest(project: dict, extras: list[str]) -> dict[str, str]:
    """Package -> lowest version.

    Raises:
      ValueError: if a requirement has no lower bound.
    """
    pins = {}
    optional = project["optional-dependencies"]
    requirements = [*project["dependencies"], *(r for extra in extras for r in optional[extra])]
    for requirement in requirements:
        own, bound = OWN.fullmatch(requirement), BOUND.fullmatch(requirement)
        if own:
            pins |= lowest({**project, "dependencies": []}, own[1].split(","))
        elif bound:
            pins[bound["name"]] = bound["version"]
        else:
            raise ValueError(f"{requirement!r} in {PYPROJECT} has no lower bound: write name>=1.0")
    if "jax" in pins:
        pins["jaxlib"] = pins["jax"]
    return pins


if __name__ == "__main__":
    pins = lowest(tomllib.loads(PYPROJECT.read_text())["project"], sys.argv[1:])
    print(*(f"{name}=={version}" for name, version in pins.items()), sep="\n")
