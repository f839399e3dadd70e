"""Roofline of a compiled program: the least time that its kernels take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from jaxmp._core._targets import Target
from jaxmp._programs._jaxprs import BACKWARD
from jaxmp._tools.audit._compile import Compiled
from jaxmp._tools.audit._hlo_collectives import collective_name, groups_of, sent_arrays
from jaxmp._tools.audit._hlo_matmuls import DataFlow, matmul_of_instruction, parts
from jaxmp._tools.audit._hlo_stats import fused_attention
from jaxmp._tools.hlo import Instruction, Program
from jaxmp._tools.hlo._kernels import accessed, kernels
from jaxmp.errors import TargetError

# Shares of the peaks that matmuls and memory reach on an H100 (torchao,
# `torchao/testing/training/roofline_utils.py`).
_MATMULS, _MEMORY = 0.78, 0.92
# Fused attention, forward and backward: cuDNN on an H200, with 128 features per head and 8,192
# positions (cudnn-frontend, `sdpa_benchmark_training/results/h200_919_only_cudnn`). Shorter
# sequences and smaller heads reach less.
_ATTENTION = {False: 0.65, True: 0.55}
_SMALL_HEAD, _GROWTH = 0.55, 0.2
# Seconds to start a kernel, and seconds on a TPU, whose program starts them itself.
_LAUNCH = {"gpu": 2e-6, "tpu": 1e-6}


class Cost(NamedTuple):
    """Work of one step on each device.

    Args:
      seconds: the roofline. Ratios of two programs for one chip are meaningful, times are not.
      kernels: number of kernels that the step starts.
      flops: dtype in which the chip multiplies -> FLOPs of matmuls, "attention" for fused kernels.
      bytes: "matmuls", "attention", "collectives" or "other" -> bytes that kernels access.
    """

    seconds: float
    kernels: int
    flops: dict[str, int]
    bytes: dict[str, int]


def cost_of(compiled: Compiled, attention: Iterable[Any]) -> Cost:
    """Returns the cost of a program.

    Each kernel takes the larger of the times of its FLOPs and of its bytes, and the time to start
    it. Communication overlaps with computation. Devices are in the order of their domains.

    Args:
      compiled: the program.
      attention: its fused kernels, rows of the audit's report.
    """
    program, chip = Program(compiled.text), compiled.chip
    flow = DataFlow(program)
    flops, moved = Counter[str](), Counter[str]()
    seconds, sent, count = 0.0, 0.0, 0
    for step in kernels(program):
        kind, computing, size = "other", 0.0, 0
        for inside, part in parts(program, step):
            matmul = matmul_of_instruction(flow, step, inside, part)
            if matmul is not None:
                kind, dtype = "matmuls", _multiplied_in(matmul.lhs, matmul.rhs, chip)
                flops[dtype] += matmul.flops * step.times
                computing += matmul.flops / (_MATMULS * _peak(dtype, chip))
            elif fused_attention(part):
                kind = "attention"
            elif collective_name(part):
                kind = "collectives"
                size += sum(shape.bytes for shape in sent_arrays(part, inside))
                passes = 2 if collective_name(part) == "all-reduce" else 1
                sent += passes * size * step.times / _link_of(part, compiled)
        size = size or accessed(program, step)
        moved[kind] += size * step.times
        count += step.times
        if kind != "collectives":
            memory = size / (_MEMORY * chip.bandwidth)
            seconds += step.times * (max(computing, memory) + _LAUNCH.get(chip.platform, 0.0))
    for row in attention:
        flops["attention"] += row.flops
        seconds += row.flops / _attention_rate(row, chip)
    return Cost(max(seconds, sent), count, dict(flops), dict(moved))


def _link_of(collective: Instruction, compiled: Compiled) -> float:
    """Returns the bytes per second that a device sends in a collective.

    Raises:
      TargetError: if devices of several domains take part, and their network is not known.
    """
    chip, devices = compiled.chip, compiled.devices
    groups = groups_of(collective, devices)
    domains = (np.arange(devices)[None] if groups is None else groups) // chip.domain
    if (domains == domains[:, :1]).all():
        return chip.link / 2 or chip.bandwidth
    if not chip.network:
        raise TargetError(
            f"{devices} devices are {-(-devices // chip.domain)} hosts or pods of {chip.domain}, "
            f"and the network between those of {chip.name!r} is not known. Describe it: "
            f"targets=[{{'like': {chip.name!r}, 'network': 100e9}}]."
        )
    return min(chip.network, chip.link) / 2


def _multiplied_in(lhs: str, rhs: str, chip: Target) -> str:
    """Returns the format in which the chip multiplies, with one name for both formats of FP8."""
    wide = lhs if not lhs.startswith("float8") else rhs
    if wide.startswith("float8"):
        return "float8" if "float8_e4m3fn" in chip.native else "bfloat16"
    return chip.rounded_fp32 if wide == "tf32" else wide


def _attention_rate(row: Any, chip: Target) -> float:
    share = _ATTENTION[row.phase == BACKWARD] * (1 if row.shape[-1] > 64 else _SMALL_HEAD)
    length = max(row.shape[1:3])  # larger than the number of heads
    return _peak(row.dtype, chip) * share * min(1, length / 8192) ** _GROWTH


def _peak(dtype: str, chip: Target) -> float:
    name = "float8_e4m3fn" if dtype == "float8" else dtype
    return chip.peak.get(name) or chip.peak.get("float32") or chip.peak["bfloat16"]
