"""Chips on which programs run: memory, bandwidth, formats and peaks, each from a data sheet."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple, TypeAlias

import jax

from jaxmp._core import _compat
from jaxmp._core._messages import did_you_mean
from jaxmp.errors import TargetError

Capability: TypeAlias = tuple[int, int]

# From NVIDIA's documentation of CUDA and cuDNN. 7.5 is the T4, 8.0 the A100, 8.6 the RTX 3090, 8.9
# the L4, L40S and RTX 4090, 9.0 the H100 and 10.0 the B200.
TF32_MATMULS: Capability = (8, 0)
BFLOAT16_MATMULS: Capability = (8, 0)
FUSED_ATTENTION: Capability = (8, 0)
FP8_MATMULS: Capability = (8, 9)
LARGE_ATTENTION_HEADS: Capability = (9, 0)
MX_MATMULS: Capability = (10, 0)


class Multiprocessors(NamedTuple):
    """Properties of an NVIDIA GPU that XLA's compiler reads."""

    # Streaming multiprocessors, and the FP32 lanes of each.
    cores: int
    lanes: int
    clock: float  # GHz, the boost clock
    l2: int  # bytes


class Target(NamedTuple):
    """Chip for which programs are compiled and planned.

    Args:
      name: the name that users write, such as "h200".
      kind: name of the device in JAX, such as "NVIDIA H200 141GB HBM3e".
      platform: "gpu", "tpu" or "cpu".
      memory: bytes of each JAX device.
      bandwidth: bytes per second between each JAX device and its memory.
      peak: dtype -> FLOP/s of dense matmuls with FP32 sums (int8: int32 sums) of each JAX device,
        for the formats that the chip multiplies natively, and "tf32", in which NVIDIA's GPUs
        multiply FP32 by default. TPUs multiply FP32 in one or more passes of bfloat16.
      link: bytes per second between each JAX device and others of the host or the pod, in both
        directions together; 0 for none.
      source: address of the data sheet; memory and bandwidth of a GPU may be those that CUDA
        reports instead.
      uncompiled: the reason why programs cannot be compiled for it; "" if they can.
      capability: compute capability of an NVIDIA GPU.
      multiprocessors: those of an NVIDIA GPU that XLA compiles for.
    """

    name: str
    kind: str
    platform: str
    memory: int
    bandwidth: float
    peak: Mapping[str, float]
    link: float
    source: str
    uncompiled: str = ""
    capability: Capability | None = None
    multiprocessors: Multiprocessors | None = None

    @property
    def native(self) -> tuple[str, ...]:
        """The dtypes that the chip multiplies natively."""
        return tuple(dtype for dtype in self.peak if dtype != "tf32")

    @property
    def rounded_fp32(self) -> str:
        """The format to which matmuls of the default precision round FP32 operands."""
        if self.platform == "tpu":
            return "bfloat16"
        return "tf32" if "tf32" in self.peak else "float32"

    @property
    def usable(self) -> int:
        """The bytes of each device that JAX allocates: by default 75 % of the memory of a GPU."""
        return self.memory * 3 // 4 if self.platform == "gpu" else self.memory


_FORMATS = {"half": ("bfloat16", "float16"), "fp8": ("float8_e4m3fn", "float8_e5m2")}


def _tera(**peaks: float) -> dict[str, float]:
    """Returns peaks in FLOP/s from those in TFLOP/s, with each format of a group of formats."""
    groups = ((_FORMATS.get(name, (name,)), peak) for name, peak in peaks.items())
    return {dtype: peak * 1e12 for dtypes, peak in groups for dtype in dtypes}


_MB, _GB = 2**20, 2**30

