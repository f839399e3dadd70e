"""Names and files of the recipes that are shipped with the package."""

from __future__ import annotations

import functools
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path


@functools.lru_cache(maxsize=1)
def shipped() -> dict[str, Traversable]:
    """Name -> file: inside the installed package, or beside it in a checkout."""
    inside = resources.files("jaxmp") / "policies"
    folder = inside if inside.is_dir() else Path(__file__).parents[1] / "policies"
    return {
        entry.name.removesuffix(".toml"): entry
        for entry in folder.iterdir()
        if entry.name.endswith(".toml")
    }


def recipe_names() -> list[str]:
    """The names of the shipped recipes, sorted."""
    return sorted(shipped())
