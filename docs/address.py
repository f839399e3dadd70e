"""Writes the address of the repository, from pyproject.toml, into the pages with an install line.

python docs/address.py
"""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "docs/get-started.md")
INSTALL = re.compile(r'(?<=@ git\+)https?://[^\s"]+')


def source() -> str:
    """Returns the address of the repository."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    return project["urls"]["Source"]


def is_placeholder(address: str) -> bool:
    """Returns True for an address in the reserved domain `example`."""
    return ".example/" in address


def replace_address(page: str) -> str:
    """Returns the page with the address of pyproject.toml in each install line."""
    return INSTALL.sub(source(), page)


if __name__ == "__main__":
    for name in PAGES:
        path = ROOT / name
        path.write_text(replace_address(path.read_text("utf-8")), "utf-8")
