"""Roofline of a compiled program: the least time that its kernels take, and the error of ratios."""

from __future__ import annotations

import math
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxmp import _core
from jaxmp._core import Target
from jaxmp._tools.audit import _hlo_collectives, _hlo_matmuls
from jaxmp._tools.audit._compile import Compiled, mesh_of
from jaxmp._tools.audit._hlo import Instruction, Program, Step
from jaxmp._tools.audit._hlo_kernels import accessed, kernels
from jaxmp._tools.audit._hlo_stats import fused_attention
from jaxmp._tools.audit._trace import trace
from jaxmp.errors import AuditError, TargetError

# Seconds to start a kernel, and seconds on a TPU, whose program starts them itself.
_LAUNCH = {"gpu": 2e-6, "tpu": 1e-6}
# Matmuls with a smaller dimension reach less of the peak, most of all in FP8.
_WIDE = 4096
# The shares of the peaks that chips reach, and the measured ratios of recipes, which
# `python benchmarks/plan_checks.py calibrate` writes.
MEASURED = tomllib.loads(Path(__file__).with_name("measured.toml").read_text("utf-8"))


def count_devices(step: Callable[..., Any], args: tuple[Any, ...]) -> int:
    """Returns the number of devices of a step; 0 if its arguments are on several meshes."""
    try:
        mesh = mesh_of(trace(step, args, {}))
    except AuditError:
        return 0
    return 1 if mesh is None else mesh.size


def shares_of(chip: Target) -> dict[str, Any]:
    """Returns the shares of the peaks of a chip.

    They are those of a timed chip with the same peaks, as the H200 has those of the H100; of other
    chips, the default.
    """
    shares, chips = MEASURED["shares"], _core.targets()
    timed = (shares[name] for name in shares if name in chips and chips[name].peak == chip.peak)
    return shares["default"] | next(timed, {})


def error_of(chip: str, narrow: bool, cases: Iterable[dict[str, Any]]) -> tuple[float, float]:
    """Returns the factors by which the ratio of two bounds is to be multiplied for its interval.

    Its half width is the largest logarithm of the measured errors of `cases`, each relative to its
    factor: a ratio of narrow matmuls, or of a chip that was not timed, is less certain. Of n cases
    and a new one of the same kind, each is the largest with a probability of 1 / (n + 1).

    Args:
      chip: name of the target.
      narrow: True if most FLOPs are those of narrow matmuls.
      cases: rows of the file.
    """
    half = _factor(chip, 0 if narrow else _WIDE) * max(
        abs(math.log(case["measured"] / case["bound"])) / _factor(case["chip"], case["width"])
        for case in cases
    )
    return math.exp(-half), math.exp(half)


def _factor(chip: str, width: int) -> float:
    """Returns the factor of the error of a case."""
    factors, timed = MEASURED["factors"], {case["chip"] for case in MEASURED["cases"]}
    return factors["narrow"] ** (width < _WIDE) * factors["untimed"] ** (chip not in timed)


class Cost(NamedTuple):
    """Work of one step on each device.

    Args:
      bound: the roofline in seconds. Ratios of two programs for one chip are meaningful, times are
        not.
      hosts: number of hosts of the devices, or of other domains of links.
      kernels: number of kernels that the step starts.
      flops: dtype in which the chip multiplies -> FLOPs of matmuls, "attention" for fused kernels.
      bytes: "matmuls", "attention", "collectives" or "other" -> bytes that kernels access.
      narrow: True if most FLOPs are those of matmuls with a dimension below 4,096.
    """

    bound: float
    hosts: int
    kernels: int
    flops: dict[str, int]
    bytes: dict[str, int]
    narrow: bool


