"""FP8 matmuls: scalings, saturating casts, and dots that run on FP8 Tensor Cores."""

from jaxmp.fp8._checkpoint import checkpoint_policy as checkpoint_policy
from jaxmp.fp8._dot_general import dot_general as dot_general
from jaxmp.fp8._einsum import einsum as einsum
from jaxmp.fp8._scaling import CurrentScaling as CurrentScaling
from jaxmp.fp8._scaling import DelayedScaling as DelayedScaling
from jaxmp.fp8._scaling import MXScaling as MXScaling
from jaxmp.fp8._scaling import RowwiseScaling as RowwiseScaling
from jaxmp.fp8._state import init_state as init_state
from jaxmp.fp8._state import to_float32 as to_float32

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