# Data sheets: "NVIDIA V100 Tensor Core GPU", "NVIDIA T4 Tensor Core GPU", "NVIDIA A100 Tensor Core
# GPU", "NVIDIA H100 Tensor Core GPU", product pages of the L4, L40S, H200 and HGX B200, for the
# GeForce cards "NVIDIA Ampere GA102 GPU Architecture" and "NVIDIA Ada GPU Architecture", Google's
# pages "System architecture" of each TPU, and "Intel Xeon Platinum 8480+ Processor".
_NVIDIA = "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center"
_IMAGES = "https://images.nvidia.com"
_A100_SHEET = f"{_NVIDIA}/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf"
_AMPERE = "nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf"
_VOLTA = "content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf"
_XEON = "231746/intel-xeon-platinum-8480-processor-105m-cache-2-00-ghz/specifications.html"
_SOURCES = {
    "v100": f"{_IMAGES}/{_VOLTA}",
    "t4": f"{_NVIDIA}/tesla-t4/t4-tensor-core-datasheet-951643.pdf",
    "a100-40": _A100_SHEET,
    "a100": _A100_SHEET,
    "rtx3090": f"https://www.nvidia.com/content/PDF/{_AMPERE}",
    "l4": "https://www.nvidia.com/en-us/data-center/l4/",
    "l40s": "https://www.nvidia.com/en-us/data-center/l40s/",
    "rtx4090": f"{_IMAGES}/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf",
    "h100": "https://resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet",
    "h200": "https://www.nvidia.com/en-us/data-center/h200/",
    "b200": "https://www.nvidia.com/en-us/data-center/hgx/",
    "v5e": "https://docs.cloud.google.com/tpu/docs/v5e",
    "v5p": "https://docs.cloud.google.com/tpu/docs/v5p",
    "v6e": "https://docs.cloud.google.com/tpu/docs/v6e",
    "tpu7x": "https://docs.cloud.google.com/tpu/docs/tpu7x",
    "cpu": f"https://www.intel.com/content/www/us/en/products/sku/{_XEON}",
}

# NVIDIA's data sheets print the peaks of the A100 and later GPUs with 2:4 sparsity, too; these are
# dense. FP32 sums halve the rate of 16-bit and FP8 products on GeForce cards.
_A100 = _tera(float32=19.5, tf32=156, half=312, int8=624)
_HOPPER = _tera(float32=67, tf32=494.7, half=989.4, fp8=1978.9, int8=1978.9)
_PEAKS = {
    "v100": _tera(float32=15.7, float16=125),
    "t4": _tera(float32=8.1, float16=65, int8=130),
    "a100-40": _A100,
    "a100": _A100,
    "rtx3090": _tera(float32=35.6, tf32=35.6, half=71, int8=284),
    "l4": _tera(float32=30.3, tf32=60, half=121, fp8=242.5, int8=242.5),
    "l40s": _tera(float32=91.6, tf32=183, half=362.05, fp8=733, int8=733),
    "rtx4090": _tera(float32=82.6, tf32=82.6, half=165.2, fp8=330.3, int8=660.6),
    "h100": _HOPPER,
    "h200": _HOPPER,
    "b200": _tera(float32=75, tf32=1125, half=2250, fp8=4500, int8=4500, float4_e2m1fn=9000),
    "v5e": _tera(bfloat16=197, int8=393),
    # The page of the v5p has no INT8; the announcement "Cloud TPU v5p and AI Hypercomputer" has it.
    "v5p": _tera(bfloat16=459, int8=918),
    "v6e": _tera(bfloat16=918, int8=1836),
    "tpu7x": _tera(bfloat16=1153.5, fp8=2307),
    # At the base clock of 2 GHz, 64 FLOP per cycle of each of 56 cores in FP32 (AVX-512), and 1,024
    # in bfloat16 (AMX).
    "cpu": _tera(float32=7.168, bfloat16=114.688, int8=229.376),
}

