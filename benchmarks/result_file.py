"""Writes the result of a benchmark, with its command and the versions of the packages."""

from __future__ import annotations

import importlib
import json
import platform
import shlex
import sys
from pathlib import Path
from typing import Any

PACKAGES = ("jax", "flax", "optax", "jaxmp")


def write_result(file: Path | None, **fields: Any) -> None:
    """Writes fields as JSON after the command and the versions, unless `file` is None."""
    if file is None:
        return
    command = shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    versions = {name: importlib.import_module(name).__version__ for name in PACKAGES}
    versions["python"] = platform.python_version()
    text = json.dumps({"command": command, "versions": versions, **fields}, indent=2)
    file.write_text(text + "\n", encoding="utf-8")
