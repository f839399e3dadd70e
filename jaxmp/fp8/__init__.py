"""FP8 matmuls: scalings, saturating casts, and dots that run on FP8 Tensor Cores.

Other rooms import these modules, each from where it is defined:

- `_scaling`: the settings. `_scaling_table` of the policies reads them from recipes.
- `_dot_general` and `_einsum`: the dots, which layers and `autocast` call.
- `_explain`: the decisions which layers run in FP8.
- `_state`: the state of one layer under delayed scaling. `_overwritten`: the collection of all
  states in a tree, which gradients, optimizers and checkpoints handle.
"""

from jaxmp.fp8._checkpoint import checkpoint_policy
from jaxmp.fp8._dot_general import dot_general
from jaxmp.fp8._einsum import einsum
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
