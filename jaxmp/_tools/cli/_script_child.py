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
from types import ModuleType
from typing import Any

_OWN_FILES = __file__, runpy.run_path.__code__.co_filename


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
        is_other = "." in fullname and fullname not in self.callbacks
        if not self.callbacks or is_other or fullname in self.searched:
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
        # Loaders of built-in modules are classes that modules share.
        is_shared = isinstance(loader, type)
        if loader is not None and hasattr(loader, "exec_module") and not (own or is_shared):
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                self.depth += 1
                try:
                    execute(module)
                finally:
                    self.depth -= 1
                self.call()

            loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def call(self) -> None:
        """Calls the functions of loaded modules."""
        if self.depth == 0:
            while name := next((name for name in self.callbacks if name in sys.modules), ""):
                self.callbacks.pop(name)()


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
