"""Lowest compute capabilities of NVIDIA GPUs that support certain matmuls and kernels.

A compute capability that is unknown, as in cross-compilation, counts as sufficient: the audit
checks the compiled program.
"""

from __future__ import annotations

from typing import TypeAlias

import jax

from jaxmp._core import _compat

Capability: TypeAlias = tuple[int, int]

# From NVIDIA's documentation of CUDA and cuDNN. 7.5 is the T4, 8.0 the A100, 8.6 the RTX 3090, 8.9
# the L4, L40S and RTX 4090, 9.0 the H100 and 10.0 the B200.
TF32_MATMULS: Capability = (8, 0)
BFLOAT16_MATMULS: Capability = (8, 0)
FUSED_ATTENTION: Capability = (8, 0)
FP8_MATMULS: Capability = (8, 9)
LARGE_ATTENTION_HEADS: Capability = (9, 0)
MX_MATMULS: Capability = (10, 0)


def unsupported_gpu(first: Capability) -> str:
    """Describes the GPU that is compiled for if its compute capability is below `first`.

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
    name = f"the GPU {context.chip.name!r}" if context.chip else name
    return f"{name} (compute capability {capability_text(capability)})"


def capability_text(capability: Capability) -> str:
    """Formats a compute capability as NVIDIA does: "8.9"."""
    return ".".join(map(str, capability))
