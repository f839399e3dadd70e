"""Descriptions of the GPUs that programs can be compiled for, in the text form of XLA."""

from __future__ import annotations

from jaxmp._core._capability import Capability
from jaxmp._targets import TARGETS, Target

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

GPUS = {name: target for name, target in TARGETS.items() if target.multiprocessors}


def describe(gpu: Target) -> str:
    """Returns the description that XLA's compiler reads."""
    assert gpu.capability and gpu.multiprocessors
    major, minor = gpu.capability
    threads, core_memory = _MULTIPROCESSORS[gpu.capability]
    # From Ampere on, the system reserves one kilobyte of the memory of each multiprocessor.
    return _DESCRIPTION.format(
        major=major,
        minor=minor,
        threads=threads,
        core_memory=core_memory,
        block_memory=core_memory - 1024 * (major >= 8),
        extension="feature_extension: ACCELERATED_FEATURES" if major >= 9 else "",
        name=gpu.kind,
        memory=gpu.memory,
        bandwidth=round(gpu.bandwidth),
        **gpu.multiprocessors._asdict(),
    )