# Name of the device, bytes of memory, bytes per second to the memory and to other chips, and
# compute capability.
_GPUS = {
    "v100": ("NVIDIA V100-SXM2-32GB", 32 * _GB, 900e9, 300e9, (7, 0)),
    "t4": ("NVIDIA T4", 15835660288, 320e9, 32e9, (7, 5)),
    "a100-40": ("NVIDIA A100-SXM4-40GB", 42297786368, 1555e9, 600e9, (8, 0)),
    "a100": ("NVIDIA A100-SXM4-80GB", 85100068864, 2039.04e9, 600e9, (8, 0)),
    "rtx3090": ("NVIDIA GeForce RTX 3090", 24 * _GB, 936e9, 112.5e9, (8, 6)),
    "l4": ("NVIDIA L4", 22 * _GB, 300e9, 64e9, (8, 9)),
    "l40s": ("NVIDIA L40S", 45 * _GB, 864e9, 64e9, (8, 9)),
    "rtx4090": ("NVIDIA GeForce RTX 4090", 24 * _GB, 1008e9, 64e9, (8, 9)),
    "h100": ("NVIDIA H100 80GB HBM3", 84942979072, 3352.32e9, 900e9, (9, 0)),
    "h200": ("NVIDIA H200 141GB HBM3e", 151397597184, 4800e9, 900e9, (9, 0)),
    "b200": ("NVIDIA B200", 191514411008, 7672.32e9, 1800e9, (10, 0)),
}
_A100_CORES = Multiprocessors(108, 64, 1.41, 40 * _MB)
_HOPPER_CORES = Multiprocessors(132, 128, 1.98, 50 * _MB)
_MULTIPROCESSORS = {
    "t4": Multiprocessors(40, 64, 1.59, 4 * _MB),
    "a100-40": _A100_CORES,
    "a100": _A100_CORES,
    "rtx3090": Multiprocessors(82, 128, 1.695, 6 * _MB),
    "l4": Multiprocessors(58, 128, 2.04, 48 * _MB),
    "l40s": Multiprocessors(142, 128, 2.52, 96 * _MB),
    "rtx4090": Multiprocessors(128, 128, 2.52, 72 * _MB),
    "h100": _HOPPER_CORES,
    "h200": _HOPPER_CORES,
    "b200": Multiprocessors(148, 128, 1.965, 132644864),
}
# The same without compute capability. A JAX device of a TPU7x is one of the two cores of a chip.
_OTHERS = {
    "v5e": ("TPU v5 lite", 16 * _GB, 819e9, 400e9),
    "v5p": ("TPU v5", 95 * _GB, 2765e9, 1200e9),
    "v6e": ("TPU v6 lite", 32 * _GB, 1638e9, 800e9),
    "tpu7x": ("TPU7x", 96 * _GB, 3690e9, 600e9),
    # One socket with the largest memory, 8 channels of DDR5-4800.
    "cpu": ("Intel Xeon Platinum 8480+", 4096 * _GB, 307.2e9, 0.0),
}
_UNCOMPILED = {
    "v100": "XLA's compiler for CUDA 13 does not support its compute capability, 7.0",
    "cpu": "XLA compiles for the CPU of this machine only",
}


def _target(name: str) -> Target:
    platform = "gpu" if name in _GPUS else "cpu" if name == "cpu" else "tpu"
    kind, memory, bandwidth, link, *capability = (_GPUS | _OTHERS)[name]
    return Target(
        name=name,
        kind=kind,
        platform=platform,
        memory=memory,
        bandwidth=bandwidth,
        peak=_PEAKS[name],
        link=link,
        source=_SOURCES[name],
        uncompiled=_UNCOMPILED.get(name, ""),
        capability=capability[0] if capability else None,
        multiprocessors=_MULTIPROCESSORS.get(name),
    )


TARGETS = {name: _target(name) for name in _SOURCES}


# Chip -> the words of its device kind, if these are not its name.
_WORDS = {"a100-40": {"a100", "40gb"}, "rtx3090": {"rtx", "3090"}, "rtx4090": {"rtx", "4090"}}


