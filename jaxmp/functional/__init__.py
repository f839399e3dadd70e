"""Norms, rotary position embeddings, activations and linear layers for 16-bit models.

Norms and rotary embeddings lose precision if they are computed in 16 bits. The functions accept
16-bit operands, compute in FP32 (float64 for float64 operands), and round once, to the dtype of the
operand. They save the 16-bit operand for the backward pass, with FP32 statistics of size 1 per row,
and never an FP32 copy of the operand. Gradients of FP32 scales and biases are summed in FP32.

Activations have the results of `jax.nn`, and save only their inputs for the backward pass. The
gradients of a linear layer's FP32 parameters are never rounded to 16 bits.

Shape suffixes: ... any dimensions, D features, T positions, N heads, H features of a head.
"""

from jaxmp.functional._activations import gelu as gelu
from jaxmp.functional._activations import silu as silu
from jaxmp.functional._activations import swiglu as swiglu
from jaxmp.functional._linear import linear as linear
from jaxmp.functional._norms import layer_norm as layer_norm
from jaxmp.functional._norms import rms_norm as rms_norm
from jaxmp.functional._rotary import rotary_embedding as rotary_embedding

__all__ = ["gelu", "layer_norm", "linear", "rms_norm", "rotary_embedding", "silu", "swiglu"]
