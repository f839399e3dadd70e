"""Runs a script as `python script.py` does, and a tool on the train steps that it compiles.

The option `--script` runs this file in a separate process, by its path. Until the script imports
JAX, only the standard library is loaded, so that the script can set environment variables first.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

_OWN_FILES = __file__, runpy.run_path.__code__.co_filename


class _AfterImport:
    """Import hook that calls functions after modules and the packages importing them are loaded.

    A package such as optax imports JAX before its own names exist, which jaxmp reads.

    Args:
      folders: folders of the script, whose modules may be incomplete while they run.
      callbacks: name of a module -> function to call once.
    """

    def __init__(self, folders: list[str], callbacks: dict[str, Callable[[], None]]) -> None:
        self.folders, self.callbacks = tuple(folders), callbacks
        # Names of the modules that are being loaded, the innermost last.
        self.loading: list[str] = []
        # Statements and functions that import a module call this one, if it is not loaded yet.
        bootstrap = sys.modules["_frozen_importlib"]
        self.load, bootstrap._find_and_load = bootstrap._find_and_load, self.find_and_load

    def find_and_load(self, name: str, import_: Callable[..., ModuleType]) -> ModuleType:
        """Imports a module."""
        self.loading.append(name)
        try:
            module = self.load(name, import_)
        finally:
            self.loading.pop()
        self.call()
        return module

    def call(self) -> None:
        """Calls the functions of loaded modules."""
        if all(map(self.is_own, self.loading)):
            while name := next((name for name in self.callbacks if name in sys.modules), ""):
                self.callbacks.pop(name)()

    def is_own(self, name: str) -> bool:
        """Returns True for a module of the script."""
        spec = getattr(sys.modules.get(name), "__spec__", None)
        origin = str(getattr(spec, "origin", None))
        return origin.startswith(self.folders) and "-packages" + os.sep not in origin


def run_child() -> None:
    """Runs the script of the command line; the process exits after the result is written."""
    options, arguments = json.loads(sys.argv[1]), sys.argv[2:]
    sys.path.append(options["jaxmp"])
    watchers: list[Any] = []

    def watch() -> None:
        script = importlib.import_module("jaxmp._tools.cli._script")
        watchers.append(script.Watcher(**options["watch"]))

    def watch_nnx() -> None:
        importlib.import_module("jaxmp._core._compat._watch_jit").watch_nnx()

    folder = os.path.dirname(os.path.abspath(arguments[0]))
    imports = _AfterImport(
        [os.getcwd() + os.sep, folder + os.sep], {"jax": watch, "flax.nnx": watch_nnx}
    )
    imports.call()
    error = ""
    sys.argv = arguments
    try:
        if options["module"]:
            sys.path[0] = os.getcwd()
            runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = folder
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as stop:
        if stop.code not in (None, 0):
            status = stop.code if isinstance(stop.code, int) else f"1 ({stop.code})"
            error = f"exited with status {status}"
    except Exception as failure:
        # The traceback begins in the script, as after `python script.py`.
        trace = failure.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename in _OWN_FILES:
            trace = trace.tb_next
        failure.__traceback__ = trace
        sys.excepthook(type(failure), failure, trace)
        error = f"raised {type(failure).__name__}"
        if "relative import with no known parent" in str(failure):
            module = os.path.relpath(arguments[0]).removesuffix(".py").replace(os.sep, ".")
            error += f" (run a module of a package with --script -m {module})"
    if watchers:
        watchers[0].finish(error)
    text = f"{arguments[0]} {error or 'ended'}, and did not import JAX."
    with open(options["watch"]["file"], "w", encoding="utf-8") as file:
        json.dump({"error": text}, file)


if __name__ == "__main__":
    run_child()