def is_target(chip: Target, kind: str) -> bool:
    """Returns True for a device kind such as "NVIDIA A100-SXM4-80GB".

    A slice of a GPU, "NVIDIA A100-SXM4-80GB MIG 1g.10gb", and the form for laptops have fewer cores
    and less memory.
    """
    if chip.platform != "gpu":
        return kind == chip.kind
    parts = set(re.split(r"[^a-z0-9]+", kind.lower()))
    return _WORDS.get(chip.name, {chip.name}) <= parts and parts.isdisjoint(("mig", "laptop"))


def find_target(kind: str) -> Target | None:
    """Returns the chip of a device kind; None if the table does not have it."""
    return next((chip for chip in TARGETS.values() if is_target(chip, kind)), None)


def target_memory() -> int | None:
    """Returns the bytes of memory of each device of the compile target; None if unknown."""
    chip, local = _compat.current_context().chip, jax.local_devices()[0]
    if chip:
        return TARGETS[chip].memory
    if _compat.target() != _compat.platform_of(local.platform):
        return None
    known = find_target(local.device_kind)
    return known.memory if known else (local.memory_stats() or {}).get("bytes_limit")


def get_target(name: str) -> Target:
    """Returns a chip by its name.

    Raises:
      TargetError: if there is no chip of this name.
    """
    if isinstance(name, str) and name in TARGETS:
        return TARGETS[name]
    lower = str(name).lower()
    if lower in TARGETS:
        raise TargetError(f"target={name!r}: write the chip in lower case: target={lower!r}.")
    known = ", ".join(map(repr, TARGETS))
    raise TargetError(
        f"target={name!r} is not a chip that jaxmp knows.{did_you_mean(lower, TARGETS)} "
        f"Allowed: {known}; for example target='h200'."
    )


@contextlib.contextmanager
def default_target(name: str) -> Iterator[None]:
    """Sets the chip for which programs are traced in a block, whatever devices this machine has.

    Attention kernels, the dtypes of FP8 matmuls and the layouts of their operands depend on the
    chip. By default it is the one that JAX computes on. The block is required for programs that are
    compiled for another one: by `jax.jit(f).trace(...).lower(lowering_platforms=("cuda",))`, or by
    `jax.export`. The chip is part of the key of jit's cache. `jaxmp.audit` compiles for it, unless
    `target=` names another one.

    Args:
      name: the chip, such as "h200"; see `target` of `jaxmp.audit`.

    Raises:
      TargetError: if there is no chip of this name.

    Example:
      >>> dot = jaxmp.fp8.dot_general("current")
      >>> f = jax.jit(lambda x, w: dot(x, w, (((1,), (0,)), ((), ()))))
      >>> x = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)
      >>> with default_target("h200"):
      ...     lowered = f.trace(x, x).lower(lowering_platforms=("cuda",))
      >>> "f8E4M3FN" in lowered.as_text()
      True
    """
    chip = get_target(name)
    with _compat.context(target=chip.platform, capability=chip.capability, chip=name):
        yield


# ---------------------------------------------------------------------------
# Compute capabilities
# ---------------------------------------------------------------------------


def unsupported_gpu(first: Capability) -> str:
    """Describes the GPU that is compiled for if its compute capability is below `first`.

    A compute capability that is unknown, as in cross-compilation, counts as sufficient: the audit
    checks the compiled program.

    Returns:
      For example "NVIDIA A100-SXM4-80GB (compute capability 8.0)"; "" if the GPU supports the
      feature, its compute capability is unknown, or the program is not compiled for a GPU.
    """
    if _compat.target() != "gpu":
        return ""
    capability = _compat.target_capability()
    if capability is None or capability >= first:
        return ""
    context = _compat.current_context()
    is_local = context.target is None
    name = jax.local_devices(backend="gpu")[0].device_kind if is_local else "the target GPU"
    name = f"the GPU {context.chip!r}" if context.chip else name
    return f"{name} (compute capability {capability_text(capability)})"


def capability_text(capability: Capability) -> str:
    """Formats a compute capability as NVIDIA does: "8.9"."""
    return ".".join(map(str, capability))
