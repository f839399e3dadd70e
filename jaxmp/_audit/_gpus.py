"""Descriptions of the GPUs that programs can be compiled for, in the text form of XLA."""

from __future__ import annotations

from typing import NamedTuple

_DESCRIPTION = """
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  threads_per_core_limit: 2048
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
  cuda_compute_capability {{ major: {major} {extension} }}
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
    # Major compute capability; the minor one is 0 for all GPUs here.
    major: int
    # Streaming multiprocessors, and the FP32 lanes of each.
    cores: int
    lanes: int
    clock: float  # GHz
    core_memory: int  # bytes of shared memory per multiprocessor
    l2: int  # bytes
    memory: int  # bytes
    bandwidth: int  # bytes per second

    @property
    def description(self) -> str:
        """The description that XLA's compiler reads."""
        extension = "feature_extension: ACCELERATED_FEATURES" if self.major >= 9 else ""
        # The system reserves one kilobyte of the shared memory of each multiprocessor.
        return _DESCRIPTION.format(
            block_memory=self.core_memory - 1024, extension=extension, **self._asdict()
        )


GPUS = {
    "a100": Gpu(
        "NVIDIA A100-SXM4-80GB", 8, 108, 64, 1.41, 167936, 41943040, 85100068864, 2039040000000
    ),
    "h100": Gpu(
        "NVIDIA H100 80GB HBM3", 9, 132, 128, 1.98, 233472, 52428800, 84942979072, 3352320000000
    ),
    "h200": Gpu(
        "NVIDIA H200 141GB HBM3e", 9, 132, 128, 1.98, 233472, 52428800, 151397597184, 4800000000000
    ),
    "b200": Gpu("NVIDIA B200", 10, 148, 128, 1.965, 233472, 132644864, 191514411008, 7672320000000),
}
