"""Names and files of the recipes in the package."""

from __future__ import annotations

import functools
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path


@functools.lru_cache(maxsize=1)
def shipped() -> dict[str, Traversable]:
    """Returns name -> file of the recipes in the package, or next to it in a source checkout."""
    inside = resources.files("jaxmp") / "policies"
    folder = inside if inside.is_dir() else Path(__file__).parents[2] / "policies"
    return {
        entry.name.removesuffix(".toml"): entry
        for entry in folder.iterdir()
        if entry.name.endswith(".toml")
    }


def recipe_names() -> list[str]:
    """Returns the sorted names of the recipes in the package."""
    return sorted(shipped())
