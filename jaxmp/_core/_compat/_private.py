"""Loads modules of JAX that may move in another version, or that take long to import."""

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
