"""Runs a script as `python script.py` does, and a tool on the train steps that it compiles.

The option `--script` runs this file in a separate process, by its path. Until the script imports
JAX, only the standard library is loaded, so that the script can set environment variables first.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import json
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any


class _AfterImport(importlib.abc.MetaPathFinder):
    """Import hook that calls functions after modules and the packages importing them are loaded.

    A package such as optax imports JAX before its own names exist, which jaxmp reads.

    Args:
      folders: folders of the script, whose modules may be incomplete while they run.
      callbacks: name of a module -> function to call once.
    """

    def __init__(self, folders: list[str], callbacks: dict[str, Callable[[], None]]) -> None:
        self.folders, self.callbacks = tuple(folders), callbacks
        self.depth = 0
        # Names that are being searched: other finders may call this one.
        self.searched: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not self.callbacks or ("." in fullname and fullname not in self.callbacks):
            return None
        if fullname in self.searched:
            return None
        self.searched.add(fullname)
        try:
            specs = (f.find_spec(fullname, path, target) for f in sys.meta_path if f is not self)
            spec = next((spec for spec in specs if spec is not None), None)
        finally:
            self.searched.discard(fullname)
        loader = None if spec is None else spec.loader
        origin = "" if spec is None else str(spec.origin)
        own = origin.startswith(self.folders) and "-packages" + os.sep not in origin
        if loader is not None and hasattr(loader, "exec_module") and not own:
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                self.depth += 1
                try:
                    execute(module)
                finally:
                    self.depth -= 1
                self.call()

            # Loaders of built-in modules are classes that modules share.
            if not isinstance(loader, type):
                loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def call(self) -> None:
        """Calls the functions of loaded modules."""
        if self.depth == 0:
            for name in [name for name in self.callbacks if name in sys.modules]:
                callback = self.callbacks.pop(name, None)
                if callback is not None:
                    callback()


# Files whose frames a traceback does not have after `python script.py`.
_OWN_FILES = (
    __file__,
    runpy.run_path.__code__.co_filename,
    str(Path(__file__).parents[2] / "_core" / "_compat" / "_watch_jit.py"),
)


def _user_frames(trace: TracebackType | None) -> TracebackType | None:
    """Returns a traceback as `python script.py` prints it, without the frames around the script."""
    first = last = None
    while trace is not None:
        if trace.tb_frame.f_code.co_filename not in _OWN_FILES:
            if last is None:
                first = trace
            else:
                last.tb_next = trace
            last = trace
        trace = trace.tb_next
    return first


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
    sys.meta_path.insert(0, imports)
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
            error = f"exited with status {stop.code}"
    except Exception as failure:
        failure.__traceback__ = _user_frames(failure.__traceback__)
        sys.excepthook(type(failure), failure, failure.__traceback__)
        # The results of the steps before may be zeros, which a script may refuse.
        if not watchers or not watchers[0].has_steps:
            sys.exit(1)
        error = f"raised {type(failure).__name__}"
    if not watchers:
        sys.exit(f"{arguments[0]} {error or 'ended'}, and did not import JAX.")
    watchers[0].finish(error)


if __name__ == "__main__":
    run_child()