def cost_of(compiled: Compiled, attention: Iterable[Any], hosts: int | None = None) -> Cost:
    """Returns the cost of a program.

    Each kernel takes the larger of the times of its FLOPs and of its bytes, and the time to start
    it. Communication overlaps with computation. Devices are in the order of their hosts.

    Args:
      compiled: the program.
      attention: its fused kernels, rows of the audit's report.
      hosts: number of hosts of the devices; None for as few as the domain of the chip allows.

    Raises:
      TargetError: if the hosts cannot have as many devices each, or devices of several hosts send
        to each other, and their network is not known.
    """
    program, chip, devices = Program(compiled.text), compiled.chip, compiled.devices
    if hosts:
        if devices % hosts:
            counted = f"{devices} device{'s' * (devices > 1)}"
            raise TargetError(f"{counted} cannot be divided evenly among hosts={hosts}")
        chip = chip._replace(domain=devices // hosts)
    flow = _hlo_matmuls.DataFlow(program)
    flops, moved, shares = Counter[str](), Counter[str](), shares_of(chip)
    seconds, sent, count, narrow = 0.0, 0.0, 0, 0
    for step in kernels(program):
        kind, computing, size = "other", 0.0, 0
        for part in _hlo_matmuls.parts(program, step):
            matmul = _hlo_matmuls.matmul_of_instruction(flow, step, part)
            if matmul is not None:
                kind, dtype = "matmuls", _multiplied_in(matmul.lhs, matmul.rhs, chip)
                flops[dtype] += matmul.flops * step.times
                share = shares.get(dtype, shares["matmuls"])
                computing += matmul.flops / (share * _peak(dtype, chip))
                narrow += matmul.flops * step.times * (_width(part, matmul.flops) < _WIDE)
            elif fused_attention(part.instruction):
                kind = "attention"
            elif name := _hlo_collectives.collective_name(part.instruction):
                kind = "collectives"
                size += sum(shape.bytes for shape in _hlo_collectives.sent_arrays(part))
                passes = 2 if name == "all-reduce" else 1
                sent += passes * size * step.times / _link_of(part.instruction, devices, chip)
        size = size or accessed(program, step)
        moved[kind] += size * step.times
        count += step.times
        if kind != "collectives":
            memory = size / (shares["memory"] * chip.bandwidth)
            seconds += step.times * (max(computing, memory) + _LAUNCH.get(chip.platform, 0.0))
    is_narrow = 2 * narrow > flops.total()
    for row in attention:
        flops["attention"] += row.flops
        seconds += row.flops / _attention_rate(row, chip)
    count_of_hosts = -(-devices // chip.domain)
    return Cost(max(seconds, sent), count_of_hosts, count, dict(flops), dict(moved), is_narrow)


def _link_of(collective: Instruction, devices: int, chip: Target) -> float:
    """Returns the bytes per second that a device sends in a collective."""
    groups = _hlo_collectives.groups_of(collective, devices)
    domains = (np.arange(devices)[None] if groups is None else groups) // chip.domain
    if (domains == domains[:, :1]).all():
        return chip.link / 2 or chip.bandwidth
    if not chip.network:
        raise TargetError(
            f"{devices} devices are {-(-devices // chip.domain)} hosts or pods of {chip.domain}, "
            f"and the network between those of {chip.name!r} is not known: write "
            "links={'between': 100e9}, or --link between=100e9, in bytes per second of each device"
        )
    return min(chip.network, chip.link or chip.network) / 2


def _multiplied_in(lhs: str, rhs: str, chip: Target) -> str:
    """Returns the format in which the chip multiplies, with one name for both formats of FP8."""
    wide = lhs if not lhs.startswith("float8") else rhs
    if wide.startswith("float8"):
        return "float8" if "float8_e4m3fn" in chip.native else "bfloat16"
    return chip.rounded_fp32 if wide == "tf32" else wide


def _width(matmul: Step, flops: int) -> int:
    """Returns the smallest dimension of a matmul: rows, columns, or the contracted axis."""
    shapes = matmul.shape(0), matmul.shape(1), matmul.instruction.shapes[0]
    return min(flops // (2 * max(1, each.elements)) for each in shapes)


def _attention_rate(row: Any, chip: Target) -> float:
    shares, length = shares_of(chip), max(row.shape[1:3])  # larger than the number of heads
    share = shares["attention_backward" if row.phase == "backward" else "attention_forward"]
    share *= 1 if row.shape[-1] > 64 else shares["small_head"]
    return _peak(row.dtype, chip) * share * min(1, length / 8192) ** shares["growth"]


def _peak(dtype: str, chip: Target) -> float:
    name = "float8_e4m3fn" if dtype == "float8" else dtype
    return chip.peak.get(name) or chip.peak.get("float32") or chip.peak["bfloat16"]
