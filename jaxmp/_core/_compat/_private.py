"""Private functions of Python and modules of JAX that may move in another version."""

from __future__ import annotations

import atexit
import importlib
import importlib.util
import threading
from collections.abc import Callable
from typing import Any


def load_private(name: str) -> Any:
    """Imports a private module of JAX; returns None if this version does not have it."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def call_at_exit(fn: Callable[[], object]) -> None:
    """Calls a function when the program ends, while executors still accept work.

    Functions of `atexit` are called after executors have stopped.
    """
    getattr(threading, "_register_atexit", atexit.register)(fn)
