"""Command lines of benchmarks, and their results with the command and the versions."""

from __future__ import annotations

import argparse
import importlib
import json
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

PACKAGES = ("jax", "flax", "optax", "ml_dtypes", "jaxmp")


def parser_of(doc: str | None, parts: Iterable[str] = ()) -> argparse.ArgumentParser:
    """Returns a parser with `--out` and, if there are parts, with `--only`."""
    parser = argparse.ArgumentParser(description=(doc or "").split("\n\n")[0])
    parser.add_argument("--out", type=Path, help="a JSON file to write")
    if parts:
        parser.add_argument("--only", nargs="+", choices=list(parts), default=list(parts))
    return parser


def write_result(file: Path | None, **fields: Any) -> None:
    """Writes fields as JSON after the command and the versions, unless `file` is None."""
    if file is None:
        return
    command = shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    versions = {name: importlib.import_module(name).__version__ for name in PACKAGES}
    versions["python"] = platform.python_version()
    text = json.dumps({"command": command, "versions": versions, **fields}, indent=2)
    file.write_text(text + "\n", encoding="utf-8")


def commit_of(folder: Path) -> str:
    """Returns the commit of a checkout, with its date."""
    log = ["git", "-C", str(folder), "log", "-1", "--format=%h of %cs"]
    done = subprocess.run(log, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Returns a table in Markdown."""
    names = list(header)
    lines = [names, ["---"] * len(names), *map(list, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
