"""Describes the GPU, its state and the versions with each result, so that only like is pooled.

Results are pooled if `key_of` their environments is equal: the same device, and the same versions
of Python, JAX, Flax and optax and of the measured code. Driver and other packages are recorded as
well. This module imports no framework.

    JAXMP_GPU_DEVICE    name of the device, instead of the one that the framework reports
"""

import csv
import fnmatch
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
DEVICE = "JAXMP_GPU_DEVICE"
# Their versions decide whether results are pooled.
STACK = ("jax", "jaxlib", "flax", "optax")
OTHERS = ("torch", "torchao", "triton", "qwix", "transformer-engine", "numpy", "jmp")
OTHERS += ("jax-cuda12-plugin", "jax-cuda13-plugin", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13")
OTHERS += ("nvidia-cublas", "nvidia-cublas-cu12")
# Fields of `nvidia-smi --query-gpu`: MHz, watts and degrees Celsius.
FIELDS = ("name", "compute_cap", "driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem")
FIELDS += ("clocks.max.mem", "power.draw", "power.limit", "temperature.gpu", "memory.used")


def environment(device: str) -> dict[str, Any]:
    """Returns a description of this machine.

    Args:
      device: name of the device as JAX or PyTorch report it.
    """
    return {
        "device": os.environ.get(DEVICE, device),
        "versions": {"python": platform.python_version(), **versions_of(STACK), **source()},
        "others": versions_of(OTHERS),
        "host": f"{platform.machine()}, {os.cpu_count()} CPUs, {platform.system()}",
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        # Without directories of this machine.
        "flags": re.sub(r"--\S+=/\S*", "", os.environ.get("XLA_FLAGS", "")).strip(),
        "gpu": gpu_state(),
    }


def key_of(environment: dict[str, Any]) -> str:
    """Returns the name of the results of one device and one set of versions."""
    versions = environment["versions"]
    exact = json.dumps([environment["device"], versions], sort_keys=True)
    words = f"{environment['device']} jax-{versions['jax']}".lower()
    digest = hashlib.sha256(exact.encode()).hexdigest()[:8]
    return re.sub(r"[^a-z0-9.]+", "-", words).strip("-") + f"-{digest}"


def label_of(environment: dict[str, Any]) -> str:
    """Returns device and versions for the title of a table."""
    versions = environment["versions"]
    return f"{environment['device']}, JAX {versions['jax']}, source {versions['source']}"


def versions_of(packages: tuple[str, ...]) -> dict[str, str]:
    """Returns the versions of the packages that are installed."""
    versions = {}
    for name in packages:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


@functools.cache
def source() -> dict[str, str]:
    """Returns the version of jaxmp and a digest of the code that is measured.

    The digest also distinguishes changes that are not committed, and copies without a repository.
    Benchmarks are not part of it: a repaired script continues the results of the others.
    """
    files = [file for name in ("jaxmp", "examples") for file in (ROOT / name).rglob("*.py")]
    files += (ROOT / "policies").glob("*.toml")
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(file.relative_to(ROOT).as_posix().encode() + file.read_bytes())
    text = (ROOT / "jaxmp" / "__init__.py").read_text("utf-8")
    (version,) = re.findall(r'^__version__ = "(.*)"', text, re.M)
    return {"jaxmp": version, "source": digest.hexdigest()[:12]}


def commit() -> str | None:
    """Returns the commit of the working tree, with a mark if files differ; None without one."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


_broken: list[str] = []  # the first error of nvidia-smi, which is then not called again


def gpu_state() -> dict[str, Any]:
    """Returns clocks, power, temperature and driver at this moment, or the reason why not."""
    if not _broken:
        try:
            return _query()
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            message = getattr(error, "stderr", "") or getattr(error, "stdout", "") or str(error)
            _broken.append(f"{type(error).__name__}: {str(message).strip()[:300]}")
    return {"unknown": f"nvidia-smi: {_broken[0]}"}


def _query() -> dict[str, Any]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0]
    command = ["nvidia-smi", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits"]
    command += [f"--id={visible}"] if visible else []
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    (values, *_) = csv.reader(done.stdout.splitlines(), skipinitialspace=True)
    return {name: _number(value) for name, value in zip(FIELDS, values, strict=True)}


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:  # a name, or "[N/A]"
        return text


# ---------------------------------------------------------------------------
# Files
# ---------------------------------------------------------------------------


def write_json(path: Path | None, report: Any) -> None:
    """Writes a file as a whole, so that an interrupted benchmark leaves the previous one."""
    if path is not None:
        write_whole(path, lambda new: new.write_text(json.dumps(report, indent=2) + "\n", "utf-8"))


def write_whole(path: Path, write: Callable[[Path], Any]) -> None:
    """Calls `write` with the path of a temporary file, which then replaces `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(path.name + ".tmp")
    write(new)
    os.replace(new, path)


def earlier_report(path: Path | None, environment: dict[str, Any]) -> dict[str, Any]:
    """Returns the report in a file, to continue it; ends the program if it is of another device."""
    if path is None or not path.exists():
        return {}
    report = json.loads(path.read_text("utf-8"))
    if key_of(report["environment"]) != key_of(environment):
        sys.exit(
            f"{path} has results of {label_of(report['environment'])}, and this is "
            f"{label_of(environment)}. Write to another file."
        )
    return report


def archived(directory: Path, pattern: str) -> list[dict[str, Any]]:
    """Returns the reports in the archives of run_gpu.py in a directory, without rehearsals.

    Args:
      directory: the directory with the archives.
      pattern: name of the reports, such as "step_*.json".
    """
    reports = []
    for archive in sorted(directory.glob("*.tar.gz")):
        with tarfile.open(archive) as tar:
            for member in sorted(tar.getmembers(), key=lambda member: member.name):
                name = Path(member.name)
                file = tar.extractfile(member)
                if file and fnmatch.fnmatch(name.name, pattern) and name.parts[0][:4] != "toy-":
                    reports.append(json.load(file))
    return reports


# ---------------------------------------------------------------------------
# Order, errors
# ---------------------------------------------------------------------------


def rotated(names: list[str], index: int) -> list[str]:
    """Returns the order of a round: each begins one program later, so that drift affects all."""
    start = index % len(names) if names else 0
    return [*names[start:], *names[:start]]


def is_out_of_memory(error: BaseException | str) -> bool:
    """Returns whether an error reports too little memory, which is a result."""
    text = str(error).lower()
    return any(words in text for words in ("resource_exhausted", "out of memory", "out_of_memory"))


def failure(error: BaseException) -> dict[str, Any]:
    """Returns the row of a program that failed; `repeat` if a later run may succeed."""
    lines = [line for line in str(error).strip().splitlines() if line.strip()] or [""]
    row: dict[str, Any] = {"failed": f"{type(error).__name__}: {lines[0]}"[:500]}
    return row if is_out_of_memory(error) else {**row, "repeat": True}
