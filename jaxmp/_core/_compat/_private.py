"""Loads private modules of JAX, so that `import jaxmp` works if one of them moves."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any


def load_private(name: str) -> Any:
    """Imports a private module of JAX; returns None if this version does not have it."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None
