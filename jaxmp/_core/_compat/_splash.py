"""JAX's splash attention: kernels of attention for TPUs, written in Pallas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxmp._core._compat._private import load_private

_PACKAGE = "jax.experimental.pallas.ops.tpu.splash_attention"


class SplashAttention(NamedTuple):
    """The parts of JAX's splash attention that jaxmp calls."""

    # The package, with `make_splash_mha`, `BlockSizes`, `SegmentIds` and the masks.
    package: Any
    # Rule of the backward pass, which the package does not export. jaxmp calls it from a rule of
    # its own, because `custom_partitioning` partitions forward and backward pass separately.
    backward: Callable[..., tuple[Any, ...]]


def load_splash_attention() -> SplashAttention | None:
    """Imports splash attention; returns None if this version of JAX does not have it."""
    backward = getattr(
        load_private(f"{_PACKAGE}.splash_attention_kernel"), "_splash_attention_bwd", None
    )
    return None if backward is None else SplashAttention(load_private(_PACKAGE), backward)
