"""Devices of GPUs that this machine does not have, for cross-compilation."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import math
import os
from collections.abc import Iterator
from typing import Any

from jax.experimental import topologies


def described_gpus(description: str, count: int) -> list[Any]:
    """Returns devices of an NVIDIA GPU for cross-compilation; no such GPU is required.

    Args:
      description: the GPU in XLA's text form.
      count: number of devices, on one host.
    """

    def describe() -> list[Any]:
        text, shape = description, f"1x1x{count}"
        topology = topologies.get_topology_desc("", "cuda", target_config=text, topology=shape)
        return list(topology.devices)

    with unchecked_cuda():
        try:
            return describe()
        except NotImplementedError:
            # Earlier in this process, the plugin failed to start because a library was missing
            # that only execution requires.
            names = [f"jax_plugins.xla_{cuda}" for cuda in ("cuda13", "cuda12")]
            plugin = next(name for name in names if importlib.util.find_spec(name))
            importlib.import_module(plugin).initialize()
            return describe()


def described_tpus(name: str, count: int) -> list[Any]:
    """Returns devices of Google TPUs for cross-compilation; no TPU is required, but libtpu.

    Args:
      name: "v5e", "v5p", "v6e" or "tpu7x".
      count: number of devices.
    """
    # A chip of a TPU7x is two devices.
    chips = -(-count // 2) if name == "tpu7x" else count
    sizes = [1, 1] if name in ("v5e", "v6e") else [1, 1, 1]
    while math.prod(sizes) < chips:
        sizes = sorted([*sizes[1:], sizes[0] * 2])
    # libtpu otherwise asks a server for the TPU of this machine, and refuses a second process.
    with environment(TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1"):
        text = f"{name}:{'x'.join(map(str, sizes))}"
        return list(topologies.get_topology_desc(text, platform="tpu").devices)[:count]


def unchecked_cuda() -> contextlib.AbstractContextManager[None]:
    """Lets JAX's CUDA plugin start in a block without the libraries that only execution requires.

    JAX checks for cuFFT, cuPTI and cuSPARSE, which compilation does not use, and prints a traceback
    if they are missing.
    """
    return environment(JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1")


@contextlib.contextmanager
def environment(**variables: str) -> Iterator[None]:
    """Sets environment variables in a block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, text in before.items():
            if text is None:
                del os.environ[name]
            else:
                os.environ[name] = text
