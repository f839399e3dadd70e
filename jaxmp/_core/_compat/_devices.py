"""Devices of GPUs that this machine does not have, for cross-compilation."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
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


@contextlib.contextmanager
def unchecked_cuda() -> Iterator[None]:
    """Lets JAX's CUDA plugin start in a block without the libraries that only execution requires.

    JAX checks for cuFFT, cuPTI and cuSPARSE, which compilation does not use, and prints a traceback
    if they are missing.
    """
    name = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
