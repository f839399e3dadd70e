"""Descriptions of the GPUs that programs can be compiled for, in the text form of XLA."""

from __future__ import annotations

from typing import NamedTuple

from jaxmp._core._capability import Capability

_DESCRIPTION = """
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  threads_per_core_limit: {threads}
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {block_memory}
  shared_memory_per_core: {core_memory}
  core_count: {cores}
  fpus_per_core: {lanes}
  clock_rate_ghz: {clock}
  l2_cache_size: {l2}
  memory_bandwidth: {bandwidth}
  device_memory_size: {memory}
  cuda_compute_capability {{ major: {major} minor: {minor} {extension} }}
  device_vendor: "NVIDIA Corporation"
  device_address_bits: 64
  pcie_bandwidth: 34359738368
  ecc_enabled: true
  name: "{name}"
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{name}"
"""


class Gpu(NamedTuple):
    """Properties of a GPU, from NVIDIA's data sheets and CUDA's device attributes."""

    name: str
    capability: Capability
    # Streaming multiprocessors, and the FP32 lanes of each.
    cores: int
    lanes: int
    clock: float  # GHz, the boost clock
    l2: int  # bytes
    memory: int  # bytes
    bandwidth: int  # bytes per second

    @property
    def description(self) -> str:
        """The description that XLA's compiler reads."""
        major, minor = self.capability
        threads, core_memory = _MULTIPROCESSORS[self.capability]
        # From Ampere on, the system reserves one kilobyte of the memory of each multiprocessor.
        return _DESCRIPTION.format(
            major=major,
            minor=minor,
            threads=threads,
            core_memory=core_memory,
            block_memory=core_memory - 1024 * (major >= 8),
            extension="feature_extension: ACCELERATED_FEATURES" if major >= 9 else "",
            **self._asdict(),
        )


# Compute capability -> threads and bytes of shared memory of a multiprocessor (CUDA C++ Programming
# Guide, table "Technical specifications per compute capability").
_MULTIPROCESSORS: dict[Capability, tuple[int, int]] = {
    (7, 5): (1024, 65536),
    (8, 0): (2048, 167936),
    (8, 6): (1536, 102400),
    (8, 9): (1536, 102400),
    (9, 0): (2048, 233472),
    (10, 0): (2048, 233472),
}

_MB, _GB = 2**20, 2**30
GPUS = {
    "t4": Gpu("NVIDIA T4", (7, 5), 40, 64, 1.59, 4 * _MB, 15 * _GB, 320 * 10**9),
    "a100-40": Gpu(
        "NVIDIA A100-SXM4-40GB", (8, 0), 108, 64, 1.41, 40 * _MB, 42297786368, 1555 * 10**9
    ),
    "a100": Gpu(
        "NVIDIA A100-SXM4-80GB", (8, 0), 108, 64, 1.41, 40 * _MB, 85100068864, 2039040000000
    ),
    "rtx3090": Gpu(
        "NVIDIA GeForce RTX 3090", (8, 6), 82, 128, 1.695, 6 * _MB, 24 * _GB, 936 * 10**9
    ),
    "l4": Gpu("NVIDIA L4", (8, 9), 58, 128, 2.04, 48 * _MB, 22 * _GB, 300 * 10**9),
    "l40s": Gpu("NVIDIA L40S", (8, 9), 142, 128, 2.52, 96 * _MB, 45 * _GB, 864 * 10**9),
    "rtx4090": Gpu(
        "NVIDIA GeForce RTX 4090", (8, 9), 128, 128, 2.52, 72 * _MB, 24 * _GB, 1008 * 10**9
    ),
    "h100": Gpu(
        "NVIDIA H100 80GB HBM3", (9, 0), 132, 128, 1.98, 50 * _MB, 84942979072, 3352320000000
    ),
    "h200": Gpu(
        "NVIDIA H200 141GB HBM3e", (9, 0), 132, 128, 1.98, 50 * _MB, 151397597184, 4800000000000
    ),
    "b200": Gpu("NVIDIA B200", (10, 0), 148, 128, 1.965, 132644864, 191514411008, 7672320000000),
}
