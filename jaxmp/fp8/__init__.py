"""FP8 matmuls: scalings, saturating casts, and dots that run on FP8 Tensor Cores."""

from jaxmp.fp8._checkpoint import checkpoint_policy
from jaxmp.fp8._dot_general import dot_general, einsum
from jaxmp.fp8._scaling import CurrentScaling, DelayedScaling, MXScaling, RowwiseScaling
from jaxmp.fp8._state import init_state, to_float32

__all__ = [
    "CurrentScaling",
    "DelayedScaling",
    "MXScaling",
    "RowwiseScaling",
    "checkpoint_policy",
    "dot_general",
    "einsum",
    "init_state",
    "to_float32",
]
