"""Compiled programs, stored in a folder."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import types
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from jaxmp._core import Target
from jaxmp._tools.audit._compile import compile_lowered
from jaxmp._tools.report._views import replace_file

_COMPILERS = ("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "libtpu")
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
# The fields of `CompiledMemoryStats` that reports use, in bytes on each device.
_SIZES = [f"{name}_size_in_bytes" for name in ("argument", "output", "alias", "temp")]


def folder_of(cache: str | os.PathLike[str] | None) -> Path | None:
    """Returns the folder of a cache, which need not exist; None without one.

    Raises:
      NotADirectoryError: if it is a file.
    """
    path = None
    with contextlib.suppress(RuntimeError):  # A user of a container may have no home directory.
        path = None if cache is None else Path(cache).expanduser()
    if path is not None and path.is_file():
        raise NotADirectoryError(
            f"cache={str(cache)!r} is a file. Name a folder: cache='cache', or None (--cache '')."
        )
    return path


def compiler_of(path: Path | None, chip: Target) -> Callable[[Any, Any], tuple[str, Any]]:
    """Returns a function that compiles a lowered program, or reads its result from a folder.

    The key of a result is the text of the lowered program, the chip without its links, and the
    versions and options of the compilers. A file that cannot be read or written is ignored.

    Args:
      path: None to compile each program.
      chip: the target.
    """
    if path is None:
        return compile_lowered
    described = repr(chip._replace(domain=1, link=0.0, network=0.0))

    def compile_once(lowered: Any, options: Any) -> tuple[str, Any]:
        settings = [described, options, versions_of(_COMPILERS), *map(os.environ.get, _FLAGS)]
        text = json.dumps(settings) + lowered.as_text()
        file = path / hashlib.sha256(text.encode()).hexdigest()
        with contextlib.suppress(OSError, ValueError, zlib.error):
            program, sizes = json.loads(zlib.decompress(file.read_bytes()))
            return program, types.SimpleNamespace(**sizes)
        program, memory = compile_lowered(lowered, options)
        sizes = {name: getattr(memory, name) for name in _SIZES}
        with contextlib.suppress(OSError):
            path.mkdir(parents=True, exist_ok=True)
            replace_file(file, zlib.compress(json.dumps([program, sizes]).encode()))
        return program, memory

    return compile_once


def versions_of(packages: Iterable[str]) -> dict[str, str]:
    """Returns package -> version, of those that are installed."""
    versions = {}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions
