"""Describes a machine: devices, versions, the recipe that fits, and installation problems."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
import platform
import re
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax

from jaxmp import _core
from jaxmp._core import _compat
from jaxmp._tools.audit._compile import check_compiler
from jaxmp._tools.memory._cache import versions_of
from jaxmp.errors import MissingDependencyError, TargetError

# Packages whose versions belong together or matter for precision.
_PACKAGES = (
    *("jaxmp", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint"),
    *("jax-cuda12-plugin", "jax-cuda12-pjrt", "nvidia-cudnn-cu12"),
    *("jax-cuda13-plugin", "jax-cuda13-pjrt", "nvidia-cudnn-cu13", "libtpu"),
)
# Chips whose compilers are those of their kind.
_COMPILED = {"NVIDIA's GPUs": "h100", "TPUs": "v6e"}
# Lowest driver and compute capability of each major version of CUDA: "Installing JAX" in JAX's
# documentation.
_DRIVERS = {12: 525, 13: 580}
_CAPABILITIES: dict[int, _core.Capability] = {12: (5, 2), 13: (7, 5)}


class Machine(NamedTuple):
    """Facts about a machine and the Python environment that runs there.

    Args:
      versions: package -> version, of the installed packages that JAX and jaxmp use.
      devices: type of a device -> number of them that JAX sees, such as {"NVIDIA H200": 8}.
      platform: "cpu", "gpu" or "tpu", the platform that JAX computes on.
      capability: compute capability of the first NVIDIA GPU that JAX sees.
      cudnn: version of cuDNN that JAX has loaded, such as 91200.
      gpus: names of the NVIDIA GPUs that the driver reports.
      driver: version of NVIDIA's driver, such as "580.65.06"; "" if there is none.
      environment: the environment variables that influence JAX.
      failure: message of JAX if it cannot use any device; "" otherwise.
      libtpu: version of libtpu that the installed JAX requires, such as "0.0.50".
      memory: bytes that JAX may allocate on the first device, as it reports them; 0 if it does not.
      total, clock: bytes of memory and largest clock in GHz of the first GPU, as the driver reports
        them; 0 if it does not.
      compilers: "NVIDIA's GPUs" and "TPUs", for which programs can be compiled here.
    """

    versions: Mapping[str, str]
    devices: Mapping[str, int]
    platform: str
    capability: _core.Capability | None = None
    cudnn: int | None = None
    gpus: tuple[str, ...] = ()
    driver: str = ""
    environment: Mapping[str, str] = {}
    failure: str = ""
    libtpu: str = ""
    memory: int = 0
    compilers: tuple[str, ...] = ()
    total: int = 0
    clock: float = 0.0

    @property
    def chip(self) -> _core.Target | None:
        """The chip that JAX uses, or a GPU that it does not use; None if it is not known."""
        return self.chips[0] if len(self.chips) == 1 else None

    @property
    def chips(self) -> list[_core.Target]:
        """The chips that the device may be, by its name, memory and clock."""
        kinds = (*self.gpus, *self.devices) if self.platform == "cpu" else self.devices
        possible = (_core.possible_targets(kind, self.total, self.clock) for kind in kinds)
        return next(filter(None, possible), [])


class Problem(NamedTuple):
    """Problem of an installation, and the command that repairs it."""

    message: str
    command: str


class MachineReport(NamedTuple):
    """Result of `jaxmp.doctor`; `str(report)` is what the command `jaxmp doctor` prints.

    Args:
      machine: the facts about the machine.
      target: its chip, as in `jaxmp.audit(target=...)`; "" if the table of chips has none, or if
        several chips have this name, memory and clock.
      recipe: name of the recipe that fits the device.
      reason: the reason for this recipe.
      features: feature -> "available", or the reason why it is not available.
      problems: problems of the installation, most important first; empty if there are none.
    """

    machine: Machine
    target: str
    recipe: str
    reason: str
    features: Mapping[str, str]
    problems: tuple[Problem, ...]

    def __str__(self) -> str:
        machine = self.machine
        devices = ", ".join(f"{n} x {name}" for name, n in machine.devices.items()) or "none"
        memory = machine.environment.get(_core.share_variable(machine.environment)) or "0.75"
        rows = {"devices": devices, "python": platform.python_version(), **machine.versions}
        if machine.driver:
            rows["NVIDIA driver"] = machine.driver
        if machine.platform == "gpu":
            rows["share of GPU memory that JAX allocates"] = memory
        if chip := machine.chip:
            peaks = ", ".join(f"{dtype} {peak / 1e12:,.0f}" for dtype, peak in chip.peak.items())
            text = f"{chip.memory / 1e9:.1f} GB at {chip.bandwidth / 1e9:,.0f} GB/s"
            rows[f"target {chip.name!r}"] = f"{text}; TFLOP/s of dense matmuls: {peaks}"
        elif machine.chips:
            text = _core.differences(machine.chips)
            rows["target"] = f"{text}; its kind does not tell them apart"
        elif machine.platform != "cpu" or machine.gpus:
            rows["target"] = "not in the table of chips; describe it as docs/chips.md shows"
        if machine.memory:
            rows["memory that JAX may allocate"] = f"{machine.memory / 1e9:.1f} GB of each device"
        compilers = " and ".join(machine.compilers) or f"none: {_core.install_command('aot')}"
        rows["programs can be compiled for"] = compilers
        rows |= self.features
        rows["recipe"] = f"{self.recipe}: {self.reason}"
        lines = [f"{name}: {text}" for name, text in rows.items()]
        lines += ["", "No problem was found." if not self.problems else "Problems:"]
        for problem in self.problems:
            lines += [f"- {problem.message} Run:", f"    {problem.command}"]
        return "\n".join(lines)


def doctor() -> MachineReport:
    """Describes this machine, the recipe that fits it, and what is wrong with its installation.

    It reads the devices that JAX sees, the versions of the installed packages, and NVIDIA's driver.

    Returns:
      The report; its `problems` are versions that do not belong together, a GPU that JAX does not
      use, and a driver that is too old, each with a command.

    Example:
      >>> report = doctor()
      >>> report.machine.platform in ("cpu", "gpu", "tpu")
      True
      >>> report.recipe in jaxmp.list_recipes()
      True
    """
    return report_of(read_machine())


def read_machine() -> Machine:
    """Reads the facts about this machine."""
    failure = _compat.device_failure()
    devices = [] if failure else jax.devices()
    backend = "cpu" if failure else jax.default_backend()
    memory, compilers = 0, list[str]()
    with contextlib.suppress(RuntimeError, AssertionError, NotImplementedError):
        memory = int((jax.local_devices()[0].memory_stats() or {}).get("bytes_limit", 0))
    for name, chip in _COMPILED.items():
        with contextlib.suppress(MissingDependencyError):
            check_compiler(_core.get_target(chip))
            compilers.append(name)
    required = (text for text in importlib.metadata.requires("jax") or () if "libtpu==" in text)
    prefixes = "JAX_PLATFORMS", "XLA_PYTHON_CLIENT", "XLA_CLIENT", "LD_LIBRARY_PATH", "CUDA_VISIBLE"
    return Machine(
        versions=versions_of(_PACKAGES),
        devices=Counter(device.device_kind for device in devices),
        platform=backend,
        capability=_compat.compute_capability() if backend == "gpu" else None,
        cudnn=_compat.cudnn_version() if backend == "gpu" else None,
        environment={n: text for n, text in os.environ.items() if n.startswith(prefixes)},
        failure=failure,
        libtpu=next((text.partition("==")[2].partition(".*")[0] for text in required), ""),
        memory=memory,
        compilers=tuple(compilers),
        **_nvidia(),
    )


# Starts a process.
@functools.cache
def _nvidia() -> dict[str, Any]:
    """Returns what `nvidia-smi` prints: `gpus`, `driver`, `total` and `clock` of a machine."""
    query = "name,driver_version,memory.total,clocks.max.sm"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    lines: list[str] = []
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        lines = done.stdout.splitlines()
    rows = [line.rsplit(", ", 3) for line in lines if line.count(", ") >= 3]
    _, driver, memory, clock = rows[0] if rows else ("", "", "", "")
    mebibytes, megahertz = (int(x) if x.strip().isdecimal() else 0 for x in (memory, clock))
    gpus = tuple(row[0].strip() for row in rows)
    return {"gpus": gpus, "driver": driver, "total": mebibytes * 2**20, "clock": megahertz / 1000}


def report_of(machine: Machine) -> MachineReport:
    """Makes the report about a machine."""
    recipe, reason = _recipe(machine)
    # A problem of one group may cause those of the next.
    groups = map(tuple, (f(machine) for f in (_driver_problems, _version_problems, _use_problems)))
    problems = next(filter(None, groups), ())
    target = machine.chip.name if machine.chip else ""
    return MachineReport(machine, target, recipe, reason, _features(machine), problems)


def _recipe(machine: Machine) -> tuple[str, str]:
    """Returns the recipe for a device, and the reason for it."""
    chip, capability = machine.chip, machine.capability
    if chip is not None:
        name, formats = chip.kind, chip.native
    elif machine.platform == "cpu":
        return "bf16", (
            "you can check its programs on this machine; a CPU computes most 16-bit operations in "
            "FP32, so that training is faster with `fp32`"
        )
    elif capability is None:
        return "bf16", "the formats of this device are unknown"
    else:
        name = f"compute capability {_core.capability_text(capability)}"
        lowest = {"bfloat16": _core.BFLOAT16_MATMULS, "float8_e4m3fn": _core.FP8_MATMULS}
        formats = tuple(dtype for dtype, first in lowest.items() if capability >= first)
        if capability < _core.TENSOR_CORES:
            # A P100 has twice the FP32 rate in float16 only for sums in float16.
            return "fp32", f"{name} has no Tensor Cores: float16 is no faster, if sums are FP32"
    if "bfloat16" not in formats:
        return "fp16", f"{name} supports fast matmuls in float16, but not in bfloat16"
    if "float8_e4m3fn" not in formats:
        has_others = any(dtype.startswith("float8") for dtype in formats)
        fp8 = "the FP8 format of the recipes, float8_e4m3fn" if has_others else "FP8"
        return "bf16", f"{name} supports fast matmuls in bfloat16, but not in {fp8}"
    return "bf16", f"{name} supports fast matmuls in bfloat16, and in FP8 with the recipe `fp8`"


def _features(machine: Machine) -> dict[str, str]:
    """Returns kernel -> "available", or the reason why it is not available."""
    attention, fp8, chip = "fused attention", "FP8 matmuls", machine.chip
    if machine.platform == "tpu":
        has_fp8 = chip is None or "float8_e4m3fn" in chip.native
        units = "available" if has_fp8 else "no: the chip multiplies FP8 as it does bfloat16"
        return {attention: "available", fp8: units}
    if machine.platform != "gpu":
        why = f"no: JAX computes on a {machine.platform.upper()}"
        why = "no: JAX finds no device" if machine.failure else why
        texts = {attention: why, fp8: why}
        chosen = machine.gpus or "JAX_PLATFORMS" in machine.environment
        if _cuda_versions(machine) and not chosen:
            # The extra `aot`, whose plugin looks for libraries of CUDA that it does not require.
            texts['messages "Unable to load cuFFT"'] = "harmless; stop them: JAX_PLATFORMS=cpu"
        return texts
    if chip is not None and chip.capability is None:
        return dict.fromkeys((attention, fp8), "no: jaxmp knows the kernels of NVIDIA's GPUs only")
    capability = chip.capability if chip else machine.capability
    lowest = {
        attention: _core.FUSED_ATTENTION,
        fp8: _core.FP8_MATMULS,
        "MX matmuls": _core.MX_MATMULS,
    }
    texts = {
        name: f"no: it requires compute capability {_core.capability_text(first)}"
        if capability and capability < first
        else "available"
        for name, first in lowest.items()
    }
    if machine.cudnn is None:
        texts[attention] = "no: JAX finds no cuDNN"
    return texts


def _cuda_versions(machine: Machine) -> list[int]:
    return [n for n in _DRIVERS if f"jax-cuda{n}-plugin" in machine.versions]


def _version_problems(machine: Machine) -> Iterator[Problem]:
    """Yields a problem for each package whose version does not fit the others."""
    versions, installed = machine.versions, _cuda_versions(machine)
    if len(installed) > 1:
        message = "The plugins for CUDA 12 and for CUDA 13 are both installed."
        yield Problem(message, "pip uninstall jax-cuda12-plugin jax-cuda12-pjrt")
    capability = machine.chip.capability if machine.chip else machine.capability
    jaxlib = versions.get("jaxlib", "")
    for n in installed:
        if capability and capability < _CAPABILITIES[n]:
            text = _core.capability_text(capability)
            message = f"CUDA {n} does not support compute capability {text}."
            yield Problem(message, _other_cuda(n, min(_DRIVERS)))
        for package in (f"jax-cuda{n}-plugin", f"jax-cuda{n}-pjrt"):
            version = versions.get(package, "not installed")
            if version.split(".")[:3] != jaxlib.split(".")[:3]:
                command = f'pip install --upgrade "jax[cuda{n}]=={versions["jax"]}"'
                yield Problem(f"{package} is {version}, and jaxlib is {jaxlib}.", command)
    libtpu = versions.get("libtpu", "not installed")
    if machine.platform == "tpu" and not f"{libtpu}.".startswith(f"{machine.libtpu}."):
        message = f"libtpu is {libtpu}, and jax {versions['jax']} requires {machine.libtpu}."
        yield Problem(message, f'pip install "jax[tpu]=={versions["jax"]}"')


def _other_cuda(old: int, new: int) -> str:
    packages = f"jax-cuda{old}-plugin jax-cuda{old}-pjrt"
    return f'pip uninstall {packages}; pip install "jax[cuda{new}]"'


def _newest_cuda(machine: Machine) -> int:
    """Returns the newest version of CUDA that the driver supports; 0 for none."""
    major = re.match(r"\d+", machine.driver)
    return max(
        (n for n, lowest in _DRIVERS.items() if major and int(major[0]) >= lowest), default=0
    )


def _driver_problems(machine: Machine) -> Iterator[Problem]:
    """Yields a problem if the driver is older than the installed CUDA requires."""
    cuda = min(_cuda_versions(machine), default=min(_DRIVERS))
    newest = _newest_cuda(machine)
    if machine.gpus and newest < cuda:
        message = f"NVIDIA's driver {machine.driver} is too old for CUDA {cuda}, which requires "
        message += f"version {_DRIVERS[cuda]} or newer. Install a newer driver"
        message += f", or the plugin for CUDA {newest}." if newest else "."
        yield Problem(message, _other_cuda(cuda, newest) if newest else "nvidia-smi")


def _use_problems(machine: Machine) -> Iterator[Problem]:
    """Yields the problems because of which JAX does not use the GPU or its libraries."""
    try:
        _core.usable_share(machine.environment)
    except TargetError as error:
        yield Problem(str(error), f"export {_core.share_variable(machine.environment)}=0.95")
    if machine.failure:
        message = f"JAX finds no device: {machine.failure.rstrip('.')}."
        yield Problem(message, "unset JAX_PLATFORMS")
    if machine.failure or not machine.gpus:
        return
    install = f'pip install --upgrade "jax[cuda{_newest_cuda(machine)}]"'
    unused = f"JAX does not use the GPU ({machine.gpus[0]})"
    if machine.platform == "gpu":
        if machine.cudnn is None:
            yield Problem("JAX finds no cuDNN.", install)
    elif "cpu" in machine.environment.get("JAX_PLATFORMS", ""):
        yield Problem(f"{unused}: JAX_PLATFORMS is 'cpu'.", "unset JAX_PLATFORMS")
    elif _cuda_versions(machine):
        yield Problem(f"{unused}, although its plugin is installed.", install)
    else:
        yield Problem(f"{unused}: its plugin is not installed.", install)
    if re.search(r"cuda|cudnn", machine.environment.get("LD_LIBRARY_PATH", ""), re.IGNORECASE):
        message = "LD_LIBRARY_PATH names a folder of CUDA, whose libraries replace those of JAX."
        yield Problem(message, "unset LD_LIBRARY_PATH")
