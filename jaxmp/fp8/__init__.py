"""FP8 matmuls: scalings, saturating casts, and dots that run on FP8 Tensor Cores."""

from jaxmp.fp8._checkpoint import CHECKPOINT_NAME as CHECKPOINT_NAME
from jaxmp.fp8._checkpoint import checkpoint_policy as checkpoint_policy
from jaxmp.fp8._dot_general import dot_general as dot_general
from jaxmp.fp8._einsum import einsum as einsum
from jaxmp.fp8._eligible import explain_exclusion as explain_exclusion
from jaxmp.fp8._explain import Fp8Explanation as Fp8Explanation
from jaxmp.fp8._explain import LayerDecision as LayerDecision
from jaxmp.fp8._explain import explain as explain
from jaxmp.fp8._kernel_amax import measure_kernels as measure_kernels
from jaxmp.fp8._mlp import mlp as mlp
from jaxmp.fp8._quantize import QuantizationStats as QuantizationStats
from jaxmp.fp8._quantize import compute_scale as compute_scale
from jaxmp.fp8._quantize import dequantize as dequantize
from jaxmp.fp8._quantize import quantization_stats as quantization_stats
from jaxmp.fp8._quantize import quantize as quantize
from jaxmp.fp8._scaling import CurrentScaling as CurrentScaling
from jaxmp.fp8._scaling import DelayedScaling as DelayedScaling
from jaxmp.fp8._scaling import MXScaling as MXScaling
from jaxmp.fp8._scaling import RowwiseScaling as RowwiseScaling
from jaxmp.fp8._scaling import as_scaling as as_scaling
from jaxmp.fp8._state import from_flax as from_flax
from jaxmp.fp8._state import init_state as init_state
from jaxmp.fp8._state import to_flax as to_flax
from jaxmp.fp8._state import to_float32 as to_float32
from jaxmp.fp8._state import to_fm32 as to_fm32
from jaxmp.fp8._stats import with_stats as with_stats
